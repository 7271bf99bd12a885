"""Loading: the walk from the best candidate to the first that every rank can use, in memory first, then on disk, and
where its tensors land in the trainer's objects.

Rank 0 names the candidates, the nodes offer what they hold in memory, and all ranks come to the same decision; each
reads and verifies its part, and all agree on how that went before any of them changes an object of the trainer.

A checkpoint is whole by three words: that of its marker (``_believed_entry``), those of the digests of all that is read
(``reading.Stored.fill``), and that of every rank (``Loading``, by ``_exchange``).
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from slurmft.checkpoint.agreement import Guard, damage_report, failure
from slurmft.checkpoint.catalog import Catalog, Entry, by_merit, own_generation, read_entry
from slurmft.checkpoint.image_file import MAX_WORLD, Damage, Damaged, image_file, index_file, reading
from slurmft.checkpoint.memory_sources import MemorySources
from slurmft.checkpoint.notes import ERA, LeadNote, OwnNotes, gather
from slurmft.checkpoint.reading import DiskSources, Stored, Target, fresh
from slurmft.checkpoint.state import (
    BUFFERS_OF,
    EXTRA,
    FACTS,
    GROUPS,
    HAS_EXTRA,
    LOADER,
    MODEL,
    OPTIMIZER,
    PARAMS,
    STATE,
    WHOLE,
    KeyPath,
    Stateful,
    Tolerance,
    Trainee,
    group_names,
    is_dense,
    is_sharded,
    key_of,
    load_part,
    name_of_dtype,
    original,
    part_of,
    plain_name,
    position_number,
    rank_key,
    shared_position,
    unflatten,
    unwrapped,
)
from slurmft.checkpoint.write_requests import BestMode
from slurmft.errors import CheckpointError, NewerFormat, StorageError, UsageError
from slurmft.policy.checkpoints import Committed, Decision, Name
from slurmft.storage.checkpoint_names import MANIFEST, Doubt, Identity, memory_folder_of, read_digests, read_quarantine
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, note_resuming
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS, Loaded, Team, local_part
from slurmft.trainer.streams import settle

# --- Where the tensors of a stored state are read to, before any of the trainer's objects is touched ---


@dataclass(frozen=True, slots=True)
class Landing:
    """A tensor that is being read, and its target."""

    target: Target
    like: DTensor | None = None
    """Spread over ranks in the same way; None for a plain tensor."""

    is_whole: bool = False
    """Whether each rank reads all of it although ``like`` is spread over ranks."""

    into: torch.Tensor | None = None
    """A tensor of the optimizer that takes the values itself, as its memory is there already."""

    def value(self) -> torch.Tensor:
        if self.into is not None:
            with torch.no_grad():
                local_part(self.into).copy_(self.target.tensor)
            return self.into
        if self.like is None:
            return self.target.tensor
        if self.is_whole:
            mesh = self.like.device_mesh
            return DTensor.from_local(self.target.tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return DTensor.from_local(
            self.target.tensor,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.like.shape,
            stride=self.like.stride(),
        )


def landing_of(stored: Stored, key: str, like: object, *, may_map: bool = False) -> Landing:
    """Where a stored tensor is read to, in the place of ``like`` (a tensor of the trainer, or any value).

    Args:
        may_map: its values are copied out of it once, and it is not kept.
    """
    there = stored.tensors[key]
    spread = like if isinstance(like, DTensor) else None
    is_whole = spread is not None and tuple(spread.shape) != there.shape
    if is_whole and there.pieces == 1:
        spread, is_whole = None, False
    starts, sizes = _own_box(None if is_whole else spread, there.shape)
    target = stored.mapped(key, starts, sizes) if may_map else None
    return Landing(target or Target(fresh(sizes, there.dtype), starts), spread, is_whole=is_whole)


def _own_box(like: torch.Tensor | None, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the part begins that this rank holds, and its sizes; all of it but where ``like`` is spread over ranks."""
    if not isinstance(like, DTensor):
        return (0,) * len(shape), shape
    (chunk,) = like.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def landing_in_place(stored: Stored, key: str, here: torch.Tensor) -> Landing | None:
    """Into the optimizer's present tensor, which shares its memory with nothing; None where that is of another kind."""
    there, inside = stored.tensors[key], local_part(here)
    if not is_dense(here) or (tuple(here.shape), here.dtype) != (there.shape, there.dtype):
        return None
    starts, sizes = _own_box(here, there.shape)
    if tuple(inside.shape) != sizes or not inside.is_contiguous():
        return None
    target = stored.mapped(key, starts, sizes)
    return Landing(target, into=here) if target is not None else None


