"""``python -m slurmft.worker.pair_check ADDRESS PORT RANK``: a short all-reduce between two nodes, as JSON.

NCCL where both have a GPU, else gloo. It reduces integers, so that the sum is exact.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MEGABYTES, REPEATS, TIMEOUT_S = 32, 5, 40


def reduce(address: str, port: int, rank: int) -> dict[str, Any]:
    """Megabytes in a second, or what is wrong with the sums."""
    has_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=TIMEOUT_S))  # fmt: skip
    device = torch.device("cuda:0" if has_gpu else "cpu")
    count = MEGABYTES * 1_000_000 // 4
    mine = torch.arange(count, dtype=torch.int32, device=device) + rank
    expected = 2 * torch.arange(count, dtype=torch.int32, device=device) + 1
    took = []
    for _ in range(REPEATS):
        tensor = mine.clone()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        wrong = int((tensor != expected).sum())  # waits for the device
        took.append(time.perf_counter() - began)
        if wrong:
            return {"wrong": f"{wrong} of {count} sums are wrong", "backend": backend}
    dist.barrier()
    dist.destroy_process_group()
    return {"mbps": MEGABYTES / sorted(took)[REPEATS // 2], "backend": backend}


def main() -> int:
    """Reduce with the other half of the pair."""
    address, port, rank = sys.argv[1:4]
    try:
        answer = reduce(address, int(port), int(rank))
    except (RuntimeError, ValueError) as error:
        answer = {"error": " ".join(str(error).split())[:300]}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
