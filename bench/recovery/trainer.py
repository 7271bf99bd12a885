"""A small training that tells when it did what: ``trainer.py FOLDER session|plain``.

Every rank appends lines ``time pid what`` to ``FOLDER/marks-RANK``. Both ways do the same work: DDP and Adam, a step
of 20 ms, a checkpoint every 20 steps, and on a restart the newest checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGAN_AT = time.time()

import torch  # noqa: E402 - the time before it is part of what is measured
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 1_000_000
SAVE_EVERY = 20
STEP_S = 0.02
WIDTH = 64


class Marks:
    """One rank's diary."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"marks-{rank}").open("a", buffering=1)

    def __call__(self, what: str, at: float | None = None) -> None:
        self._file.write(f"{at or time.time():.6f} {os.getpid()} {what}\n")


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], mark: Marks) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()
        time.sleep(STEP_S)
        mark(f"step {step + 1}")


def with_session(folder: Path) -> None:
    from slurmft import CheckpointManager, start_session

    with start_session(seed=1) as session:
        mark = Marks(folder, session.rank)
        mark("began", BEGAN_AT)
        mark("joined")
        plain, optimizer = new_model()
        model = session.distributed(plain, lambda ddp: ddp(torch.ones(8, WIDTH)).sum())
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)
        mark("loaded")

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step)

        train(model, optimizer, session.steps(start=loaded.step, until=STEPS, save=save), mark)


def without(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mark = Marks(folder, rank)
    mark("began", BEGAN_AT)
    mark("joined")
    plain, optimizer = new_model()
    model = DistributedDataParallel(plain)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        state: dict[str, Any] = torch.load(path, weights_only=True)
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    mark("loaded")

    def steps() -> Iterable[int]:
        for step in range(first, STEPS):
            if step % SAVE_EVERY == 0 and step > first and rank == 0:
                fresh = path.with_suffix(".new")
                torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh)
                fresh.replace(path)
            yield step

    train(model, optimizer, steps(), mark)


if __name__ == "__main__":
    (with_session if sys.argv[2] == "session" else without)(Path(sys.argv[1]))
