"""A trainer with what only rank 0 has: buffers of BatchNorm, and totals in ``extra`` that grow with every step.

Its last line is a digest of weights, buffers and totals. With ``--extra mapping`` the totals are given to ``save`` as
they are then, with ``function`` as a function. With ``--shards N`` the weights are spread over N ranks, neighbours or
with ``--across`` every so many, and the other ranks have replicas of them (FSDP2). With ``--diary FOLDER`` each rank
writes a line at the end of each step: Unix time, process, step.
"""

import argparse
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurmft import CheckpointManager, Session, start_session

WIDTH = 16


class Position:
    """Of a loader: counts the batches of this rank."""

    taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.taken = state_dict["taken"]


def distributed(plain: nn.Sequential, session: Session, args: argparse.Namespace) -> nn.Module:
    """The model on all ranks: whole, or in parts."""
    if not args.shards:
        return session.distributed(plain, lambda ddp: ddp(torch.randn(4, WIDTH)).sum())
    ranks = torch.arange(session.world_size)
    ranks = ranks.view(args.shards, -1).T if args.across else ranks.view(-1, args.shards)
    names = ("replicate", "shard")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names) if len(ranks) > 1 else DeviceMesh("cpu", ranks.flatten())
    for layer in plain:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(plain, mesh=mesh)


def whole(value: torch.Tensor) -> torch.Tensor:
    """All of a value, on every rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(args: argparse.Namespace) -> None:
    with start_session(seed=1) as session:
        torch.manual_seed(1)
        norm = [nn.BatchNorm1d(WIDTH)] if args.buffers else []
        diary = (args.diary / f"rank-{session.rank}").open("a", buffering=1) if args.diary else None
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *norm, nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        if args.table:
            plain.register_buffer("table", torch.zeros(args.table << 18))
        model = distributed(plain, session, args)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + session.rank)
        random.seed(session.rank)

        checkpoints, loader = CheckpointManager(session.checkpoint_dir), Position()
        loaded = checkpoints.load_latest(model, optimizer, loader=loader)
        totals = {"seen": loaded.extra.get("seen", 0), "sum": loaded.extra.get("sum", 0.0)}

        def save(step: int) -> None:
            extra: Any = {"none": None, "mapping": dict(totals), "function": lambda: totals}[args.extra]
            checkpoints.save(model, optimizer, step=step, loader=loader, extra=extra)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            time.sleep(args.step_delay)
            loader.taken += 1
            inputs = torch.randn(4, WIDTH) + 0.01 * loader.taken + random.random()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs[:, :1])
            loss.backward()  # type: ignore[no-untyped-call]
            if args.shards:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            totals["seen"] += len(inputs)
            totals["sum"] += loss.item()
            if diary is not None:
                print(time.time(), os.getpid(), step + 1, file=diary)

        values = [whole(value) for value in plain.state_dict().values()]
        if session.is_lead:
            digest = hashlib.sha256()
            for value in values:
                digest.update(value.numpy().tobytes())
            if args.extra != "none":
                digest.update(repr(totals).encode())
            print(f"final weights sha256: {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.1)
    parser.add_argument("--buffers", action="store_true")
    parser.add_argument("--extra", choices=["none", "mapping", "function"], default="none")
    parser.add_argument("--table", type=int, default=0, metavar="MIB", help="a buffer of this size")
    parser.add_argument("--diary", type=Path)
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--across", action="store_true")
    train(parser.parse_args())
