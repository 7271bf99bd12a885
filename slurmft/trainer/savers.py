"""What a session and the checkpoint managers of a process share: their connection (neither needs the other), random
state, and groups of ranks.

The session knows when a step is complete, when the run must stop, and when a rank has failed. A manager knows the state
to save, and when a save in the background has become durable.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
import random
import secrets
import signal
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from itertools import chain, islice, pairwise
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from slurmft.errors import UsageError

# --- host group ---
# The process group for data in main memory: the default one where it takes such data, else a gloo group beside it.
#
# NCCL moves memory of a GPU only, runs one operation after the other on each communicator, and waits for all pending
# work of the device. Agreements of ranks, and transfers from memory to memory, must not go over it. Every rank makes
# the group at the same place: right after the default group (``worker.session``), or at the first collective of this
# package in a script that has made its own.

DESCRIPTION = "slurmft host"
"""By which the group is found again; torch forgets it together with the default group."""

BACKEND = "gloo"
DEFAULT_TIMEOUT = timedelta(minutes=30)

_CPU = torch.device("cpu")


def takes_host_data(group: Any = None) -> bool:
    """Whether ``group``, or the default one, moves tensors in main memory."""
    return _CPU in _device_types(group if group is not None else distributed_c10d._get_default_group())


def host_group(timeout: timedelta | None = None) -> Any:
    """The group over all ranks to give to collectives of tensors in main memory; a collective where it is made.

    Args:
        timeout: of the group where it is made now; the default group's own when it is not given.
    """
    world = distributed_c10d._get_default_group()
    if takes_host_data(world):
        return world
    for group in distributed_c10d._world.pg_map:
        if group.group_desc == DESCRIPTION:
            return group
    timeout = timeout or timeout_of(world) or DEFAULT_TIMEOUT
    return dist.new_group(backend=BACKEND, timeout=timeout, group_desc=DESCRIPTION)


class Team:
    """The ranks of the default process group, or this process alone when there is none.

    Making one may be a collective, and every method is: all ranks call the same ones in the same order. Exchanged
    tensors lie in main memory and travel over ``host_group``, never over NCCL. A rank that is gone shows as the process
    group's own error or timeout.
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self._group = host_group() if self.world_size > 1 else None

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row, in rank order. Rows have equal lengths; each number fits in 64 bits, signed."""
        table = torch.zeros(self.world_size, len(row), dtype=torch.int64)
        table[self.rank] = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(table, group=self._group)  # all other rows are zero here, so the sum is exact
        rows: list[list[int]] = table.tolist()
        return rows

    def exchange_with_nonces(self, row: Sequence[int]) -> tuple[list[list[int]], list[bytes]]:
        """As ``exchange``, and a fresh nonce of each rank: own messages of this time cannot be answered by old ones."""
        nonce = [secrets.randbits(62), secrets.randbits(62)]
        rows = self.exchange([*nonce, *row])
        rows[self.rank][:2] = nonce  # never a value for ours that another rank sends
        return [row[2:] for row in rows], [struct.pack("!2q", *row[:2]) for row in rows]

    def least(self, row: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks; costs less than ``exchange``, and the same with any of them."""
        tensor = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        values: list[int] = tensor.tolist()
        return values

    def from_lead(self, row: Sequence[int]) -> list[int]:
        """Rank 0's row, on every rank; the others pass a row of the same length."""
        tensor = torch.tensor(list(row), dtype=torch.int64)
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)
        values: list[int] = tensor.tolist()
        return values

    def bytes_from(self, source: int, payload: bytes, length: int) -> bytes:
        """The ``length`` bytes of rank ``source``, on every rank; what the others pass does not matter."""
        tensor = torch.zeros(length, dtype=torch.uint8)
        if self.rank == source:
            tensor.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if self._group is not None:
            dist.broadcast(tensor, src=source, group=self._group)
        value: bytes = tensor.numpy().tobytes()
        return value

    def bytes_of_all(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; they may differ in length."""
        lengths = [length for (length,) in self.exchange([len(payload)])]
        rows = torch.zeros(self.world_size, max(lengths), dtype=torch.uint8)
        rows[self.rank, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if self._group is not None:
            dist.all_gather(list(rows), rows[self.rank].clone(), group=self._group)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def send_and_receive(
        self, outgoing: tuple[torch.Tensor, int] | None, incoming: tuple[torch.Tensor, int] | None
    ) -> None:
        """Send one tensor to a rank and receive one from a rank, both at once; return when both have happened.

        One batch: on a group that does one thing after the other, ranks that send first wait for each other in a ring.
        Not a collective. A rank receives another one's tensors in the order in which they were sent.

        Args:
            outgoing, incoming: a tensor in main memory, and the rank that it goes to or comes from.
        """
        operations = [
            dist.P2POp(function, *one, self._group)
            for function, one in ((dist.isend, outgoing), (dist.irecv, incoming))
            if one is not None
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def is_lead() -> bool:
    """Whether this is rank 0, or alone; no group is made for the question, as ``Team`` may."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def any_rank(mine: bool) -> bool:
    """Whether it is so on some rank; a collective where there are several."""
    team = Team()
    return team.least([not mine]) == [0] if team.world_size > 1 else mine


def timeout_of(group: Any) -> timedelta | None:
    """After how long a collective of ``group`` times out, as the group itself says; None where it cannot be asked.

    Of several backends the shortest one counts.
    """
    found = list[timedelta]()
    for device in _device_types(group):
        try:
            options = group._get_backend(device).options
        except (RuntimeError, AttributeError):  # a backend without options has no timeout that could be read
            continue
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout)
    return min(found, default=None)


