"""The walk from the best candidate to the first that every rank can use.

Rank 0 names the candidates; each rank reads the shared file and its own; all agree on the verdict before any of them
changes an object of the trainer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.checkpoint.agreement import Guard, damage_report, failure
from slurmft.checkpoint.catalog import SHARED, Entry, rank_file, read_entry
from slurmft.checkpoint.folders import remove_left_overs
from slurmft.checkpoint.payload import Damage, Damaged, read_payload, verify_file
from slurmft.checkpoint.plain_state import original
from slurmft.checkpoint.state import Trainee
from slurmft.checkpoint.team import Team
from slurmft.errors import CheckpointError, NewerFormat, StorageError
from slurmft.storage.attempt_facts import note_resuming
from slurmft.storage.checkpoint_names import MANIFEST, Identity, read_quarantine
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE

_QUARANTINE = frozenset({Damage.NONE, Damage.QUARANTINED, Damage.GIVEN_UP})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What a load found. ``found`` is False, and ``step`` 0, when the directory holds no checkpoint yet."""

    found: bool = False
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None
    world_size: int = 0
    """How many ranks wrote it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What ``save(extra=...)`` was given."""
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer (or better) checkpoints that could not be used, and why; the same on every rank."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One rank's verified half of a checkpoint, not applied yet."""

    entry: Entry
    shared: dict[str, Any]
    own: dict[str, Any]
    is_own: bool
    """False when this rank did not exist in the run that saved, and borrows rank 0's loader position."""


def load_first_usable(directory: Path, trainee: Trainee, candidates: Callable[[], list[Identity]]) -> LoadedCheckpoint:
    """Load the first of ``candidates`` (asked on rank 0 only) that all ranks can verify.

    Raises:
        CheckpointError: there are candidates and none is usable, or an intact one does not fit ``trainee``.
    """
    team = Team()
    skipped: list[tuple[Path, str]] = []
    found: set[int] = set()
    for identity in _agreed_candidates(team, directory, candidates):
        path, guard, read = directory / identity.folder_name, Guard(), None
        _note(team, path)
        with guard:
            read = _read(team, trainee, path)
        rows = team.exchange(guard.damage_row)
        if all(damage == Damage.NONE for damage, _ in rows) and read is not None:
            return _apply(team, trainee, read, skipped)
        if any(damage in (Damage.MISFIT, -1) for damage, _ in rows):
            raise _cannot_load(path, [damage for damage, _ in rows], team, guard)
        skipped.append((path, damage_report(rows, team, guard)))
        found |= {damage for damage, _ in rows}
        if team.is_lead:
            log.warning("skipping checkpoint %s: %s", *skipped[-1])
    _note(team, None)
    if found <= _QUARANTINE and (not found or Damage.GIVEN_UP in found):
        return LoadedCheckpoint(skipped=tuple(skipped))
    listing = "".join(f"\n  {path}: {reason}" for path, reason in skipped)
    raise CheckpointError(
        f"no checkpoint in {directory} can be used:{listing}",
        hint="move the folder away to start anew, or bring back an intact copy",
    )


def _agreed_candidates(team: Team, directory: Path, candidates: Callable[[], list[Identity]]) -> list[Identity]:
    guard, found = Guard(), list[Identity]()
    if team.is_lead:
        with guard:
            remove_left_overs(directory, is_saving=False)
            found = candidates()
    code, count = team.from_lead([guard.code, len(found)])
    if code:
        raise failure(f"{directory} was not loaded", [code], team, guard)
    if not count:
        return []
    numbers = [number for one in found for number in (one.step, one.generation, one.commit)]
    numbers = team.from_lead(numbers if team.is_lead else [0] * (3 * count))
    return [Identity(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)]


def _read(team: Team, trainee: Trainee, path: Path) -> _Read:
    entry = _verified_entry(path)
    is_own = team.rank < entry.world_size
    own_name = rank_file(team.rank if is_own else 0)
    for name in (SHARED, own_name):
        if name not in entry.files:
            raise Damaged(Damage.MISSING, name, "the marker does not list it")
    if team.is_lead:
        verify_file(path / SHARED, entry.files[SHARED])
    verify_file(path / own_name, entry.files[own_name])
    read = _Read(entry, read_payload(path / SHARED), read_payload(path / own_name), is_own)
    trainee.check_fit(read.shared)
    return read


def _verified_entry(path: Path) -> Entry:
    try:
        entry = read_entry(path)
    except NewerFormat as error:
        raise Damaged(Damage.NEWER, MANIFEST, error.what) from error
    except StorageError as error:
        raise Damaged(Damage.UNREADABLE, MANIFEST, error.what) from error
    if entry is None:
        raise Damaged(Damage.MISSING, MANIFEST)
    if (mark := read_quarantine(path)) is not None:
        raise Damaged(Damage.GIVEN_UP if mark.from_scratch else Damage.QUARANTINED, MANIFEST, mark.reason)
    return entry


def _note(team: Team, path: Path | None) -> None:
    """Leave word of the run's checkpoint that is about to be read: whoever dies of it cannot say so any more."""
    folder, directory = os.environ.get(ERROR_DIR_VARIABLE), os.environ.get("SLURMFT_CHECKPOINT_DIR")
    if team.is_lead and folder and directory and (path is None or path.parent.absolute() == Path(directory).absolute()):
        note_resuming(Path(folder), path.name if path is not None else "")


def _apply(team: Team, trainee: Trainee, read: _Read, skipped: list[tuple[Path, str]]) -> LoadedCheckpoint:
    entry = read.entry
    trainee.apply(read.shared, read.own, restore_rng=read.is_own)
    if not read.is_own:
        log.warning(
            "rank %d is not in %s (%d ranks): its random number generators stay as they are",
            team.rank,
            entry.path,
            entry.world_size,
        )
    if team.is_lead:
        log.info("loaded %s: step %d, %d skipped", entry.path, entry.step, len(skipped))
        if entry.world_size != team.world_size:
            log.warning("%d ranks saved, %d go on: data continues at the same place", entry.world_size, team.world_size)
    return LoadedCheckpoint(
        found=True,
        step=entry.step,
        metrics=entry.metrics,
        path=entry.path,
        world_size=entry.world_size,
        extra=original(read.shared.get("extra", {})),
        skipped=tuple(skipped),
    )


def _cannot_load(path: Path, damages: list[int], team: Team, guard: Guard) -> CheckpointError:
    """An intact checkpoint that these objects cannot take: an older one would not fit either, so nobody walks on."""
    failed = [rank for rank, damage in enumerate(damages) if damage]
    detail = str(guard.error) if guard.error is not None else f"rank(s) {failed} could not; their logs show why"
    if guard.error is not None:
        log.error("rank %d cannot load %s", team.rank, path, exc_info=guard.error)
    error = CheckpointError(
        f"{path} cannot be loaded: {detail}", hint="use the model that saved it, or another checkpoint directory"
    )
    error.__cause__ = guard.error
    return error
