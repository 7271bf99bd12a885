"""The training that every contender does: a small network, data from the step's number, 50 ms of waiting per step.

Each start of a trainer leaves one line in FOLDER/starts when its first step is done: the step, and when that was.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEP_S = 0.05


def new_model() -> nn.Module:
    torch.set_num_threads(1)  # many processes share few cores
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return nn.functional.mse_loss(model(x), torch.sin(x.cumsum(dim=1)))


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    loss = loss_of(model, step, rank)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(STEP_S)


def note_start(folder: Path, step: int) -> None:
    """Call on rank 0 when the first step of this process is done."""
    with (folder / "starts").open("a") as stream:
        stream.write(f"{step} {time.time()}\n")


def join() -> int:
    """Join the process group that the environment names; returns the rank."""
    dist.init_process_group("gloo", init_method="env://")
    return dist.get_rank()


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    temporary.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on from; 0 when nothing is saved."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])
