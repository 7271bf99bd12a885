"""slurmft keeps a PyTorch training run going on a Slurm cluster and proves that nothing was lost.

The names below are the public ones. They are loaded on first use, so that ``import slurmft`` stays cheap and never
imports torch: login nodes may not have it.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "start_session": "slurmft.training.session",
    "Session": "slurmft.training.session",
    "PlannedStop": "slurmft.training.session",
    "ignore_strangers_term": "slurmft.training.signals",
    "record": "slurmft.training.record",
    "CheckpointManager": "slurmft.checkpoint",
    "DistributedCheckpointManager": "slurmft.checkpoint",
    "ElasticSampler": "slurmft.training.sampler",
    "ElasticLoader": "slurmft.training.sampler",
    "HealthMonitor": "slurmft.training.health_monitor",
    "WatchdogTimer": "slurmft.training.watchdog",
    "DistributedSignalHandler": "slurmft.training.signal_handler",
    "categorize_failure": "slurmft.training.failures",
    "SlurmftError": "slurmft.errors",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slurmft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
