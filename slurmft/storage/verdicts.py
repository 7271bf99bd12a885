"""A worker's reports in its attempt's folder: its verdict at its end, evidence and facts at any time; no commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.policy.verdict import Evidence, Kind, Suspect
from slurmft.system.files import FORMAT, append_line, number, parse_json, read_as, read_json, write_json

# --- A worker's reports about itself and about hardware: its verdict when it ends, evidence at any time ---
# Both are files in the run's ``verdicts`` folder, one of each per rank and attempt, so that no lock is needed. They
# override exit codes, which do not survive srun and torchrun.

VERDICT_VARIABLE = "SLURMFT_VERDICT_FILE"
"""Where a worker writes its verdict."""

EVIDENCE_VARIABLE = "SLURMFT_EVIDENCE_FILE"
"""Where a worker adds evidence, one JSON object on each line; it is read while the run goes on, too."""

ERROR_DIR_VARIABLE = "SLURMFT_ERROR_DIR"
"""Folder in which a trainer that cannot be changed may leave ``<anything>.rank_<N>`` to explain why rank N failed."""

MAX_TEXT = 8000
MAX_VERDICT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerVerdict:
    """A worker's report of why it ended."""

    cause: str
    """One of ``policy.verdict.Cause``; anything else counts as unknown."""

    message: str = ""
    traceback: str = ""
    suspects: tuple[Suspect, ...] = ()
    rerun: str = ""
    """The re-run state machine's verdict: undecided, transient, persistent, correct or inconclusive; else empty."""


def write_verdict(path: Path, verdict: WorkerVerdict) -> None:
    """Replace the verdict; atomic.

    Raises:
        OSError: it cannot be written.
    """
    value = {
        "cause": verdict.cause,
        "message": verdict.message[-MAX_TEXT:],
        "traceback": verdict.traceback[-MAX_TEXT:],
        "suspects": [_plain(suspect) for suspect in verdict.suspects],
        "rerun": verdict.rerun,
    }
    write_json(path, value)


def read_verdict(path: Path) -> WorkerVerdict | None:
    """The verdict in ``path``; None when there is none.

    Raises:
        StorageError: it cannot be read or believed.
    """
    value = read_json(path, limit_bytes=MAX_VERDICT_BYTES)
    if value is None:
        return None
    suspects = value.get("suspects", [])
    return WorkerVerdict(
        cause=str(value.get("cause", "")),
        message=str(value.get("message", ""))[-MAX_TEXT:],
        traceback=str(value.get("traceback", ""))[-MAX_TEXT:],
        suspects=tuple(_suspects(suspects if isinstance(suspects, list) else [])),
        rerun=str(value.get("rerun", "")),
    )


def add_evidence(path: Path, evidence: Evidence) -> None:
    """Append one line; whole lines only, also when the writer is killed in the middle of two.

    Raises:
        OSError: it cannot be written.
    """
    value = {
        "format": FORMAT, "kind": evidence.kind, **_plain(evidence.suspect), "message": evidence.message[:1000],
        "at": evidence.at, "step": evidence.step,
    }  # fmt: skip
    line = json.dumps({key: item for key, item in value.items() if item is not None})
    append_line(path, line)


def parse_evidence(line: str) -> Evidence | None:
    """The evidence in one line; None when it is damaged, or of an unknown kind."""
    try:
        value = parse_json(line)
        step, at = value.get("step"), number(value["at"])
        if at is None:
            return None
        suspect = next(iter(_suspects([value])))
        return Evidence(
            kind=Kind(value["kind"]), suspect=suspect, message=str(value.get("message", ""))[:1000],
            at=at, step=None if step is None else int(step),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError, OverflowError):
        return None


def _suspects(values: Sequence[Any]) -> Sequence[Suspect]:
    found = []
    for value in values:
        if isinstance(value, dict) and isinstance(node := value.get("node"), str) and node:
            rank = value.get("rank")
            gpu = str(value.get("gpu", ""))[:255]
            found.append(Suspect(node=node[:255], gpu=gpu, rank=rank if type(rank) is int else None))
    return found


def _plain(suspect: Suspect) -> Mapping[str, Any]:
    value: dict[str, Any] = {"node": suspect.node}
    if suspect.gpu:
        value["gpu"] = suspect.gpu
    if suspect.rank is not None:
        value["rank"] = suspect.rank
    return value


# --- attempt facts ---
# Facts that a worker leaves in its attempt's folder for the supervisor, beside logs and errors. Never commands.

BATCH_FILE = "micro-batch.json"
RESUMING_FILE = "resuming.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedBatches:
    """The micro-batches that a trainer asked for, and the number of pieces in which it had to compute them."""

    asked: tuple[int, ...]
    divisor: int

    def __post_init__(self) -> None:
        if not self.asked or min(*self.asked, self.divisor) <= 0:
            raise ValueError("there is no such micro-batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resuming:
    checkpoint: str = ""
    source: str = ""


def note_batches(folder: Path, asked: Collection[int], divisor: int) -> None:
    """Leave it; a folder that cannot take it does not end the attempt."""
    with contextlib.suppress(OSError):
        write_json(folder / BATCH_FILE, {"asked": sorted(asked), "divisor": divisor}, durable=False)


def noted_batches(folder: Path) -> AskedBatches | None:
    """The facts that were left; None where there are none that can be believed."""
    with contextlib.suppress(StorageError):
        return read_as(AskedBatches, folder / BATCH_FILE)
    return None


def note_resuming(folder: Path, checkpoint: str, *, source: str = "") -> None:
    """Leave the name of the checkpoint folder that is about to be read, and from where; a later one replaces it."""
    with contextlib.suppress(OSError):
        write_json(folder / RESUMING_FILE, {"checkpoint": checkpoint, "source": source}, durable=False)


def noted_resuming(folder: Path) -> str | None:
    """The checkpoint that the attempt began with, as far as is known."""
    with contextlib.suppress(StorageError):
        found = read_as(_Resuming, folder / RESUMING_FILE)
        if found is not None and found.checkpoint and Path(found.checkpoint).name == found.checkpoint:
            return found.checkpoint
    return None


def noted_source(folder: Path) -> str:
    """Where the attempt's state was read from, in words; empty where nothing was read, or that is unknown."""
    with contextlib.suppress(StorageError):
        return (read_as(_Resuming, folder / RESUMING_FILE) or _Resuming()).source[:500]
    return ""
