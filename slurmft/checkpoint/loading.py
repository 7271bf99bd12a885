"""The walk from the best candidate to the first that every rank can use: in memory first, then on disk.

Rank 0 names the candidates, the nodes offer what they hold in memory, and all ranks come to the same decision; each
reads and verifies its part, and all agree on how that went before any of them changes an object of the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.checkpoint import restore
from slurmft.checkpoint.agreement import Guard, damage_report, failure
from slurmft.checkpoint.catalog import Catalog, Entry, read_entry
from slurmft.checkpoint.folders import own_generation
from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.checkpoint.format.flat_state import is_sharded
from slurmft.checkpoint.format.parts import WHOLE, Part, part_of
from slurmft.checkpoint.format.reading import Source, Stored
from slurmft.checkpoint.format.shard_index import image_file, index_file, verified_index
from slurmft.checkpoint.mappings import ReadsAsMapping
from slurmft.checkpoint.replicas.memory_sources import MemorySources
from slurmft.checkpoint.replicas.note_gathering import OwnNotes, gather
from slurmft.checkpoint.replicas.offers import MAX_WORLD
from slurmft.checkpoint.retention import by_merit
from slurmft.checkpoint.staging import holding
from slurmft.checkpoint.state import Tolerance, Trainee, unwrapped
from slurmft.checkpoint.team import Team
from slurmft.checkpoint.writer.write_requests import BestMode
from slurmft.errors import CheckpointError, NewerFormat, StorageError, UsageError
from slurmft.policy.checkpoints.tiers import Committed, Decision, Name
from slurmft.storage.attempt_facts import note_resuming
from slurmft.storage.checkpoint_names import MANIFEST, Identity, read_quarantine
from slurmft.storage.digest_record import Doubt, read_digests
from slurmft.storage.memory_folder import memory_folder_of
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE
from slurmft.trainer import rng
from slurmft.trainer.savers import SAVERS, Loaded
from slurmft.trainer.streams import settle

_QUARANTINE = frozenset({Damage.NONE, Damage.QUARANTINED, Damage.GIVEN_UP})
_OTHER = -1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint(ReadsAsMapping):
    """The result of a load. ``found`` is False, and ``step`` 0, when there is no checkpoint yet.

    Also a mapping: ``loaded["step"]``, and the keys of ``extra``; empty when there is no checkpoint yet.
    """

    found: bool = False
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    path: Path | None = None
    """Its folder; of a state that was only in memory, the one that it would have had."""

    world_size: int = 0
    """How many ranks wrote it."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """The ``extra`` of the save."""

    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer (or better) checkpoints that could not be used, and why; the same on every rank."""

    is_durable: bool = True
    """It is on the shared filesystem; otherwise it was in memory only, and is saved again at once."""

    source: str = ""
    """Where it was read from, in words: ``memory: step 40, all 4 shards``."""

    @property
    def is_of_this_attempt(self) -> bool:
        """Whether a rank of this attempt makes it durable: this process may only be an evaluation beside it."""
        identity = Identity.parse(self.path.name) if self.path is not None else None
        return identity is not None and identity.generation == own_generation() != 0

    def as_mapping(self) -> Mapping[str, Any]:
        """Its keys and values, with those of ``extra``; none when there is no checkpoint yet."""
        own = {"step": self.step, "metrics": self.metrics, "path": self.path, "world_size": self.world_size}
        return {**self.extra, **own} if self.found else {}


