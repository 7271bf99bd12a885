"""Which nodes a run gets and which it avoids, and what is written to the exclusion list."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurmft.config.run import RunConfig, components_of
from slurmft.errors import SlurmError, StorageError
from slurmft.ipc.messages import NoticeReport
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.judge import held_against
from slurmft.policy.suspicion import State, observed, standing, suspect_gpus
from slurmft.policy.verdict import (
    EXIT_RERUN_ELSEWHERE,
    EXIT_VALIDATION_FAILED,
    GOES_ON,
    Action,
    Cause,
    Decision,
    Evidence,
    Kind,
    Suspect,
    Verdict,
)
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import NamedNodes, current_job
from slurmft.storage.exclusions import ExclusionList, Exclusions
from slurmft.storage.journal import Event, EventName, listed, newest_of
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor import avoided_nodes
from slurmft.supervisor.avoided_nodes import Avoidance, expanded
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.observations import EvidenceReader, progressed

# --- From what workers and supervisors saw of nodes to the exclusion list, while the run goes on and at its ends ---

EVERY_S = 10.0
LIST_S = 5.0
"""How long the exclusion list's filesystem may delay the end of an attempt."""

ON_PURPOSE = "a fault was injected on purpose; the exclusion list is not told"

log = logging.getLogger(__name__)


class EvidenceSender:
    """Hands a run's evidence in, each piece once. In a thread of its own, so that a list that stalls blocks nothing."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        self._config, self._run, self._journal = config, start.run, start.journal
        self._attempt = start.cluster.attempt
        self._is_local = start.cluster.name == "local"
        self._thread = FolderThread()
        self._list: ExclusionList | None = None
        self._reader = EvidenceReader(start.run.verdicts)
        self._waiting: list[tuple[str, Evidence]] = []
        """Evidence that the list did not take yet."""

        journaled = [event.details for event in start.history if event.event == EventName.EVIDENCE]
        self._told = {(facts.get("file"), facts.get("seen_at")) for facts in journaled}
        self._own: list[Evidence] = []
        """This attempt's."""

    async def watch(self) -> None:
        """Hand in what running workers write; a transient error must not wait for the end of the run."""
        while True:
            await self._thread.ask(self._collect)
            await asyncio.sleep(EVERY_S)

    def add(self, evidence: Sequence[Evidence]) -> None:
        """Hand in what the supervisor itself has seen; returns at once."""
        self._thread.submit(lambda: self._hand_in(evidence, str(self._attempt)))

    def note(self, host: str, report: NoticeReport) -> None:
        """Journal what a node's agent has announced, and hand it in where it is more than a warning of hardware."""
        more = {"fault": True} if report.fault else {"left_s": round(report.left_s, 1)} if report.ends else {}
        self._journal.append(EventName.NOTICE, node=host, source=report.source, what=report.what, ends=report.ends,
                             **more)  # fmt: skip
        if report.ends or not report.fault:
            kind = Kind.HEALTH if report.fault else Kind.RECLAIMED if report.ends else Kind.AT_RISK
            message = f"{host}: {report.what}"
            self.add([Evidence(kind=kind, suspect=Suspect(node=host), message=message, at=time.time())])

    def finish(self, verdict: Verdict, *, wait: bool = True) -> None:
        """Hand in the rest, and what the verdict itself says of its suspects. Later starts retry what fails."""

        def work() -> None:
            self._collect()
            added = held_against(verdict, self._own, at=time.time())[len(self._own) :]
            self._hand_in(added, str(self._attempt))

        if not wait:
            self._thread.submit(work)
            return
        try:
            self._thread.call(work, timeout_s=LIST_S)
        except StorageError as error:
            log.warning("the exclusion list did not take the evidence in time: %s", error.what)

    def _collect(self) -> None:
        self._waiting += [(name, each) for name, each in self._reader.new() if (name, each.at) not in self._told]
        while self._waiting:
            name, evidence = self._waiting[0]
            attempt = name.partition(".rank-")[0]
            if not self._hand_in([evidence], attempt, file=name):
                return
            del self._waiting[0]

    def _hand_in(self, evidence: Sequence[Evidence], attempt: str, *, file: str = "") -> bool:
        if not evidence:
            return True
        run, job = str(self._run.path), attempt.split(".", maxsplit=1)[0]
        where = str(self._run.verdicts / file) if file else ""
        try:
            on_purpose = self._on_purpose(attempt)
            if not self._is_local:  # a local machine is on no list
                real = [each for each in evidence if each.kind not in on_purpose]
                observations = [observed(each, source=attempt, run=run, job=job, where=where) for each in real]
                self._list = self._list or avoided_nodes.exclusion_list(self._config, os.environ)
                self._list.observe(observations)
        except (StorageError, SlurmError, OSError) as error:
            log.warning("the exclusion list cannot be written: %s", error)
            return False
        for each in evidence:
            if attempt == str(self._attempt):
                self._own.append(each)
            facts = {
                "gpu": each.suspect.gpu,
                "rank": each.suspect.rank,
                "step": each.step,
                "file": file,
                "reason": ON_PURPOSE if each.kind in on_purpose else "",
            }
            self._journal.append(
                EventName.EVIDENCE, kind=each.kind.value, node=each.suspect.node, message=each.message, seen_at=each.at,
                **{key: value for key, value in facts.items() if value not in ("", None)},
            )  # fmt: skip
        return True

    def _on_purpose(self, attempt: str) -> Collection[Kind]:
        """The kinds of its evidence that may come from a fault which ``slurmft inject`` or a simulation has ordered."""
        faults: dict[str, int] = {}
        with contextlib.suppress(OSError):  # of a full disk
            self._journal.flush(1.0)
        for event in self._journal.each(frozenset([EventName.FAULT_NOT_INJECTED.encode()])):
            if event is not None and event.attempt:
                missed = event.event == EventName.FAULT_NOT_INJECTED and {"ranks", "node"} & event.details.keys()
                faults.setdefault(event.attempt, 0)
                faults[event.attempt] += (event.event == EventName.FAULT_INJECTED) - bool(missed)
        before = [count for each, count in faults.items() if each != attempt][-1:]
        if faults.get(attempt):
            return tuple(Kind)
        return (Kind.REPLICA_DIFFERS, Kind.REPEATED_DEATH) if any(before) else ()  # they look back


