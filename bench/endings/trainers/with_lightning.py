"""The workload in Lightning with its own requeue: ``srun python with_lightning.py FOLDER NODES RANKS``.

By its documentation: on SIGUSR1 every rank saves inside the signal's handler and rank 0 requeues; the next start finds
that checkpoint by itself.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
import workload
from lightning.pytorch.plugins.environments import SLURMEnvironment


class Module(lightning.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.started = folder, False
        self.model = workload.new_model()

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss = workload.loss_of(self.model, int(batch[0]), self.global_rank)
        time.sleep(workload.STEP_S)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.started and self.global_rank == 0:
            workload.note_start(self.folder, self.global_step)
        self.started = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return workload.new_optimizer(self.model)


def main(folder: Path, nodes: int, ranks: int) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", num_nodes=nodes, devices=ranks, strategy="ddp", max_steps=10**9,
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)],
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(torch.arange(10**6), batch_size=1)
    trainer.fit(Module(folder), batches)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
