"""The section ``nccl`` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slurmft.config.types import Count, Minutes, Section


class NcclConfig(Section):
    """Process groups, their timeouts, and the flight recorder. Holds for gloo as well."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl where the worker has a GPU, else gloo."""

    init_timeout_minutes: Minutes = Field(default=30.0, gt=0)
    """Collective timeout until the first step of the process is done (start-up, compilation, first load)."""

    step_timeout_minutes: Minutes = Field(default=10.0, gt=0)
    """Collective timeout afterwards."""

    flight_recorder_buffer_size: Count = Field(default=2000, ge=0)
    """Collectives that torch's flight recorder remembers; 0 switches it off."""
