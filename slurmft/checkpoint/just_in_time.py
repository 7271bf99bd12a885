"""The last complete step, saved by a rank that still has it when another one fails.

In a replicated run every rank has all weights. When one dies, the others wait for it in a collective of the next step,
with the weights of the last complete one. Each node's first rank that is asked, or that leaves with an error, copies
them to its place in memory, together with the own state of every rank of the node (``RankRecord``); so the next
attempt goes on where this one was, bit for bit. Where weights are spread over ranks that have replicas (HSDP), one rank
does that for each part of them on the node (``Part``), and the next attempt takes each part from any replica.

That needs the weights to be still those of the step: an optimizer's hook is called before it changes them, and
``WeightsWatch`` finds other changes. Buffers, which a forward pass changes, are copied at every boundary, and rank 0,
whose buffers and ``extra`` count, notes them (``LeadNote``). Where a rank dies after its last collective of a step and
before the end of that step, its own state at that end is unknown: the step is not kept, and the restart goes back to an
older state.

A GPU runs behind its host: ``DeviceSteps`` knows which step's state lies there, and copies go beside the stream that
hangs in a collective.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from slurmft.checkpoint.catalog import own_generation
from slurmft.checkpoint.image_file import lock_within
from slurmft.checkpoint.notes import ERA, LATE_S, BoundaryNotes, Extra, Send
from slurmft.checkpoint.state import (
    BUFFERS_OF,
    EXTRA,
    FACTS,
    GROUPS,
    HAS_EXTRA,
    MODEL,
    PARAMS,
    STATE,
    WHOLE,
    Between,
    FlatState,
    Trainee,
    as_json,
    capture,
    key_of,
    part_of,
    plain_name,
    rank_key,
    unwrapped,
)
from slurmft.errors import CheckpointError, UsageError
from slurmft.ipc.pages import IN_UPDATE, NOTHING, PAGE_VARIABLE, RESCUE_SUFFIX
from slurmft.policy.hangs import why_not_to_trust
from slurmft.storage.checkpoint_names import ranks_of_this_node
from slurmft.system.files import open_regular
from slurmft.trainer import streams
from slurmft.trainer.savers import SAVERS, local_part, weakly
from slurmft.trainer.streams import Device, Event, is_on_device

# --- Which step's state lies on a GPU now, independent of the work that the host has queued since ---
# The host runs ahead: when it is at the end of step 9, the device may hang in a collective of step 8, with the weights
# of step 7. So events are recorded at the end of each step, and around each update of the weights. The state of a step
# is trusted where the device has passed its end and not yet begun to change it for the next one: before a copy, and
# again after it. State of the host alone (the schedule, an optimizer's counters in main memory) is noted at the end of
# each step.

AHEAD = 4
"""Steps that the host may be ahead of its device; ``RankRecord`` remembers as many."""


@dataclass(slots=True)
class DeviceStep:
    """The end of one step."""

    step: int
    events: Sequence[Event]
    """Events that are done when its state is whole: updates of the weights, then the end of the step."""

    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    counters: dict[tuple[int, str], torch.Tensor]
    """The optimizer's tensors in main memory, by parameter and name."""

    left: list[Event] = field(default_factory=list)
    """Come by when what follows begins to change the weights, or the copies of the buffers."""

    def has_come(self) -> bool:
        """Whether the device has done all of it."""
        return all(event.query() for event in self.events)

    def has_begun(self) -> bool:
        """Whether the device has done any of it, or has begun to change the state for what follows."""
        return any(event.query() for event in (*self.events, *self.left))

    def as_of(self, trainee: Trainee) -> Trainee:
        """``trainee`` with the host's state at the end of this step; tensors on the device are its own."""
        scheduler = trainee.scheduler
        if scheduler is not None and self.scheduler is not None:
            scheduler = _Noted(self.scheduler)
        optimizer = cast(torch.optim.Optimizer, _OptimizerThen(trainee.optimizer, self))
        return replace(trainee, optimizer=optimizer, scheduler=scheduler)


