"""The supervisor's side of hang detection: the culprit when an agent reports that a rank hangs; and learned limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmftError
from slurmft.ipc.channel import BadMessage
from slurmft.ipc.flight_dump import Outlier
from slurmft.ipc.messages import AskSections, DurationsReport, EvidenceReply, HangReport, RankEvidence, TakeEvidence
from slurmft.policy import hangs, judge
from slurmft.policy.hangs import HEARTBEAT, START_UP, Exceeded, Hang, Limits, WorkerLook, find_culprit, narrowed
from slurmft.storage import history as storage_history
from slurmft.storage.history import fingerprint
from slurmft.storage.journal import Event, EventName, Journal
from slurmft.supervisor.agents import AgentLink, AgentLost, AgentPool, ask_unread
from slurmft.supervisor.cluster import Start
from slurmft.supervisor.observations import progressed

# --- forensics ---
# The last look at all ranks of an attempt before its workers are killed: files on every node, one line in the journal.
#
#     await take_evidence(pool, journal, folder)      # then kill
#
# It never raises and never exceeds its time limits: a node that does not answer is a finding, not a failure.

EVIDENCE_S = 0.3
"""How long the workers of a node may take to answer; all of them do in a few milliseconds when they can."""

HANG_DUMPS_S = 2.5
"""How long torch's flight recorders may take beyond that, for a look after a hang, which has cost more: torch looks
once a second whether its record is wanted. No time where there is no recorder, as with gloo."""

ROUND_TRIP_S, REPLY_S = 0.5, 0.0005
"""Beyond that, how long an agent's reply may take, and for each agent more."""

MAX_LINES = 32
"""Ranks that the journal names; the others are in the files."""

log = logging.getLogger(__name__)


async def look_at_all(
    pool: AgentPool, attempt_folder: Path, *, per_node: int = 0, ends: Sequence[judge.WorkerEnd] = (),
    overdue: Mapping[int, str] | None = None, dumps_within_s: float = 0.0,
) -> LastLook:  # fmt: skip
    """Have every agent that can be reached look at its workers. They may be killed then; ``conclude`` names culprits.

    Args:
        per_node: ranks of each node, so that those of nodes that do not answer can be named.
        ends: the workers that have ended, in that order.
        overdue: ranks whose section is open for too long, with the text of that finding.
        dumps_within_s: HANG_DUMPS_S where collectives hang; 0 does not wait for flight recorders.
    """
    began = time.monotonic()
    links = pool.members or [pool.links[node] for node in sorted(pool.links)]
    call = TakeEvidence(within_s=EVIDENCE_S, dumps_within_s=dumps_within_s)
    longest_s = EVIDENCE_S + dumps_within_s + ROUND_TRIP_S + len(links) * REPLY_S
    replies = await ask_unread(links, call, timeout_s=longest_s)
    return LastLook(call=call, links=links, replies=replies, per_node=per_node, ends=ends, overdue=overdue,
                    folder=attempt_folder, seconds=time.monotonic() - began)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class LastLook:
    """What all agents have answered. To read the replies of thousands takes longer than all the rest of a decision, so
    that it is done after the kill."""

    call: TakeEvidence
    links: Sequence[AgentLink]
    replies: Sequence[bytes | AgentLost]
    per_node: int
    ends: Sequence[judge.WorkerEnd]
    overdue: Mapping[int, str] | None
    folder: Path
    seconds: float
    found: judge.Blame | None = None
    """Once it has been concluded."""

    def conclude(self, journal: Journal) -> judge.Blame:
        """Read the replies and journal the culprits, once."""
        if self.found is not None:
            return self.found
        found: dict[int, tuple[judge.Summary, RankEvidence]] = {}
        lost: dict[int, str] = {}
        outliers: Sequence[Outlier] = ()
        pids: dict[int, tuple[int, str, str]] = {}
        for place, (link, reply) in enumerate(zip(self.links, self.replies, strict=True)):
            if (read := self._read(link, reply)) is None:
                lost |= dict.fromkeys(range(place * self.per_node, (place + 1) * self.per_node), link.host)
            else:
                outliers = outliers or read.outliers
                pids |= {facts.rank: (facts.pid, link.host, link.address) for facts in read.ranks}
                found |= {facts.rank: (_summary(facts, link.host), facts) for facts in read.ranks}
        summaries = with_ends([summary for summary, _ in found.values()], self.ends)
        # a rank that has ended by itself is described by its end, even if its node is gone now
        lost = {rank: node for rank, node in lost.items() if rank not in {end.rank for end in self.ends}}
        stuck = judge.stuck_collectives(_records(found))
        absent = judge.absent_ranks(stuck) or late_ranks(outliers, pids)
        self.found = judge.blame(summaries, lost=lost, overdue=self.overdue, absent=absent)
        facts = {rank: raw for rank, (_, raw) in found.items()}
        journal.append(EventName.LAST_LOOK, seconds=round(self.seconds, 3), folder=str(self.folder),
                       **as_event(self.found, summaries, facts), collectives=judge.stuck_told(stuck))  # fmt: skip
        return self.found

    def _read(self, link: AgentLink, reply: bytes | AgentLost) -> EvidenceReply | None:
        """None where the agent could not be reached, or its reply is none."""
        if isinstance(reply, AgentLost):
            log.debug("no evidence: %s", reply)
            return None
        try:
            return self.call.reply_of(reply)
        except BadMessage as error:
            log.warning("closed the connection of %s: %s", link.host, error)
            if link.channel is not None:
                link.channel.close()
            return None


