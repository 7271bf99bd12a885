"""A trainer that publishes weights after each step, and takes no answers of weights that are more than two steps older.

    python publishes.py STEPS FOLDER

Weights are a text that names the life of the trainer and the step.
"""

import os
import sys
from pathlib import Path

import torch

from slurmft import CheckpointManager, Queue, publish_weights, start_session

with start_session(seed=7) as session:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    queue = Queue("answers")
    checkpoints = CheckpointManager(session.checkpoint_dir)
    loaded = checkpoints.load_latest(model, optimizer, loader=queue)

    def publish(step: int) -> None:
        path = folder / f"{os.environ['SLURMFT_ATTEMPT']}-{step}"
        path.write_text(path.name)
        publish_weights(path, version=step, to="rollout")

    publish(loaded.step)
    for step in session.steps(
        start=loaded.step, until=steps, save=lambda step: checkpoints.save(model, optimizer, loader=queue, step=step)
    ):
        queue.take(2, oldest_version=step - 2)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
        publish(step + 1)
    queue.end()
