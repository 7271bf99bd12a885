"""A trainer whose weights are spread over its ranks (FSDP2); each has its own random numbers and place in the data.

Its last line is a digest of the weights, of every rank's place, and of totals in ``extra`` that grow with every step.
"""

import argparse
import hashlib
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from running_totals import Position
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurmft import CheckpointManager, start_session


def train(args: argparse.Namespace) -> None:
    with start_session(seed=1) as session:
        torch.manual_seed(1)
        width = args.width
        model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, width))
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (session.world_size,))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1 + session.rank)
        random.seed(session.rank)

        totals = {"seen": 0, "sum": 0.0}
        given: Any = {"function": lambda: totals, "none": None}[args.extra]
        checkpoints, loader = CheckpointManager(session.checkpoint_dir, extra=given), Position()
        loaded = checkpoints.load_latest(model, optimizer, loader=loader)
        totals.update({name: loaded.extra[name] for name in totals if name in loaded.extra})

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step, loader=loader)

        for _ in session.steps(start=loaded.step, until=args.steps, save=save):
            time.sleep(args.step_delay)
            loader.taken += 1
            inputs = torch.randn(4, width) + 0.01 * loader.taken + random.random()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs.sin())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            totals["seen"] += len(inputs)
            totals["sum"] += loss.item()

        digest = hashlib.sha256()
        for value in model.state_dict().values():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(whole.numpy().tobytes())
        places = torch.zeros(session.world_size, dtype=torch.int64)
        places[session.rank] = loader.taken
        if dist.is_initialized():
            dist.all_reduce(places)
        if session.is_lead:
            digest.update(repr((places.tolist(), totals)).encode())
            print(f"final weights sha256: {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--extra", choices=["function", "none"], default="function")
    train(parser.parse_args())
