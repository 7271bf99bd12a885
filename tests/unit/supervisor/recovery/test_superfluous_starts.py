"""What the journal knows of a job's earlier starts: whether one was preempted, and whether this one is to train."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slurmft.policy.verdict import End
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt
from slurmft.supervisor.act import superfluous, was_preempted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = Attempt(job="7", restart=1, cycle=0)
Line = tuple[str, str, dict[str, Any]]


def journal(*lines: Line) -> list[Event]:
    """One line a second."""
    return [
        Event(at=NOON + timedelta(seconds=second), event=name, attempt=attempt, details=details)
        for second, (attempt, name, details) in enumerate(lines)
    ]


def first(name: str, **details: Any) -> Line:
    return "7.0.0", name, details


STARTED = first("attempt started")
STOP = first("decision", action="stop", exit_code=75)
GOES_ON = first("decision", action="continue", exit_code=75)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], False),
        ([STARTED, first("verdict", cause="time limit")], False),
        ([STARTED, first("verdict", cause="preempted")], True),
        ([STARTED, first("stop requested", cause="preempted"), first("verdict", cause="stopped by user")], True),
        ([STARTED], True),  # it was killed, perhaps at the end of a grace
        ([("7.1.0", "attempt started", {}), ("7.1.0", "verdict", {"cause": "preempted"})], False),  # this one
        ([("8.0.0", "attempt started", {}), ("8.0.0", "verdict", {"cause": "preempted"})], False),  # another job
    ],
)
def test_an_earlier_start_was_preempted(lines: list[Line], expected: bool) -> None:
    assert was_preempted(journal(*lines), SECOND) == expected


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ([STARTED, STOP], End.STOPPED),
        ([STARTED, STOP, first("requeue stays on")], End.STOPPED),
        ([STARTED, GOES_ON, first("resubmitting"), first("resubmitted", job="8")], End.HANDED_ON),
        ([STARTED, GOES_ON, first("not continued", reason="job 8 of this run is in the queue", job="8")],
         End.HANDED_ON),
        ([STARTED, GOES_ON, first("not continued", reason="preemption.continue_by is nothing")], End.NOT_CONTINUED),
        ([STARTED, STOP, ("7.1.0", "superfluous start", {})], End.STOPPED),
        # to train
        ([STARTED, GOES_ON, first("requeued")], None),
        ([STARTED, GOES_ON], None),
        ([STARTED, GOES_ON, first("not continued", reason="neither requeue nor resubmit worked", command="x")], None),
        ([STARTED, GOES_ON, first("not continued", reason="the end of this attempt was acted on already")], None),
        ([STARTED, first("decision", action="of the future")], None),
        ([STARTED], None),
        ([("8.0.0", "attempt started", {}), ("8.0.0", "decision", {"action": "stop"})], None),
        ([STOP, STARTED, first("decision", action="restart")], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_start_right_after_an_end_that_was_final(lines: list[Line], end: End | None) -> None:
    history = journal(*lines)
    queued_at = (history[-1].at if history else NOON).timestamp() + 1
    found = superfluous(history, Attempt(job="7", restart=2, cycle=0), queued_at)
    assert (found.end if found else None) == end
    if found:
        assert found.earlier == "7.0.0"
        assert found.exit_code == 75


def test_a_person_who_requeues_a_stopped_job_later_is_obeyed() -> None:
    history = journal(STARTED, STOP)
    assert superfluous(history, SECOND, history[-1].at.timestamp() + 3600) is None
