"""Ending an attempt's agents: by a message first, then through their srun, then by force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence

from slurmft.ipc.calls import Kill, Shutdown
from slurmft.policy.verdicts.findings import WorkerEnd
from slurmft.policy.verdicts.symptoms import cause_of_text
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause
from slurmft.storage.events import EventName
from slurmft.storage.journal import Journal
from slurmft.supervisor.fleet.agents import AgentLink, AgentPool
from slurmft.supervisor.fleet.outliving import Orphan

PEER_GRACE_S = 3.0
"""After one rank has complained of others, or has spoken for all: how long the rest may take to end by itself."""

SAY_WHY_S = 0.25
"""The same after one rank has failed of its own error."""

WIND_DOWN_S = 10.0
LOST_S = 2.0

log = logging.getLogger(__name__)


def grace_of_peers(end: WorkerEnd) -> float:
    """Seconds that the others have after one worker ended, to report why they fail. Victims of a kill get none."""
    if end.code in (EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED):
        return PEER_GRACE_S
    if end.code < 0:
        return 0.0
    return PEER_GRACE_S if cause_of_text(end.error) is Cause.COMMUNICATION_ERROR else SAY_WHY_S


async def kill_workers(pool: AgentPool, journal: Journal, reason: str) -> None:
    """Kill every worker whose agent can be reached."""
    journal.append(EventName.KILLING_WORKERS, reason=reason)
    await pool.tell_all(Kill())


async def end_of_workers(pool: AgentPool, ends: Collection[int], *, per_node: int) -> None:
    """Return when every worker of a reachable agent has ended, or LOST_S have passed; ``ends`` grows meanwhile."""
    deadline_s = time.monotonic() + LOST_S

    def told(place: int, link: AgentLink) -> bool:
        return link.channel is None or all(rank in ends for rank in range(place * per_node, (place + 1) * per_node))

    while time.monotonic() < deadline_s:
        if all(told(place, link) for place, link in enumerate(pool.members)):
            return
        await asyncio.sleep(0.01)


async def end_agents(
    pool: AgentPool, processes: Sequence[asyncio.subprocess.Process | Orphan], *, node_lost: bool
) -> None:
    """Return when the agents and the processes that started them have ended, or cannot be ended.

    A srun waits for the tasks of a lost node until Slurm has noticed, so with ``node_lost`` it is not waited for.
    """
    patience_s = LOST_S if node_lost else WIND_DOWN_S
    await pool.tell_all(Shutdown())
    if not pool.complete.is_set():
        for process in processes:  # agents that are still starting cannot get the message
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
    await pool.wait_until_gone(WIND_DOWN_S)  # even without their srun: no agent may be alive at the requeue
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=patience_s)
    if late:
        log.warning("%d agent processes did not end within %.0f s; killing them", len(late), patience_s)
    for process in processes:
        if process.returncode is None:
            process.terminate()  # srun kills its step at once when it gets TERM
    _, late = await asyncio.wait(waits, timeout=patience_s)
    if late and node_lost:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.wait(waits, timeout=patience_s)
