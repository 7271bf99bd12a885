"""Which files are in use at the moment (the image that a writer reads, the checkpoint that is being loaded), and which
images wait in a node's memory. No torch.

Built on flock, whose lock ends with its holder, however that dies. Holders share; to change or remove the file a
process must lock it alone. Between processes of one node this always holds. Between nodes it holds where the filesystem
carries flock to its server: NFS from version 4 or Linux 2.6.12 on, Lustre mounted with ``flock``, GPFS, BeeGFS and
CephFS with locks switched on; not with NFS ``local_lock=flock`` or ``nolock``, nor Lustre ``localflock``. Where there
are no locks at all, no process counts as a holder: the newest two good checkpoints are never removed all the same, so
that a reader of the newest is safe until two more have been committed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from slurmft.checkpoint.image_file import MAX_INDEX_BYTES, ShardIndex, read_index
from slurmft.errors import StorageError
from slurmft.policy.checkpoints import Name, Offer, Tier
from slurmft.storage.checkpoint_names import MANIFEST, MAX_STEP, PEERS, Identity
from slurmft.system.files import UnsafeFile, open_regular, read_json, write_json

# --- holding ---

_PATIENCE_S = 1.0
_CLAIM = ".claim."


@contextlib.contextmanager
def holding(path: Path) -> Iterator[int]:
    """A descriptor to read ``path`` with; while it is open, others see that the file is in use.

    Raises:
        BlockingIOError: another process has it alone, to change or remove it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    descriptor = open_regular(path)
    with _locked(path, descriptor, lambda: patiently(lambda: _lock(descriptor, fcntl.LOCK_SH))):
        yield descriptor


