"""A small training whose save takes long, or fails, while a certain file exists; every rank trains the same replica.

python slow_save.py --steps N --step-delay S --save-delay S [--save-exit CODE] --slow-while FILE
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from slurmft import CheckpointManager, start_session
from slurmft.worker.digests import weights_digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-delay", type=float, default=0.0)
    parser.add_argument("--save-delay", type=float, default=0.0)
    parser.add_argument("--save-exit", type=int)
    parser.add_argument("--slow-while", type=Path, required=True)
    args = parser.parse_args()

    with start_session(seed=7) as session:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)

        def save(step: int) -> None:
            if args.slow_while.exists():
                time.sleep(args.save_delay)
                if args.save_exit is not None:
                    sys.exit(args.save_exit)
            checkpoints.save(model, optimizer, step=step)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            loss = model(torch.rand(4, 8) + step).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.step_delay)
        if session.is_lead:
            print(f"final weights sha256: {weights_digest(model)}", flush=True)


if __name__ == "__main__":
    main()
