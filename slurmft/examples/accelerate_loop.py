"""A loop of Accelerate: `session.steps` around `accelerator.save_state`.

    python -m slurmft.examples.accelerate_loop --steps 60

What is slurmft's: the session, ``load_latest`` and ``save_state``. The rest is as in any script of Accelerate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slurmft.integrations.accelerate import load_latest, save_state
from slurmft.worker.digests import weights_digest
from slurmft.worker.session import start_session

SAMPLES, BATCH = 96, 4


def train(args: argparse.Namespace) -> None:
    with start_session(seed=args.seed) as session:
        accelerator = Accelerator(
            cpu=session.device.type == "cpu",
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            step_scheduler_with_optimizer=False,
        )
        set_seed(args.seed)
        x = torch.randn(SAMPLES, 16)
        data = DataLoader(TensorDataset(x, x.cumsum(dim=1).sin()), batch_size=BATCH, shuffle=True)
        model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        # DDP orders its buckets anew after its first backward pass, and a sum over ranks depends on their order: that
        # happens before a state is loaded, so that a resumed run adds up as an undisturbed one
        accelerator.backward(model(x[:BATCH].to(accelerator.device)).sum())
        optimizer.zero_grad()
        set_seed(args.seed, device_specific=True)  # every rank drops out other neurons

        start = load_latest(accelerator, session.checkpoint_dir)
        batches = batches_from(data, start)
        drawn = torch.get_rng_state()
        first = next(batches)
        if start % len(data):  # an undisturbed run has made the iterator of this epoch, which draws a seed, before
            torch.set_rng_state(drawn)

        def save(step: int) -> None:
            save_state(accelerator, session.checkpoint_dir, step)

        for step in session.steps(start=start, until=args.steps, save=save):
            inputs, targets = first if step == start else next(batches)
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.report(loss=loss.item())
            time.sleep(args.step_delay)

        if session.is_lead:
            print(f"final weights sha256: {weights_digest(accelerator.unwrap_model(model))}")
            print(f"finished step {max(start, args.steps)}, started at {start}", flush=True)


def batches_from(data: Any, step: int) -> Iterator[Any]:
    """The batches from ``step`` on, epoch after epoch, each in an order of its own."""
    epoch, done = divmod(step, len(data))
    while True:
        rest = skip_first_batches(data, done) if done else data
        data.set_epoch(epoch)
        rest.set_epoch(epoch)
        rest.iteration = epoch  # by which Accelerate sets the epoch once more, when the iteration begins
        yield from rest
        epoch, done = epoch + 1, 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accelerate_loop", description="A loop of Accelerate that resumes by itself.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in a step, for demonstrations")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
