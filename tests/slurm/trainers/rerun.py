"""A tiny network whose steps are validated and run again when a result looks wrong; prints its final weights' digest.

python rerun.py --steps N [--step-delay S]

Errors are injected by the section ``rerun:``. For real, the whole way through the gradients: --nan-on NODE makes that
node's loss of step --at NaN, --spoil the weights. --opaque hides the batches from the checkpoint.
"""

import argparse
import os
import time

import torch
from torch import nn

from slurmft import CheckpointManager, start_session
from slurmft.worker.data import ByteCorpus, WindowLoader
from slurmft.worker.digests import weights_digest

CHANNELS = 16


def build() -> nn.Module:
    """With dropout and BatchNorm: random numbers and buffers that a rerun has to put back."""
    return nn.Sequential(
        nn.Linear(CHANNELS, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CHANNELS)
    )


class Opaque:
    """A batch that cannot be saved."""

    def __init__(self, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.parts = parts


class OpaqueLoader(WindowLoader):
    def __next__(self) -> Opaque:
        return Opaque(super().__next__())


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = (part.float() / 256 for part in batch)
    return (model(inputs) - targets).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-delay", type=float, default=0.0)
    parser.add_argument("--nan-on", default="")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--spoil", action="store_true")
    parser.add_argument("--opaque", action="store_true")
    args = parser.parse_args()

    with start_session(seed=3) as session:
        corpus = ByteCorpus(torch.arange(5000).mul(37).to(torch.uint8), "numbers")
        kind = OpaqueLoader if args.opaque else WindowLoader
        loader = kind(corpus, CHANNELS, 4, rank=session.rank, world_size=session.world_size)
        plain = build()
        batch = corpus.windows(torch.arange(4) * CHANNELS, CHANNELS)
        model = session.distributed(plain, lambda ddp: loss_of(ddp, batch))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(100 + session.rank)

        machine = session.rerun_machine(model, loader)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer, loader=machine)
        is_bad = os.environ.get("SLURMD_NODENAME", "none") == args.nan_on

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step, loader=machine)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            if args.spoil and step == args.at:
                with torch.no_grad():
                    plain[0].weight.mul_(torch.nan)
            while machine.should_run_forward_backward():
                batch = next(machine.data)
                loss = loss_of(model, batch.parts if args.opaque else batch)
                if is_bad and step == args.at:
                    loss = loss * torch.nan
                machine.validate_loss(loss)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            session.report(loss=loss.item())
            time.sleep(args.step_delay)
        if session.is_lead:
            print(f"final weights sha256: {weights_digest(plain)}", flush=True)


if __name__ == "__main__":
    main()
