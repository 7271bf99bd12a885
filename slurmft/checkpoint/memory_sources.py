"""Snapshots in the memory of a restart's nodes: offered, decided on by all ranks alike, sent where they are needed."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmft.checkpoint.image_file import (
    MAX_INDEX_BYTES,
    Damaged,
    Holding,
    Item,
    ShardIndex,
    holdings_in,
    is_held,
    parse_index,
)
from slurmft.checkpoint.reading import Source
from slurmft.checkpoint.replicas import Incoming, Mismatch, local_folder, ranges_of
from slurmft.errors import CheckpointError, StorageError
from slurmft.policy.checkpoints import (
    DISK,
    Committed,
    Decision,
    Name,
    Offer,
    Tier,
    Transfer,
    choose_snapshot,
    rounds_of,
    transfers_of,
    without,
)
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.checkpoint_names import (
    PEERS,
    STAGING,
    Doubt,
    Identity,
    memory_folder_of,
    own_memory_folder,
    read_copies_key,
)
from slurmft.system.files import TAG_BYTES, PieceTags, derived_key, open_regular, read_bytes, read_json, write_json
from slurmft.system.processes import fits
from slurmft.trainer.savers import Team

# --- offers ---
# A node's shards of the run's snapshots, as rows of integers that ranks exchange.
#
#     $SLURMFT_MEMORY_DIR/                the agent's, in shared memory
#         shard-<rank>.<a|b|c>.image/.json  what this node's ranks staged: image and index
#         peers/shard-<shard>.<a|b>.*       copies of other nodes' shards (replicas.Keeper), or what was fetched
#         tries.json                        how often a run began with a snapshot of the memory
#
# A folder on the node's local disk looks like ``peers``, and the staging folder beside the checkpoints like the
# agent's, with the shards of all nodes. An index whose image is missing or too short, a file that is not an index, a
# link, and any other file there are skipped.

MAX_SNAPSHOTS = 6
MAX_SHARDS = 64
"""Of one snapshot on one node: its own ranks' and its peers'."""

ROW_LENGTH = MAX_SNAPSHOTS * (5 + MAX_SHARDS // 2)

DIGEST_PATIENCE_S = 10.0
WRITER_STARTS_S = 2.0
"""From a snapshot until its writer holds it, where that has to be started first."""

_LOOK_S = 0.05
_TRIES = "tries.json"
MAX_COUNTED = 100
_HALF = 32
_TIER_BITS = 2

log = logging.getLogger(__name__)


def scan(
    memory: Path | None, local_disk: Path | None = None, staging: Path | None = None, ranks: Collection[int] = (), *,
    patience_s: float = DIGEST_PATIENCE_S,
) -> list[Holding]:  # fmt: skip
    """Every shard that this node holds, newest first; one that lies there twice is listed once, memory before disk.

    A writer may still be at work on the digests of what its rank has staged: this waits for them, for ``patience_s``
    seconds at most, where nothing newer is complete, and only while there is such a writer. Shards without digests are
    listed all the same then.

    Args:
        staging: the folder beside the checkpoints, where this node's own ``ranks`` go before others.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = _look(memory, local_disk, staging, ranks)
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


def _look(memory: Path | None, local_disk: Path | None, staging: Path | None, ranks: Collection[int]) -> list[Holding]:
    places = [(memory, Tier.MEMORY), (memory / PEERS if memory else None, Tier.PEER), (local_disk, Tier.LOCAL_DISK)]
    found = [one for folder, tier in places if folder is not None for one in holdings_in(folder, tier)]
    staged = holdings_in(staging, Tier.STAGING) if staging is not None else []
    found += [one for one in staged if _rank_of(one.index_path) in ranks]
    found += [one for one in staged if one.index.shards <= MAX_SHARDS]  # of large worlds not, as a row is short
    best: dict[tuple[Name, int], Holding] = {}
    for one in found:
        known = best.get((one.name, one.index.shard))
        if known is None or (one.index.is_hashed and not known.index.is_hashed):
            best[one.name, one.index.shard] = one
    return sorted(best.values(), key=lambda one: (-one.name[2], -one.name[1], -one.name[0], one.index.shard))


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