# --- place elsewhere ---
# Keeping a run away from nodes: which nodes its next placement must avoid, and whether its placement avoids them.

MAX_ESCAPES = 3
"""Placements on nodes that were to be kept away from, in a row, before the run is given up, or goes on all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The excluded nodes of a job's next placement."""

    excluded: frozenset[str]
    """All of the job's excluded nodes: its user's own and ours. An update replaces the ones it has."""

    own: frozenset[str] = frozenset()
    """Its user's own among them."""

    avoidance: Avoidance
    """Ours, and why."""

    impossible: str = ""
    """Why a suspect cannot be kept away from; empty when all can."""


def read_exclusions(config: RunConfig) -> Exclusions | None:
    """The exclusion list; None, with a warning, when it cannot be read: the run goes on without it."""
    thread = FolderThread()  # its filesystem may be another one than the run folder's
    try:
        found = thread.call(lambda: avoided_nodes.exclusion_list(config, os.environ).read(), timeout_s=LIST_S)
    except (StorageError, SlurmError, OSError) as error:
        log.warning("the exclusion list is not used: %s", error)
        return None
    if found.damage:
        log.warning("%s", found.damage)
    return found


def next_placement(
    config: RunConfig, *, partition: str, job: OwnJob | None, history: Sequence[Event], suspects: Sequence[str]
) -> Placement | None:
    """The nodes that the run's next placement must avoid; None where there are none, and none to take back.

    When Slurm does not report its nodes, only the suspects are excluded: they were in an allocation, so Slurm knows
    their names, and one unknown name would make it refuse all of them.
    """
    exclusions = read_exclusions(config)
    wanted = tuple(dict.fromkeys([*suspects, *sorted(left(history))]))
    if not wanted and not ours(history, job.job_id if job else None) and not excluded_now(config, exclusions):
        return None
    named = named_by_user(config, job=job, history=history)
    own = named.excluded
    try:
        found = _to_avoid(config, exclusions, partition=partition, suspects=wanted, named=named)
        if _kept(found, suspects):  # nodes left earlier must not prevent it from leaving these
            found = _to_avoid(config, exclusions, partition=partition, suspects=suspects, named=named)
    except (SlurmError, StorageError) as error:
        log.warning("only the suspects are avoided: %s", error.what)
        return Placement(excluded=own | set(wanted), avoidance=Avoidance(nodes=wanted, problem=error.what), own=own)
    return Placement(excluded=own | set(found.nodes), avoidance=found, own=own, impossible=_kept(found, suspects))


def _kept(found: Avoidance, suspects: Sequence[str]) -> str:
    """Which of them are not avoided, and why; empty when all are. A node that the job cannot get need not be."""
    return "; ".join(f"{drop.node}: {drop.reason}" for drop in found.dropped if drop.node in suspects)