class Apart:
    """Which of an optimizer's present tensors may take what is loaded themselves: nothing else lies in their memory.

    None of them where the optimizer has a ``load_state_dict`` of its own, which may begin with clearing them.
    """

    def __init__(self, trainee: Trainee) -> None:
        optimizer = trainee.optimizer
        own = getattr(optimizer.load_state_dict, "__func__", None) is torch.optim.Optimizer.load_state_dict
        hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        self._is_used = own and not hooks
        groups = (one for group in optimizer.param_groups for one in group[PARAMS])
        weights = (*unwrapped(trainee.model).parameters(), *unwrapped(trainee.model).buffers(), *groups)
        self._taken = {one.untyped_storage().data_ptr() for each in weights if is_dense(one := local_part(each))}
        self._places: list[tuple[int, int]] = []

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether this one may, which takes its place."""
        inside = local_part(tensor)
        if not self._is_used or not is_dense(inside) or inside.untyped_storage().data_ptr() in self._taken:
            return False
        begin, end = inside.data_ptr(), inside.data_ptr() + inside.nbytes
        place = bisect.bisect_left(self._places, (begin, end))
        neighbours = self._places[max(place - 1, 0) : place + 1]
        if any(start < end and begin < stop for start, stop in neighbours):
            return False
        self._places.insert(place, (begin, end))
        return True


# --- mappings ---
# The result of a load as a mapping, for scripts that know a checkpoint as the dict that ``torch.load`` returns.


class ReadsAsMapping(Mapping[str, Any]):
    """A mapping of what ``as_mapping`` returns. Empty, and false, where nothing was found."""

    __slots__ = ()

    @abstractmethod
    def as_mapping(self) -> Mapping[str, Any]:
        """Its keys and values; none where nothing was found."""

    def __getitem__(self, key: str) -> Any:
        return self.as_mapping()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_mapping())

    def __len__(self) -> int:
        return len(self.as_mapping())


# --- restore ---
# A stored state on its way into the trainer's objects: checked for fit, read and verified, and only then applied.

_RANK_KEYS = rank_key(0)[:-1]
_NO_NOTES = OwnNotes()
_STEP = "step"
"""The one entry of an optimizer's state whose type torch chooses by how the optimizer was made."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's part of a state, read and verified. The trainer's objects have not been touched."""

    trainee: Trainee
    stored: Stored
    is_own: bool
    """False when this rank did not exist in the run that saved, and takes the position that all ranks share."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    recast: frozenset[str]
    """Parameters whose dtype is another one in the checkpoint."""

    @property
    def loader_state(self) -> Any:
        """What the loader is given; None where it is given nothing, or a part of another rank's."""
        return self.own.get(LOADER) if self.is_own else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that rank 0 stored about the whole state."""
        value: Mapping[str, Any] = self.shared.get(FACTS, {})
        return value

    @property
    def place(self) -> int:
        """The position in the data, as a number that all ranks must have alike; 0 where each has its own."""
        return position_number(self.trainee.loader, self.own)

    @property
    def extra(self) -> Mapping[str, Any]:
        """The ``extra`` of the save."""
        value: Mapping[str, Any] = original(self.shared.get(EXTRA, {}))
        return value

    def apply(self) -> None:
        """Load everything; the random number generators last, so that nothing draws from them in between.

        Raises:
            CheckpointError: a scheduler, scaler or loader cannot take what is stored for it; or what lay in memory was
                changed meanwhile, by a process that should be dead.
        """
        load_part(LOADER, self.trainee.loader, self.own)  # first: it refuses other data, and the model is still whole
        unwrapped(self.trainee.model).load_state_dict(_landed(self.model))
        optimizer = _landed(self.optimizer)
        self.trainee.optimizer.load_state_dict(optimizer)
        self._restore_types(optimizer[STATE])
        if not self.stored.is_unchanged:
            raise CheckpointError(
                "the snapshot was changed while it was loaded, and these objects have a part of it",
                hint="start again; a worker of an earlier attempt may still run on this node",
            )
        for name, part in self.trainee.shared_parts().items():
            load_part(name, part, self.shared)
        if self.is_own:
            savers.restore(self.own["rng"])

    def _restore_types(self, stored: Mapping[int, Any]) -> None:
        """torch casts an optimizer's state to the type of the weights: moments of higher precision, and counters."""
        names = [name for group in group_names(self.trainee) for name in group]
        parameters = [one for group in self.trainee.optimizer.param_groups for one in group[PARAMS]]
        present = self.trainee.optimizer.state
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            if number in stored and parameter in present:
                _with_types_of(stored[number], present[parameter], follows_weight=name in self.recast)