def late_ranks(outliers: Sequence[Outlier], pids: Mapping[int, tuple[int, str, str]]) -> dict[int, str]:
    """Ranks that NCCL reports as being behind or silent, with its words; none where it is most of them.

    Args:
        pids: of each rank, with its node's name and address. NCCL knows processes by their numbers, which may be given
            on several nodes, and may name a node by another of its addresses.
    """
    by_pid: dict[int, list[int]] = {}
    for rank, (pid, *_) in pids.items():
        by_pid.setdefault(pid, []).append(rank)
    found: dict[int, str] = {}
    for each in outliers:
        ranks = by_pid.get(each.pid, [])
        here = [rank for rank in ranks if each.host in pids[rank][1:]] or ranks
        if len(here) == 1:
            found[here[0]] = each.what
    return found if 2 * len(found) < len(pids) else {}


def _records(found: Mapping[int, tuple[judge.Summary, RankEvidence]]) -> dict[int, list[judge.Progress]]:
    """The flight recorders' records of these ranks; without those that have none, or that we killed."""
    told = {rank: facts.collectives for rank, (summary, facts) in found.items() if not summary.killed}
    return {rank: list(groups) for rank, groups in told.items() if groups}


def _summary(facts: RankEvidence, node: str) -> judge.Summary:
    return judge.Summary(
        rank=facts.rank,
        node=node,
        where=facts.kind,
        doing=facts.doing,
        attached=facts.attached,
        step=facts.step,
        tick=facts.tick,
        frames=facts.python_top,
        sections=facts.sections,
        exit_code=facts.exit_code,
        killed=facts.killed,
        recorded=bool(facts.collectives),
    )


def ended_by_watchdog(ends: Iterable[judge.WorkerEnd]) -> bool:
    """Whether torch's watchdog may have ended one of them: the others are about to write their records."""
    return any(end.code == -signal.SIGABRT and not end.killed for end in ends)


def with_ends(summaries: Sequence[judge.Summary], ends: Sequence[judge.WorkerEnd]) -> list[judge.Summary]:
    """The summaries, dead ranks first and in the order in which they ended, with their last words."""
    by_rank = {summary.rank: summary for summary in summaries}
    dead = [
        replace(
            by_rank.pop(end.rank, judge.Summary(rank=end.rank, node=end.node, where=judge.Where.DEAD, step=end.step)),
            where=judge.Where.DEAD, exit_code=end.code, killed=end.killed, error=end.error,
        )
        for end in ends
    ]  # fmt: skip
    return [*dead, *by_rank.values()]


def as_event(
    found: judge.Blame, summaries: Sequence[judge.Summary], facts: Mapping[int, RankEvidence]
) -> dict[str, Any]:
    """The journal's entry: culprits with their stacks, victims by what they do, and a line for each rank.

    Bounded, however many ranks there are: of those that are alike in what they do, some are named.
    """
    by_rank = {summary.rank: summary for summary in summaries}
    culprits = [
        {
            "rank": each.rank, "node": each.node, "reason": each.reason[:500],
            "step": by_rank[each.rank].step if each.rank in by_rank and by_rank[each.rank].attached else None,
            "sections": list(by_rank[each.rank].sections) if each.rank in by_rank else [],
            "stack": list(by_rank[each.rank].frames) if each.rank in by_rank else [],
        }
        for each in found.culprits[:MAX_LINES]
    ]  # fmt: skip
    first = [each.rank for each in found.culprits]
    order = [*(by_rank[rank] for rank in first if rank in by_rank), *(s for s in summaries if s.rank not in first)]
    return {
        "culprits": culprits,
        "victims": _victims([by_rank[rank] for rank in found.victims if rank in by_rank]),
        "undecided": found.undecided,
        "ranks": [_line(summary, facts.get(summary.rank)) for summary in order[:MAX_LINES]],
        "ranks_left_out": max(0, len(order) - MAX_LINES),
    }


