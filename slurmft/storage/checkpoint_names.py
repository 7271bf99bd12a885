"""Names in a checkpoint directory, and the mark of a checkpoint that runs die from. Needs no torch.

<checkpoint_dir>/step-00000100.g7.c12/     step 100, written by generation 7, the 12th commit of this directory
    manifest.json       the commit marker
    quarantined.json    written by the supervisor: no run begins with it any more
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.storage.files import read_json, write_json

MANIFEST = "manifest.json"
QUARANTINE = "quarantined.json"
MAX_STEP = 10**15 - 1
"""The largest step that a folder's name can hold."""

_NAME = re.compile(r"step-(\d{8,15})\.g(\d{1,15})\.c(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint's folder name says; three integers, so that ranks can exchange it as a tensor."""

    step: int
    generation: int
    commit: int

    @property
    def folder_name(self) -> str:
        return f"step-{self.step:08d}.g{self.generation}.c{self.commit}"

    @classmethod
    def parse(cls, folder_name: str) -> Identity | None:
        """The identity in a folder's name, or None when it is not a checkpoint's name exactly as we write it."""
        return _parsed(folder_name)


@functools.lru_cache(maxsize=1 << 14)
def _parsed(folder_name: str) -> Identity | None:
    if not (match := _NAME.fullmatch(folder_name)):
        return None
    identity = Identity(*(int(part) for part in match.groups()))
    return identity if identity.folder_name == folder_name else None


def newest_first(identities: Iterable[Identity]) -> list[Identity]:
    """In the order in which a run takes them."""
    return sorted(identities, key=lambda one: (one.commit, one.generation), reverse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Why no run begins with a checkpoint any more."""

    reason: str
    from_scratch: bool = False
    """Where this one was the last, the run begins anew."""


def write_quarantine(checkpoint: Path, quarantine: Quarantine) -> None:
    """Mark ``checkpoint``; durable when this returns. Its own files stay as they are.

    Raises:
        OSError: it is not marked.
    """
    value = {"reason": quarantine.reason, "from_scratch": quarantine.from_scratch}
    # readable by the same people as the files beside it
    write_json(checkpoint / QUARANTINE, value, mode=checkpoint.stat().st_mode & 0o666)


def read_quarantine(checkpoint: Path) -> Quarantine | None:
    """The mark; None where there is none. One that cannot be read counts: whoever wrote it knew why."""
    try:
        value = read_json(checkpoint / QUARANTINE)
    except StorageError as error:
        return Quarantine(reason=error.what)
    if value is None:
        return None
    return Quarantine(reason=str(value.get("reason", "")), from_scratch=value.get("from_scratch") is True)


def usable(directory: Path) -> list[str]:
    """Committed checkpoints without a mark, newest first; their files have not been verified.

    Raises:
        OSError: the directory cannot be listed.
    """
    found = newest_first(one for child in directory.iterdir() if (one := Identity.parse(child.name)))
    names = [one.folder_name for one in found]
    return [name for name in names if (directory / name / MANIFEST).exists() and not read_quarantine(directory / name)]
