"""Every second of a journal is in one category, whatever the journal holds."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from generated_journals import BEGIN_S, JournalWriter, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.errors import StorageError
from slurmft.reporting.accounting import ALIASES, MAX_KEPT, Account, Accounting, Category
from slurmft.reporting.report import report_of
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder

RECORDED = Path(__file__).parents[1] / "data" / "run-before-0.1.0" / "run"
FAR_S = BEGIN_S + 1e8


def account_of(folder: Path, *, now_s: float = FAR_S, since_s: float = 0.0) -> Account:
    return report_of(RunFolder(folder), now_s=now_s, since_s=since_s).account


def written(folder: Path, *events: tuple[str, float, dict[str, Any]], attempt: str = "7.0.0") -> Path:
    """A run folder with these events: name, seconds since the one before, details."""
    folder.mkdir()
    (folder / "config.yaml").write_text("command: [python]\n")
    with (folder / "journal.jsonl").open("w") as stream:
        journal = JournalWriter(stream)
        journal.attempt = attempt
        for name, after_s, details in events:
            journal.attempt = details.pop("attempt", attempt)
            journal.write(name, after_s, **details)
    return folder


def test_the_categories_of_a_long_run_are_those_that_it_was_made_of(tmp_path: Path) -> None:
    made = write_run(tmp_path / "run", attempts=200)
    account = account_of(tmp_path / "run")
    for name, seconds in made.items():
        assert account.seconds[Category(name)] == pytest.approx(seconds, abs=1.0), name
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, abs=0.01)
    assert account.seconds[Category.UNKNOWN] == 0
    assert account.attempts == 200 and account.world_size == 64


def test_each_end_has_the_seconds_that_followed_from_it(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("submitting", 0, {"cluster": "slurm", "attempt": ""}),
        ("attempt started", 100, {}),
        ("workers started", 2, {"world_size": 4}),
        ("first step", 10.5, {"resumed_from": 0, "attached_at": BEGIN_S + 105, "loop_at": BEGIN_S + 110,
                              "load_s": 1.0, "first_step_at": BEGIN_S + 112}),
        ("worker failed", 87.5, {"rank": 1, "node": "n1", "code": -9}),
        ("measured", 1, {"step_at": BEGIN_S + 195, "stall_s": 5.0, "saves_done": 2, "attached": True}),
        ("verdict", 1, {"cause": "hang", "reason": "rank 1", "first_step": 0, "last_step": 50, "node": "n1"}),
        ("decision", 0, {"action": "restart"}),
        ("attempt started", 1, {"attempt": "7.0.1"}),
        ("workers started", 2, {"world_size": 4, "attempt": "7.0.1"}),
        ("first step", 10, {"resumed_from": 40, "attached_at": BEGIN_S + 207, "loop_at": BEGIN_S + 210,
                            "load_s": 1.0, "first_step_at": BEGIN_S + 212, "attempt": "7.0.1"}),
        ("caught up", 10, {"step": 50, "step_at": BEGIN_S + 224, "stall_s": 1.0, "attempt": "7.0.1"}),
        ("measured", 25, {"step_at": BEGIN_S + 248, "stall_s": 3.0, "saves_done": 2, "attempt": "7.0.1"}),
        ("verdict", 2, {"cause": "finished", "last_step": 100, "attempt": "7.0.1"}),
        ("decision", 0, {"action": "finish", "attempt": "7.0.1"}),
    )  # fmt: skip
    account = account_of(folder)
    seconds = {str(category): round(each, 3) for category, each in account.seconds.items() if each}
    assert seconds == {
        "queue": 100, "launch": 2, "import": 5, "setup": 6, "load": 2, "training": 85 + 24 - 7, "saves": 8,
        "detection": 5, "evidence": 2, "restart": 3, "redone": 13, "shutdown": 4,
    }  # fmt: skip
    hang = account.ends[0]
    assert (hang.cause, hang.nodes, hang.ranks, hang.is_failure) == ("hang", ("n1",), 4, True)
    assert hang.cost_s == pytest.approx(5 + 2 + 3 + 2 + 2 + 1 + 13) and hang.rank_s == pytest.approx(4 * hang.cost_s)
    assert account.by_node["n1"].rank_s == hang.rank_s
    assert account.by_cause["first start"].seconds == pytest.approx(100 + 2 + 3 + 4 + 1)
    assert (account.failures, account.saves, account.step) == (1, 4, 100)
    assert account.ettr == pytest.approx(102 / account.wall_s)
    assert account.goodput == pytest.approx(102 / (account.wall_s - 100))


def test_a_supervisor_that_left_no_verdict_is_an_end_with_its_last_report(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("workers started", 1, {"world_size": 2}),
        ("first step", 9, {"resumed_from": 0}),
        ("attempt started", 200, {"attempt": "7.1.0", "before": {"attempt": "7.0.0", "at": BEGIN_S + 110, "step": 60,
                                  "step_at": BEGIN_S + 109, "stall_s": 2.0, "saves_done": 1}}),
        ("workers started", 1, {"world_size": 2, "attempt": "7.1.0"}),
        ("first step", 9, {"resumed_from": 50, "attempt": "7.1.0"}),
        ("verdict", 30, {"cause": "finished", "last_step": 100, "attempt": "7.1.0"}),
        ("decision", 0, {"action": "finish", "attempt": "7.1.0"}),
    )  # fmt: skip
    account = account_of(folder)
    assert account.ends[0].cause == "supervisor lost" and account.failures == 1
    assert account.seconds[Category.UNKNOWN] == 0
    assert account.seconds[Category.SAVES] == 2
    assert account.seconds[Category.REDONE] == pytest.approx(30 * 10 / 50), "of a journal without 'caught up'"
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s)


def test_without_that_report_the_time_is_unknown_and_not_training(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("workers started", 1, {"world_size": 2}),
        ("first step", 9, {"resumed_from": 0}),
        ("attempt started", 200, {"attempt": "7.1.0"}),
    )
    assert account_of(folder).seconds[Category.UNKNOWN] == pytest.approx(200)


def test_a_run_that_trains_counts_until_now_and_one_that_fell_silent_until_its_last_report(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("workers started", 1, {"world_size": 2}),
        ("first step", 9, {"resumed_from": 0}),
    )
    RunFolder(folder).write_progress(at=BEGIN_S + 95, attempt="7.0.0", step=33, stall_s=4.0, saves_done=2)
    living = account_of(folder, now_s=BEGIN_S + 100)
    assert (living.is_open, living.wall_s, living.step) == (True, 100, 33)
    assert living.seconds[Category.TRAINING] == pytest.approx(86) and living.seconds[Category.SAVES] == 4
    silent = account_of(folder, now_s=BEGIN_S + 9999)
    assert (silent.is_open, silent.wall_s) == (False, 95)


def test_a_run_in_the_queue_waits_until_now(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ("submitting", 0, {"cluster": "slurm", "attempt": ""}))
    account = account_of(folder, now_s=BEGIN_S + 50)
    assert account.is_open and dict(account.seconds) == {Category.QUEUE: 50}
    assert account.ettr == 0 and account.goodput is None


def test_a_script_without_a_session_trains_from_its_start(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("workers started", 1, {"world_size": 2}),
        ("measured", 50, {"step_at": 0.0, "stall_s": 0.0, "saves_done": 0, "attached": False}),
        ("verdict", 0, {"cause": "finished", "last_step": 0}),
        ("decision", 0, {"action": "finish"}),
    )
    assert account_of(folder).seconds[Category.TRAINING] == 50


def test_time_in_which_the_job_was_suspended_is_nobodys_loss(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("workers started", 1, {"world_size": 2}),
        ("first step", 9, {"resumed_from": 0}),
        ("was suspended", 60, {"seconds": 40.0}),
        ("verdict", 20, {"cause": "finished", "last_step": 5}),
        ("decision", 0, {"action": "finish"}),
    )
    account = account_of(folder)
    assert account.seconds[Category.IDLE] == 40 and account.seconds[Category.TRAINING] == 40


def test_requests_and_the_deaths_of_replicas(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "run",
        ("attempt started", 0, {}),
        ("requests opened", 2, {"total": 100, "answered": 10}),
        ("node answers", 1, {"node": "n1"}),
        ("replica ready", 20, {"node": "n1", "replica": 0, "start": 1}),
        ("replica died", 30, {"node": "n1", "replica": 0, "reason": "signal 9"}),
        ("replica ready", 12, {"node": "n1", "replica": 0, "start": 2}),
        ("output written", 40, {"answers": 97, "errors": 3}),
        ("verdict", 1, {"cause": "finished", "last_step": 100}),
        ("decision", 0, {"action": "finish"}),
    )
    account = account_of(folder)
    assert account.inference is not None
    assert (account.inference.answered, account.inference.errors, account.inference.deaths) == (100, 3, 1)
    assert account.inference.down_s == 12
    assert account.seconds[Category.SETUP] == 21 and account.seconds[Category.TRAINING] == 83


def test_only_the_newest_part_is_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=20)
    whole = account_of(tmp_path / "run")
    middle_s = (whole.begin_s + whole.end_s) / 2
    newer = account_of(tmp_path / "run", since_s=middle_s)
    assert newer.wall_s == pytest.approx(whole.end_s - middle_s)
    assert sum(newer.seconds.values()) == pytest.approx(newer.wall_s)
    assert 0 < newer.failures < whole.failures


def test_what_is_kept_is_bounded_and_the_sums_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=MAX_KEPT + 20)
    account = account_of(tmp_path / "run")
    assert account.attempts == MAX_KEPT + 20 and len(account.rows) == len(account.ends) == MAX_KEPT
    assert sum(loss.ends for loss in account.by_cause.values()) == MAX_KEPT + 21, "and the first start"


def test_a_journal_of_the_first_version_can_be_read() -> None:
    account = account_of(RECORDED)
    assert account.ends[0].cause == "stopped by user" and account.step == 22
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s)


def test_a_torn_journal_says_what_is_left_out_and_one_without_events_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attempts=3)
    path = tmp_path / "run" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-40] + b'\n\x00\xff{"format"\n[]\n')
    report = report_of(RunFolder(tmp_path / "run"), now_s=FAR_S)
    assert report.unreadable == 3 and report.account.attempts == 3
    for content, words in (("", "is empty"), ("{\n", "none of its 1 lines")):
        path.write_text(content)
        with pytest.raises(StorageError, match=words):
            report_of(RunFolder(tmp_path / "run"), now_s=FAR_S)
    path.unlink()
    with pytest.raises(StorageError, match="no journal yet"):
        report_of(RunFolder(tmp_path / "run"), now_s=FAR_S)


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.floats(BEGIN_S, BEGIN_S + 1000), st.lists(st.integers(), max_size=2),
    st.sampled_from(["restart", "continue", "finish", "hang", "finished", "preempted"]),
    st.dictionaries(st.sampled_from(["node", "at", "step", "step_at", "stall_s"]), st.floats(0, 1e10), max_size=3),
)  # fmt: skip
_KEYS = st.sampled_from(
    ["cause", "action", "step_at", "stall_s", "saves_done", "resumed_from", "attached_at", "loop_at", "load_s",
     "first_step_at", "last_step", "world_size", "before", "seconds", "suspects", "node", "cluster", "hosts", "spare"]
)  # fmt: skip
_EVENTS = st.builds(
    Event,
    at=st.floats(BEGIN_S, BEGIN_S + 1000).map(lambda at_s: datetime.fromtimestamp(at_s, UTC)),
    event=st.sampled_from([str(name) for name in EventName] + ["of a newer version"]),
    attempt=st.sampled_from(["", "7.0.0", "7.0.1", "8.1.0", "odd"]),
    details=st.dictionaries(_KEYS, _VALUES, max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_EVENTS, max_size=30), st.sampled_from([0.0, BEGIN_S + 500, BEGIN_S + 5000]))
def test_any_events_in_any_order_sum_to_the_wall_time(events: list[Event], since_s: float) -> None:
    accounting = Accounting(since_s)
    accounting.feed(events)
    account = accounting.finish(now_s=BEGIN_S + 2000)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, abs=1e-3)
    assert all(seconds >= -1e-6 for seconds in account.seconds.values())
    assert all(loss.seconds >= -1e-6 and loss.rank_s >= -1e-3 for loss in account.by_cause.values())
    json.dumps(account.ettr)


def test_every_category_but_new_work_has_a_name_of_googles() -> None:
    assert set(ALIASES) == set(Category) - {Category.TRAINING}


def test_a_submission_that_was_refused_is_not_in_the_queue(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", ("submitting", 0, {"cluster": "slurm"}),
                     ("submission failed", 3, {"reason": "sbatch refused"}))  # fmt: skip
    account = account_of(folder)
    assert account.seconds[Category.QUEUE] == 0 and not account.is_open
    assert account.wall_s < 10


@pytest.mark.parametrize(("lived_s", "cause", "category"), [
    (160, "worker error", Category.IMPORT),
    (160, "finished", Category.TRAINING),
    (5000, "worker error", Category.TRAINING),
])  # fmt: skip
def test_a_script_that_died_at_its_imports_has_not_trained(tmp_path, lived_s, cause, category) -> None:
    folder = written(
        tmp_path / "run",
        ("submitting", 0, {"cluster": "local"}),
        ("attempt started", 1, {}),
        ("workers started", 1, {"world_size": 2}),
        ("measured", lived_s, {"step_at": 0.0, "stall_s": 0.0, "saves_done": 0, "attached": False}),
        ("verdict", 0, {"cause": cause, "reason": "ImportError", "last_step": 0}),
        ("decision", 0, {"action": "stop"}),
    )
    seconds = account_of(folder).seconds
    assert seconds[category] == lived_s
    assert seconds[Category.TRAINING] + seconds[Category.IMPORT] == lived_s


def test_an_injected_fault_makes_no_lemon(tmp_path: Path) -> None:
    blamed = {"cause": "hang", "reason": "rank 1", "first_step": 0, "last_step": 5, "node": "n1"}
    begin = [("attempt started", 1, {}), ("workers started", 1, {"world_size": 2}),
             ("first step", 9, {"resumed_from": 0})]  # fmt: skip
    end = [("verdict", 5, dict(blamed)), ("decision", 0, {"action": "restart"})]
    folder = written(tmp_path / "run", *begin, ("fault injected", 5, {"fault": "hang"}), *end)
    assert account_of(folder).by_node == {}
    real = written(tmp_path / "real", *[(name, at, dict(facts)) for name, at, facts in (*begin, *end)])
    assert set(account_of(real).by_node) == {"n1"}
