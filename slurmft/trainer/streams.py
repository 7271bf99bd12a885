"""The one module of this package that uses a GPU's streams and events.

A device computes later than the host has asked it to, each of its streams at its own pace. A reader of its results
waits for an event that was recorded behind them, on the stream that has written them, and for nothing else: in a run
that fails another stream may wait for ever, in a collective that a dead rank never joins.

A test puts a device of its own in the place of ``device_of`` (``tests/unit/support/late_device.py``).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

FIRST_LOOK_S, LONGEST_LOOK_S = 0.0001, 0.002
"""Pauses between two looks at an event, growing: a copy of a large state takes a second."""


class Event:
    """A mark in a stream of one GPU. torch's own is recorded on the thread's current device, which may be another."""

    def __init__(self, index: int, *, timed: bool) -> None:
        self._index = index
        self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Put it behind the work that was queued on this thread's current stream so far."""
        self._event.record(torch.cuda.current_stream(self._index))

    def query(self) -> bool:
        """Whether the device has reached it; never waits."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until ``end``, where both are ``timed``."""
        return float(self._event.elapsed_time(end._event))


class Device:
    """One GPU. Streams and the device itself are a thread's own choice: a new thread has neither."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._beside: Any = None

    def use(self) -> None:
        """Make it this thread's device: a new thread's is GPU 0, independent of other threads."""
        torch.cuda.set_device(self._index)

    def event(self, *, timed: bool = False) -> Event:
        """A new one."""
        return Event(self._index, timed=timed)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work on a stream that waits for no other one."""
        if self._beside is None:
            # torch's streams do not wait for the default one, and with a high priority nor behind its kernels
            self._beside = torch.cuda.Stream(self._index, priority=-1)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._beside):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Ask for a copy on the current stream; returns before it is done where ``target`` is registered memory."""
        target.copy_(source, non_blocking=True)

    def wait_for_everything(self) -> None:
        """Until all that was asked for is done, a collective of other ranks included: never in a run that fails."""
        torch.cuda.synchronize(self._index)

    def is_capturing(self) -> bool:
        """Whether the current stream records a CUDA graph, and does nothing."""
        with torch.cuda.device(self._index):
            return torch.cuda.is_current_stream_capturing()

    def register(self, address: int, size_bytes: int) -> str:
        """Pin memory so that the device copies into it by itself; why not, where it cannot."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))  # type: ignore[no-untyped-call]
        return f"cudaHostRegister says {code}" if code else ""

    def unregister(self, address: int) -> None:
        """Unregister memory."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def of(device: torch.device) -> Device | None:
    """The device that torch calls so; None for main memory."""
    return _cuda(device.index) if device.type == "cuda" else None


@functools.cache
def _cuda(index: int) -> Device:
    return Device(index)


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device that ``tensor`` is on; None where it lies in main memory."""
    return of(tensor.device) if tensor.is_cuda else None


def devices(tensors: Iterable[torch.Tensor]) -> list[Device]:
    """All that some of ``tensors`` are on, each once: a model may be spread over several GPUs of one process."""
    return list(dict.fromkeys(device for tensor in tensors if (device := device_of(tensor)) is not None))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its bytes are a device's, and not main memory's."""
    return device_of(tensor) is not None


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Return when the values of ``tensors`` are what the host has asked for, whichever streams compute them."""
    for device in devices(tensors):
        device.wait_for_everything()


def copy_from_device(
    device: Device, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], within_s: float | None = None
) -> None:
    """Copy each source into its target in main memory, beside other work of the device; return when all are there.

    Nothing is waited for but the copies: the sources are there already. Where one of them fails, those before it are
    waited for as well, as they still write into memory of the caller's.

    Args:
        pairs: targets and sources; what making them launches runs before the copies, on their stream.
        within_s: at the longest; None: as long as it takes.

    Raises:
        TimeoutError: it took longer.
    """
    with device.beside():
        done = device.event()
        try:
            for target, source in pairs:
                device.copy(target, source)
        finally:
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
