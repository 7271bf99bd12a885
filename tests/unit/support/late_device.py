"""A device whose streams compute late and out of step with the host: a wait that is missing shows as wrong bytes.

Tensors that it owns lie in main memory, and change only when a stream comes to the kernel that writes them. Nothing is
done before a test looks at an event that it needs, and then only what that event waits for: every other stream stays
behind. A kernel may hang, as a collective does that a dead rank never joins: nothing behind it on its stream is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from slurmft.trainer import streams


class Hangs(RuntimeError):
    """The host waits for what never comes."""


@dataclass(eq=False)
class Stream:
    name: str
    queue: deque[tuple[str, Any]] = field(default_factory=deque)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.stream: Stream | None = None
        self.is_done = True

    def record(self) -> None:
        self.stream, self.is_done = self._device.current, False
        self.stream.queue.append(("event", self))

    def query(self) -> bool:
        """Looking lets time go by: one more thing that this event waits for is done."""
        if not self.is_done and self.stream is not None and self.stream not in self._device.frozen:
            self._device.step(self.stream)
        return self.is_done


class LateDevice:
    """As ``trainer.streams.Device``; ``install`` puts it in the place of the real ones."""

    def __init__(self) -> None:
        self.default = Stream("default")
        self.streams = [self.default]
        self._here = threading.local()
        self._owned: set[int] = set()
        self._beside: Stream | None = None
        self.registered: dict[int, int] = {}
        self.refuses_to_register_after = 1 << 60
        self.copies: list[tuple[int, int]] = []
        """Address and length of each target."""

        self.frozen: set[Stream] = set()
        """Streams that advance by ``run`` alone, and not when a test looks."""

        self.waits_for_everything = 0
        self.captures = False
        self.use()

    # what tests do with it

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that ``tensor`` is the device's."""
        self._owned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._owned

    def launch(self, kernel: Callable[[], object]) -> None:
        """Ask for a kernel on the current stream."""
        self.current.queue.append(("kernel", kernel))

    def hang(self) -> Callable[[], None]:
        """A collective that waits for a dead rank, on the current stream; call what is returned to end it."""
        gate = threading.Event()
        self.current.queue.append(("hang", gate))
        return gate.set

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[Stream]:
        """Another stream of the trainer's, which waits for none."""
        stream = next((one for one in self.streams if one.name == name), None)
        if stream is None:
            self.streams.append(stream := Stream(name))
        with self._on(stream):
            yield stream

    def wait_stream(self, event: LateEvent) -> None:
        """The current stream waits for an event."""
        self.current.queue.append(("wait", event))

    def step(self, stream: Stream) -> None:
        """Do the next thing of a stream, or of the one that it waits for."""
        if not stream.queue:
            return None
        kind, what = stream.queue[0]
        if kind == "wait" and not what.is_done:
            return None if what.stream in self.frozen else self.step(what.stream)
        if kind == "hang" and not what.is_set():
            return None
        stream.queue.popleft()
        if kind == "kernel":
            with torch.no_grad():
                what()
        elif kind == "event":
            what.is_done = True
        return None

    def run(self, stream: Stream, number: int = 1 << 30) -> None:
        """Let a stream get on by so many things, as far as it can."""
        for _ in range(number):
            before = [list(one.queue) for one in self.streams]
            self.step(stream)
            if before == [list(one.queue) for one in self.streams]:
                return

    # as the package sees it

    @property
    def current(self) -> Stream:
        if not getattr(self._here, "is_set", False):
            raise AssertionError(f"the device is not set in the thread {threading.current_thread().name}")
        return getattr(self._here, "stream", self.default)

    def use(self) -> None:
        self._here.is_set = True

    def event(self, *, timed: bool = False) -> LateEvent:
        return LateEvent(self)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        if self._beside is None:
            self.streams.append(beside := Stream("beside"))
            self._beside = beside
        with self._on(self._beside):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert not self.is_on_device(target) and self.is_on_device(source)
        self.copies.append((target.data_ptr(), target.nbytes))
        self.launch(lambda: target.copy_(source))

    def wait_for_everything(self) -> None:
        self.waits_for_everything += 1
        _ = self.current
        for stream in self.streams:
            self.run(stream)
        if stuck := [one.name for one in self.streams if one.queue]:
            raise Hangs(f"the host waits for {stuck}")

    def is_capturing(self) -> bool:
        return self.captures

    def register(self, address: int, size_bytes: int) -> str:
        _ = self.current
        if sum(self.registered.values()) + size_bytes > self.refuses_to_register_after:
            return "cudaHostRegister says 2"
        self.registered[address] = size_bytes
        return ""

    def unregister(self, address: int) -> None:
        del self.registered[address]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before


def install(monkeypatch: pytest.MonkeyPatch, *devices: LateDevice) -> None:
    """Let these be the devices there are. What the package asks torch for is then done late as well, where it launches
    kernels: putting values in order, and copies of many tensors at once."""
    reshape, copy_all = torch.Tensor.reshape, torch._foreach_copy_

    def device_of(tensor: torch.Tensor) -> LateDevice | None:
        return next((one for one in devices if one.is_on_device(tensor)), None)

    def reshape_late(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        device = device_of(tensor)
        if device is None or tensor.is_contiguous():
            return reshape(tensor, *shape)
        ordered = device.owned(torch.zeros_like(reshape(tensor, *shape)))
        device.launch(lambda: ordered.copy_(reshape(tensor, *shape)))
        return ordered

    def copy_all_late(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        device = next(filter(None, map(device_of, [*targets, *sources])), None)
        if device is None:
            copy_all(targets, sources)
        else:
            device.launch(lambda: copy_all(targets, sources))

    monkeypatch.setattr(streams, "device_of", device_of)
    monkeypatch.setattr(torch.Tensor, "reshape", reshape_late)
    monkeypatch.setattr(torch, "_foreach_copy_", copy_all_late)
