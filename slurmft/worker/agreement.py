"""The stop agreement, the worker's side: one integer compare per step."""

from __future__ import annotations

import time
from typing import Protocol

import torch.distributed as dist

from slurmft.ipc.pages.heartbeat import Page, Slot, StopAction
from slurmft.policy.timing.stop import END, step_of, tick_of
from slurmft.trainer.host_group import any_rank
from slurmft.worker.signals import StopSignal

HOLD_PAUSE_S = 0.0005
COLLECTIVE_EVERY_STEPS = 8


class Agreement(Protocol):
    """The action of all ranks at each tick."""

    def at(self, tick: int) -> StopAction:
        """What to do at this tick; the same on all ranks."""

    def answered(self, tick: int) -> None:
        """It has been done."""


class AgreementByAgent:
    """Through the heartbeat page: no collective, no system call while no stop is requested."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._acted_on = -1

    def at(self, tick: int) -> StopAction:
        """Publish the tick, then compare; hold at a proposal until it is committed, moved or withdrawn."""
        page = self._page
        page[Slot.TICK] = tick
        if tick < page[Slot.PROPOSED]:
            return StopAction.NONE
        while True:
            proposed = page[Slot.PROPOSED]
            if tick < proposed or proposed == self._acted_on:
                page[Slot.HOLDING] = -1
                return StopAction.NONE
            page[Slot.HOLDING] = proposed
            if page[Slot.COMMITTED] == proposed:
                self._acted_on = proposed
                return StopAction(page[Slot.ACTION])
            time.sleep(HOLD_PAUSE_S)

    def answered(self, tick: int) -> None:
        """Tell the agent."""
        self._page[Slot.ANSWERED] = tick


class AgreementByCollective:
    """Without an agent (plain srun, torchrun): one small all-reduce every few steps."""

    def __init__(self, stop: StopSignal, world_size: int) -> None:
        self._stop, self._world_size = stop, world_size

    def at(self, tick: int) -> StopAction:
        """Whether any rank has seen the signal; asked of all every COLLECTIVE_EVERY_STEPS steps."""
        if self._world_size == 1 or not dist.is_initialized():
            return StopAction.SAVE_AND_STOP if self._stop.seen else StopAction.NONE
        step = step_of(tick)  # only boundaries are the same on all ranks; evaluations may differ in length
        if tick >= END or tick != tick_of(step) or step % COLLECTIVE_EVERY_STEPS:
            return StopAction.NONE
        return StopAction.SAVE_AND_STOP if any_rank(self._stop.seen) else StopAction.NONE

    def answered(self, tick: int) -> None:
        """Nothing to do: there is no agent."""
