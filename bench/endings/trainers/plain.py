"""The workload under plain ``srun``, saving every few steps: ``srun python plain.py FOLDER SAVE_EVERY``."""

from __future__ import annotations

import sys
from pathlib import Path

import workload
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path, save_every: int) -> None:
    rank = workload.join()
    plain = workload.new_model()
    optimizer = workload.new_optimizer(plain)
    first = workload.load(folder / "plain.pt", plain, optimizer)
    model = DistributedDataParallel(plain)
    for step in range(first, 10**9):
        workload.train_one(model, optimizer, step, rank)
        if rank == 0 and step == first:
            workload.note_start(folder, step)
        if rank == 0 and (step + 1) % save_every == 0:
            workload.save(folder / "plain.pt", step + 1, plain, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
