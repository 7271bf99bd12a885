"""A tiny DDP training in which one rank hangs, once: in the attempt that leaves the file hung.N beside the checkpoints.

python hangs.py --steps N [--hang nested|start|setup|step|thread] [--rank R] [--at STEP] [--seconds S]
"""

import argparse
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

from slurmft import CheckpointManager, start_session
from slurmft.worker.digests import weights_digest

WIDTH = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hang", default="", choices=["", "nested", "start", "setup", "step", "thread"])
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.02, help="what a step takes")
    return parser.parse_args()


def once(args: argparse.Namespace, where: str, step: int | None = None) -> bool:
    """Whether this rank is to hang here, which it does once in a run."""
    if (args.hang, args.rank) != (where, int(os.environ["RANK"])) or step not in (None, args.at):
        return False
    try:
        Path(os.environ["SLURMFT_RUN_FOLDER"], "hung").touch(exist_ok=False)
    except FileExistsError:
        return False
    print(f"hangs in {where}", flush=True)
    return True


def hang() -> None:
    time.sleep(3600)


def main() -> None:
    args = parse()
    print(f"process {os.getpid()}", flush=True)
    if once(args, "start"):
        hang()
    with start_session(seed=7) as session:
        if once(args, "setup"):
            hang()
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        model = session.distributed(network, lambda model: model(torch.zeros(4, WIDTH)).square().mean())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(network, optimizer)

        def save(step: int) -> None:
            checkpoints.save(network, optimizer, step=step)

        def in_thread() -> None:
            with session.section("upload"):
                hang()

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            with session.section("forward"):
                rows = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step))
                with session.section("load"):
                    time.sleep(args.seconds)
                    if once(args, "nested", step):
                        hang()
                loss = (model(rows) - rows.mean(dim=1, keepdim=True)).square().mean()
            if once(args, "step", step):
                hang()
            if once(args, "thread", step):
                threading.Thread(target=in_thread, daemon=True).start()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.report(loss=loss.item())
        if session.is_lead:
            print(f"final weights sha256: {weights_digest(network)}", flush=True)


if __name__ == "__main__":
    main()
