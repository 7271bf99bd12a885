"""Judging GPUs by their driver's answers: pure, but for one survey that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slurmft.config.health import GpuLimits
from slurmft.health import leftovers
from slurmft.health.judging import above, bad, fine, unknown
from slurmft.health.node_view import Scene
from slurmft.health.probes.gpu_facts import Gpu, Survey, brief, survey
from slurmft.health.probes.xid import xid
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status, worst

RESET = "drain the node, reset the GPU: nvidia-smi --gpu-reset"
SLOW_REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake",
}  # fmt: skip
"""Bits of the clock reasons that mean trouble, and not idleness or a configured limit."""

NAMES = ("gpu-count", "gpu-ecc", "gpu-clocks", "gpu-pcie", "gpu-nvlink", "gpu-processes", "xid")


def gpus(scene: Scene) -> list[ProbeResult]:
    """All results about GPUs; none where there are none and none are expected."""
    found, limits = survey(scene), scene.config.gpu
    if found.is_empty and not limits.expected:
        return []
    confined = is_confined(scene, limits.expected or found.on_bus)
    results = [judge_count(found, limits, confined=confined)]
    if found.gpus:
        results += [judge(found.gpus, limits) for judge in JUDGES]
        results.append(judge_processes(found.gpus, *_owners(scene, found.gpus)))
    if found.gpus or found.driver_loaded or found.errors:
        results.append(xid(scene))
    return results


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
    if not found.source:
        return unknown(check, "neither NVML nor nvidia-smi is there to ask", remedy="pip install 'slurmft[gpu]'")
    if seen >= expected:
        return fine(check, f"{seen} GPUs ({found.source})", value=seen, unit="GPUs")
    if confined:
        return unknown(check, f"this job sees {seen} of {expected} GPUs", remedy="ask for all of them")
    return _missing(check, seen, expected, "answer")


def _missing(check: str, seen: int, expected: int, where: str) -> ProbeResult:
    return bad(check, Status.CRITICAL, f"{seen} of {expected} GPUs {where}", value=seen, unit="GPUs",
               problem=Problem.HARDWARE, remedy="lspci -d 10de:; dmesg; boot the node")  # fmt: skip


def judge_ecc(gpus: Sequence[Gpu], limits: GpuLimits) -> ProbeResult:
    """Uncorrected errors, rows that wait for a reset, rows that could not be remapped."""
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
               problem=Problem.HARDWARE, remedy=RESET, evidence=evidence)  # fmt: skip


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
    """Links that should be active and are not."""
    check, active = "gpu-nvlink", [sum(gpu.links) for gpu in gpus]
    if not any(gpu.links for gpu in gpus) and not limits.nvlinks:
        return fine(check, "no NVLink")
    if limits.nvlinks is not None:
        lacking = [gpu.index for gpu, count in zip(gpus, active, strict=True) if count < limits.nvlinks]
        detail = f"{brief(lacking)}: fewer than {limits.nvlinks} NVLinks are active"
    else:
        lacking = [gpu.index for gpu, count in zip(gpus, active, strict=True) if 0 < count < len(gpu.links)]
        detail = f"{brief(lacking)}: some NVLinks are not active"
    if not lacking:
        return fine(check, f"{min(active)} active on each GPU", value=min(active), unit="links")
    return bad(check, Status.WARNING if limits.nvlinks is None else Status.CRITICAL, detail, problem=Problem.HARDWARE,
               remedy="nvidia-smi nvlink --status; look at fabricmanager and its log", value=min(active),
               unit="links")  # fmt: skip


def judge_processes(
    gpus: Sequence[Gpu], owners: Mapping[int, leftovers.Process | None], running: frozenset[str] | None
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


def _owners(
    scene: Scene, gpus: Sequence[Gpu]
) -> tuple[dict[int, leftovers.Process | None], frozenset[str] | None]:  # fmt: skip
    # the processes first: a job that starts in between is then among the running ones
    owners = {pid: leftovers.process(scene.path(f"proc/{pid}")) for gpu in gpus for pid in gpu.pids}
    return owners, leftovers.running_jobs(scene)


def _line(gpu: Gpu) -> str:
    return (f"GPU {gpu.index} {gpu.uuid} {gpu.bus}: {gpu.uncorrected} uncorrected, {gpu.corrected} corrected, "
            f"pending {gpu.pending}, remap failed {gpu.remap_failed}")  # fmt: skip
