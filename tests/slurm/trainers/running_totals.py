"""A trainer with what only rank 0 has: buffers of BatchNorm, and totals in ``extra`` that grow with every step.

Its last line is a digest of weights, buffers and totals. With ``--extra mapping`` the totals are given to ``save`` as
they are then, with ``function`` as a function.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from typing import Any

import torch
from torch import nn

from slurmft import CheckpointManager, start_session

WIDTH = 16


class Position:
    """Of a loader: counts the batches of this rank."""

    taken = 0

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.taken = state_dict["taken"]


def train(args: argparse.Namespace) -> None:
    with start_session(seed=1) as session:
        torch.manual_seed(1)
        norm = [nn.BatchNorm1d(WIDTH)] if args.buffers else []
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *norm, nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        model = session.distributed(plain, lambda ddp: ddp(torch.randn(4, WIDTH)).sum())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + session.rank)
        random.seed(session.rank)

        checkpoints, loader = CheckpointManager(session.checkpoint_dir), Position()
        loaded = checkpoints.load_latest(model, optimizer, loader=loader)
        totals = {"seen": loaded.extra.get("seen", 0), "sum": loaded.extra.get("sum", 0.0)}

        def save(step: int) -> None:
            extra: Any = {"none": None, "mapping": dict(totals), "function": lambda: totals}[args.extra]
            checkpoints.save(model, optimizer, step=step, loader=loader, extra=extra)

        for _ in session.steps(start=loaded.step, until=args.steps, save=save):
            time.sleep(args.step_delay)
            loader.taken += 1
            inputs = torch.randn(4, WIDTH) + 0.01 * loader.taken + random.random()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs[:, :1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            totals["seen"] += len(inputs)
            totals["sum"] += loss.item()

        if session.is_lead:
            digest = hashlib.sha256()
            for value in plain.state_dict().values():
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
    train(parser.parse_args())
