"""Which ends of a run Slurm would undo, by end, by moment, by version: on what each version shows of a job."""

from pathlib import Path

import pytest
from of_each import of_each

from slurmft.policy.decide import Budget, decide
from slurmft.policy.verdict import UNDONE_WITHIN_S, Action, Cause, End, Verdict, end_of, why_no_requeue, why_superfluous
from slurmft.scheduler.parsing import parse_requeueing

RECORDED = Path(__file__).parents[2] / "data" / "slurm"
VERSIONS = ("22.05", "23.11", "24.11", "25.11", "26.05")
MOMENTS = {
    # the recording, its restart, and whether an earlier start was preempted
    "calm": ("job-calm", 0, False),
    "in the grace": ("job-grace", 0, False),
    "in the start after a preemption": ("job-later-start", 1, True),
}


def decided(cause: Cause, code: int = 0, *, spent: bool = False) -> Action:
    verdict = Verdict(cause=cause, reason="why", exit_code=code)
    return decide(verdict, Budget(failures_so_far=0, max_failures=0 if spent else 2)).action


ENDS = {
    "stop": end_of(decided(Cause.STOPPED_BY_USER)),
    "not continued": End.NOT_CONTINUED,
    "resubmitted": End.HANDED_ON,
    "finished": end_of(decided(Cause.FINISHED)),
    "93": end_of(decided(Cause.HANG, spent=True)),
    "17": end_of(decided(Cause.VALIDATION_FAILED, 17)),
}
FINAL = {"stop", "not continued", "resubmitted", "93", "17"}


@of_each(end=ENDS, moment=MOMENTS, version=VERSIONS)
def test_requeueing_is_switched_off_where_slurm_would_undo_an_end(end: str, moment: str, version: str) -> None:
    recording, restart, was_preempted = MOMENTS[moment]
    job = parse_requeueing((RECORDED / version / f"{recording}.txt").read_text(), restart)
    found = why_no_requeue(ENDS[end], job, was_preempted=was_preempted)
    assert bool(found) == (end in FINAL and moment != "calm")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("recording", "restart"),
    [("job-grace-off", 0), ("job-requeued", 0), ("job-cancelled", 1), ("job-later-start", 0)],
    ids=["it is off already", "Slurm has requeued it", "it was cancelled", "a newer start of the job runs"],
)
def test_nothing_is_asked_of_slurm_where_it_is_too_late_or_done(recording: str, restart: int, version: str) -> None:
    job = parse_requeueing((RECORDED / version / f"{recording}.txt").read_text(), restart)
    assert not why_no_requeue(End.STOPPED, job, was_preempted=True)


def test_a_decision_to_go_on_leaves_the_job_alone() -> None:
    going_on = end_of(decided(Cause.PREEMPTED))
    job = parse_requeueing((RECORDED / "26.05" / "job-grace.txt").read_text(), 0)
    assert not why_no_requeue(going_on, job, was_preempted=True)


@pytest.mark.parametrize(("was_preempted", "asked"), [(True, True), (False, False)])
def test_a_slurm_that_does_not_answer_is_told_where_the_journal_knows_a_preemption(
    was_preempted: bool, asked: bool
) -> None:
    assert bool(why_no_requeue(End.STOPPED, None, was_preempted=was_preempted)) == asked


BEGAN, ENDED = 1000.0, 2000.0


@of_each(
    end__queued_at__told__expected=[
        (End.STOPPED, ENDED + 1, False, True),
        (End.HANDED_ON, ENDED + 1, False, True),
        (End.NOT_CONTINUED, ENDED + 1, False, True),
        (End.STOPPED, ENDED - 5, False, True),  # while it was stopping
        (End.STOPPED, ENDED + UNDONE_WITHIN_S + 1, True, False),  # a person, later
        (End.STOPPED, BEGAN - 2 * UNDONE_WITHIN_S, False, False),  # this Slurm does not tell when
        (End.STOPPED, None, True, True),
        (End.STOPPED, None, False, False),
        (End.OPEN, ENDED + 1, True, False),
        (End.FINISHED, ENDED + 1, True, False),
    ]
)
def test_a_start_that_nobody_asked_for(end: End, queued_at: float | None, told: bool, expected: bool) -> None:
    assert bool(why_superfluous(end, lived=(BEGAN, ENDED), queued_at=queued_at, told=told)) == expected
