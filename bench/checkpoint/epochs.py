"""A small training of some epochs that tells when it did what: ``epochs.py FOLDER``; under slurmft.

Every rank appends lines ``time pid what`` to ``FOLDER/marks-RANK``: ``loaded STEP``, ``step STEP``,
``saved STEP SECONDS`` and ``finished``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from slurmft import CheckpointManager, start_session

EPOCHS, STEPS_PER_EPOCH = 24, 10
STEP_S = 0.02
WIDTH, LAYERS = 256, 6


def main(folder: Path) -> None:
    with start_session(seed=1) as session, (folder / f"marks-{session.rank}").open("a", buffering=1) as diary:

        def mark(*what: object) -> None:
            diary.write(f"{time.time():.6f} {os.getpid()} {' '.join(map(str, what))}\n")

        torch.manual_seed(1)
        plain = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
        model = session.distributed(plain, lambda ddp: ddp(torch.ones(8, WIDTH)).sum())
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)
        mark("loaded", loaded.step)

        def save(step: int) -> None:
            began = time.monotonic()
            checkpoints.save(model, optimizer, step=step)
            mark("saved", step, f"{time.monotonic() - began:.6f}")

        for step in session.steps(start=loaded.step, until=EPOCHS * STEPS_PER_EPOCH, save=save):
            optimizer.zero_grad()
            model(torch.ones(8, WIDTH)).sum().backward()
            optimizer.step()
            time.sleep(STEP_S)
            mark("step", step + 1)
        mark("finished")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