def _device_types(group: Any) -> list[torch.device]:
    return [torch.device(device) for device in group._device_types]


# --- The random number generators of one rank, as plain values that ``torch.load(weights_only=True)`` accepts ---
# Covers Python's ``random``, numpy's global generator (when numpy is loaded), torch's CPU generator and the current
# GPU's (when CUDA is in use). Generators that the trainer makes itself are its own to save.

log = logging.getLogger(__name__)

RandomState = dict[str, Any]
"""The states of this process's generators, as ``capture`` returns them."""

_ARRAY = "ndarray"


def capture() -> RandomState:
    """The present states; draws nothing from any generator. ``restore`` brings back exactly these."""
    state: RandomState = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = plain(numpy.random.get_state(legacy=False))
    # Asking an unused CUDA for its state would create a context: memory on the GPU, and a process that must not fork.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put every generator back to the state of ``capture``; later draws are identical.

    A generator that does not exist here (no numpy, no GPU) is named in a warning and left out. Unknown keys are
    ignored.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: ``state`` did not come from ``capture``.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    if "cuda" in state:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        else:
            log.warning("the saved GPU generator is not restored: this process has no GPU")


def has_drawn(since: Mapping[str, Any]) -> bool:
    """Whether a generator of ``since``, which ``capture`` has returned, is in another state now."""
    now = capture()
    return any(
        not torch.equal(state, now[name]) if isinstance(state, torch.Tensor) else state != now[name]
        for name, state in since.items()
    )


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy
    except ImportError:
        log.warning("the saved numpy generator is not restored: numpy is not installed here")
        return
    numpy.random.set_state(_original(state))


