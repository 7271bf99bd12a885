"""What the supervisor concludes from its agents' reports: how far the attempt is, and what all of it is saved."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurmft.ipc.messages import WorkerFacts
from slurmft.ipc.pages import State
from slurmft.storage import history
from slurmft.storage.history import Timings
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor import observations
from slurmft.supervisor.observations import Observations

WORK = "w0rk"
ATTEMPT = Attempt(job="7", restart=0)


def read(ranks: Sequence[dict]) -> list[WorkerFacts]:
    return [WorkerFacts(**facts) for facts in ranks]


def facts(rank: int, *, resumed: int = 0, step: int = 0, saved: int = -1, attached: bool = True) -> dict:
    return {
        "rank": rank, "state": State.TRAINING, "attached": attached, "step": step, "until": 90,
        "saved": saved, "durable": -1,
        "resumed": resumed, "first_step_at": 0.0, "answered": -1, "metric": 0.5,
        "first_step_s": 0.0, "longest_step_s": 0.0, "saves": 0, "save_s": 0.0, "saving_s": 0.0, "since_saved_s": 0.0,
        "save_failures": 0, "save_errno": 0, "save_cost_s": 0.0,
    }  # fmt: skip


@pytest.fixture
def seen(tmp_path: Path) -> Observations:
    run = RunFolder(tmp_path / "run")
    run.create()
    return Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=2, workload=WORK, history=[])


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
    seen.note_progress(read(ranks))
    assert (seen.reached(), seen.saved()) == (reached, saved)


def test_everybody_must_have_answered(seen):
    assert not seen.all_answered(3)
    seen.note_progress(read([facts(0) | {"answered": 5}, facts(1) | {"answered": 2}]))
    assert seen.all_answered(2)
    assert not seen.all_answered(3)


# a stop's save


def saving(seen: Observations, *ranks: dict) -> None:
    seen.note_progress(read(list(ranks)))


def test_a_stop_is_saved_when_every_step_is_in_a_checkpoint_of_all_ranks(seen):
    assert seen.save_of_stop(since_s=time.monotonic(), left_s=12.0) is None
    signal_at_s = time.monotonic() - 5.0
    done = {"saves": 2, "save_s": 0.5}
    saving(seen, facts(0, step=9, saved=9) | done | {"since_saved_s": 3.0}, facts(1, step=9, saved=9) | done)
    account = seen.save_of_stop(since_s=signal_at_s, left_s=12.0)
    assert account is not None
    assert account["step"] == 9
    assert account["seconds"] == pytest.approx(5.0, abs=0.5), "the slower rank's"
    assert account["seconds"] + account["seconds_left"] == pytest.approx(12.0)


@pytest.mark.parametrize(("saved", "step"), [((9, 5), 9), ((5, 5), 9), ((-1, 9), 9)])
def test_an_older_checkpoint_is_not_the_stops_save(seen, saved, step):
    saving(seen, facts(0, step=step, saved=saved[0]), facts(1, step=step, saved=saved[1]))
    assert seen.save_of_stop(since_s=time.monotonic(), left_s=12.0) is None


def test_what_a_stop_without_a_save_costs(seen):
    saving(seen, facts(0, resumed=2, step=9, saved=5), facts(1, resumed=2, step=9, saved=5) | {"saving_s": 7.5})
    assert seen.unsaved_at_stop() == {"steps_at_risk": 4, "unfinished_save_s": 7.5}
    saving(seen, facts(1, resumed=2, step=9, saved=-1))
    assert seen.unsaved_at_stop() == {"steps_at_risk": 7}, "no checkpoint of all ranks: back to where it resumed"


# timings


def test_what_was_measured_is_kept_for_the_next_submission(seen, tmp_path):
    seen.write_timings()
    assert history.read(tmp_path / "run", WORK) == {}, "nothing was"
    saving(seen, facts(0) | {"longest_step_s": 0.5, "saves": 1, "save_s": 0.25})
    seen.write_timings()
    assert history.read(tmp_path / "run", WORK) == {"7.0.0": Timings(longest_step_s=0.5, saves_s=(0.25,))}


def test_without_a_workload_nothing_is_kept(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    saving(seen, facts(0) | {"longest_step_s": 0.5})
    seen.write_timings()
    assert not (run.path / history.TIMINGS_FILE).exists()


def test_timings_are_written_with_the_progress_now_and_then(seen, tmp_path, monkeypatch):
    saving(seen, facts(0) | {"longest_step_s": 0.5})
    seen.write_progress()
    assert history.read(tmp_path / "run", WORK) == {}
    monkeypatch.setattr(observations, "TIMINGS_EVERY_S", -1.0)
    seen.write_progress()
    assert history.read(tmp_path / "run", WORK) == {"7.0.0": Timings(longest_step_s=0.5)}


def test_a_run_folder_that_cannot_be_written_is_the_callers_to_tell(seen, tmp_path):
    saving(seen, facts(0) | {"longest_step_s": 0.5})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match="No such file"):
        seen.write_timings()


def test_progress_tells_where_the_attempt_began(seen, tmp_path):
    seen.note_progress(read([facts(0, resumed=5, step=9), facts(1, resumed=5, step=8)]))
    seen.write_progress()
    progress = RunFolder(tmp_path / "run").progress()
    assert progress is not None
    assert (progress["resumed"], progress["step"]) == (5, 9)


def test_the_first_step_is_told_once_with_the_seconds_since_the_stop(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    before = run.journal(Attempt(job="6", restart=0))
    before.append("stop requested", signal_at=100.0)
    before.append("decision", action="continue")
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=2, workload="", history=run.journal().read())
    saving(seen, facts(0, step=1) | {"first_step_at": 107.5})
    assert not [event for event in run.journal().read() if event.event == "first step"], "one rank is missing"
    for _ in range(2):
        saving(seen, facts(1, step=1) | {"first_step_at": 106.0})
    (event,) = (event for event in run.journal().read() if event.event == "first step")
    told = {"resumed_from": 0, "seconds_since_stop_request": 7.5, "stop_of_attempt": "6.0.0", "first_step_at": 107.5}
    assert event.details == told


def test_lost_steps_that_are_done_again_are_told_once_with_what_saves_have_cost(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, 2, workload="", history=[], done_before=20)
    for step in (11, 19, 20, 21):
        of = {"first_step_at": 50.0, "step_at": 50.0 + step, "stall_s": step / 10, "attached_at": 40.0}
        saving(seen, facts(0, resumed=10, step=20) | of, facts(1, resumed=10, step=step) | of)
    (again,) = (event for event in run.journal().read() if event.event == "caught up")
    assert again.details == {"step": 20, "step_at": 70.0, "stall_s": 2.0, "saves_done": 0}
    seen.close()
    (end,) = (event for event in run.journal().read() if event.event == "measured")
    assert end.details == {"attached": True, "step_at": 71.0, "stall_s": 2.1, "saves_done": 0}


def test_nothing_is_done_again_where_nothing_was_lost(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, 1, workload="", history=[], done_before=20)
    saving(seen, facts(0, resumed=20, step=21) | {"first_step_at": 50.0})
    assert [event.event for event in run.journal().read()] == ["first step"]


def test_progress_of_a_plain_script_is_that_it_runs(seen, tmp_path):
    seen.note_progress(read([facts(0, attached=False), facts(1, attached=False)]))
    seen.write_progress()
    progress = RunFolder(tmp_path / "run").progress()
    assert progress is not None
    assert (progress["state"], progress.get("step")) == ("running", None)
