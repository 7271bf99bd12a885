"""The GPUs of a node: which of them its workers may use, and whether killed workers have released them.

GPUs are identified by UUID: indices prove nothing, as they are renumbered inside a job's cgroup, and may change with
every allocation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

ASK_S = 20.0
FREE_S = 30.0
"""How long the next workers wait for GPU memory that earlier ones still hold."""

LOOK_S = 0.2
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"

_DRIVER = Path("/dev/nvidiactl")


def gpu_uuids(environment: Mapping[str, str]) -> list[str]:
    """UUIDs of the GPUs that a worker with this environment would see, in its order; empty where that is unknown."""
    rows = [line.split(",") for line in _ask("--query-gpu=index,uuid", environment, ASK_S) or []]
    by_index = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    if VISIBLE_VARIABLE not in environment:
        return list(by_index.values())
    words = [word.strip() for word in environment[VISIBLE_VARIABLE].split(",") if word.strip()]
    found = [by_index.get(word, word if word in by_index.values() else "") for word in words]
    return found if all(found) else []


def visible_without(environment: Mapping[str, str], suspects: Collection[str], needed: int) -> str | None:
    """CUDA_VISIBLE_DEVICES that leaves out the suspects; None where fewer than ``needed`` GPUs are proven others."""
    uuids = gpu_uuids(environment)
    others = [uuid for uuid in uuids if uuid not in suspects]
    return ",".join(others) if len(others) >= needed else None


def own_device(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Variables that give a rank an instance of its own where GPUs are split (MIG); none where they are whole.

    CUDA shows a process only the first instance of those it is given, so that all ranks would share one.
    """
    words = [word.strip() for word in environment.get(VISIBLE_VARIABLE, "").split(",") if word.strip()]
    if not words or not all(word.startswith("MIG-") for word in words):
        return {}
    return {VISIBLE_VARIABLE: words[local_rank % len(words)]}


def wait_until_free(
    pids: Collection[int], environment: Mapping[str, str], *, limit_s: float = FREE_S, driver: Path = _DRIVER
) -> set[int]:
    """Return when none of these processes, which have ended, holds memory of a GPU; those that do after ``limit_s``.

    A context may outlive its process for seconds, while a kernel still runs or an error is handled; a worker that is
    started meanwhile finds too little memory. Without a driver, or where it does not answer, there is nothing to wait
    for.
    """
    if not pids or not driver.exists():
        return set()
    deadline = time.monotonic() + limit_s
    while left := pids_on_gpus(environment, max(1.0, deadline - time.monotonic())) & set(pids):
        if time.monotonic() > deadline:
            return left
        time.sleep(LOOK_S)
    return set()


def pids_on_gpus(environment: Mapping[str, str], within_s: float = ASK_S) -> set[int]:
    """Processes that hold memory of a GPU, as far as the driver reports; MIG instances count."""
    lines = _ask("--query-compute-apps=pid", environment, within_s) or []
    return {int(line) for line in map(str.strip, lines) if line.isascii() and line.isdecimal() and len(line) < 10}


def _ask(query: str, environment: Mapping[str, str], within_s: float) -> list[str] | None:
    """The lines of nvidia-smi's answer; None where there is none."""
    argv = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=within_s, check=False,
                              env=dict(environment), stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
