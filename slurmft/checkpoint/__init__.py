"""Checkpoints: written once, committed last, verified before they are trusted.

The catalog can be read without torch (a status command on a login node); the manager needs torch. Names are loaded on
first use for that reason.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmft.checkpoint.catalog import Catalog as Catalog
    from slurmft.checkpoint.catalog import Entry as Entry
    from slurmft.checkpoint.loading import LoadedCheckpoint as LoadedCheckpoint
    from slurmft.checkpoint.manager import CheckpointManager as CheckpointManager
    from slurmft.checkpoint.manager import DistributedCheckpointManager as DistributedCheckpointManager

_HOMES = {
    "CheckpointManager": "slurmft.checkpoint.manager",
    "DistributedCheckpointManager": "slurmft.checkpoint.manager",
    "LoadedCheckpoint": "slurmft.checkpoint.loading",
    "Catalog": "slurmft.checkpoint.catalog",
    "Entry": "slurmft.checkpoint.catalog",
}

__all__ = ["CheckpointManager", "DistributedCheckpointManager", "LoadedCheckpoint", "Catalog", "Entry"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slurmft.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
