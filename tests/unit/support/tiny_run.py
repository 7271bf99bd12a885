"""A tiny training with everything that has state: dropout, a schedule, a loader, generators."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmft.checkpoint import Catalog
from slurmft.trainer.savers import SAVERS
from slurmft.worker.data import ByteCorpus, WindowLoader


class Run:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        corpus = ByteCorpus(torch.arange(2000, dtype=torch.int64).to(torch.uint8), "numbers")
        self.loader = WindowLoader(corpus, 8, 4, seed=5)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), self.last())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.step = 0

    @staticmethod
    def last() -> torch.nn.Module:
        return torch.nn.Linear(16, 1)

    @property
    def objects(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return self.model, self.optimizer

    @property
    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def forward(self) -> None:
        x, _ = next(self.loader)
        noise = random.random() + float(np.random.rand())
        loss = (self.model(x.float() / 256 + noise) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.forward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            SAVERS.at_boundary(self.step)

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.model.state_dict().values()]

    def tensors(self) -> list[torch.Tensor]:
        """The weights, and what the optimizer has of them."""
        state = self.optimizer.state_dict()["state"].values()
        return [*self.weights(), *(value.detach().clone() for one in state for value in one.values())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def steps(folder: Path) -> list[int]:
    """Of the committed checkpoints, newest first."""
    return [entry.step for entry in Catalog(folder).committed()]
