"""Settings of sites that the other tests' cluster does not have: what is hidden, rewritten, refused, limited, reserved.

Two clusters, one after the other: one without accounting, whose plug-in rewrites jobs, and whose nodes have odd names
and are hidden from users; and one whose accounting has limits.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually, preempt
from slurm.test_elsewhere import blaming, nodes_of
from slurmft.errors import LabUnavailable
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import RELEASES, LabSettings, release_of

__all__ = ["blaming"]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
NEWEST = max(RELEASES)
STAND_INS = Path(__file__).parent / "stand_ins"
CGROUPS = Path("/sys/fs/cgroup")
NAMES = ("cpu-a", "gpu01", "gpu02", "gpu03", "x1000c0s0b0n0")
SITES = {
    "hidden": {"nodes": len(NAMES), "names": NAMES, "files": (STAND_INS / "job_submit.lua",),
               "lines": ("PrivateData=jobs,nodes", "JobSubmitPlugins=lua")},
    "limited": {"nodes": 4, "accounting": True,
                "lines": ("PrivateData=jobs", "AccountingStorageEnforce=associations,limits,qos")},
    "contained": {"nodes": 3, "names": ("cg1", "cg2", "cg3"), "files": (STAND_INS / "cgroup.conf",),
                  "lines": ("ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup",
                            "SelectTypeParameters=CR_CPU_Memory")},
}  # fmt: skip


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The cluster of this site, in the place of the usual one."""
    site, release = request.param
    if site == "contained" and not all((CGROUPS / name / "cgroup.procs").exists() for name in ("memory", "freezer")):
        pytest.skip("this machine has no version 1 control groups for memory and freezer, which this lab uses")
    folder = Path(f"/var/lib/slurmft-lab-{site}-{os.getpid()}")
    settings = LabSettings(folder=folder, kill_wait_s=5, grace_s=15, slurmd_timeout_s=8, release=release_of(release),
                           **SITES[site])  # fmt: skip
    try:
        lab = Lab.up(settings)
        if settings.accounting:
            accounts(lab, "add", "account", "lab")
            accounts(lab, "add", "qos", "short", "MaxWall=5", "Flags=DenyOnLimit")
            accounts(lab, "add", "qos", "small", "MaxTRESPerJob=node=1")
            accounts(lab, "add", "user", lab.user, "account=lab", "qos=normal,short,small", "DefaultQOS=normal")
        yield lab
    except LabUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"Slurm {release} is needed here: {error}", pytrace=False)
        pytest.skip(f"no lab of Slurm {release}: {error}")
    finally:
        cluster.purge(folder)
        for group in sorted(CGROUPS.glob("*/slurm_cg[123]/**/"), reverse=True):
            group.rmdir()  # Slurm leaves those of its nodes


def on(site: str) -> pytest.MarkDecorator:
    """Run it on this site: of the machine's own release each time, and of the newest one in soak."""
    newest = pytest.param((site, NEWEST), marks=pytest.mark.soak, id=f"{site}-{NEWEST}")
    return pytest.mark.parametrize("lab", [pytest.param((site, ""), id=site), newest], indirect=True)


def accounts(lab: Lab, *words: str) -> None:
    lab.run_as_admin(["sacctmgr", "-i", *words])