class Loading:
    """One load, by all ranks together.

    Args:
        directory: of the checkpoints.
        trainee: the objects to load into.
        tolerance: allowed differences of a checkpoint.
    """

    def __init__(self, directory: Path, trainee: Trainee, tolerance: Tolerance | None = None) -> None:
        self._directory, self.trainee, self._tolerance = directory, trainee, tolerance
        self._team = Team()
        self._skipped: list[tuple[Path, str]] = []
        self._found: set[int] = set()
        self._is_sparing = is_sharded(trainee.model)
        self._part = _part_here(trainee, self._team)
        self.began_s = time.monotonic()
        self.newest_commit = 0
        """Of all checkpoints that were seen; saves are counted on from it."""

    def newest(self) -> LoadedCheckpoint:
        """The newest state that is whole somewhere.

        Raises:
            CheckpointError: there are candidates and none is usable, or an intact one does not fit.
        """
        candidates = self._agreed(self._newest_first)
        _, memory = self._in_memory(candidates)
        try:
            while (decision := memory.decide()) is not None:
                loaded = self._from_memory(memory, decision)
                if loaded is not None:
                    return loaded
        finally:
            memory.close()
        return self._from_disk(candidates, memory.reason)

    def best(self, metric: str, mode: BestMode) -> LoadedCheckpoint:
        """The best by ``metric`` that all ranks can verify, from disk.

        Raises:
            CheckpointError: as ``newest``; also when checkpoints exist and none has this metric.
        """

        def best_first() -> list[Identity]:
            committed = Catalog(self._directory).committed()
            ordered = by_merit(committed, metric, mode)
            if committed and not ordered:
                raise CheckpointError(f"no checkpoint in {self._directory} has a finite metric {metric!r}",
                                      hint="pass metrics= to save(), or use load_latest")  # fmt: skip
            return [Identity(entry.step, entry.generation, entry.commit) for entry in ordered]

        return self._from_disk(self._agreed(best_first), "")

    def chosen(self, is_wanted: Callable[[Entry], bool]) -> LoadedCheckpoint:
        """The newest for which ``is_wanted``, asked on rank 0, is true; from disk, and nothing where there is none.

        Raises:
            CheckpointError: there is one, and it cannot be used.
        """

        def wanted() -> list[Identity]:
            entries = [entry for entry in Catalog(self._directory).committed() if is_wanted(entry)]
            return [Identity(entry.step, entry.generation, entry.commit) for entry in entries[:1]]

        return self._from_disk(self._agreed(wanted), "")

    def next_step(self) -> int | None:
        """The step of the state that ``newest`` tries first, none of whose bytes are looked at; None: there is none."""
        committed, memory = self._in_memory(self._agreed(self._newest_first))
        try:
            decision = memory.decide()
        finally:
            memory.close()
        if decision is not None and decision.name is not None:
            return decision.name[0]
        return committed.name[0] if committed is not None else None

    def newest_step(self) -> int:
        """The highest step of all checkpoints; -1 where there is none. The same on all ranks."""
        return max((one.step for one in self._agreed(Catalog(self._directory).identities)), default=-1)

    def _in_memory(self, candidates: Sequence[Identity]) -> tuple[Committed | None, MemorySources]:
        """The newest checkpoint on disk, and what lies in memory beside it."""
        committed, quarantined, doubts = self._newest_committed(candidates)
        memory = MemorySources(self._team, committed, directory=self._directory, generation=own_generation(),
                               quarantined=quarantined, doubts=doubts)  # fmt: skip
        return committed, memory

    def _from_memory(self, memory: MemorySources, decision: Decision) -> LoadedCheckpoint | None:
        identity = Identity(*(decision.name or (0, 0, 0)))
        path, guard, prepared = self._directory / identity.folder_name, Guard(), None
        self._note(path if decision.is_committed else None, decision.reason)
        wanted = self._wanted(decision)
        if not memory.bring(decision, wanted):
            return None
        noted = OwnNotes()
        if not decision.is_committed:  # of one that was kept just in time, a node had its own ranks' part
            is_node_lead = os.environ.get("LOCAL_RANK", "0") == "0"
            noted = gather(self._team, memory_folder_of(self._directory), identity, is_node_lead=is_node_lead)
        with contextlib.ExitStack() as stack:
            with guard:
                held = memory.sources(identity)
                sources = _DiskSources(path, held=held) if decision.is_committed else held
                own = self._part.number if wanted == self._own_part(decision) else self._team.rank
                stored = stack.enter_context(contextlib.closing(Stored(sources, own=own)))
                if len(decision.suppliers) < self._team.world_size:  # with a rank's own state in any of them
                    stored.look_at(held)
                prepared = self._prepared(stored, noted)
            rows = self._exchange(guard, prepared)
            if _fits_nowhere(rows):
                raise self._cannot_load(path, rows, guard)
            if prepared is not None and all(damage == Damage.NONE for damage, *_ in rows):
                facts, is_durable = prepared.facts, decision.is_committed
                return self._apply(path, prepared, identity, facts, decision.reason, is_durable=is_durable)
        if len(wanted) < len(decision.suppliers):
            self._is_sparing = False  # its parts are spread in another way now: with all of them it may work
        else:
            memory.refuse(decision, damage_report(rows, self._team, guard))
        return None

    def _wanted(self, decision: Decision) -> range:
        """The shards that this rank needs whole: its own, where the state is spread as it was when it was saved."""
        if self._is_sparing and len(decision.suppliers) == self._team.world_size:
            return range(self._team.rank, self._team.rank + 1)
        return (self._own_part(decision) if self._is_sparing else None) or range(len(decision.suppliers))

    def _own_part(self, decision: Decision) -> range | None:
        """The part of this rank, where the state may have been kept just in time in such parts."""
        if self._part.mesh is None or len(decision.suppliers) != self._part.count:
            return None
        return range(self._part.number, self._part.number + 1)

    def _prepared(self, stored: Stored, notes: OwnNotes) -> restore.Prepared:
        team = self._team
        return restore.prepare(
            self.trainee, stored, rank=team.rank, world_size=team.world_size, tolerance=self._tolerance, notes=notes
        )

    def _exchange(self, guard: Guard, prepared: restore.Prepared | None) -> list[list[int]]:
        """Exchange every rank's result, as (damage, file): alike on all. Nothing is applied before this.

        Parts that are intact each for itself may still not be of one state: of ranks that take their samples together,
        all must have come equally far.
        """
        place = 0
        with guard:
            place = prepared.place if prepared is not None else 0
        rows = self._team.exchange([*guard.damage_row, place])
        is_astray = len({place for *_, place in rows if place}) > 1
        if is_astray and not any(damage for damage, *_ in rows):
            return [[Damage.ASTRAY, 0] for _ in rows]
        return [row[:2] for row in rows]

    def _from_disk(self, candidates: Sequence[Identity], reason: str) -> LoadedCheckpoint:
        for identity in candidates:
            path, guard, prepared, entry = self._directory / identity.folder_name, Guard(), None, None
            self._note(path, reason or "disk")
            with guard, self._kept(path):
                entry = _verified_entry(path)
                stored = Stored(_DiskSources(path, entry), own=self._team.rank)
                prepared = self._prepared(stored, OwnNotes())
            rows = self._exchange(guard, prepared)
            if prepared is not None and entry is not None and all(damage == Damage.NONE for damage, *_ in rows):
                facts = {"metrics": entry.metrics, "world_size": entry.world_size}
                return self._apply(path, prepared, identity, facts, reason or f"disk: step {identity.step}")
            if _fits_nowhere(rows):
                raise self._cannot_load(path, rows, guard)
            self._skipped.append((path, damage_report(rows, self._team, guard)))
            self._found |= {damage for damage, *_ in rows}
            if self._team.is_lead:
                log.warning("skipping checkpoint %s: %s", *self._skipped[-1])
        self._note(None, reason)
        if self._found <= _QUARANTINE and (not self._found or Damage.GIVEN_UP in self._found):
            return LoadedCheckpoint(skipped=tuple(self._skipped), source=reason)
        listing = "".join(f"\n  {path}: {reason}" for path, reason in self._skipped)
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be used:{listing}",
            hint="move the folder away to start anew, or bring back an intact copy",
        )

    @contextlib.contextmanager
    def _kept(self, path: Path) -> Iterator[None]:
        """The checkpoint is not removed while it is read, as far as the filesystem has locks."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(holding.reading(path))
            yield

    def _agreed(self, candidates: Callable[[], list[Identity]]) -> list[Identity]:
        team, guard, found = self._team, Guard(), list[Identity]()
        if team.is_lead:
            with guard:
                self.newest_commit = Catalog(self._directory).newest_commit()
                found = candidates()
        code, count, self.newest_commit = team.from_lead([guard.code, len(found), self.newest_commit])
        if code:
            raise failure(f"{self._directory} was not loaded", [code], team, guard)
        if not count:
            return []
        numbers = [number for one in found for number in (one.step, one.generation, one.commit)]
        numbers = team.from_lead(numbers if team.is_lead else [0] * (3 * count))
        return [Identity(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)]

    def _newest_first(self) -> list[Identity]:
        catalog = Catalog(self._directory)
        return [one for one in catalog.identities() if (self._directory / one.folder_name / MANIFEST).exists()]

    def _newest_committed(self, candidates: Sequence[Identity]) -> tuple[Committed | None, list[Name], list[Doubt]]:
        """The newest one whose marker can be believed, its bytes not looked at; newer ones in quarantine; and which
        states, also in memory alone, are in doubt."""
        row, marked, doubted = [0, 0, 0, 0], list[int](), list[int]()
        if self._team.is_lead:
            with contextlib.suppress(NewerFormat):
                doubted = [
                    number
                    for each in read_digests(self._directory).doubts
                    for number in (each.generation, each.after_step)
                ]
        for identity in candidates if self._team.is_lead else ():
            try:
                entry = _verified_entry(self._directory / identity.folder_name)
            except Damaged as error:
                if error.damage in _QUARANTINE:
                    marked += (identity.step, identity.generation, identity.commit)
                continue
            row = [identity.step, identity.generation, identity.commit, entry.world_size]
            break
        step, generation, commit, world_size, count, more = self._team.from_lead([*row, len(marked), len(doubted)])
        numbers = self._team.from_lead([*marked, *doubted] or [0] * (count + more)) if count + more else []
        quarantined = [(numbers[n], numbers[n + 1], numbers[n + 2]) for n in range(0, count, 3)]
        doubts = [Doubt(generation=numbers[n], after_step=numbers[n + 1]) for n in range(count, count + more, 2)]
        newest = Committed(name=(step, generation, commit), shards=world_size) if world_size else None
        return newest, quarantined, doubts

    def _note(self, path: Path | None, source: str) -> None:
        """Note which of the run's checkpoints is about to be read: a process that it kills cannot report it."""
        folder, directory = os.environ.get(ERROR_DIR_VARIABLE), os.environ.get("SLURMFT_CHECKPOINT_DIR")
        if self._team.is_lead and folder and directory and self._directory.absolute() == Path(directory).absolute():
            note_resuming(Path(folder), path.name if path is not None else "", source=source)

    def _apply(
        self, path: Path, prepared: restore.Prepared, identity: Identity, facts: Mapping[str, Any], source: str, *,
        is_durable: bool = True,
    ) -> LoadedCheckpoint:  # fmt: skip
        settle(self.trainee.model.parameters())  # an update on another stream would come on top of what is loaded
        prepared.apply()
        SAVERS.loaded = Loaded(identity.step, self.trainee.loader, prepared.loader_state, rng.capture())
        team, world_size = self._team, int(facts.get("world_size", 0))
        self.newest_commit = max(self.newest_commit, identity.commit)
        if not prepared.is_own:
            what = "rank %d is not in %s (%d ranks): its random number generators stay as they are"
            log.warning(what, team.rank, path, world_size)
        if team.is_lead:
            log.info("loaded step %d of %s; %s", identity.step, path, source)
            if world_size != team.world_size:
                log.warning("%d ranks saved, %d go on: data continues at the same place", world_size, team.world_size)
        return LoadedCheckpoint(
            found=True,
            step=identity.step,
            metrics=dict(facts.get("metrics", {})),
            path=path,
            world_size=world_size,
            extra=prepared.extra,
            skipped=tuple(self._skipped),
            is_durable=is_durable,
            source=source,
        )

    def _cannot_load(self, path: Path, rows: Sequence[Sequence[int]], guard: Guard) -> CheckpointError:
        """An intact checkpoint that these objects cannot take: an older one would not fit either."""
        failed = [rank for rank, (damage, *_) in enumerate(rows) if damage]
        detail = str(guard.error) if guard.error is not None else f"rank(s) {failed} could not; their logs show why"
        if guard.error is not None:
            log.error("rank %d cannot load %s", self._team.rank, path, exc_info=guard.error)
        hint = getattr(guard.error, "hint", "") or "use the model that saved it, or another checkpoint directory"
        error = CheckpointError(f"{path} cannot be loaded: {detail}", hint=hint)
        error.__cause__ = guard.error
        return error


