"""The keys of ``fault_tolerance`` that are about checkpoints from which runs die."""

from __future__ import annotations

from pydantic import Field

from slurmft.config.types import Count, Section


class PoisonSettings(Section):
    """When a checkpoint is given up."""

    poison_after: Count = Field(default=3, ge=1)
    """Attempts that die from one checkpoint before their next save, until it is quarantined (they died on different
    nodes) or the node is suspected (on the same one). Planned stops and lost nodes are not counted."""

    poison_from_scratch: bool = False
    """Begin anew when no checkpoint is left but quarantined ones. false: the run ends with 93."""
