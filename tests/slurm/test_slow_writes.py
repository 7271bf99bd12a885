"""A stop while the writers are still busy with earlier saves, and while they die."""

from collections.abc import Callable

import pytest

from slurm.conftest import Run, eventually, preempt
from slurmft.checkpoint.catalog import Catalog
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
BUSY = {"interval_steps": 1, "bandwidth": "4K", "just_in_time": False}
"""Each save would be under way for many steps, so both places of every rank are taken nearly always."""


@pytest.fixture
def busy(new_run: NewRun) -> Run:
    """A run some steps after its first checkpoint, whose writers are all at work."""
    run = new_run(checkpoint=BUSY)
    run.reach(10)
    eventually(lambda: len(Catalog(run.path / "checkpoints").scan().uncommitted) >= 1, 60, run.story)
    return run


def assert_the_stop_was_saved(run: Run, undisturbed: str) -> None:
    run.wait_until_done()
    [saved] = run.events("stop saved")
    verdict = run.events("verdict")[0].details
    assert verdict["saved_step"] == verdict["last_step"] == saved.details["step"], run.story()
    assert run.events("first step")[1].details["resumed_from"] == verdict["saved_step"]
    assert len(run.events("attempt started")) == 2
    assert run.digest() == undisturbed


def test_a_preemption_while_both_places_wait_for_a_capped_disk(lab: Lab, busy: Run, undisturbed: str) -> None:
    """The save of the stop knows no cap, and what is older than it gives way."""
    preempt(lab)
    assert busy.wait_for("stop saved").details["seconds"] < 5, busy.story()
    assert_the_stop_was_saved(busy, undisturbed)


def test_a_stop_whose_writers_are_killed_while_it_saves(lab: Lab, busy: Run, undisturbed: str) -> None:
    [job] = busy.folder.jobs()
    lab.run(["scancel", "--signal=TERM", job])
    busy.wait_for("stop requested")
    killed = [
        lab.run_on_as_admin(node, ["pkill", "-KILL", "-f", "[s]lurmft.checkpoint.writer"], check=False).returncode
        for node in lab.nodes
    ]
    assert 0 in killed, "there were writers"
    assert_the_stop_was_saved(busy, undisturbed)
