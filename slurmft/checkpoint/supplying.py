"""Shards of a restart that lie in another node's memory travel to where they are needed, over the process group.

Bytes in tensors of bounded size from one rank to another, one rank for each node; no pickles. What arrives lies in the
node's memory like a peer's copy, in a folder of its own, verified by the digests of its index.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurmft.checkpoint.memory_limits import fits
from slurmft.checkpoint.offers import Holding, holdings_in, name_of
from slurmft.checkpoint.shard_index import MAX_INDEX_BYTES, Item, ShardIndex, read_index
from slurmft.checkpoint.slots import Incoming, Mismatch, ranges_of
from slurmft.checkpoint.team import Team
from slurmft.errors import CheckpointError, StorageError
from slurmft.policy.supply import Transfer, plan, rounds_of
from slurmft.policy.tiers import Decision, Name, Offer, Tier

FETCHED = "fetched"
CHUNK_BYTES = 16 << 20
_HEADER_BYTES = 16
_WORD_BITS = 62

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NotSupplied:
    """A shard that did not arrive whole; the same on all ranks."""

    rank: int
    """Who should have supplied it."""

    shard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """What a rank sends from and receives into."""

    name: Name | None
    mine: Mapping[int, Holding]
    memory: Path | None


def supply(
    team: Team, decision: Decision, offers: Sequence[Offer], mine: Mapping[int, Holding], *,
    wanted: Collection[int], memory: Path | None, node_lead: int,
) -> list[NotSupplied]:  # fmt: skip
    """Bring the shards of ``decision`` that this rank's node lacks into its memory folder; a collective.

    Afterwards ``fetched(memory, name)`` finds them, on every rank of the node.

    Args:
        mine: this node's own shards of that snapshot (``offers.scan``); only asked of ranks that offered them.
        wanted: the shards that this rank needs every item of. Of all others it gets what is not spread over ranks:
            with FSDP on as many ranks as saved, its own shard is enough.
        node_lead: the rank that offers and fetches for this rank's node: its local rank 0.

    Returns:
        What could not be supplied, at most one for each receiving node; decide anew without it (``supply.without``).

    Raises:
        CheckpointError: the ranks lost each other's thread.
    """
    bits = team.exchange([node_lead, *_bits(wanted, len(decision.suppliers))])
    transfers = plan(decision, offers, [(row[0], _shards(row[1:])) for row in bits])
    failed: list[Transfer] = []
    node = _Node(name=decision.name, mine=mine, memory=memory)
    if memory is not None and any(transfer.target == team.rank for transfer in transfers):
        (memory / FETCHED).mkdir(mode=0o700, exist_ok=True)
    for out, into in rounds_of(team.rank, team.world_size, transfers):
        failed += _exchange_round(team, out, into, node)
    first = [failed[0].source + 1, failed[0].shard] if failed else [0, 0]
    rows = team.exchange(first)
    return [NotSupplied(rank=source - 1, shard=shard) for source, shard in rows if source]


def fetched(memory: Path | None, name: Name | None) -> dict[int, Holding]:
    """The shards of a snapshot that were fetched from other nodes."""
    found = holdings_in(memory / FETCHED, Tier.PEER) if memory is not None else []
    return {one.index.shard: one for one in found if one.name == name}


def remove_fetched(memory: Path | None) -> None:
    """Give the memory back; one rank of the node, once all of them have read."""
    if memory is not None:
        shutil.rmtree(memory / FETCHED, ignore_errors=True)


def _exchange_round(team: Team, out: Sequence[Transfer], into: Sequence[Transfer], node: _Node) -> list[Transfer]:
    """Send and receive piece by piece, both at once; returns what did not arrive."""
    failed: list[Transfer] = []
    sender = _outgoing(out, node.mine, team.device)
    receiver = _incoming(into, node, failed, team.device)
    piece, room = next(sender, None), next(receiver, None)
    while piece is not None or room is not None:
        waits = []
        if piece is not None:
            waits.append(dist.isend(piece, out[0].target))
        if room is not None:
            waits.append(dist.irecv(room, into[0].source))
        for wait in waits:
            if wait is not None:
                wait.wait()
        piece = next(sender, None) if piece is not None else None
        room = next(receiver, None) if room is not None else None
    return failed


def _outgoing(
    transfers: Sequence[Transfer], mine: Mapping[int, Holding], device: torch.device
) -> Iterator[torch.Tensor]:
    """The pieces of each shard: its lengths, its index, its items; zeros where something cannot be read."""
    for transfer in transfers:
        blob, holding, image = _opened(mine.get(transfer.shard))
        try:
            items = _items(holding.index, transfer) if holding is not None else []
            size_bytes = sum(item.length for item in items)
            yield torch.tensor([len(blob), size_bytes], dtype=torch.int64).view(torch.uint8).to(device)
            if holding is None:
                continue
            for start in range(0, len(blob), CHUNK_BYTES):
                yield torch.frombuffer(bytearray(blob[start : start + CHUNK_BYTES]), dtype=torch.uint8).to(device)
            buffer, places = torch.empty(min(CHUNK_BYTES, size_bytes), dtype=torch.uint8), ranges_of(items)
            for start in range(0, size_bytes, CHUNK_BYTES):
                piece = buffer[: size_bytes - start]
                _read(image, places, piece)
                yield piece.to(device)
        finally:
            if image >= 0:
                os.close(image)


def _items(index: ShardIndex, transfer: Transfer) -> list[Item]:
    """What of a shard travels; both sides come to the same."""
    return [one for one in index.items if transfer.is_whole or one.kind == "object" or one.sizes == one.shape]


def _opened(holding: Holding | None) -> tuple[bytes, Holding | None, int]:
    """Index and open image; nothing where this node has it no more."""
    if holding is None:
        return b"", None, -1
    try:
        blob = holding.index_path.read_bytes()
        return blob, holding, os.open(holding.image, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("shard %d cannot be supplied: %s", holding.index.shard, error)
        return b"", None, -1


def _read(image: int, places: list[tuple[int, int]], piece: torch.Tensor) -> None:
    """Fill ``piece`` from the first of ``places``, and take off what was read."""
    view = _view(piece)
    try:
        while view and (count := os.preadv(image, [view[: places[0][1]]], places[0][0])):
            (offset, length), view = places[0], view[count:]
            places[:1] = [(offset + count, length - count)] if count < length else []
    except OSError as error:
        log.warning("a shard cannot be read: %s", error)
    view[:] = bytes(len(view))  # the receiver will see by the digests that this is not it


def _incoming(
    transfers: Sequence[Transfer], node: _Node, failed: list[Transfer], device: torch.device
) -> Generator[torch.Tensor, None, None]:
    """Room for each piece in turn; what lies in it is taken when the next one is asked for."""
    for transfer in transfers:
        lengths = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=device)
        yield lengths
        index_bytes, size_bytes = lengths.cpu().view(torch.int64).tolist()
        if not index_bytes:
            failed.append(transfer)
            continue
        if not (0 < index_bytes <= MAX_INDEX_BYTES and size_bytes >= 0):
            raise CheckpointError(f"rank {transfer.source} sends no shard: {index_bytes} and {size_bytes} bytes")
        room = torch.empty(min(CHUNK_BYTES, max(index_bytes, size_bytes)), dtype=torch.uint8, device=device)
        blob = bytearray()
        for start in range(0, index_bytes, CHUNK_BYTES):
            piece = room[: index_bytes - start]
            yield piece
            blob += _view(piece.cpu())
        arrival = _Arrival(transfer, bytes(blob), size_bytes, node)
        for start in range(0, size_bytes, CHUNK_BYTES):
            piece = room[: size_bytes - start]
            yield piece
            arrival.take(_view(piece.cpu()))
        if not arrival.finish():
            failed.append(transfer)


class _Arrival:
    """One shard that comes in. An error is kept until all of it has gone by, so that the sender is not left waiting."""

    def __init__(self, transfer: Transfer, blob: bytes, size_bytes: int, node: _Node) -> None:
        self._transfer = transfer
        self._incoming: Incoming | None = None
        try:
            if node.memory is None:
                raise StorageError("this rank has no memory folder")
            index = _parsed(blob, node.memory / FETCHED / f".index-{transfer.shard}")
            if name_of(index.identity) != node.name or index.shard != transfer.shard:
                raise Mismatch("it is another one")
            items = _items(index, transfer)
            if sum(item.length for item in items) != size_bytes or not index.is_hashed:
                raise Mismatch("its index does not describe it")
            if reason := fits(size_bytes, node.memory):
                raise StorageError(reason)  # it is read from disk instead, without a copy in memory
            self._incoming = Incoming(node.memory / FETCHED, index, items)
        except (Mismatch, StorageError, OSError) as error:
            self._give_up(error)

    def take(self, piece: memoryview) -> None:
        """The next bytes."""
        if self._incoming is not None:
            try:
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


def _parsed(blob: bytes, path: Path) -> ShardIndex:
    try:
        path.write_bytes(blob)
        index = read_index(path)
    finally:
        path.unlink(missing_ok=True)
    if index is None:
        raise StorageError("its index vanished")
    return index


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of bytes in main memory."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _bits(shards: Collection[int], count: int) -> list[int]:
    words = [0] * -(-count // _WORD_BITS)
    for shard in shards:
        words[shard // _WORD_BITS] |= 1 << shard % _WORD_BITS
    return words


def _shards(words: Sequence[int]) -> set[int]:
    return {
        number * _WORD_BITS + bit for number, word in enumerate(words) for bit in range(_WORD_BITS) if word >> bit & 1
    }
