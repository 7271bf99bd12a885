"""A small training over a data set whose batch may not fit, and which may die wherever it begins.

python frail.py --steps N --global-batch B --micro-batch M [--fits F] [--dies-from STEP] [--fails-at STEP]

It prints the samples of each step, so that a test can see that each was taken once.
"""

import argparse
import contextlib
import os
import time

import torch
from torch.utils.data import DataLoader

from slurmft import CheckpointManager, ElasticLoader, ElasticSampler, start_session
from slurmft.worker.digests import weights_digest

SAMPLES = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--fits", type=int, default=1000, help="samples at once for which there is memory")
    parser.add_argument("--dies-from", type=int, default=-1, help="a start from a checkpoint of this step fails")
    parser.add_argument("--fails-at", type=int, default=-1, help="the first start fails at this step")
    parser.add_argument("--step-delay", type=float, default=0.0)
    args = parser.parse_args()

    with start_session(seed=7) as session:
        data = torch.rand(SAMPLES, 8)
        plain = torch.nn.Linear(8, 8)
        model = session.distributed(plain, lambda ddp: ddp(data[:1]).square().mean())
        optimizer = torch.optim.AdamW(model.parameters())
        sampler = ElasticSampler(SAMPLES, args.global_batch, seed=7)
        numbers = torch.arange(SAMPLES)
        loader = ElasticLoader(DataLoader(numbers, batch_sampler=sampler, generator=torch.Generator()), sampler)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer, loader=loader)
        if loaded.found and loaded.step == args.dies_from and session.rank == 0:
            raise ValueError(f"nothing but NaN in the checkpoint of step {loaded.step}")
        split = session.split_batch(args.global_batch, args.micro_batch)

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step, loader=loader)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            if step == args.fails_at and not loaded.found:
                raise RuntimeError(f"step {step} of the first start")
            batch = next(loader)
            print(f"step {step} takes {batch.tolist()}", flush=True)
            parts = batch.split(list(split.micro_batches(session.rank)))
            optimizer.zero_grad()
            for number, part in enumerate(parts, start=1):
                if len(part) > args.fits:
                    raise MemoryError(f"{len(part)} samples at once")
                with model.no_sync() if number < len(parts) and session.world_size > 1 else contextlib.nullcontext():
                    (model(data[part]).square().mean() * split.loss_scale(len(part))).backward()
            optimizer.step()
            time.sleep(args.step_delay)
        if session.is_lead:
            print(f"final weights sha256: {weights_digest(plain)} on {os.environ.get('SLURMD_NODENAME')}", flush=True)


if __name__ == "__main__":
    main()