def prepare(
    trainee: Trainee, stored: Stored, *, rank: int, world_size: int, tolerance: Tolerance | None = None,
    notes: OwnNotes = _NO_NOTES,
) -> Prepared:  # fmt: skip
    """Read this rank's part of ``stored`` into new memory and verify it; the trainer's objects stay as they are.

    The rank's own state comes with the state, or from ``notes``. A rank that did not exist when it was saved
    takes the position in the data that all ranks share.

    Raises:
        Damaged: the state does not fit these objects (the keys are named), is damaged, or a part of it is lost.
        UsageError: the model is of a kind that cannot be loaded.
    """
    tolerance = tolerance or Tolerance()
    rank_keys = sorted(key for key in stored.objects if key.startswith(_RANK_KEYS))
    own_key = rank_key(rank) if rank_key(rank) in stored.objects else next(iter(rank_keys), "")
    wanted = [key for key in stored.objects if not key.startswith(_RANK_KEYS) or key == own_key]
    objects = stored.load_objects(wanted)
    facts: Mapping[str, Any] = objects.get(FACTS, {})
    notes = notes.of(facts.get(ERA, 0)) if facts.get("just_in_time") else _NO_NOTES
    own, is_own = _own_part(objects, stored, rank=rank, noted=notes.own)
    extra, buffers = _lead_part(objects, facts, rank=rank, lead=notes.lead)
    _check_parts(trainee, objects, own, tolerance)
    saved_ranks = _saved_ranks(objects, stored)
    if saved_ranks != world_size and trainee.loader is not None and shared_position(trainee.loader, own) is None:
        if LOADER not in tolerance.missing:
            raise _not_shared(trainee.loader, f"{saved_ranks} ranks saved, and {world_size} load")
        own = own if is_own else {}
    leaves: dict[KeyPath, Any] = {stored.path(key): value for key, value in objects.items()} | extra
    recast = set[str]()
    landings = _model_landings(trainee, stored, tolerance, recast) | _optimizer_landings(trainee, stored, leaves)
    stored.fill({key: landing.target for key, landing in landings.items()})
    _put_buffers(buffers, landings)
    leaves |= {stored.path(key): landing for key, landing in landings.items()}
    try:
        tree = unflatten(leaves)
        return Prepared(
            trainee=trainee,
            stored=stored,
            is_own=is_own,
            model=_with_raw_names(trainee, tree.get(MODEL, {})),
            optimizer=_with_numbers(trainee, tree[OPTIMIZER]),
            shared=tree,
            own=own,
            recast=frozenset(recast),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _misfit(f"its keys make no sense: {error!r}") from error


def _saved_ranks(objects: Mapping[str, Any], stored: Stored) -> int:
    return int(objects.get(FACTS, {}).get("world_size", stored.shards))


def _own_part(
    objects: Mapping[str, Any], stored: Stored, *, rank: int, noted: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], bool]:
    """The own state for this rank to load, and whether that was saved by itself.

    Raises:
        Damaged: its state is lost; or there is no rank's part whose position it could take.
    """
    if (own := objects.get(rank_key(rank))) is not None:
        return own, True
    if rank < _saved_ranks(objects, stored):
        if noted is not None:
            return noted, True
        raise Damaged(Damage.MISSING, image_file(rank), f"own state of rank {rank}")
    others = [value for key, value in objects.items() if key.startswith(_RANK_KEYS)]
    if not others:
        raise Damaged(Damage.MISSING, image_file(0), "own state of any rank")
    return {key: value for key, value in others[0].items() if key == LOADER}, False