def named_by_user(config: RunConfig, *, job: OwnJob | None, history: Sequence[Event]) -> NamedNodes:
    """Nodes that the run's user, not we, excludes and asks for: in the configuration, behind ``--``, or in the job."""
    chain = since_submission(history, job.job_id if job else None)
    submitted = [event.details.get("excluded") for event in chain if event.event == EventName.SUBMITTING]
    own = frozenset().union(*map(expanded, submitted or [config.slurm.exclude]))
    asked_for = expanded((config.slurm.model_extra or {}).get("nodelist"))
    if job is not None:
        try:
            found = own_jobs.named_nodes(job)
        except SlurmError as error:
            log.warning("the nodes that job %s excludes are not known: %s", job, error.what)
        else:
            own, asked_for = own | (found.excluded - ours(history, job.job_id)), asked_for | found.required
    return NamedNodes(excluded=own, required=asked_for)


def _to_avoid(
    config: RunConfig, exclusions: Exclusions | None, *, partition: str, suspects: Sequence[str] = (),
    named: NamedNodes,
) -> Avoidance:  # fmt: skip
    needed = [each.nodes for each in components_of(config)]
    if (job := current_job(os.environ)) is not None and job.part:
        needed.append(job.node_count)  # a role's job goes elsewhere with all of its nodes, or not at all
    found = avoided_nodes.to_avoid(
        exclusions or Exclusions(),
        partition=partition or None,
        nodes_needed=max(needed),
        suspects=suspects,
        max_excluded_fraction=config.exclusions.max_excluded_fraction,
        rules=config.exclusions.rules(),
        excluded_anyway=named.excluded,
        asked_for=named.required,
    )
    return _accepted(config, found, named.excluded)


def _accepted(config: RunConfig, found: Avoidance, own: frozenset[str]) -> Avoidance:
    """``found`` without the nodes that Slurm, which knows more of the request than we do, cannot spare."""

    def ask(nodes: frozenset[str]) -> str:
        return own_jobs.test_placement(RunFolder(config.run_folder).script, excluded=own | nodes)

    if not found.nodes:
        return found
    try:
        return FolderThread().call(lambda: avoided_nodes.submitted(found, ask)[1], timeout_s=LIST_S)
    except (SlurmError, StorageError) as error:  # a script of the user's own, or Slurm refuses for another reason
        log.debug("not tried: %s", error)
        return found


def excluded_now(config: RunConfig, exclusions: Exclusions | None) -> frozenset[str]:
    """Nodes that the list excludes, whether a request can bear it or not."""
    if exclusions is None:
        return frozenset()
    standings = standing(exclusions.observations, exclusions.manual, time.time(), config.exclusions.rules())
    return frozenset(node for node, each in standings.items() if each.state is State.EXCLUDED)


def all_busy(config: RunConfig, partition: str, allocated: Collection[str], avoid: Collection[str]) -> str:
    """Why the run could not begin elsewhere at once; empty when it could, or when that is unknown.

    Its own nodes are free as soon as it leaves them.
    """
    try:
        records = slurm.nodes()
    except SlurmError:
        return ""
    wanted = partition.split(",")
    names = {record.node for record in records if record.partition in wanted and record.is_free} | set(allocated)
    free, needed = names - set(avoid), config.nodes + config.spare_nodes
    if len(free) >= needed:
        return ""
    return f"only {len(free)} of {needed} nodes are free now (rerun.wait_for_others is false)"


def to_keep_off(
    config: RunConfig, *, partition: str, job: OwnJob, history: Sequence[Event], allocated: Sequence[str]
) -> frozenset[str]:
    """Allocated nodes that the exclusion list excludes, as far as the run could be placed without them.

    By the same rules as ``next_placement``: a node that cannot be avoided does not count. Where Slurm does not say
    which those are, the run keeps off all of them if it has enough others.
    """
    exclusions = read_exclusions(config)
    if not (excluded := frozenset(allocated) & excluded_now(config, exclusions)):
        return frozenset()
    try:
        suspects = sorted(duty_of(history).undecided)
        named = named_by_user(config, job=job, history=history)
        found = _to_avoid(config, exclusions, partition=partition, suspects=suspects, named=named)
    except (SlurmError, StorageError) as error:
        log.warning("Slurm does not report its nodes, so the run stays on its own: %s", error.what)
        return excluded if len(allocated) - len(excluded) >= config.size.minimum else frozenset()
    return frozenset(allocated) & set(found.nodes)


