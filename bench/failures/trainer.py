"""A small training whose lead rank writes down when each step was done, and whose batch may stop to fit into memory."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch

from slurmft import CheckpointManager, start_session

parser = argparse.ArgumentParser()
parser.add_argument("clock", help="file of lines `step time`")
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--step-s", type=float, default=0.1)
parser.add_argument("--state-mib", type=int, default=1)
parser.add_argument("--tight-from", type=int, default=-1, help="from this step on, only --fits samples fit at once")
parser.add_argument("--fits", type=int, default=4)
args = parser.parse_args()

GLOBAL_BATCH, MICRO_BATCH = 240, 8


def note(path: str, line: str) -> None:
    with Path(path).open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")


with start_session(seed=1) as session:
    plain = torch.nn.Linear(8, 8)
    plain.ballast = torch.nn.Parameter(torch.rand(args.state_mib << 18), requires_grad=False)
    model = session.distributed(plain, lambda ddp: ddp(torch.ones(1, 8)).sum())
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
    checkpoints = CheckpointManager(session.checkpoint_dir)
    loaded = checkpoints.load_latest(model, optimizer)
    split = session.split_batch(GLOBAL_BATCH, MICRO_BATCH)

    def save(step: int) -> None:
        checkpoints.save(model, optimizer, step=step)

    for step in session.steps(start=loaded.step, until=args.steps, save=save):
        sizes = split.micro_batches(session.rank)
        optimizer.zero_grad()
        time.sleep(args.step_s)  # it stands for the computation: no rank has finished the step meanwhile
        for number, size in enumerate(sizes, start=1):
            if 0 <= args.tight_from <= step and size > args.fits:
                if session.is_lead:
                    note(args.clock + ".fault", f"{time.time():.3f}")
                raise MemoryError(f"{size} samples at once in step {step}")
            with model.no_sync() if number < len(sizes) and session.world_size > 1 else contextlib.nullcontext():
                (model(torch.ones(size, 8)).square().mean() * split.loss_scale(size)).backward()
        optimizer.step()
        session.report(loss=1.0 / (step + 1))
        if session.is_lead:
            note(args.clock, f"{step} {time.time():.3f}")
