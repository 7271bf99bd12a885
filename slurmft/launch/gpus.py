"""The GPUs that a node's workers may use, by UUID: how a run goes on beside a suspect GPU on the same node.

Indices prove nothing: they are renumbered inside a job's cgroup, and may change with every allocation.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping

ASK_S = 20.0
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def gpu_uuids(environment: Mapping[str, str]) -> list[str]:
    """UUIDs of the GPUs that a worker with this environment would see, in its order; empty where that is unknown."""
    argv = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False,
                              env=dict(environment), stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
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
