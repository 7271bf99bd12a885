"""The one module of this package that uses a GPU's streams and events.

A device computes later than the host has asked it to, each of its streams at its own pace. A reader of its results
waits for an event that was recorded behind them, on the stream that has written them, and for nothing else: in a run
that fails another stream may wait for ever, in a collective that a dead rank never joins.

A test puts a device of its own in the place of ``find`` (``tests/unit/support/late_device.py``).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")

FIRST_LOOK_S, LONGEST_LOOK_S = 0.0001, 0.002
"""Pauses between two looks at an event, growing: a copy of a large state takes a second."""


class Event(Protocol):
    """A mark in a stream."""

    def record(self) -> None:
        """Put it behind the work that was queued on this thread's current stream so far."""

    def query(self) -> bool:
        """Whether the device has reached it; never waits."""


class Device(Protocol):
    """One GPU. Streams and the device itself are a thread's own choice: a new thread has neither."""

    def use(self) -> None:
        """Make it this thread's device: a new thread's is GPU 0, independent of other threads."""

    def event(self, *, timed: bool = False) -> Any:
        """A new event; one that is ``timed`` has ``elapsed_time``, in milliseconds."""

    def beside(self, after: Iterable[Event] = ()) -> contextlib.AbstractContextManager[None]:
        """Work on a stream that waits for no other one, but for these events."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask for a copy on the current stream; returns before it is done where ``target`` is registered memory."""

    def wait_for_everything(self) -> None:
        """Until all that was asked for is done, a collective of other ranks included: never in a run that fails."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph, and does nothing."""

    def register(self, address: int, size_bytes: int) -> str:
        """Pin memory so that the device copies into it by itself; why not, where it cannot."""

    def unregister(self, address: int) -> None:
        """Unregister memory."""


class Cuda:
    """A CUDA device."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._beside: Any = None

    def use(self) -> None:
        torch.cuda.set_device(self._index)

    def event(self, *, timed: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def beside(self, after: Iterable[Event] = ()) -> Iterator[None]:
        if self._beside is None:
            # torch's streams do not wait for the default one, and with a high priority nor behind its kernels
            self._beside = torch.cuda.Stream(self._index, priority=-1)  # type: ignore[no-untyped-call]
        for event in after:
            self._beside.wait_event(event)
        with torch.cuda.stream(self._beside):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def wait_for_everything(self) -> None:
        torch.cuda.synchronize(self._index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, size_bytes: int) -> str:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))  # type: ignore[no-untyped-call]
        return f"cudaHostRegister says {code}" if code else ""

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def find(tensors: Iterable[torch.Tensor]) -> Device | None:
    """The device of the first of ``tensors`` that is on one; None where all lie in main memory."""
    return of(next((tensor.device for tensor in tensors if tensor.is_cuda), _CPU))


def of(device: torch.device) -> Device | None:
    """The device that torch calls so; None for main memory."""
    return _cuda(device.index) if device.type == "cuda" else None


@functools.cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its bytes are a device's, and not main memory's."""
    return tensor.is_cuda


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Return when all queued work on the values of ``tensors`` is done, on any stream."""
    if (device := find(tensors)) is not None:
        device.wait_for_everything()


def copy_from_device(
    device: Device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Event] = (),
    within_s: float | None = None,
) -> None:  # fmt: skip
    """Copy each source into its target in main memory, beside other work of the device; return when all are done.

    Args:
        pairs: targets and sources.
        after: events of the work that wrote the sources; nothing else is waited for.
        within_s: at the longest; None: as long as it takes.

    Raises:
        TimeoutError: it took longer.
    """
    with device.beside(after):
        for target, source in pairs:
            device.copy(target, source)
        done = device.event()
        done.record()
    wait_for(done, within_s)


def wait_for(event: Event, within_s: float | None = None) -> None:
    """Return when the device has reached ``event``; polls, so that a device that hangs is given up.

    Raises:
        TimeoutError: it has not within ``within_s`` seconds.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    pause_s = FIRST_LOOK_S
    while not event.query():
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"the device has not copied it within {within_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