class DeviceSteps:
    """The newest steps that the host has queued. One thread records them, another one may read."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._steps: deque[DeviceStep] = deque(maxlen=AHEAD)
        self._updates: list[Event] = []

    def boundary(self, step: int, trainee: Trainee) -> None:
        """The host is at the end of ``step``; waits for nothing."""
        groups = [{name: _now(value) for name, value in group.items() if name != PARAMS}
                  for group in trainee.optimizer.param_groups]  # fmt: skip
        counters = {
            (id(parameter), name): value.clone()
            for parameter, state in getattr(trainee.optimizer, "state", {}).items() for name, value in state.items()
            if isinstance(value, torch.Tensor) and not is_on_device(value)
        }  # fmt: skip
        scheduler = None if trainee.scheduler is None else copy.deepcopy(trainee.scheduler.state_dict())
        events, self._updates = [*self._updates, self._recorded()], []
        self._steps.append(DeviceStep(step, events, groups, scheduler, counters))

    def state_changes(self) -> None:
        """The host is about to ask for new weights, or for new copies of the buffers, on the current stream."""
        if self._steps:
            self._steps[-1].left.append(self._recorded())

    def update_ends(self) -> None:
        """It has asked for new weights."""
        self._updates.append(self._recorded())

    def forget(self) -> None:
        """The state was replaced."""
        self._steps.clear()
        self._updates = []

    def newest(self) -> DeviceStep:
        """The step whose state lies on the device now, whole.

        Raises:
            UsageError: there is none.
        """
        later: list[DeviceStep] = []
        for one in reversed(list(self._steps)):
            if one.has_come():
                if any(event.query() for event in one.left) or any(each.has_begun() for each in later):
                    raise UsageError(f"the device is between step {one.step} and the next one")
                return one
            later.append(one)
        raise UsageError(f"the device is more than {len(self._steps)} steps behind the host")

    def check(self, step: DeviceStep) -> None:
        """After a copy: raises UsageError where the device has gone on meanwhile."""
        if self.newest() is not step:
            raise UsageError(f"the device has gone on since step {step.step}")

    def _recorded(self) -> Event:
        event: Event = self.device.event()
        event.record()
        return event


def _now(value: Any) -> Any:
    """A value as it is now; tensors on the device are read when they are needed."""
    return value.clone() if isinstance(value, torch.Tensor) and not is_on_device(value) else value


class _Noted:
    """A scheduler as it was."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        raise NotImplementedError


class _OptimizerThen:
    """An optimizer with the groups and counters of an earlier step: what ``flat_state.capture`` asks of one."""

    def __init__(self, optimizer: torch.optim.Optimizer, then: DeviceStep) -> None:
        self._optimizer, self._then = optimizer, then

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def state_dict(self) -> Mapping[str, Any]:
        now = self._optimizer.state_dict()
        parameters = [one for group in self._optimizer.param_groups for one in group[PARAMS]]
        numbers = [number for group in now[GROUPS] for number in group[PARAMS]]
        id_of = {number: id(one) for number, one in zip(numbers, parameters, strict=True)}
        state = {
            number: {name: self._then.counters.get((id_of.get(number, 0), name), value) for name, value in one.items()}
            for number, one in now[STATE].items()
        }
        groups = [{**then, PARAMS: group[PARAMS]} for then, group in zip(self._then.groups, now[GROUPS], strict=True)]
        return {**now, STATE: state, GROUPS: groups}


# --- Of the ranks of a node that could keep a step just in time, one does; the others wait, in case it fails ---

OTHERS_S = 10.0
"""How long a rank waits for another one of its node that keeps the step."""

_MARK = "rescue-"


@contextlib.contextmanager
def alone_on_this_node(folder: Path, step: int, part: int = 0) -> Iterator[int]:
    """A descriptor of the file with which the ranks of a node take turns at a step; the lock ends with its holder.

    Ranks that have different parts of the state do not wait for each other.

    Raises:
        OSError: another rank has it for too long, or there is no room for it.
    """
    of_this_load = f"{own_generation()}-{SAVERS.loads}-{step}"  # step numbers repeat after one
    descriptor = open_regular(folder / f"{_MARK}{of_this_load}-{part}", os.O_RDWR | os.O_CREAT)
    try:
        lock_within(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), OTHERS_S)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_marks(folder: Path) -> None:
    """Of earlier attempts: none of their ranks lives."""
    for path in folder.glob(f"{_MARK}*"):
        if not path.name.startswith(f"{_MARK}{own_generation()}-"):
            path.unlink(missing_ok=True)


