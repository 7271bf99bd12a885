"""The same journeys on other releases of Slurm than this machine's, all of them in soak.

Each test is one of another module; the lab is another one here. On the newest release those whose course depends on the
release are in every run: what Slurm says and does at a preemption, a requeue, a lost node, a drain.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm import (
    test_endings,
    test_final_ends,
    test_node_hooks,
    test_recovery,
    test_slurm_faults,
    test_sweep,
)
from slurm.conftest import Run, eventually, preempt
from slurm.test_elsewhere import blaming, test_exit_16_goes_on_on_different_nodes
from slurm.test_final_ends import (
    slow,
    test_a_calm_stop_leaves_the_job_to_be_requeued_by_hand,
    test_a_job_that_slurm_requeues_all_the_same_ends_at_once,
    test_a_stop_in_the_grace_is_not_undone,
    test_a_stop_in_the_start_after_a_preemption_is_not_undone,
)
from slurm.test_node_hooks import hooked, script
from slurm.test_recovery import assert_one_stop
from slurm.test_sweep import Site, site
from slurmft.errors import LabUnavailable
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import RELEASES, LabSettings, release_of

__all__ = [
    "blaming", "hooked", "script", "site", "slow",
    "test_a_calm_stop_leaves_the_job_to_be_requeued_by_hand",
    "test_a_job_that_slurm_requeues_all_the_same_ends_at_once", "test_a_stop_in_the_grace_is_not_undone",
    "test_a_stop_in_the_start_after_a_preemption_is_not_undone", "test_exit_16_goes_on_on_different_nodes",
]  # fmt: skip

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
NEWEST = max(RELEASES)


def in_soak(test: Callable[..., None]) -> Callable[..., None]:
    """The same test, in soak only: this machine's release shows it in every run."""

    @pytest.mark.soak
    @functools.wraps(test)
    def again(**fixtures: object) -> None:
        test(**fixtures)

    return again


test_the_supervisor_is_killed = in_soak(test_endings.test_the_supervisor_is_killed)
test_a_short_time_limit = in_soak(test_recovery.test_a_short_time_limit)
test_manual_requeue = in_soak(test_recovery.test_manual_requeue)
test_scancel_ends_the_run = in_soak(test_recovery.test_scancel_ends_the_run)
test_a_broken_prolog_harms_no_job_and_the_epilog_leaves_nothing = in_soak(
    test_node_hooks.test_a_broken_prolog_harms_no_job_and_the_epilog_leaves_nothing
)
test_a_failed_validation_in_the_grace_is_not_tried_again = in_soak(
    test_final_ends.test_a_failed_validation_in_the_grace_is_not_tried_again
)
test_of_a_job_and_its_successor_only_the_successor_trains = in_soak(
    test_final_ends.test_of_a_job_and_its_successor_only_the_successor_trains
)


@pytest.fixture(
    scope="session",
    params=[NEWEST, *(pytest.param(each, marks=pytest.mark.soak) for each in RELEASES if each != NEWEST)],
)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A cluster of this release, in the place of the one of the machine's own."""
    folder = Path(f"/var/lib/slurmft-lab-{request.param}-{os.getpid()}")
    try:
        yield Lab.up(LabSettings(folder=folder, nodes=4, accounting=True, kill_wait_s=5, grace_s=15,
                                 slurmd_timeout_s=8, release=release_of(request.param)))  # fmt: skip
    except LabUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"Slurm {request.param} is needed here: {error}", pytrace=False)
        pytest.skip(f"no lab of Slurm {request.param}: {error}")
    finally:
        cluster.purge(folder)


def test_a_node_dies(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    test_endings.test_a_node_dies(lab, new_run, undisturbed, 1, no_kill=False)


def test_the_lab_is_of_this_release(lab: Lab, request: pytest.FixtureRequest) -> None:
    release = request.node.callspec.params["lab"]
    for command in ("sinfo", "sbatch", "scontrol", "sacct"):
        assert lab.run([command, "--version"]).stdout.startswith(f"slurm-wlm {release}.")
    assert f"slurm-wlm {release}." in lab.run(["srun", "-N", "4", "srun", "--version"]).stdout


@pytest.mark.soak
def test_calm(new_run: NewRun, undisturbed: str) -> None:
    run = new_run(delay=0.0)
    run.submit()
    run.wait_until_done()
    assert run.digest() == undisturbed
    assert len(run.events("attempt started")) == 1


def test_a_preemption_and_a_finish_after_it(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(10)
    preempt(lab)
    run.wait_until_done()
    assert_one_stop(run, "preempted", undisturbed)

    def state() -> str:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip()

    eventually(lambda: state() in ("", "PENDING"), 40, run.story)
    if state():  # 24.11 requeues it, since it remembers the preemption; once
        run.slurmft("requeue", str(run.path))
        assert run.wait_for("already finished").attempt == f"{job}.2.0"
    run.wait_until_out_of_queue(job)
    eventually(lambda: run.job_states() == {job: "COMPLETED"}, 20, lambda: f"{run.job_states()}\n{run.story()}")
    assert len(run.events("attempt started")) == 2


@pytest.mark.soak
def test_the_controller_is_away_for_a_moment(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run()
    job = run.reach(10)
    lab.run(["scancel", "--signal=TERM", job])
    lab.stop_controller()
    try:
        run.wait_for("decision")
    finally:
        lab.start_controller()
    run.wait_for("requeued")

    def is_waiting() -> bool:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip() == "PENDING"

    # slurmd reports the end of a step, which the controller has missed, again after a minute
    eventually(lambda: is_waiting() or len(run.events("attempt started")) == 2, 100, run.story)
    if len(run.events("attempt started")) == 1:
        run.slurmft("requeue", str(run.path))  # or wait for Slurm's own 121 s
    run.wait_until_done()
    assert run.folder.jobs() == [job]
    assert len(run.events("requeued")) == 1
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_the_controller_is_away_for_longer(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """What it has not heard meanwhile costs the minute after which it is told again, and not Slurm's 121 s as well."""
    test_slurm_faults.test_the_controller_is_away_when_the_job_is_requeued(lab, new_run, undisturbed)


def test_a_sick_node_is_drained_and_comes_back(site: Site) -> None:
    test_sweep.test_a_sick_node_is_drained_avoided_and_returns_after_probation(site)
