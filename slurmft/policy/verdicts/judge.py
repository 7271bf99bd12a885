"""From all findings about an attempt's end to one verdict: the most specific one wins, victims never do."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.timing.hangs import Hang
from slurmft.policy.verdicts.findings import (
    DECIDING,
    Finding,
    Level,
    WorkerEnd,
    findings_of_ranks,
    has_failed,
    how,
    where,
)
from slurmft.policy.verdicts.testimony import StepWords, Testimony
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause, Verdict

MAX_EVIDENCE = 12

_SAID_BY_ALL = frozenset({Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED})

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_OBEYED = frozenset({*(-number for number in _STOPPING), *(128 + number for number in _STOPPING)})
_GONE = ("DOWN", "FAIL", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN", "REBOOT")
_LEVEL_OUTSIDE = {Cause.CANCELLED: Level.A_PERSONS_STOP}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """Digests have shown that replicas of the state differ."""

    reason: str
    step: int
    """After which they were seen to."""

    trusted_step: int
    """The newest one after which they did not, or the one that the attempt resumed from."""

    suspects: tuple[Suspect, ...] = ()
    """Those that are wrong; empty where that cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The supervisor's knowledge beside the workers' ends."""

    reached: tuple[int, int] = (0, 0)
    """First and newest step of the attempt."""

    saved: int | None = None
    """Newest step that every rank has saved."""

    planned: Cause | None = None
    """A stop had been asked for, and why."""

    planned_reason: str = ""
    planned_suspects: tuple[Suspect, ...] = ()
    """Nodes that the stop is to lead away from."""

    lost_nodes: tuple[str, ...] = ()
    """Nodes whose agent is gone."""

    corruption: Corruption | None = None
    """Replicas differ; the workers were killed for it, or have ended."""

    hang: Hang | None = None
    """Ranks hung, and were killed for it."""

    launch_error: str = ""
    outside: Cause | None = None
    """Slurm was ending the job, and why."""

    outside_reason: str = ""
    heard: Testimony = field(default_factory=Testimony)
    """Files that workers have left, and srun's messages."""

    node_states: Mapping[str, str] = field(default_factory=dict)
    """Slurm's states of the allocation's nodes; a node that is not in it is neither well nor sick."""

    complete_codes: frozenset[int] = frozenset()
    """Exit codes that mean the same as 0 (``exit_actions.COMPLETE``)."""

    only_lead: bool = False
    """``ignore_nonlead_status``: how ranks other than 0 end does not matter."""


def judge(ends: Sequence[WorkerEnd], *, world_size: int, seen: Circumstances) -> Verdict:
    """The verdict on an attempt of ``world_size`` ranks; ``ends`` are in the order in which they were seen."""
    counted = [end for end in ends if end.rank == 0] if seen.only_lead else list(ends)
    expected = 1 if seen.only_lead else world_size
    is_sound = seen.corruption is None
    found = (_finished(counted, expected, seen) if is_sound else None) or _most_telling(
        _candidates(counted, expected, seen)
    )
    evidence = (*found.evidence, *_lines(seen.heard.step), *seen.heard.problems)
    return Verdict(
        cause=found.cause,
        reason=found.reason,
        exit_code=found.code,
        first_step=seen.reached[0],
        last_step=seen.reached[1],
        saved_step=seen.saved,
        rank=found.rank,
        node=found.node,
        suspects=found.suspects,
        rerun=found.rerun,
        traceback=found.traceback,
        evidence=tuple(dict.fromkeys(evidence))[:MAX_EVIDENCE] if found.cause is not Cause.FINISHED else (),
    )


def ends_attempt(end: WorkerEnd, *, planned: bool, complete_codes: frozenset[int], only_lead: bool) -> bool:
    """Whether this end is a failure that the other ranks cannot go on after.

    With ``planned``, a script that knows only the signal may die of it while its peers still save.
    """
    calm = {0, *complete_codes, *(_OBEYED if planned else ())}
    return has_failed(end, frozenset(calm)) and (end.rank == 0 or not only_lead)


