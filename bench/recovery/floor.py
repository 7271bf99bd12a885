"""The floor: what forks, sockets and torch themselves need between ``kill -9`` of a rank and the next step.

One process has imported what our zygote has, and forks the ranks. It sees a rank die, kills the others, waits for
them, and forks all again: no evidence, no verdict, no journal, no checks, no checkpoint to look for, nothing that
outlives it. Each rank joins gloo, builds DDP with one pass in front, loads a file of the same size, and does one step.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from slurmft.config.sections import PRELOAD
from slurmft.system.processes import without_collections


def main(ranks: int, rounds: int) -> None:
    """Print the seconds of each round."""
    with without_collections():
        for module in PRELOAD:
            importlib.import_module(module)
        import trainer
    with tempfile.TemporaryDirectory(prefix="floor-") as name:
        import torch

        path = Path(name) / "state"
        model, optimizer = trainer.new_model()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        pids, _ = start(ranks, path)
        for _ in range(rounds):
            time.sleep(0.5)
            began = time.monotonic()
            os.kill(pids[-1], signal.SIGKILL)
            os.waitpid(pids[-1], 0)
            for pid in pids[:-1]:
                os.kill(pid, signal.SIGKILL)
            for pid in pids[:-1]:
                os.waitpid(pid, 0)
            pids, stepped = start(ranks, path)
            print(f"{stepped - began:.4f}", flush=True)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def start(ranks: int, path: Path) -> tuple[list[int], float]:
    """The process ids, and when rank 0 had done its first step."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    receive, send = os.pipe()
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            try:
                train(rank, ranks, port, path, send)
            finally:  # a peer was killed first: nothing of the parent's may be cleaned up here
                os._exit(1)
        pids.append(pid)
    os.close(send)
    os.read(receive, 1)
    os.close(receive)
    return pids, time.monotonic()


def train(rank: int, ranks: int, port: int, path: Path, done: int) -> None:
    import torch
    import torch.distributed as dist
    import trainer
    from torch.nn.parallel import DistributedDataParallel

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    plain, optimizer = trainer.new_model()
    model = DistributedDataParallel(plain)
    model(torch.ones(8, trainer.WIDTH)).sum().backward()
    state = torch.load(path, weights_only=True)
    plain.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.ones(8, trainer.WIDTH)).sum().backward()
        optimizer.step()
        time.sleep(trainer.STEP_S)
        if step == 0 and rank == 0:
            os.write(done, b".")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
