"""Probes of GPUs: by their driver's answers, by what they compute, and by the Xids in the kernel's log."""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmft.config.health import GpuLimits
from slurmft.health import node
from slurmft.health.node import Scene, above, bad, fine, grown, unknown
from slurmft.policy.node_health import ProbeResult, Problem, Status, worst
from slurmft.scheduler.parsing import expand_hostlist
from slurmft.system.processes import text_of

# --- gpu facts ---
# The state of this node's GPUs as NVIDIA's driver reports it: through NVML where its Python binding is installed.
#
# (extra ``gpu``), else through nvidia-smi.

SMI_S = 60.0
"""Longer than any probe may take: a late answer means UNKNOWN, not a fault."""

MAX_LINKS = 36
NVIDIA = "0x10de"
_GONE = frozenset({9, 12})
"""NVML's codes for a driver that is not loaded, and for its library missing."""

_NOT_ASKED = frozenset({4, 10, 19, 20, 23})
"""No permission, time-out, in use, no memory, no resources: nothing is known of the GPU then."""

_VITAL = frozenset({"nvmlDeviceGetUUID", "nvmlDeviceGetTemperature"})
"""Every GPU knows these: an unknown error (999) is the GPU's here, and elsewhere perhaps only the question's."""

_RECOVERY_ERRORS = 1
"""NVML_NVLINK_ERROR_DL_RECOVERY."""

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
    """ECC errors since the driver was loaded; to the judges, within the configured window."""

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

    link_errors: int = 0
    """Times that its NVLinks recovered from an error; counted as ECC errors are."""

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

    not_asked: tuple[str, ...] = ()
    """The same, of those that could not be asked: whether they are well is not known."""

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
    found = _by_nvml() or _by_smi(scene.environment) or Survey()
    return replace(found, on_bus=on_bus, driver_loaded=loaded)