@contextlib.contextmanager
def alone(path: Path) -> Iterator[int]:
    """A descriptor of ``path`` that no other process holds; new holders are refused until the end.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it is gone, or was replaced meanwhile.
        OSError: it cannot be opened.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except UnsafeFile:
        raise
    except PermissionError:
        descriptor = open_regular(path)  # enough on a local filesystem
    with _locked(path, descriptor, lambda: _lock(descriptor, fcntl.LOCK_EX)):
        yield descriptor


def is_held(path: Path) -> bool:
    """Whether any process holds ``path`` now; False where it is gone, or cannot be locked."""
    try:
        with alone(path):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


class Claim:
    """Until it is released, or its process ends, others see that a save in ``folder`` goes on.

    The file is one of the temporary files of a save: should it be left behind, it goes with the commit or the folder.

    Raises:
        OSError: it cannot be claimed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{_CLAIM}{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(self._descriptor, fcntl.LOCK_SH)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The save has ended. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def is_claimed(folder: Path) -> bool:
    """Whether a live process has claimed ``folder``."""
    return any(is_held(path) for path in folder.glob(f"{_CLAIM}*"))


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around the reading of a committed checkpoint: it is not removed meanwhile. One rank may do it for all.

    Where its marker cannot be held, others do not see that it is in use: the newest two stay in any case.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(holding(folder / MANIFEST))
        yield


@contextlib.contextmanager
def _locked(path: Path, descriptor: int, lock: Callable[[], None]) -> Iterator[None]:
    """Closes ``descriptor`` at the end."""
    try:
        lock()
        # it may have been unlinked between open and lock; then the lock protects nothing
        if not os.path.samestat(path.stat(), os.fstat(descriptor)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        # before the descriptor: a child that was forked meanwhile has it, too, and would go on holding the file
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
            raise


def patiently(lock: Callable[[], None], within_s: float = _PATIENCE_S) -> None:
    """Call ``lock`` until it gets the lock: ``is_held`` has a file alone for a moment, and so does who removes it.

    Raises:
        BlockingIOError: it did not in time.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# --- offers ---
# A node's shards of the run's snapshots, as rows of integers that ranks exchange. No torch.
#
#     $SLURMFT_MEMORY_DIR/                the agent's, in shared memory
#         shard-<rank>.<a|b|c>.image/.json  what this node's ranks staged: image and index (format.shard_index)
#         peers/shard-<shard>.<a|b>.*       copies of other nodes' shards (replicas.keeper), or what was fetched
#         tries.json                        how often a run began with a snapshot of the memory
#
# A folder on the node's local disk looks like ``peers``, and the staging folder beside the checkpoints like the
# agent's, with the shards of all nodes. An index whose image is missing or too short, a file that is not an index, a
# link, and any other file there are skipped.

MAX_SNAPSHOTS = 6
MAX_SHARDS = 64
"""Of one snapshot on one node: its own ranks' and its peers'."""

ROW_LENGTH = MAX_SNAPSHOTS * (5 + MAX_SHARDS // 2)
MAX_WORLD = 1 << 20
"""Shards of one snapshot; half a word holds a shard's number with its tier."""

DIGEST_PATIENCE_S = 10.0
WRITER_STARTS_S = 2.0
"""From a snapshot until its writer holds it, where that has to be started first."""

_LOOK_S = 0.05
_TRIES = "tries.json"
MAX_COUNTED = 100
_HALF = 32
_TIER_BITS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One shard of one snapshot that lies on this node, complete."""

    index: ShardIndex
    image: Path
    index_path: Path
    tier: Tier

    @property
    def name(self) -> Name:
        return self.index.identity


def image_of(index_path: Path) -> Path:
    """The image that belongs to an index in a memory folder."""
    return index_path.with_suffix(".image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """The staging folder, as a node sees it."""

    folder: Path
    ranks: range
    """Of this node, whose own files go before those of others."""


def scan(
    memory: Path | None, local_disk: Path | None = None, staging: Staging | None = None, *,
    patience_s: float = DIGEST_PATIENCE_S,
) -> list[Holding]:  # fmt: skip
    """Every shard that this node holds, newest first; one that lies there twice is listed once, memory before disk.

    A writer may still be at work on the digests of what its rank has staged: this waits for them, for ``patience_s``
    seconds at most, where nothing newer is complete, and only while there is such a writer. Shards without digests are
    listed all the same then.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = _look(memory, local_disk, staging)
        unhashed = [one for one in found if not one.index.is_hashed]
        whole = {one.name for one in found} - {one.name for one in unhashed}
        newest = max(map(_age, whole), default=(-1, 0, 0))
        if time.monotonic() >= deadline or not any(_age(one.name) > newest and _may_be_hashed(one) for one in unhashed):
            return found
        time.sleep(_LOOK_S)


def _age(name: Name) -> tuple[int, int, int]:
    step, generation, commit = name
    return commit, generation, step


def _may_be_hashed(one: Holding) -> bool:
    """Whether its rank's writer lives, as far as one can see: it holds what it works on, and may come to this next.

    A writer that has been replaced, or never got the request, holds nothing.
    """
    shard = one.image.name.split(".")[0]
    try:
        is_young = time.time() - one.index_path.stat().st_mtime < WRITER_STARTS_S
        return is_young or any(is_held(image) for image in one.image.parent.glob(f"{shard}.*.image"))
    except OSError:
        return False


def to_row(holdings: Iterable[Holding], tries: Callable[[Name], int] = lambda _name: 0) -> list[int]:
    """ROW_LENGTH integers: the newest MAX_SNAPSHOTS snapshots, each with its first MAX_SHARDS shards.

    A snapshot whose digests are incomplete is offered without the shards that lack them.
    """
    by_name: defaultdict[Name, list[Holding]] = defaultdict(list)
    for one in holdings:
        by_name[one.name].append(one)
    row: list[int] = []
    for name in sorted(by_name, key=_age, reverse=True)[:MAX_SNAPSHOTS]:
        ones = by_name[name]
        hashed = [one for one in ones if one.index.is_hashed] or ones
        row += [*name, ones[0].index.shards, tries(name) << 1 | hashed[0].index.is_hashed]
        row += _packed([(one.index.shard, one.tier) for one in hashed if one.index.shards == ones[0].index.shards])
    return row + [0] * (ROW_LENGTH - len(row))


def from_rows(rows: Sequence[Sequence[int]]) -> list[Offer]:
    """The offers in all ranks' rows, in rank order."""
    length = ROW_LENGTH // MAX_SNAPSHOTS
    offers: list[Offer] = []
    for rank, row in enumerate(rows):
        for start in range(0, ROW_LENGTH, length):
            step, generation, commit, shards, flags, *packed = row[start : start + length]
            if shards:
                name, held = (step, generation, commit), _unpacked(packed)
                verified, tries = bool(flags & 1), flags >> 1
                offers.append(Offer(rank=rank, name=name, shards=shards, held=held, verified=verified, tries=tries))
    return offers


def tries_of(memory: Path | None) -> Callable[[Name], int]:
    """How often a run has begun with a snapshot, as this node remembers."""
    counted = _read_tries(memory)
    return lambda name: len(counted.get(Identity(*name).folder_name, []))


def note_try(memory: Path, name: Name, *, generation: int) -> None:
    """Remember that a run begins with this snapshot, which is on no disk; call before anything is loaded.

    Each ``generation`` counts once.
    """
    counted, key = _read_tries(memory), Identity(*name).folder_name
    _note_tries(memory, counted, key, [*counted.get(key, []), generation])


def inherit_tries(memory: Path, old: str, new: str) -> None:
    """Remember that ``new`` is the same state as ``old``; both are names of checkpoint folders."""
    counted = _read_tries(memory)
    _note_tries(memory, counted, new, [*counted.get(old, []), *counted.get(new, [])])


def _note_tries(memory: Path, counted: Mapping[str, list[int]], key: str, generations: Sequence[int]) -> None:
    others = {name: numbers for name, numbers in counted.items() if name != key}
    newest = dict(list(others.items())[-2 * MAX_SNAPSHOTS :])
    each_once = list(dict.fromkeys(generations))
    try:
        write_json(memory / _TRIES, {"tries": {**newest, key: each_once[-MAX_COUNTED:]}}, durable=False)
    except OSError as error:
        log.warning("cannot note that a run begins with %s in memory: %s", key, error)


def forget_others(memory: Path, ranks: Collection[int], *, older_than: int) -> None:
    """Give back the memory of ranks that are not on this node any more, once a newer commit is durable.

    Args:
        ranks: of this node now.
        older_than: the number of that commit; snapshots of it and later ones stay.
    """
    own = {f"shard-{rank}." for rank in ranks}
    for one in holdings_in(memory, Tier.MEMORY):
        if not one.index_path.name.startswith(tuple(own)) and one.name[2] < older_than:
            one.index_path.unlink(missing_ok=True)
            one.image.unlink(missing_ok=True)


def _read_tries(memory: Path | None) -> dict[str, list[int]]:
    """The generations that began with each snapshot."""
    try:
        value = (read_json(memory / _TRIES) or {}).get("tries") if memory is not None else None
    except StorageError:
        return {}
    known = value if isinstance(value, dict) else {}
    lists = {key: one for key, one in known.items() if isinstance(one, list)}
    return {key: [number for number in one if type(number) is int] for key, one in lists.items()}


def _packed(shards: Iterable[tuple[int, Tier]]) -> list[int]:
    """Two shards in a word, each as its number plus one and its tier."""
    words = [shard + 1 << _TIER_BITS | tier for shard, tier in sorted(shards)[:MAX_SHARDS]]
    words += [0] * (MAX_SHARDS - len(words))
    return [low | high << _HALF for low, high in zip(words[::2], words[1::2], strict=True)]


def _unpacked(words: Iterable[int]) -> dict[int, Tier]:
    mask = (1 << _HALF) - 1
    halves = [half for word in words for half in (word & mask, word >> _HALF) if half]
    return {(half >> _TIER_BITS) - 1: Tier(half & (1 << _TIER_BITS) - 1) for half in halves}


def _look(memory: Path | None, local_disk: Path | None, staging: Staging | None) -> list[Holding]:
    places = [(memory, Tier.MEMORY), (memory / PEERS if memory else None, Tier.PEER), (local_disk, Tier.LOCAL_DISK)]
    found = [one for folder, tier in places if folder is not None for one in holdings_in(folder, tier)]
    best: dict[tuple[Name, int], Holding] = {}
    for one in (*found, *(_staged(staging) if staging is not None else ())):
        known = best.get((one.name, one.index.shard))
        if known is None or (one.index.is_hashed and not known.index.is_hashed):
            best[one.name, one.index.shard] = one
    return sorted(best.values(), key=lambda one: (-one.name[2], -one.name[1], -one.name[0], one.index.shard))


def _staged(staging: Staging) -> list[Holding]:
    """The shards in the staging folder, this node's own first; of large worlds nothing else, as a row is short."""
    found = holdings_in(staging.folder, Tier.STAGING)
    own = [one for one in found if _rank_of(one.index_path) in staging.ranks]
    return own + [one for one in found if one not in own and one.index.shards <= MAX_SHARDS]


def forget_staged(folder: Path, ranks: Callable[[int], bool]) -> None:
    """Remove snapshots that such ranks have staged beside the checkpoints, and the folder when it is empty.

    Snapshots that a writer still reads stay.
    """
    for path in folder.glob("shard-*"):
        if ranks(_rank_of(path)) and not is_held(path):
            path.unlink(missing_ok=True)
    try:
        if {path.name for path in folder.iterdir()} <= {_TRIES}:
            (folder / _TRIES).unlink(missing_ok=True)
            folder.rmdir()
    except OSError as error:
        log.debug("%s stays: %s", folder, error)


def _rank_of(path: Path) -> int:
    """Of the rank that staged it; -1 where the name is none of ours."""
    number = path.name.split(".")[0].removeprefix("shard-")
    return int(number) if number.isdecimal() else -1


def holdings_in(folder: Path, tier: Tier) -> list[Holding]:
    """The complete shards in one folder."""
    try:
        paths = sorted(folder.glob("shard-*.json"))
    except OSError:
        return []
    return [one for path in paths if (one := _holding(path, tier)) is not None]


def _holding(path: Path, tier: Tier) -> Holding | None:
    image = image_of(path)
    try:
        status = path.lstat()
        if not S_ISREG(status.st_mode) or status.st_size > MAX_INDEX_BYTES:
            return None
        index = read_index(path)
        status = image.lstat()
    except (OSError, StorageError) as error:
        log.debug("passing over %s: %s", path, error)
        return None
    if index is None or not S_ISREG(status.st_mode) or status.st_size < index.size_bytes:
        return None
    if index.shards > MAX_WORLD or max(index.identity) > MAX_STEP:
        return None
    return Holding(index=index, image=image, index_path=path, tier=tier)
