"""The state of this node's GPUs as NVIDIA's driver reports it: through NVML where its Python binding is installed
(extra ``gpu``), else through nvidia-smi."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmft.health.node_view import Scene, text_of

SMI_S = 60.0
"""Longer than any probe may take: a late answer means UNKNOWN, not a fault."""

MAX_LINKS = 36
NVIDIA = "0x10de"
_GONE = frozenset({9, 12})
"""NVML's codes for a driver that is not loaded, and for its library missing."""

_SMI_FIELDS: Mapping[str, str] = {
    "index": "index", "uuid": "uuid", "name": "name", "pci.bus_id": "bus",
    "ecc.errors.uncorrected.volatile.total": "uncorrected", "ecc.errors.corrected.volatile.total": "corrected",
    "retired_pages.pending": "pending", "temperature.gpu": "temperature_c",
    "clocks_throttle_reasons.active": "throttle", "pcie.link.width.current": "width",
    "pcie.link.width.max": "max_width", "pcie.link.gen.max": "max_generation",
}  # fmt: skip
"""nvidia-smi's fields -> ours."""

_ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_FLAGS: Mapping[str, bool] = {"yes": True, "no": False, "1": True, "0": False}
_DEAD = frozenset({"[gpu is lost]", "[gpu requires reset]", "err!"})
"""In the place of a value: no other value of this GPU is valid then."""

MAX_DIGITS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None where the driver does not say."""

    index: int
    uuid: str = ""
    name: str = ""
    bus: str = ""
    uncorrected: int | None = None
    """ECC errors since the driver was loaded."""

    corrected: int | None = None
    pending: bool | None = None
    """A row or page is to be taken out of use at the next reset."""

    remap_failed: bool | None = None
    temperature_c: float | None = None
    throttle: int | None = None
    """Mask of the reasons why its clocks are low (nvml.h, nvmlClocksEventReason)."""

    width: int | None = None
    max_width: int | None = None
    max_generation: int | None = None
    links: tuple[bool, ...] = ()
    """Whether each NVLink is active."""

    pids: tuple[int, ...] = ()
    """Processes that compute on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The state of all GPUs."""

    gpus: tuple[Gpu, ...] = ()
    source: str = ""
    """nvml or nvidia-smi; empty where neither can be asked."""

    errors: tuple[str, ...] = ()
    """GPUs, or the driver itself, that did not answer, in words."""

    on_bus: int = 0
    """NVIDIA's GPUs on the PCI bus."""

    driver_loaded: bool = False

    @property
    def is_empty(self) -> bool:
        """There is no sign of a GPU with a driver."""
        return not self.gpus and not self.errors and not self.driver_loaded


def survey(scene: Scene) -> Survey:
    """Ask the driver once for everything; may hang where the driver does."""
    on_bus = sum(1 for folder in scene.folders("sys/bus/pci/devices")
                 if text_of(folder / "vendor").strip() == NVIDIA
                 and text_of(folder / "class").startswith(("0x0300", "0x0302")))  # fmt: skip
    loaded = scene.path("proc/driver/nvidia/version").exists()
    found = _by_nvml() or _by_smi(scene.environment)
    if found is None:
        return Survey(on_bus=on_bus, driver_loaded=loaded)
    gpus, source, errors = found
    return Survey(gpus=gpus, source=source, errors=errors, on_bus=on_bus, driver_loaded=loaded)


_Found = tuple[tuple[Gpu, ...], str, tuple[str, ...]]


