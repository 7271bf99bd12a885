"""The supervisor's part of injected faults: takes orders, chooses the rank to hit, journals it, informs the agents."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from slurmft.config.config import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc.calls import Inject
from slurmft.policy.faults import NOT_YET, SIMULATED, Order, order_of
from slurmft.storage.events import EventName
from slurmft.storage.order_file import take_order
from slurmft.supervisor.fleet.agents import AgentLink, AgentPool
from slurmft.supervisor.start import Start
from slurmft.system.background import Background

AGAIN_S = 0.25
SIMULATION = "fault_tolerance.simulate_fault"
"""Who asked for a simulated fault."""

log = logging.getLogger(__name__)


class Injections:
    """Carries out the orders of one attempt; each one beside everything else."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool, background: Background) -> None:
        self._config, self._start, self._pool, self._background = config, start, pool, background
        self._chance = random.Random()  # noqa: S311 - which rank is hit is not a secret

    async def look(self) -> None:
        """Take the order that waits, if there is one. Call it regularly."""
        path = self._start.run.path
        try:
            value = await asyncio.wrap_future(self._start.thread.submit(lambda: take_order(path)))
            if value is not None:
                self._background.start(self._carry_out(order_of(value)))
        except (StorageError, ValueError, OverflowError) as error:
            why = error.what if isinstance(error, StorageError) else f"the order cannot be used: {error}"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, reason=why)
        except OSError as error:  # a filesystem that hiccups; the next look finds the file
            log.debug("no look for orders: %s", error)

    def simulate(self) -> None:
        """Begin what fault_tolerance.simulate_fault asks for, unless the run has had it."""
        if self._config.fault_tolerance.simulate_fault:
            self._background.start(self._simulate())

    async def _simulate(self) -> None:
        section = self._config.fault_tolerance
        history = await asyncio.wrap_future(self._start.thread.submit(self._start.journal.read_past))
        if any(event.event == EventName.FAULT_INJECTED and event.details.get("who") == SIMULATION for event in history):
            return
        kind = section.simulated_fault_type
        if kind == "random":
            kind = self._chance.choice(("rank_killed", "rank_hung"))
        rank = section.simulated_fault_rank
        rank = self._any_rank() if rank is None else rank
        delay_s = section.simulated_fault_base_delay * (1 + self._chance.random() / 10)
        await asyncio.sleep(delay_s)
        log.warning("FT: Simulating fault: %s; rank to fail: %d", kind, rank)
        await self._carry_out(Order(fault=SIMULATED[kind], who=SIMULATION, rank=rank))

    async def _carry_out(self, order: Order) -> None:
        named = {"fault": order.fault.value, "who": order.who}
        try:
            await asyncio.sleep(order.after_s)
        except asyncio.CancelledError:
            self._start.journal.append(
                EventName.FAULT_NOT_INJECTED, **named, reason="the attempt has ended before its time"
            )
            raise
        links, ranks = self._targets(order)
        if not links:
            reason = f"there is no node {order.node!r}" if order.node else "no agent has reported yet"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, **named, reason=reason)
            return
        where = {"node": order.node} if ranks is None else {"ranks": list(ranks)}
        self._start.journal.append(EventName.FAULT_INJECTED, **named, **where)
        hit, refused = await self._tell(links, order, ranks)
        while not hit and refused and all(why.endswith(NOT_YET) for why in refused):
            await asyncio.sleep(AGAIN_S)
            hit, refused = await self._tell(links, order, ranks)
        if not hit:
            why = "; ".join(refused[:5]) or f"there is no rank {', '.join(map(str, ranks or ()))}"
            self._start.journal.append(EventName.FAULT_NOT_INJECTED, **named, **where, reason=why)

    def _targets(self, order: Order) -> tuple[list[AgentLink], Sequence[int] | None]:
        links = [link for _, link in sorted(self._pool.links.items()) if link.channel is not None]
        if order.node:
            return [link for link in links if order.node in (link.host, str(link.node))], None
        return links, (self._any_rank() if order.rank is None else order.rank,)

    def _any_rank(self) -> int:
        return self._chance.randrange((len(self._pool.members) or self._config.nodes) * self._config.nproc_per_node)

    async def _tell(
        self, links: Sequence[AgentLink], order: Order, ranks: Sequence[int] | None
    ) -> tuple[list[int], list[str]]:
        """Which ranks were hit, and why others were not. Each agent knows which are its own."""
        call = Inject(order=order.as_json(), ranks=None if ranks is None else tuple(ranks))
        replies = await asyncio.gather(*(link.call(call) for link in links), return_exceptions=True)
        hit: list[int] = []
        refused: list[str] = []
        for reply in replies:
            if isinstance(reply, BaseException):
                refused.append(str(reply))
            else:
                hit += reply.injected
                refused += reply.refused
        return hit, refused
