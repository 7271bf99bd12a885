"""The stop agreement, the supervisor's side: look, propose, confirm, commit. See ``policy.timing.stop``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from slurmft.ipc.calls import Commit, LookNow, Propose, Withdraw
from slurmft.ipc.pages.heartbeat import StopAction
from slurmft.ipc.replies import Looks
from slurmft.policy.timing.stop import (
    Finishing,
    Look,
    NothingToSave,
    Plan,
    StopAt,
    all_hold,
    inside_an_evaluation,
    passed,
    plan_stop,
    step_of,
)
from slurmft.supervisor.fleet.agents import AgentPool

MAX_TRIES = 30
HOLD_POLL_S = 0.01

log = logging.getLogger(__name__)


async def agree(pool: AgentPool, action: StopAction) -> Plan:
    """Make all ranks act at one tick that none of them has passed.

    Returns the committed ``StopAt``, or why there is none. The workers keep training until the commit, but for those
    that have reached the proposal and wait for the answer.

    Raises:
        AgentLost: an agent does not answer; workers may be waiting at the proposal, and only their end frees them.
    """
    plan = plan_stop(_looks(await pool.call_all(LookNow())))
    for tries in range(1, MAX_TRIES):
        if not isinstance(plan, StopAt):
            await pool.call_all(Withdraw())
            return plan
        looks = _looks(await pool.call_all(Propose(tick=plan.tick, action=int(action))))
        while inside_an_evaluation(plan.tick) and _undecided(looks, plan.tick):
            # a rank may leave its evaluation without ever coming to this tick: no rank acts before all are there
            await asyncio.sleep(HOLD_POLL_S)
            looks = _looks(await pool.call_all(LookNow()))
        if not passed(looks, plan.tick):
            await pool.call_all(Commit(tick=plan.tick))
            return plan
        log.info("step boundaries come faster than the agreement; trying further ahead (try %d)", tries)
        plan = plan_stop(looks, tries)
    raise RuntimeError(f"no agreement after {MAX_TRIES} tries although the distance doubled each time")


def _undecided(looks: Sequence[Look], tick: int) -> bool:
    return not passed(looks, tick) and not all_hold(looks, tick) and all(look.alive for look in looks)


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as the journal records it."""
    if isinstance(plan, StopAt):
        return {"plan": "save at step", "step": step_of(plan.tick)}
    return {"plan": {NothingToSave: "nothing to save", Finishing: "the workers are finishing"}.get(
        type(plan), "the workers stop by themselves")}  # fmt: skip


def _looks(replies: Sequence[Looks]) -> list[Look]:
    return [Look(*look) for reply in replies for look in reply.looks]