# --- Whether the state is still that of the last boundary: weights, schedule and scale, without a copy of them ---
# Just in time, the weights of a step are kept after the next step has begun. That is right only while nothing has
# changed them. Steps of optimizers call a hook before they change anything; other changes of weights (a wrapper's own
# update, an average that is swapped in for an evaluation, a graph that is replayed) are found by comparison.

MAX_SAMPLED = 32
"""Weights of which some values are compared: changes through ``.data`` leave torch's count of writes as it is."""

SAMPLE_VALUES = 16
_PLAIN = (bool, int, float, str)
_MAX_DEPTH = 2
_MAX_NESTED = 6


class WeightsWatch:
    """Compares the trainee now with what it was at the newest ``note``."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        weights = {id(one): one for one in unwrapped(trainee.model).parameters()}
        weights |= {id(one): one for group in trainee.optimizer.param_groups for one in group["params"]}
        self._ids, self._weights = weights.keys(), list(weights.values())
        self._versions: list[int] = []
        self._addresses: list[int] = []
        dense = [one for one in self._weights if (here := local_part(one)).numel() and here.layout is torch.strided]
        self._sampled = dense[:: -(-len(dense) // MAX_SAMPLED) or 1]
        self._views: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []
        self._schedule: list[Any] = []

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of ``optimizer`` changes weights that are watched, also where it is wrapped."""
        return any(id(one) in self._ids for group in optimizer.param_groups for one in group["params"])

    def note(self) -> None:
        """Note them at a boundary. Does not wait for a GPU."""
        self._versions = [local_part(one)._version for one in self._weights]
        if (addresses := [local_part(one).data_ptr() for one in self._sampled]) != self._addresses:
            self._addresses = addresses
            self._views = [_first_values(one) for one in self._sampled]
            self._samples = [one.clone() for one in self._views]
        elif self._views:
            torch._foreach_copy_(self._samples, self._views)
        self._schedule = _schedule(self._trainee)

    def weights_were_written(self) -> bool:
        """Whether torch has counted a write since ``note``; cheap."""
        return self._versions != [local_part(one)._version for one in self._weights]

    def difference(self, *, of_values: bool = True) -> str:
        """The first change since ``note``; empty where there is none. Without ``of_values`` no kernel is launched."""
        if self.weights_were_written() or self._addresses != [local_part(one).data_ptr() for one in self._sampled]:
            return "the weights were changed"
        if of_values and not all(map(torch.equal, self._samples, self._views)):
            return "the weights were changed"
        if self._schedule != _schedule(self._trainee):
            return "the learning rate, schedule or scale was changed before the weights were"
        return ""


def can_be_heard(optimizer: Any) -> bool:
    """Whether the step of this optimizer, or of one that it wraps, calls its hooks before it changes anything."""
    return any(getattr(getattr(type(one), "step", None), "hooked", False) for one in _with_inner(optimizer, _MAX_DEPTH))


def _with_inner(optimizer: Any, depth: int) -> Iterator[Any]:
    yield optimizer
    if depth:
        for value in getattr(optimizer, "__dict__", {}).values():
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, torch.optim.Optimizer):
                    yield from _with_inner(one, depth - 1)


def _first_values(weight: torch.Tensor) -> torch.Tensor:
    """A view of some of its values, wherever they lie."""
    view = local_part(weight).detach()
    while view.dim() > 1:
        view = view[0]
    return view[:SAMPLE_VALUES] if view.dim() else view


def _schedule(trainee: Trainee) -> list[Any]:
    """The values that a scheduler or scaler changes; some trainers call theirs at the beginning of a step."""
    values: list[Any] = []
    for group in trainee.optimizer.param_groups:
        values += [mark for name, value in group.items() if name != "params" for mark in _marks(value, _MAX_DEPTH)]
    for part in (trainee.scheduler, trainee.scaler):
        values += _marks(part, _MAX_NESTED)
    return values


