"""What a run measured of itself: kept, found again beside the next run, and never believed when it is damaged."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.run import validate
from slurmft.ipc.messages import WorkerFacts
from slurmft.operations.submit import grace_need
from slurmft.storage import history
from slurmft.storage.history import (
    MAX_ATTEMPTS,
    MAX_SAVES,
    TIMINGS_FILE,
    Timings,
    earlier,
    fingerprint,
    p99_save_s,
    read,
    write,
)
from slurmft.supervisor.observations import SUSPENDED_S, Measurements

WORK = "w0rk"
SOME = Timings(longest_step_s=0.8, first_step_s=9.0, start_s=14.0, step_s=0.5, saves_s=(0.2, 0.3), costs_s=(0.01,))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return folder(tmp_path, "run")


def folder(parent: Path, name: str) -> Path:
    (path := parent / name).mkdir()
    return path


# the file


def test_what_is_written_is_read(run):
    write(run, WORK, "7.0.0", SOME)
    assert read(run, WORK) == {"7.0.0": SOME}


def test_writing_an_attempt_again_replaces_it_and_leaves_the_others(run):
    write(run, WORK, "7.0.0", SOME)
    write(run, WORK, "7.1.0", Timings(saves_s=(1.0,)))
    write(run, WORK, "7.1.0", Timings(saves_s=(1.0, 2.0)))
    assert read(run, WORK) == {"7.0.0": SOME, "7.1.0": Timings(saves_s=(1.0, 2.0))}


def test_another_workload_is_neither_read_nor_kept(run):
    write(run, "0ther", "7.0.0", SOME)
    assert read(run, WORK) == {}
    write(run, WORK, "8.0.0", SOME)
    assert read(run, "0ther") == {}


def test_the_newest_saves_and_attempts_are_kept(run):
    for number in range(MAX_ATTEMPTS + 3):
        write(run, WORK, f"{number}.0.0", Timings(longest_step_s=1.0, saves_s=(float(number),) * 300))
    kept = read(run, WORK)
    assert list(kept) == [f"{number}.0.0" for number in range(3, MAX_ATTEMPTS + 3)]
    saves = [seconds for one in kept.values() for seconds in one.saves_s]
    assert len(saves) == MAX_SAVES
    assert max(saves) == saves[-1] == MAX_ATTEMPTS + 2
    assert min(saves) == MAX_ATTEMPTS - 1, "the oldest 100 of the fourth newest attempt's 300 went with all before"


BAD = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 99}', b'{"workload": "w0rk"}',
    b'{"format": 1, "workload": "w0rk"}',
    b'{"format": 1, "workload": "w0rk", "attempts": 5}',
    b'{"format": 1, "workload": "w0rk", "attempts": {"7": {}}}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"longest_step_s": 1}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "longest_step_s": "1"}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "longest_step_s": -1}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "longest_step_s": true}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "longest_step_s": 1e999}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "longest_step_s": NaN}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "step_s": 1' + b"0" * 400 + b"}]}",
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "saves_s": "123"}]}',
    b'{"format": 1, "workload": "w0rk", "attempts": [{"attempt": "7", "saves_s": null}]}',
    b" " * (history.MAX_BYTES + 1),
    b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_a_file_that_cannot_be_believed_is_ignored_with_a_warning(run, content, caplog):
    (run / TIMINGS_FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read(run, WORK) == {}
    assert f"the timings in {run / TIMINGS_FILE} are ignored" in caplog.text
    write(run, WORK, "7.0.0", SOME)
    assert read(run, WORK) == {"7.0.0": SOME}, "and the next write mends it"


def test_unknown_keys_are_tolerated(run):
    write(run, WORK, "7.0.0", SOME)
    value = json.loads((run / TIMINGS_FILE).read_text())
    value["attempts"][0]["colour"] = value["mood"] = "blue"
    (run / TIMINGS_FILE).write_text(json.dumps(value))
    assert read(run, WORK) == {"7.0.0": SOME}


def test_no_file_is_no_warning(run, caplog):
    assert read(run, WORK) == {}
    assert caplog.text == ""


def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "nowhere", WORK, "7.0.0", SOME)


# earlier runs


def test_a_runs_own_numbers_come_before_those_beside_it(tmp_path, run):
    write(folder(tmp_path, "other"), WORK, "1.0.0", Timings(longest_step_s=99.0))
    assert earlier(run, WORK) == [Timings(longest_step_s=99.0)]
    write(run, WORK, "7.0.0", SOME)
    assert earlier(run, WORK) == [SOME]


def test_the_runs_beside_it_count_when_they_are_the_same_workload(tmp_path):
    write(folder(tmp_path, "same"), WORK, "1.0.0", SOME)
    write(folder(tmp_path, "different"), "0ther", "2.0.0", Timings(longest_step_s=99.0))
    (folder(tmp_path, "damaged") / TIMINGS_FILE).write_text("{")
    folder(tmp_path, "empty")
    (tmp_path / "file").write_text("")
    assert earlier(tmp_path / "not-there-yet", WORK) == [SOME]


def test_only_the_newest_runs_beside_it_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_SIBLINGS", 2)
    for age in range(4):
        write(path := folder(tmp_path, f"run-{age}"), WORK, "1.0.0", Timings(longest_step_s=float(age)))
        os.utime(path, (1e9 - age, 1e9 - age))
    assert earlier(tmp_path / "new", WORK) == [Timings(longest_step_s=0.0), Timings(longest_step_s=1.0)]


def test_a_folder_full_of_runs_is_looked_at_for_a_moment_only(tmp_path, monkeypatch):
    write(folder(tmp_path, "same"), WORK, "1.0.0", SOME)
    monkeypatch.setattr(history, "LOOK_S", -1.0)
    assert earlier(tmp_path / "new", WORK) == []


def test_a_run_without_a_place_has_no_earlier_ones(tmp_path):
    assert earlier(tmp_path / "nowhere" / "run", WORK) == []


@pytest.mark.parametrize(
    ("saves", "p99"), [([], None), ([3.0], 3.0), ([1.0] * 98 + [7.0, 9.0], 7.0), ([1.0] * 99 + [9.0], 1.0)]
)
def test_the_99th_percentile(saves, p99):
    assert p99_save_s([Timings(saves_s=tuple(saves[:50])), Timings(saves_s=tuple(saves[50:]))]) == p99


# what makes a workload


CONFIG = {"command": ["python", "train.py"], "run_folder": "/r/a", "working_directory": "/w"}


@pytest.mark.parametrize(
    "changes",
    [
        {"run_folder": "/r/b"},
        {"checkpoint": {"interval_steps": 7}},
        {"slurm": {"partition": "low", "time": "10"}},
        {"preemption": {"signal_lead_s": 60}},
    ],
)
def test_where_and_when_it_runs_is_not_the_workload(changes):
    assert fingerprint(validate(CONFIG | changes, source="").workload) == fingerprint(
        validate(CONFIG, source="").workload
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["python", "train.py", "--big"]},
        {"nodes": 2},
        {"nproc_per_node": 2},
        {"environment": {"SIZE": "3"}},
        {"working_directory": "/elsewhere"},
    ],
)
def test_what_it_runs_is_the_workload(changes):
    assert fingerprint(validate(CONFIG | changes, source="").workload) != fingerprint(
        validate(CONFIG, source="").workload
    )


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"interval": "seconds", "interval_seconds": 600}, "up to 600 s of work are done again"),
        ({"interval": "auto"}, "up to 3600 s of work are done again"),
        ({"interval_steps": 7}, "up to 7 steps are done again"),
        ({"interval_steps": 0}, "everything since the newest save of a stop is done again"),
    ],
    ids=["seconds", "auto", "steps", "none"],
)
def test_what_is_at_risk_depends_on_how_saves_are_spaced(section, text, tmp_path):
    config = validate(CONFIG | {"run_folder": str(tmp_path), "checkpoint": section}, source="")
    assert text in grace_need(config).at_risk


def test_the_need_is_gathered_from_all_attempts(tmp_path):
    config = validate(CONFIG | {"run_folder": str(tmp_path), "checkpoint": {"interval_steps": 7}}, source="")
    assert not grace_need(config).known
    write(tmp_path, fingerprint(config.workload), "7.0.0", SOME)
    write(
        tmp_path,
        fingerprint(config.workload),
        "7.1.0",
        Timings(longest_step_s=0.5, start_s=20.0, step_s=0.4, saves_s=(0.9,)),
    )
    need = grace_need(config)
    assert (need.longest_step_s, need.save_s, need.start_s, need.step_s) == (0.8, 0.9, 20.0, 0.4)
    assert (need.cut_off, need.interval_steps, need.known) == (False, 7, True)
    write(tmp_path, fingerprint(config.workload), "7.2.0", Timings(unfinished_save_s=11.0))
    assert (grace_need(config).save_s, grace_need(config).cut_off) == (11.0, True)


def test_a_first_step_counts_where_there_was_no_other(tmp_path):
    config = validate(CONFIG | {"run_folder": str(tmp_path)}, source="")
    write(tmp_path, fingerprint(config.workload), "7.0.0", Timings(first_step_s=9.0))
    assert grace_need(config).longest_step_s == 9.0


# measuring


QUIET: dict[str, Any] = {
    **dict.fromkeys(WorkerFacts.__struct_fields__, 0), "attached": True, "metric": 0.5,
}  # fmt: skip
del QUIET["rank"]


def report(rank: int = 0, **changes: float) -> WorkerFacts:
    return WorkerFacts(rank=rank, **(QUIET | changes))


def test_the_slowest_rank_counts():
    measured = Measurements(0.0)
    measured.note([report(0, longest_step_s=0.5, saves=1, save_s=0.2)], 1.0)
    measured.note([report(1, longest_step_s=0.7, saves=1, save_s=0.6)], 1.2)
    measured.note([report(0, longest_step_s=0.5, saves=2, save_s=0.1, first_step_s=3.0)], 1.5)
    timings_ = measured.timings()
    assert (timings_.longest_step_s, timings_.first_step_s, timings_.saves_s) == (0.7, 3.0, (0.6, 0.1))
    assert timings_.unfinished_save_s is None


def test_nothing_measured_is_nothing():
    measured = Measurements(0.0)
    measured.note([report(0), report(1)], 1.0)
    assert measured.timings() == Timings()


def test_a_save_that_was_cut_off_is_remembered_as_that():
    measured = Measurements(0.0)
    measured.note([report(0, saves=1, save_s=0.2, saving_s=4.0), report(1, saves=1, save_s=0.2, saving_s=4.5)], 1.0)
    assert measured.timings().unfinished_save_s == measured.unfinished_save_s == 4.5
    measured.note([report(0, saves=2, save_s=5.0), report(1, saves=2, save_s=5.1)], 2.0)
    assert measured.unfinished_save_s is None


def test_start_and_mean_step():
    measured = Measurements(100.0)
    measured.note([report(0, step=1)], 108.0)
    measured.first_step_done(1, 108.0)
    measured.note([report(0, step=1)], 109.0)
    measured.note([report(0, step=5)], 110.0)
    measured.note([report(0, step=5)], 115.0)
    assert (measured.timings().start_s, measured.timings().step_s) == (8.0, 0.5)


def test_a_time_in_which_the_job_stood_still_is_no_step():
    measured = Measurements(0.0)
    measured.note([report(0, longest_step_s=0.5)], 1.0)
    still_s = SUSPENDED_S + 50
    measured.note([report(0, longest_step_s=still_s + 0.2, saves=1, save_s=still_s + 1)], 1.5 + still_s)
    measured.note([report(0, longest_step_s=still_s + 0.2, saves=2, save_s=0.3)], 2.0 + still_s)
    assert (measured.timings().longest_step_s, measured.timings().saves_s) == (0.5, (0.3,))


def test_what_saves_cost_is_kept_once_each_and_only_from_rank_0():
    measured = Measurements(0.0)
    for at, cost_s in enumerate([0.0, 0.2, 0.2, 0.3, 0.3, 0.2]):
        measured.note([report(0, save_cost_s=cost_s), report(1, save_cost_s=9.0 + at)], at / 2)
    assert measured.timings().costs_s == (0.2, 0.3, 0.2)


def test_how_long_a_stops_save_took():
    measured = Measurements(0.0)
    assert measured.seconds_to_save(5.0) is None
    measured.note([report(0, saves=1, save_s=0.5, since_saved_s=3.0)], 10.0)
    measured.note([report(1, saves=1, save_s=0.5, since_saved_s=2.0)], 10.0)
    assert measured.seconds_to_save(5.0) == 3.0
    assert measured.seconds_to_save(9.0) == 0.0, "it had been saved before"
