"""The end of an attempt's agents: told first, then by way of their srun, then by force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from slurmft.launch.agents import AgentPool
from slurmft.storage.journal import Journal

PEER_GRACE_S = 3.0
"""After one rank failed: how long the others may take to fail of it by themselves, and say why, before the kill."""

WIND_DOWN_S = 10.0
LOST_S = 2.0

log = logging.getLogger(__name__)


async def kill_workers(pool: AgentPool, journal: Journal, reason: str) -> None:
    """Kill every worker whose agent can be reached."""
    journal.append("killing workers", reason=reason)
    await pool.tell_all("kill")


async def end_agents(pool: AgentPool, processes: Sequence[asyncio.subprocess.Process], *, node_lost: bool) -> None:
    """Return when the agents and the processes that started them have ended, or cannot be ended.

    A srun waits for the tasks of a lost node until Slurm has noticed, so with ``node_lost`` nobody waits for it.
    """
    patience_s = LOST_S if node_lost else WIND_DOWN_S
    await pool.tell_all("shutdown")
    if not pool.complete.is_set():
        for process in processes:  # agents on their way cannot be told
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
    await pool.wait_until_gone(WIND_DOWN_S)  # even without their srun: a requeue must find nobody alive
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
