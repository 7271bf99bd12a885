"""``accelerator.save_state`` in folders that are finished on every rank, for loops of Accelerate:

accelerator = Accelerator()
with start_session(seed=1) as session:
    start = load_latest(accelerator, session.checkpoint_dir)
    for step in session.steps(start=start, until=steps,
                              save=lambda step: save_state(accelerator, session.checkpoint_dir, step)):
        ...
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from slurmft.errors import CheckpointError
from slurmft.integrations import folders
from slurmft.integrations.folders import common_steps, wait_for_all

log = logging.getLogger(__name__)


def load_latest(accelerator: Any, directory: Path | str) -> int:
    """Load the newest state in ``directory`` that is finished on every rank; returns its step, 0 where there is none.

    Call it on every rank after ``accelerator.prepare``. Folders of later steps are not believed any more.

    Raises:
        CheckpointError: it cannot be loaded.
        OSError: the folder cannot be read.
    """
    directory = Path(directory)
    steps = common_steps(directory)
    step = steps[-1] if steps else 0
    if accelerator.is_main_process:
        folders.begin(directory, step)
    if step:
        folder = directory / f"checkpoint-{step}"
        try:
            accelerator.load_state(str(folder))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"cannot load {folder}: {error}", hint="does the model fit to it?") from error
    return step


def save_state(accelerator: Any, directory: Path | str, step: int, *, keep: int = 2) -> None:
    """Save the state after ``step`` steps in ``directory/checkpoint-STEP``, and mark it when every rank has finished.

    Call it on every rank. The ``keep`` newest finished folders stay.

    Raises:
        OSError: it cannot be written; older ones are untouched.
        Fenced: a newer attempt owns the run.
    """
    folder, began_s = Path(directory) / f"checkpoint-{step}", time.monotonic()
    if accelerator.is_main_process:
        folders.about_to_save(folder.parent)
        folders.withdraw(folder)
    accelerator.save_state(str(folder))
    wait_for_all()  # a rank writes files of its own, which are synced too
    if accelerator.is_local_main_process:
        folders.make_durable(folder)
    wait_for_all()
    if accelerator.is_main_process:
        folders.mark(folder, step, accelerator.num_processes)
        folders.prune(folder.parent, limit=max(1, keep), newest=step, best=None)
        log.info("saved step %d in %.2f s: %s", step, time.monotonic() - began_s, folder)
    wait_for_all()
