"""Where a run must not go on: what its journal demands, and which nodes of an allocation that leaves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slurmft.launch.elsewhere import Duty, choose, duty_of, left, ours
from slurmft.launch.settling import next_cycle
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def history(*lines: tuple[str, dict[str, Any]], attempt: str = "7.0.0") -> list[Event]:
    return [
        Event(at=BEGIN + timedelta(minutes=minute), attempt=attempt, event=name, details=details)
        for minute, (name, details) in enumerate(lines)
    ]


VERDICT: tuple[str, dict[str, Any]] = ("verdict", {})
MOVE = ("decision", {"action": "continue", "avoid": ["n1", "n2"], "elsewhere": True})
KEEP_OFF = ("decision", {"action": "continue", "avoid": ["n3"]})
STOP = ("decision", {"action": "stop", "avoid": ["n1"], "elsewhere": True})
ESCAPED: tuple[str, dict[str, Any]] = ("exclusion_escaped", {})


@pytest.mark.parametrize(
    ("events", "duty"),
    [
        pytest.param([], Duty(), id="nothing yet"),
        pytest.param([VERDICT, MOVE], Duty(nodes=frozenset({"n1", "n2"})), id="different nodes are demanded"),
        pytest.param([VERDICT, KEEP_OFF], Duty(), id="other nodes are only better"),
        pytest.param([VERDICT, STOP], Duty(), id="it ends"),
        pytest.param([VERDICT, MOVE, VERDICT, KEEP_OFF], Duty(), id="it has been fulfilled"),
        pytest.param(
            [VERDICT, MOVE, ESCAPED, MOVE, ESCAPED, MOVE], Duty(nodes=frozenset({"n1", "n2"}), escapes=2), id="escaped"
        ),
        pytest.param([VERDICT, MOVE, ESCAPED, MOVE, VERDICT, MOVE], Duty(nodes=frozenset({"n1", "n2"})), id="anew"),
        pytest.param([("decision", {})], Duty(), id="a decision of nothing"),
    ],
)
def test_what_the_journal_demands(events, duty):
    assert duty_of(history(*events)) == duty


def test_only_what_the_run_excluded_itself_is_taken_back():
    events = history(("avoiding", {"nodes": "n[1,5]"}), ("decision", {"nodes": "n2"}), ("avoiding", {"nodes": "n3"}))
    assert ours(events) == {"n1", "n3", "n5"}
    assert ours(history(("avoiding", {}), ("avoiding", {"nodes": "n["}))) == frozenset()


def test_a_run_does_not_go_back_to_what_it_has_left_unless_that_is_acquitted():
    acquitted = ("evidence", {"kind": "rerun acquitted", "node": "n1"})
    assert left(history(VERDICT, MOVE, VERDICT, KEEP_OFF)) == {"n1", "n2"}
    assert left(history(VERDICT, MOVE, acquitted)) == {"n2"}
    assert left(history(VERDICT, STOP, VERDICT, KEEP_OFF)) == frozenset()


@pytest.mark.parametrize(
    ("allocated", "avoid", "needed", "chosen"),
    [
        (["n1", "n2", "n3"], {"n1"}, 2, ("n2", "n3")),
        (["n3", "n1", "n2"], set(), 2, ("n3", "n1")),
        (["n1", "n2"], {"n1"}, 2, None),
        (["n1", "n2"], {"n9"}, 2, ("n1", "n2")),
        ([], set(), 1, None),
    ],
)
def test_the_nodes_of_an_allocation(allocated, avoid, needed, chosen):
    assert choose(allocated, frozenset(avoid), needed) == chosen


def test_every_start_in_a_job_is_a_cycle_of_its_own():
    attempt = Attempt(job="7", restart=1)
    assert next_cycle(attempt, []) == attempt
    started: tuple[str, dict[str, Any]] = ("attempt started", {})
    earlier = [*history(started, attempt="7.0.0"), *history(started, attempt="77.1.5"), *history(attempt="7.1.9")]
    assert next_cycle(attempt, earlier) == attempt
    assert str(next_cycle(attempt, [*earlier, *history(started, attempt="7.1.0")])) == "7.1.1"
    assert str(next_cycle(attempt, history(started, started, attempt="7.1.10"))) == "7.1.11"
