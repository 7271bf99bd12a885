"""The workload in a session of slurmft: ``python with_slurmft.py FOLDER [SECONDS_PER_STEP]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import workload

from slurmft import CheckpointManager, start_session


def main(folder: Path, more_s: float) -> None:
    with start_session(seed=1) as session:
        plain = workload.new_model()
        model = session.distributed(plain, lambda ddp: workload.loss_of(ddp, 0, session.rank))
        optimizer = workload.new_optimizer(model)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step)

        for step in session.steps(start=loaded.step, until=10**9, save=save):
            workload.train_one(model, optimizer, step, session.rank)
            if session.is_lead and step == loaded.step:
                workload.note_start(folder, step)
            time.sleep(more_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
