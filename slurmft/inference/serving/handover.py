"""``handover.json`` of a run folder: the job to which the owner wants to hand an endpoint over.

While it names a predecessor that owns the run, the successor is a candidate: it may start agents and replicas beside
the owner, and becomes the owner by a newer generation alone. Removing the file calls the handover off. It is read and
changed with the run's lock held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import StorageError
from slurmft.storage.patience import write_state, writing
from slurmft.system.files import read_json

HANDOVER_FILE = "handover.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One handover."""

    predecessor: str
    """Job that owns the run."""

    successor: str = ""
    """Job that is to take it over; empty while sbatch has not answered, and no job has presented itself."""

    reason: str = ""
    tries: int = 1
    waits: str = ""
    """Why the successor has no nodes yet, in words; empty once it has."""


def read_handover(run_folder: Path) -> Handover | None:
    """The handover that is under way, or was the last one; None where there is none.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    path = run_folder / HANDOVER_FILE
    if (value := read_json(path)) is None:
        return None
    if not all(isinstance(value.get(key), str) for key in ("predecessor", "successor")):
        raise StorageError(f"{path} is damaged", hint="move it away")
    return _from(value)


def _from(value: Mapping[str, Any]) -> Handover:
    tries = value.get("tries")
    return Handover(
        predecessor=value["predecessor"], successor=value["successor"], reason=str(value.get("reason", "")),
        tries=tries if type(tries) is int else 1, waits=str(value.get("waits", "")),
    )  # fmt: skip


def write_handover(run_folder: Path, handover: Handover) -> None:
    """Begin one, or note what has become of it.

    Raises:
        StorageError: the run folder cannot be written.
    """
    write_state(run_folder / HANDOVER_FILE, asdict(handover))


def call_off(run_folder: Path) -> None:
    """A candidate may not take the run over any more.

    Raises:
        StorageError: the run folder cannot be written.
    """
    path = run_folder / HANDOVER_FILE
    with writing(path):
        path.unlink(missing_ok=True)
