"""``digests.json`` in a checkpoint directory: checkpoints whose replicas agreed, and those from when they did not.

Written by the supervisor alone; read wherever checkpoints are chosen or removed. Needs no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.system.files import read_json, write_json
from slurmft.system.opening import trusted_owners

DIGESTS = "digests.json"
log = logging.getLogger(__name__)

KEPT = 64
"""Entries of each list; the newest ones count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """States after ``after_step`` steps, saved by generations up to ``generation``, are not resumed from."""

    generation: int
    after_step: int
    reason: str = ""

    def covers(self, step: int, generation: int) -> bool:
        """Whether that checkpoint is one of them."""
        return generation <= self.generation and step > self.after_step


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestRecord:
    """The content of the file."""

    verified: tuple[tuple[int, int], ...] = ()
    """Step and generation of states on which all replicas agreed, oldest first."""

    doubts: tuple[Doubt, ...] = ()

    def doubt(self, step: int, generation: int) -> Doubt | None:
        """Why that checkpoint is not resumed from; None where nothing is known against it."""
        return next((each for each in self.doubts if each.covers(step, generation)), None)

    def is_verified(self, step: int, generation: int) -> bool:
        """Whether the replicas agreed on that state."""
        return (step, generation) in self.verified and self.doubt(step, generation) is None


def read_mark(path: Path, directory: Path) -> dict[str, Any]:
    """What a mark in a checkpoint directory says; nothing where there is none, or none that can be believed.

    A mark lets checkpoints be removed, so only those of the owner of ``directory``, of root and of this user count.

    Raises:
        NewerFormat: a newer slurmft wrote it.
    """
    try:
        return read_json(path, owners=trusted_owners(directory)) or {}
    except FileNotFoundError:
        return {}
    except NewerFormat:
        raise
    except (OSError, StorageError) as error:
        log.warning("%s says nothing: %s", path, error)
        return {}


def read_digests(directory: Path) -> DigestRecord:
    """The record of a checkpoint directory; an empty one where there is none that can be believed.

    Raises:
        NewerFormat: a newer slurmft wrote it.
    """
    value = read_mark(directory / DIGESTS, directory)
    try:
        return DigestRecord(
            verified=tuple((_number(step), _number(generation)) for step, generation in value.get("verified", [])),
            doubts=tuple(
                Doubt(
                    generation=_number(each["generation"]),
                    after_step=_number(each["after_step"]),
                    reason=str(each.get("reason", "")),
                )
                for each in value.get("doubts", [])
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("%s is damaged and says nothing: %s", directory / DIGESTS, error)
        return DigestRecord()


def note_verified(directory: Path, step: int, generation: int) -> None:
    """All replicas agreed on the state that this generation has saved after ``step`` steps.

    Raises:
        OSError, NewerFormat: it is not noted.
    """
    record = read_digests(directory)
    others = [each for each in record.verified if each != (step, generation)]
    _write(directory, replace(record, verified=(*others, (step, generation))[-KEPT:]))


def note_doubt(directory: Path, doubt: Doubt) -> None:
    """Replicas differed: later states than ``doubt.after_step`` may be spoilt.

    Raises:
        OSError, NewerFormat: it is not noted.
    """
    record = read_digests(directory)
    others = [
        each
        for each in record.doubts
        if each.generation > doubt.generation or each.after_step < doubt.after_step
    ]  # fmt: skip
    _write(directory, replace(record, doubts=(*others, doubt)[-KEPT:]))


def _write(directory: Path, record: DigestRecord) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    doubts = [
        {"generation": each.generation, "after_step": each.after_step, "reason": each.reason} for each in record.doubts
    ]
    value = {"verified": [list(each) for each in record.verified], "doubts": doubts}
    write_json(directory / DIGESTS, value, mode=directory.stat().st_mode & 0o644)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of steps or a generation")
    return value
