"""The trainer of ``slurmft drill``: counts steps, saves, resumes, and marks each SIGTERM that reaches it."""

from __future__ import annotations

import argparse
import signal
import time
import types
from pathlib import Path

import torch
from torch import nn

from slurmft.checkpoint import CheckpointManager
from slurmft.worker.session import start_session

STEPS = 1_000_000


def mark_signals(path: Path) -> None:
    """Leave ``path`` behind when SIGTERM comes; the earlier handler is called as well."""
    before = signal.getsignal(signal.SIGTERM)

    def on_term(number: int, frame: types.FrameType | None) -> None:
        path.touch()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, on_term)


def main() -> None:
    """Train until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.1)
    given = parser.parse_args()
    with start_session(seed=1) as session:
        mark_signals(given.marks / f"term.rank-{session.rank}")
        model = nn.Linear(8, 8).to(session.device)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step)

        for _ in session.steps(start=loaded.step, until=STEPS, save=save):
            optimizer.zero_grad()
            model(torch.ones(1, 8, device=session.device)).sum().backward()
            optimizer.step()
            time.sleep(given.step_s)


if __name__ == "__main__":
    main()
