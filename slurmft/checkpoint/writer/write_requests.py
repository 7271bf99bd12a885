"""Requests of a worker to its writer, and the writer's reports: one JSON object per line, both ways. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slurmft.policy.checkpoints.checkpoint_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity

BestMode = Literal["min", "max"]

LIFETIME_S = 600.0
"""How long a writer works on after its worker has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which checkpoints stay when a new one is committed; the newest two good ones do in any case."""

    keep_last_n: int = 3
    """Checkpoints of this many steps."""

    keep_every: int = 0
    """Also the first one at or after every multiple of so many steps; 0: none for that reason."""

    best_metric: str = ""
    """Also the one that is best by this metric; empty: none for that reason."""

    best_mode: BestMode = "min"
    distrusted: tuple[str, ...] = ()
    """Names of folders that a load found damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOrder:
    """The data for rank 0's writer to commit a checkpoint once all ranks have written."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    attempt: str = ""
    keep: Keep = field(default_factory=Keep)


def order_of(settings: CheckpointSettings, metrics: Mapping[str, float], distrusted: Iterable[Path]) -> CommitOrder:
    """The order for a commit in this attempt; ``distrusted`` are folders that a load found damaged."""
    keep = Keep(
        keep_last_n=settings.keep_last_n, keep_every=settings.keep_every,
        best_metric=settings.best_metric if settings.save_best else "", best_mode=settings.best_mode,
        distrusted=tuple(sorted(path.name for path in distrusted)),
    )  # fmt: skip
    return CommitOrder(metrics=metrics, attempt=os.environ.get("SLURMFT_ATTEMPT", ""), keep=keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """Make one rank's staged snapshot durable; on rank 0, commit the checkpoint as well."""

    identity: Identity
    shard: int
    shards: int
    snapshot: Path
    """The image's index in the memory folder; it is there while the image is complete."""

    image: Path
    folder: Path
    """The checkpoint's own folder; made where it is missing."""

    commit: CommitOrder | None = None
    urgent: bool = False
    """A stop waits for this one: no bandwidth cap, and an older image of which less than half is written is dropped."""

    max_bytes_per_s: float = 0.0
    """0: as fast as the disk takes it from a process of the lowest priority."""

    is_written: bool = False
    """Only to be committed: a writer before this one has written the image. Set by the client."""

    goes_to_peers: bool = True
    """Copied to other nodes' memory as well, where the run has that."""

    keeps: Identity | None = None
    """Of a step that is copied, and never written: which copy its peers must still have until this one is whole."""

    is_step_copy: bool = False


ReportKind = Literal[
    "hashed", "written", "committed", "failed", "abandoned", "superseded", "pruned", "stalled", "copied"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One thing that happened to one save."""

    kind: ReportKind
    identity: Identity
    seconds: float = 0.0
    """Since the request for it came."""

    final: bool = False
    """Whether nothing more happens to this save. A failure that is not final is being retried."""

    phase: str = ""
    """What failed: reading the image, writing it, waiting for other ranks, committing, pruning."""

    errno: int = 0
    text: str = ""
    fenced: bool = False
    """A newer attempt owns the run; nothing that this process stages will ever be committed."""

    size_bytes: int = 0
    """Of the image; of a commit, of all its files."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """How far one snapshot is, as this rank knows."""

    step: int
    since: float
    is_written: bool = False
    is_committed: bool = False
    is_fenced: bool = False
    errno: int = 0
    """Why the newest try failed; 0 when it did not."""

    problem: str = ""


def request_line(request: WriteRequest) -> bytes:
    """The request as the writer reads it."""
    order = request.commit
    return _line(
        {
            "kind": "write",
            "identity": _numbers(request.identity),
            "shard": request.shard,
            "shards": request.shards,
            "snapshot": str(request.snapshot.absolute()),
            "image": str(request.image.absolute()),
            "folder": str(request.folder.absolute()),
            "is_written": request.is_written,
            "urgent": request.urgent,
            "max_bytes_per_s": request.max_bytes_per_s,
            "goes_to_peers": request.goes_to_peers,
            "keeps": None if request.keeps is None else _numbers(request.keeps),
            "is_step_copy": request.is_step_copy,
            "commit": None if order is None else _order_value(order),
        }
    )


def request_from(value: Mapping[str, Any]) -> WriteRequest:
    """The reverse of ``request_line``, of the object in the line."""
    order = value["commit"]
    return WriteRequest(
        identity=Identity(*value["identity"]),
        shard=value["shard"],
        shards=value["shards"],
        snapshot=Path(value["snapshot"]),
        image=Path(value["image"]),
        folder=Path(value["folder"]),
        commit=None if order is None else _order(order),
        urgent=value["urgent"],
        max_bytes_per_s=value["max_bytes_per_s"],
        is_written=value["is_written"],
        goes_to_peers=value["goes_to_peers"],
        keeps=None if value["keeps"] is None else Identity(*value["keeps"]),
        is_step_copy=value["is_step_copy"],
    )


def abandon_line(identity: Identity) -> bytes:
    """Asks the writer to leave a save, whether it waits or is being written."""
    return _line({"kind": "abandon", "identity": _numbers(identity)})


def hurry_line() -> bytes:
    """Asks the writer to lift the bandwidth cap of what it is writing."""
    return _line({"kind": "hurry"})


def close_line() -> bytes:
    """Asks the writer to end when nothing is left to do."""
    return _line({"kind": "close"})


def report_line(report: Report) -> bytes:
    """The report as the client reads it."""
    values = {name: getattr(report, name) for name in Report.__slots__ if name != "identity"}
    return _line({**values, "identity": _numbers(report.identity)})


def report_from(line: bytes) -> Report:
    """The reverse of ``report_line``."""
    value = json.loads(line)
    return Report(**{**value, "identity": Identity(*value["identity"])})


def identity_from(value: Mapping[str, Any]) -> Identity:
    """Which save an ``abandon`` is about."""
    return Identity(*value["identity"])


def _order_value(order: CommitOrder) -> dict[str, Any]:
    keep = {name: getattr(order.keep, name) for name in Keep.__slots__}
    return {"metrics": dict(order.metrics), "attempt": order.attempt, "keep": keep}


def _order(value: Mapping[str, Any]) -> CommitOrder:
    keep = {**value["keep"], "distrusted": tuple(value["keep"]["distrusted"])}
    return CommitOrder(metrics=value["metrics"], attempt=value["attempt"], keep=Keep(**keep))


def _numbers(identity: Identity) -> list[int]:
    return [identity.step, identity.generation, identity.commit]


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"  # never a line break inside, even in names of folders
