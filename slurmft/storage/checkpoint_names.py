"""Names in a checkpoint directory, and the mark of a checkpoint that runs die from. Needs no torch.

<checkpoint_dir>/step-00000100.g7.c12/     step 100, written by generation 7, the 12th commit of this directory
    manifest.json       the commit marker
    quarantined.json    written by the supervisor: no run begins with it any more
<checkpoint_dir>/.staging/     snapshots that did not fit into memory; names as in a memory folder
"""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import NewerFormat
from slurmft.storage.digest_record import read_digests, read_mark
from slurmft.system.files import write_json
from slurmft.system.opening import trusted_owners

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
QUARANTINE = "quarantined.json"
STAGING = ".staging"
MAX_STEP = 10**15 - 1
"""The largest step that a folder's name can hold."""

MAX_NUMBER = 10**12 - 1
"""The largest commit and generation: a save each millisecond for thirty years. More is damage, or planted: it would be
the newest for ever, and leave no numbers for what is saved after it."""

_NAME = re.compile(r"step-(\d{8,15})\.g(\d{1,15})\.c(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of a checkpoint's folder name; three integers, so that ranks can exchange it as a tensor."""

    step: int
    generation: int
    commit: int

    @property
    def age(self) -> tuple[int, int]:
        """Greater for a newer one. Attempts first: one that went back to an older state counts its commits on from
        there."""
        return self.generation, self.commit

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
    return sorted(identities, key=_place, reverse=True)


def _place(one: Identity) -> tuple[int, int]:
    return one.commit, one.generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Why runs do not begin with a checkpoint any more."""

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
    write_json(checkpoint / QUARANTINE, value, mode=checkpoint.stat().st_mode & 0o644)


def read_quarantine(checkpoint: Path) -> Quarantine | None:
    """The mark, or a doubt of its replicas; None where there is neither that can be believed."""
    try:
        if mark := read_mark(checkpoint / QUARANTINE, checkpoint.parent):
            return Quarantine(reason=str(mark.get("reason", "")), from_scratch=mark.get("from_scratch") is True)
        if (identity := Identity.parse(checkpoint.name)) is None:
            return None
        doubt = read_digests(checkpoint.parent).doubt(identity.step, identity.generation)
    except NewerFormat as error:
        log.warning("it says nothing: %s", error.what)
        return None
    return None if doubt is None else Quarantine(reason=doubt.reason, from_scratch=True)


@dataclass(frozen=True, slots=True)
class Names:
    """The folders with a checkpoint's name in one directory, each list newest first."""

    believed: list[Identity]
    damaged: list[tuple[Identity, str]]
    """Those that cannot be a save's, independent of their content, with the reason."""
    foreign: list[tuple[Identity, str]]
    """Those of users who are not trusted there, with the reason."""


def names_in(directory: Path) -> Names:
    """One look at a checkpoint directory and at the owner of each folder in it.

    Other users may be able to write there. Their folders, and links that they made, count for nothing: neither as a
    checkpoint, nor as the newest number from which saves are counted on.

    Raises:
        OSError: the directory cannot be listed.
    """
    owners = trusted_owners(directory)
    believed, damaged, foreign = list[Identity](), list[tuple[Identity, str]](), list[tuple[Identity, str]]()
    with os.scandir(directory) as children:
        named = [(identity, child) for child in children if (identity := Identity.parse(child.name)) is not None]
    for identity, child in sorted(named, key=lambda one: _place(one[0]), reverse=True):
        try:
            found = {child.stat(follow_symlinks=False).st_uid}
            if found <= owners:  # the target of another user's link is not even looked at
                status = child.stat()
                if not stat.S_ISDIR(status.st_mode):
                    continue
                found.add(status.st_uid)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            damaged.append((identity, f"cannot look at {child.path}: {error.strerror}"))
            continue
        if strangers := found - owners:
            foreign.append((identity, f"{child.path} belongs to user id {min(strangers)}"))
        elif identity.commit > MAX_NUMBER or identity.generation > MAX_NUMBER:
            damaged.append((identity, f"{child.path} has a number that no save can have"))
        else:
            believed.append(identity)
    return Names(believed, damaged, foreign)


def usable(directory: Path) -> list[str]:
    """Committed checkpoints without a mark, newest first; their files have not been verified.

    Raises:
        OSError: the directory cannot be listed.
    """
    names = [one.folder_name for one in names_in(directory).believed]
    return [name for name in names if (directory / name / MANIFEST).exists() and not read_quarantine(directory / name)]
