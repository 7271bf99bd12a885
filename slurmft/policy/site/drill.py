"""The result of a preemption drill: facts in, a row for each expected event out."""

from __future__ import annotations

from dataclasses import dataclass

from slurmft.policy.timing.grace import REQUEUE_COST_S, Preempts

SLURMS_DELAY_S = 100.0
"""A requeued job that waited longer has fallen back to Slurm's own delay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillFacts:
    """One drill, from the journal of its run and the site; None where something did not happen or is unknown."""

    how: str
    """The signal, in words."""

    partition: str = ""
    preempts: Preempts = Preempts.UNKNOWN
    preempt_mode: str = ""
    grace_s: float | None = None
    kill_wait_s: float | None = None
    stop_reason: str | None = None
    """Where the signal was received first."""

    stop_cause: str = ""
    world_size: int = 0
    marked: int = 0
    """Ranks that SIGTERM reached."""

    saved_step: int | None = None
    save_s: float | None = None
    """From the signal to the commit."""

    requeued: bool = False
    resubmitted: bool = False
    why_not: str = ""
    waited_s: float | None = None
    """From the end of the one start to the next."""

    resumed_from: int | None = None
    workload_needs_s: float | None = None
    """Duration of a stop of the user's own workload, from earlier runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    passed: bool | None
    """None: there is no criterion."""

    text: str


def rows(facts: DrillFacts) -> list[Row]:
    """The table, in the order in which things happen."""
    return [_signalled(facts), _ranks(facts), _saved(facts), _grace(facts), _workload(facts), _requeue(facts),
            _waited(facts), _resumed(facts)]  # fmt: skip


def passed(table: list[Row]) -> bool:
    """Whether nothing in it failed."""
    return all(row.passed is not False for row in table)


def _signalled(facts: DrillFacts) -> Row:
    if facts.stop_reason is None:
        return Row(what="signal", passed=False, text=f"{facts.how}: no process of the run received it")
    return Row(what="signal", passed=True, text=f"{facts.how}: {facts.stop_reason}, taken for: {facts.stop_cause}")


def _ranks(facts: DrillFacts) -> Row:
    text = f"the agents, and {facts.marked} of {facts.world_size} ranks"
    return Row(what="who got it", passed=facts.stop_reason is not None, text=text)


def _saved(facts: DrillFacts) -> Row:
    if facts.saved_step is not None and facts.save_s is None:
        return Row(what="save", passed=True, text=f"step {facts.saved_step}; its duration was not reported")
    if facts.saved_step is None or facts.save_s is None:
        return Row(what="save", passed=False, text="no checkpoint was committed after the signal")
    return Row(what="save", passed=True, text=f"step {facts.saved_step}, {facts.save_s:.1f} s after the signal")


def _grace(facts: DrillFacts) -> Row:
    what, where = "grace", f"partition {facts.partition}" if facts.partition else "the partition"
    if facts.preempts is Preempts.NEVER:
        return Row(what=what, passed=None, text=f"jobs of {where} are not ended by preemption")
    if facts.preempts is Preempts.BY_QOS:
        return Row(what=what, passed=None, text="that of the job's QOS: sacctmgr show qos format=Name,GraceTime")
    if facts.grace_s is None:
        return Row(what=what, passed=None, text=f"the GraceTime of {where} is not known")
    needed_s = (facts.save_s or 0.0) + REQUEUE_COST_S
    if facts.grace_s == 0:
        kill_wait = "KillWait" if facts.kill_wait_s is None else f"KillWait, {facts.kill_wait_s:.0f} s"
        text = f"GraceTime=0 for {where}: a preempted job is ended at once, its save has {kill_wait}"
        return Row(what=what, passed=False, text=text)
    text = f"{facts.grace_s:.0f} s for {where}; this small job needs {needed_s:.1f} s with its requeue"
    return Row(what=what, passed=needed_s <= facts.grace_s, text=text)


def _workload(facts: DrillFacts) -> Row:
    what = "your workload"
    if facts.workload_needs_s is None:
        return Row(what=what, passed=None, text="its stops are not known until a run of it has saved")
    text = f"a stop took {facts.workload_needs_s:.1f} s in earlier runs"
    if facts.grace_s is None or facts.preempts is not Preempts.BY_PARTITION:
        return Row(what=what, passed=None, text=text)
    return Row(
        what=what, passed=facts.workload_needs_s <= facts.grace_s, text=f"{text}, of {facts.grace_s:.0f} s grace"
    )


def _requeue(facts: DrillFacts) -> Row:
    what = "requeue"
    if "CANCEL" in facts.preempt_mode.upper().split(","):
        then = "a successor was queued" if facts.resubmitted else "slurmft queues a successor where continue_by lets it"
        text = f"PreemptMode=CANCEL for partition {facts.partition}: Slurm cancels what it preempts; {then}"
        return Row(what=what, passed=False, text=text)
    if facts.requeued:
        return Row(what=what, passed=True, text="the job was requeued")
    if facts.resubmitted:
        return Row(
            what=what, passed=False, text=f"refused ({facts.why_not or 'no reason given'}); a successor was queued"
        )
    return Row(what=what, passed=False, text=facts.why_not or "the job did not go through the queue again")


def _waited(facts: DrillFacts) -> Row:
    if facts.waited_s is None:
        return Row(what="ineligible", passed=False, text="it did not start again while the drill waited")
    slow = facts.waited_s > SLURMS_DELAY_S
    more = "; Slurm's own delay: raise preemption.requeue_delay_s" if slow else ""
    return Row(what="ineligible", passed=not slow, text=f"{facts.waited_s:.1f} s from requeue to start{more}")


def _resumed(facts: DrillFacts) -> Row:
    if facts.resumed_from is None:
        return Row(what="resumed", passed=False, text="no step was done after it")
    if facts.resumed_from == facts.saved_step:
        return Row(what="resumed", passed=True, text=f"from step {facts.resumed_from}, the one that was saved")
    return Row(what="resumed", passed=False, text=f"from step {facts.resumed_from}, and not from {facts.saved_step}")