def attempt(run: Run, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``slurmft submit``, which may be refused."""
    return run.lab.run(["slurmft", "submit", str(run.config), *options], check=False, env=environment)


def reserve(lab: Lab, name: str, nodes: str) -> None:
    lab.wait_until_idle(60)  # nodes that are busy are not reserved
    lab.run_as_admin(["scontrol", "create", "reservation", f"ReservationName={name}", "StartTime=now", "Duration=30",
                      f"Users={lab.user}", f"Nodes={nodes}"])  # fmt: skip


def assert_resumed(run: Run) -> None:
    """The second start went on at the very step at which the first one had stopped."""
    stopped = run.events("verdict")[0].details
    assert run.events("first step")[1].details["resumed_from"] == stopped["saved_step"] == stopped["last_step"] >= 10


def state_of(lab: Lab, job: str) -> str:
    return lab.run(["squeue", "-h", "-j", job, "-o", "%T %r"], check=False).stdout.strip()


@on("hidden")
def test_the_words_of_a_plugin_that_refuses_are_shown_once(lab: Lab, new_run: NewRun) -> None:
    run = new_run(slurm={"job_name": "without-charge-code"})
    refused = attempt(run)
    assert refused.returncode == 1, refused
    assert refused.stderr.count("Charge code is missing.") == 1, refused.stderr
    assert refused.stderr.count("https://hpc.example.org/charge tells how to get one") == 1, refused.stderr
    assert not run.path.exists(), "a refused submission leaves nothing behind"


@pytest.mark.long
@on("hidden")
def test_a_job_that_the_site_rewrites_is_preempted_and_goes_on_without_accounting(lab: Lab, new_run: NewRun) -> None:
    run = new_run(steps=40, slurm={"job_name": "rewritten", "partition": "high", "time": "10"})
    submitted = attempt(run)
    job = submitted.stdout.split(" as job ")[1].split()[0]
    words = " ".join(submitted.stderr.split())
    assert "in partition low, not high; its time limit is 8 minutes, not 10" in words, words
    assert lab.run(["sacct", "-j", job], check=False).returncode != 0
    run.wait_for_step(10)
    preempt(lab)
    run.wait_until_done()
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.1.0"], run.story()
    assert run.events("stop requested")[0].details["cause"] == "preempted", run.story()
    assert_resumed(run)


@pytest.mark.long
@on("hidden")
def test_exclusions_hold_where_nodes_are_hidden_and_have_odd_names(lab: Lab, blaming: Callable[..., Run]) -> None:
    sinfo = lab.run(["sinfo"], check=False)
    assert "permission denied" in sinfo.stderr, sinfo
    run = blaming("gpu02", exclusions={"path": str(lab.home / "odd.exclusions"), "max_excluded_fraction": 0.9})
    lab.run(["slurmft", "exclude", "add", "gpu[01],x1000c0s0b0n0", "--reason", "test", "--config", str(run.config)])
    lab.run(["slurmft", "exclude", "add", "cpu-a", "--reason", "test", "--config", str(run.config)])
    job = run.submit()
    run.wait_for("attempt started")
    assert nodes_of(run) == ["gpu[02-03]"], run.story()
    lab.run(["slurmft", "exclude", "remove", "cpu-a", "--config", str(run.config)])
    run.wait_until_done()
    assert nodes_of(run) == ["gpu[02-03]", "cpu-a,gpu03"], run.story()
    assert run.folder.jobs() == [job]


@pytest.mark.soak
@on("hidden")
def test_a_site_that_lets_no_user_change_a_job_costs_slurms_own_delay(
    lab: Lab, new_run: NewRun, undisturbed: str
) -> None:
    run = new_run(slurm={"job_name": "unchangeable"})
    job = run.reach(10)
    lab.run(["scancel", "--signal=TERM", job])
    assert run.wait_for("requeued").details["delay_s"] == "Slurm's own, about 121", run.story()
    eventually(lambda: state_of(lab, job).startswith("PENDING"), 30, run.story)
    lab.run_as_admin(["scontrol", "update", f"JobId={job}", "StartTime=now"])  # or wait for those 121 s
    run.wait_until_done()
    assert run.digest() == undisturbed


contained = pytest.mark.parametrize("lab", [pytest.param(("contained", ""), id="contained")], indirect=True)


@pytest.mark.soak
@contained
def test_a_preempted_job_in_control_groups_goes_on_and_leaves_nothing(
    lab: Lab, new_run: NewRun, undisturbed: str
) -> None:
    run = new_run(slurm={"mem": "3G"})
    job = run.reach(10)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_for("first step", 2)
    assert_resumed(run)
    lab.run(["sbatch", "-p", "high", "-N", "3", "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "srun sleep 1"])
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("stop requested")] == ["signalled", "preempted"], run.story()
    assert run.digest() == undisturbed
    run.wait_until_out_of_queue(job)
    left = [pid for group in CGROUPS.glob("*/slurm_cg[123]/uid_*/job_*/**/cgroup.procs") for pid in group.open()]
    assert not left, run.story()


@pytest.mark.soak
@contained
def test_a_rank_that_its_control_group_ends_for_memory_is_told_as_such(lab: Lab, new_run: NewRun) -> None:
    eat = "a = []\nwhile True: a.append(bytearray(50_000_000))"
    run = new_run(command=["python", "-c", eat], nodes=1, nproc_per_node=1, slurm={"mem": "1200M"})
    job = run.submit()
    verdict = run.wait_for("verdict").details
    assert verdict["cause"] == "out of host memory", run.story()
    lab.run(["scancel", job], check=False)


@pytest.mark.long
@on("limited")
def test_a_successor_beyond_the_limit_of_jobs_is_refused_and_nothing_is_lost(lab: Lab, new_run: NewRun) -> None:
    accounts(lab, "modify", "user", lab.user, "set", "MaxSubmitJobs=1")
    try:
        run = new_run(steps=200, preemption={"continue_by": "resubmit"})
        job = run.reach(10)
        second = attempt(new_run("second"))
        assert second.returncode == 1, second
        assert second.stderr.count("AssocMaxSubmitJobLimit") == 1, second.stderr
        assert "a limit of your account" in second.stderr
        lab.run(["scancel", "--signal=TERM", job])
        refused = run.wait_for("resubmit failed").details["reason"]
        assert "AssocMaxSubmitJobLimit" in refused
        assert "slurmft submit" in run.wait_for("not continued").details["command"]
        run.wait_until_out_of_queue(job)
        run.submit()
        run.wait_until_done()
    finally:
        accounts(lab, "modify", "user", lab.user, "set", "MaxSubmitJobs=-1")
    assert_resumed(run)


@on("limited")
def test_a_job_beyond_a_limit_is_refused_or_told_to_wait(lab: Lab, new_run: NewRun) -> None:
    run = new_run(slurm={"qos": "short", "time": "10"})
    denied = attempt(run)
    assert denied.returncode == 1, denied
    assert denied.stderr.count("QOSMaxWallDurationPerJobLimit") == 1, denied.stderr
    run.configure(slurm={"qos": "small"})
    never = attempt(run)
    assert "as things are it cannot start: it asks for more than one job of yours may have" in never.stderr, never
    lab.run(["scancel", *run.folder.jobs()])
    run.configure(slurm={"qos": "normal"})
    accounts(lab, "modify", "user", lab.user, "set", "MaxJobs=1")
    try:
        other = lab.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 60"]).stdout.strip()
        eventually(lambda: state_of(lab, other).startswith("RUNNING"), 20, run.story)
        job = run.submit()
        eventually(lambda: "AssocMaxJobsLimit" in state_of(lab, job), 20, run.story)
        assert "AssocMaxJobsLimit" in re.sub(r"\s+", "", run.slurmft("status", str(run.path)))
        lab.run(["scancel", other])
        run.wait_for("attempt started")
    finally:
        accounts(lab, "modify", "user", lab.user, "set", "MaxJobs=-1")


@on("limited")
def test_a_run_stays_in_its_reservation_with_nodes_of_its_own(lab: Lab, blaming: Callable[..., Run]) -> None:
    reserve(lab, "course", "n1,n2,n3")
    run = blaming("n1", slurm={"reservation": "course", "exclusive": True})
    job = run.submit()
    run.wait_for("attempt started")
    other = lab.run(["sbatch", "--parsable", "--reservation=course", "-N", "2", "-o", "/dev/null", "--wrap", "true"])
    eventually(lambda: re.match("PENDING (Resources|Priority)", state_of(lab, other.stdout.strip())), 20, run.story)
    lab.run(["scancel", other.stdout.strip()])
    run.wait_until_done()
    assert nodes_of(run) == ["n[1-2]", "n[2-3]"], run.story()
    run.wait_until_out_of_queue(job)
    lab.run_as_admin(["scontrol", "delete", "ReservationName=course"])
    gone = attempt(Run(lab, run.path.with_name("late"), run.config), "--set", f"run_folder={run.path}-late")
    assert gone.returncode == 1, gone
    assert gone.stderr.count("Requested reservation is invalid") == 1, gone.stderr
    assert "scontrol show reservation lists them" in gone.stderr, gone.stderr


@pytest.mark.soak
@on("limited")
def test_a_reservation_spares_nodes_and_its_end_is_no_cancellation(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    reserve(lab, "short", "n1,n2,n3")
    run = new_run(slurm={"reservation": "short"}, delay=1.0)  # Slurm looks every half minute
    run.configure(exclusions={"max_excluded_fraction": 0.9})
    lab.run(["slurmft", "exclude", "add", "n[2-3]", "--reason", "test", "--config", str(run.config)])
    job = run.reach(5)
    assert "Slurm refuses the request without it" in str(run.events("avoiding")[-1].details["dropped"]), run.story()
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 2))
    lab.run_as_admin(["scontrol", "update", "ReservationName=short", f"EndTime={soon}"])
    assert "time limit" in run.wait_for("ended from outside").details["reason"], run.story()
    run.wait_until_done()  # outside of it
    assert run.folder.jobs() == [job]
    assert run.digest() == undisturbed


@pytest.mark.long
@on("limited")
def test_several_clusters_are_refused_and_one_of_a_federation_serves(lab: Lab, new_run: NewRun) -> None:
    run = new_run(steps=15)
    for refused in (attempt(run, "--", "-M", "a,b"), attempt(run, "--set", "slurm.clusters=all"),
                    attempt(run, SLURM_CLUSTERS="a,b")):  # fmt: skip
        assert refused.returncode == 2, refused
        assert "one of several clusters" in refused.stderr, refused
    accounts(lab, "add", "federation", "everywhere", "clusters=slurmftlab")
    try:
        eventually(lambda: "everywhere" in lab.run(["scontrol", "show", "federation"]).stdout, 20, "a federation")
        refused = attempt(run)
        assert refused.returncode == 2, refused
        assert "belongs to the federation everywhere" in refused.stderr, refused
        assert run.folder.jobs() == []
        job = run.submit("--set", "slurm.clusters=slurmftlab")
        run.wait_for("first step")
        lab.run(["scancel", "--signal=TERM", job])
        run.wait_until_done()
        assert run.folder.jobs() == [job]
        run.wait_until_out_of_queue(job)
    finally:
        accounts(lab, "delete", "federation", "everywhere")
