"""Xid messages of NVIDIA's driver in the kernel log, and what they mean.

Causes and remedies follow NVIDIA's Xid catalog, https://docs.nvidia.com/deploy/xid-errors/ (the immediate action that
it gives for data-centre GPUs), in our words. A code that is not in the table is a warning to look at.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurmft.health.judging import bad, fine, unknown
from slurmft.health.node_view import Scene
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status, worst

MAX_RECORDS = 100_000
MAX_LOOK_S = 1.0
_RECORD = re.compile(r"(?:\d+),\d+,(\d+)[^;]*;(.*)")
_XID = re.compile(r"(NVRM: Xid|SXid) \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d{1,5})\b,?\s*(.*)")
_NO_START = re.compile(r"NVRM: GPU ([0-9A-Fa-f:.]+): (RmInitAdapter failed.*)")
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


def xid(scene: Scene) -> ProbeResult:
    """Xid messages since boot, as far back as the configuration says."""
    try:
        lines = _kernel_log(scene)
    except OSError as error:
        return unknown("xid", f"the kernel log cannot be read: {error.strerror}", remedy="run as root")
    try:
        up_s = float(scene.text("proc/uptime").split()[0])
    except (IndexError, ValueError):
        up_s = float("inf")
    return judge_xids(parse_xids(lines), up_s, scene.config.gpu.xid_hours)


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
            found.append(Xid(device=match[1], code=0, at_s=at_s, text=match[2][:300], kind="RmInitAdapter"))
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


def _kernel_log(scene: Scene) -> list[str]:
    """The records of /dev/kmsg; one read gives one record.

    Raises:
        OSError: it may not be read.
    """
    lines: list[str] = []
    descriptor = os.open(scene.path("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    deadline = time.monotonic() + MAX_LOOK_S
    try:
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
    finally:
        os.close(descriptor)
    return lines
