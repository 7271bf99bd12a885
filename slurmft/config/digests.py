"""The section ``digests`` of the configuration."""

from __future__ import annotations

from pydantic import Field

from slurmft.config.types import Count, Section


class DigestsConfig(Section):
    """Whether replicas in data-parallel training are still bitwise equal; where not, data was corrupted silently."""

    interval_steps: Count = Field(default=0, ge=0)
    """Compare digests of parameters and optimizer state every so many steps, and before every save; 0: never."""
