"""One rank's snapshots on their way from the trainer's tensors to the disk.

The training loop only waits for the copy into shared memory. The writer process reports the progress of each copy, and
a thread of this process takes it in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from slurmft.checkpoint.format.flat_state import FlatState
from slurmft.checkpoint.format.image import Layout
from slurmft.checkpoint.format.objects import Packed
from slurmft.checkpoint.format.shard_index import ShardIndex
from slurmft.checkpoint.staging.arena import PLACES, PLACES_WITH_COPIES, Arena, Place, Spill
from slurmft.checkpoint.staging.copying import copy_into
from slurmft.checkpoint.staging.step_places import StepPlaces
from slurmft.checkpoint.writer.fault_points import reached
from slurmft.checkpoint.writer.write_requests import CommitOrder, Report, Standing, WriteRequest
from slurmft.checkpoint.writer.writer_client import WriterClient
from slurmft.errors import CheckpointError, Fenced, UsageError
from slurmft.policy.checkpoints.checkpoint_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.storage.memory_folder import ranks_of_this_node
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE
from slurmft.system.memory_limits import fits
from slurmft.trainer.streams import Device

CLOSE_S = 600.0
"""How long the end of a process waits for its last save; the memory that holds it would go with the process."""

FAILING_S = 20.0
"""The same for one that the disk refuses."""

MAX_UNCOMMITTED = 2
"""Saves of rank 0 that have not ended: one may be written while another one is committed."""

LOOK_S = 0.5
SOON_S = 2.0
"""How long a failed run waits for a place to keep its last step in, before a save that waits has to give way."""

DEVICE_S = 15.0
"""How long it waits for a device to copy its state; the agent waits no longer (``agent.just_in_time``)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaidOut:
    """A state that is about to be copied: everything but the copy is done."""

    flat: FlatState
    layout: Layout
    packed: list[Packed]
    place: Place | None
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
        self._settings, self._memory, self._spill = settings, memory, Spill(spill)
        self._on_committed, self._on_failed = on_committed, on_failed
        self._arena: Arena | None = None
        self._writer: WriterClient | None = None
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), 1
        self._is_memory_chosen = False
        self._layout: Layout | None = None
        self._views: dict[Place, list[torch.Tensor]] = {}
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

    def prepare(self, flat: FlatState, *, rank: int, world_size: int) -> LaidOut:
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
            self._views.clear()
        packed = self._layout.pack(flat.objects)
        if not self._is_memory_chosen:
            self._is_memory_chosen = True
            self._choose_memory(self._layout.capacity_bytes(packed))
        place = self._free()
        return LaidOut(flat=flat, layout=self._layout, packed=packed, place=place)

    def take_place(self, rank: int, world_size: int) -> None:
        """Set the rank and world size, which name its places in memory."""
        if self._arena is not None and self._rank != rank:
            raise UsageError(f"this checkpoint manager was rank {self._rank}'s, and now rank {rank} uses it")
        self._rank, self._world_size = rank, world_size

    def again(self, prepared: LaidOut) -> LaidOut:
        """The same with a place, where one has become free meanwhile."""
        place = self._free()
        return LaidOut(flat=prepared.flat, layout=prepared.layout, packed=prepared.packed, place=place)

    def make_room(self) -> None:
        """Give up a snapshot that waits behind another one; a stop has something newer."""
        unfinished = self._unfinished()
        if self.copies.current in unfinished:
            unfinished = [one for one in unfinished if one != self.copies.current]
            self._writer_process().abandon(self.copies.current)
        for identity in unfinished[1:]:
            self._writer_process().abandon(identity)

    def stage(self, prepared: LaidOut, identity: Identity) -> Place:
        """Copy the state into its place, which is returned. When this returns, the trainer may change it.

        Raises:
            OSError: there is no memory for it.
        """
        place = self._beside_what_is_kept(prepared.place, identity)
        _, index = self._copy(place, prepared.layout, prepared.flat, prepared.packed, identity)
        reached("staged")
        place.complete(index)
        reached("index in place")
        self.arena.warm_up(prepared.layout.capacity_bytes(prepared.packed))
        if self._device is not None:
            self.arena.pin(self._device)
        return place

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
        memory, index = self._copy(place, layout, flat, packed, identity, within_s=DEVICE_S)
        check()
        digests = [xxhash.xxh3_128_hexdigest(memory[one.offset : one.offset + one.length]) for one in index.items]
        place.complete(index.with_digests(digests))
        self._kept = identity

    def _ask_for_room(self, place: Place, bytes_needed: int, ranks: int) -> None:
        """A place grows by all of a replicated state, and that must never call the OOM killer.

        Of so many ``ranks`` of this node each keeps a part at the same time, and none knows how far the others are.

        Raises:
            OSError: the node has no memory for it.
        """
        has_bytes = place.image.stat().st_size if place.image.exists() else 0
        if bytes_needed > has_bytes and (problem := fits((bytes_needed - has_bytes) * ranks, self.arena.folder)):
            raise OSError(errno.ENOMEM, problem)

    def _place_soon(self) -> Place:
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

    def _beside_what_is_kept(self, place: Place | None, identity: Identity) -> Place:
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
        self, place: Place, layout: Layout, flat: FlatState, packed: list[Packed], identity: Identity, *,
        within_s: float | None = None,
    ) -> tuple[memoryview, ShardIndex]:  # fmt: skip
        memory = memoryview(place.begin(layout.capacity_bytes(packed)))
        reached("slot emptied")
        if place.layout is not layout:
            layout.write_fixed(memory)
            self._views[place] = layout.views(memory)
            place.layout = layout
        with self.arena.copying():
            sources = layout.sources(flat.tensors)
            self._device = copy_into(self._views[place], sources, place.address, within_s=within_s)
        reached("half staged")
        return memory, layout.with_objects(memory, packed, identity=identity, paths=flat.paths)

    def submit(
        self, place: Place, folder: Path, identity: Identity, order: CommitOrder | None, *, urgent: bool
    ) -> None:
        """Have the writer make what lies in ``place`` durable; rank 0 gives an ``order`` to commit it."""
        with self._lock:
            self._known[identity] = Standing(step=identity.step, since=time.monotonic())
            for old in list(self._known)[:-8]:
                del self._known[old]
        self._writer_process().submit(
            WriteRequest(
                identity=identity, shard=self._rank, shards=self._world_size, snapshot=place.index, image=place.image,
                folder=folder, commit=order, urgent=urgent, max_bytes_per_s=float(self._settings.bandwidth or 0),
                goes_to_peers=self.sends_saves,
            )
        )  # fmt: skip

    def copy_step(self, flat: FlatState, identity: Identity, folder: Path, *, rank: int, world_size: int) -> None:
        """Copy the state, and have the writer hash and send it; ``copies`` gets to know the end of that.

        Raises: as ``prepare`` and ``stage``.
        """
        prepared = self.prepare(flat, rank=rank, world_size=world_size)
        if self.copies.problem:
            raise OSError(errno.ENOMEM, self.copies.problem)
        place = self.stage(replace(prepared, place=self.arena.free(self._taken())), identity)
        self.copies.begin(identity)
        self._writer_process().submit(
            WriteRequest(
                identity=identity, shard=rank, shards=world_size, snapshot=place.index, image=place.image,
                folder=folder, max_bytes_per_s=float(self._settings.bandwidth or 0), is_step_copy=True,
                keeps=self.copies.needed,
            )
        )  # fmt: skip

    def has_place(self) -> bool:
        """Whether something could be copied now."""
        return self.arena.free(self._taken()) is not None

    def failed_here(self, identity: Identity, error: Exception) -> None:
        """This rank could not copy its part; all others would wait for it without this note."""
        number = (isinstance(error, OSError) and error.errno) or 0
        with self._lock:
            self._known[identity] = Standing(
                step=identity.step, since=time.monotonic(), errno=number, problem=str(error)
            )

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
            self._spill.forget(self._rank, self._world_size)

    @property
    def _is_spilling(self) -> bool:
        return self._arena is not None and self._arena.folder == self._spill.folder

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

    def sleep(self, identity: Identity, seconds: float) -> None:
        """Return when there is a new report on a snapshot, or after so many seconds."""
        if self._writer is not None and identity in self._writer.unfinished():
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
            self._views.clear()
            was_spilling = self._is_spilling
            self._arena.close()
            self._arena = None
            if was_spilling and self._kept is None and self._settled in [*self._known][-1:]:
                self._spill.forget(self._rank, self._world_size)
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
            log.warning("checkpoints are staged in %s, not in memory, which is slow: %s", self._spill.folder, problem)
            arena.close()
            self._arena = self._spill.arena(self._rank)

    def _busy(self) -> list[Identity]:
        """Snapshots whose places the writer still reads."""
        with self._lock:
            return [one for one in self._unfinished() if not (known := self._known.get(one)) or not known.is_written]

    def _free(self) -> Place | None:
        """A place for a save; None while all are in use, or too many older ones wait for their commit."""
        older = [one for one in self._unfinished() if one != self.copies.current]
        return self.arena.free(self._taken()) if len(older) < MAX_UNCOMMITTED else None

    def _taken(self) -> list[Identity]:
        """Snapshots whose places are not free."""
        needed = self.copies.needed
        return self._busy() if needed is None else [*self._busy(), needed]

    def _unfinished(self) -> list[Identity]:
        return self._writer.unfinished() if self._writer is not None else []

    def _writer_process(self) -> WriterClient:
        if self._writer is None:
            self._writer = WriterClient(
                on_report=self.on_report, stall_timeout_s=self._settings.stall_timeout_s, log=_writer_log(self._rank)
            )
        return self._writer


def _writer_log(rank: int) -> Path | None:
    with contextlib.suppress(KeyError):
        return Path(os.environ[ERROR_DIR_VARIABLE]) / f"writer-{rank}.log"
    return None
