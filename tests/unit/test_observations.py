"""What the supervisor concludes from its agents' reports: how far the attempt is, and what all of it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.launch.heartbeat import State
from slurmft.launch.observations import Observations
from slurmft.storage.run_folder import Attempt, RunFolder

ATTEMPT = Attempt(job="7", restart=0)


def facts(rank: int, *, resumed: int = 0, step: int = 0, saved: int = -1, attached: bool = True) -> dict:
    return {
        "rank": rank, "state": State.TRAINING, "attached": attached, "step": step, "until": 90, "saved": saved,
        "resumed": resumed, "first_step_at": 0.0, "answered": -1, "metric": 0.5,
    }  # fmt: skip


@pytest.fixture
def seen(tmp_path: Path) -> Observations:
    run = RunFolder(tmp_path / "run")
    run.create()
    return Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=2)


@pytest.mark.parametrize(
    ("ranks", "reached", "saved"),
    [
        pytest.param([], (0, 0), None, id="nobody has told"),
        pytest.param([facts(0, resumed=-1), facts(1, resumed=-1)], (0, 0), None, id="before the first boundary"),
        pytest.param([facts(0, resumed=5, step=9, saved=8), facts(1, resumed=5, saved=8)], (5, 9), 8, id="saved"),
        pytest.param([facts(0, step=9, saved=8), facts(1, step=9, saved=-1)], (0, 9), None, id="one has never saved"),
        pytest.param([facts(0, step=9, saved=8), facts(1, step=9, saved=4)], (0, 9), 4, id="one is behind"),
        pytest.param([facts(0, step=9, saved=8)], (0, 9), None, id="one is missing"),
        pytest.param([facts(0, attached=False), facts(1, attached=False)], (0, 0), None, id="plain scripts"),
    ],
)  # fmt: skip
def test_how_far_the_attempt_is(seen, ranks, reached, saved):
    seen.note_progress(ranks)
    assert (seen.reached(), seen.saved()) == (reached, saved)


def test_everybody_must_have_answered(seen):
    assert not seen.all_answered(3)
    seen.note_progress([facts(0) | {"answered": 5}, facts(1) | {"answered": 2}])
    assert seen.all_answered(2)
    assert not seen.all_answered(3)


def test_progress_of_a_plain_script_is_that_it_runs(seen, tmp_path):
    seen.note_progress([facts(0, attached=False), facts(1, attached=False)])
    seen.write_progress()
    progress = RunFolder(tmp_path / "run").progress()
    assert progress is not None
    assert (progress["state"], progress.get("step")) == ("running", None)