def _most_telling(candidates: Sequence[Finding]) -> Finding:
    """The first of the highest level, with the suspects of all verdict files with the same cause."""
    found = min(candidates, key=lambda finding: finding.level)
    alike = [each for each in candidates if (each.told, each.cause, each.rerun) == (True, found.cause, found.rerun)]
    if not found.told or found.cause not in _SAID_BY_ALL:
        return found
    named = {(one.node, one.gpu): one for each in reversed(alike) for one in reversed(each.suspects)}
    return replace(found, suspects=tuple(reversed(named.values())))


def _without_echoes(said: Sequence[Finding]) -> list[Finding]:
    """A trainer's ranks agree to end with 16 or 17; only those that know of a wrong result leave a verdict file."""
    told = {finding.cause for finding in said if finding.told and finding.rerun != "transient"} & _SAID_BY_ALL
    return [finding for finding in said if finding.told or finding.cause not in told]


def _finished(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> Finding | None:
    calm = frozenset({0} | seen.complete_codes)
    if len(ends) != expected or any(has_failed(end, calm) for end in ends):
        return None
    code = max((end.code for end in ends), default=0)
    who = f"all {expected} ranks" if not seen.only_lead else "the lead rank"
    trouble = seen.lost_nodes or seen.hang or seen.launch_error
    others = seen.planned or seen.outside or trouble or _objections(seen.heard)
    if all(end.finished for end in ends):
        reason = f"{who} finished at step {ends[0].step}"
    elif not others and all(end.code in calm for end in ends):
        reason = f"{who} exited with {code}"
    else:
        return None
    code = max(code, 0)  # it had finished when it was killed
    return Finding(level=Level.FAILED_VALIDATION, cause=Cause.FINISHED, reason=reason, code=code)


def _objections(heard: Testimony) -> bool:
    """Whether a verdict file says otherwise than an exit code of 0."""
    return any(report.binding and report.cause in DECIDING and report.rerun != "transient" for report in heard.reports)


def _candidates(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> list[Finding]:
    calm = frozenset({0} | seen.complete_codes)
    said = _without_echoes(list(findings_of_ranks(ends, seen.heard, calm)))
    if complaints := [finding for finding in said if finding.cause is Cause.COMMUNICATION_ERROR]:
        said = [finding for finding in said if finding.cause is not Cause.COMMUNICATION_ERROR]
        said.append(who_is_missed(complaints, ends))
    found = [*said, *_from_srun(seen.heard.step, ends), *_of_nodes(said, seen)]
    if seen.corruption is not None:
        found.append(_corrupted(seen.corruption))
    if seen.hang is not None:
        found.append(_hung(seen.hang))
    if seen.outside is not None:
        level = _LEVEL_OUTSIDE.get(seen.outside, Level.SLURMS_END)
        found.append(Finding(level=level, cause=seen.outside, reason=seen.outside_reason))
    if seen.launch_error:
        found.append(_not_launched(seen.launch_error, seen.heard.step))
    if seen.planned is not None:
        found.append(_planned(seen.planned, ends, expected, seen, said))
    found.append(_nothing(ends, expected))
    return found


def _not_launched(error: str, step: StepWords) -> Finding:
    """srun kills the tasks on all other nodes when it cannot start one: those are victims."""
    if not step.refused:
        return Finding(level=Level.LAUNCH, cause=Cause.LAUNCH_FAILURE, reason=error)
    (node, words), more = step.refused[0], _named([node for node, _ in step.refused[1:]])
    return Finding(
        level=Level.LAUNCH, cause=Cause.LAUNCH_FAILURE, node=node,
        reason=f"srun could not start the agent on {node}{f' and {more}' if more else ''}: {words}",
        suspects=tuple(Suspect(node=each) for each, _ in step.refused),
    )  # fmt: skip


def _corrupted(seen: Corruption) -> Finding:
    one = seen.suspects[0] if len(seen.suspects) == 1 else None
    return Finding(
        level=Level.CORRUPTION, cause=Cause.REPLICAS_DIFFER, reason=seen.reason, suspects=seen.suspects,
        rank=one.rank if one else None, node=one.node if one else "",
    )  # fmt: skip


def _hung(hang: Hang) -> Finding:
    one = len(hang.ranks) == 1
    return Finding(
        level=Level.HANG, cause=Cause.HANG, reason=hang.reason, rank=hang.ranks[0] if one else None,
        node=hang.nodes[0] if one else "", suspects=hang.suspects,
    )  # fmt: skip


def _planned(
    cause: Cause, ends: Sequence[WorkerEnd], expected: int, seen: Circumstances, said: Sequence[Finding]
) -> Finding:
    level = Level.A_PERSONS_STOP if cause is Cause.STOPPED_BY_USER else Level.PLANNED_STOP
    # the stop goes on by itself; a node that a rank accuses is still worth avoiding
    held = tuple(suspect for finding in said if finding.cause in DECIDING for suspect in finding.suspects)
    suspects = (*seen.planned_suspects, *held)
    return Finding(level=level, cause=cause, reason=_planned_reason(ends, expected, seen), suspects=suspects)


def _planned_reason(ends: Sequence[WorkerEnd], expected: int, seen: Circumstances) -> str:
    calm = frozenset({0} | seen.complete_codes | _OBEYED)
    if failed := [end for end in ends if has_failed(end, calm)]:
        detail = f": {failed[0].error}" if failed[0].error else ""
        return f"{seen.planned_reason}; no save at the stop: {where(failed[0])} {how(failed[0])}{detail}"
    if not any(end.attached for end in ends):
        return f"{seen.planned_reason}; the workers have ended"
    stopped = [end for end in ends if end.stopped]
    if len(stopped) == expected:
        return f"{seen.planned_reason}; all ranks stopped at step {stopped[0].step}"
    return f"{seen.planned_reason}; {len(stopped)} of {expected} ranks stopped at a step boundary"


def _of_nodes(said: Sequence[Finding], seen: Circumstances) -> list[Finding]:
    """Nodes that are gone; one that has ended processes for memory is not."""
    step, found = seen.heard.step, []
    starved = [node for node in seen.lost_nodes if node in step.oom_nodes]
    down = [node for node, state in seen.node_states.items() if state.upper().startswith(_GONE)]
    lost = tuple(dict.fromkeys([*(n for n in seen.lost_nodes if n not in starved), *step.failed_nodes, *down]))
    for node in starved:
        reason = f"lost contact with {node}, where the kernel has ended processes for memory"
        found.append(
            Finding(level=Level.OUT_OF_MEMORY, cause=Cause.HOST_OUT_OF_MEMORY, reason=reason, node=node,
                    suspects=(Suspect(node=node),))
        )  # fmt: skip
    if lost:
        felt = f"; felt by {said[0].reason}" if said else ""
        found.append(
            Finding(
                level=Level.NODE_LOST, cause=Cause.NODE_LOST, reason=f"lost contact with {_named(lost)}{felt}",
                node=lost[0], suspects=tuple(Suspect(node=node) for node in lost),
                traceback=said[0].traceback if said else "",
                evidence=tuple(f"Slurm says {node} is {seen.node_states[node]}" for node in down),
            )
        )  # fmt: skip
    return found


def _named(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 10} more" if len(nodes) > 10 else ""
    return ", ".join(nodes[:10]) + more


def _from_srun(step: StepWords, ends: Sequence[WorkerEnd]) -> list[Finding]:
    """Exit codes that only srun has seen."""
    found = []
    for end in step.ends if not ends else ():
        for cause, code, level in (
            (Cause.VALIDATION_FAILED, EXIT_VALIDATION_FAILED, Level.FAILED_VALIDATION),
            (Cause.RERUN_ELSEWHERE, EXIT_RERUN_ELSEWHERE, Level.RERUN),
        ):
            if end.code == code:
                reason = f"srun: tasks {end.tasks} on {_named(end.nodes)} exited with {code}"
                suspects = tuple(Suspect(node=node) for node in end.nodes) if cause is Cause.RERUN_ELSEWHERE else ()
                found.append(Finding(level=level, cause=cause, reason=reason, code=code, suspects=suspects))
    return found


def _lines(step: StepWords) -> list[str]:
    lines = [f"srun: {_named(end.nodes)}: {end.tasks}: {end.word}" + (f" with {end.code}" if end.code else "")
             for end in step.ends]  # fmt: skip
    lines += [f"srun: node failure on {node}" for node in step.failed_nodes]
    lines += [f"srun: launch failed on {node}: {words}" for node, words in step.refused]
    if step.oom_nodes or step.oom_somewhere:
        lines.append(f"srun: processes ended for memory{f' on {_named(step.oom_nodes)}' if step.oom_nodes else ''}")
    return lines


def _nothing(ends: Sequence[WorkerEnd], expected: int) -> Finding:
    if len(ends) < expected:
        reason = f"{expected - len(ends)} of {expected} ranks disappeared without an exit status"
    elif all(end.code == 0 for end in ends):
        reason = f"all {expected} ranks exited with 0"
    else:
        reason = "the workers were ended, and none of them says why"
    return Finding(level=Level.NOTHING, cause=Cause.UNKNOWN, reason=reason)


_KIND_OF = {
    Cause.RERUN_ELSEWHERE: Kind.RERUN_UNDECIDED,
    Cause.REPLICAS_DIFFER: Kind.REPLICA_DIFFERS,
    Cause.STRAGGLER: Kind.STRAGGLER,
    Cause.HANG: Kind.HANG,
    Cause.NODE_LOST: Kind.NODE_LOST,
    Cause.SIGNAL_CRASH: Kind.CRASH,
    Cause.HOST_OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Cause.COMMUNICATION_ERROR: Kind.COMMUNICATION,
}
_KIND_OF_RERUN = {
    "persistent": Kind.RERUN_PERSISTENT,
    "transient": Kind.RERUN_TRANSIENT,
    "correct": Kind.RERUN_ACQUITTED,
}


def held_against(verdict: Verdict, told: Sequence[Evidence], *, at: float) -> tuple[Evidence, ...]:
    """An attempt's entries for the exclusion list: the workers' observations, and those of the verdict alone.

    A worker's own report on a node counts once: the verdict adds nothing of the same kind on the same node.
    """
    kind = _KIND_OF.get(verdict.cause) if verdict.rerun != "inconclusive" else None
    if verdict.cause is Cause.VALIDATION_FAILED:
        kind = _KIND_OF_RERUN.get(verdict.rerun)
    known = {(each.kind, each.suspect.node) for each in told}
    if kind is None:
        return tuple(told)
    added = [
        Evidence(kind=kind, suspect=suspect, message=verdict.reason[:1000], at=at, step=verdict.last_step or None)
        for suspect in {each.node: each for each in reversed(verdict.suspects)}.values()
        if (kind, suspect.node) not in known
    ]
    return (*told, *added)


MAX_NAMED = 8
"""More ranks than that are not behind: the others are ahead, for an unknown reason."""


def who_is_missed(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> Finding:
    """One finding for all complaints: it blames the rank that is behind or absent, or none.

    Behind are ranks with fewer steps than the others, where they are not the larger part. Absent are ranks that did not
    complain although all others did: they were not in the collective that failed, and we had to kill them.
    """
    count = f"{len(complaints)} of {len(ends)} ranks report a communication error"
    first = complaints[0]
    missed, why = _behind(ends), "behind"
    if not missed:
        missed, why = _absent(complaints, ends), "absent"
    if not missed:
        return replace(first, rank=None, node="", suspects=(), reason=f"{first.reason}; {count}, and no rank is behind",
                       evidence=(count, *first.evidence))  # fmt: skip
    steps = max(end.step for end in ends) - missed[0].step
    tale = (
        f"was {steps} step{'s' if steps > 1 else ''} behind"
        if why == "behind"
        else "neither arrived nor reported an error"
    )
    theirs = next((finding for finding in complaints if finding.rank == missed[0].rank), first)
    return replace(
        first,
        rank=missed[0].rank,
        node=missed[0].node,
        suspects=tuple(Suspect(node=end.node, rank=end.rank) for end in missed),
        reason=f"{first.reason}; {where(missed[0])} {tale}",
        traceback=theirs.traceback,
        evidence=(count, f"{where(missed[0])} {tale}", *first.evidence),
    )


def _behind(ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    told = [end for end in ends if end.attached]
    if not told or (least := min(end.step for end in told)) == max(end.step for end in told):
        return []
    behind = [end for end in told if end.step == least]
    return behind if 2 * len(behind) <= len(told) and len(behind) <= MAX_NAMED else []


def _absent(complaints: Sequence[Finding], ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    complained = {finding.rank for finding in complaints}
    absent = [end for end in ends if end.killed and end.rank not in complained]
    few = 2 * len(absent) < len(ends) and len(absent) <= MAX_NAMED
    return absent if few and len(absent) + len(complained) == len(ends) else []
