"""Saves that keep failing are told loudly: in the journal, in status, in explain."""

import errno
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each
from rank_facts import training

from slurmft.cli.main import cli
from slurmft.ipc.messages import WorkerFacts
from slurmft.operations.control import overview, saves_told
from slurmft.policy.checkpoints import FailingSaves, News, copy_holders
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.observations import Observations

N, F, K, W = News.NOTHING, News.FAILED, News.KEEP_FAILING, News.WORK_AGAIN
ATTEMPT = Attempt(job="7", restart=0)


@pytest.mark.parametrize(
    ("most", "told", "expected"),
    [
        (3, [(0, 0), (0, 1), (0, 2)], [N, N, N]),
        (3, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)], [F, F, K, F, F, K, F]),
        (3, [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)], [F, F, N, F, F]),
        (1, [(1, 0), (1, 1), (2, 1)], [K, W, K]),
        (2, [(9, 0), (9, 1), (9, 2)], [K, W, N]),
        (2, [(2, 0), (4, 1)], [K, K]),  # one was done in between, and then two failed
    ],
    ids=["all is well", "again when doubled", "one in between", "at once", "many in one report", "both in one report"],
)
def test_what_is_said(most, told, expected):
    failing = FailingSaves(most)
    assert [failing.note(failures=failures, done=done) for failures, done in told] == expected


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=60))
def test_an_alarm_is_raised_and_taken_back_in_turns_and_rarely(most, deltas):
    failing, failures, done, alarms, alarming = FailingSaves(most), 0, 0, 0, False
    for failed, did in deltas:
        failures, done = failures + failed, done + did
        news = failing.note(failures=failures, done=done)
        alarms += news is K
        assert (news is W) <= alarming
        alarming = failing.is_alarming
        assert not (news is K and not alarming)
    longest = sum(failed for failed, _ in deltas)
    assert alarms <= max(1, longest)


def facts(*, step: int, failures: int = 0, saves: int = 0, saved: int = -1) -> WorkerFacts:
    return training(step=step, saves=saves, saved=saved, save_failures=failures, save_errno=errno.ENOSPC)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_the_journal_status_and_explain_tell_of_it_until_it_is_over(run, monkeypatch):
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[], max_failed_saves=2)
    seen.note_progress([facts(step=10, saves=1, saved=8)])
    seen.note_progress([facts(step=20, failures=1, saves=1, saved=8)])
    seen.note_progress([facts(step=30, failures=2, saves=1, saved=8)])
    seen.write_progress()
    events = run.journal().read()
    assert [event.event for event in events] == ["save failed", "save failed", "saves keep failing"]
    words = "2 in a row, No space left on device; the newest checkpoint of this attempt is of step 8"
    assert events[-1].details["reason"] == f"{words}, and the run is at step 30"
    assert run.progress()["failed_saves"] == 2

    monkeypatch.setattr("slurmft.operations.control._state", lambda *_: ("running", "job 7 running on n1"))
    view = overview(run, {})
    assert view.detail == "job 7 running on n1; SAVES FAIL: 2 in a row, No space left on device"
    assert view.as_json()["failed_saves"] == 2
    told = CliRunner().invoke(cli, ["explain", str(run.path)], standalone_mode=False)
    assert "SAVES KEEP FAILING, on attempt 7.0.0" in told.output
    assert "repair the filesystem" in told.output

    seen.note_progress([facts(step=40, failures=2, saves=2, saved=40)])
    seen.write_progress()
    assert "failed_saves" not in run.progress()
    assert overview(run, {}).failed_saves == 0
    assert saves_told(run.journal().read()) == []


def test_a_run_that_is_not_running_has_no_failing_saves(run, monkeypatch):
    (run.path / "progress.json").write_text(json.dumps({"format": 1, "failed_saves": 4, "save_problem": "x"}))
    monkeypatch.setattr("slurmft.operations.control._state", lambda *_: ("finished", "done"))
    assert (overview(run, {}).detail, overview(run, {}).failed_saves) == ("done", 0)


@pytest.mark.parametrize("value", ["many", -3, 1.5, None, True], ids=["text", "negative", "fraction", "none", "flag"])
def test_a_report_that_makes_no_sense_is_no_alarm(value, run, monkeypatch):
    (run.path / "progress.json").write_text(json.dumps({"format": 1, "failed_saves": value}))
    monkeypatch.setattr("slurmft.operations.control._state", lambda *_: ("running", "here"))
    assert overview(run, {}).failed_saves == 0


# --- Where copies of a node's part lie, and which losses they outlive ---


FEW = st.integers(1, 40)
COPIES = st.integers(0, 5)


@of_each(
    nodes__copies__holders=[
        (1, 0, ((),)),
        (1, 3, ((),)),
        (4, 0, ((), (), (), ())),
        (2, 1, ((1,), (0,))),
        (4, 1, ((1,), (0,), (3,), (2,))),
        (3, 1, ((1,), (2,), (0,))),
        (5, 1, ((1,), (0,), (3,), (4,), (2,))),
        (6, 2, ((1, 2), (2, 0), (0, 1), (4, 5), (5, 3), (3, 4))),
        (5, 2, ((1, 2), (2, 3), (3, 4), (4, 0), (0, 1))),
        (2, 3, ((1,), (0,))),
    ]
)
def test_where_copies_lie(nodes, copies, holders):
    assert copy_holders(nodes, copies) == holders


@of_each(nodes__copies=[(0, 1), (-1, 0), (2, -1), (2.0, 1), (2, 1.5), (float("nan"), 1), (3, True)])
def test_numbers_that_make_no_sense_are_refused(nodes, copies):
    with pytest.raises(ValueError, match="make no sense"):
        copy_holders(nodes, copies)


def unsupplied(nodes: int, copies: int, lost: Iterable[int]) -> frozenset[int]:
    """The nodes whose part of a snapshot is gone from all memory once the ``lost`` nodes are; empty when none is."""
    gone = frozenset(lost)
    holders = copy_holders(nodes, copies)
    return frozenset(node for node in gone if 0 <= node < nodes and gone.issuperset(holders[node]))


@given(FEW, COPIES)
def test_every_node_has_its_copies_elsewhere_and_all_bear_alike(nodes, copies):
    holders = copy_holders(nodes, copies)
    wanted = min(copies, nodes - 1)
    assert len(holders) == nodes
    for node, others in enumerate(holders):
        assert len({*others} - {node}) == len(others) == wanted
        assert all(0 <= other < nodes for other in others)
    held = [sum(node in others for others in holders) for node in range(nodes)]
    assert set(held) == {wanted}


@given(st.integers(1, 9), st.integers(0, 4))
def test_as_many_nodes_may_go_as_there_are_copies_and_not_one_more(nodes, copies):
    for lost in itertools.combinations(range(nodes), min(copies, nodes)):
        assert unsupplied(nodes, copies, lost) == (frozenset(range(nodes)) if len(lost) == nodes else frozenset())
    if copies < nodes:
        first_group = {0, *copy_holders(nodes, copies)[0]}
        assert 0 in unsupplied(nodes, copies, first_group)


def test_groups_lose_less_than_a_ring_would():
    pairs = list(itertools.combinations(range(8), 2))
    by_groups = sum(bool(unsupplied(8, 1, lost)) for lost in pairs)
    by_ring = sum(b - a in (1, 7) for a, b in pairs)
    assert (by_groups, by_ring) == (4, 8)


def test_ten_thousand_nodes():
    assert len(copy_holders(10_001, 2)) == 10_001
