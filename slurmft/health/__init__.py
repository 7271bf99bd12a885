"""Probes of a node: their results, where these are kept, and what Slurm's hooks do with them.

No torch in this process, and no Slurm command in Prolog, Epilog or HealthCheckProgram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmft.health.checker import HealthChecker

__all__ = ["HealthChecker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurmft.health import checker

    return getattr(checker, name)