def _marks(value: Any, depth: int) -> Iterator[Any]:
    """Plain values, and how often tensors were written to, in a part's attributes, collections, and parts of its own.

    Not its ``state_dict()``: a scaler's waits for the GPU.
    """
    if type(value) in _PLAIN:
        yield value
    elif isinstance(value, torch.Tensor):
        yield id(value), value._version
    elif not depth or isinstance(value, torch.optim.Optimizer):
        return
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            yield from _marks(key, 0)
            yield from _marks(one, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for one in list(value):
            yield from _marks(one, depth - 1)
    elif hasattr(value, "state_dict"):
        yield from _marks(getattr(value, "__dict__", {}), depth)


# --- The last complete step, saved by a rank that still has it when another one fails ---

MAX_SHARE = 0.05
"""Of the time of a step, which the notes at its boundaries may take; about 0.1 ms of processor time."""

TRIAL_STEPS = 50
_KEPT = b"1"

log = logging.getLogger(__name__)

Stage = Callable[[int, FlatState, Callable[[], None]], None]
"""Copies the state after so many steps to where a restart finds it, unless the check at the end of the copy raises."""


class JustInTime:
    """One rank's part. ``arm`` it with the objects that are trained; without that it does nothing.

    Args:
        folder: the node's memory folder, which outlives the rank.
        stage: does the copy; raises where it cannot.
        send: sends notes to other nodes; None where none take them.
    """

    def __init__(self, folder: Path, stage: Stage, send: Send | None = None) -> None:
        self._folder, self._stage, self._send = folder, stage, send
        self._rank = int(os.environ.get("RANK", "0"))
        self._local = ranks_of_this_node()
        self._lock = threading.Lock()
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._trainee: Trainee | None = None
        self._part = WHOLE
        self._between: Between | None = None
        self._notes: BoundaryNotes | None = None
        self._watch: WeightsWatch | None = None
        self._on_device: DeviceSteps | None = None
        self._step = self._kept = NOTHING
        self._is_whole = True
        self._distrust = ""
        """Why it is off permanently."""

        self._buffers: dict[str, torch.Tensor] = {}
        self._live: tuple[object, ...] = ()
        self._unknown: tuple[int, str] | None = None
        """The model, and why its state at a boundary is unknown later."""

        self._spent_s = 0.0
        self._since: tuple[float, int] | None = None
        self.reason = "nothing was saved or loaded yet"
        """Why the last complete step cannot be kept; empty when it can."""

    def arm(self, trainee: Trainee, *, reason: str = "", step: int | None = None, extra: Extra | None = None) -> None:
        """From now on be ready to keep ``trainee``; with a ``reason`` do not, for that reason.

        ``step`` steps are complete, where that is known; the first boundary is not reported otherwise. ``extra`` is
        asked on rank 0 after each one. Errors here are logged, and the save or load goes on.
        """
        try:
            with self._lock:
                self._arm(trainee, reason, extra, step)
            if step is not None and self._step == NOTHING:
                self.at_boundary(step)
        except Exception as error:  # noqa: BLE001 - of the user's model or loader, at a save that they let pass
            self.disarm(f"{type(error).__name__}: {error}")

    def _arm(self, trainee: Trainee, reason: str, extra: Extra | None, step: int | None) -> None:
        devices = streams.devices(unwrapped(trainee.model).parameters())
        if devices and (self._on_device is None or self._on_device.device is not devices[0]):
            self._on_device = DeviceSteps(devices[0])
        reason = self._distrust or reason or (why_not_to_trust(os.environ) if devices else "")
        if not reason and len(devices) > 1:
            reason = f"the model is spread over {len(devices)} devices of this process, each at its own pace"
        reason = reason or self._why_not_known(unwrapped(trainee.model)) or self._why_no_part(trainee)
        if reason:
            return self._disarm(reason)
        if not can_be_heard(trainee.optimizer):
            return self._doubt(f"{type(trainee.optimizer).__name__} updates the weights unseen")
        if self._watch is None or self._trainee != trainee:
            self._watch, self._step = WeightsWatch(trainee), NOTHING
            if self._on_device is not None:  # updates of what is not armed are not heard of
                self._on_device.forget()
        self.reason, self._trainee = "", trainee
        if self._notes is None:
            try:
                self._notes = BoundaryNotes(self._folder, self._rank, self._send)
            except OSError as error:
                return self._disarm(f"no memory for it: {error}")
            hook = register_optimizer_step_pre_hook(weakly(self._before_optimizer))
            weakref.finalize(self, hook.remove)
            after = register_optimizer_step_post_hook(weakly(self._after_optimizer))
            weakref.finalize(self, after.remove)
            remove_marks(self._folder)
            self._listen()
        self._cover(unwrapped(trainee.model))
        try:
            is_noted = self._notes.covers(extra, None if self._on_device is not None else self._buffers)
            if not is_noted and self._step == step and self._is_whole:  # else it may be a save in the middle of a step
                self._notes.note_lead(self._step)
        except OSError as error:
            return self._disarm(f"no memory for it: {error}")
        SAVERS.is_armed = True
        return None

    def _cover(self, model: torch.nn.Module) -> None:
        """Make room for the model's buffers. Their copies are those of the newest boundary, and made there alone."""
        live = _buffers(model)
        known = (id(model), *((name, value.dtype, value.shape, value.device) for name, value in live.items()))
        if self._live != known:  # the training loop waits: not anew at every save
            kept = model.state_dict(keep_vars=True).keys() & live.keys()
            self._buffers = {name: live[name].detach().clone() for name in sorted(kept)}
            self._live, self._step = known, NOTHING
            if self._on_device is not None:  # its steps are whole with the former copies only
                self._on_device.forget()

    def _why_not_known(self, model: torch.nn.Module) -> str:
        """A module's extra state may change in a forward pass, which is not noted anywhere."""
        if self._unknown is None or self._unknown[0] != id(model):
            known = {*_buffers(model), *(name for name, _ in model.named_parameters(remove_duplicate=False))}
            others = sorted(model.state_dict(keep_vars=True).keys() - known)
            text = f"the model's state has {', '.join(others[:3])} beside weights and buffers" if others else ""
            self._unknown = id(model), text
        return self._unknown[1]

    def _why_no_part(self, trainee: Trainee) -> str:
        """Where weights are spread over ranks, note them as they are between steps; or why no other rank has them."""
        try:
            part = part_of(unwrapped(trainee.model).parameters(), rank=self._rank, world_size=self._world_size)
        except UsageError as error:
            return error.what
        if part.number != self._part.number and SAVERS.listener is not None:
            SAVERS.listener.on_part(part.number)
        self._part, self._between = part, Between.steps(trainee, part) if part.mesh is not None else None
        return ""

    def disarm(self, reason: str) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._disarm(reason)

    def loaded(self) -> None:
        """The state was replaced: step numbers may repeat."""
        with self._lock:
            self._step = self._kept = NOTHING
            if self._on_device is not None:
                self._on_device.forget()

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Around the copy of a save, whose place in memory a copy by ``rescue`` must not take meanwhile.

        That all ranks have staged the step is known at the next boundary; until then it is still kept if one fails.
        """
        with self._lock:
            yield

    def saved(self, step: int) -> None:
        """The state after ``step`` steps is durable: it need not be kept."""
        self._kept = max(self._kept, step)
        self._tell()

    def at_boundary(self, step: int) -> None:
        """As ``trainer.savers.Saver``."""
        if self._trainee is None or self._notes is None or self._watch is None:
            return
        began = time.thread_time()
        with self._lock:
            if self._step != NOTHING and self._is_whole and self._watch.weights_were_written():
                self._doubt(f"the weights were changed in step {step} outside of an optimizer's step")
                return
            self._step, self._is_whole = step, True
            if self._on_device is None:
                self._copy_buffers()  # first: they are noted
            try:
                self._notes.note(step, None if self._trainee is None else as_json(self._trainee.loader_state()))
            except (UsageError, CheckpointError) as error:
                self._disarm(error.what)
                return
            except Exception as error:  # noqa: BLE001 - of the user's own function
                self._disarm(f"extra() raised {type(error).__name__}: {error}")
                return
            self._watch.note()
            if self._on_device is not None:
                if self._buffers:
                    self._on_device.state_changes()
                self._copy_buffers()
                self._on_device.boundary(step, self._trainee)
            self._tell()
        self._account(began, step)

    def rescue(self) -> None:
        """As ``trainer.savers.Saver``. The first rank of a node that gets here does it for all."""
        listener = SAVERS.listener
        if self._trainee is None or listener is None:
            return
        listener.on_rescuing()  # before the lock, which a save that is being copied holds
        try:
            with self._lock:
                self._rescue()
                self._tell()
        finally:
            listener.on_rescuing(is_over=True)

    def _rescue(self) -> None:
        step, then = self._step, None
        if self._trainee is None or (not self._is_whole and self._on_device is None) or step <= self._kept:
            return
        if self._on_device is not None:
            try:
                self._on_device.device.use()
                step = (then := self._on_device.newest()).step
            except (UsageError, RuntimeError) as error:  # a device that has failed says so at every question
                log.warning("no step is kept just in time: %s", error)
                return
            if step <= self._kept:
                return
        part = self._part.number
        if not part and self._rank and 0 in self._local and not self._has_lead(step):
            return  # what is each rank's own, and rank 0's counts: rank 0 can still keep it
        try:
            with alone_on_this_node(self._folder, step, part) as mark:
                self._kept = step  # in any case: another rank may try, but not this one again
                if os.pread(mark, 1, 0) == _KEPT:
                    return
                if self._keep(step, then):
                    os.pwrite(mark, _KEPT, 0)
        except OSError as error:
            self._kept = step
            log.warning("step %d is not kept: %s", step, error)

    def _has_lead(self, step: int) -> bool:
        """Whether this rank knows all that rank 0 alone had."""
        lead = self._notes.lead(step) if self._notes is not None else None
        has_buffers = not self._buffers or (lead is not None and bool(lead.buffers))
        return has_buffers and (lead is not None or self._notes is None or not self._notes.has_extra)

    def _keep(self, step: int, then: DeviceStep | None) -> bool:
        """Whether the copy is complete."""
        began = time.monotonic()
        try:
            if self._trainee is None:
                return False
            with contextlib.ExitStack() as stack:
                trainee, check = self._trainee, self._check
                if then is not None and self._on_device is not None:
                    stack.enter_context(self._on_device.device.beside())
                    trainee, check = then.as_of(trainee), functools.partial(self._check_device, self._on_device, then)
                check()
                self._stage(step, self._state(trainee, step), check)
        except Exception as error:  # noqa: BLE001 - this process fails anyway, of another error, which must be reported
            log.warning("step %d is not kept just in time: %s", step, error)
            return False
        log.info("kept step %d just in time, in %.3f s", step, time.monotonic() - began)
        if SAVERS.listener is not None:
            SAVERS.listener.on_rescued(step)
        return True

    def _check(self) -> None:
        """Raises UsageError where the state is no longer that of the boundary."""
        if self._watch is not None and (difference := self._watch.difference()):
            raise UsageError(f"{difference} since step {self._step} was complete")

    def _check_device(self, device: DeviceSteps, then: DeviceStep) -> None:
        """As ``_check``, for state on a device; a comparison of values would launch kernels, which may wait."""
        device.check(then)
        is_newest = self._is_whole and then.step == self._step
        if is_newest and self._watch is not None and (difference := self._watch.difference(of_values=False)):
            raise UsageError(f"{difference} since step {then.step} was complete")

    def _state(self, trainee: Trainee, step: int) -> FlatState:
        """This rank's part of the state as it was at the boundary, with the own state of each rank of this node."""
        notes = self._notes
        if notes is None:
            raise UsageError("nothing was noted")
        flat = capture(trainee, None, rank=self._part.number, between=self._between)
        del flat.objects[rank_key(self._part.number)]  # of this moment, not of the boundary
        for rank, state in notes.own_states(step, within_s=LATE_S if self._between else 0.0).items():
            flat.put(rank_key(rank), state)
        if self._part.number:  # all that is not spread belongs to part 0
            return flat
        lead, buffers = notes.lead(step), dict(self._buffers)
        facts: dict[str, Any] = {"metrics": {}, "world_size": self._world_size}
        facts |= {"just_in_time": True, ERA: SAVERS.loads}
        if notes.has_extra:
            facts[HAS_EXTRA] = True
            del flat.objects[EXTRA]
            if lead is not None and lead.extra is not None:
                flat.put(EXTRA, lead.extra)
            elif 0 in self._local:
                raise UsageError(f"extra after step {step} is not known")
        if buffers:
            facts[BUFFERS_OF] = self._rank
            if lead is not None and lead.buffers.keys() == buffers.keys():
                buffers, facts[BUFFERS_OF] = dict(lead.buffers), 0
        flat.tensors.update({key_of((MODEL, plain_name(name))): value for name, value in buffers.items()})
        flat.put(FACTS, facts)
        return flat

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Any that shares a weight: the trainer's optimizer may be a wrapper, which calls others."""
        if self._trainee is None or self._watch is None or not self._watch.shares(optimizer):
            return
        if not self._is_whole and self._on_device is None:
            return
        with self._lock:  # a copy that is under way gets to its end
            self._is_whole = False
            if self._on_device is not None:
                if self._on_device.device.is_capturing():
                    self._doubt("the optimizer's step is part of a CUDA graph, whose replays cannot be observed")
                    return
                self._on_device.state_changes()
            self._tell()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._on_device is None or self._trainee is None or self._watch is None:
            return
        if self._watch.shares(optimizer):
            self._on_device.update_ends()

    def _copy_buffers(self) -> None:
        if self._buffers and self._trainee is not None:
            live = _buffers(unwrapped(self._trainee.model))
            torch._foreach_copy_(list(self._buffers.values()), [live[name] for name in self._buffers])

    def _tell(self) -> None:
        if SAVERS.listener is not None:
            can = self._trainee is not None and self._step > self._kept - (not self._is_whole)
            # a device may have an older step, whole, in the middle of the host's update
            is_askable = self._is_whole or self._on_device is not None
            SAVERS.listener.on_rescuable((self._step if is_askable else IN_UPDATE) if can else NOTHING)

    def _account(self, began: float, step: int) -> None:
        now = time.perf_counter()
        self._spent_s += time.thread_time() - began
        if self._since is None:
            self._since, self._spent_s = (now, step), 0.0
        elif step - self._since[1] >= TRIAL_STEPS:
            share = self._spent_s / (now - self._since[0])
            self._since, self._spent_s = (now, step), 0.0
            if share > MAX_SHARE:
                with self._lock:
                    self._disarm(f"noting where each rank is takes {100 * share:.0f} % of these short steps")

    def _doubt(self, reason: str) -> None:
        """Keep nothing for as long as this process lives."""
        if not self._distrust:
            log.warning(
                "from now on no step is kept just in time: %s. A failure costs the steps since the newest save: change "
                "weights only in the step() of a torch.optim.Optimizer, or save more often",
                reason,
            )
        self._distrust = reason
        self._disarm(reason)

    def _disarm(self, reason: str) -> None:
        if self._trainee is not None or reason != self.reason:
            log.info("no step is kept just in time: %s", reason)
        self.reason, self._trainee = reason, None
        self._step = NOTHING  # boundaries are not reported any more
        self._tell()

    def _listen(self) -> None:
        """Wait in a thread for the agent's request: the main thread may hang in a collective."""
        page = os.environ.get(PAGE_VARIABLE)
        if not page:
            return
        pipe = Path(page).with_suffix(RESCUE_SUFFIX)
        try:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe, 0o600)
            descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            log.info("the agent cannot ask for the last step: %s", error)
            return

        def listen() -> None:
            while os.read(descriptor, 64):
                SAVERS.rescue()

        threading.Thread(target=listen, name="slurmft-rescue", daemon=True).start()


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By every name that they have: each is stored."""
    return dict(model.named_buffers(remove_duplicate=False))
