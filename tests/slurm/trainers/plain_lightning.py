"""A Lightning script as people write them: it imports nothing of slurmft.

It shuffles, drops out, draws random numbers in its dataset, accumulates gradients and validates, so that a resumed
training has the weights of an undisturbed one only where all of that goes on exactly.
"""

import argparse
import hashlib
import importlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
PACKAGE = os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch")
L = importlib.import_module(PACKAGE)


class Noisy(Dataset):
    """Sample n is a function of n, and of a draw at each reading."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.rand(16), x.sum().sin().reshape(1)


class Net(L.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": args.lr, "log": args.log})
        self.args = args
        self.net = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if self.args.log:
            line = f"{self.global_rank} {self.current_epoch} {batch_idx} {self.global_step} {loss.item():.9f}\n"
            with open(self.args.log, "a") as log:
                log.write(line)
        time.sleep(0 if (self.args.root / "hurry").exists() else self.args.step_delay)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held_out", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--step-delay", type=float, default=0.0)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--log", default="")
    parser.add_argument("--slurm-plugin", action="store_true")
    args = parser.parse_args()
    L.seed_everything(7)
    loader: Any = DataLoader
    if args.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as loader
    train = loader(Noisy(args.samples), batch_size=args.batch, shuffle=True, num_workers=args.workers)
    held_out = DataLoader(Noisy(32), batch_size=4)
    model = Net(args)
    best = importlib.import_module(f"{PACKAGE}.callbacks").ModelCheckpoint(
        dirpath=args.root / "best", monitor="held_out", save_top_k=1, save_last=True
    )
    plugins: list[Any] = []
    if args.slurm_plugin:
        plugins.append(importlib.import_module(f"{PACKAGE}.plugins.environments").SLURMEnvironment(auto_requeue=True))
    many = args.nodes * args.devices > 1
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.nodes, strategy="ddp" if many else "auto",
        max_epochs=args.epochs, max_steps=args.max_steps, accumulate_grad_batches=args.accumulate, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=args.root, callbacks=[best],
        plugins=plugins or None, log_every_n_steps=5,
    )  # fmt: skip
    trainer.fit(model, train, held_out)
    if trainer.is_global_zero:
        digest = hashlib.sha256()
        for name, value in model.state_dict().items():
            digest.update(f"{name} {value.tolist()!r}\n".encode())
        print(f"final weights sha256: {digest.hexdigest()}", flush=True)
        print(f"callbacks: {sorted(type(one).__name__ for one in trainer.callbacks)}", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