def _by_nvml() -> Survey | None:
    """None where the binding, the library or the driver is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    gpus: list[Gpu] = []
    errors: list[str] = []
    not_asked: list[str] = []
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        if error.value in _GONE:
            return None
        count, which = 0, not_asked if error.value in _NOT_ASKED else errors
        which.append(f"the driver does not answer: {error}")
    for index in range(count):
        try:
            gpus.append(_gpu(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            (not_asked if error.value in _NOT_ASKED else errors).append(f"GPU {index}: {error}")
    return Survey(gpus=tuple(gpus), source="nvml", errors=tuple(errors), not_asked=tuple(not_asked))


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    def ask(name: str, *arguments: Any) -> Any:
        """None where this GPU, or this version of the library, does not know."""
        question: Callable[..., Any] | None = getattr(nvml, name, None)
        try:
            return question(handle, *arguments) if question is not None else None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            if error.value == nvml.NVML_ERROR_UNKNOWN and name in _VITAL:
                raise
            return None

    def text(value: Any) -> str:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")

    remapped = ask("nvmlDeviceGetRemappedRows")
    retired = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    links = _links(ask)
    return Gpu(
        index=index, uuid=text(ask("nvmlDeviceGetUUID")), name=text(ask("nvmlDeviceGetName")),
        bus=text(getattr(ask("nvmlDeviceGetPciInfo"), "busId", "")),
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", 1, 0), corrected=ask("nvmlDeviceGetTotalEccErrors", 0, 0),
        pending=None if remapped is None and retired is None else bool((remapped or (0, 0, 0))[2] or retired),
        remap_failed=None if remapped is None else bool(remapped[3]),
        temperature_c=ask("nvmlDeviceGetTemperature", 0), throttle=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"), max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        max_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"), links=links,
        link_errors=sum(ask("nvmlDeviceGetNvLinkErrorCounter", link, _RECOVERY_ERRORS) or 0
                        for link, active in enumerate(links) if active),
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


def _by_smi(environment: Mapping[str, str]) -> Survey | None:
    program = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if program is None:
        return None
    done = _run(program, f"--query-gpu={','.join(_SMI_FIELDS)}", environment)
    if done is None:
        return None
    words = " ".join((done.stderr or done.stdout).split())[:200]
    if "couldn't communicate with the NVIDIA driver" in words or "No devices were found" in words:
        return Survey(source="nvidia-smi") if "No devices" in words else None
    if done.returncode:
        return Survey(source="nvidia-smi", errors=(f"nvidia-smi: {words or f'exit code {done.returncode}'}",))
    found = parse_smi(done.stdout)
    rows = _run(program, f"--query-remapped-rows={','.join(_ROW_FIELDS)}", environment)
    remapped = parse_remapped_rows(rows.stdout) if rows is not None and not rows.returncode else {}
    return replace(found, gpus=tuple(_with_rows(gpu, *remapped.get(gpu.uuid, (None, None))) for gpu in found.gpus))


def _run(program: str, query: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str] | None:
    """None where it cannot be started."""
    try:
        return subprocess.run([program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              errors="replace", timeout=SMI_S, check=False, env=dict(environment),
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except OSError:
        return None


def parse_smi(text: str) -> Survey:
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
    return Survey(gpus=tuple(gpus), source="nvidia-smi", errors=tuple(errors))


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


# --- gpu work ---
# The long probes: GPUs that must compute and remember correctly, NVIDIA's own diagnosis, pairs that must reduce.
#
# torch runs in programs of their own (``worker.gpu_check``), and only where it is needed.

WORK_S, DIAGNOSE_S, PAIR_S = 150.0, 180.0, 60.0
CPU_SIZE = 512
_WORK = (sys.executable, "-P", "-m", "slurmft.worker.gpu_check")
FIRST_PORT, PORTS = 20_000, 20_000
REMEDY = "drain the node, run dcgmi diag -r 3, replace the GPU if it fails"


def gpu_compute(scene: Scene) -> list[ProbeResult]:
    """Products and memory of every GPU, checked; nothing where there is no GPU."""
    if survey(scene).is_empty:
        return []
    limits = scene.config.gpu
    argv = [*_WORK, "--size", str(limits.matmul_size), "--memory-share", str(limits.memory_share)]
    return judge_work(_asked(argv, WORK_S - 5, scene.environment), limits)


def cpu_compute(scene: Scene) -> list[ProbeResult]:
    """The same on the CPU of a node without GPUs, with less of it; nothing where there are GPUs."""
    if not survey(scene).is_empty or scene.config.gpu.expected:
        return []
    found = judge_work(_asked([*_WORK, "--cpu", "--size", str(CPU_SIZE)], WORK_S - 5, scene.environment), GpuLimits())
    return [replace(each, name=each.name.replace("gpu-", "cpu-"), detail=each.detail.replace("GPU", "CPU"))
            for each in found]  # fmt: skip


def judge_work(answer: Mapping[str, Any], limits: GpuLimits) -> list[ProbeResult]:
    """A wrong product is silent corruption; a wrong byte is bad memory. Anything else is not known."""
    if "error" in answer:
        return [unknown(name, str(answer["error"])[:300]) for name in ("gpu-matmul", "gpu-memory")]
    devices = [each for each in answer.get("devices", ()) if isinstance(each, dict)]
    wrong = [f"GPU {each.get('index')}: {each['wrong']}" for each in devices if each.get("wrong")]
    broken = [f"GPU {each.get('index')}: {each['memory']}" for each in devices if each.get("memory")]
    failed = [f"GPU {each.get('index')}: {each['error']}" for each in devices if each.get("error")]
    speeds = [float(each["tflops"]) for each in devices if isinstance(each.get("tflops"), int | float)]
    slowest = min(speeds, default=None)
    if wrong:
        product = bad("gpu-matmul", Status.CRITICAL, "; ".join(wrong), problem=Problem.HARDWARE, remedy=REMEDY)
    elif failed or slowest is None:
        product = unknown("gpu-matmul", "; ".join(failed) or "no GPU computed anything")
    elif slowest < limits.matmul_min_tflops:
        detail = f"the slowest GPU reaches {slowest:.0f} TFLOP/s, not {limits.matmul_min_tflops:.0f}"
        product = bad("gpu-matmul", Status.CRITICAL, detail, problem=Problem.HARDWARE, value=slowest, unit="TFLOP/s",
                      remedy="look at clocks, power and cooling")  # fmt: skip
    else:
        product = fine("gpu-matmul", f"products are right, {slowest:.0f} TFLOP/s", value=slowest, unit="TFLOP/s")
    if broken:
        memory = bad("gpu-memory", Status.CRITICAL, "; ".join(broken), problem=Problem.HARDWARE, remedy=REMEDY)
    elif failed or not devices:
        memory = unknown("gpu-memory", "; ".join(failed) or "no GPU was tested")
    else:
        tested = min(float(each.get("tested_gib") or 0) for each in devices)
        memory = fine("gpu-memory", f"{tested:.0f} GiB of each GPU came back", value=tested, unit="GiB")
    return [product, memory]


def diagnose(scene: Scene) -> list[ProbeResult]:
    """NVIDIA's short diagnosis, where dcgmi is installed and there is a GPU."""
    program = shutil.which("dcgmi", path=scene.environment.get("PATH", os.defpath))
    if program is None or not scene.config.gpu.diagnose or survey(scene).is_empty:
        return []
    return [judge_diagnosis(_asked([program, "diag", "-r", "1", "-j"], DIAGNOSE_S - 5, scene.environment))]


