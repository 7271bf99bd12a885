"""Probes of the memory: available memory, pressure, ECC errors."""

from __future__ import annotations

import re

from slurmft.config.health import MemoryLimits
from slurmft.health.judging import above, bad, below, fine, unknown
from slurmft.health.node_view import Scene
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status, worst


def memory(scene: Scene) -> ProbeResult:
    """Memory that is available, and how long processes waited for some."""
    fields = dict(re.findall(r"^(\w+):\s+(\d{1,18}) kB$", scene.text("proc/meminfo"), re.MULTILINE))
    try:
        share = int(fields["MemAvailable"]) / int(fields["MemTotal"])
    except (KeyError, ZeroDivisionError):
        return unknown("memory", "/proc/meminfo cannot be read")
    return judge_memory(share, parse_pressure(scene.text("proc/pressure/memory")), scene.config.memory)


def parse_pressure(text: str) -> float | None:
    """Share of the last minute in which nothing could run for want of it; None on kernels without PSI."""
    match = re.search(r"^full .*\bavg60=(\d{1,3}(?:\.\d{1,9})?)\b", text, re.MULTILINE)
    return float(match[1]) / 100 if match else None


def judge_memory(available: float, pressure: float | None, limits: MemoryLimits) -> ProbeResult:
    """A job that uses all of it is not the node's fault."""
    space = below(available, limits.available_warning, limits.available_critical)
    waiting = Status.OK if pressure is None else above(pressure, limits.pressure_warning, None)
    detail = f"{available:.0%} available"
    if pressure is not None:
        detail += f", all waited for memory {pressure:.0%} of the last minute"
    return bad("memory", worst([space, waiting]), detail, value=available * 100, unit="%", problem=Problem.USER,
               remedy="see which job uses it: systemd-cgtop, or ps --sort=-rss")  # fmt: skip


def edac(scene: Scene) -> ProbeResult | None:
    """ECC errors that the memory controllers have counted since boot; None where there are none to ask."""
    corrected = uncorrected = 0
    lines = []
    controllers = scene.folders("sys/devices/system/edac/mc", "mc[0-9]*")
    for folder in controllers:
        name = str(folder.relative_to(scene.root))
        found = scene.integer(f"{name}/ce_count"), scene.integer(f"{name}/ue_count")
        if None in found:
            return unknown("edac", f"{name} cannot be read")
        ce, ue = found[0] or 0, found[1] or 0
        corrected, uncorrected = corrected + ce, uncorrected + ue
        if ce or ue:
            lines.append(f"{folder.name}: {ce} corrected, {ue} uncorrected")
    return judge_edac(corrected, uncorrected, lines, scene.config.memory) if controllers else None


def judge_edac(corrected: int, uncorrected: int, lines: list[str], limits: MemoryLimits) -> ProbeResult:
    """An uncorrected one has changed data, or killed what used it."""
    if not corrected and not uncorrected:
        return fine("edac", "no ECC errors", value=0, unit="errors")
    hard = above(uncorrected, None, limits.uncorrected_critical)
    status = worst([hard, above(corrected, limits.corrected_warning, None)])
    detail = f"{uncorrected} uncorrected and {corrected} corrected ECC errors since boot"
    remedy = "replace the DIMM that ras-mc-ctl --errors names" if hard else "watch it: ras-mc-ctl --errors"
    return bad("edac", status, detail, value=uncorrected or corrected, unit="errors", evidence=lines, remedy=remedy,
               problem=Problem.HARDWARE)  # fmt: skip
