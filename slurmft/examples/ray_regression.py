"""A trainer of Ray Train: elastic, and with a save when its nodes are drained. It imports nothing of slurmft.

The global batch is the same on any number of workers, so that a resize does not show in the loss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 60
"""Rows of a step, over all workers: any number of them up to 6 divides it."""

COLUMNS = 8


def train(settings: dict[str, Any]) -> None:
    """One worker; resumes from the newest checkpoint that was reported under this run's name."""
    import ray.train
    import torch
    from ray.train import torch as ray_torch

    workers, rank = ray.train.get_context().get_world_size(), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    target = torch.randn(COLUMNS, 1)
    model = torch.nn.Linear(COLUMNS, 1)
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        first = int(state["step"])
    trained = ray_torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(first + 1, settings["steps"] + 1):
        rows = torch.randn(BATCH, COLUMNS, generator=torch.Generator().manual_seed(step))[rank::workers]
        loss = torch.nn.functional.mse_loss(trained(rows), rows @ target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(settings["step_delay"])

        draining = ray.train.get_preemption_info()
        if draining is not None or step % settings["save_every"] == 0 or step == settings["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                mine = None
                if rank == 0:
                    torch.save({"model": model.state_dict(), "step": step}, Path(folder) / "state.pt")
                    mine = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item(), "step": step}, checkpoint=mine)
        if rank == 0:
            _note(settings["log"], at=time.time(), step=step, workers=workers, loss=_error(model, target))
        if draining is not None and len(draining.preempted_ranks) == workers:
            return  # all nodes are going: the run is stopped, and goes on from here when it is started again


def _error(model: Any, target: Any) -> float:
    """How far the weights are from those that the data were made with: the same on any number of workers."""
    return float(((model.weight.detach().T - target) ** 2).mean())


def _note(path: str, **facts: Any) -> None:
    with Path(path).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--storage", type=Path, required=True, help="folder on the shared filesystem")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--step-delay", type=float, default=0.05, help="seconds")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 5), metavar=("MIN", "MAX"))
    options = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    options.storage.mkdir(parents=True, exist_ok=True)
    settings = {
        "steps": options.steps, "save_every": options.save_every, "step_delay": options.step_delay,
        "log": str(options.storage / "steps.jsonl"),
    }  # fmt: skip
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=(options.workers[0], options.workers[1])),
        run_config=RunConfig(
            name="regression", storage_path=str(options.storage), failure_config=FailureConfig(max_failures=3)
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
