"""A tiny DDP training whose own work takes as long as it is told to, on this rank and node.

python straggler.py --steps N --work S [--slow-rank R | --slow-node NODE | --slow-stage] [--factor F] [--busy]

``--slow-stage``: every second rank of each node is a stage that takes F times as long, wherever it runs; with
``--roles`` it says so. The weights at the end depend on nothing of this.
"""

import argparse
import os
import time

import torch
from torch import nn

from slurmft import CheckpointManager, start_session
from slurmft.worker.digests import weights_digest

WIDTH = 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--work", type=float, default=0.02, help="seconds of a step's own work")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-node", default="")
    parser.add_argument("--slow-stage", action="store_true")
    parser.add_argument("--roles", action="store_true")
    parser.add_argument("--busy", action="store_true", help="compute for so long on a free CPU, instead of sleeping")
    return parser.parse_args()


def work(seconds: float, *, busy: bool) -> None:
    if not busy:
        time.sleep(seconds)
        return
    began = time.thread_time()  # CPU time: a CPU limit makes it longer, as it does with real work
    while time.thread_time() - began < seconds:
        pass


def main() -> None:
    args = parse()
    with start_session(seed=7) as session:
        is_second = session.local_rank % 2 == 1
        is_slow = (
            session.rank == args.slow_rank
            or os.environ.get("SLURMD_NODENAME") == args.slow_node
            or (args.slow_stage and is_second)
        )
        if args.roles:
            session.stragglers.set_role("second stage" if is_second else "first stage")
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        model = session.distributed(network, lambda model: model(torch.zeros(4, WIDTH)).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(network, optimizer)

        def save(step: int) -> None:
            checkpoints.save(network, optimizer, step=step)

        for step in session.steps(start=loaded.step, until=args.steps, save=save):
            with session.stragglers.section("data"):
                work(args.work * (args.factor if is_slow else 1.0), busy=args.busy)
            rows = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows.mean(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.report(loss=loss.item())
        if session.is_lead:
            print(f"final weights sha256: {weights_digest(network)}", flush=True)


if __name__ == "__main__":
    main()