def _by_nvml() -> _Found | None:
    """None where the binding, the library or the driver is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    gpus, errors = [], []
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return None if error.value in _GONE else ((), "nvml", (f"the driver does not answer: {error}",))
    for index in range(count):
        try:
            gpus.append(_gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            errors.append(f"GPU {index}: {error}")
    return tuple(gpus), "nvml", tuple(errors)


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        """None where this GPU, or this version of the library, does not know."""
        question: Callable[..., Any] | None = getattr(nvml, name, None)
        try:
            return question(handle, *arguments) if question is not None else None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    def text(value: Any) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")

    remapped = ask("nvmlDeviceGetRemappedRows")
    retired = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    return Gpu(
        index=index, uuid=text(ask("nvmlDeviceGetUUID")), name=text(ask("nvmlDeviceGetName")),
        bus=text(getattr(ask("nvmlDeviceGetPciInfo"), "busId", "")),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 0), corrected=ask("nvmlDeviceGetTotalEccErrors", 0, 0),
        pending=None if remapped is None and retired is None else bool((remapped or (0, 0, 0))[2] or retired),
        remap_failed=None if remapped is None else bool(remapped[3]),
        temperature_c=ask("nvmlDeviceGetTemperature", 0), throttle=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"), max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"), links=_links(ask),
        pids=tuple(each.pid for each in ask("nvmlDeviceGetComputeRunningProcesses") or ()),
    )  # fmt: skip


def _links(ask: Callable[..., Any]) -> tuple[bool, ...]:
    states = []
    for link in range(MAX_LINKS):
        state = ask("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        states.append(bool(state))
    return tuple(states)


def _by_smi(environment: Mapping[str, str]) -> _Found | None:
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if program is None:
        return None
    done = _run(program, f"--query-gpu={','.join(_SMI_FIELDS)}", environment)
    if done is None:
        return None
    words = " ".join((done.stderr or done.stdout).split())[:200]
    if "couldn't communicate with the NVIDIA driver" in words or "No devices were found" in words:
        return ((), "nvidia-smi", ()) if "No devices" in words else None
    if done.returncode:
        return (), "nvidia-smi", (f"nvidia-smi: {words or f'exit code {done.returncode}'}",)
    gpus, source, errors = parse_smi(done.stdout)
    rows = _run(program, f"--query-remapped-rows={','.join(_ROW_FIELDS)}", environment)
    remapped = parse_remapped_rows(rows.stdout) if rows is not None and not rows.returncode else {}
    return tuple(_with_rows(gpu, *remapped.get(gpu.uuid, (None, None))) for gpu in gpus), source, errors


def _run(program: str, query: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """None where it cannot be started."""
    try:
        return subprocess.run([program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              errors="replace", timeout=SMI_S, check=False, env=dict(environment),
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except OSError:
        return None


def parse_smi(text: str) -> _Found:
    """GPUs in the CSV output of nvidia-smi; a row that cannot be read is reported as an error of its GPU."""
    gpus, errors = [], []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if not line.strip():
            continue
        is_whole = len(values) == len(_SMI_FIELDS) and values[0].isascii() and values[0].isdecimal()
        if not is_whole or len(values[0]) > MAX_DIGITS or any(value.lower() in _DEAD for value in values):
            errors.append(f"nvidia-smi: {line.strip()[:100]}")
            continue
        gpus.append(_gpu_of_smi(dict(zip(_SMI_FIELDS.values(), values, strict=True))))
    return tuple(gpus), "nvidia-smi", tuple(errors)


def parse_remapped_rows(text: str) -> dict[str, tuple[bool | None, bool | None]]:
    """Whether a remapped row waits for a reset, and whether one could not be remapped, by UUID; None where unknown."""
    found = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_ROW_FIELDS) and values[0].startswith("GPU-"):
            found[values[0]] = (_FLAGS.get(values[1].lower()), _FLAGS.get(values[2].lower()))
    return found


def _with_rows(gpu: Gpu, pending: bool | None, failed: bool | None) -> Gpu:
    """Pages are retired up to Volta, rows remapped from Ampere on: a GPU knows one of both."""
    return replace(gpu, pending=gpu.pending if pending is None else pending or bool(gpu.pending), remap_failed=failed)


def _gpu_of_smi(row: Mapping[str, str]) -> Gpu:
    def number(name: str) -> int | None:
        word = row[name]
        return int(word, 0) if word[:18] == word and _is_number(word) else None

    pending = _FLAGS.get(row["pending"].lower())
    return Gpu(
        index=int(row["index"]), uuid=row["uuid"], name=row["name"], bus=row["bus"], pending=pending,
        uncorrected=number("uncorrected"), corrected=number("corrected"), temperature_c=number("temperature_c"),
        throttle=number("throttle"), width=number("width"), max_width=number("max_width"),
        max_generation=number("max_generation"),
    )  # fmt: skip


def _is_number(word: str) -> bool:
    try:
        int(word, 0)
    except ValueError:
        return False
    return True


def brief(names: Sequence[int]) -> str:
    """``GPU 3`` or ``GPUs 0, 1, 7``."""
    return f"GPU{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"
