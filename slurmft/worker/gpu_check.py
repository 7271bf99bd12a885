"""``python -m slurmft.worker.gpu_check``: does every GPU compute and remember correctly? One JSON object.

Matrices hold -1, 0 and 1, so sparsely that all sums are small integers: every product is exact in every type, in any
order of its sums, and any difference is an error of the hardware. Sums over rows and columns, which the CPU computes
from the factors alone, find it; a product that differs from its own repetition is found too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

REPEATS = 20
BLOCK_BYTES = 1 << 30
_PATTERNS = (0x5555555555555555, -0x5555555555555556, 0x00FF00FF00FF00FF, -1)


def check_device(device: torch.device, *, size: int, memory_share: float) -> dict[str, Any]:
    """Its faults, in words; its speed in TFLOP/s, and the GiB that were tested."""
    facts: dict[str, Any] = {"index": device.index or 0}
    facts["wrong"], facts["tflops"] = _products(device, size)
    facts["memory"], facts["tested_gib"] = _memory(device, memory_share)
    return facts


def _products(device: torch.device, size: int) -> tuple[str, float]:
    generator = torch.Generator().manual_seed(20260101)
    probability = min(1.0, 8 / math.sqrt(size))  # of a nonzero: sums then deviate by about 8, far below 256
    factors = [_sparse_signs(size, probability, generator) for _ in range(2)]
    ones = torch.ones(size, dtype=torch.float64)
    left, right = (factor.double() for factor in factors)
    rows, columns = left @ (right @ ones), (ones @ left) @ right
    tflops = 0.0
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (factor.to(device=device, dtype=kind) for factor in factors)
        first = a @ b
        sums = first.double().cpu()
        if not torch.equal(sums.sum(1), rows) or not torch.equal(sums.sum(0), columns):
            bad = int((sums.sum(1) != rows).sum())
            return f"{bad} rows of a {kind} product are wrong (silent data corruption)", tflops
        began = time.perf_counter()
        for _ in range(REPEATS):
            again = a @ b
        _wait(device)
        if kind is torch.bfloat16:
            tflops = 2 * size**3 * REPEATS / (time.perf_counter() - began) / 1e12
        if not torch.equal(first, again):
            return f"the same {kind} product came out differently (silent data corruption)", tflops
    return "", tflops


def _sparse_signs(size: int, probability: float, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(size, size, generator=generator)
    return (chosen < probability / 2).to(torch.int8) - (chosen > 1 - probability / 2).to(torch.int8)


def _memory(device: torch.device, share: float) -> tuple[str, float]:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 64 << 20
    wanted, blocks = int(free * share), []
    while wanted >= 8 << 20:
        count = min(wanted, BLOCK_BYTES) // 8
        blocks.append(torch.empty(count, dtype=torch.int64, device=device))
        wanted -= count * 8
    tested = sum(block.numel() * 8 for block in blocks) / 2**30
    for pattern in _PATTERNS:
        for number, block in enumerate(blocks):
            block.fill_(pattern ^ number)  # every block another one: an address that wraps around is seen
        for number, block in enumerate(blocks):
            if wrong := int((block != (pattern ^ number)).sum()):
                return f"{wrong} words of block {number} came back changed", tested
    return "", tested


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Check all GPUs, or the CPU for a test of this program itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--memory-share", type=float, default=0.8)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.stdout.write(json.dumps({"error": "this torch sees no GPU"}) + "\n")
        return 0
    kinds = ["cpu"] if options.cpu else [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    torch.backends.cuda.matmul.allow_tf32 = True
    found = []
    for kind in kinds:
        try:
            found.append(check_device(torch.device(kind), size=options.size, memory_share=options.memory_share))
        except RuntimeError as error:  # torch's own, of CUDA and out of memory too
            index = torch.device(kind).index or 0
            found.append({"index": index, "error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
    sys.stdout.write(json.dumps({"devices": found}) + "\n")
    return 0


# --- ``python -m slurmft.worker.gpu_check --pair ADDRESS PORT RANK``: a short all-reduce between two nodes, as JSON ---
# NCCL where both have a GPU, else gloo. It reduces integers, so that the sum is exact.

MEGABYTES, PAIR_REPEATS, PAIR_TIMEOUT_S = 32, 5, 40


def reduce(address: str, port: int, rank: int) -> dict[str, Any]:
    """Megabytes in a second, or what is wrong with the sums."""
    has_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=PAIR_TIMEOUT_S))  # fmt: skip
    device = torch.device("cuda:0" if has_gpu else "cpu")
    count = MEGABYTES * 1_000_000 // 4
    mine = torch.arange(count, dtype=torch.int32, device=device) + rank
    expected = 2 * torch.arange(count, dtype=torch.int32, device=device) + 1
    took = []
    for _ in range(PAIR_REPEATS):
        tensor = mine.clone()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        wrong = int((tensor != expected).sum())  # waits for the device
        took.append(time.perf_counter() - began)
        if wrong:
            return {"wrong": f"{wrong} of {count} sums are wrong", "backend": backend}
    dist.barrier()
    dist.destroy_process_group()
    return {"mbps": MEGABYTES / sorted(took)[PAIR_REPEATS // 2], "backend": backend}


def check_pair(address: str, port: str, rank: str) -> int:
    """Reduce with the other half of the pair."""
    try:
        answer = reduce(address, int(port), int(rank))
    except (RuntimeError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())[:300]}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(check_pair(*sys.argv[2:5]) if sys.argv[1:2] == ["--pair"] else main())
