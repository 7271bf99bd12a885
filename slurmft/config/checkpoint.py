"""The section ``checkpoint`` of the configuration."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from slurmft.config.types import Count, Folder, Positive, Seconds, Section, Text
from slurmft.policy.checkpoints.checkpoint_settings import CheckpointSettings

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _as_bytes(value: Any) -> Any:
    """Bytes behind ``500M``, ``1.5 GiB/s`` or a plain number; units are powers of 1024, as in Slurm's ``--mem``.

    Raises:
        ValueError: it is not such an amount.
    """
    if not isinstance(value, str):
        return value
    form = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?(?:/s)?", value.strip().lower())
    if form is None:
        raise ValueError(f"{value[:40]!r} is not a number of bytes per second, such as 500M or 1.5G")
    return int(float(form[1]) * _UNITS[form[2]])


Rate = Annotated[
    Positive,
    BeforeValidator(_as_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]


class CheckpointConfig(Section):
    """When and where checkpoints are written, how many stay, and what the training loop pays for them."""

    directory: Folder | None = None
    """Folder of the checkpoints; ``checkpoints`` in the run folder when empty. Must be shared by all nodes."""

    interval: Literal["steps", "seconds", "auto"] = "steps"
    """What spaces periodic checkpoints: interval_steps, interval_seconds, or (auto) the time between them at which the
    cost of saving and the work lost by failures are smallest together, from what both were seen to be."""

    interval_steps: Count = Field(default=100, ge=0)
    """Steps between two periodic checkpoints; 0 saves only at stops and at the end. With seconds and auto it is not
    used."""

    interval_seconds: Seconds = Field(default=0.0, ge=0)
    """Seconds between two periodic checkpoints with ``interval: seconds``; with auto the longest time between two, and
    0 means an hour."""

    keep_last_n: Positive = 3
    """Checkpoints of this many steps are kept, the newest ones."""

    keep_every: Count = Field(default=0, ge=0)
    """Keep for good the first checkpoint at or after every multiple of so many steps; 0: none."""

    save_best: bool = True
    """Keep the checkpoint with the best metric as well, however old."""

    best_metric: Text = "loss"
    """Which of the metrics that are given to ``save`` counts."""

    best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best."""

    async_save: bool = True
    """Train on while a checkpoint is written: the loop pays only for a copy in memory. false: save returns when it is
    durable."""

    when_busy: Literal["skip", "wait"] = "skip"
    """When the writer is still busy with the two saves before: leave a periodic save out, or wait. Saves of a stop,
    at the end, and of the script's own always wait."""

    max_failed_saves: Positive = 3
    """Failed saves in a row after which the run warns loudly: journal, status, explain and the log."""

    bandwidth: Rate | None = None
    """Bytes per second that a rank's writer may write at most, as ``500M`` or ``1.5G`` (powers of 1024); no cap when
    empty. Saves of a stop know none."""

    peer_copies: Count = Field(default=0, ge=0, le=8)
    """Other nodes that hold a copy of each node's newest state in memory: so many nodes may be lost at once without
    going back to the newest checkpoint on disk. Of replicated states not even a step, with ``just_in_time``."""

    peer_interval: Count = Field(default=0, ge=0)
    """Steps between two copies of the present state in memory: the node's own and, with ``peer_copies``, that of other
    nodes. 1: after every step; 0: of saves alone. Nothing is written to disk. A rank or a node that is lost, also of a
    sharded model (FSDP), costs no more than so many steps and those that a copy is under way. Each rank needs memory
    for a third snapshot. Where the copies hold up the training for more than 5 % of its time, the interval doubles. A
    run that begins anew saves after its first step. ``extra``, where it is used, must be a function."""

    local_directory: Folder | None = None
    """Folder on a disk of each node, the same path on all, for another copy that is read faster; none when empty. Only
    ``directory`` counts as durable."""

    just_in_time: bool = True
    """When a fault hits some ranks, healthy replicas keep the last completed step for the restart: of all weights, or
    with FSDP2 on a mesh of replicas by shards, of each shard."""

    stall_timeout_s: Seconds = Field(default=30.0, ge=1)
    """Seconds without progress after which the writer counts as stuck and its save as failed."""

    @field_validator("best_metric")
    @classmethod
    def _metric_is_named(cls, value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise ValueError(f"{value[:60]!r} is not the name of a metric")
        return value

    @model_validator(mode="after")
    def _interval_has_its_number(self) -> Self:
        if self.interval == "seconds" and not self.interval_seconds:
            raise ValueError("checkpoint.interval: seconds needs interval_seconds above 0")
        if self.interval == "steps" and self.interval_seconds:
            raise ValueError(
                f"checkpoint.interval_seconds={self.interval_seconds:g} does nothing with interval: steps; "
                "say interval: seconds"
            )
        return self

    @model_validator(mode="after")
    def _tiers_differ(self) -> Self:
        if self.local_directory is not None and self.local_directory == self.directory:
            raise ValueError(
                "checkpoint.local_directory is the shared directory; name a folder on the nodes' own disks"
            )
        return self

    @property
    def is_periodic(self) -> bool:
        """Whether any checkpoint is saved before a stop or the end."""
        return self.interval != "steps" or self.interval_steps > 0

    def settings(self, mtbf_s: float | None = None) -> CheckpointSettings:
        """The section for workers; ``mtbf_s`` is the time between two failures, as the supervisor expects it."""
        return CheckpointSettings(**self.model_dump(mode="json", exclude={"directory"}), mtbf_s=mtbf_s)