# --- Shards of a restart that lie in another node's memory travel to where they are needed, from memory to memory ---
# Bytes in tensors of bounded size from one rank to another, one rank for each node; no pickles. Received shards lie in
# the node's memory like a peer's copy, in a folder of its own, verified by the digests of its index.
#
# The process group authenticates nothing. So each piece carries a tag (``system.files``) under a key that is
# derived from the run's key for copies, fresh nonces of both ranks, and the transfer's ranks and content; a piece
# without the right one is neither parsed nor kept, and the shard counts as not supplied.

FETCHED = "fetched"
CHUNK_BYTES = 16 << 20
_HEADER = struct.Struct("!qq")
_CONTEXT = struct.Struct("!qqqqqq?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """A rank's memory for sending and receiving."""

    name: Name | None
    mine: Mapping[int, Holding]
    memory: Path | None
    key: bytes | None
    """The run's, for copies; None where there is none: then nothing is sent, and nothing is taken."""

    nonces: Sequence[bytes]
    """Of each rank, for this supply alone."""

    def tags(self, transfer: Transfer) -> _Tags:
        """For one transfer; both sides come to the same."""
        key = secrets.token_bytes(TAG_BYTES) if self.key is None else self.key  # without a key nothing is right
        name = (0, 0, 0) if self.name is None else self.name
        context = _CONTEXT.pack(*name, transfer.shard, transfer.source, transfer.target, transfer.is_whole)
        nonces = self.nonces[transfer.source], self.nonces[transfer.target]
        return _Tags(derived_key(key, "supply", *nonces, context))


class _Tags:
    """The tags of one transfer: of its lengths, and then of its pieces."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.header = PieceTags(derived_key(key, "lengths"), _HEADER.size)
        self.pieces = PieceTags(b"", 0)

    def begin(self, size_bytes: int) -> None:
        """Pieces of so many bytes in all follow."""
        self.pieces = PieceTags(derived_key(self._key, "pieces"), size_bytes)


def supply(
    team: Team, decision: Decision, offers: Sequence[Offer], mine: Mapping[int, Holding], *,
    wanted: range, memory: Path | None, node_lead: int,
) -> list[tuple[int, int]]:  # fmt: skip
    """Bring the shards of ``decision`` that this rank's node lacks into its memory folder; a collective.

    Afterwards ``fetched(memory, name)`` finds them, on every rank of the node.

    Args:
        mine: this node's own shards of that snapshot (``scan``); only asked of ranks that offered them.
        wanted: the shards that this rank needs every item of. Of all others it gets what is not spread over ranks:
            with FSDP on as many ranks as saved, its own shard is enough.
        node_lead: the rank that offers and fetches for this rank's node: its local rank 0.

    Returns:
        What did not arrive whole, the same on all ranks, at most one for each receiving node: the rank that should have
        supplied it, and the shard. Decide anew without it (``without``).

    Raises:
        CheckpointError: the ranks are out of step with each other.
    """
    wishes, nonces = team.exchange_with_nonces([node_lead, wanted.start, wanted.stop])
    transfers = transfers_of(decision, offers, [(node, range(first, end)) for node, first, end in wishes])
    failed: list[Transfer] = []
    node = _Node(name=decision.name, mine=mine, memory=memory, key=_key(memory) if transfers else None, nonces=nonces)
    if memory is not None and any(transfer.target == team.rank for transfer in transfers):
        with contextlib.suppress(OSError):  # where there is no room for it, each shard fails, and no rank waits
            (memory / FETCHED).mkdir(mode=0o700, exist_ok=True)
    for out, into in rounds_of(team.rank, team.world_size, transfers):
        failed += _exchange_round(team, out, into, node)
    first = [failed[0].source + 1, failed[0].shard] if failed else [0, 0]
    rows = team.exchange(first)
    return [(source - 1, shard) for source, shard in rows if source]


def fetched(memory: Path | None, name: Name | None) -> dict[int, Holding]:
    """The shards of a snapshot that were fetched from other nodes."""
    found = holdings_in(memory / FETCHED, Tier.PEER) if memory is not None else []
    return {one.index.shard: one for one in found if one.name == name}


def remove_fetched(memory: Path | None) -> None:
    """Give the memory back; one rank of the node, once all of them have read."""
    if memory is not None:
        shutil.rmtree(memory / FETCHED, ignore_errors=True)


def _exchange_round(team: Team, out: Sequence[Transfer], into: Sequence[Transfer], node: _Node) -> list[Transfer]:
    """Send and receive piece by piece, both at once; returns the shards that did not arrive."""
    failed: list[Transfer] = []
    sender, receiver = _outgoing(out, node), _incoming(into, node, failed)
    piece, room = next(sender, None), next(receiver, None)
    while piece is not None or room is not None:
        team.send_and_receive(
            (piece, out[0].target) if piece is not None else None, (room, into[0].source) if room is not None else None
        )
        piece = next(sender, None) if piece is not None else None
        room = next(receiver, None) if room is not None else None
    return failed


def _key(memory: Path | None) -> bytes | None:
    try:
        return read_copies_key(memory) if memory is not None else None
    except OSError as error:
        log.warning("no shards travel to or from this node's memory, as it has no key for them: %s", error)
        return None


def _outgoing(transfers: Sequence[Transfer], node: _Node) -> Iterator[torch.Tensor]:
    """The pieces of each shard, each with its tag: its lengths, its index, its items; zeros where it cannot be read."""
    for transfer in transfers:
        tags = node.tags(transfer)
        blob, holding, image = _opened(node.mine.get(transfer.shard) if node.key is not None else None)
        try:
            items = _items(holding.index, transfer) if holding is not None else []
            size_bytes = sum(item.length for item in items)
            header = _HEADER.pack(len(blob), size_bytes)
            yield torch.frombuffer(bytearray(header + tags.header.next_tag(header)), dtype=torch.uint8)
            if holding is None:
                continue
            tags.begin(len(blob) + size_bytes)
            for start in range(0, len(blob), CHUNK_BYTES):
                part = blob[start : start + CHUNK_BYTES]
                yield torch.frombuffer(bytearray(part + tags.pieces.next_tag(part)), dtype=torch.uint8)
            buffer, places = _room(min(CHUNK_BYTES, size_bytes)), ranges_of(items)
            for start in range(0, size_bytes, CHUNK_BYTES):
                piece = buffer[: min(CHUNK_BYTES, size_bytes - start) + TAG_BYTES]
                view = _view(piece)
                _read(image, places, view[:-TAG_BYTES])
                view[-TAG_BYTES:] = tags.pieces.next_tag(view[:-TAG_BYTES])
                yield piece
        finally:
            if image >= 0:
                os.close(image)


def _items(index: ShardIndex, transfer: Transfer) -> list[Item]:
    """The items of a shard that are sent; both sides compute the same."""
    return [one for one in index.items if transfer.is_whole or one.kind == "object" or one.sizes == one.shape]


def _opened(holding: Holding | None) -> tuple[bytes, Holding | None, int]:
    """Index and open image; nothing where this node has it no more."""
    if holding is None:
        return b"", None, -1
    try:
        blob = read_bytes(holding.index_path, limit_bytes=MAX_INDEX_BYTES)
        return blob, holding, open_regular(holding.image)
    except OSError as error:
        log.warning("shard %d cannot be supplied: %s", holding.index.shard, error)
        return b"", None, -1


def _read(image: int, places: list[tuple[int, int]], view: memoryview) -> None:
    """Fill ``view`` from the first of ``places``, and take off what was read."""
    try:
        while view and (count := os.preadv(image, [view[: places[0][1]]], places[0][0])):
            (offset, length), view = places[0], view[count:]
            places[:1] = [(offset + count, length - count)] if count < length else []
    except OSError as error:
        log.warning("a shard cannot be read: %s", error)
    view[:] = bytes(len(view))  # the receiver will see by the digests that this is not it


def _incoming(
    transfers: Sequence[Transfer], node: _Node, failed: list[Transfer]
) -> Generator[torch.Tensor, None, None]:
    """Room for each piece in turn; a received piece is taken when the next one is requested."""
    for transfer in transfers:
        tags, header = node.tags(transfer), _room(_HEADER.size)
        yield header
        lengths, tag = _parted(header)
        index_bytes, size_bytes = _HEADER.unpack(lengths)
        if not index_bytes:
            failed.append(transfer)
            continue
        if not (0 < index_bytes <= MAX_INDEX_BYTES and size_bytes >= 0):
            raise CheckpointError(f"rank {transfer.source} sends no shard: {index_bytes} and {size_bytes} bytes")
        room, blob = _room(min(CHUNK_BYTES, max(index_bytes, size_bytes))), bytearray()
        is_authentic = tags.header.is_next(lengths, tag)
        tags.begin(index_bytes + size_bytes)
        for start in range(0, index_bytes, CHUNK_BYTES):
            piece = room[: min(CHUNK_BYTES, index_bytes - start) + TAG_BYTES]
            yield piece
            data, tag = _parted(piece)
            is_authentic = is_authentic and tags.pieces.is_next(data, tag)
            if is_authentic:  # other pieces are received and dropped, so that the sender is not left waiting
                blob += data
        arrival = _Arrival(transfer, bytes(blob) if is_authentic else None, size_bytes, node)
        for start in range(0, size_bytes, CHUNK_BYTES):
            piece = room[: min(CHUNK_BYTES, size_bytes - start) + TAG_BYTES]
            yield piece
            data, tag = _parted(piece)
            arrival.take(data, is_authentic=is_authentic and tags.pieces.is_next(data, tag))
        if not arrival.finish():
            failed.append(transfer)


class _Arrival:
    """One shard that comes in. An error is kept until all of it is received, so that the sender does not wait."""

    def __init__(self, transfer: Transfer, blob: bytes | None, size_bytes: int, node: _Node) -> None:
        self._transfer = transfer
        self._incoming: Incoming | None = None
        try:
            if node.memory is None:
                raise StorageError("this rank has no memory folder")
            if blob is None:
                raise Mismatch("its index is not authentic")
            index = parse_index(blob, "its index")
            if index.identity != node.name or index.shard != transfer.shard:
                raise Mismatch("it is another one")
            items = _items(index, transfer)
            if sum(item.length for item in items) != size_bytes or not index.is_hashed:
                raise Mismatch("its index does not describe it")
            if reason := fits(size_bytes, node.memory):
                raise StorageError(reason)  # it is read from disk instead, without a copy in memory
            self._incoming = Incoming(node.memory / FETCHED, index, items)
        except (Damaged, Mismatch, StorageError, OSError) as error:
            self._give_up(error)

    def take(self, piece: memoryview, *, is_authentic: bool) -> None:
        """Take the next bytes; once some are not authentic, all later ones are dropped."""
        if self._incoming is not None:
            try:
                if not is_authentic:
                    raise Mismatch("a piece is not authentic")
                self._incoming.write(piece)
            except (Mismatch, OSError) as error:
                self._give_up(error)

    def finish(self) -> bool:
        """Whether all of it is there and right."""
        if self._incoming is not None:
            try:
                with self._incoming as incoming:
                    incoming.finish()
            except (Mismatch, OSError) as error:
                self._give_up(error)
        return self._incoming is not None

    def _give_up(self, error: Exception) -> None:
        log.warning("shard %d from rank %d: %s", self._transfer.shard, self._transfer.source, error)
        if self._incoming is not None:
            self._incoming.discard()
            self._incoming = None


def _room(length: int) -> torch.Tensor:
    """For so many bytes and their tag."""
    return torch.empty(length + TAG_BYTES, dtype=torch.uint8)


def _parted(piece: torch.Tensor) -> tuple[memoryview, memoryview]:
    """A piece, and the tag behind it."""
    view = _view(piece)
    return view[:-TAG_BYTES], view[-TAG_BYTES:]


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of bytes in main memory."""
    array: Any = tensor.numpy()
    return memoryview(array)


# --- memory sources ---


def same_state(directory: Path, old: str, new: str) -> None:
    """A state that lay in memory only is saved again, under another name: its tries are kept."""
    memory, staging = own_memory_folder(), directory / STAGING
    if memory is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        inherit_tries(memory, old, new)
    if staging.is_dir() and os.environ.get("RANK", "0") == "0":
        inherit_tries(staging, old, new)


class MemorySources:
    """The memory tiers of one load. Every method is a collective, but ``sources`` and ``close``.

    Args:
        committed: the newest checkpoint on disk; None where there is none.
        directory: of the checkpoints.
        generation: of this attempt.
        quarantined: checkpoints that runs died from; their copies in memory are no better.
        doubts: states that replicas differed in, or may have.
    """

    def __init__(
        self, team: Team, committed: Committed | None, *, directory: Path, generation: int,
        quarantined: Collection[Name] = (), doubts: Collection[Doubt] = (),
    ) -> None:  # fmt: skip
        self._team, self._committed, self._generation = team, committed, generation
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._node_lead = team.rank - local_rank if team.world_size > 1 else team.rank
        self._memory = memory_folder_of(directory)
        disk = WorkerSettings.from_environment(os.environ).checkpoint.local_directory
        self._local = _local_folder(Path(disk), directory) if disk else None
        self._offers_for_node = team.rank == self._node_lead
        self._staging = directory / STAGING if (directory / STAGING).is_dir() else None
        ranks = range(self._node_lead, self._node_lead + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._held = scan(self._memory, self._local, self._staging, ranks)
        tries = [tries_of(self._memory), tries_of(self._staging)]
        row = [0] * ROW_LENGTH
        if self._offers_for_node:
            row = to_row(self._held, lambda name: max(count(name) for count in tries))
        self._offers = from_rows(team.exchange(row))
        self._refused: dict[Name, str] = {}
        doubted = {each.name for each in self._offers if any(one.covers(*each.name[:2]) for one in doubts)}
        self._quarantined = frozenset(quarantined) | doubted
        self.reason = ""
        """Why nothing was read from memory where something newer lay there; empty where nothing did."""

    def decide(self) -> Decision | None:
        """The snapshot to read, at least in part from memory; None where everything comes from disk."""
        decision = choose_snapshot(
            self._offers, self._committed, generation=self._generation, quarantined=self._quarantined,
            refused=self._refused,
        )  # fmt: skip
        self.reason = decision.reason if decision.skipped else ""
        if decision.name is None or all(supplier is DISK for supplier in decision.suppliers):
            return None
        return decision

    def bring(self, decision: Decision, wanted: range) -> bool:
        """Have every node fetch what it lacks; False where something did not arrive, and all must decide anew.

        Args:
            wanted: the shards that this rank needs whole; of others it gets what is not spread over ranks.
        """
        identity = Identity(*(decision.name or (0, 0, 0)))
        if not decision.is_committed:
            for folder in (
                self._memory if self._offers_for_node else None,
                self._staging if self._team.is_lead else None,
            ):
                if folder is not None:
                    note_try(folder, decision.name or (0, 0, 0), generation=self._generation)
        mine = {one.index.shard: one for one in self._held if one.index.identity == identity}
        lacking = supply(
            self._team, decision, self._offers, mine, wanted=wanted, memory=self._memory, node_lead=self._node_lead
        )
        for rank, shard in lacking:
            self._offers = without(self._offers, rank, decision.name or (0, 0, 0), [shard])
        return not lacking

    def sources(self, identity: Identity) -> dict[int, Source]:
        """The shards that lie on this node now."""
        mine = {one.index.shard: one for one in self._held if one.index.identity == identity and one.index.is_hashed}
        return {
            shard: Source(
                image=one.image, index=one.index, own_place=one.index_path if one.tier is Tier.MEMORY else None
            )
            for shard, one in (fetched(self._memory, identity) | mine).items()
        }

    def refuse(self, decision: Decision, reason: str) -> None:
        """Some rank found this one damaged: never again."""
        if decision.name is not None:
            self._refused[decision.name] = reason

    def close(self) -> None:
        """Give back what was fetched; every rank has read by now, as all have agreed on how it went."""
        if self._offers_for_node:
            remove_fetched(self._memory)


def _local_folder(local_directory: Path, directory: Path) -> Path | None:
    try:
        return local_folder(local_directory, directory)
    except (OSError, StorageError) as error:
        log.warning("nothing is read from %s: %s", local_directory, error)
        return None
