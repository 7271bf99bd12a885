"""The section ``elastic`` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slurmft.config.types import Count, Section
from slurmft.policy.nodes.membership import Size

MAX_NODES = 65_536


class ElasticConfig(Section):
    """How small and how large the run may become while it trains; a run of one size when neither is given."""

    min_nodes: Count | None = Field(default=None, ge=1, le=MAX_NODES)
    """Fewest nodes to go on with when some are lost and no spare is left; below that the run goes back into the queue.
    As many as ``nodes`` when empty."""

    max_nodes: Count | None = Field(default=None, ge=1, le=MAX_NODES)
    """Most nodes, with those that ``slurmft join`` lends. As many as ``nodes`` when empty."""

    start_with_fewer: bool = False
    """Let Slurm start the job as soon as ``min_nodes`` are free. A job cannot grow: missing nodes only come with a
    restart, or are lent."""

    batch: Literal["keep_global_batch", "keep_micro_batch"] = "keep_global_batch"
    """keep_global_batch: the samples of one optimizer step stay the same on any number of ranks, and so should the
    learning rate. keep_micro_batch: each rank's share stays the same; the learning rate is the trainer's business."""

    def size(self, nodes: int) -> Size:
        """The sizes of a run that aims at ``nodes``.

        Raises:
            ValueError: the bounds do not hold ``nodes``; names the key.
        """
        minimum = nodes if self.min_nodes is None else self.min_nodes
        maximum = nodes if self.max_nodes is None else self.max_nodes
        if minimum > nodes:
            raise ValueError(f"elastic.min_nodes={minimum} is more than nodes={nodes}")
        if maximum < nodes:
            raise ValueError(f"elastic.max_nodes={maximum} is less than nodes={nodes}")
        if self.start_with_fewer and minimum == nodes:
            raise ValueError(f"elastic.start_with_fewer needs elastic.min_nodes below nodes={nodes}")
        return Size(nodes=nodes, minimum=minimum, maximum=maximum)
