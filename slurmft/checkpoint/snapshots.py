"""One rank's snapshots on their way from the trainer's tensors to the disk.

The training loop only waits for the copy into shared memory. The writer process reports the progress of each copy, and
a thread of this process takes it in.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from slurmft.checkpoint.agreement import MAX_UNCOMMITTED
from slurmft.checkpoint.image import Layout, Packed
from slurmft.checkpoint.image_file import ShardIndex, digest_of, is_held, read_index, write_index
from slurmft.checkpoint.memory_sources import forget_staged
from slurmft.checkpoint.state import FlatState
from slurmft.checkpoint.write_requests import NICE, CommitOrder, Report, Standing, WriterClient, WriteRequest, reached
from slurmft.errors import CheckpointError, Fenced, StorageError, UsageError
from slurmft.policy.worker_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity, ranks_of_this_node
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE
from slurmft.system.files import check_private, make_private_folder, open_regular
from slurmft.system.processes import fits
from slurmft.trainer import streams
from slurmft.trainer.streams import Device

# --- Pages of a snapshot's place that the device copies into by itself: pinned in the background, piece by piece ---
# A copy from a GPU into other memory goes through a buffer of the driver's, at a fraction of the speed, and holds its
# thread. Pinned pages can be neither moved nor reclaimed, so there is a budget for them, and where the limit of locked
# memory or the driver forbids them, copies go through the driver's buffer.

PIECE_BYTES = 16 << 20
"""How much is pinned at once: the driver holds its lock meanwhile, and the training launches nothing; and how much is
copied at once, as one copy must not cross the edge of what was pinned."""

SHARE = 0.25
"""Of the node's memory, for the pinned pages of all its ranks together."""

log = logging.getLogger(__name__)


class Budget:
    """The bytes that one rank may pin, in all its places."""

    def __init__(self, limit_bytes: int, reason: str) -> None:
        self._left_bytes, self._reason = limit_bytes, reason
        self._lock = threading.Lock()

    @classmethod
    def of_this_rank(cls) -> Budget:
        """Its share of the node's memory, or the limit of locked memory (``ulimit -l``) where that is less."""
        node_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        share = int(node_bytes * SHARE) // ranks
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY and soft < share:
            return cls(soft, f"the limit of locked memory (ulimit -l) is {soft >> 10} KiB")
        return cls(share, f"that is {SHARE:.0%} of the node's memory for {ranks} ranks")

    def take(self, size_bytes: int) -> str:
        """Take so much off; why not, where it is spent."""
        with self._lock:
            if size_bytes > self._left_bytes:
                return self._reason
            self._left_bytes -= size_bytes
            return ""

    def give_back(self, size_bytes: int) -> None:
        """Return the budget of unpinned bytes."""
        with self._lock:
            self._left_bytes += size_bytes


