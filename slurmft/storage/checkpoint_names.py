"""Names in a checkpoint directory and in the memory of nodes; marks of checkpoints: verified, doubted, or one that runs
die from; and whether an attempt is still the newest, before it commits one. Needs no torch.

<checkpoint_dir>/step-00000100.g7.c12/     step 100, written by generation 7, the 12th commit of this directory
    manifest.json       the commit marker
    quarantined.json    written by the supervisor: no run begins with it any more
<checkpoint_dir>/.staging/     snapshots that did not fit into memory; names as in a memory folder
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from slurmft.errors import Fenced, NewerFormat, StorageError
from slurmft.system.files import Record, read_as, read_bytes, read_json, trusted_owners, write_json

# --- digest record ---
# ``digests.json`` in a checkpoint directory: checkpoints whose replicas agreed, and those from when they did not.
#
# Written by the supervisor alone; read wherever checkpoints are chosen or removed. Needs no torch.

DIGESTS = "digests.json"

KEPT = 64
"""Entries of each list; the newest ones count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """States after ``after_step`` steps, saved by generations up to ``generation``, are not resumed from."""

    generation: int
    after_step: int
    reason: str = ""

    def __post_init__(self) -> None:
        if min(self.generation, self.after_step) < 0:
            raise ValueError("a doubt is about a negative number")

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


def read_mark(kind: type[Record], path: Path, directory: Path) -> Record | None:
    """What a mark in a checkpoint directory says; None where there is none, or none that can be believed.

    A mark lets checkpoints be removed, so only those of the owner of ``directory``, of root and of this user count.

    Raises:
        NewerFormat: a newer slurmft wrote it.
    """
    try:
        return read_as(kind, path, owners=trusted_owners(directory))
    except FileNotFoundError:
        return None
    except NewerFormat:
        raise
    except (OSError, StorageError) as error:
        log.warning("%s says nothing: %s", path, error)
        return None


def read_digests(directory: Path) -> DigestRecord:
    """The record of a checkpoint directory; an empty one where there is none that can be believed.

    Raises:
        NewerFormat: a newer slurmft wrote it.
    """
    return read_mark(DigestRecord, directory / DIGESTS, directory) or DigestRecord()


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
        each for each in record.doubts if each.generation > doubt.generation or each.after_step < doubt.after_step
    ]
    _write(directory, replace(record, doubts=(*others, doubt)[-KEPT:]))


def _write(directory: Path, record: DigestRecord) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / DIGESTS, asdict(record), mode=directory.stat().st_mode & 0o644)


# --- checkpoint names ---

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


class Identity(NamedTuple):
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

    reason: str = ""
    from_scratch: bool = False
    """Where this one was the last, the run begins anew."""


def write_quarantine(checkpoint: Path, quarantine: Quarantine) -> None:
    """Mark ``checkpoint``; durable when this returns. Its own files stay as they are.

    Raises:
        OSError: it is not marked.
    """
    # readable by the same people as the files beside it
    write_json(checkpoint / QUARANTINE, asdict(quarantine), mode=checkpoint.stat().st_mode & 0o644)


def read_quarantine(checkpoint: Path) -> Quarantine | None:
    """The mark, or a doubt of its replicas; None where there is neither that can be believed."""
    try:
        if (mark := read_mark(Quarantine, checkpoint / QUARANTINE, checkpoint.parent)) is not None:
            return mark
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


# --- memory folder ---
# Names in the memory folder that an agent keeps for its node's snapshots: agent, keeper, writers and ranks share them.
#
# <agent's private folder in shared memory>/memory/     SLURMFT_MEMORY_DIR; outlives the workers, goes with the agent
#     copies.key      with which nodes prove to each other that their copies are the run's
#     generation      of the newest attempt that this agent has started workers of
#     peers/          copies of other nodes' shards

MEMORY_VARIABLE = "SLURMFT_MEMORY_DIR"
KEY_FILE, GENERATION_FILE, PEERS = "copies.key", "generation", "peers"


def own_memory_folder() -> Path | None:
    """The one of this worker's node; None where no agent keeps one."""
    return Path(told) if (told := os.environ.get(MEMORY_VARIABLE)) else None


def is_the_runs(directory: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether checkpoints there are those of the run, and not of something else that a worker saves beside them."""
    told = environment.get("SLURMFT_CHECKPOINT_DIR")
    return not told or os.path.realpath(told) == os.path.realpath(directory)


def memory_folder_of(directory: Path) -> Path | None:
    """Where snapshots of checkpoints in ``directory`` outlive their worker; None where they do not.

    Snapshots are identified by step, generation and commit: those of two directories must not lie in one folder.
    """
    return own_memory_folder() if is_the_runs(directory) else None


def ranks_of_this_node() -> range:
    """The ranks of the workers beside this one, and its own."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def copies_key(secret: bytes) -> bytes:
    """The key for copies, from the secret of the control channel: neither can be computed from the copies' key."""
    return hmac.new(secret, b"slurmft copies", hashlib.sha256).hexdigest().encode()


def read_copies_key(memory: Path) -> bytes:
    """As the node's agent has left it.

    Raises:
        OSError: there is none; a run of one node has none.
    """
    return read_bytes(memory / KEY_FILE, limit_bytes=4096)


def announcement(attempt_folder: Path, place: int) -> Path:
    """The file in which the agent of the ``place``-th node of an attempt says where its keeper listens."""
    return attempt_folder / f"keeper-{place}.json"


def read_generation(memory: Path) -> int:
    """Of the newest attempt that began on this node; 0 where that is unknown."""
    try:
        return max(0, int(read_bytes(memory / GENERATION_FILE, limit_bytes=4096)))
    except (OSError, ValueError):
        return 0


# --- Fencing: an attempt that is no longer the newest one of its run must not change the run's state ---
# ``owner.json`` in the run folder holds a generation that grows by one with every attempt. A worker knows its own from
# its environment; a node that was cut off and reconnects finds a newer one and is refused.

OWNER_FILE = "owner.json"
RUN_FOLDER_VARIABLE = "SLURMFT_RUN_FOLDER"
GENERATION_VARIABLE = "SLURMFT_GENERATION"


def check_fence(environment: Mapping[str, str] | None = None) -> None:
    """Return when this process belongs to the run's newest attempt, or to no run at all.

    Raises:
        Fenced: a newer attempt owns the run, or the run folder was replaced by an older copy.
        StorageError: its owner cannot be read or believed.
    """
    environment = os.environ if environment is None else environment
    run_folder = environment.get(RUN_FOLDER_VARIABLE)
    if not run_folder:
        return
    owner = read_json(Path(run_folder) / OWNER_FILE)
    if owner is None:
        return
    mine = int(environment.get(GENERATION_VARIABLE, "0"))
    if type(newest := owner.get("generation", 0)) is not int:
        raise StorageError(f"{Path(run_folder) / OWNER_FILE} is damaged: its generation is not a number")
    if newest > mine:
        raise Fenced(
            f"generation {mine} of {run_folder} was replaced by generation {newest} (job {owner.get('job', '?')})",
            hint="this attempt is stale; the newer one goes on",
        )
    if newest < mine:
        raise Fenced(
            f"{run_folder} is an older copy of itself: it knows generation {newest}, this attempt is generation {mine}",
            hint="it was restored or replaced while the run was going on; submit the run again to train on from there",
        )