def _lead_part(
    objects: Mapping[str, Any], facts: Mapping[str, Any], *, rank: int, lead: LeadNote | None
) -> tuple[dict[KeyPath, Any], Mapping[str, torch.Tensor]]:
    """What rank 0 alone had and is not stored: the ``extra``, and the buffers that are to replace those stored.

    Raises:
        Damaged: it is lost.
    """
    extra: dict[KeyPath, Any] = {}
    if facts.get(HAS_EXTRA) and EXTRA not in objects:
        if lead is None or lead.extra is None:
            raise Damaged(Damage.MISSING, image_file(0), "extra, which rank 0 had")
        extra = {(EXTRA,): dict(lead.extra)}
    if facts.get(BUFFERS_OF, 0) == 0:
        return extra, {}
    if lead is not None and lead.buffers:
        return extra, lead.buffers
    if rank == 0:
        raise Damaged(Damage.MISSING, image_file(0), "the buffers of rank 0, which DDP sends to all others")
    return extra, {}


def _put_buffers(buffers: Mapping[str, torch.Tensor], landings: Mapping[str, Landing]) -> None:
    for name, value in buffers.items():
        landing = landings.get(key_of((MODEL, plain_name(name))))
        if landing is None or (landing.target.tensor.dtype, landing.target.tensor.shape) != (value.dtype, value.shape):
            raise Damaged(Damage.MISSING, image_file(0), f"rank 0's buffer {name} in the form of this model")
        landing.target.tensor.copy_(value)


def _check_parts(trainee: Trainee, shared: Mapping[str, Any], own: Mapping[str, Any], tolerance: Tolerance) -> None:
    """Raises Damaged where the checkpoint has no state for an object that is to get one."""
    stored = {*shared, *own}
    lacking = [name for name, part in trainee.parts.items() if part is not None and name not in stored]
    if lacking := [name for name in lacking if name not in tolerance.missing]:
        raise Damaged(
            Damage.MISFIT,
            index_file(0),
            f"it has no state of the {' and the '.join(lacking)}",
            hint=f"it was saved without; pass allow_missing={lacking!r} to begin anew with what is not there",
        )


def _not_shared(loader: Stateful, why: str) -> Damaged:
    return Damaged(
        Damage.MISFIT,
        index_file(0),
        f"{why}, and each rank's {type(loader).__name__} has a position of its own",
        hint="resume with as many ranks as saved, use an ElasticSampler, give the loader a shared_position(), or "
        "pass allow_missing=['loader']",
    )


def _with_types_of(stored: Any, present: Any, *, follows_weight: bool) -> None:
    """Put values of ``stored`` into ``present`` where a cast has changed their types.

    Args:
        follows_weight: the weight itself was cast, and with it all values but whole numbers; counters never are.
    """
    places = stored.items() if isinstance(stored, Mapping) else enumerate(stored)
    for key, value in places:
        try:
            here = present[key]
        except (KeyError, IndexError):
            continue  # the optimizer's own load has put it elsewhere
        if isinstance(value, torch.Tensor):
            is_cast = isinstance(here, torch.Tensor) and here.dtype != value.dtype and key != _STEP
            if is_cast and not (follows_weight and value.is_floating_point()):
                present[key] = value.to(here.device)
        elif isinstance(value, dict | list) and isinstance(here, dict | list):
            _with_types_of(value, here, follows_weight=follows_weight)


