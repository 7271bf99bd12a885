"""One worker's heartbeat page as a part of the messages that agents send, checked with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.shapes import Fields, Flag, Rank, Seconds, Shape, SlotValue, integer, is_number, is_time

_STATE = integer(min(State), max(State))

Since = Annotated[float | None, Shape(fits=is_time, optional=True, lenient=True)]
"""None where it is 0; agents of an earlier version do not send it."""


Count = Annotated[int | None, Shape(fits=integer(0, 2**62), optional=True, lenient=True)]
"""None where there is nothing to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts(Fields):
    """One worker's page."""

    rank: Rank
    state: Annotated[int, Shape(fits=_STATE)]
    attached: Flag
    step: SlotValue
    until: SlotValue
    saved: SlotValue
    durable: SlotValue
    resumed: SlotValue
    first_step_at: Seconds
    answered: SlotValue
    metric: Annotated[float, Shape(fits=is_number)]
    first_step_s: Seconds
    longest_step_s: Seconds
    saves: SlotValue
    save_failures: SlotValue
    save_errno: Annotated[int, Shape(fits=integer(-(2**31), 2**31 - 1))]
    save_s: Seconds
    save_cost_s: Seconds
    saving_s: Seconds
    since_saved_s: Seconds
    attached_at: Since = None
    loop_at: Since = None
    step_at: Since = None
    """Unix times: the worker attached, began its loop of steps, did its newest step; None before."""

    load_s: Since = None
    stall_s: Since = None
    """How long it read checkpoints, and how long saves have stopped its training, in all."""

    copied: Count = None
    copy_interval: Count = None
    copy_share_ppm: Count = None
    """Copies of steps in memory (``Slot.COPIED`` and those behind it); None where there is none."""