class Pinned:
    """The pinned pieces of one mapping.

    Args:
        address: of its first byte, on a page.
        may_go_on: cleared while the training waits for a copy.
    """

    def __init__(
        self, device: Device, address: int, size_bytes: int, budget: Budget, may_go_on: threading.Event
    ) -> None:
        self._device, self._address, self._size_bytes = device, address, size_bytes
        self._budget, self._may_go_on = budget, may_go_on
        self._pieces: list[tuple[int, int]] = []
        self._is_wanted = True
        self._thread = threading.Thread(target=self._pin, name="slurmft-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        """So far."""
        return sum(size_bytes for _, size_bytes in self._pieces)

    def wait(self) -> None:
        """Until as much is pinned as can be."""
        self._thread.join()

    def release(self) -> None:
        """Unpin everything; before the memory is unmapped."""
        self._is_wanted = False
        self._may_go_on.set()
        self._thread.join()
        while self._pieces:
            address, size_bytes = self._pieces.pop()
            self._device.unregister(address)
            self._budget.give_back(size_bytes)

    def _pin(self) -> None:
        self._device.use()
        for start in range(0, self._size_bytes, PIECE_BYTES):
            self._may_go_on.wait()
            if not self._is_wanted:
                return None
            size_bytes = min(PIECE_BYTES, self._size_bytes - start)
            if reason := self._budget.take(size_bytes):
                return self._say(start, reason)
            if reason := self._device.register(self._address + start, size_bytes):
                self._budget.give_back(size_bytes)
                return self._say(start, reason)
            self._pieces.append((self._address + start, size_bytes))
        return None

    def _say(self, pinned_bytes: int, reason: str) -> None:
        log.info(
            "%d of %d MiB of a snapshot's memory are pinned, the rest is copied more slowly: %s",
            pinned_bytes >> 20, self._size_bytes >> 20, reason,
        )  # fmt: skip


def in_pieces(target: torch.Tensor, source: torch.Tensor, base: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A copy as copies of which none crosses an edge between pieces.

    Args:
        target: contiguous, in the memory whose first byte lies at ``base``.
        source: of the same dtype and shape.
    """
    begin = target.data_ptr() - base
    first, last = begin // PIECE_BYTES, (begin + target.nbytes - 1) // PIECE_BYTES
    if first >= last:
        yield target, source
        return
    size = target.element_size()
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    edges = [0, *((edge * PIECE_BYTES - begin) // size for edge in range(first + 1, last + 1)), target.numel()]
    for start, end in itertools.pairwise(edges):
        yield flat_target[start:end], flat_source[start:end]


# --- Where a rank's snapshots lie: a few places in shared memory, which outlive the process that fills them ---
#     <memory folder>/shard-<rank>.a.image     the file's exact bytes, warm from save to save
#     <memory folder>/shard-<rank>.a.json      its ShardIndex; there only while the image is whole
#
# The folder is the agent's (``SLURMFT_MEMORY_DIR``), so a snapshot outlives its worker; without an agent it is the
# process's own and goes with it. A copy is never torn: the index goes before the first byte changes, and comes after
# the last one.

PLACES = "ab"
PLACES_WITH_COPIES = "abc"
"""With copies of steps between saves: one that is whole on all ranks, one on its way, and a save's."""

_PAGE = mmap.PAGESIZE


class SnapshotSlot:
    """One of a rank's places for a snapshot.

    Args:
        may_warm: cleared while the training waits for a copy.
    """

    def __init__(self, folder: Path, name: str, may_warm: threading.Event) -> None:
        self.image = folder / f"{name}.image"
        self.index = folder / f"{name}.json"
        self.memory: mmap.mmap | None = None
        self._may_warm = may_warm
        self._warming: threading.Thread | None = None
        self._is_wanted = False
        self._pinned: Pinned | None = None
        self.layout: Layout | None = None
        """The layout whose fixed bytes the image has already, and ``views``; set by the caller of ``begin``."""

        self.views: list[torch.Tensor] = []
        self.holds: Identity | None = None
        with contextlib.suppress(StorageError):
            found = read_index(self.index)
            self.holds = found.identity if found is not None else None

    def begin(self, size_bytes: int) -> mmap.mmap:
        """Make room for an image; the old one here is gone from now on, also for other processes.

        Raises:
            OSError: there is not so much memory.
        """
        self.index.unlink(missing_ok=True)
        self.holds = None
        self.stop_warming()
        if self.memory is None or len(self.memory) < size_bytes:
            self._map(size_bytes)
        assert self.memory is not None
        return self.memory

    def warm(self, size_bytes: int) -> None:
        """Make room in the background, where nothing lies here yet: new pages cost more than the copy into them."""
        if self.memory is None and self.holds is None and self._warming is None:
            self._warming = threading.Thread(target=self._warm, args=(size_bytes,), daemon=True, name="slurmft-warm")
            self._warming.start()

    def stop_warming(self) -> None:
        """Return when no thread makes room here any more; at most a piece later."""
        if self._warming is not None:
            self._is_wanted = True
            self._may_warm.set()
            self._warming.join()
            self._warming = None

    @property
    def address(self) -> int:
        """Of the first byte of its memory."""
        assert self.memory is not None
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def pin(self, device: Device, budget: Budget) -> None:
        """Have the device copy into this place by itself, as far as that is allowed; returns at once."""
        if self._pinned is None and self.memory is not None and not self.is_warming:
            self._pinned = Pinned(device, self.address, len(self.memory), budget, self._may_warm)

    def unmap(self) -> None:
        """Release the memory."""
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self.memory = self.layout = None
        self.views = []

    @property
    def is_warming(self) -> bool:
        """Whether room is being made now."""
        return self._warming is not None and self._warming.is_alive()

    def _warm(self, size_bytes: int) -> None:
        """Piece by piece, as a system that has to find the memory first may take a second for each gigabyte of it."""
        with contextlib.suppress(OSError):  # the next user of the place gets the same error, and reports it
            os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux it is this thread's alone
            descriptor = _open_image(self.image)
            try:
                for start in self._pieces(size_bytes):
                    os.posix_fallocate(descriptor, start, min(PIECE_BYTES, size_bytes - start))
            finally:
                os.close(descriptor)
            if self._is_wanted:
                return
            self._map(size_bytes)
            address = self.address
            for start in self._pieces(size_bytes):  # in this process's page table as well
                ctypes.memset(address + start, 0, min(PIECE_BYTES, size_bytes - start))

    def _pieces(self, size_bytes: int) -> Iterator[int]:
        for start in range(0, size_bytes, PIECE_BYTES):
            self._may_warm.wait()
            if self._is_wanted:
                return
            yield start

    def complete(self, index: ShardIndex) -> None:
        """The image is whole: write its index."""
        write_index(self.index, index, durable=False)
        self.holds = index.identity

    def _map(self, size_bytes: int) -> None:
        self.unmap()  # views of the old one keep it; the file grows under them
        rounded = -(-size_bytes // _PAGE) * _PAGE
        descriptor = _open_image(self.image)
        try:
            rounded = max(rounded, os.fstat(descriptor).st_size)
            os.posix_fallocate(descriptor, 0, rounded)  # a store into a page without memory would kill the process
            self.memory = mmap.mmap(descriptor, rounded)
        finally:
            os.close(descriptor)


class Arena:
    """The places of one rank, in the agent's folder; without one, in a folder of the process's own.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, rank: int, folder: Path | None, places: str = PLACES) -> None:
        self._private = None
        if folder is None:
            self._private = make_private_folder()
            folder = self._private.path
        self.folder = folder
        self.folder.mkdir(mode=0o700, exist_ok=True)
        check_private(self.folder)  # beside the checkpoints, another user may have made it first
        self._may_warm = threading.Event()
        self._may_warm.set()
        self._budget: Budget | None = None
        self.places = [SnapshotSlot(self.folder, f"shard-{rank}.{name}", self._may_warm) for name in places]

    def free(self, busy: Iterable[Identity]) -> SnapshotSlot | None:
        """The place whose snapshot is the oldest; None where all are ``busy``: still being read, or needed.

        A place that is still being warmed comes last: to wait for it would take longer than the copy.

        The reader may also be the writer of a dead worker, which its successor can only see by its lock.
        """
        taken = set(busy)
        free = [place for place in self.places if place.holds not in taken and not is_held(place.image)]
        return min(
            free, key=lambda place: (place.is_warming, place.holds.age if place.holds else (-1, -1)), default=None
        )

    @property
    def is_private(self) -> bool:
        """Whether the folder goes with this process."""
        return self._private is not None

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """The training waits: nothing else here takes processors and memory meanwhile."""
        self._may_warm.clear()
        try:
            yield
        finally:
            self._may_warm.set()

    def warm_up(self, size_bytes: int) -> None:
        """Make room in every place that was never used."""
        for place in self.places:
            place.warm(size_bytes)

    def pin(self, device: Device) -> None:
        """Pin what is mapped, in the background, for copies from this device."""
        self._budget = self._budget or Budget.of_this_rank()
        for place in self.places:
            place.pin(device, self._budget)

    def close(self) -> None:
        """Release the memory, and remove a folder of our own."""
        for place in self.places:
            place.stop_warming()  # it stores into memory that is unmapped now
            place.unmap()
        if self._private is not None:
            self._private.close()


def _open_image(path: Path) -> int:
    return open_regular(path, os.O_RDWR | os.O_CREAT, follow=False, owners={os.geteuid()})


# --- The copy of the trainer's tensors into shared memory, which the training waits for ---


def copy_into(
    views: list[torch.Tensor], sources: list[torch.Tensor], base: int = 0, *, within_s: float | None = None
) -> Device | None:
    """Copy each source into its view; from a GPU beside all that it does, waiting for nothing else.

    The caller knows that the sources are what they are to be: it has waited for all that the host has asked the device
    for (``streams.settle``), or has seen the events behind what has written them. Returns the device, or the first one.

    Args:
        base: address of the memory that the views lie in.
        within_s: the longest time to wait for a device.

    Raises:
        TimeoutError: the device did not do it in time.
    """
    with torch.no_grad():
        devices = streams.devices(sources)
        if not devices:
            if views:
                torch._foreach_copy_(views, sources)
            return None
        pairs = list(zip(views, sources, strict=True))
        for view, source in pairs:
            if not streams.is_on_device(source):
                view.copy_(source)
        for device in devices:
            streams.copy_from_device(device, _pieces_of(device, pairs, base), within_s)
        return devices[0]


def _pieces_of(
    device: Device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], base: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of what is on ``device``, made one by one: a source whose values do not follow each other in memory is
    put in order by a kernel, which has to be on the stream of the copies."""
    for view, source in pairs:
        if streams.device_of(source) is device:
            yield from in_pieces(view, source, base)


# --- step places ---
# Which of a rank's snapshots are copies of steps between saves: the one on its way, and the one that is needed.


@dataclass(kw_only=True, slots=True)
class StepPlaces:
    """Of one rank. ``ended`` is written by the thread that hears of the writer, everything else by the trainer's."""

    current: Identity | None = None
    """The newest one that was handed to the writer."""

    needed: Identity | None = None
    """The newest one that all ranks have, with their peers: not written over before there is another."""

    ended: Report | None = None
    """Its writer's last word on the current one."""

    problem: str = ""
    """Why there is no place for any."""

    def hear(self, report: Report) -> None:
        """Take in a report on the current one."""
        if report.final:
            self.ended = report


# --- One rank's snapshots on their way from the trainer's tensors to the disk ---

CLOSE_S = 600.0
"""How long the end of a process waits for its last save; the memory that holds it would go with the process."""

FAILING_S = 20.0
"""The same for one that the disk refuses."""

Destination = Literal["disk", "peers"]
"""Where a snapshot goes from its place in memory: a save to disk (and to peers, and the local disk), as configured; the
copy of a step between two saves to peers alone, if there are any."""

LOOK_S = 0.5
SOON_S = 2.0
"""How long a failed run waits for a place to keep its last step in, before a save that waits has to give way."""

DEVICE_S = 15.0
"""How long it waits for a device to copy its state; the agent waits no longer (``agent.agent``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """A state that is about to be copied: everything but the copy is done."""

    flat: FlatState
    layout: Layout
    packed: list[Packed]
    place: SnapshotSlot | None
    """Where to; None while all places are in use."""


class Snapshots:
    """The places, the writer, and the state of each snapshot. Public methods but ``on_report`` for one thread.

    Args:
        memory: the folder for copies, which outlives this process; None for one that goes with it.
        spill: a folder for copies that do not fit into memory.
        on_committed, on_failed: called in the reporting thread: step and seconds, or step and errno.
    """

    def __init__(
        self, settings: CheckpointSettings, *, memory: Path | None, spill: Path,
        on_committed: Callable[[Identity, float], None], on_failed: Callable[[int, int, str], None],
    ) -> None:  # fmt: skip
        self._settings, self._memory, self._spill = settings, memory, spill
        self._has_spilled = True
        """Whether the folder beside the checkpoints may hold snapshots of this rank, or of an attempt before it."""

        self._on_committed, self._on_failed = on_committed, on_failed
        self._arena: Arena | None = None
        self._writer: WriterClient | None = None
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), 1
        self._is_memory_chosen = False
        self._layout: Layout | None = None
        self._known: dict[Identity, Standing] = {}
        self._lock = threading.Lock()
        self._fenced: Fenced | None = None
        self._kept: Identity | None = None
        self._device: Device | None = None
        """Where the newest copy came from; None for main memory."""

        self._settled: Identity | None = None
        self._pid = os.getpid()
        self.copies = StepPlaces()
        self.sends_saves = True
        """Whether peers get copies of saves; not of steps alone."""

    @property
    def arena(self) -> Arena:
        """Made when it is needed first."""
        if self._arena is None:
            has_copies = self._settings.peer_interval and self._memory is not None
            self._arena = Arena(self._rank, self._memory, PLACES_WITH_COPIES if has_copies else PLACES)
        return self._arena

    def prepare(self, flat: FlatState, *, rank: int, world_size: int, to: Destination = "disk") -> LaidOut:
        """Lay ``flat`` out, and find a place for it.

        Raises:
            Fenced: a newer attempt owns the run; the writer has found out.
            CheckpointError, UsageError: something in it cannot be saved.
            OSError: there is no memory for it.
        """
        if self._fenced is not None:
            raise self._fenced
        self.take_place(rank, world_size)
        if self._layout is None or self._layout.shards != world_size or not self._layout.matches(flat.tensors):
            self._layout = Layout.plan(
                flat.tensors, shard=rank, shards=world_size, paths=flat.paths, of_lead=flat.of_lead
            )
        packed = self._layout.pack(flat.objects)
        if not self._is_memory_chosen:
            self._is_memory_chosen = True
            self._choose_memory(self._layout.capacity_bytes(packed))
        if to == "peers" and self.copies.problem:
            raise OSError(errno.ENOMEM, self.copies.problem)
        return LaidOut(flat=flat, layout=self._layout, packed=packed, place=self.free(to))

    def take_place(self, rank: int, world_size: int) -> None:
        """Set the rank and world size, which name its places in memory."""
        if self._arena is not None and self._rank != rank:
            raise UsageError(f"this checkpoint manager was rank {self._rank}'s, and now rank {rank} uses it")
        self._rank, self._world_size = rank, world_size

    @property
    def under_way(self) -> tuple[int, int]:
        """How many saves are, and the commit of the one that waits until another one is written; 0 where none does."""
        unwritten = [one for one in self._busy() if one != self.copies.current]
        return len(self._saves()), unwritten[-1].commit if len(unwritten) > 1 else 0

    def make_room(self) -> None:
        """Give up a snapshot that waits behind another one; what a failed run keeps is newer."""
        for identity in (self.copies.current, *self._saves()[1:]):
            if identity is not None:
                self.give_up(identity)

    def stage(
        self, prepared: LaidOut, identity: Identity, folder: Path, *, to: Destination = "disk",
        order: CommitOrder | None = None, urgent: bool = False,
    ) -> None:  # fmt: skip
        """Copy the state into its place, and hand it to the writer. When this returns, the trainer may change it.

        The writer makes it durable in ``folder``; rank 0 gives an ``order`` to commit it. What goes to peers alone it
        hashes and sends, and ``copies`` gets to know the end of that.

        Raises:
            OSError: there is no memory for it.
        """
        place = self._beside_what_is_kept(prepared.place, identity)
        _, index = self._copy(place, prepared, identity)
        reached("staged")
        place.complete(index)
        reached("index in place")
        self.arena.warm_up(prepared.layout.capacity_bytes(prepared.packed))
        if self._device is not None:
            self.arena.pin(self._device)
        if to == "peers":
            self.copies.ended, self.copies.current = None, identity
        else:
            under_way = self._unfinished()  # the oldest may outlast any number of saves that gave way meanwhile
            with self._lock:
                self._known[identity] = Standing(since=time.monotonic())
                for old in [one for one in self._known if one not in under_way][:-8]:
                    del self._known[old]
        self._writer_process().submit(
            WriteRequest(
                identity=identity, shard=self._rank, shards=self._world_size, snapshot=place.index, image=place.image,
                folder=folder, commit=order, urgent=urgent, max_bytes_per_s=float(self._settings.bandwidth or 0),
                goes_to_peers=self.sends_saves, is_step_copy=to == "peers",
                keeps=self.copies.needed if to == "peers" else None,
            )
        )  # fmt: skip
        reached("submitted")

    def keep(self, flat: FlatState, identity: Identity, check: Callable[[], None]) -> None:
        """Copy all that a rank has of a replicated state, hashed, to where the next attempt finds it; not to disk.

        The copy counts only where ``check``, called when it is done, raises nothing.

        Raises:
            OSError: there is no memory for it.
            CheckpointError, UsageError: something in it cannot be saved.
        """
        layout = Layout.plan_part(flat.tensors, flat.part, paths=flat.paths)
        packed = layout.pack(flat.objects)
        place = self._place_soon()
        self._ask_for_room(place, layout.capacity_bytes(packed), flat.part.parts_of(ranks_of_this_node()))
        laid_out = LaidOut(flat=flat, layout=layout, packed=packed, place=place)
        memory, index = self._copy(place, laid_out, identity, within_s=DEVICE_S)
        check()
        place.complete(index.with_digests([digest_of(memory, one) for one in index.items]))
        self._kept = identity

    def _ask_for_room(self, place: SnapshotSlot, bytes_needed: int, ranks: int) -> None:
        """A place grows by all of a replicated state, and that must never call the OOM killer.

        Of so many ``ranks`` of this node each keeps a part at the same time, and none knows how far the others are.

        Raises:
            OSError: the node has no memory for it.
        """
        has_bytes = place.image.stat().st_size if place.image.exists() else 0
        if bytes_needed > has_bytes and (problem := fits((bytes_needed - has_bytes) * ranks, self.arena.folder)):
            raise OSError(errno.ENOMEM, problem)

    def _place_soon(self) -> SnapshotSlot:
        """A place, at last that of a save which has not begun to be written: the state to keep is at least as new.

        Raises:
            OSError: there is none.
        """
        began = time.monotonic()
        self.hurry()
        while (place := self.arena.free(self._taken())) is None:
            took_s = time.monotonic() - began
            if took_s > SOON_S:
                self.make_room()
            if took_s > SOON_S + LOOK_S:
                raise OSError(errno.EBUSY, "all places are in use")
            time.sleep(0.005)
        return place

    def _beside_what_is_kept(self, place: SnapshotSlot | None, identity: Identity) -> SnapshotSlot:
        """A rescue may have come between: its copy of this step is not written over.

        Raises:
            OSError: there is no other place.
        """
        kept = self._kept
        if kept is not None and place is not None and place.holds == kept and identity.step <= kept.step:
            place = self.arena.free([*self._taken(), kept])
        if place is None:
            raise OSError(errno.EBUSY, "all places are in use")
        return place

    def _copy(
        self, place: SnapshotSlot, prepared: LaidOut, identity: Identity, *, within_s: float | None = None
    ) -> tuple[memoryview, ShardIndex]:
        layout, flat, packed = prepared.layout, prepared.flat, prepared.packed
        memory = memoryview(place.begin(layout.capacity_bytes(packed)))
        reached("slot emptied")
        if place.layout is not layout:
            layout.write_fixed(memory)
            place.layout, place.views = layout, layout.views(memory)
        with self.arena.copying():
            sources = layout.sources(flat.tensors)
            self._device = copy_into(place.views, sources, place.address, within_s=within_s)
        reached("half staged")
        return memory, layout.with_objects(memory, packed, identity=identity, paths=flat.paths)

    def failed_here(self, identity: Identity, error: Exception) -> None:
        """This rank could not copy its part; all others would wait for it without this note."""
        number = (isinstance(error, OSError) and error.errno) or 0
        with self._lock:
            self._known[identity] = Standing(since=time.monotonic(), errno=number, problem=str(error))

    def standing(self, identity: Identity) -> Standing | None:
        """How far a snapshot is; None for one that is not known here."""
        with self._lock:
            return self._known.get(identity)

    def give_up(self, identity: Identity) -> None:
        """Leave a snapshot that some rank could not write."""
        if self._writer is not None:
            self._writer.abandon(identity)

    def settled(self, identity: Identity) -> None:
        """All ranks know that this one is durable."""
        self._settled = identity
        self.leave_spill()

    def leave_spill(self) -> None:
        """A checkpoint is durable that is newer than snapshots which earlier attempts staged beside the checkpoints."""
        if not self._is_spilling:
            self._forget_spilled()

    def _forget_spilled(self) -> None:
        """Remove this rank's snapshots there; on rank 0, also those of ranks that the run no longer has."""
        if self._has_spilled and self._spill.is_dir():
            rank, world_size = self._rank, self._world_size
            forget_staged(self._spill, lambda one: one == rank or (rank == 0 and one >= world_size))
        self._has_spilled = False

    @property
    def _is_spilling(self) -> bool:
        return self._arena is not None and self._arena.folder == self._spill

    def hurry(self) -> None:
        """A caller waits: lift the cap of bandwidth."""
        if self._writer is not None:
            self._writer.hurry()

    def raise_failure(self, identity: Identity) -> None:
        """Raise this rank's error in writing a snapshot; return where another rank failed.

        Raises:
            OSError, Fenced, CheckpointError: as it was reported.
        """
        if self._fenced is not None:
            raise self._fenced
        known = self.standing(identity)
        if known is None or not known.problem:
            return
        if known.errno:
            raise OSError(known.errno, known.problem)
        raise CheckpointError(known.problem)

    def sleep(self, identity: Identity | None, seconds: float) -> None:
        """Return when there is a final report on a snapshot, or after so many seconds."""
        if self._writer is not None and identity is not None and identity in self._writer.unfinished():
            self._writer.wait(identity, seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        """Let the writer finish. Memory of our own is waited for; an agent's outlives this process, and so the save."""
        if os.getpid() != self._pid:
            return  # a forked child, such as a loader's worker
        if self._writer is not None:
            if self._arena is not None and self._arena.is_private:
                self._finish(self._writer)
            self._writer.close(0.0)
            self._writer = None
        if self._arena is not None:
            was_spilling = self._is_spilling
            self._arena.close()
            self._arena = None
            if was_spilling and self._kept is None and self._settled in [*self._known][-1:]:
                self._forget_spilled()
        self._layout = None

    def _finish(self, writer: WriterClient) -> None:
        """Wait for the last save; one that fails again and again is not worth the whole time."""
        began = time.monotonic()
        while left := writer.unfinished():
            standing = self.standing(left[-1])
            patience_s = FAILING_S if standing is not None and standing.problem else CLOSE_S
            if time.monotonic() - began > patience_s:
                problem = standing.problem if standing is not None else ""
                log.error("%s did not become durable within %.0f s: %s", left[-1].folder_name, patience_s, problem)
                return
            writer.wait(left[-1], LOOK_S)

    def on_report(self, report: Report) -> None:
        """Take in a report of the writer."""
        if report.identity == self.copies.current:
            self.copies.hear(report)
            return
        with self._lock:
            standing = self._known.get(report.identity)
            if standing is None:
                return
            if report.kind == "written":
                standing.is_written, standing.errno, standing.problem = True, 0, ""
            elif report.kind == "committed":
                standing.is_committed, standing.errno, standing.problem = True, 0, ""
            elif report.kind in ("failed", "abandoned", "superseded") and (report.final or report.errno):
                # else its writer has died, and the next one has the save already
                standing.errno, standing.problem = report.errno, report.text or report.kind
            if report.fenced:
                standing.is_fenced, self._fenced = True, Fenced(report.text)
        if report.kind == "committed":
            self._on_committed(report.identity, time.monotonic() - standing.since)
        elif report.kind == "failed" and not report.fenced:
            self._on_failed(report.identity.step, report.errno, report.text)

    def _choose_memory(self, bytes_needed: int) -> None:
        """Without room for a third place no steps are copied; without room for two they are files on disk."""
        arena, ranks = self.arena, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        has_bytes = sum(place.image.stat().st_size for place in arena.places if place.image.exists())
        if problem := fits(max(0, len(arena.places) * bytes_needed - has_bytes) * ranks, arena.folder):
            self.copies.problem = problem
            del arena.places[len(PLACES) :]
        if problem and (problem := fits(max(0, len(PLACES) * bytes_needed - has_bytes) * ranks, arena.folder)):
            log.warning("checkpoints are staged in %s, not in memory, which is slow: %s", self._spill, problem)
            arena.close()
            self._has_spilled = True
            self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._arena = Arena(self._rank, self._spill)

    def _busy(self) -> list[Identity]:
        """Snapshots whose places the writer still reads."""
        with self._lock:
            return [one for one in self._unfinished() if not (known := self._known.get(one)) or not known.is_written]

    def free(self, to: Destination) -> SnapshotSlot | None:
        """A place; None while all are in use, or, for a save, while too many older ones wait for their commit."""
        return None if to == "disk" and len(self._saves()) >= MAX_UNCOMMITTED else self.arena.free(self._taken())

    def _saves(self) -> list[Identity]:
        """That have not ended."""
        return [one for one in self._unfinished() if one != self.copies.current]

    def _taken(self) -> list[Identity]:
        """Snapshots whose places are not free."""
        needed = self.copies.needed
        return self._busy() if needed is None else [*self._busy(), needed]

    def _unfinished(self) -> list[Identity]:
        return self._writer.unfinished() if self._writer is not None else []

    def _writer_process(self) -> WriterClient:
        if self._writer is None:
            folder = os.environ.get(ERROR_DIR_VARIABLE)
            output = Path(folder) / f"writer-{self._rank}.log" if folder is not None else None
            self._writer = WriterClient(
                on_report=self.on_report, stall_timeout_s=self._settings.stall_timeout_s, log=output
            )
        return self._writer