def ours(history: Sequence[Event], job: str | None = None) -> frozenset[str]:
    """Nodes that the run has excluded by itself since its user submitted it, rather than the user.

    Args:
        job: the job in question; None: the newest one in ``history``.
    """
    chain = since_submission(history, job)
    added = [expanded(event.details.get("nodes")) for event in chain if event.event == EventName.AVOIDING]
    own = [expanded(event.details.get("excluded")) for event in chain if event.event == EventName.SUBMITTING]
    return frozenset().union(*added).difference(*own)


def since_submission(history: Sequence[Event], job: str | None = None) -> Sequence[Event]:
    """The events since a user last submitted the run; nothing where ``job`` came from a plain sbatch."""
    first, newest, announced = 0, None, False
    for index, event in enumerate(history):
        if event.event == EventName.SUBMITTING:
            first, announced = index, True
        elif event.event in (EventName.RESUBMITTING, EventName.RESCUING):
            announced = True
        elif event.event == EventName.ATTEMPT_STARTED and (its_job := event.attempt.split(".")[0]) != newest:
            if newest is not None and not announced:
                first = index
            newest, announced = its_job, False
    if None not in (job, newest) and job != newest and not announced:
        return ()
    return history[first:]


def left(history: Sequence[Event]) -> frozenset[str]:
    """Nodes that the run has moved away from, and that were not acquitted since: it must not return to them."""
    nodes: set[str] = set()
    for event in history:
        facts = event.details
        if event.event == EventName.DECISION and facts.get("elsewhere") and facts.get("action") == Action.CONTINUE:
            nodes.update(map(str, facts.get("avoid", [])))
        elif event.event == EventName.EVIDENCE and facts.get("kind") == Kind.RERUN_ACQUITTED:
            nodes.discard(str(facts.get("node")))
    return frozenset(nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """Nodes that the run must go on without, according to its journal."""

    nodes: frozenset[str] = frozenset()
    undecided: frozenset[str] = frozenset()
    """These, and those of an earlier demand, until new steps are saved without them: an attempt that is preempted
    before it has computed anything again proves nothing."""

    gpus: frozenset[str] = frozenset()
    """UUIDs of GPUs that it must go on without, on any node."""

    escapes: int = 0
    """Times in a row that it was placed on one of them all the same."""


def duty_of(history: Sequence[Event]) -> Duty:
    """The demands of the newest decision on the placement that follows it."""
    none: frozenset[str] = frozenset()
    nodes, undecided, inconclusive, gpus, escapes = none, none, none, none, 0
    for event in history:
        facts = event.details
        if event.event == EventName.VERDICT:
            nodes, inconclusive, escapes = none, none, 0
            if progressed(facts):
                undecided, gpus = none, none
        elif event.event == EventName.INCONCLUSIVE:
            inconclusive = frozenset(map(str, listed(facts.get("suspects"))))
        elif event.event == EventName.AVOIDING_GPUS:
            gpus |= {*map(str, listed(facts.get("gpus")))}
        elif event.event == EventName.EXCLUSION_ESCAPED:
            escapes += 1
        elif event.event == EventName.DECISION and str(facts.get("action")) not in GOES_ON:
            nodes, undecided, gpus = none, inconclusive, none
        elif event.event == EventName.DECISION:
            nodes = frozenset(map(str, listed(facts.get("avoid")))) if facts.get("elsewhere") else none
            undecided = nodes or undecided
    return Duty(nodes=nodes, undecided=undecided, gpus=gpus, escapes=escapes)


def suspect_gpus_of(config: RunConfig, history: Sequence[Event]) -> frozenset[str]:
    """UUIDs of the GPUs that no worker may use: the run's own suspects, and those that the list excludes."""
    exclusions = read_exclusions(config)
    duty = duty_of(history).gpus
    if exclusions is None:
        return duty
    return duty | frozenset(suspect_gpus(exclusions.observations, time.time(), config.exclusions.rules()))


def nodes_to_use(allocated: Sequence[str], avoid: frozenset[str], needed: int) -> tuple[str, ...] | None:
    """The nodes of the allocation that need not be avoided, in its order; None when they are fewer than ``needed``."""
    others = tuple(node for node in allocated if node not in avoid)
    return others if len(others) >= needed else None


def without_other_gpus(hosts: Sequence[str], gpus: Collection[str]) -> Verdict:
    """The verdict of an attempt on ``hosts``, which cannot prove to have enough GPUs beside these suspect ones."""
    return Verdict(
        cause=Cause.RERUN_ELSEWHERE,
        reason=f"{', '.join(hosts)} cannot prove to have enough GPUs beside the suspect ones",
        suspects=tuple(Suspect(node=host, gpu=gpu) for host in hosts for gpu in sorted(gpus)),
        rerun="inconclusive",  # nothing was computed there, so nothing is held against them
    )


# --- Before an attempt begins: which nodes of the allocation it runs on, and whether it must keep off them ---

_MOVING = frozenset({Cause.STRAGGLER, Cause.VALIDATION_FAILED, Cause.DATA_CORRUPTION, Cause.REPLICAS_DIFFER})
_STARTS = frozenset({EventName.ATTEMPT_STARTED, EventName.CANDIDATE_STARTED, EventName.SUPERVISOR_LOST})
"""The last: a supervisor that was killed at the very begin of an attempt has left no entry of it but this one."""


def next_cycle(attempt: Attempt, history: Sequence[Event]) -> Attempt:
    """``attempt`` with the number of starts that its job and restart have had already."""
    mine = f"{attempt.job}.{attempt.restart}."
    cycles = [
        int(event.attempt.removeprefix(mine))
        for event in history
        if event.event in _STARTS and event.attempt.startswith(mine)
    ]
    return Attempt(job=attempt.job, restart=attempt.restart, cycle=max(cycles, default=-1) + 1)


def settle(config: RunConfig, start: Start) -> tuple[Verdict, Decision] | None:
    """Choose the nodes to run on; what to follow instead of an attempt, when the allocation is on nodes to keep off."""
    cluster = start.cluster
    if not isinstance(cluster, SlurmCluster):
        return None
    cluster.nodes = ()  # those of the last attempt, whose reasons may be gone
    duty = duty_of(start.history)
    allocated = cluster.present()
    excluded = to_keep_off(
        config, partition=cluster.job.partition, job=cluster.own, history=start.history, allocated=allocated
    )
    suspects = duty.nodes & set(allocated)
    former = left(start.history)
    if not (duty.undecided | former) & set(allocated) and not excluded:
        return None
    for avoid in (duty.undecided | former | excluded, duty.undecided | excluded, duty.nodes | excluded, duty.nodes):
        chosen = nodes_to_use(allocated, avoid, config.size.minimum)
        if chosen is not None and (not excluded & set(chosen) or duty.escapes >= MAX_ESCAPES):
            cluster.nodes = chosen
            if avoid & set(allocated):
                start.journal.append(
                    EventName.KEEPING_OFF, nodes=sorted(set(allocated) - set(chosen)), chosen=list(chosen)
                )
            return None
    return _escape(suspects, excluded, duty, start)


def _escape(
    suspects: frozenset[str], excluded: frozenset[str], duty: Duty, start: Start
) -> tuple[Verdict, Decision] | None:
    """Placed on a node to be avoided: move again, at most MAX_ESCAPES times in a row."""
    nodes = sorted(suspects | excluded)
    start.journal.append(EventName.EXCLUSION_ESCAPED, nodes=nodes, suspects=sorted(suspects), times=duty.escapes + 1)
    log.warning("placed on %s, which the run was to keep off (time %d)", ", ".join(nodes), duty.escapes + 1)
    verdict = Verdict(cause=_why_elsewhere(start.history), reason=f"placed on {', '.join(nodes)}, to be kept off")
    if duty.escapes < MAX_ESCAPES:
        decision = Decision(
            action=Action.CONTINUE, reason=verdict.reason, exit_code=EXIT_RERUN_ELSEWHERE,
            avoid=tuple(sorted(duty.nodes)), elsewhere=bool(duty.nodes),
        )  # fmt: skip
        return verdict, decision
    if not suspects or verdict.cause is Cause.STRAGGLER:  # slow is better than not at all
        return None
    reason = f"inconclusive: {verdict.reason} {duty.escapes + 1} times in a row"
    start.journal.append(EventName.INCONCLUSIVE, reason=reason, suspects=sorted(duty.nodes))
    return verdict, Decision(action=Action.STOP, reason=reason, exit_code=EXIT_VALIDATION_FAILED)


def _why_elsewhere(history: Sequence[Event]) -> Cause:
    """The cause of the newest decision to go on elsewhere."""
    newest = newest_of(history, EventName.VERDICT)
    cause = None if newest is None else newest.details.get("cause")
    return Cause(cause) if cause in _MOVING else Cause.RERUN_ELSEWHERE
