"""The long probes: GPUs that must compute and remember correctly, NVIDIA's own diagnosis, pairs that must reduce.

torch runs in programs of their own (``slurmft.worker.checks``), and only where it is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmft.config.health import GpuLimits
from slurmft.health.judging import bad, fine, unknown
from slurmft.health.node_view import Scene
from slurmft.health.probes.gpu_facts import survey
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status
from slurmft.scheduler.parsing.parsing import expand_hostlist

WORK_S, DIAGNOSE_S, PAIR_S = 150.0, 180.0, 60.0
FIRST_PORT, PORTS = 20_000, 20_000
REMEDY = "drain the node, run dcgmi diag -r 3, replace the GPU if it fails"


def gpu_compute(scene: Scene) -> list[ProbeResult]:
    """Products and memory of every GPU, checked; nothing where there is no GPU."""
    if survey(scene).is_empty:
        return []
    limits = scene.config.gpu
    argv = [sys.executable, "-P", "-m", "slurmft.worker.checks.gpu_check", "--size", str(limits.matmul_size),
            "--memory-share", str(limits.memory_share)]  # fmt: skip
    return judge_work(_asked(argv, WORK_S - 5, scene.environment), limits)


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
    argv = [sys.executable, "-P", "-m", "slurmft.worker.checks.pair_check", address, str(port), str(rank)]
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
