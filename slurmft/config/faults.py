"""Faults that a run injects into itself: part of the section ``fault_tolerance:``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slurmft.config.types import Count, Seconds, Section


class SimulatedFaults(Section):
    """One fault, once in the run's life, to see what follows. Not for runs that matter."""

    simulate_fault: bool = False
    """For tests: inject one fault, once in the run's life."""

    simulated_fault_type: Literal["rank_killed", "rank_hung", "random"] = "random"
    """For tests: SIGKILL, SIGSTOP, or one of them by chance."""

    simulated_fault_rank: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the rank to hit; by chance when empty."""

    simulated_fault_base_delay: Seconds = Field(default=0.0, ge=0)
    """For tests: seconds from the start of the workers; up to a tenth more, by chance."""
