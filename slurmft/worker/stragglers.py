"""Straggler detection, the worker's side: how long this rank works for itself, and named sections of the user's own.

    detector = session.stragglers           # or StragglerDetector() without a session
    with detector.section("data"):
        batch = next(batches)

Measurements go to a page in shared memory that the node's agent reads; nothing is sent, and no collective is
added. Everything else (scores, reports, verdicts) is the supervisor's.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from slurmft.ipc.pages import CPU, CUDA, RING, STEP, TIMING_PAGE_VARIABLE, WORK, TimingPage, plain_timing_name
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.trainer import streams
from slurmft.trainer.streams import Device

# --- Spans of time on a GPU, by events in its stream, read when they are over, without a wait ---

AHEAD = 8
"""Spans that may be under way: the host runs ahead of its GPU. With more, spans are left out until some are over."""


class DeviceSpans:
    """Spans from ``begin`` to ``end``, less one wait in between. One at a time is open."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events = [[device.event(timed=True) for _ in range(4)] for _ in range(AHEAD)]
        self._free = list(range(AHEAD))
        self._under_way: list[tuple[int, bool]] = []
        self._open: int | None = None
        self._waits = 0

    def begin(self) -> None:
        """Open a span; one that is still open is given up. None of its events may be part of a graph."""
        if self._open is not None:
            self._free.append(self._open)
        self._open = self._free.pop() if self._free else None
        self._waits = 0
        self._record(0)

    def wait_begins(self) -> None:
        """Open the wait."""
        if self._waits == 0 and not self._device.is_capturing():
            self._record(1)
            self._waits = 1

    def wait_ends(self) -> None:
        """Close the wait."""
        if self._waits == 1 and not self._device.is_capturing():
            self._record(2)
            self._waits = 2

    def end(self) -> None:
        """Close the span; while a graph is captured, nothing: it would time the capture, and then never again."""
        if self._device.is_capturing():
            return
        self._record(3)
        if self._open is not None:
            self._under_way.append((self._open, self._waits == 2))
            self._open = None

    def finished(self) -> Iterator[int]:
        """Nanoseconds of the spans that the GPU has done, oldest first; each once."""
        while self._under_way and self._events[self._under_way[0][0]][3].query():
            slot, waited = self._under_way.pop(0)
            begin, wait_begins, wait_ends, end = self._events[slot]
            milliseconds = begin.elapsed_time(end) - (wait_begins.elapsed_time(wait_ends) if waited else 0.0)
            self._free.append(slot)
            yield int(milliseconds * 1e6)

    def _record(self, which: int) -> None:
        if self._open is not None:
            self._events[self._open][which].record()


# --- first collective ---
# Finding the moment at which a rank stops working for itself: just before DDP's first gradient reduction of a step.
#
# One hook on one parameter is enough for that: the one whose gradient fills DDP's first bucket. A gradient hook runs
# before DDP's own, which starts the reduction, and changes no number. The first backward pass shows which parameter it
# is; until then there is a hook on each.

FIRST_BUCKET_BYTES = 1 << 20
"""torch's first bucket. In models with larger buckets the moment is a little early, which is harmless."""


class FirstCollective:
    """Calls ``reached`` before the first reduction of each step, and ``waits``/``goes_on`` around buffer broadcasts."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reached: Callable[[], None],
        waits: Callable[[], None],
        goes_on: Callable[[], None],
    ) -> None:
        self._model, self._reached = model, reached
        self._order: list[Tensor] = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._number = len(trained)
        self._handles: list[Any] = [
            parameter.register_hook(self._recorder(parameter))  # type: ignore[no-untyped-call]
            for parameter in trained
        ]
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            model.register_forward_pre_hook(_Hook(waits))
            model.module.register_forward_pre_hook(_Hook(goes_on))

    def settle(self) -> None:
        """Between two steps: when the order is known, one hook remains. Costs nothing afterwards."""
        if not self._order:
            return
        for handle in self._handles:
            handle.remove()
        last = filling(self._order, FIRST_BUCKET_BYTES)
        self._handles = [last.register_hook(self._on_gradient)]  # type: ignore[no-untyped-call]
        self._order = []

    def _recorder(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def note(_gradient: Tensor) -> None:
            if len(self._order) < self._number:  # it may never be settled
                self._order.append(parameter)

        return note

    def _on_gradient(self, _gradient: Tensor) -> None:
        if self._model.require_backward_grad_sync:  # not in the passes of an accumulation that reduce nothing
            self._reached()


class _Hook:
    """A module's hook that stays behind when the module is copied or pickled, as users do with their models."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, _module: Any, _inputs: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def filling(order: list[Tensor], limit_bytes: int) -> Tensor:
    """The first parameter with which those before it exceed the limit; the last one when they never do."""
    filled = 0
    for parameter in order:
        filled += parameter.numel() * parameter.element_size()
        if filled >= limit_bytes:
            return parameter
    return order[-1]


