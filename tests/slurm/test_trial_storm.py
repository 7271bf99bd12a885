"""A sweep, and an array, on a cluster that takes few jobs of a user; in a storm each result once, and few requests.

``make soak-trials TRIALS=10000 EVENTS=1000`` writes what has come of it into bench/results/trials.md.
"""

import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import PATIENCE_S, eventually
from slurm.test_sites import accounts
from slurm.test_trials import NewSweep, SweepRun, new_sweep
from slurmft.errors import LabError
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

__all__ = ["new_sweep"]

TRIALS, EVENTS = (
    int(os.environ.get(f"SLURMFT_SOAK_{name}", count)) for name, count in (("TRIALS", 10_000), ("EVENTS", 1000))
)
SEED = int(os.environ.get("SLURMFT_SOAK_SEED", "1"))
RESULTS = os.environ.get("SLURMFT_SOAK_RESULTS", "")

pytestmark = pytest.mark.slurm

JOBS, PER_NODE, MOST_JOBS = 4, 2, 20
CRON_S = 15.0
"""After so long without a result a user says `slurmft requeue` to a job in Slurm's own delay of two minutes, and
`requeue --rescue` looks at any other one, as cron does every few minutes."""

Undo = Callable[[], object]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if (reason := Lab.availability(accounting=True)) is not None:
        pytest.skip(reason)
    folder = Path(f"/var/lib/slurmft-lab-few-jobs-{os.getpid()}")
    lines = ("AccountingStorageEnforce=associations,limits,qos",)
    try:
        lab = Lab.up(LabSettings(folder=folder, nodes=JOBS + 1, accounting=True, kill_wait_s=5, grace_s=8,
                                 slurmd_timeout_s=8, lines=lines))  # fmt: skip
        accounts(lab, "add", "account", "lab")
        accounts(lab, "add", "user", lab.user, "account=lab", f"MaxSubmitJobs={MOST_JOBS}")
        yield lab
    finally:
        cluster.purge(folder)