def _part_here(trainee: Trainee, team: Team) -> Part:
    try:
        return part_of(unwrapped(trainee.model).parameters(), rank=team.rank, world_size=team.world_size)
    except UsageError:
        return WHOLE


def _fits_nowhere(rows: Sequence[Sequence[int]]) -> bool:
    """Whether objects cannot take a state that is intact. Where it is damaged, the next candidate is tried."""
    found = {damage for damage, *_ in rows}
    return _OTHER in found or (Damage.MISFIT in found and found <= {Damage.NONE, Damage.MISFIT})


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
    if not 1 <= entry.world_size <= MAX_WORLD:  # it has no checksum, and memory is asked for by this number
        raise Damaged(Damage.UNREADABLE, MANIFEST, f"it names {entry.world_size} ranks")
    return entry


class _DiskSources(Mapping[int, Source]):
    """The shards of a committed checkpoint; the index of each is read and verified when it is asked for.

    Args:
        held: shards that lie in this node's memory, which go before those on disk.

    Raises:
        Damaged: its marker cannot be believed, or the index that is asked for.
    """

    def __init__(self, path: Path, entry: Entry | None = None, held: Mapping[int, Source] | None = None) -> None:
        self._path, self._entry, self._held = path, entry or _verified_entry(path), held or {}

    def __getitem__(self, shard: int) -> Source:
        if shard in self._held:
            return self._held[shard]
        entry, name = self._entry, index_file(shard)
        if not 0 <= shard < entry.world_size:
            raise KeyError(shard)
        if name not in entry.files or image_file(shard) not in entry.files:
            raise Damaged(Damage.MISSING, name, "the marker does not list it")
        index = verified_index(self._path / name, entry.files[name].size_bytes, entry.files[name].xxh3)
        if (index.identity, index.shard) != (Identity(entry.step, entry.generation, entry.commit), shard):
            raise Damaged(Damage.UNREADABLE, name, "it belongs to another checkpoint")
        return Source(image=self._path / image_file(shard), index=index)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._entry.world_size))

    def __len__(self) -> int:
        return self._entry.world_size