def _victims(ranks: Sequence[judge.Summary]) -> list[str]:
    """One line for all that do the same."""
    doing: dict[str, list[judge.Summary]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        step = f" at step {rank.step}" if rank.attached else ""
        what = rank.doing if rank.where is not judge.Where.DEAD else _end_of(rank)
        doing.setdefault(f"{what}{step}", []).append(rank)
    lines = [f"{judge.ranks_told([rank.rank for rank in group], MAX_LINES)}: {what}" for what, group in doing.items()]
    return lines[:MAX_LINES]


def _end_of(rank: judge.Summary) -> str:
    return "has just ended" if rank.exit_code is None else f"ended with code {rank.exit_code}"


def _line(rank: judge.Summary, facts: RankEvidence | None) -> str:
    parts = [f"rank {rank.rank} on {rank.node}: {rank.where.value}"]
    if rank.where is judge.Where.DEAD:
        parts.append(_end_of(rank))
    elif rank.doing != rank.where.value:
        parts.append(rank.doing)
    if rank.attached:
        parts.append(f"step {rank.step}")
    if facts is not None and facts.process:
        parts.append(f"process {facts.pid} in state {facts.process}")
    if facts is not None and facts.wchan:
        parts.append(f"kernel: {facts.wchan}")
    return ", ".join(parts)


# --- hangs ---

LOOK_TIMEOUT_S = 2.0
"""How long to wait for the other agents' answers; a node that does not answer is not accused of anything."""

SAMPLE_S = 10.0
"""One sample of each section in so much time: the longest of all ranks."""

WRITE_S = 60.0


class Hangs:
    """One attempt's hang, if there is one, and what is learned for the next."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool) -> None:
        self._config, self._start, self._pool = config, start, pool
        self._settings = config.fault_tolerance
        self._workload = fingerprint(
            {
                "workload": fingerprint(config.workload),
                "world_size": config.world_size,
                "checkpoint": config.checkpoint.model_dump(mode="json"),
                "rerun": config.rerun.mode,
            }
        )
        self._samples: dict[str, list[float]] = {}
        self._window: dict[str, float] = {}
        self._window_at = self._written_at = time.monotonic()
        self._is_new = False
        self._begun = False
        self._limits: dict[str, float] | None = None
        self.found: Hang | None = None
        """The hung rank; None as long as none hangs."""

    async def recall(self) -> None:
        """Read the learned limits of earlier attempts; none where the run folder does not answer."""
        if self._settings.calc_ft_timeouts:
            reading = self._start.thread.ask(
                lambda: storage_history.read_ft_state(self._start.run.path, self._workload)
            )
            try:
                self._samples, self._limits = await asyncio.wait_for(reading, LOOK_TIMEOUT_S), None
            except TimeoutError:
                log.warning("the learned timeouts could not be read within %.0f s", LOOK_TIMEOUT_S)

    def limits(self) -> dict[str, float]:
        """The learned limits, for the agents; by section."""
        if not self._settings.calc_ft_timeouts:
            return {}
        if self._limits is None:
            self._limits = self._learned()
        return self._limits

    def note(self, report: DurationsReport) -> None:
        """Take in how long sections took on one node."""
        for name, seconds in report.sections:
            self._window[name] = max(self._window.get(name, 0.0), seconds)
        if time.monotonic() - self._window_at >= SAMPLE_S:
            self._take_sample()

    def leave(self) -> None:
        """Write all that has been learned: the attempt is over. In the run folder's thread."""
        if self._window:
            self._take_sample()
        self.write()

    def exchange(self) -> None:
        """Write what has been learned, now and then. In the run folder's thread."""
        if self._is_new and time.monotonic() - self._written_at > WRITE_S:
            self.write()

    def write(self) -> None:
        """Write what has been learned, if it is new; what cannot be written is learned again."""
        if not self._is_new:
            return
        self._is_new, self._written_at = False, time.monotonic()
        try:
            storage_history.write_ft_state(self._start.run.path, self._workload, {**self._samples})
        except (OSError, SlurmftError) as error:
            log.warning("the learned timeouts were not written: %s", getattr(error, "what", error))

    async def investigate(self, link: AgentLink, report: HangReport) -> Hang | None:
        """Find the culprit of the hang that this agent reports; None where one is being handled already."""
        if self._begun:
            return None
        self._begun = True
        first = Exceeded(rank=report.rank, section=report.section, held_s=report.held_s,
                         limit_s=report.limit_s, why=report.why)  # fmt: skip
        looks = await self.looks()
        if first.rank not in {look.rank for look in looks}:
            looks.append(WorkerLook(rank=first.rank, node=link.host))
        ranks = len(self._pool.members) * self._config.nproc_per_node
        self.found = find_culprit(looks, first, self.limits_now(), ranks=ranks)
        self._start.journal.append(EventName.WORKER_HUNG, **_story(self.found))
        if first.section == HEARTBEAT:
            log.warning("Did not get subsequent heartbeat. Waited %.2f seconds.", first.held_s)
        elif first.section == START_UP:
            log.warning("Did not get initial heartbeat. Waited %.2f seconds.", first.held_s)
        return self.found

    def limits_now(self) -> Limits:
        """The limits of this attempt's workers: configured, or learned."""
        limits = self._settings.limits()
        return replace(limits, sections={**limits.sections, **self.limits()})

    @property
    def overdue(self) -> Mapping[int, str]:
        """In words, each limit that was exceeded, by rank; empty as long as no rank hangs."""
        return self.found.overdue if self.found is not None else {}

    def narrow(self, blame: judge.Blame) -> None:
        """Where the pages did not show the culprit, the stacks may."""
        if self.found is not None and len(blame.culprits) == 1:
            one = blame.culprits[0]
            self.found = narrowed(self.found, one.rank, one.node, one.reason)

    def _learned(self) -> dict[str, float]:
        configured = dict(self._settings.limits().sections)
        doubtful = doubtful_in(self._start.history, configured)
        samples = {name: each for name, each in self._samples.items() if name in configured or name not in doubtful}
        merged = hangs.merged(
            configured, self._settings.given_sections() | doubtful, samples, self._settings.safety_factor
        )
        return {name: round(limit_s, 3) for name, limit_s in merged.items() if limit_s != configured.get(name)}

    def _take_sample(self) -> None:
        self._window_at = time.monotonic()
        for name, seconds in self._window.items():
            if name in self._samples or len(self._samples) < storage_history.MAX_SECTIONS:
                kept = self._samples.setdefault(name, [])
                kept.append(seconds)
                del kept[: -hangs.MAX_SAMPLES]
        self._window, self._is_new, self._limits = {}, True, None

    async def looks(self) -> list[WorkerLook]:
        """What each rank does now; those of an agent that does not answer in time are left out."""
        return [look for looks in await asyncio.gather(*map(_looks_at, self._pool.members)) for look in looks]


def doubtful_in(history: Sequence[Event], configured: Mapping[str, float]) -> frozenset[str]:
    """Sections whose learned limit has ended an attempt since the run last made progress: perhaps they need longer.

    Without a return to the configured limits, a run would be ended in the same long evaluation again and again.
    """
    found: set[str] = set()
    for event in history:
        section, limit_s = event.details.get("section"), event.details.get("limit_s")
        if event.event == EventName.WORKER_HUNG and isinstance(section, str) and isinstance(limit_s, int | float):
            if 0 < limit_s < configured.get(section, math.inf):
                found.add(section)
        elif event.event == EventName.VERDICT and progressed(event.details):
            found.clear()
    return frozenset(found)


async def _looks_at(link: AgentLink) -> list[WorkerLook]:
    """The workers of one agent; those that it does not report in time are left out."""
    looks: list[WorkerLook] = []
    with contextlib.suppress(AgentLost):
        while True:
            answer = await link.call(AskSections(first=len(looks)), timeout_s=LOOK_TIMEOUT_S)
            looks += [worker.as_look(link.host) for worker in answer.workers]
            if not answer.more or not answer.workers:
                break
    return looks


def _story(hang: Hang) -> dict[str, Any]:
    """The hang's details for the journal; a rank and a node where it is one."""
    one = len(hang.ranks) == 1
    return {
        "rank": hang.ranks[0] if one else None, "node": hang.nodes[0] if one else "", "section": hang.section,
        "held_s": round(hang.held_s, 3), "limit_s": hang.limit_s, "reason": hang.reason,
        "ranks": list(hang.ranks[:100]), "nodes": list(dict.fromkeys(hang.nodes))[:100],
        "victims": list(hang.victims[:100]),
    }  # fmt: skip
