"""Runs the code of a save and a load once, in a process that waits to become a worker."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path

import torch

from slurmft.checkpoint.image_file import read_index
from slurmft.checkpoint.loading import prepare
from slurmft.checkpoint.reading import Source, Stored
from slurmft.checkpoint.snapshots import Snapshots
from slurmft.checkpoint.state import Trainee, capture
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.trainer import savers

log = logging.getLogger(__name__)


def warm_up(folder: Path) -> None:
    """Keep a tiny state below ``folder`` and load it; random number generators are as before.

    A fork shares its parent's pages until it touches them, and the interpreter is slow where it comes for the first
    time: both together are half of what the load of a small state takes. An error here concerns no worker.
    """
    before = savers.capture()
    try:
        with tempfile.TemporaryDirectory(prefix="warm-up-", dir=folder) as name:
            _save_and_load(Path(name))
    except Exception as error:  # noqa: BLE001 - what is wrong for the worker, too, it will report itself
        log.debug("no warm-up: %s", error)
    finally:
        savers.restore(before)


def _save_and_load(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    trainee, identity = Trainee(model, optimizer), Identity(1, 0, 1)
    settings = WorkerSettings().checkpoint
    snapshots = Snapshots(settings, memory=folder, spill=folder, on_committed=_nothing, on_failed=_nothing)
    with contextlib.closing(snapshots):
        snapshots.keep(capture(trainee, None, rank=0), identity, _nothing)
        [path] = folder.glob("*.json")
        if (index := read_index(path)) is None:
            return
        with contextlib.closing(Stored({0: Source(image=path.with_suffix(".image"), index=index)}, own=0)) as stored:
            prepare(trainee, stored, rank=0, world_size=1).apply()


def _nothing(*_: object) -> None:
    pass
