"""A loop in the manner of torchtitan: FSDP, a train state that counts steps and tokens, a loader with a state.

    python -m slurmft.examples.titan_loop --steps 60

``CheckpointManager`` stands where torchtitan has its own, and ``session.steps`` where it counts ``self.step`` up to
``job.training.steps``. Saves are asynchronous, and shards are loaded by other numbers of ranks.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurmft.checkpoint import CheckpointManager
from slurmft.worker.digests import weights_digest
from slurmft.worker.session import Session, start_session

WORDS, LENGTH = 64, 16


class Tokens:
    """An endless stream of this rank's own random tokens; its state is the number of batches."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch, self.batches = rank, batch, 0

    def __next__(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * self.batches + self.rank)
        self.batches += 1
        return torch.randint(WORDS, (self.batch, LENGTH), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.batches = state_dict["batches"]


class Trainer:
    """What a torchtitan trainer holds."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self.session, self.args = session, args
        self.tokens_seen = 0
        torch.manual_seed(args.seed)
        self.model: nn.Module = nn.Sequential(
            nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, WORDS)
        ).to(session.device)
        if dist.is_initialized():
            mesh = init_device_mesh(session.device.type, (session.world_size,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.loader = Tokens(session.rank, batch=4)
        self.checkpoints = CheckpointManager(session.checkpoint_dir)

    def train_step(self) -> float:
        tokens = next(self.loader).to(self.session.device)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.tokens_seen += tokens.numel() * self.session.world_size
        return loss.item()

    def save(self, step: int) -> None:
        self.checkpoints.save(
            self.model, self.optimizer, step=step, scheduler=self.scheduler, loader=self.loader,
            extra={"tokens_seen": self.tokens_seen},
        )  # fmt: skip

    def train(self) -> None:
        loaded = self.checkpoints.load_latest(self.model, self.optimizer, scheduler=self.scheduler, loader=self.loader)
        self.tokens_seen = loaded.extra.get("tokens_seen", 0)
        for _ in self.session.steps(start=loaded.step, until=self.args.steps, save=self.save):
            self.session.report(loss=self.train_step())
            time.sleep(self.args.step_delay)
        digest = weights_digest(self.whole_model())
        if self.session.is_lead:
            print(f"final weights sha256: {digest}")
            print(f"finished step {self.args.steps}, started at {loaded.step}: {self.tokens_seen} tokens", flush=True)

    def whole_model(self) -> nn.Module:
        """The model with all of its parameters on every rank, for its digest."""
        whole = nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, WORDS))
        state = self.model.state_dict().items()
        whole.load_state_dict({name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state})
        return whole


def main() -> None:
    parser = argparse.ArgumentParser(prog="titan_loop", description="A torchtitan-like loop that resumes by itself.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to wait in a step, for demonstrations")
    parser.add_argument("--seed", type=int, default=1)
    with start_session(seed=1) as session:
        Trainer(session, parser.parse_args()).train()


if __name__ == "__main__":
    main()