# --- stragglers ---

WARM_UP_STEPS = 2
"""Steps of a process that are not timed: they compile, and fill caches."""

_MASK = RING - 1

log = logging.getLogger(__name__)


class Section:
    """A named span, to be entered again and again: ``with section:``. Time inside a span of itself counts once.

    A span that an exception ends is not counted. One thread at a time.
    """

    __slots__ = ("_began", "_block", "_clock", "_count", "_depth", "_interval")

    def __init__(self, block: memoryview[int] | None, interval: int) -> None:
        # without a page of its own it writes to one that is never read: the fast path has no branch for it
        self._block = memoryview(bytearray((RING + 1) * 8)).cast("q") if block is None else block
        self._interval = interval
        self._began = self._depth = 0
        self._count = self._block[RING]
        self._clock = time.monotonic_ns

    def __enter__(self) -> None:
        if self._began:
            self._depth += 1
        else:
            self._began = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        took = self._clock() - self._began
        if self._depth:
            self._depth -= 1
            return
        self._began = 0
        if kind is None:
            count = self._count
            block = self._block
            block[count & _MASK] = took
            self._count = block[RING] = count + 1

    def add(self, nanoseconds: int) -> None:
        """Store a span that was measured elsewhere."""
        self._block[self._count & _MASK] = nanoseconds
        self._count += 1
        self._block[RING] = self._count

    def median_s(self) -> float:
        """The median of the newest ones, in seconds; NaN before the first."""
        newest = [self._block[index] for index in range(min(self._count, RING))]
        return statistics.median(newest) / 1e9 if newest else float("nan")


class SampledSection(Section):
    """Times every n-th entry."""

    __slots__ = ("_entered",)

    def __init__(self, block: memoryview[int] | None, interval: int) -> None:
        super().__init__(block, interval)
        self._entered = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._depth:
            self._entered += 1
            if self._entered % self._interval:
                self._began = 0
                return
        super().__exit__(kind, error, traceback)


