"""The section ``oom`` of the configuration."""

from __future__ import annotations

from typing import Literal

from slurmft.config.types import Positive, Section


class OomConfig(Section):
    """Action after a worker has run out of memory, the device's or the host's."""

    action: Literal["none", "reduce_batch"] = "none"
    """reduce_batch: the next start halves the micro-batch and doubles the accumulation, with the same global batch. The
    trainer takes part: it asks session.micro_batch and session.accumulation. none: a failure like any other."""

    min_batch: Positive = 1
    """Samples below which no micro-batch goes; when that is not enough, the run ends with 93."""