def _model_landings(trainee: Trainee, stored: Stored, tolerance: Tolerance, recast: set[str]) -> dict[str, Landing]:
    """Adds to ``recast`` the names of weights that are of another dtype in the checkpoint."""
    present = {plain_name(name): value for name, value in unwrapped(trainee.model).state_dict().items()}
    keys = [key for key in (*stored.tensors, *stored.objects) if stored.path(key)[0] == MODEL]
    names = {str(stored.path(key)[1]) if len(stored.path(key)) > 1 else key for key in keys}
    if missing := sorted(present.keys() - names):
        raise _misfit(f"it lacks {_some(missing)}")
    if unknown := sorted(names - present.keys()):
        raise _misfit(f"this model has no {_some(unknown)}")
    landings, mappable = {}, _only_copied(unwrapped(trainee.model))
    for key in keys:
        name, there = str(stored.path(key)[1]), stored.tensors.get(key)
        here: Any = present[name] if len(stored.path(key)) == 2 else None
        if is_dense(here):
            shape = list(here.shape)
            if there is None or list(there.shape) != shape:
                raise _misfit(f"{name} is {list(there.shape) if there else 'no tensor'} there and {shape} here")
            if there.dtype != here.dtype:
                if not tolerance.cast:
                    raise Damaged(
                        Damage.MISFIT,
                        index_file(0),
                        f"{name} is {name_of_dtype(there.dtype)} there and {name_of_dtype(here.dtype)} here",
                        hint="load into a model of the type that was saved, or pass allow_cast=True",
                    )
                recast.add(name)
        if there is not None:
            landings[key] = landing_of(stored, key, here, may_map=name in mappable and is_dense(here))
    return landings


def _only_copied(model: torch.nn.Module) -> set[str]:
    """The names of values that ``load_state_dict`` copies, and keeps no tensor of: where it is torch's own all through,
    weights and buffers. What a module takes as its extra state it may keep."""
    if getattr(model.load_state_dict, "__func__", None) is not torch.nn.Module.load_state_dict:
        return set()
    if any(
        module._load_state_dict_pre_hooks
        or not getattr(module._load_from_state_dict, "__module__", "").startswith("torch.nn.modules.")
        for module in model.modules()
    ):
        return set()
    values = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {plain_name(name) for name, _ in values}


def _optimizer_landings(trainee: Trainee, stored: Stored, leaves: Mapping[KeyPath, Any]) -> dict[str, Landing]:
    names = group_names(trainee)
    _check_groups(names, leaves)
    flat = [name for group in names for name in group]
    parameters = [parameter for group in trainee.optimizer.param_groups for parameter in group[PARAMS]]
    by_name = dict(zip(flat, parameters, strict=True))
    landings, apart = {}, Apart(trainee)
    for key in stored.tensors:
        path = stored.path(key)
        if path[0] == MODEL:
            continue
        parameter, here, in_place = None, None, None
        if path[:2] == (OPTIMIZER, STATE) and len(path) > 3:
            parameter = by_name.get(str(path[2]))
            here = _present_state(trainee, parameter, path[3:])
        if here is not None and apart.has(here):
            in_place = landing_in_place(stored, key, here)
        landings[key] = in_place or landing_of(stored, key, parameter if here is None else here)
    return landings


def _present_state(trainee: Trainee, parameter: torch.Tensor | None, path: KeyPath) -> torch.Tensor | None:
    """The optimizer's present state there; None where it has none yet."""
    value: Any = trainee.optimizer.state.get(parameter) if parameter is not None else None
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, torch.Tensor) else None


