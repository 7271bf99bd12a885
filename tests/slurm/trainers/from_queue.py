"""A model that learns what a writer puts into a queue: each step the two items of that step, one for each rank."""

import os
import sys
import time

import torch

from slurmft import CheckpointManager, Queue, start_session
from slurmft.worker.digests import weights_digest

with start_session(seed=7) as session:
    steps = int(sys.argv[1])
    torch.manual_seed(7)
    plain = torch.nn.Linear(8, 1)
    model = session.distributed(plain, lambda ddp: ddp(torch.ones(1, 8)).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    queue = Queue("rollouts")
    checkpoints = CheckpointManager(session.checkpoint_dir)
    loaded = checkpoints.load_latest(model, optimizer, loader=queue)
    for step in session.steps(
        start=loaded.step, until=steps, save=lambda step: checkpoints.save(model, optimizer, loader=queue, step=step)
    ):
        items = queue.take(ids=[f"{step}-{rank}" for rank in range(session.world_size)])
        print("used", os.environ["SLURMFT_ATTEMPT"], step, items[session.rank].id, flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0")))  # the length of a step
        optimizer.zero_grad()
        model(torch.tensor([items[session.rank].value])).square().mean().backward()
        optimizer.step()
    print("final weights sha256:", weights_digest(plain), flush=True)