class StragglerDetector:
    """Times one rank.

    Args:
        enabled: when false, nothing is measured and everything may still be called.
        profiling_interval: time every n-th step, and every n-th entry of a section.
        role: ranks of equal role do equal work and are compared; give each stage of a pipeline one of its own.
        device: where the model computes; on a GPU the own work is timed by events in its stream.
        page: where to leave what was measured; a private one when it is not given.
    """

    def __init__(
        self, *, enabled: bool = True, profiling_interval: int = 1, role: str = "",
        device: torch.device | None = None, page: TimingPage | None = None,
    ) -> None:  # fmt: skip
        if profiling_interval < 1:
            raise ValueError(f"profiling_interval={profiling_interval} must be at least 1")
        self._enabled, self._interval = enabled, profiling_interval
        self._page = page or TimingPage.private()
        self._device = CUDA if device is not None and device.type == "cuda" else CPU
        self._sections: dict[str, Section] = {}
        gpu = streams.of(device) if device is not None else None
        self._spans = DeviceSpans(gpu) if enabled and gpu is not None else None
        self._models: list[FirstCollective] = []
        self._steps = self._began = self._waiting = self._waited = 0
        self._is_open = False
        self.on_first_collective: Callable[[], None] | None = None
        """Called at the first collective of each step that is found by itself (``attach``), timed or not."""

        if enabled:
            self._work, self._step = Section(self._page.add_section(WORK), 1), Section(self._page.add_section(STEP), 1)
        self.set_role(role)

    @classmethod
    def from_environment(cls, device: torch.device | None = None) -> StragglerDetector:
        """As the run's configuration says; without an agent, the measurements are not read."""
        settings, path = WorkerSettings.from_environment(os.environ), os.environ.get(TIMING_PAGE_VARIABLE)
        page = None
        if path is not None:
            try:
                page = TimingPage.attach(Path(path))
            except (OSError, ValueError) as error:  # training matters more than its timings
                log.warning("no timings: %s", error)
        return cls(
            enabled=settings.straggler_detection and (page is not None or path is None),
            profiling_interval=settings.straggler_profiling_interval,
            device=device, page=page,
        )  # fmt: skip

    def set_role(self, role: str) -> None:
        """Say which ranks this one may be compared with: those that give the same name. Call it before step one."""
        self._page.describe(role=role, device=self._device)

    def section(self, name: str) -> Section:
        """The section of that name: ``with detector.section("data"): ...``. Keep it where every 100 ns count.

        Raises:
            ValueError: the name is one of the sections that are measured anyway.
        """
        try:
            return self._sections[name]
        except KeyError:
            return self._new_section(name)

    def attach(self, model: DistributedDataParallel) -> None:
        """Find the first collective of each step in this model by itself. Call it once, before a backward pass.

        Of several models the one that reduces first counts.
        """
        if self._enabled:
            self._models.append(FirstCollective(model, self._found_collective, self.wait_begins, self.wait_ends))

    def begin_step(self) -> None:
        """The rank begins to work for itself."""
        if not self._enabled:
            return
        for model in self._models:
            model.settle()
        self._steps += 1
        if self._steps <= WARM_UP_STEPS or self._steps % self._interval:
            return
        self._waiting = self._waited = 0
        if self._spans is not None:
            for nanoseconds in self._spans.finished():
                self._work.add(nanoseconds)
            self._spans.begin()
        self._began = time.monotonic_ns()
        self._step.__enter__()
        self._is_open = True

    def first_collective(self) -> None:
        """The rank is about to wait for others, for the first time in this step; later calls change nothing."""
        if not self._began:
            return
        began, self._began = self._began, 0
        if self._spans is not None:
            self._spans.end()
        else:
            self._work.add(time.monotonic_ns() - began - self._waited)

    def _found_collective(self) -> None:
        self.first_collective()
        if self.on_first_collective is not None:
            self.on_first_collective()

    def wait_begins(self) -> None:
        """From here on the rank waits and does not work, although the first collective is still to come."""
        if self._began:
            self._waiting = time.monotonic_ns()
            if self._spans is not None:
                self._spans.wait_begins()

    def wait_ends(self) -> None:
        """Back to work."""
        if self._began and self._waiting:
            self._waited += time.monotonic_ns() - self._waiting
            self._waiting = 0
            if self._spans is not None:
                self._spans.wait_ends()

    def end_step(self) -> None:
        """The step is done. One in which no collective was seen says nothing about the rank's own work."""
        if self._is_open:
            self._is_open = False
            self._began = 0
            self._step.__exit__(None, None, None)

    def summary(self) -> dict[str, float]:
        """The median of the newest times of each section, in seconds, as the agent would see them."""
        if not self._enabled:
            return {}
        own = {WORK: self._work.median_s(), STEP: self._step.median_s()}
        return own | {name: section.median_s() for name, section in self._sections.items()}

    def _new_section(self, name: str) -> Section:
        if plain_timing_name(name) in (WORK, STEP):
            raise ValueError(f"{name!r} is a section that is measured anyway; choose another name")
        plain = plain_timing_name(name)
        if (section := self._sections.get(plain)) is None:  # names may differ only in what no report can show
            kind = Section if self._interval == 1 else SampledSection
            block = self._page.add_section(plain) if self._enabled else None
            if self._enabled and block is None:
                log.warning("section %r is not timed: there are too many sections", name)
            section = self._sections[plain] = kind(block, self._interval)
        self._sections[name] = section
        return section
