"""What a run meets after, and while, a standby supervisor takes it over: time limit, notices, saves, the next loss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually
from slurm.test_standby import assert_done, batch_host, run_with_standby, standby_host
from slurmft.checkpoint.catalog import Catalog
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

__all__ = ["run_with_standby"]

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(600)]

NewRun = Callable[..., Run]
NOTICED_S, UNNOTICED_S = 8, 100
"""SlurmdTimeout: Slurm has removed the dead batch host when the end comes, or still believes that it lives."""


@pytest.fixture(scope="session", params=[NOTICED_S, UNNOTICED_S], ids=["noticed", "unnoticed"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    reason = Lab.availability(accounting=True)
    if reason is not None:
        pytest.skip(reason)
    folder = Path(f"/var/lib/slurmft-lab-standby-{request.param}-{os.getpid()}")
    settings = LabSettings(folder=folder, nodes=4, accounting=True, kill_wait_s=5, grace_s=15,
                           slurmd_timeout_s=request.param)  # fmt: skip
    try:
        yield Lab.up(settings)
    finally:
        cluster.purge(folder)


@contextmanager
def dead(lab: Lab, *nodes: str) -> Iterator[None]:
    for node in nodes:
        lab.kill_node(node)
    try:
        yield
    finally:
        for node in nodes:
            eventually(
                lambda node=node: lab.node_states().get(node, "").startswith("DOWN"),
                lab.settings.slurmd_timeout_s + 60,
                f"{node} is DOWN",
            )
            lab.start_node(node)


def test_the_time_limit_comes_after_a_takeover(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    # the notice comes 70 to 100 s after the start
    run = run_with_standby(
        delay=1.8, slurm={"time": "2"}, preemption={"signal_lead_s": 20}, checkpoint={"interval_steps": 5}
    )
    (job,) = run.folder.jobs()
    run.wait_for_saved(5)
    with dead(lab, batch_host(run)):
        run.wait_for("first step", 2, within_s=40)
        stopped = run.wait_for("stop saved", within_s=120)
        run.wait_for("requeued", within_s=60)
        lab.run_as_admin(["scontrol", "update", f"JobId={job}", "TimeLimit=10"])  # once is enough
    resumed = run.wait_for("first step", 3, within_s=300)
    run.wait_until_done()
    causes = [event.details["cause"] for event in run.events("verdict")]
    assert causes == ["node lost", "time limit", "finished"], run.story()
    assert "SIGTERM" in run.events("stop requested")[0].details["reason"], "the notice has come"
    assert resumed.details["resumed_from"] == stopped.details["step"], run.story()
    assert resumed.attempt == f"{job}.1.0"
    assert run.digest() == undisturbed


def test_the_time_limit_comes_while_the_controller_is_away(
    lab: Lab, run_with_standby: NewRun, undisturbed: str
) -> None:  # fmt: skip
    """Slurm's notice would come 50 to 80 s after the start; the supervisor asks for the stop after 85 s."""
    run = run_with_standby(
        delay=1.8, slurm={"time": "2"}, preemption={"signal_lead_s": 40}, checkpoint={"interval_steps": 5}
    )
    (job,) = run.folder.jobs()
    run.wait_for_saved(5)
    with dead(lab, batch_host(run)):
        run.wait_for("first step", 2, within_s=40)
        assert not run.events("stop requested"), "too late to show anything"
        lab.stop_controller()
        try:
            stopped = run.wait_for("stop saved", within_s=120)
        finally:
            lab.start_controller()
        run.wait_for("requeued", within_s=60)
        lab.run_as_admin(["scontrol", "update", f"JobId={job}", "TimeLimit=10"])
    [asked] = run.events("stop requested")
    assert asked.details["cause"] == "time limit" and "no notice" in asked.details["reason"], run.story()
    resumed = run.wait_for("first step", 3, within_s=300)
    run.wait_until_done()
    assert resumed.details["resumed_from"] == stopped.details["step"], run.story()
    assert run.digest() == undisturbed


