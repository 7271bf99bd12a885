"""A stored state on its way into the trainer's objects: checked for fit, read and verified, and only then applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurmft.checkpoint.format.damage import Damage, Damaged
from slurmft.checkpoint.format.flat_keys import Path, key_of, unflatten
from slurmft.checkpoint.format.flat_state import (
    BUFFERS_OF,
    EXTRA,
    FACTS,
    GROUPS,
    HAS_EXTRA,
    MODEL,
    OPTIMIZER,
    PARAMS,
    STATE,
    group_names,
    is_dense,
    plain_name,
    rank_key,
)
from slurmft.checkpoint.format.plain_state import original
from slurmft.checkpoint.format.reading import Stored
from slurmft.checkpoint.format.shard_index import image_file, index_file
from slurmft.checkpoint.landings import Apart, Landing, landing_in_place, landing_of
from slurmft.checkpoint.replicas.note_gathering import OwnNotes
from slurmft.checkpoint.staging.lead_note import LeadNote
from slurmft.checkpoint.staging.rank_records import ERA
from slurmft.checkpoint.state import (
    LOADER,
    Stateful,
    Tolerance,
    Trainee,
    load_part,
    position_number,
    shared_position,
    unwrapped,
)
from slurmft.errors import CheckpointError

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
            self.trainee.restore_rng(self.own)

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
    leaves: dict[Path, Any] = {stored.path(key): value for key, value in objects.items()} | extra
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
) -> tuple[dict[Path, Any], Mapping[str, torch.Tensor]]:
    """What rank 0 alone had and is not stored: the ``extra``, and the buffers that are to replace those stored.

    Raises:
        Damaged: it is lost.
    """
    extra: dict[Path, Any] = {}
    if facts.get(HAS_EXTRA) and EXTRA not in objects:
        if lead is None or lead.extra is None:
            raise Damaged(Damage.MISSING, image_file(0), "extra, which rank 0 had")
        extra = {(EXTRA,): dict(lead.extra)}
    if facts.get(BUFFERS_OF, 0) == 0:
        return extra, {}
    if lead is not None and lead.has_buffers:
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
                        f"{name} is {_short(there.dtype)} there and {_short(here.dtype)} here",
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


def _optimizer_landings(trainee: Trainee, stored: Stored, leaves: Mapping[Path, Any]) -> dict[str, Landing]:
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


def _present_state(trainee: Trainee, parameter: torch.Tensor | None, path: Path) -> torch.Tensor | None:
    """The optimizer's present state there; None where it has none yet."""
    value: Any = trainee.optimizer.state.get(parameter) if parameter is not None else None
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, torch.Tensor) else None


def _check_groups(here: Sequence[Sequence[str]], leaves: Mapping[Path, Any]) -> None:
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
    if isinstance(value, Landing):
        return value.value()
    if type(value) is dict:
        return {key: _landed(each) for key, each in value.items()}
    if type(value) is list:
        return [_landed(each) for each in value]
    return value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _misfit(problem: str) -> Damaged:
    return Damaged(Damage.MISFIT, index_file(0), problem)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
