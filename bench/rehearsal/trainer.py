"""A model that is compiled: prints the seconds from the start of its process to the end of its first step."""

from __future__ import annotations

import sys
import time

import psutil
import torch

from slurmft.worker.session import start_session

CHANNELS, LAYERS, BATCH = 128, 6, 16


def main() -> None:
    began = psutil.Process().create_time()
    with start_session(seed=1) as session:
        layers = [torch.nn.TransformerEncoderLayer(CHANNELS, 4, batch_first=True, dropout=0.0) for _ in range(LAYERS)]
        model = torch.compile(torch.nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in session.steps(start=0, until=4, save=lambda _: True):
            model(torch.randn(BATCH, 32, CHANNELS)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0 and not session.is_rehearsal:
                sys.stdout.write(f"first step after {time.time() - began:.3f}\n")


if __name__ == "__main__":
    main()