def test_a_notice_comes_while_there_is_no_supervisor(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    run = run_with_standby(delay=0.5, checkpoint={"interval_steps": 5})
    (job,) = run.folder.jobs()
    run.wait_for_saved(10)
    with dead(lab, batch_host(run)):
        lab.run(["scancel", "--signal=TERM", job])
        run.wait_for("requeued", within_s=60)
        assert len(run.events("standby took over")) == 1, run.story()
    resumed = run.wait_for("first step", len(run.events("first step")) + 1, within_s=300)
    run.wait_until_done()
    assert resumed.attempt == f"{job}.1.0", run.story()
    assert run.events("decision")[-2].details["action"] == "continue", run.story()
    assert run.digest() == undisturbed


def test_two_batch_hosts_die_one_after_the_other(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    run = run_with_standby(delay=0.5, spare_nodes=2, checkpoint={"interval_steps": 5})
    run.wait_for_saved(10)
    first = batch_host(run)
    second = standby_host(run)
    with dead(lab, first):
        run.wait_for("first step", 2, within_s=40)
        ready = run.wait_for("standby ready", 2, within_s=60)
        assert run.events("standby took over")[0].details["host"] == second
        assert ready.details["node"] not in {first, second}
        with dead(lab, second):
            run.wait_for("first step", 3, within_s=40)
            assert_done(run, undisturbed, attempts=3)
    took = [event.details["host"] for event in run.events("standby took over")]
    assert took == [second, ready.details["node"]]


def test_the_batch_host_dies_while_the_run_is_restarted(lab: Lab, run_with_standby: NewRun, undisturbed: str) -> None:
    run = run_with_standby(delay=0.3, checkpoint={"interval_steps": 5})
    run.wait_for_saved(10)
    host = batch_host(run)
    run.kill(standby_host(run), *list(run.pids(standby_host(run)))[:1])
    run.wait_for("worker failed", within_s=30)
    with dead(lab, host):
        run.wait_for("standby took over", within_s=40)
        run.wait_until_done(150)
        (job,) = run.folder.jobs()
        run.wait_until_out_of_queue(job, lab.settings.slurmd_timeout_s + 60)
    assert not run.events("requeueing"), run.story()
    attempts = [event.attempt for event in run.events("attempt started")]
    assert attempts == sorted(set(attempts)) and len(attempts) in (2, 3), run.story()
    assert run.digest() == undisturbed


@pytest.mark.parametrize("written", ["nothing", "a part", "all"])
def test_the_batch_host_dies_while_a_checkpoint_is_saved(
    lab: Lab, run_with_standby: NewRun, undisturbed: str, written: str
) -> None:  # fmt: skip
    """Its writers are slow, so that there is time to hit; what is not committed on all ranks is no checkpoint."""
    run = run_with_standby(delay=0.3, checkpoint={"interval_steps": 5, "bandwidth": "40K", "just_in_time": False})
    run.wait_for_saved(5)
    catalog = Catalog(run.path / "checkpoints")
    committed = len(catalog.committed())
    if written == "all":
        eventually(lambda: len(catalog.committed()) > committed, 60, run.story)
    else:
        eventually(lambda: len(catalog.scan().uncommitted) >= 1, 60, run.story)
        if written == "a part":
            run.wait_for_step(((run.folder.progress() or {}).get("step") or 0) + 2)
    with dead(lab, batch_host(run)):
        run.wait_for("first step", 2, within_s=40)
        newest = max(entry.step for entry in catalog.committed())
        assert newest >= 5
        assert_done(run, undisturbed)


@pytest.mark.parametrize("how", ["scontrol requeue", "scancel"])
def test_slurms_own_commands_after_a_takeover(
    lab: Lab, run_with_standby: NewRun, undisturbed: str, how: str
) -> None:  # fmt: skip
    run = run_with_standby(delay=0.5, checkpoint={"interval_steps": 5})
    (job,) = run.folder.jobs()
    run.wait_for_saved(10)
    with dead(lab, batch_host(run)):
        run.wait_for("first step", 2, within_s=40)
        lab.run([*how.split(), job])
        run.wait_for("verdict", 2, within_s=60)
    if how == "scancel":
        run.wait_until_out_of_queue(job, lab.settings.slurmd_timeout_s + 60)
        assert run.events("verdict")[1].details["cause"] == "cancelled", run.story()
        assert run.folder.done() is None and len(run.events("first step")) == 2
        return
    assert run.events("verdict")[1].details["cause"] == "requeued by Slurm", run.story()
    run.wait_until_done(300)
    assert run.events("attempt started")[-1].attempt == f"{job}.1.0"
    assert run.digest() == undisturbed
    decided = [event.attempt for event in run.events("decision")]
    assert all(len(list(same)) == 1 for _, same in itertools.groupby(decided)), run.story()
