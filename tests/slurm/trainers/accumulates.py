"""One optimizer step for four steps of the session; rank 1 dies by itself at a step, in the first attempt only."""

import hashlib
import os
import signal
import sys

import torch

from slurmft import CheckpointManager, start_session

with start_session(seed=7) as session:
    die_at = int(sys.argv[1])
    torch.manual_seed(7)
    plain = torch.nn.Linear(8, 1)
    model = session.distributed(plain, lambda ddp: ddp(torch.ones(4, 8)).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + session.rank)
    checkpoints = CheckpointManager(session.checkpoint_dir)
    loaded = checkpoints.load_latest(model, optimizer)
    print("starts at", loaded.step, flush=True)
    for step in session.steps(
        start=loaded.step, until=48, save=lambda step: checkpoints.save(model, optimizer, step=step)
    ):
        if step == die_at and session.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8)).square().mean().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    weights = b"".join(one.detach().numpy().tobytes() for one in plain.parameters())
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