class Strikes:
    """What can happen to a sweep, and how it is undone. Slurm is asked as the administrator, whom nothing counts."""

    def __init__(self, run: SweepRun, seed: int) -> None:
        self.run, self.lab, self.chance = run, run.lab, random.Random(seed)
        self.counts = Counter[str]()
        self.undone: list[tuple[float, Undo]] = []
        self.follower: subprocess.Popen[bytes] | None = None
        self.most_jobs = self.resumed = 0
        self.looked_s = time.monotonic()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Name and node of each job that runs."""
        argv = ["squeue", "-h", "-u", self.lab.user, "-o", "%i|%j|%N|%t"]
        told = self.lab.run_as_admin(argv, check=False).stdout.split()
        self.most_jobs = max(self.most_jobs, len(told))
        rows = [line.split("|") for line in told]
        return {job: (name, node) for job, name, node, state in rows if state == "R" and node}

    def own_job_waits(self) -> bool:
        argv = ["squeue", "-h", "-u", self.lab.user, "-t", "PD", "-o", "%j"]
        names = self.lab.run_as_admin(argv, check=False).stdout.split()
        return any(not name.startswith("lend-") for name in names)

    def strike(self) -> str:
        """Let something happen."""
        jobs = self.jobs()
        pilots = sorted(job for job, (name, _) in jobs.items() if name.startswith("lend-"))
        own = next((job for job, (name, _) in jobs.items() if not name.startswith("lend-")), None)
        lab, admin = self.lab, self.lab.run_as_admin
        kinds: dict[str, tuple[int, Callable[[str], object]]] = {
            "a pilot is preempted": (4, lambda job: self.preempt(jobs[job][1])),
            "a pilot is cancelled": (4, lambda job: admin(["scancel", job], check=False)),
            "a pilot is requeued": (4, lambda job: admin(["scontrol", "requeue", job], check=False)),
            "an agent is killed": (4, lambda job: self.kill(jobs[job][1], f".*slurmft agent {self.run.path}")),
            "a driver is killed": (3, lambda job: self.kill(jobs[job][1], ".*slurmft.agent.zygote")),
            "the supervisor is killed": (3, lambda _: self.kill_supervisor()),
            "a node loses power": (2, lambda job: self.take_away(jobs[job][1], lab.kill_node, lab.start_node)),
            "a node is cut off": (2, lambda job: self.take_away(jobs[job][1], lab.partition, lab.heal)),
            "the run's job is requeued": (1, lambda _: admin(["scontrol", "requeue", own], check=False)),
            "the run's job is preempted": (1, lambda _: self.preempt(jobs[own][1])),
            "the submitting process is killed": (1, lambda _: self.follow()),
        }  # fmt: skip
        of_run = {kind for kind in kinds if "pilot" not in kind}
        able = [kind for kind in kinds if (kind in of_run and own) or (kind not in of_run and pilots)]
        if self.undone:
            able = [kind for kind in able if "a node" not in kind]
        if not able:
            return ""
        kind = self.chance.choices(able, [kinds[each][0] for each in able])[0]
        anywhere = [*pilots, own] if kind in of_run else pilots
        kinds[kind][1](self.chance.choice(anywhere))
        self.counts[kind] += 1
        return kind

    def preempt(self, node: str) -> None:
        options = ["-p", "high", "-w", node, "--exclusive", "-t", "1", "-o", "/dev/null"]
        argv = ["sbatch", *options, "--wrap", "sleep 1"]
        self.lab.run_as_admin(argv, check=False, cwd=self.lab.home)

    def kill(self, node: str, pattern: str) -> None:
        if pids := self.run.pids_of(node, pattern):
            self.lab.run_on_as_admin(node, ["kill", "-KILL", self.chance.choice(pids)], check=False)

    def kill_supervisor(self) -> None:
        if (owner := self.run.folder.owner()) is not None:
            self.lab.run_on_as_admin(owner.host, ["kill", "-KILL", str(owner.pid)], check=False)

    def take_away(self, node: str, take: Callable[[str], object], give_back: Callable[[str], object]) -> None:
        take(node)
        self.undone.append((time.monotonic() + self.chance.uniform(3, 15), lambda: give_back(node)))

    def resume(self) -> None:
        """As an administrator: Slurm drains a node that was cut off while its job began again ("Duplicate jobid")."""
        self.looked_s = time.monotonic()
        told = self.lab.run_as_admin(["sinfo", "-h", "-N", "-t", "drain", "-o", "%N"], check=False).stdout.split()
        for node in sorted({*told}):
            self.resumed += 1
            self.lab.run_as_admin(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)

    def undo(self, *, everything: bool = False) -> None:
        if time.monotonic() - self.looked_s > 10 * CRON_S:
            self.resume()
        for due_s, undo in list(self.undone):
            if everything or time.monotonic() > due_s:
                try:
                    undo()
                except LabError:  # Slurm is still busy with that node
                    continue
                self.undone.remove((due_s, undo))

    def kill_follower(self) -> None:
        if self.follower is not None:
            self.follower.kill()
            self.follower.wait()

    def follow(self) -> None:
        """Kill the process that waits for the sweep, and begin another one."""
        self.kill_follower()
        argv, environment = self.lab.command(self.run.counting("slurmft", "trials", str(self.run.config), "--wait"))
        null = subprocess.DEVNULL
        self.follower = subprocess.Popen(argv, env=environment, stdin=null, stdout=null, stderr=null)


def step_of(run: SweepRun) -> int:
    return (run.folder.progress() or {}).get("step") or 0


def users_requests(lab: Lab) -> int:
    """How many the controller has had of the lab's user since its numbers were reset."""
    text = lab.run_as_admin(["sdiag"]).stdout.partition("by user")[2]
    found = re.search(rf"^\s*{lab.user}\s*\(\s*{lab.uid}\)\s+count:(\d+)", text, re.M)
    return int(found[1]) if found else 0


