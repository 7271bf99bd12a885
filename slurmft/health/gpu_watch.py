"""The watch of GPUs while a run goes on: a program that an agent starts beside its workers.

It asks the driver every few seconds, has the probes' judges judge the answers, and prints a line for each thing that
has become wrong since its first look, as a plug-in of ``notices`` does. A driver that hangs stops a thread of this
process, and nothing else; what is wrong at the first look is for hooks and sweep to act on.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from slurmft.errors import SlurmftError
from slurmft.health import gpu
from slurmft.health.checker import load_config, results_of, scene_here
from slurmft.health.gpu import Gpu, Survey, Xid
from slurmft.health.node import HOUR_S, Scene
from slurmft.health.probes import PROBES
from slurmft.policy.node_health import ProbeResult, Sample, Status, growth, with_sample
from slurmft.system.processes import Answer, die_with_parent

EVERY_S = 2.5
"""What is grave must be so in two looks: it is told five seconds after it has begun, where the driver answers."""

SLOW_S = 8.0
"""From then on a driver that does not answer is a warning; from ``gpu.answer_s`` on it is critical."""

SLICE_S = 1.0
"""Time is counted in pieces: that in which the job was suspended does not count."""

MAX_XIDS = 100
"""Messages that are remembered of one kind and device."""

_LINKS = range(144, 151)
"""Xids of which some are fatal and others not, as only their text says, which NVML's events lack."""

_PROBE = next(probe for probe in PROBES if probe.names == gpu.NAMES)


