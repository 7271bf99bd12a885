"""One worker's heartbeat page as a part of the messages that agents send, checked with them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.shapes import Count, Fields, Rank, Seconds, SlotValue

StateNumber = Annotated[int, Meta(ge=int(min(State)), le=int(max(State)))]

Since = Seconds | None
"""None where it is 0; agents of an earlier version do not send it."""


class WorkerFacts(Fields, frozen=True, kw_only=True):
    """One worker's page."""

    rank: Rank
    state: StateNumber
    attached: bool
    step: SlotValue
    until: SlotValue
    saved: SlotValue
    durable: SlotValue
    resumed: SlotValue
    first_step_at: Seconds
    answered: SlotValue
    metric: float | None
    """NaN and infinities arrive as None."""

    first_step_s: Seconds
    longest_step_s: Seconds
    saves: SlotValue
    save_failures: SlotValue
    save_errno: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
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

    copied: Count | None = None
    copy_interval: Count | None = None
    copy_share_ppm: Count | None = None
    """Copies of steps in memory (``Slot.COPIED`` and those behind it); None where there is none."""
