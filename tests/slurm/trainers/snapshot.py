"""A trainer as the tutorials of torchrun have it. It knows nothing of the tool that starts it again.

It keeps one snapshot, overwrites it in place, and goes on from it where it finds one. At one epoch of its first life a
rank meets an error of the network; every error goes to a log of its rank, and the exit code asks to be scheduled again.
"""

import argparse
import datetime
import hashlib
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

RESCHEDULE = 11


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.local_rank, self.rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        torch.manual_seed(7)
        self.model = torch.nn.Linear(20, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.epochs_run = 0
        if os.path.exists(args.snapshot_path):
            self._load_snapshot()
        self.began_at = self.epochs_run
        self.model = DDP(self.model)

    def _load_snapshot(self) -> None:
        snapshot = torch.load(self.args.snapshot_path, weights_only=True)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming training from snapshot at Epoch {self.epochs_run} on {os.uname().nodename}", flush=True)

    def _save_snapshot(self, epoch: int) -> None:
        snapshot = {
            "MODEL_STATE": self.model.module.state_dict(),
            "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "EPOCHS_RUN": epoch,
        }
        os.makedirs(os.path.dirname(self.args.snapshot_path), exist_ok=True)
        torch.save(snapshot, self.args.snapshot_path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.args.snapshot_path}", flush=True)

    def _run_epoch(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(1000 * epoch + self.rank)
        x = torch.randn(8, 20, generator=generator)
        if epoch == self.args.fail_at and self.began_at == 0 and self.rank == 1:
            while not os.path.exists(self.args.go):
                time.sleep(0.05)
            raise RuntimeError("NCCL communicator was aborted on rank 1. Original reason for failure was: timeout")
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), x[:, :4].sin()).backward()
        self.optimizer.step()

    def train(self) -> None:
        for epoch in range(self.epochs_run, self.args.total_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.args.save_every == 0:
                self._save_snapshot(epoch + 1)
        if self.rank == 0:
            state = self.model.module.state_dict()
            digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
            print(f"final weights sha256: {digest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=2)
    parser.add_argument("--snapshot_path", default="/tmp/models/snapshot.pth")
    parser.add_argument("--error_log", default="training_errors.log")
    parser.add_argument("--fail_at", type=int, default=-1)
    parser.add_argument("--go", default="/nowhere")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    try:
        Trainer(args).train()
    except RuntimeError as error:
        with open(f"{args.error_log}.rank_{os.environ['RANK']}", "a") as log:
            log.write(f"{error}\n{traceback.format_exc()}")
        if "NCCL" in str(error):
            sys.stdout.flush()
            os._exit(RESCHEDULE)
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
