"""Two ordinary users and root on one cluster: no rescue executes what another user has written."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually
from slurmft.lab.cluster import Lab
from slurmft.lab.members import Account

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

UNKNOWN_JOB = "4000000"


@dataclass
class Site:
    """A place where every user may keep runs, as /tmp."""

    lab: Lab
    root: Path
    alice: Account
    bob: Account
    earlier: frozenset[str] = frozenset()
    """Jobs that were there before this test, of a first try."""

    def lost_run(self, name: str, owner: Account, job: str = UNKNOWN_JOB) -> Path:
        """A run whose job Slurm has forgotten; its script says as whom it ran."""
        path = self.root / name
        path.mkdir()
        files = {
            "config.yaml": yaml.safe_dump({"command": "x", "run_folder": str(path)}),
            "job.sh": f"#!/bin/bash\n#SBATCH -p low -t 1 -o /dev/null -J {name}\nid -u >> {path}.canary\n",
            "owner.json": json.dumps({"format": 1, "job": job, "restart": 0, "generation": 1, "cluster": "slurm",
                                      "host": "n1", "pid": 1}),
            "jobs.json": json.dumps({"format": 1, "jobs": [job]}),
            "journal.jsonl": json.dumps({"format": 1, "at": "2026-01-01T00:00:00+00:00", "attempt": f"{job}.0.0",
                                         "event": "attempt started", "folder": "/"}) + "\n",
        }  # fmt: skip
        (path / "attempts").mkdir()
        for file, text in files.items():
            (path / file).write_text(text)
            os.utime(path / file, (time.time() - 3600,) * 2)  # what was just written counts as alive
        for each in (path, *path.iterdir()):
            os.chown(each, owner.uid, owner.gid)
        return path

    def rescue(self, run: Callable[..., object]) -> str:
        result = run(["env", f"SLURMFT_RUNS={self.root}", "slurmft", "requeue", "--rescue"], check=False)
        return f"{result.stdout}{result.stderr}"  # type: ignore[attr-defined]

    def jobs(self) -> dict[str, int]:
        """Job name to user id, of all jobs that the accounting and the queue know of these runs."""
        rows = self.lab.run_as_admin(
            ["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hours", "-o", "JobID,JobName,UID"]
        ).stdout
        rows += self.lab.run_as_admin(["squeue", "-h", "-t", "all", "-o", "%A|%j|%U"]).stdout
        found = [row.split("|") for row in rows.splitlines() if row.count("|") == 2]
        ours = ("of-", "forged")
        return {name: int(user) for job, name, user in found if job not in self.earlier and name.startswith(ours)}

    def job_ids(self) -> frozenset[str]:
        return frozenset(
            self.lab.run_as_admin(["squeue", "-h", "-a", "-t", "all", "-o", "%A"]).stdout.split()
        ) | frozenset(
            self.lab.run_as_admin(["sacct", "-a", "-X", "-n", "-P", "-S", "now-1hours", "-o", "JobID"]).stdout.split()
        )

    def ran_as(self, name: str) -> list[int]:
        path = self.root / f"{name}.canary"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def site(lab: Lab) -> Iterator[Site]:
    root = lab.folder / "shared"
    root.mkdir()
    root.chmod(0o1777)
    new = Site(lab, root, Account(lab.user, lab.uid, lab.gid), lab.second_user())
    yield replace(new, earlier=new.job_ids())
    lab.run_as_admin(["scancel", "--user", lab.second_user().name], check=False)
    shutil.rmtree(root)


def test_what_one_user_forges_never_runs_as_another_or_as_root(site: Site) -> None:
    lab, alice, bob = site.lab, site.alice, site.bob
    own_job = lab.run(["sbatch", "--parsable", "-H", "-p", "low", "-o", "/dev/null", "--wrap", "true"]).stdout.strip()
    forged = site.lost_run("forged-run", bob)
    site.lost_run("forged-of-her-job", bob, own_job)  # which waits, and a rescue would let it begin
    (site.root / "forged-link").symlink_to(forged)
    os.chown(site.root / "forged-link", bob.uid, bob.gid, follow_symlinks=False)
    told = site.rescue(lab.run)
    assert f"left alone: 3 folders of other users (only their owners may rescue them): {bob.name}: forged-link" in told
    assert (site.jobs(), site.ran_as("forged-run")) == ({}, [])

    genuine = site.lost_run("of-alice", alice)
    told = site.rescue(lab.run_as_admin)
    assert f"{alice.name}: job {UNKNOWN_JOB} of run of-alice is gone" in told
    eventually(lambda: site.ran_as("of-alice"), PATIENCE_S, lambda: f"her run as her job: {told} {site.jobs()}")
    assert site.ran_as("of-alice") == [alice.uid]
    eventually(
        lambda: site.ran_as("forged-run"), PATIENCE_S, "what bob wrote runs as bob's, which he can have without root"
    )
    assert set(site.ran_as("forged-run") + site.ran_as("forged-of-her-job")) == {bob.uid}
    assert {name: user for name, user in site.jobs().items() if user not in (alice.uid, bob.uid)} == {}
    assert site.jobs()["of-alice"] == alice.uid
    assert site.jobs()["forged-run"] == bob.uid
    assert "JobHeldUser" in lab.run(["squeue", "-h", "-j", own_job, "-o", "%r"]).stdout, "bob cannot release it"
    lab.run(["scancel", own_job])
    assert (genuine / "journal.jsonl").stat().st_uid == alice.uid, "root has written nothing"

    for run, verb in ((lab.run, "join"), (lab.run_as_admin, "stop")):
        refused = run(["slurmft", verb, str(forged)], check=False)
        assert (refused.returncode, "not to you" in refused.stderr) == (2, True), refused.stderr
    lab.run_as_admin(["slurmft", "explain", str(forged)])


@pytest.mark.long
def test_roots_sweep_brings_a_users_run_back_as_that_user(site: Site, new_run: Callable[..., Run]) -> None:
    lab = site.lab
    run = new_run(nodes=1, nproc_per_node=1, delay=0.3)
    job = run.reach(3)
    host = lab.run(["squeue", "-h", "-j", job, "-o", "%B"]).stdout.strip()
    lab.run_on_as_admin(host, ["pkill", "-KILL", "-f", "[s]lurmft run "])
    run.wait_until_out_of_queue(job)
    argv = ["env", f"SLURMFT_RUNS={run.path.parent}", "slurmft", "sweep", "--file", str(site.root / "list.json"),
            "--json"]  # fmt: skip
    report = json.loads(lab.run_as_admin(argv, check=False).stdout)
    assert report["rescued"] >= 1, report
    assert any(line.startswith(f"{lab.user}: job {job} of run {run.path.name} is gone") for line in report["done"])
    run.wait_for("attempt started", 2)
    assert {path.stat().st_uid for path in [run.path, *run.path.rglob("*")]} == {lab.uid}, "root has written nothing"
    assert lab.run_as_admin(["squeue", "-h", "-j", job, "-o", "%U"]).stdout.strip() == str(lab.uid)