class Watch:
    """What has become wrong with the GPUs that this job may use, since the first look."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._limits = scene, scene.config.gpu
        self._first: Survey | None = None
        self._own: frozenset[str] = frozenset()
        """UUIDs of the job's GPUs."""

        self._samples: tuple[Sample, ...] = ()
        self._xids: dict[str, list[Xid]] = {}
        self._told: dict[str, Status] = {}
        self._doubted: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether the first look has found nothing to watch."""
        return self._first is not None and not self._own

    def look(self, found: Survey, xids: Iterable[Xid], now: float) -> Iterator[dict[str, Any]]:
        """What is told after this look: lines of a plug-in of ``notices``."""
        is_first = self._first is None
        if self._first is None:
            self._first = replace(found, gpus=visible(found.gpus, self._scene.environment))
            self._own = frozenset(each.uuid for each in self._first.gpus if each.uuid)
            self._limits = self._limits.model_copy(update={"expected": len(self._own)})
        if self._own:
            yield from self._news(self._judged(found, xids, now), is_first=is_first)

    def hangs(self, after_s: float) -> Iterator[dict[str, Any]]:
        """What is told of a driver that has not answered for so many seconds."""
        answer = Answer(name="", error=f"no answer within {after_s:.0f} s", timed_out=True)
        (result,) = results_of(_PROBE, answer, late_is_bad=True)
        if after_s < self._limits.answer_s:
            result = replace(result, status=Status.WARNING)
        self._doubted |= {result.name}
        yield from self._news({result.name: result}, is_first=self._first is None)

    def _judged(self, found: Survey, xids: Iterable[Xid], now: float) -> dict[str, ProbeResult]:
        """The results of the probes' judges, for each device by itself."""
        assert self._first is not None
        gpus = tuple(each for each in found.gpus if each.uuid in self._own)
        errors = tuple(each for each in found.errors if each not in self._first.errors and self._is_own(each))
        results = {"gpu-count": gpu.judge_count(replace(found, gpus=gpus, errors=errors), self._limits, confined=False)}
        window_s = self._scene.config.window_hours * HOUR_S
        totals = gpu.totals_of(gpus)
        # one that was not known before counts from now on
        self._samples = tuple((at, {**totals, **before}) for at, before in self._samples)
        self._samples = with_sample(self._samples, now, totals, window_s)
        for each in gpu.with_growth(gpus, growth(self._samples, now, window_s)):
            for judge in gpu.JUDGES:
                result = judge([each], self._limits)
                results[f"{result.name} {each.uuid}"] = result
        for message in xids:
            if message.kind == "SXid" or _place(message.device) in {_place(each.bus) for each in self._first.gpus}:
                self._xids[str(message)] = [*self._xids.get(str(message), ())[1 - MAX_XIDS :], message]
        return results | {
            f"xid {name}": gpu.judge_xids(messages, math.inf, 0.0) for name, messages in self._xids.items()
        }

    def _is_own(self, error: str) -> bool:
        assert self._first is not None
        match = re.match(r"GPU (\d+): ", error)
        return match is None or int(match[1]) in {each.index for each in self._first.gpus}

    def _news(self, results: Mapping[str, ProbeResult], *, is_first: bool) -> Iterator[dict[str, Any]]:
        grave = {key for key, result in results.items() if result.status is Status.CRITICAL}
        for key, result in results.items():
            is_bad = result.status in (Status.WARNING, Status.CRITICAL)
            is_new = result.status > self._told.get(key, Status.OK)
            is_certain = is_first or key not in grave or key in self._doubted
            if is_bad and is_new and is_certain and result.name not in self._scene.config.disabled:
                self._told[key] = result.status
                ends = key in grave and not is_first
                yield {"fault": True, "ends": ends, "what": f"{result.name}: {result.detail}", "id": f"{key} {ends}"}
        self._doubted = frozenset(grave)


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves to the job; all where it is not set, or names instances (MIG)."""
    words = environment.get("CUDA_VISIBLE_DEVICES")
    names = [] if words is None else [word.strip() for word in words.split(",") if word.strip()]
    if words is None or any(name.startswith("MIG-") for name in names):
        return tuple(gpus)
    return tuple(each for each in gpus if any(name == str(each.index) or (name[:4] == "GPU-" and
                                              each.uuid.startswith(name)) for name in names))  # fmt: skip


def _place(address: str) -> tuple[int, ...]:
    """Domain, bus and device of a PCI address, which the driver writes in more than one way."""
    try:
        return tuple(int(part, 16) for part in re.split("[:.]", address)[:3])
    except ValueError:
        return ()


class Xids:
    """New Xid messages: from the kernel's log, or, where it may not be read, from the driver's own events."""

    def __init__(self, scene: Scene) -> None:
        self._log: int | None = None
        self._nvml: Any = None
        self._events: Any = None
        try:
            self._log = gpu.open_kernel_log(scene)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._nvml = importlib.import_module("pynvml")
            self._register(self._nvml)

    def _register(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:  # split devices have none
            pass

    def new(self) -> list[Xid]:
        """Those since the last call."""
        if self._log is not None:
            try:
                return gpu.parse_xids(gpu.records_of(self._log))
            except OSError:
                return []
        return list(self._of_driver(self._nvml)) if self._events is not None else []

    def _of_driver(self, nvml: Any) -> Iterator[Xid]:
        try:
            for _ in range(MAX_XIDS):
                event = nvml.nvmlEventSetWait(self._events, 1)
                bus = nvml.nvmlDeviceGetPciInfo(event.device).busId
                code = int(event.eventData)
                yield Xid(device=bus.decode() if isinstance(bus, bytes) else bus, code=code, at_s=time.monotonic(),
                          text="as the driver's event says, perhaps nonfatal" * (code in _LINKS))  # fmt: skip
        except nvml.NVMLError:  # a time-out: there are no more
            return


def watch(scene: Scene) -> int:
    """Look until the agent ends; returns at once where there is nothing to watch."""
    driver = ThreadPoolExecutor(1)
    xids = driver.submit(Xids, scene)
    seen = Watch(scene)
    while True:
        asked, waited_s = driver.submit(lambda: (gpu.survey(scene), xids.result().new())), 0.0
        while not wait([asked], SLICE_S).done:
            waited_s += SLICE_S
            if waited_s >= min(SLOW_S, scene.config.gpu.answer_s):
                _tell(seen.hangs(waited_s))
        _tell(seen.look(*asked.result(), time.time()))
        if seen.is_empty:
            return 0
        time.sleep(EVERY_S)


def _tell(lines: Iterable[Mapping[str, Any]]) -> None:
    for line in lines:
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()


def main() -> int:
    """The program; its exit code says whether it could look."""
    die_with_parent()
    os.nice(19)
    try:
        return watch(scene_here(load_config(None, os.environ), os.environ, context="agent", level=1))
    except SlurmftError as error:
        sys.stderr.write(f"slurmft: GPUs are not watched: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
