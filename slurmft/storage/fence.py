"""Fencing: an attempt that is no longer the newest one of its run must not change the run's state.

``owner.json`` in the run folder holds a generation that grows by one with every attempt. A worker knows its own from
its environment; a node that was cut off and reconnects finds a newer one and is refused (design, ordering rule 9).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slurmft.errors import Fenced, StorageError
from slurmft.system.files import read_json

OWNER_FILE = "owner.json"
RUN_FOLDER_VARIABLE = "SLURMFT_RUN_FOLDER"
GENERATION_VARIABLE = "SLURMFT_GENERATION"


def check_fence(environment: Mapping[str, str] | None = None) -> None:
    """Return when this process belongs to the run's newest attempt, or to no run at all.

    Raises:
        Fenced: a newer attempt owns the run, or the run folder was replaced by an older copy.
        StorageError: its owner cannot be read or believed.
    """
    environment = os.environ if environment is None else environment
    run_folder = environment.get(RUN_FOLDER_VARIABLE)
    if not run_folder:
        return
    owner = read_json(Path(run_folder) / OWNER_FILE)
    if owner is None:
        return
    mine = int(environment.get(GENERATION_VARIABLE, "0"))
    if type(newest := owner.get("generation", 0)) is not int:
        raise StorageError(f"{Path(run_folder) / OWNER_FILE} is damaged: its generation is not a number")
    if newest > mine:
        raise Fenced(
            f"generation {mine} of {run_folder} was replaced by generation {newest} (job {owner.get('job', '?')})",
            hint="this attempt is stale; the newer one goes on",
        )
    if newest < mine:
        raise Fenced(
            f"{run_folder} is an older copy of itself: it knows generation {newest}, this attempt is generation {mine}",
            hint="it was restored or replaced while the run was going on; submit the run again to train on from there",
        )
