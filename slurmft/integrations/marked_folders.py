"""Saves in a framework's own format: folders that all ranks fill together, and that count once a marker is in them.

    <root>/step-000000000000042.3.0/    42 steps, saved by generation 3 of the run, its first try
        ...                             whatever the ranks write
        complete.json                   written last, by rank 0: names and sizes of all files

A folder without its marker, or with files that differ from it, is never resumed from.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.checkpoint.agreement import Guard, failure
from slurmft.checkpoint.folders import own_generation
from slurmft.checkpoint.team import Team
from slurmft.errors import CheckpointError, StorageError
from slurmft.storage.fence import check_fence
from slurmft.system import opening
from slurmft.system.files import fsync_folder, read_json, write_json

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{15})\.(\d{1,9})\.(\d{1,9})")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which folder of them; a later one is greater."""

    step: int
    generation: int
    serial: int

    @property
    def name(self) -> str:
        return f"step-{self.step:015d}.{self.generation}.{self.serial}"


@dataclass(frozen=True, slots=True)
class Save:
    """A complete one."""

    place: Place
    path: Path
    world_size: int
    """Ranks that wrote it."""


class MarkedFolders:
    """The saves below one folder. Every method but ``complete`` is a collective of all ranks.

    Args:
        root: on a filesystem that every rank sees; made when it is missing.
        keep: so many complete saves are kept, at least 1.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self._keep = root, max(1, keep)

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Let every rank write its files with ``fill(folder)``, then mark the folder and remove old ones.

        ``fill`` may hold collectives, and must not leave them early on one rank only.

        Raises:
            CheckpointError: nothing was saved, and older saves are untouched; raised by all ranks alike.
            Fenced: a newer attempt owns the run.
        """
        team, guard, serial = Team(), Guard(), 0
        generation = own_generation()
        if team.is_lead:
            with guard:
                self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
                taken = [one.serial for one in self._places() if (one.step, one.generation) == (step, generation)]
                serial = max(taken, default=-1) + 1
                (self.root / Place(step, generation, serial).name).mkdir(mode=0o700)
        row = team.from_lead([guard.code, serial, generation])
        place = Place(step, row[2], row[1])
        folder = self.root / place.name
        self._agree(team, guard, [row[0]] if row[0] else [], folder)
        with guard:
            fill(folder)
        self._agree(team, guard, [one[0] for one in team.exchange([guard.code])], folder)
        with guard:  # not earlier: another rank's temporary file would be gone between its listing and its opening
            _sync(folder, everything=team.is_lead)
        self._agree(team, guard, [one[0] for one in team.exchange([guard.code])], folder)
        if team.is_lead:
            with guard:
                check_fence()
                write_json(folder / MARKER, {"step": step, "world_size": team.world_size, "files": _sizes(folder)})
                fsync_folder(self.root)
        self._agree(team, guard, team.from_lead([guard.code]), folder)
        if team.is_lead:
            self._remove_old(place)
        return folder

    def newest(self) -> Save | None:
        """The newest save that every rank finds complete; None where there is none.

        Raises:
            CheckpointError: the folder cannot be read, or there are marked saves and none of them can be used.
        """
        team, guard, found, marked = Team(), Guard(), list[Save](), 0
        if team.is_lead:
            with guard:
                found = self.complete()
                marked = sum((self.root / one.name / MARKER).exists() for one in self._places())
        code, number, marked = team.from_lead([guard.code, len(found), marked])
        if code:
            raise failure(f"{self.root} cannot be read", [code], team, guard)
        for index in range(number):
            mine = found[index].place if team.is_lead else Place(0, 0, 0)
            place = Place(*team.from_lead([mine.step, mine.generation, mine.serial]))
            save = self._usable(place)
            if all(row[0] for row in team.exchange([int(save is not None)])):
                return save
        if marked:
            raise CheckpointError(
                f"none of the {marked} marked saves in {self.root} can be used; the log says why",
                hint="restore their files, or move the folder away to begin anew",
            )
        return None

    def complete(self) -> list[Save]:
        """All complete saves as this process sees them, newest first."""
        found = (self._usable(place) for place in sorted(self._places(), reverse=True))
        return [save for save in found if save is not None]

    def _places(self) -> list[Place]:
        try:
            names = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return [Place(*map(int, match.groups())) for name in names if (match := _NAME.fullmatch(name))]

    def _usable(self, place: Place) -> Save | None:
        folder = self.root / place.name
        try:
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise StorageError("another user owns it, or may write there")
            marker = read_json(folder / MARKER, owners={os.getuid()})
            if marker is None:
                return None  # not finished, or under way
            if marker.get("files") != (found := _sizes(folder)):
                raise StorageError(f"it does not hold the files of its marker, but {found}")
            return Save(place, folder, int(marker["world_size"]))
        except (OSError, StorageError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is not resumed from: %s", folder, error)
            return None

    def _agree(self, team: Team, guard: Guard, codes: Sequence[int], folder: Path) -> None:
        if any(codes):
            raise failure(f"{folder} was not saved", codes, team, guard)

    def _remove_old(self, newest: Place) -> None:
        """Keep the newest complete ones; what was never finished by this or an earlier attempt goes as well."""
        kept = {save.place for save in self.complete()[: self._keep]}
        for place in self._places():
            if place in kept or place >= newest:
                continue
            folder = self.root / place.name
            try:
                (folder / MARKER).unlink(missing_ok=True)  # first: half a folder must not look complete
                shutil.rmtree(folder)
            except OSError as error:
                log.warning("an old save stays: %s", error)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below ``folder`` but the marker."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[:1] != ".")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files if path.name != MARKER}


def _sync(folder: Path, *, everything: bool) -> None:
    """Make what was written durable. A folder inside holds the parts of several ranks: each one syncs it."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            fsync_folder(path)
        elif everything or path.parent != folder:
            descriptor = opening.open_regular(path)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    fsync_folder(folder)