def judge_diagnosis(answer: Mapping[str, Any]) -> ProbeResult:
    """All tests in the output of ``dcgmi diag -j`` with the status FAIL; its shape differs between versions."""
    if "error" in answer:
        return unknown("dcgm", str(answer["error"])[:300])
    found = list(_outcomes(answer))
    failed = [f"{name}: {words}".rstrip(": ") for name, status, words in found if status == "FAIL"]
    if failed:
        return bad("dcgm", Status.CRITICAL, "; ".join(failed[:4]), problem=Problem.HARDWARE, remedy=REMEDY,
                   evidence=failed)  # fmt: skip
    if not any(status == "PASS" for _, status, _ in found):
        return unknown("dcgm", "dcgmi diag has tested nothing")
    return fine("dcgm", f"{sum(status == 'PASS' for _, status, _ in found)} tests passed")


def _outcomes(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str, str]]:
    if depth > 12:
        return
    if isinstance(value, dict):
        name = str(value.get("name") or value.get("category") or name)
        if isinstance(status := value.get("status"), str):
            words = value.get("warnings") or value.get("info") or ""
            yield name, status.upper(), " ".join(str(words).split())[:200]
        for inner in value.values():
            yield from _outcomes(inner, name, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _outcomes(inner, name, depth + 1)


def all_reduce(scene: Scene) -> list[ProbeResult]:
    """A short all-reduce between pairs of nodes; nothing where we are not one task of several."""
    pair = pair_of(scene.environment)
    if pair is None:
        return []
    address, port, rank = pair
    argv = [sys.executable, "-P", "-m", "slurmft.worker.gpu_check", "--pair", address, str(port), str(rank)]
    return [judge_pair(_asked(argv, PAIR_S - 5, scene.environment), scene.config.network.min_all_reduce_mbps)]


def pair_of(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Address, port and rank in our pair: tasks 0 and 1 are one, 2 and 3 the next; None for the odd one out."""
    try:
        rank, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        nodes = expand_hostlist(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
        job = int(environment.get("SLURM_JOB_ID", "0"))
    except (KeyError, ValueError):
        return None
    first = rank - rank % 2
    if tasks != len(nodes) or first + 1 >= tasks:
        return None
    return nodes[first], FIRST_PORT + (job * 64 + first) % PORTS, rank % 2


def judge_pair(answer: Mapping[str, Any], least_mbps: int) -> ProbeResult:
    """A wrong sum is the network's or a node's fault; a slow one is reported from a limit on. No answer accuses no
    node: the other one of the pair may have failed to come."""
    check = "all-reduce"
    if "error" in answer:
        return unknown(check, str(answer["error"])[:300], remedy="pair this node with another one")
    if answer.get("wrong"):
        return bad(check, Status.CRITICAL, str(answer["wrong"])[:300], problem=Problem.HARDWARE,
                   remedy="pair this node with another one; check links and memory")  # fmt: skip
    speed = answer.get("mbps")
    if not isinstance(speed, int | float):
        return unknown(check, "no speed was measured")
    detail = f"{speed:.0f} MB/s with {answer.get('backend')}"
    slow = speed < least_mbps
    return bad(check, Status.CRITICAL if slow else Status.OK, detail + (f", not {least_mbps}" if slow else ""),
               value=speed, unit="MB/s", problem=Problem.HARDWARE, remedy="check the links of both nodes")  # fmt: skip


def _asked(argv: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object on the last line, or all, of a program's output; else its error."""
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, errors="replace", timeout=limit_s,
                              check=False, env=dict(environment), stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:.0f} s"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    for text in (done.stdout, done.stdout.strip().rpartition("\n")[2]):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {"error": " ".join(done.stderr.split())[-300:] or f"exit code {done.returncode} without an answer"}


# --- Xid messages of NVIDIA's driver in the kernel log, and what they mean ---
# Causes and remedies follow NVIDIA's Xid catalog, https://docs.nvidia.com/deploy/xid-errors/ (the immediate action that
# it gives for data-centre GPUs), in our words. A code that is not in the table is a warning to look at.

MAX_RECORDS = 100_000
MAX_LOOK_S = 1.0
_RECORD = re.compile(r"(?:\d+),\d+,(\d+)[^;]*;(.*)")
_XID = re.compile(r"(NVRM: Xid|SXid) \((?:PCI:)?([0-9A-Fa-f:.]+)(?: GPU-[^)]{1,40})?\): (\d{1,5})\b,?\s*(.*)")
_NO_START = re.compile(
    r"NVRM: (?:GPU ([0-9A-Fa-f:.]+): )?((?:RmInitAdapter|rm_init_adapter|The NVIDIA probe routine) failed"
    r"|GPU has fallen off).*"
)
_DETAILS = re.compile(r"Severity \d|Data \{")
"""Of a switch's error: what follows its first line, under the same code."""

_MINOR = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_RECOVERY = re.compile(r"recovery action changed .* to 0x\d+ \(([^)]*)\)", re.IGNORECASE)

RESET, BOOT, RESTART = (
    "drain the node, reset the GPU",
    "boot the node; if it comes back, replace the GPU",
    "restart the job",
)


@dataclass(frozen=True, slots=True)
class Cause:
    """The meaning of an Xid for the node."""

    meaning: str
    status: Status
    problem: Problem
    remedy: str


def _fatal(meaning: str, remedy: str) -> Cause:
    return Cause(meaning, Status.CRITICAL, Problem.HARDWARE, remedy)


def _hardware(meaning: str, remedy: str) -> Cause:
    return Cause(meaning, Status.WARNING, Problem.HARDWARE, remedy)


def _program(meaning: str) -> Cause:
    return Cause(meaning, Status.OK, Problem.USER, RESTART)


CAUSES: Mapping[int, Cause] = {
    8: _program("a program made the GPU stop processing"),
    11: _program("a program sent an invalid stream of commands"),
    13: _program("a program raised an exception of the graphics engine, mostly an access out of bounds"),
    31: _program("a program accessed memory that is not mapped"),
    32: _hardware("invalid or corrupted stream of commands on the bus", "see whether it comes back; check PCIe"),
    38: _hardware("the driver's firmware failed", RESET),
    43: _program("a program's channel was reset"),
    45: _program("a channel was removed after an earlier error, or because its program ended"),
    46: _hardware("the GPU stopped processing", RESET),
    48: _fatal("an uncorrectable (double bit) ECC error", RESET),
    54: _hardware("auxiliary power is not connected", "look at the power cables"),
    61: _fatal("the GPU's microcontroller hit a breakpoint", RESET),
    62: _fatal("the GPU's microcontroller halted", RESET),
    63: _hardware("a memory row was remapped, or a page retired; it holds after a reset", "reset the GPU when idle"),
    64: _fatal("a memory row could not be remapped, or a page not retired", RESET + "; replace it if it comes back"),
    68: _program("a video decoder raised an exception"),
    69: _program("a program raised a class error of the graphics engine"),
    74: _fatal("an NVLink error", RESET + "; check the NVLink bridges or the baseboard"),
    79: _fatal("the GPU has fallen off the bus", BOOT),
    92: _hardware("many corrected ECC errors", "watch it; run a field diagnosis"),
    94: _hardware("a contained ECC error: only its program was hit", "reset the GPU when idle"),
    95: _fatal("an uncontained ECC error: any program may be hit", RESET),
    109: _hardware("a context switch timed out", RESET),
    110: _hardware("a security fault", RESET),
    119: _fatal("the GPU's system processor (GSP) does not answer", RESET + "; boot the node if that fails"),
    120: _fatal("the GPU's system processor (GSP) failed", RESET),
    121: _hardware("a corrected error on the link to the CPU (C2C)", "reset the GPU when idle"),
    123: _fatal("the power management of the GPU failed", RESET),
    136: _fatal("link training failed", RESET),
    140: _fatal("an uncorrected ECC error", RESET),
    143: _fatal("the GPU could not be initialised", BOOT),
    151: _fatal("a key rotation failed", RESET),
    154: _hardware("the driver asks for a recovery", RESET),
    155: _hardware("an NVLink state is inconsistent", RESET),
    158: _fatal("a fatal timeout in the GPU", RESET),
} | {code: _fatal("an NVLink 5 error", RESET) for code in range(144, 151)}  # fmt: skip
"""Xid -> what it means."""

_NO_LIFE = _fatal("the driver could not start the GPU", BOOT)
_SWITCH = "an error of an NVSwitch"
_OTHER = _hardware("not in the table", "look it up in NVIDIA's Xid catalog")
_ACTIONS = {"none": Status.OK, "gpu reset required": Status.CRITICAL, "node reboot required": Status.CRITICAL,
            "drain p2p": Status.WARNING, "drain and reset": Status.CRITICAL}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One message."""

    device: str
    """PCI address."""

    code: int
    at_s: float
    """Seconds since boot."""

    text: str
    kind: str = "Xid"
    """``SXid``: of an NVSwitch; ``RmInitAdapter``: of a GPU that did not start, without a code."""

    def __str__(self) -> str:
        return f"{f'{self.kind} {self.code}'.removesuffix(' 0')} on {self.device}"


def xid(scene: Scene) -> ProbeResult | None:
    """Xid messages since boot, as far back as the configuration says; None without messages and without GPUs.

    The driver is not asked: where it hangs, the kernel log says why.
    """
    has_gpus = bool(scene.config.gpu.expected) or scene.path("proc/driver/nvidia/version").exists()
    try:
        descriptor = open_kernel_log(scene)
        try:
            found = parse_xids(records_of(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        why = f"the kernel log cannot be read: {error.strerror}"
        return unknown("xid", why, remedy="run as root") if has_gpus else None
    if not found and not has_gpus:
        return None
    return judge_xids(found, scene.up_s() or math.inf, scene.config.gpu.xid_hours)


def parse_xids(lines: Iterable[str]) -> list[Xid]:
    """The Xid messages among records of /dev/kmsg; all other records are skipped."""
    found: list[Xid] = []
    for line in lines:
        record = _RECORD.match(line)
        if record is None or len(record[1]) > 18:
            continue
        at_s = int(record[1]) / 1e6
        if match := _XID.search(record[2]):
            text, kind = match[4].strip()[:300], match[1].rpartition(" ")[2]
            one = Xid(device=match[2], code=int(match[3]), at_s=at_s, text=text, kind=kind)
            if not (_DETAILS.match(text) and found and str(found[-1]) == str(one)):
                found.append(one)
        elif match := _NO_START.search(record[2]):
            code, kind = (79, "Xid") if match[2].startswith("GPU") else (0, "RmInitAdapter")
            found.append(Xid(device=match[1] or "one GPU", code=code, at_s=at_s, text=match[0][:300], kind=kind))
    return found


def cause_of(message: Xid) -> Cause:
    """The meaning of a message; 154 contains its remedy in words, others whether they are fatal."""
    if message.kind == "RmInitAdapter":
        return _NO_LIFE
    is_minor = _MINOR.search(message.text) is not None
    if message.kind == "SXid":
        return _hardware(_SWITCH + ", not fatal", "see whether it comes back") if is_minor else _fatal(_SWITCH, RESET)
    cause = CAUSES.get(message.code, _OTHER)
    if is_minor and cause.status is Status.CRITICAL:
        return _hardware(f"{cause.meaning}, not fatal", "see whether it comes back")
    if message.code == 154 and (action := _RECOVERY.search(message.text)):
        status = _ACTIONS.get(action[1].lower(), Status.WARNING)
        return Cause(f"the driver asks for: {action[1]}", status, Problem.HARDWARE, RESET)
    return cause


def judge_xids(found: Sequence[Xid], up_s: float, hours: float) -> ProbeResult:
    """The gravest of the recent ones; those of programs are reported without blaming the node."""
    recent = [each for each in found if up_s == float("inf") or up_s - each.at_s <= hours * 3600]
    if not recent:
        return fine("xid", "no Xid in the kernel log", value=0, unit="messages")
    causes = [(cause_of(each), each) for each in recent]
    status = worst(cause.status for cause, _ in causes)
    cause, newest = next((cause, each) for cause, each in reversed(causes) if cause.status is status)
    times = sum(1 for _, each in causes if str(each) == str(newest))
    detail = f"{newest}, {times} times: {cause.meaning}"
    evidence = [f"{each.at_s:.0f} s after boot: {each}: {each.text}" for each in recent[-20:]]
    return bad("xid", status, detail, remedy=cause.remedy, problem=cause.problem, evidence=evidence,
               value=len(recent), unit="messages")  # fmt: skip


def open_kernel_log(scene: Scene) -> int:
    """A descriptor of /dev/kmsg at its oldest record.

    Raises:
        OSError: it may not be read.
    """
    return os.open(scene.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def records_of(descriptor: int) -> list[str]:
    """The records of /dev/kmsg that have not been read yet; one read gives one record.

    Raises:
        OSError: it may not be read.
    """
    lines: list[str] = []
    deadline = time.monotonic() + MAX_LOOK_S
    while len(lines) < MAX_RECORDS and time.monotonic() < deadline:
        try:
            record = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno == errno.EPIPE:  # overwritten while we read: the next one follows
                continue
            raise
        if not record:
            break
        lines += record.decode(errors="replace").splitlines()
    return lines


# --- Judging GPUs by their driver's answers: pure, but for one survey that all of them share ---

RESET_BY_NVIDIA_SMI = "drain the node, reset the GPU: nvidia-smi --gpu-reset"
SLOW_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake",
}  # fmt: skip
"""Bits of the clock reasons that mean trouble, and not idleness or a configured limit."""

NAMES = ("gpu-count", "gpu-ecc", "gpu-clocks", "gpu-pcie", "gpu-nvlink", "gpu-processes")


def gpus(scene: Scene) -> list[ProbeResult]:
    """All that the driver says about GPUs; nothing where there are none and none are expected."""
    found, limits = survey(scene), scene.config.gpu
    if found.is_empty and not limits.expected:
        return []
    confined = is_confined(scene, limits.expected or found.on_bus)
    results = [judge_count(found, limits, confined=confined)]
    if found.gpus:
        lately = with_growth(found.gpus, grown(scene, "gpu", totals_of(found.gpus)))
        results += [judge(lately, limits) for judge in JUDGES]
        results.append(judge_processes(found.gpus, *_owners(scene, found.gpus)))
    return results


def totals_of(gpus: Sequence[Gpu]) -> dict[str, int]:
    """The counters of these GPUs that only grow, by name."""
    uncorrected = {f"{gpu.uuid} uncorrected": gpu.uncorrected for gpu in gpus if gpu.uncorrected is not None}
    return uncorrected | {f"{gpu.uuid} links": gpu.link_errors for gpu in gpus}


def with_growth(gpus: Sequence[Gpu], recent: Mapping[str, int]) -> list[Gpu]:
    """The GPUs as they are judged: with what their counters have grown by, instead of totals."""
    return [
        replace(gpu, link_errors=recent.get(f"{gpu.uuid} links", 0),
                uncorrected=None if gpu.uncorrected is None else recent.get(f"{gpu.uuid} uncorrected", 0))
        for gpu in gpus
    ]  # fmt: skip


def is_confined(scene: Scene, expected: int) -> bool:
    """Whether we are inside of a job, which may see fewer GPUs than the node has."""
    if "SLURM_JOB_ID" not in scene.environment or scene.context not in ("manual", "cron"):
        return False
    return scene.environment.get("SLURM_GPUS_ON_NODE") != str(expected)


def judge_count(found: Survey, limits: GpuLimits, *, confined: bool) -> ProbeResult:
    """Whether all GPUs are there and answer."""
    check, seen = "gpu-count", len(found.gpus)
    if found.errors and confined:  # GPUs that the job may not use do not answer either
        return unknown(check, "; ".join(found.errors[:4]), remedy="look from outside of a job")
    if found.errors:
        return bad(check, Status.CRITICAL, "; ".join(found.errors[:4]), problem=Problem.HARDWARE, value=seen,
                   unit="GPUs", evidence=found.errors,
                   remedy="boot the node; if it comes back, replace the GPU")  # fmt: skip
    expected = limits.expected if limits.expected is not None else found.on_bus
    if not found.source and not found.driver_loaded and expected and found.on_bus < expected:
        return _missing(check, found.on_bus, expected, "on the PCI bus")
    if not found.source and not found.driver_loaded and limits.expected:
        return bad(check, Status.CRITICAL, f"the driver is not loaded: none of {expected} GPUs can be used",
                   problem=Problem.HARDWARE, remedy="modprobe nvidia; dmesg")  # fmt: skip
    if found.not_asked:
        return unknown(check, "; ".join(found.not_asked[:4]), remedy="run as root")
    if not found.source:
        return unknown(check, "neither NVML nor nvidia-smi is there to ask", remedy="pip install nvidia-ml-py")
    if seen >= expected:
        return fine(check, f"{seen} GPUs ({found.source})", value=seen, unit="GPUs")
    if confined:
        return unknown(check, f"this job sees {seen} of {expected} GPUs", remedy="ask for all of them")
    return _missing(check, seen, expected, "answer")


def _missing(check: str, seen: int, expected: int, where: str) -> ProbeResult:
    return bad(check, Status.CRITICAL, f"{seen} of {expected} GPUs {where}", value=seen, unit="GPUs",
               problem=Problem.HARDWARE, remedy="lspci -d 10de:; dmesg; boot the node")  # fmt: skip


def judge_ecc(gpus: Sequence[Gpu], limits: GpuLimits) -> ProbeResult:
    """Recent uncorrected errors, rows that wait for a reset, rows that could not be remapped."""
    check, statuses, words = "gpu-ecc", [Status.OK], []
    for gpu in gpus:
        if gpu.remap_failed:
            statuses.append(Status.CRITICAL)
            words.append(f"GPU {gpu.index}: a row could not be remapped")
        if gpu.uncorrected is not None:
            statuses.append(above(gpu.uncorrected, limits.uncorrected_warning, limits.uncorrected_critical))
            if statuses[-1] is not Status.OK:
                words.append(f"GPU {gpu.index}: {gpu.uncorrected} uncorrected ECC errors")
        if gpu.pending:
            statuses.append(Status.WARNING)
            words.append(f"GPU {gpu.index}: a remapped row waits for a reset")
    total = sum(gpu.uncorrected or 0 for gpu in gpus)
    evidence = [_line(gpu) for gpu in gpus] if words else []
    return bad(check, worst(statuses), "; ".join(words) or "no uncorrected ECC errors", value=total, unit="errors",
               problem=Problem.HARDWARE, remedy=RESET_BY_NVIDIA_SMI, evidence=evidence)  # fmt: skip


def judge_clocks(gpus: Sequence[Gpu], limits: GpuLimits) -> ProbeResult:
    """Too hot, or held back by its power supply."""
    check, words = "gpu-clocks", []
    for gpu in gpus:
        reasons = [word for bit, word in SLOW_REASONS.items() if gpu.throttle is not None and gpu.throttle & bit]
        hot = gpu.temperature_c is not None and gpu.temperature_c >= limits.temperature_warning_c
        if reasons or hot:
            words.append(f"GPU {gpu.index}: {', '.join(reasons + [f'{gpu.temperature_c} C'] * hot)}")
    hottest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    return bad(check, Status.WARNING if words else Status.OK, "; ".join(words) or "no GPU is held back", value=hottest,
               unit="C", problem=Problem.HARDWARE, remedy="look at cooling and power supply")  # fmt: skip


def judge_pcie(gpus: Sequence[Gpu], limits: GpuLimits) -> ProbeResult:
    """Lanes that are lost. An idle link is slow on purpose, so only the generation that it is capable of counts."""
    check, remedy = "gpu-pcie", "seat the GPU or its riser anew; look for AER errors in dmesg"

    def short(gpu: Gpu) -> bool:
        lanes = gpu.width is not None and gpu.width < limits.pcie_width
        return lanes or (gpu.max_generation is not None and gpu.max_generation < limits.pcie_generation)

    words = "; ".join(f"GPU {gpu.index}: {gpu.width} of {gpu.max_width} lanes, generation {gpu.max_generation}"
                      for gpu in gpus if short(gpu) or _narrow(gpu))  # fmt: skip
    status = Status.CRITICAL if any(map(short, gpus)) else Status.WARNING if words else Status.OK
    return bad(check, status, words or "all links have their width", problem=Problem.HARDWARE, remedy=remedy)


def _narrow(gpu: Gpu) -> bool:
    return gpu.width is not None and gpu.max_width is not None and 0 < gpu.width < gpu.max_width


def judge_nvlink(gpus: Sequence[Gpu], limits: GpuLimits) -> ProbeResult:
    """Links that should be active and are not, or that recover from errors often."""
    check, active = "gpu-nvlink", [sum(gpu.links) for gpu in gpus]
    noisy = [gpu for gpu in gpus if gpu.link_errors >= limits.nvlink_errors_warning]
    remedy = "nvidia-smi nvlink --status; look at fabricmanager and its log"
    if not any(gpu.links for gpu in gpus) and not limits.nvlinks:
        return fine(check, "no NVLink")
    if limits.nvlinks is not None:
        lacking = [gpu.index for gpu, count in zip(gpus, active, strict=True) if count < limits.nvlinks]
        detail = f"{brief(lacking)}: fewer than {limits.nvlinks} NVLinks are active"
    else:
        lacking = [gpu.index for gpu, count in zip(gpus, active, strict=True) if 0 < count < len(gpu.links)]
        detail = f"{brief(lacking)}: some NVLinks are not active"
    if not lacking and noisy:
        words = "; ".join(f"GPU {gpu.index}: its NVLinks recovered from {gpu.link_errors} errors" for gpu in noisy)
        return bad(check, Status.WARNING, words, problem=Problem.HARDWARE, remedy=remedy,
                   value=max(gpu.link_errors for gpu in noisy), unit="errors")  # fmt: skip
    if not lacking:
        return fine(check, f"{min(active)} active on each GPU", value=min(active), unit="links")
    return bad(check, Status.WARNING if limits.nvlinks is None else Status.CRITICAL, detail, problem=Problem.HARDWARE,
               remedy=remedy, value=min(active), unit="links")  # fmt: skip


def judge_processes(
    gpus: Sequence[Gpu], owners: Mapping[int, node.Process | None], running: frozenset[str] | None
) -> ProbeResult:
    """Processes of jobs that have ended, which still hold GPU memory; those of root and without a job do not count."""
    check = "gpu-processes"
    if running is None:
        return unknown(check, "a job is starting: not known yet whose processes these are")
    left = [
        (gpu, found) for gpu in gpus for pid in gpu.pids
        if (found := owners.get(pid)) is not None and found.uid != 0 and found.job and found.job not in running
    ]  # fmt: skip
    words = [f"GPU {gpu.index}: {found.name} ({found.pid}) of the ended job {found.job}" for gpu, found in left]
    return bad(check, Status.WARNING if words else Status.OK, "; ".join(words) or "none is left over", value=len(left),
               unit="processes", remedy="let bin/slurmft-epilog be the Epilog; now: kill them")  # fmt: skip


JUDGES: Sequence[Callable[[Sequence[Gpu], GpuLimits], ProbeResult]] = (
    judge_ecc, judge_clocks, judge_pcie, judge_nvlink,
)  # fmt: skip


def _owners(scene: Scene, gpus: Sequence[Gpu]) -> tuple[dict[int, node.Process | None], frozenset[str] | None]:
    # the processes first: a job that starts in between is then among the running ones
    owners = {pid: node.process(scene.path(f"proc/{pid}")) for gpu in gpus for pid in gpu.pids}
    return owners, node.running_jobs(scene)


def _line(gpu: Gpu) -> str:
    return (f"GPU {gpu.index} {gpu.uuid} {gpu.bus}: {gpu.uncorrected} uncorrected, {gpu.corrected} corrected, "
            f"pending {gpu.pending}, remap failed {gpu.remap_failed}")  # fmt: skip
