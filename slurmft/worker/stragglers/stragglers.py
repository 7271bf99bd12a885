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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmft.ipc.pages.timing_page import CPU, CUDA, RING, STEP, TIMING_PAGE_VARIABLE, WORK, TimingPage, plain_name
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.trainer import streams
from slurmft.worker.stragglers.device_time import DeviceSpans
from slurmft.worker.stragglers.first_collective import FirstCollective

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
        if plain_name(name) in (WORK, STEP):
            raise ValueError(f"{name!r} is a section that is measured anyway; choose another name")
        plain = plain_name(name)
        if (section := self._sections.get(plain)) is None:  # names may differ only in what no report can show
            kind = Section if self._interval == 1 else SampledSection
            block = self._page.add_section(plain) if self._enabled else None
            if self._enabled and block is None:
                log.warning("section %r is not timed: there are too many sections", name)
            section = self._sections[plain] = kind(block, self._interval)
        self._sections[name] = section
        return section