def plain(value: Any) -> Any:
    """Arrays and numpy scalars as Python values; a numpy array would need pickle's full power to load."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        items = value.tolist()
        return {_ARRAY: items, "dtype": str(value.dtype)} if isinstance(items, list) else items
    return value


def _original(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _ARRAY in value:
            import numpy

            return numpy.array(value[_ARRAY], dtype=value["dtype"])
        return {key: _original(item) for key, item in value.items()}
    return value


# --- gradients ---
# Whether gradients wait for an optimizer at the end of a step: the middle of an accumulation is no place to save.

_USED_UP = "_slurmft_used_up"
"""Attribute of a gradient: how often it had been written to when an optimizer used it; ``_LEFT`` where none has."""

_LEFT = -1


MAX_SAMPLED = 32
"""Weights whose gradients are looked at, spread over all of them."""

MAX_OPTIMIZERS = 8
"""With more, one per weight that works in the backward pass, each update is one of all weights."""

LONGEST_WINDOW = 1000
"""Steps without an update after which updates are taken to be hidden from us: a run must be saved at some time."""

MAX_LATE = 3
"""Updates in a row that use gradients of an earlier step and leave new ones: the script has no step to save after."""


class OpenGradients:
    """Follows the optimizers of this process. ``at_boundary`` is called once at the end of each step of the loop.

    What the step's last update has left, or weights that were written otherwise, wait for nothing.
    """

    def __init__(self) -> None:
        self.are_waiting = False
        """At the newest boundary, as far as this rank knows; costs nothing to ask."""

        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._weights: list[torch.Tensor] = []
        self._written: list[int] = []
        self._hook: Any = None
        self._has_update = self._is_late = self._is_blind = False
        self._open_for = self._late = 0

    def follow(self, optimizer: Any) -> None:
        """Its weights' gradients count from now on."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_update)
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._weights = []

    def at_boundary(self, model: torch.nn.Module | None) -> None:
        """A step has ended: ``are_waiting`` is true where it has left gradients that no optimizer has used since.

        Raises:
            UsageError: each update of this script is followed by a backward pass in the same step.
        """
        gradients = self._gradients()
        is_over = self._is_blind or self._wrote() or (self._has_update and len(self._optimizers) > MAX_OPTIMIZERS)
        are_new = any(self._is_new(one) for one in gradients)
        is_held = not self._has_update and model is not None and _has_unsharded(model)
        self.are_waiting = not is_over and (are_new or is_held)
        self._open_for = self._open_for + 1 if self.are_waiting else 0
        self._late = self._late + self._is_late if self.are_waiting else 0
        self._has_update = self._is_late = False
        if self._late >= MAX_LATE:
            raise UsageError(
                "the optimizer uses gradients of an earlier step, and each step leaves new ones behind: no checkpoint "
                "contains gradients, so there is no step to save after",
                hint="call its step() in the step of the last backward pass, not at the beginning of the next one",
            )
        if self._open_for > LONGEST_WINDOW:
            log.warning(
                "gradients were not used for %d steps: saves do not wait for their use any more, and do not "
                "contain them",
                LONGEST_WINDOW,
            )
            self.are_waiting, self._is_blind = False, True
        for one in gradients:  # on the tensor itself: the next one may have its address
            setattr(one, _USED_UP, _LEFT if self.are_waiting else _version(one))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_update = True
        self.follow(optimizer)
        if len(self._optimizers) > MAX_OPTIMIZERS:
            return
        for one in self._gradients():  # of all: one model's backward pass leaves some in others, which are not used
            self._is_late |= getattr(one, _USED_UP, None) == _LEFT
            setattr(one, _USED_UP, _version(one))
        self._wrote()

    def _is_new(self, gradient: torch.Tensor) -> bool:
        used, now = getattr(gradient, _USED_UP, None), _version(gradient)
        if self._has_update and used is not None:  # zeroed in place behind the update: once, as a rule
            return now > used + 1 and bool(local_part(gradient).any())
        return used != now

    def _wrote(self) -> bool:
        """Whether weights have changed since the last call."""
        before, self._written = self._written, [_version(one) for one in self._weights]
        return before != self._written

    def _gradients(self) -> list[torch.Tensor]:
        if not self._weights:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            weights = [one for group in groups for one in group["params"] if one.requires_grad]
            self._weights = weights[:: -(-len(weights) // MAX_SAMPLED) or 1]
            self._wrote()
        return [one for weight in self._weights if (one := weight.grad) is not None]


def _version(tensor: torch.Tensor) -> int:
    return local_part(tensor)._version


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, where it is spread over ranks."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _has_unsharded(model: torch.nn.Module) -> bool:
    """Whether FSDP holds gradients that it has not given to its weights yet (``set_requires_gradient_sync(False)``)."""
    for module in model.modules():
        group = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_group", None)
        for one in getattr(group, "fsdp_params", ()):
            whole = getattr(one, "_unsharded_param", None)
            if one.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False


# --- The connection of a session and the checkpoint managers of the same process; neither needs the other ---


class SaveOutcome(Enum):
    """The outcome of the newest call of a manager's ``save``."""

    DONE = "done"
    """Durable, or not reported: a save of the trainer's own is done when it returns."""

    STAGED = "staged"
    """Copied; it becomes durable in the background, and the listener is called then."""

    SKIPPED = "skipped"
    """Not saved: two earlier ones are still under way."""


class Saver(Protocol):
    """A checkpoint manager, as a session sees it."""

    def wait(self) -> None:
        """Return when everything staged is durable; a collective.

        Raises:
            CheckpointError: it cannot become so.
        """

    def at_boundary(self, step: int) -> None:
        """``step`` steps are complete; called by every rank between two steps."""

    def rescue(self) -> None:
        """A rank has failed: keep the last complete step, if that can be had; never raises."""


class Listener(Protocol):
    """A session, as a manager sees it. Called from any thread."""

    def on_saved(self, step: int, seconds: float) -> None:
        """The checkpoint of ``step`` is durable; ``seconds`` since it was asked for."""

    def on_save_failed(self, step: int, errno: int) -> None:
        """It is not, and will be tried again."""

    def on_loaded(self, seconds: float) -> None:
        """A checkpoint was read, or looked for, in so long."""

    def on_rescuable(self, step: int) -> None:
        """The state after ``step`` steps is whole in memory, and in no checkpoint; a negative one: there is none."""

    def on_part(self, number: int) -> None:
        """Of a state that is spread over ranks with replicas, this rank has part ``number``."""

    def on_rescuing(self, *, is_over: bool = False) -> None:
        """It is being kept now, or that is over, with any result."""

    def on_rescued(self, step: int) -> None:
        """The state after ``step`` steps was kept just in time."""

    def on_copied(self, step: int) -> None:
        """All ranks have the state after ``step`` steps in memory, and their peers have it, too."""

    def on_spaced(self, interval: int, share: float) -> None:
        """Steps are copied every ``interval`` steps from now on; at the former one it took ``share`` of their time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load, as long as nothing was trained since."""

    step: int
    loader: object
    state: Any
    """Of the loader; empty where nothing was found, None where it is not known."""

    random: RandomState
    """The generators at the end of the load."""


class Savers:
    """The managers of one process, and its session: ``SAVERS``.

    It is the process's own, and no argument: a trainer makes its session and its managers in any order, hands neither
    to the other, and may use one without the other. A process has one session, and what ends it (a stop, a failed
    rank, the pipe of ``checkpoint.just_in_time``) comes to the process. It holds no manager alive.
    """

    def __init__(self) -> None:
        self._savers: list[weakref.ref[Saver]] = []
        self._trained: tuple[weakref.ref[nn.Module], weakref.ref[torch.optim.Optimizer]] | None = None
        self.listener: Listener | None = None
        self.outcome = SaveOutcome.DONE
        self.is_urgent = self.is_periodic = False
        """A stop waits for the next save: it goes before all others. Or its time has come, and it may be skipped."""

        self.on_stop_signal: Callable[[int], bool] = lambda _number: False
        """Tells the session of a signal that came; whether it saves at the end of the step because of it."""

        self.is_armed = False
        """Some saver needs a call at every step."""

        self.gradients = OpenGradients()
        """No state is kept, copied or saved by the session while some wait for an optimizer."""

        self.loads = 0
        """How often a state was loaded, alike on all ranks: notes on a step before a load are not of the step of the
        same number after it."""

        self.loaded: Loaded | None = None
        """What was loaded last, until the first step after it."""

        self.first_step: int | None = None
        """Steps that are complete, where none has begun in this process: loaders are where they were put."""

    @property
    def savers(self) -> list[Saver]:
        """Those in use, in the order in which they joined."""
        return [saver for one in self._savers if (saver := one()) is not None]

    @property
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer] | None:
        """Model and optimizer of the newest load or save; None before, and when they are gone."""
        if self._trained is None:
            return None
        model, optimizer = self._trained[0](), self._trained[1]()
        return None if model is None or optimizer is None else (model, optimizer)

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """These are what the process trains; does not hold them alive."""
        self._trained = weakref.ref(model), weakref.ref(optimizer)
        self.gradients.follow(optimizer)

    @contextlib.contextmanager
    def before_step(self, step: int) -> Iterator[None]:
        """Within, no step has begun since a load of the state after ``step`` steps, or since the start."""
        self.first_step = step
        try:
            yield
        finally:
            self.first_step = None

    def join(self, saver: Saver) -> None:
        """Pass the session's events to ``saver``, for as long as it is in use."""
        self._savers = [one for one in self._savers if one() is not None]
        self._savers.append(weakref.ref(saver))

    def leave(self, saver: Saver) -> None:
        """Pass no further events."""
        self._savers = [one for one in self._savers if one() not in (None, saver)]

    def forget(self) -> None:
        """Pass no further events to any saver: later results of the device cannot be trusted."""
        self._savers = []

    def save_begins(self, *, urgent: bool) -> None:
        """The session is about to call the trainer's ``save``, for a stop or as its time has come."""
        self.outcome, self.is_urgent, self.is_periodic = SaveOutcome.DONE, urgent, not urgent

    def save_ended(self) -> None:
        """Any other call of ``save`` is the trainer's own wish."""
        self.is_urgent = self.is_periodic = False

    def is_left_to_the_session(self) -> bool:
        """Whether the caller's caller, which saves, runs in a handler of a signal for which the session saves itself.

        Raises:
            UsageError: in one of another signal: an update, a save or a collective may be half done below it.
        """
        if (number := handled_signal()) is None:
            return False
        name = signal.Signals(number).name
        if self.listener is None or not self.on_stop_signal(number):
            raise UsageError(
                f"nothing is saved in a handler of {name}, which may have come in the middle of an update or a save",
                hint="only remember the signal there, and save in the loop: slurmft.DistributedSignalHandler does both",
            )
        log.warning("not saved in the handler of %s: the session saves at the end of this step", name)
        return True

    def wait(self) -> None:
        """``Saver.wait`` of all, in the same order on every rank."""
        for saver in self.savers:
            saver.wait()

    def at_boundary(self, step: int) -> None:
        """``Saver.at_boundary`` of all, where one needs it."""
        self.gradients.at_boundary(self.trained[0] if self.trained is not None else None)
        for saver in self.savers if self.is_armed else ():
            saver.at_boundary(step)

    def rescue(self) -> None:
        """``Saver.rescue`` of all."""
        for saver in self.savers:
            saver.rescue()


SAVERS = Savers()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a bound method for as long as its object is in use; does not keep that in use."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (bound := reference()) is not None:
            bound(*arguments)

    return call


def handled_signal() -> int | None:
    """The signal in whose Python handler this thread runs, by its arguments: its number, and the frame below it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, below = frame.f_code, frame.f_back
        positional, has_rest = code.co_argcount, bool(code.co_flags & inspect.CO_VARARGS)
        if below is not None and (positional > 1 or has_rest):
            variables = frame.f_locals
            given = [variables.get(name) for name in code.co_varnames[:positional]]
            if has_rest:
                given += variables.get(code.co_varnames[positional + code.co_kwonlyargcount]) or ()
            if sys.version_info < (3, 13):  # else this copy would keep what the caller deletes, such as a model, alive
                variables.clear()
            found = next((one for one, other in pairwise(given) if other is below and isinstance(one, int)), None)
            if found is not None:
                return found
        frame = below
    return None


# --- Data that a checkpoint does not cover ---


def stream_read_now() -> str:
    """The type of an IterableDataset that a torch DataLoader of this process is reading; empty where there is none.

    Looks at every object that Python's collector knows: some tens of milliseconds.
    """
    for one in gc.get_objects():
        if issubclass(type(one), _BaseDataLoaderIter) and isinstance(getattr(one, "_dataset", None), IterableDataset):
            return type(one._dataset).__name__
    return ""


def shuffles_in_a_buffer(dataset: object) -> bool:
    """Whether a stream of Hugging Face's datasets (seen with 5.2) has been shuffled by ``shuffle(buffer_size=...)``."""
    looking = [getattr(dataset, "_ex_iterable", None)]
    while looking:
        if (one := looking.pop()) is not None:
            if type(one).__name__ == "BufferShuffledExamplesIterable":
                return True
            looking += [getattr(one, "ex_iterable", None), *getattr(one, "ex_iterables", ())]
    return False


# --- torchdata's StatefulDataLoader, made to go on exactly where it was, in any epoch and with worker processes ---
# As it is, asking it for its state before the first batch makes its iterator, in the order of an epoch that the script
# has not set yet; a resumed iterator draws a seed that an undisturbed one would not have drawn; and neither its own
# generator nor those of its worker processes are part of its state, nor is the one that torch's own samplers draw the
# order from. A stream without a state is read again up to its place, whose batches count twice then.

OURS = "slurmft"
"""The key of what is added to a loader's state, and in a worker to its data set's."""

_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_WORKER_MODULE = "torchdata.stateful_dataloader.worker"


def mend() -> None:
    """From now on, all such loaders of this process; nothing where torchdata is not in use."""
    kind: Any = getattr(sys.modules.get(_MODULE), "StatefulDataLoader", None)
    if kind is None or hasattr(kind, OURS):
        return
    worker = importlib.import_module(_WORKER_MODULE)
    needed = [(kind, "_get_iterator"), *((worker, name) for name in ("try_to_serialize", "try_to_deserialize"))]
    if unknown := [name for owner, name in needed if not hasattr(owner, name)]:
        log.warning(
            "this torchdata has no %s: StatefulDataLoader is left as it is, and may read a resumed epoch in "
            "another order",
            ", ".join(unknown),
        )
        setattr(kind, OURS, False)
        return
    make, ask, iterate = kind._get_iterator, kind.state_dict, kind.__iter__

    def get_iterator(self: Any) -> Any:
        given, init = self.worker_init_fn, _WorkerInit(self.worker_init_fn)
        self.worker_init_fn = init
        try:
            return _made(self, make)
        finally:
            self.worker_init_fn = given

    def begin(self: Any) -> Any:
        if not (self.persistent_workers and self._iterator is not None):
            iterator = iterate(self)
            if not self.persistent_workers or iterator._num_yielded or not getattr(iterator, OURS).handed_out:
                return iterator
            with _drawing(self, "") as drawn:
                iterator._reset(self)
        else:  # it is kept: its workers read the next epoch
            with _drawing(self, "") as drawn:
                iterator = iterate(self)
        setattr(iterator, OURS, _beginning(self, drawn))
        return iterator

    def state_dict(self: Any) -> dict[str, Any]:
        if self._iterator is None:
            return self.next_iter_state or {}  # it has not begun: it is where it was put, or at its beginning
        known = getattr(_epoch_sampler(self), "epoch", None)  # of an iterator that was made before this
        began: _Beginning = getattr(self._iterator, OURS, _Beginning(known))
        own: dict[str, Any] = {"epoch": began.epoch}
        if began.drawn is not None:
            own["order"] = began.drawn.begun()
        if self.generator is not None:
            own["generator"] = _text(self.generator.get_state())
        return {**ask(self), OURS: own}

    kind._get_iterator, kind.state_dict, kind.__iter__ = get_iterator, state_dict, begin
    setattr(kind, OURS, True)


class _Beginning(NamedTuple):
    """Of an iterator."""

    epoch: int | None
    handed_out: int = 0
    """Batches that were handed out before it was made."""

    drawn: _Drawn | None = None
    """Where the order of its samples was drawn from; None where torchdata knows it."""


def _beginning(loader: Any, drawn: _Drawn | None, handed_out: int = 0) -> _Beginning:
    return _Beginning(getattr(_epoch_sampler(loader), "epoch", None), handed_out, drawn)


class _Drawn:
    """Stands in for a sampler: the generator's state where its order begins is known, or is as it was."""

    def __init__(self, sampler: Any, source: torch.Generator, again: torch.Tensor | None) -> None:
        self._sampler, self._source, self.again, self._state = sampler, source, again, again

    def settle(self) -> None:
        """Its iterator is made: an order that was not begun by then begins here, and nothing is drawn again."""
        self.again = None
        if self._state is None:
            self._state = self._source.get_state()

    def begun(self) -> str:
        return _text(self._source.get_state() if self._state is None else self._state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Any:
        if inspect.isgeneratorfunction(type(self._sampler).__iter__):
            return self._lazily()
        self._begin()
        return iter(self._sampler)

    def _lazily(self) -> Any:
        self._begin()
        yield from self._sampler

    def _begin(self) -> None:
        if self.again is not None:
            self._source.set_state(self.again)
        self._state = self._source.get_state()


def _drawn_from(loader: Any) -> tuple[Any, torch.Generator | None]:
    """The sampler, and the generator that it may draw an epoch's order from, as WeightedRandomSampler does."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", batches)
    has_state = hasattr(sampler, "state_dict") or type(sampler).__module__.startswith("torchdata.")
    is_in_order = isinstance(sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset)
    if has_state or is_in_order or _epoch_sampler(loader) is not None:
        return sampler, None
    given = getattr(sampler, "generator", None)
    return sampler, given if isinstance(given, torch.Generator) else torch.default_generator


@contextlib.contextmanager
def _drawing(loader: Any, order: str) -> Iterator[_Drawn | None]:
    """While its iterator is made; with ``order`` it is drawn as at its beginning."""
    sampler, source = _drawn_from(loader)
    if source is None:
        yield None
        return
    drawn = _Drawn(sampler, source, _bytes(order) if order else None)
    if order:
        source.set_state(_bytes(order))
    batches = loader.batch_sampler
    owner, name = loader, "sampler" if batches is None else "batch_sampler"
    if batches is not None and batches is not sampler:
        owner, name = batches, "sampler"
    with contextlib.suppress(AttributeError):  # it cannot be set: the order is taken to begin when the iterator is made
        object.__setattr__(owner, name, drawn)  # a loader refuses another one
    try:
        yield drawn
    finally:
        with contextlib.suppress(AttributeError):
            object.__setattr__(owner, name, sampler)
        drawn.settle()


def _made(loader: Any, make: Callable[[Any], Any]) -> Any:
    """A new iterator, or the resumed one: in the order of the epoch that was saved, and without new draws."""
    state, sampler = loader.next_iter_state, _epoch_sampler(loader)
    own = (state or {}).get(OURS, {})
    _set_generator(loader, own)
    if sampler is not None and own.get("epoch") not in (None, sampler.epoch):
        if _is_used_up(loader, state):  # and the script has begun the next epoch
            loader.next_iter_state = state = None
        else:
            sampler.set_epoch(own["epoch"])
    before, loaded = capture(), SAVERS.loaded
    is_undrawn = loaded is not None and not has_drawn(loaded.random)
    with _drawing(loader, own.get("order", "") if state is not None else "") as drawn:
        iterator = make(loader)
        if isinstance(skipping := getattr(iterator, "_sampler_iter", None), islice):
            iterator._sampler_iter = chain(list(islice(skipping, 1)), skipping)  # draws the order here
    if state is None:
        setattr(iterator, OURS, _beginning(loader, drawn))
        if loaded is not None and is_undrawn:  # its own seed: a resumed one draws none
            SAVERS.loaded = replace(loaded, random=capture())
        return iterator
    setattr(iterator, OURS, _beginning(loader, drawn if "order" in own else None, _handed_out(state)))
    twice = iterator._num_yielded - _handed_out(state)
    iterator._num_yielded -= twice
    if twice and hasattr(iterator, "_snapshot"):
        iterator._snapshot["_snapshot_step"] -= twice
    restore(before)
    _set_generator(loader, own)
    return iterator


def has_handed_out(loader: Any) -> bool:
    """Whether a batch was taken from it since it was made or loaded; False where that is not known of its kind."""
    iterator: Any = getattr(loader, "_iterator", None)
    began: _Beginning | None = getattr(iterator, OURS, None)
    return bool(getattr(loader, "has_begun", began is not None and iterator._num_yielded > began.handed_out))


def _epoch_sampler(loader: Any) -> Any:
    """What the order of the loader's samples depends on the epoch of, as torch's DistributedSampler; or None."""
    batches = loader.batch_sampler
    for one in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if callable(getattr(one, "set_epoch", None)) and type(getattr(one, "epoch", None)) is int:
            return one
    return None


def _set_generator(loader: Any, own: Mapping[str, Any]) -> None:
    if loader.generator is not None and "generator" in own:
        loader.generator.set_state(_bytes(own["generator"]))


def _is_used_up(loader: Any, state: Mapping[str, Any]) -> bool:
    """Whether all batches of its epoch were handed out."""
    try:
        return _handed_out(state) >= len(loader)
    except TypeError:  # a stream of unknown length
        return False


def _handed_out(state: Mapping[str, Any]) -> int:
    there = state.get("_snapshot")
    return int(state["_num_yielded"] if there is None else there["_snapshot_step"] + state["_steps_since_snapshot"])


class _WorkerInit:
    """A loader's ``worker_init_fn``: what was drawn in a worker process becomes a part of its data set's state.

    A generator that nothing was drawn from costs nothing: the same seed begins it again.
    """

    def __init__(self, given: Callable[[int], Any] | None) -> None:
        self._given = given

    def __call__(self, worker_id: int) -> None:
        worker: Any = importlib.import_module(_WORKER_MODULE)
        if self._given is not None:
            self._given(worker_id)
        serialize, deserialize, fresh = worker.try_to_serialize, worker.try_to_deserialize, _draws()
        is_stream = isinstance(getattr(get_worker_info(), "dataset", None), IterableDataset)
        loaded: dict[str, Any] = {}

        def with_draws(one: Any) -> Any:
            if loaded:  # everything is in its place
                restore({**capture(), **loaded})
                loaded.clear()
            state = serialize(one)
            drawn = {name: value for name, value in _draws().items() if value != fresh.get(name)}
            if not drawn or (is_stream and state is None):  # such a stream is read from its beginning, and draws anew
                return state
            return {**(state or {}), OURS: drawn}

        def without_draws(one: Any, state: Any) -> Any:
            if isinstance(state, dict) and OURS in state:
                drawn = state[OURS]
                loaded.update(drawn, **({"torch": _bytes(drawn["torch"])} if "torch" in drawn else {}))
                state = {key: value for key, value in state.items() if key != OURS}
            return deserialize(one, state)

        worker.try_to_serialize, worker.try_to_deserialize = with_draws, without_draws


def _draws() -> dict[str, Any]:
    """The generators of this process but for a device's, in types that a worker can send."""
    state = capture()
    state.pop("cuda", None)
    return {**state, "torch": _text(state["torch"])}


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
