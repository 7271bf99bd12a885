"""Probes of a node: what they find, where it is kept, and what Slurm's hooks do with it.

No torch in this process, and no Slurm command in Prolog, Epilog or HealthCheckProgram.
"""

from __future__ import annotations

from slurmft.health.checker import HealthChecker

__all__ = ["HealthChecker"]