ARRAY = """
import sys
from slurmft import Executor as AutoExecutor

executor = AutoExecutor(folder=sys.argv[1])
executor.update_parameters(timeout_min=10, slurm_partition="low", cpus_per_task=1)
jobs = executor.map_array(lambda x: x**2, range(60))
print([job.result() for job in jobs] == [x**2 for x in range(60)], {job.state for job in jobs})
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_array_of_more_calls_than_slurm_takes_jobs(lab: Lab, left_idle: None) -> None:
    """It goes on with the jobs that there may be; two of them, or more, share a node."""
    accounts(lab, "modify", "user", lab.user, "set", "MaxSubmitJobs=3")
    try:
        argv, environment = lab.command([sys.executable, "-c", ARRAY, str(lab.home / f"array-{time.time_ns()}")])
        pipe, jobs = subprocess.PIPE, set[str]()
        with subprocess.Popen(argv, env=environment, stdout=pipe, stderr=pipe, text=True) as program:
            while program.poll() is None:
                time.sleep(0.5)
                told = lab.run_as_admin(["squeue", "-h", "-u", lab.user, "-o", "%i"], check=False).stdout.split()
                jobs |= {*told}
                assert len(told) <= 3
            assert program.stdout is not None and program.stderr is not None
            assert program.stdout.read().split("\n")[0] == "True {'COMPLETED'}", program.stderr.read()
        assert 1 < len(jobs) <= 5
    finally:
        accounts(lab, "modify", "user", lab.user, "set", f"MaxSubmitJobs={MOST_JOBS}")


@pytest.mark.soak
@pytest.mark.timeout(600 + 60 * EVENTS)
def test_every_result_once_in_a_storm(lab: Lab, new_sweep: NewSweep) -> None:
    phase = max(1, TRIALS // EVENTS)
    count = phase * EVENTS
    given = [{"x": x, "phase": x // phase} for x in range(count)]
    run = new_sweep({"per_node": PER_NODE, "max_jobs": JOBS})
    path = run.config.parent / "trials.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    run.configure(trials={"file": str(path)})
    lab.run_as_admin(["sdiag", "-r"])
    run.submit()
    run.wait_for_nodes(count=JOBS)
    strikes, began_s, rescued = Strikes(run, SEED), time.monotonic(), 0
    for event in range(EVENTS):
        eventually(strikes.strike, PATIENCE_S, run.story)
        run.go(event)
        wanted, moved_s, looked_s, before = phase * (event + 1) - JOBS * PER_NODE, time.monotonic(), 0.0, -1
        while (step := step_of(run)) < wanted:
            strikes.undo()
            now_s = time.monotonic()
            if step != before:
                moved_s, before = now_s, step
            if now_s - moved_s > CRON_S and now_s - looked_s > CRON_S:
                looked_s, rescued = now_s, rescued + 1
                how = [] if strikes.own_job_waits() else ["--rescue"]
                lab.run(run.counting("slurmft", "requeue", *how, str(run.path)), check=False, timeout=120)
            assert now_s - moved_s < 2 * PATIENCE_S, f"stuck after {strikes.counts}\n{run.story()}"
            time.sleep(0.1)
    strikes.undo(everything=True)
    strikes.kill_follower()
    run.wait_until_done(4 * PATIENCE_S)
    seconds = time.monotonic() - began_s

    found = run.rows()
    assert [row["parameters"] for row in found] == given
    assert {row["state"] for row in found} == {"done"}, [row for row in found if row["state"] != "done"][:5]
    assert [row["result"] for row in found] == [x**2 for x in range(count)]
    assert len({row["trial"] for row in found}) == count
    starts, ends = ([len((Path(row["folder"]) / name).read_text()) for row in found] for name in ("starts", "ends"))
    eventually(lambda: not strikes.jobs(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 60, run.story)
    assert strikes.most_jobs <= MOST_JOBS, "with those of the storm"
    requests = run.requests()
    rows = [
        f"{count:,} trials of 0.1 s, {JOBS} jobs of {PER_NODE} at a time, MaxSubmitJobs={MOST_JOBS}; "
        f"{sum(strikes.counts.values())} events, seed {SEED}, {seconds:.0f} s, "
        f"{os.cpu_count()} cores, {platform.system()}.", "",
        "| event | times |", "|---|---|", *(f"| {kind} | {times} |" for kind, times in sorted(strikes.counts.items())),
        "",
        "| result | |", "|---|---|",
        f"| trials with their right result, each once | {count:,} of {count:,} |",
        "| stuck, or without a result | 0 |",
        f"| tries that were begun | {sum(starts):,}: {sum(starts) - count} again, {sum(ends) - count} ended again |",
        f"| `slurmft requeue`, by hand or by cron, after {CRON_S:.0f} s without a result | {rescued} |",
        f"| commands of Slurm that slurmft has run | {', '.join(f'{key} {n}' for key, n in requests.most_common())} |",
        f"| those in ten seconds | {10 * sum(requests.values()) / seconds:.2f}, "
        f"for each event {sum(requests.values()) / max(1, EVENTS):.2f} |",
        f"| squeue in ten seconds | {10 * requests['squeue'] / seconds:.2f} |",
        f"| nodes that Slurm had drained (`Duplicate jobid`), resumed by the administrator | {strikes.resumed} |",
        f"| RPCs of the user (sdiag), those of srun and sbatch included | {users_requests(lab)} |",
        f"| starts of the run's supervisor | {len(run.events('attempt started'))} |",
    ]  # fmt: skip
    print("\n".join(rows))
    if RESULTS:
        path, command = Path(RESULTS), f"make soak-trials TRIALS={TRIALS} EVENTS={EVENTS}"
        parts = re.split(r"(?m)^(?=## )", path.read_text() if path.exists() else "# Trials\n\n")
        section = "\n".join(["## A storm", "", f"`{command}`", "", *rows, "", ""])
        path.write_text(
            "".join(part for part in parts if not part.startswith("## A storm")).rstrip() + "\n\n" + section
        )
    assert requests["squeue"] <= seconds / 10 + 2 * EVENTS, requests
