"""Which GPUs a replica sees."""

from __future__ import annotations

from collections.abc import Sequence


def devices_of(visible: Sequence[str], replica: int, per_replica: int) -> tuple[str, ...]:
    """The GPUs of replica number ``replica`` of a node: its share, in order; all where ``per_replica`` is 0 or none is.

    Raises:
        ValueError: the node has too few.
    """
    if not visible or per_replica == 0:
        return tuple(visible)
    first = replica * per_replica
    if first + per_replica > len(visible):
        raise ValueError(
            f"replica {replica} needs GPUs {first} to {first + per_replica - 1}, but there are {len(visible)} on the "
            "node: inference.replicas_per_node times inference.gpus_per_replica is too much"
        )
    return tuple(visible[first : first + per_replica])
