"""The supervisor's side of hang detection: the culprit when an agent reports that a rank hangs; and learned limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmftError
from slurmft.ipc.calls import AskSections
from slurmft.ipc.reports import DurationsReport, HangReport
from slurmft.policy.timing import learned_timeouts
from slurmft.policy.timing.hangs import HEARTBEAT, START_UP, Exceeded, Hang, Limits, WorkerLook, find_culprit, narrowed
from slurmft.policy.verdicts.culprit import Blame
from slurmft.storage.events import EventName
from slurmft.storage.history import ft_state
from slurmft.storage.history.timings import fingerprint
from slurmft.storage.journal import Event
from slurmft.supervisor.budget import progressed
from slurmft.supervisor.fleet.agents import AgentLink, AgentLost, AgentPool
from slurmft.supervisor.grace import workload_of
from slurmft.supervisor.start import Start

LOOK_TIMEOUT_S = 2.0
"""How long to wait for the other agents' answers; a node that does not answer is not accused of anything."""

SAMPLE_S = 10.0
"""One sample of each section in so much time: the longest of all ranks."""

WRITE_S = 60.0

log = logging.getLogger(__name__)


class Hangs:
    """One attempt's hang, if there is one, and what is learned for the next."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool) -> None:
        self._config, self._start, self._pool = config, start, pool
        self._settings = config.fault_tolerance
        self._workload = fingerprint(
            {
                "workload": workload_of(config),
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
            future = self._start.thread.submit(lambda: ft_state.read(self._start.run.path, self._workload))
            try:
                self._samples, self._limits = await asyncio.wait_for(asyncio.wrap_future(future), LOOK_TIMEOUT_S), None
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
            ft_state.write(self._start.run.path, self._workload, {**self._samples})
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
        self.found = find_culprit(looks, first, self.limits_now())
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

    def narrow(self, blame: Blame) -> None:
        """Where the pages did not show the culprit, the stacks may."""
        if self.found is not None and len(blame.culprits) == 1:
            one = blame.culprits[0]
            self.found = narrowed(self.found, one.rank, one.node, one.reason)

    def _learned(self) -> dict[str, float]:
        configured = dict(self._settings.limits().sections)
        doubtful = doubtful_in(self._start.history, configured)
        samples = {name: each for name, each in self._samples.items() if name in configured or name not in doubtful}
        merged = learned_timeouts.merged(
            configured, self._settings.given_sections() | doubtful, samples, self._settings.safety_factor
        )
        return {name: round(limit_s, 3) for name, limit_s in merged.items() if limit_s != configured.get(name)}

    def _take_sample(self) -> None:
        self._window_at = time.monotonic()
        for name, seconds in self._window.items():
            if name in self._samples or len(self._samples) < ft_state.MAX_SECTIONS:
                kept = self._samples.setdefault(name, [])
                kept.append(seconds)
                del kept[: -learned_timeouts.MAX_SAMPLES]
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