def _check_groups(here: Sequence[Sequence[str]], leaves: Mapping[KeyPath, Any]) -> None:
    there = {path[2]: value for path, value in leaves.items() if path[:2] == (OPTIMIZER, GROUPS) and path[-1] == PARAMS}
    if not there:
        raise _misfit("it has no optimizer state")
    counts = [len(there[number]) for number in sorted(there)]
    if len(counts) != len(here):
        raise _misfit(f"the optimizer has {len(counts)} parameter groups there and {len(here)} here")
    for number, names in enumerate(here):
        if missing := sorted(set(names) - set(there[number])):
            raise _misfit(f"optimizer group {number} lacks {_some(missing)}")
        if unknown := sorted(set(there[number]) - set(names)):
            raise _misfit(f"optimizer group {number} has no {_some(unknown)} here")


def _with_raw_names(trainee: Trainee, model: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that the model itself uses."""
    return {name: model[plain_name(name)] for name in unwrapped(trainee.model).state_dict()}


def _with_numbers(trainee: Trainee, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of ``Optimizer.load_state_dict``: parameters by their places in this optimizer."""
    names = group_names(trainee)
    flat = [name for group in names for name in group]
    number_of = {name: number for number, name in enumerate(flat)}
    groups = [
        {**group, PARAMS: [number_of[name] for name in here]}
        for group, here in zip(optimizer[GROUPS], names, strict=True)
    ]
    state = {number_of.get(name, name): value for name, value in optimizer.get(STATE, {}).items()}
    return {**optimizer, STATE: state, GROUPS: groups}


def _landed(value: Any) -> Any:
    """With tensors in the place of landings."""
    return tree_map_only(Landing, Landing.value, value)


def _misfit(problem: str) -> Damaged:
    return Damaged(Damage.MISFIT, index_file(0), problem)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- The walk from the best candidate to the first that every rank can use: in memory first, then on disk ---

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
        self._part = WHOLE
        with contextlib.suppress(UsageError):
            weights = unwrapped(trainee.model).parameters()
            self._part = part_of(weights, rank=self._team.rank, world_size=self._team.world_size)
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
            return [entry.identity for entry in ordered]

        return self._from_disk(self._agreed(best_first), "")

    def chosen(self, is_wanted: Callable[[Entry], bool]) -> LoadedCheckpoint:
        """The newest for which ``is_wanted``, asked on rank 0, is true; from disk, and nothing where there is none.

        Raises:
            CheckpointError: there is one, and it cannot be used.
        """

        def wanted() -> list[Identity]:
            entries = [entry for entry in Catalog(self._directory).committed() if is_wanted(entry)]
            return [entry.identity for entry in entries[:1]]

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
                sources = DiskSources(_believed_entry(path), held) if decision.is_committed else held
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

    def _prepared(self, stored: Stored, notes: OwnNotes) -> Prepared:
        team = self._team
        return prepare(
            self.trainee, stored, rank=team.rank, world_size=team.world_size, tolerance=self._tolerance, notes=notes
        )

    def _exchange(self, guard: Guard, prepared: Prepared | None) -> list[list[int]]:
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
            with guard, reading(path):
                entry = _believed_entry(path)
                stored = Stored(DiskSources(entry), own=self._team.rank)
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
        numbers = [number for one in found for number in one]
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
                entry = _believed_entry(self._directory / identity.folder_name)
            except Damaged as error:
                if error.damage in _QUARANTINE:
                    marked += identity
                continue
            row = [*identity, entry.world_size]
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
        self, path: Path, prepared: Prepared, identity: Identity, facts: Mapping[str, Any], source: str, *,
        is_durable: bool = True,
    ) -> LoadedCheckpoint:  # fmt: skip
        settle(self.trainee.model.parameters())  # an update on another stream would come on top of what is loaded
        prepared.apply()
        SAVERS.loaded = Loaded(identity.step, self.trainee.loader, prepared.loader_state, savers.capture())
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


def _fits_nowhere(rows: Sequence[Sequence[int]]) -> bool:
    """Whether objects cannot take a state that is intact. Where it is damaged, the next candidate is tried."""
    found = {damage for damage, *_ in rows}
    return _OTHER in found or (Damage.MISFIT in found and found <= {Damage.NONE, Damage.MISFIT})


def _believed_entry(path: Path) -> Entry:
    """What its marker says, before a byte of its files is read."""
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
