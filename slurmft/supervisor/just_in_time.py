"""Before an attempt's workers are killed: every node keeps the newest complete step (``agent.just_in_time``)."""

from __future__ import annotations

from collections.abc import Sequence

from slurmft.ipc.calls import RescueState
from slurmft.ipc.pages.heartbeat import RESCUE_S
from slurmft.ipc.replies import Rescued
from slurmft.storage.events import EventName
from slurmft.storage.journal import Journal
from slurmft.supervisor.fleet.agents import AgentLink, ask_each

ROUND_TRIP_S = 2.0


async def rescue(links: Sequence[AgentLink], journal: Journal) -> None:
    """Have every node keep what it has; the journal says of which step. Never raises."""
    replies = await ask_each(links, RescueState(), timeout_s=RESCUE_S + ROUND_TRIP_S)
    kept = {link.host: reply.step for link, reply in zip(links, replies, strict=True) if isinstance(reply, Rescued)}
    if steps := {step for step in kept.values() if step >= 0}:
        missing = [link.host for link in links if kept.get(link.host, -1) < max(steps)]
        journal.append(EventName.STATE_KEPT, step=max(steps), nodes=len(links) - len(missing), missing=missing)
