"""A trainer that writes down, beside its run, when each step was done: what a report says is compared with that."""

import argparse
import os
import sys
import time

import torch

from slurmft import CheckpointManager, start_session

parser = argparse.ArgumentParser()
parser.add_argument("clock")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=25)
args = parser.parse_args()
with start_session(seed=1) as session:
    plain = torch.nn.Linear(4, 4)
    model = session.distributed(plain, lambda ddp: ddp(torch.ones(1, 4)).sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = CheckpointManager(session.checkpoint_dir)
    loaded = checkpoints.load_latest(model, optimizer)

    def save(step: int) -> None:
        checkpoints.save(model, optimizer, step=step)

    for step in session.steps(start=loaded.step, until=args.steps, save=save):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.1)
        session.report(loss=1.0 / (step + 1), attempt=float(os.environ["SLURMFT_ATTEMPT"].rsplit(".", 1)[1]))
        if session.is_lead:
            with open(args.clock, "a", encoding="utf-8") as stream:
                stream.write(f"{step} {time.time():.3f}\n")
sys.exit(0)
