"""The session: a trainer's connection to slurmft. A few lines of it are enough:

    with start_session(seed=1) as session:
        loaded = checkpoints.load_latest(model, optimizer)
        for step in session.steps(start=loaded.step, until=1000, save=save):
            ...

It finds out by itself whether an agent watches (a heartbeat page in the environment), and does without one under plain
srun, torchrun or python.

The faults that ``slurmft inject`` asks a worker for are here too: it carries them out at a step of its session.
In one piece, since groups, faults, sections and loops begin and end with the session, and are of use in it alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import logging
import math
import operator
import os
import random
import re
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from slurmft.errors import StorageError, UsageError
from slurmft.ipc.pages import (
    FAULT_SUFFIX,
    NOTHING,
    PAGE_VARIABLE,
    Page,
    Phase,
    Section,
    SectionStack,
    Slot,
    State,
    StopAction,
)
from slurmft.policy.stop import END, NOT_STARTED, base_of, end_of_evaluation, inside_an_evaluation, tick_of
from slurmft.policy.values import Fault
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_TEMPORARY, EXIT_VALIDATION_FAILED
from slurmft.policy.worker_settings import BatchSplit, WorkerSettings, pieces, split_batch
from slurmft.storage.checkpoint_names import MAX_STEP
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, note_batches
from slurmft.system.files import read_json
from slurmft.system.foreign_text import log_to_stderr
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS, any_rank, host_group, takes_host_data, timeout_of
from slurmft.worker.digests import ReplicaDigests
from slurmft.worker.rerun import Departure, RerunStateMachine
from slurmft.worker.rerun_data import RerunDataIterator
from slurmft.worker.saves import SAVE_RETRY_S, MetricsLog, SaveFunction, Saves
from slurmft.worker.signals import AgreementByAgent, AgreementByCollective, StopSignal
from slurmft.worker.stragglers import StragglerDetector

# --- Process groups with explicit timeouts: long until the first step of the process is done, short afterwards ---

log = logging.getLogger(__name__)

ABORT_S = 5.0
FIRST_PORT, PORTS = 10_000, 20_000
"""Of steps that srun has started itself; below those that Linux gives away, and another one for each step."""

_IN_BRACKETS = re.compile(r"\[(\w+)[^\]]*\]")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.5


def await_listener(host: str, port: str, limit: timedelta) -> None:
    """Return when rank 0's store takes connections, or ``limit`` is over.

    torch's own client waits half a second or longer after a connection that was refused, and after a restart most ranks
    come milliseconds before the store does. Pauses double up to that, so that many ranks do not crowd a slow host.
    """
    pause_s, deadline = FIRST_PAUSE_S, time.monotonic() + limit.total_seconds()
    while host and port.isdecimal() and time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=LONGEST_PAUSE_S).close()
        except (OSError, OverflowError):
            time.sleep(random.SystemRandom().uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            return


def take_place_of_task(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables, unless they are set, where srun has started this process as one task of several.

    A batch script and an interactive shell have variables of a task as well: both are a single process.
    """
    tasks, rank = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_PROCID", "")
    is_alone = not (rank.isdecimal() and tasks.isdecimal() and int(tasks) > 1) or "SLURM_PTY_PORT" in environment
    if is_alone or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    nodes = _IN_BRACKETS.sub(r"\1", environment.get("SLURM_STEP_NODELIST", ""))
    place = {
        "RANK": rank, "WORLD_SIZE": tasks, "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(len(environment.get("SLURM_GTIDS", rank).split(","))),
        "MASTER_ADDR": nodes.split(",")[0], "MASTER_PORT": str(FIRST_PORT + zlib.crc32(step.encode()) % PORTS),
    }  # fmt: skip
    environment.update({name: value for name, value in place.items() if name not in environment})


class ProcessGroups:
    """The world group and those made with ``new_group``.

    A timeout must be a ``timedelta`` and must be given to each group: torch ignores a float in some places, and
    ``new_group`` does not inherit it. So they are set here, read back, and logged.
    """

    def __init__(self, device: torch.device, init_timeout: timedelta, step_timeout: timedelta) -> None:
        self.device = device
        self._timeout, self._step_timeout = init_timeout, step_timeout

    @classmethod
    def join(cls, backend: str | None = None) -> ProcessGroups:
        """Initialise torch.distributed from the environment; without RANK and WORLD_SIZE there is no group to join.

        Raises:
            ConfigError: the settings cannot be read.
            torch.distributed.DistError: the group cannot be joined.
        """
        environment = os.environ
        settings = WorkerSettings.from_environment(environment)
        init = timedelta(minutes=settings.init_timeout_minutes)
        step = timedelta(minutes=settings.step_timeout_minutes)
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        wanted = backend or settings.backend
        use_gpu = torch.cuda.is_available() and wanted in ("auto", "nccl")
        device = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        groups = cls(device, init, step)
        if "RANK" in environment and "WORLD_SIZE" in environment and not dist.is_initialized():
            name = ("nccl" if use_gpu else "gloo") if wanted == "auto" else wanted
            if environment["RANK"] != "0":
                await_listener(environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", ""), init)
            dist.init_process_group(name, timeout=init, device_id=device if use_gpu else None)
            host_group(init)  # here, where all ranks pass in the same order
            groups.check(init)
        return groups

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        """A group with the timeout of the present phase unless ``timeout`` is given."""
        options.setdefault("timeout", self._timeout)
        return dist.new_group(ranks, **options)

    def after_first_step(self) -> None:
        """Shorten the timeout of every group: start-up, compilation and the first load are over."""
        self._timeout = self._step_timeout
        if not dist.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):
            if timeout_of(group) is not None:
                distributed_c10d._set_pg_timeout(self._step_timeout, group)
        self.check(self._step_timeout)
        log.info("collective timeouts after the first step: %s", self.timeouts())

    def timeouts(self) -> dict[str, float]:
        """Seconds until a collective of each group times out, as the groups themselves say; NaN where one cannot."""
        if not dist.is_initialized():
            return {}
        found: dict[str, float] = {}
        for group, (backend, _store) in distributed_c10d._world.pg_map.items():
            timeout, name = timeout_of(group), distributed_c10d._world.pg_names[group]
            found[f"{name} ({backend})"] = timeout.total_seconds() if timeout is not None else math.nan
        return found

    def check(self, timeout: timedelta) -> None:
        """Read every group's timeout back, and name those that differ: a hang of them would end at another time."""
        known = {name: seconds for name, seconds in self.timeouts().items() if not math.isnan(seconds)}
        wrong = {name: seconds for name, seconds in known.items() if seconds != timeout.total_seconds()}
        if wrong:
            log.warning("process groups without the timeout of %.0f s: %s", timeout.total_seconds(), wrong)

    def facts(self) -> dict[str, Any]:
        """What to log about the groups."""
        return {"device": str(self.device), "timeout_s": self.timeouts(), "step_timeout_s": self._step_timeout.seconds}

    def close(self, *, orderly: bool) -> None:
        """Leave the groups. After a failure a destroy may wait for the dead: NCCL's communicators are aborted instead.

        Save all state before this call: an abort lets the device go on behind a collective that has failed, with values
        that were never reduced.
        """
        if not dist.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):
            # Never run its destructor: ProcessGroupGloo's takes a mutex while it holds the GIL, and its own thread may
            # hold that mutex while it frees a tensor, which takes the GIL (seen with torch 2.13: a hang at exit)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if orderly:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        else:
            abort_device_groups()


def abort_device_groups(within_s: float = ABORT_S) -> bool:
    """End what NCCL's kernels wait for, so that this process and its memory on the device can go; whether it worked.

    In a thread, as an abort may itself hang. All groups at once: one that is aborted alone may wait for another one.
    From here on nothing that the device computes may be saved.
    """
    groups = [one for one in distributed_c10d._world.pg_map if not takes_host_data(one)]
    if not groups:
        return True
    SAVERS.forget()
    aborting = threading.Thread(target=_abort, args=(groups,), name="slurmft-abort", daemon=True)
    aborting.start()
    aborting.join(within_s)
    if aborting.is_alive():
        log.warning("NCCL's communicators could not be aborted within %.0f s", within_s)
    return not aborting.is_alive()


def _abort(groups: Sequence[Any]) -> None:
    names = distributed_c10d._world.pg_names
    try:
        with _together(groups[0]):
            for group in sorted(groups, key=lambda one: names.get(one, ""), reverse=True):
                group.abort()
    except (RuntimeError, AttributeError) as error:  # a torch or a backend that cannot
        log.info("communicators are left to the end of the process: %s", error)


@contextlib.contextmanager
def _together(group: Any) -> Iterator[None]:
    """NCCL's own bracket around what happens to several communicators at once, as torch does it."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        backend = None
    has_bracket = hasattr(backend, "_group_start") and hasattr(backend, "_group_end")
    if has_bracket:
        backend._group_start()
    try:
        yield
    finally:
        if has_bracket:
            backend._group_end()


# --- Faults that a worker's session carries out on itself, on request (``slurmft inject``) ---
# A step costs one comparison of an integer in the heartbeat page; everything else happens only when there is a fault.

_BITS = {
    torch.float64: (torch.int64, 51), torch.float32: (torch.int32, 22), torch.bfloat16: (torch.int16, 6),
    torch.float16: (torch.int16, 9),
}  # fmt: skip
"""Integers of the same size, and the highest bit of the mantissa."""


class InjectedFault(RuntimeError):
    """Raised on purpose, on request."""


class InjectedFaults:
    """The faults of one worker. ``seen`` differs from the page's number when there is something to do."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.seen = page[Slot.FAULT]

    def strike(self, step: int) -> None:
        """Do what was asked for. Call it at a step boundary when ``seen`` differs.

        Raises:
            InjectedFault: that was asked for.
        """
        self.seen = self._page[Slot.FAULT]
        if (fault := _newest()) is None:
            return
        log.warning("injected fault at step %d: %s", step, fault.value)
        match fault:
            case Fault.HANG:
                hang_until_killed()
            case Fault.EXCEPTION:
                raise InjectedFault(f"injected by slurmft inject, at step {step}")
            case Fault.NAN:
                _spoil_next_forward_pass()
            case Fault.BIT_FLIP | Fault.BIT_FLIP_MOMENT | Fault.BIT_FLIP_GRADIENT:
                _flip_bit(fault)


def hang_until_killed() -> None:
    """Like a deadlock from outside: asleep, alive, and ended by SIGKILL only."""
    while True:
        time.sleep(60.0)


def _newest() -> Fault | None:
    try:
        value = read_json(Path(os.environ[PAGE_VARIABLE]).with_suffix(FAULT_SUFFIX)) or {}
        return Fault(value["fault"])
    except (StorageError, KeyError, ValueError, OverflowError) as error:
        log.warning("an injected fault cannot be read: %s", error)
        return None


def _spoil_next_forward_pass() -> None:
    """The first module of the next training pass computes NaN, once."""

    def spoil(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return None
        handle.remove()
        return output * float("nan")

    handle = register_module_forward_hook(spoil)


def _flip_bit(fault: Fault) -> None:
    """Change one bit, which no exception and no NaN shows."""
    if SAVERS.trained is None:
        log.warning("%s: no checkpoint manager has seen a model and an optimizer yet", fault.value)
        return
    model, optimizer = SAVERS.trained
    if fault is Fault.BIT_FLIP:
        flip_bit(next(model.parameters()))
    elif fault is Fault.BIT_FLIP_MOMENT:
        states = (value for state in optimizer.state.values() for value in state.values())
        moment = next((each for each in states if isinstance(each, torch.Tensor) and each.dim()), None)
        if moment is None:
            log.warning("%s: the optimizer has no state yet", fault.value)
        else:
            flip_bit(moment)
    else:

        def spoil(stepped: torch.optim.Optimizer, *_: Any) -> None:
            parameters = (each for group in stepped.param_groups for each in group["params"])
            gradient = next((each.grad for each in parameters if each.grad is not None), None)
            if gradient is not None:
                handle.remove()
                flip_bit(gradient)

        handle = optimizer.register_step_pre_hook(spoil)


@torch.no_grad()
def flip_bit(tensor: torch.Tensor) -> None:
    """Flip the highest bit of the mantissa of the middle element, in place."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    integer, bit = _BITS[local.dtype]
    bits = local.view(integer).flatten()[local.numel() // 2]
    index = torch.tensor(local.numel() // 2, device=local.device)
    at = torch.unravel_index(index, local.shape)
    local.view(integer)[at] = bits ^ (1 << bit)


# --- The micro-batch and the accumulation of this start: as asked for, unless an earlier start ran out of memory ---


class Batches:
    """Cuts the trainer's batch into as many pieces as the supervisor says, and reports the trainer's numbers.

    The supervisor cannot know a trainer's batch; the file in the attempt's folder shows it how far it may go.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        settings = WorkerSettings.from_environment(environment)
        self._base_world_size, self.divisor = settings.base_world_size, settings.batch_divisor
        folder = environment.get(ERROR_DIR_VARIABLE)
        self._folder = Path(folder) if folder and environment.get("RANK", "0") == "0" else None
        self._asked: set[int] = set()
        self._pieces = self.divisor

    def micro_batch(self, samples: int) -> int:
        """``samples``, or a part of them with which they can be covered exactly."""
        if type(samples) is not int or samples < 1:
            raise UsageError(f"a micro-batch of {samples!r} samples makes no sense")
        if samples not in self._asked:
            self._asked.add(samples)
            if self._folder is not None:
                note_batches(self._folder, self._asked, self.divisor)
        self._pieces = pieces(samples, self.divisor)
        return samples // self._pieces

    def accumulation(self, steps: int = 1) -> int:
        """``steps`` times the number of pieces of the micro-batch that was asked for last."""
        if type(steps) is not int or steps < 1:
            raise UsageError(f"an accumulation over {steps!r} micro-batches makes no sense")
        return steps * self._pieces

    def split(self, global_batch: int, world_size: int, max_micro_batch: int) -> BatchSplit:
        """``split_batch`` of ``policy.worker_settings`` with this start's micro-batch, and its ranks' samples."""
        if self._base_world_size > 0:
            global_batch = max(1, global_batch * world_size // self._base_world_size)
        return split_batch(global_batch, world_size, self.micro_batch(max_micro_batch))


# --- DistributedDataParallel that sums gradients in the same order in every process start ---

Rehearsal = Callable[[nn.Module], torch.Tensor]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def settled_ddp(model: nn.Module, rehearsal: Rehearsal, **options: Any) -> DistributedDataParallel:
    """``model`` in DDP with its gradient buckets in their final order; ``options`` are DDP's own.

    DDP rearranges its buckets after the first backward pass of a process, and the order in which three or more ranks
    are summed depends on where in a bucket a gradient lies. Without a pass before step one, the first step after a
    resume would sum in another order than the uninterrupted run did, and the weights would part in their last bits.

    ``rehearsal(ddp_model)`` does one forward pass on any batch of the usual shape and returns the loss. Weights,
    buffers, gradients and random numbers are afterwards what they were before; call it before the optimizer exists or
    before its first step, on every rank.
    """
    wrapped = DistributedDataParallel(model, **options)
    randomness = savers.capture()
    buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
    rehearsal(wrapped).backward()  # type: ignore[no-untyped-call]
    wrapped.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    savers.restore(randomness)
    return wrapped


def settle_order_of_gradients(model: Any) -> None:
    """A backward pass of zeros, so that DDP has its gradients in their final order before the first step.

    As ``settled_ddp``, but without the user's own code: the order is that of the parameters, the same at every start.
    Models in which a rehearsal could not be one are left alone: with unused parameters or communication hooks, with
    hooks around their forward pass, and with such that use up gradients, as an optimizer in the backward pass does.
    """
    if not isinstance(model, DistributedDataParallel) or model.static_graph or model.find_unused_parameters:
        return
    if getattr(model, "_comm_hooks", None):  # it may keep a state
        return
    inner = model.module
    own = vars(inner).get("forward")
    parameters = [one for one in inner.parameters() if one.requires_grad]
    if any(getattr(inner, name, None) for name in _HOOKS) or any(one._post_accumulate_grad_hooks for one in parameters):
        return
    inner.forward = lambda: sum((one * 0).sum() for one in parameters)
    try:
        model().backward()
    finally:
        if own is None:
            del inner.forward
        else:
            inner.forward = own
    for one in parameters:
        one.grad = None


# --- slurmft's log lines in a worker: marked as its own, with the rank, under any formatter ---
# The end of a rank's log is read for symptoms of what ended it, and what slurmft says of a trouble that it has dealt
# with sounds like the trouble itself (``policy.symptoms``). So the mark is in the message, not in a format that the
# trainer may replace by one of its own, and in each of its lines: what NCCL and CUDA say of an error has several, and
# so has a traceback of an exception that was dealt with.

_PACKAGE = __name__.partition(".")[0]


def log_with_rank() -> None:
    """Log to standard error, each line with the rank; through the trainer's own logging where it has one."""
    _mark_records()
    if not logging.getLogger().handlers:
        log_to_stderr("%(message)s", indent="")  # no indent: the mark tells whose line it is


def _mark_records() -> None:
    make = logging.getLogRecordFactory()
    plain = getattr(make, "plain", make)  # a process may have been forked from one that marks with its own rank
    marking = _marking(plain, os.environ.get("RANK", "0"))
    marking.plain = plain  # type: ignore[attr-defined]
    logging.setLogRecordFactory(marking)


def _marking(plain: Callable[..., logging.LogRecord], rank: str) -> Callable[..., logging.LogRecord]:
    def marked(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = plain(*arguments, **more)
        if record.name.partition(".")[0] == _PACKAGE:
            _mark(record, f"slurmft rank {rank}: ")
        return record

    return marked


def _mark(record: logging.LogRecord, mark: str) -> None:
    record.msg = f"{mark}{record.msg}"
    with contextlib.suppress(Exception):  # arguments that do not fit: logging tells of them later
        lines = record.getMessage().splitlines()
        if len(lines) > 1:
            record.msg, record.args = f"\n{mark}".join(lines), None
    if record.exc_info:  # formatters take this text where it is there
        text = "".join(traceback.format_exception(*record.exc_info))
        record.exc_text = "\n".join(f"{mark}{line}" for line in text.splitlines())


# --- session ---

Batch = TypeVar("Batch")
SAVE_TRIES_BEFORE_EXIT = 60
NO_ACTION = StopAction.NONE, NOT_STARTED
REHEARSED_STEPS = 2
"""The first one compiles, and may compile again for the second."""


class PlannedStop(SystemExit):
    """Ends the worker after an agreed stop; exit code 75. Not an ``Exception``, so that trainers do not swallow it."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_TEMPORARY)
        self.step = step


class RerunElsewhere(SystemExit):
    """Ends the worker so that a result is computed again on other hardware; exit code 16."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_RERUN_ELSEWHERE)
        self.step = step


class ValidationFailed(SystemExit):
    """Ends the worker after a verdict with which training does not go on; exit code 17."""

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_VALIDATION_FAILED)
        self.step = step


class Session:
    """One worker's part of the run. Use ``start_session``; leave it as a context manager."""

    rank: int
    """This worker's rank in the world."""

    local_rank: int
    """Its rank on its node."""

    world_size: int
    """Ranks in all."""

    device: torch.device
    """Where its model belongs."""

    checkpoint_dir: Path
    """Where the run's checkpoints live."""

    is_rehearsal: bool
    """Whether a spare only tries the script (``spares: rehearse``): it ends after two steps; leave no trace then."""

    stragglers: StragglerDetector
    """Times this rank's own work; named sections and a role are for you to add."""

    def __init__(self, page: Page | None, groups: ProcessGroups, sections: SectionStack | None = None) -> None:
        environment = os.environ
        self.rank = int(environment.get("RANK", "0"))
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        self.world_size = int(environment.get("WORLD_SIZE", "1"))
        self.device = groups.device
        self.checkpoint_dir = checkpoint_dir_of(environment)
        self.is_rehearsal = WorkerSettings.from_environment(environment).rehearsal
        self._groups = groups
        self._batches = Batches()
        self._signal = StopSignal.install()
        self.stragglers = StragglerDetector.from_environment(groups.device)
        self._page = page or Page.private()
        self._sections = sections or SectionStack(self._page)
        self.stragglers.on_first_collective = self._note_own_work
        by_collective = AgreementByCollective(self._signal, self.world_size)
        self._agreement = AgreementByAgent(self._page) if page is not None else by_collective
        self._faults = InjectedFaults(self._page)
        self._digests = ReplicaDigests.from_environment(self._page, world_size=self.world_size, is_lead=self.is_lead)
        self._saves = Saves(self._page, self._sections, is_lead=self.is_lead, digests=self._digests)
        self._metrics = MetricsLog.from_environment(is_lead=self.is_lead)
        self._reruns: RerunStateMachine | None = None
        self._step = self._start = self._evaluations = self._safe_at_ns = 0
        self._deferred, self._is_over = NO_ACTION, False
        self._unfinished: tuple[int, int] | None = None
        self._page[Slot.STATE] = State.SETUP
        if page is not None:
            atexit.register(self._close_at_exit)

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0: the one that prints."""
        return self.rank == 0

    def steps(self, *, start: int, until: int, save: SaveFunction) -> Generator[int, bool | None, None]:
        """The numbers of the steps to do: ``start`` up to ``until - 1``.

        ``save(step)`` is called on every rank, with the number of steps that are complete: as often as
        ``checkpoint.interval`` says, on request, before a stop, and at the end. A stop raises
        PlannedStop here, after the save, on all ranks at the same step. A loop that ends earlier says so with
        ``send(True)`` after its last step, on every rank.

        Raises:
            PlannedStop: the run was asked to stop, and its state is saved.
            ValueError: ``start`` or ``until`` is not a whole number of steps, or more than 10^15 - 1.
        """
        start, until = _steps("start", start), _steps("until", until)
        self._unfinished = (start, until)
        _warn_of_steps_ahead()
        with SAVERS.before_step(start):
            yield from self._walk(start, until, save)
        self._unfinished = None

    def _walk(self, start: int, until: int, save: SaveFunction) -> Generator[int, bool | None, None]:
        self._start, self._is_over, page = start, False, self._page
        page.touch(Slot.LOOP_AT)
        page[Slot.RESUMED] = page[Slot.STEP] = start
        page[Slot.UNTIL] = until
        page[Slot.STATE] = State.TRAINING
        saved = start if start else NOTHING  # resumed from it, so it is on disk
        page[Slot.SAVED] = NOTHING
        self._metrics.begin(start)

        def save_all(at: int) -> object:
            self._metrics.flush()  # a state that is on disk has its curve there, too
            return self.is_rehearsal or save(at)

        pace, is_due = self._saves.begin(start, save_all), False
        self._digests.begin(start)
        SAVERS.at_boundary(start)
        for step in range(start, until):
            self._step, self._evaluations = step, 0
            self._end_rehearsal(step, start, until)
            self._digests.at_boundary(step)
            is_due = (pace.is_due(step) or is_due) and saved != step
            if is_due and not any_rank(SAVERS.gradients.are_waiting):
                worked, is_due = self._saves.now(step, is_periodic=True), False
                saved = step if worked else saved
            self._at_tick(self._tick(step), saved)
            self._sections.phase(Phase.STEP)
            self.stragglers.begin_step()
            if page[Slot.FAULT] != self._faults.seen:
                self._faults.strike(step)
            SAVERS.first_step = SAVERS.loaded = None
            try:
                was_last = yield step
            except GeneratorExit:  # the loop was left early: later code belongs to no step
                self._sections.phase(Phase.NONE)
                raise
            self.stragglers.end_step()
            if self._reruns is not None:
                self._reruns.check_is_over()
            page[Slot.STATE] = State.TRAINING  # an evaluation that was begun and never ended is over now
            self._signal.chain_again()
            self._step_is_done(step + 1, start)
            if was_last:
                page[Slot.UNTIL] = until = step + 1
                break
        if until > start:
            self._step, self._is_over = until, True
            self._saves.at_end(until, lambda tries: self._at_tick(self._tick(until, 0, tries), None))
        self._sections.phase(Phase.NONE)
        page[Slot.TICK] = END
        page[Slot.STATE] = State.FINISHED

    def evaluating(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of an evaluation inside a step, stopping between two of them when asked to.

        The evaluation leaves no trace in the training's random numbers. A stop inside of it saves the state of the step
        it belongs to, so that the resumed run repeats the whole evaluation: put it at the beginning of a step, on every
        rank, and run it to its end. Ranks may have different numbers of batches. One that only some ranks do works too,
        but a stop then waits for its end.

        Raises:
            PlannedStop: the run was asked to stop, and its state is saved.
        """
        before, base = savers.capture(), base_of(self._start)
        step, number, self._evaluations = self._step, self._evaluations, self._evaluations + 1
        state, phase = self._page[Slot.STATE], self._sections.current_phase
        if state == State.EVALUATING:  # another one that was left early
            state, phase = State.TRAINING, Phase.STEP
        self._page[Slot.STATE] = State.EVALUATING
        self._sections.phase(Phase.EVALUATION)
        try:
            for index, batch in enumerate(batches, start=1):
                self._note_span()
                self._at_tick(self._tick(step, number, index), None, before)
                self._sections.phase(Phase.EVALUATION)  # anew: an evaluation may take as long as it has batches
                yield batch
            self._note_span()
            self._at_tick(end_of_evaluation(step - base, number), None, before)
        finally:
            # an iterator that the trainer keeps may end much later, when neither page nor generators are its own
            is_current = (self._step, self._evaluations) == (step, number + 1)
            if is_current and self._page[Slot.STATE] == State.EVALUATING:
                self._page[Slot.TICK] = END if state == State.FINISHED else end_of_evaluation(step - base, number)
                savers.restore(before)
                self._page[Slot.STATE] = state
                self._sections.phase(phase)

    def section(self, name: str) -> Section:
        """A section of your own: ``with session.section("load data"): ...``.

        Limits come from ``fault_tolerance.rank_section_timeouts``: each open section is held to its own, outer ones as
        well. Sections nest, and other threads may have some. To open and close one takes less than a microsecond.
        """
        return self._sections.section(name)

    def start_section(self, name: str) -> None:
        """Open a section that ``end_section`` closes."""
        self._sections.start(name)

    def end_section(self, name: str) -> None:
        """Close the innermost open section of that name; a warning is logged, once, where none is open."""
        self._sections.end(name)

    def end_all_sections(self) -> None:
        """Close all sections of this thread."""
        self._sections.end_all()

    def heartbeat(self) -> None:
        """Report that this rank lives, where there are no sections: ``fault_tolerance.rank_heartbeat_timeout``."""
        self._sections.beat()

    def report(self, **metrics: float) -> None:
        """Show numbers beside the step in ``slurmft status``; the first one is kept. Call it as often as you like.

        Rank 0's numbers are also in ``metrics.jsonl`` of the run folder, one line for each step of ``steps``: steps
        that are done again after a restart replace their lines.
        """
        self._sections.sign()
        if metrics:
            self._page.set_metric(float(next(iter(metrics.values()))))
            self._metrics.note(self._step, metrics)

    def distributed(self, model: nn.Module, rehearsal: Rehearsal) -> nn.Module:
        """``model`` in DDP that sums gradients in the same order after every start; itself where there is one rank.

        ``rehearsal(ddp_model)`` does one forward pass and returns the loss; it leaves no trace (``worker.session``).
        """
        if self.world_size == 1:
            return model

        def attached(wrapped: nn.Module) -> torch.Tensor:
            if isinstance(wrapped, DistributedDataParallel):
                self.stragglers.attach(wrapped)
            return rehearsal(wrapped)

        devices = [self.device] if self.device.type == "cuda" else None
        return settled_ddp(model, attached, device_ids=devices)

    def micro_batch(self, samples: int) -> int:
        """Samples to compute at once: ``samples``, or a half, a quarter... of it after an attempt without enough memory
        (``oom.action: reduce_batch``). Without this call, the supervisor does not know that there is one to reduce.

        Raises:
            UsageError: ``samples`` is not a positive number.
        """
        return self._batches.micro_batch(samples)

    def accumulation(self, steps: int = 1) -> int:
        """Micro-batches behind one optimizer step where there would be ``steps``; the global batch stays the same."""
        return self._batches.accumulation(steps)

    def split_batch(self, global_batch: int, max_micro_batch: int) -> BatchSplit:
        """How ``global_batch`` is spread over the present ranks, for elastic runs.

        With ``elastic.batch: keep_micro_batch`` it is what the configured number of ranks would have, and grows and
        shrinks with the ranks.

        Raises:
            UsageError: there are more ranks than samples, or a number is not positive.
        """
        return self._batches.split(global_batch, self.world_size, max_micro_batch)

    def rerun_machine(self, model: nn.Module, loader: Iterable[Any]) -> RerunStateMachine:
        """Reruns of steps whose results look wrong, as the section ``rerun:`` says (``worker.rerun``).

        Give what this returns to ``save`` and ``load_latest`` as their ``loader``, take batches from its ``data``, and
        begin every step with ``while machine.should_run_forward_backward():``. It saves and ends the worker by itself.

        Raises (within the step):
            RerunElsewhere: the step is saved, and is to be repeated on other hardware.
            ValidationFailed: the verdict is correct or inconclusive.
        """
        self._reruns = RerunStateMachine(
            model=model, data=RerunDataIterator(loader), step=lambda: self._step, leave=self._leave_for_rerun
        )
        return self._reruns

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        """``torch.distributed.new_group`` with the configured timeout, which torch does not pass on by itself."""
        return self._groups.new_group(ranks, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if self._unfinished is not None and (error is None or (isinstance(error, SystemExit) and not error.code)):
            log.warning(
                "the loop over session.steps(until=%d) was left in step %d: that step counts as unfinished, and what "
                "was trained since the newest checkpoint is not saved. To end early, call send(True) on what "
                "session.steps() has returned, after the last step and on every rank, and then leave the loop",
                self._unfinished[1],
                self._step,
            )
        if error is not None and not isinstance(error, PlannedStop | SystemExit):
            self._page[Slot.STATE] = State.FAILED
        if isinstance(error, Exception):
            SAVERS.rescue()
        if error is None or isinstance(error, SystemExit):  # any other error may still be caught
            self._close(is_orderly=error is None or not error.code)
        self._metrics.close()
        if self._reruns is not None and error is None:
            self._reruns.report()
        self._groups.close(orderly=kind is None or isinstance(error, PlannedStop | RerunElsewhere | ValidationFailed))

    def _close(self, *, is_orderly: bool) -> None:
        """Say that this process ends as it means to, which an exit code of 0 alone does not: a wrapper may have it."""
        atexit.unregister(self._close_at_exit)
        if is_orderly and self._page[Slot.STATE] not in (State.STOPPED, State.FINISHED):
            self._page[Slot.STATE] = State.CLOSED

    def _close_at_exit(self) -> None:
        if self._page[Slot.PID] == os.getpid():  # not in a fork
            self._close(is_orderly=not hasattr(sys, "last_value"))

    def _note_own_work(self) -> None:
        """From here on this rank waits for the others: when all ranks hang, it is not the culprit."""
        self._page[Slot.OWN_WORK_DONE] = self._step + 1

    def _step_is_done(self, step: int, start: int) -> None:
        page = self._page
        self._note_span()
        page[Slot.STEP] = step
        page.touch(Slot.PROGRESS_AT)
        page[Slot.STALL_NS] = self._saves.stalled_ns  # only with a step that follows: not of the save of a stop
        SAVERS.at_boundary(step)
        if step == start + 1:
            page.touch(Slot.FIRST_STEP_AT)
            self._groups.after_first_step()

    def _tick(self, step: int, evaluation: int = 0, batch: int = 0) -> int:
        return tick_of(step - base_of(self._start), evaluation, batch)

    def _at_tick(self, tick: int, saved: int | None, randomness: dict[str, Any] | None = None) -> None:
        action, is_waiting = self._agreement.at(tick), SAVERS.gradients.are_waiting and not self._is_over
        if action is not StopAction.NONE:
            self._deferred = action, tick
        elif not inside_an_evaluation(tick):  # where ranks may have different numbers of batches
            action, tick = self._deferred
        if action is StopAction.NONE or any_rank(is_waiting):
            if not is_waiting:
                self._safe_at_ns = time.monotonic_ns()
            return
        step, self._deferred = self._step, NO_ACTION
        if saved != step or not self._saves.is_durable(step):
            if randomness is not None:
                now = savers.capture()
                savers.restore(randomness)
            worked = self._saves.now(step)
            while not worked and action is StopAction.SAVE_AND_STOP:  # until it works, or the time of the stop is up
                time.sleep(SAVE_RETRY_S)
                worked = self._saves.now(step)
            if randomness is not None:
                savers.restore(now)
        self._agreement.answered(tick)
        if action is StopAction.SAVE_AND_STOP:
            self._digests.flush()
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(step)
        self._safe_at_ns = time.monotonic_ns()

    def _leave_for_rerun(self, departure: Departure) -> NoReturn:
        """All ranks leave alike; the machine has put everything back to what it was before the step."""
        step = self._step
        for _ in range(SAVE_TRIES_BEFORE_EXIT if departure.should_checkpoint else 0):
            if self._saves.now(step):
                break
            time.sleep(SAVE_RETRY_S)
        departure.write_verdict()
        self._page[Slot.STATE] = State.STOPPED
        raise RerunElsewhere(step) if departure.exit_code == EXIT_RERUN_ELSEWHERE else ValidationFailed(step)

    def _end_rehearsal(self, step: int, start: int, until: int) -> None:
        """Before anything is saved, and before the code behind the loop."""
        if self.is_rehearsal and step - start >= min(REHEARSED_STEPS, until - start - 1):
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(step)

    def _note_span(self) -> None:
        """Note how long no stop was possible: a stop requested meanwhile waits so long, and then saves."""
        if not self._safe_at_ns:
            return
        span_ns = time.monotonic_ns() - self._safe_at_ns
        slot = Slot.FIRST_STEP_NS if self._step == self._start else Slot.LONGEST_STEP_NS
        self._page[slot] = max(self._page[slot], span_ns)


def _warn_of_steps_ahead() -> None:
    """A resumed run does again, or skips, what a script does of a step between the load and its loop."""
    if (loaded := SAVERS.loaded) is None:
        return
    what = ""
    if savers.has_handed_out(loaded.loader):
        what = "a batch was taken from the data loader"
    elif savers.has_drawn(loaded.random):
        what = "random numbers were drawn"
    if what:
        log.warning(
            "%s between the load of the checkpoint and session.steps(): each resume does so again, and goes on with "
            "other data or random numbers than an undisturbed run. Take each batch inside of its own step, and do what "
            "else draws before the load",
            what,
        )


def _steps(name: str, value: Any) -> int:
    """A number of steps; also one of numpy's, or a tensor of one."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise ValueError(f"{name}={value!r:.40} is not a number of completed steps")
    return number


def checkpoint_dir_of(environment: Mapping[str, str]) -> Path:
    """The run's; without a run ``checkpoints``, in which each task of an array and each job of submitit has its own."""
    if given := environment.get("SLURMFT_CHECKPOINT_DIR"):
        return Path(given)
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = environment.get("SLURM_JOB_ID") or environment.get("SUBMITIT_LOCAL_JOB_ID", "")
    own = f"{array}_{task}" if array and task else job if "SUBMITIT_EXECUTOR" in environment else ""
    return Path("checkpoints") / own


def start_session(*, seed: int | None = None, backend: str | None = None) -> Session:
    """Join the run: process group with the configured timeouts, device, seeds, and the agent's heartbeat page.

    The rank is that of torchrun's variables, or that of the task that srun has started.

    ``seed`` seeds python, torch and numpy's global generator (where numpy is installed) the same way on every rank and
    start; a checkpoint's own random state replaces it. ``backend`` overrides ``nccl.backend``.

    Raises:
        torch.distributed.DistError: the process group cannot be joined.
    """
    take_place_of_task(os.environ)
    log_with_rank()
    path = os.environ.get(PAGE_VARIABLE)
    page = Page.attach(Path(path)) if path else None
    sections = None
    if page is not None:
        sections = SectionStack(page)
        sections.phase(Phase.SETUP)
    if seed is not None:
        random.seed(seed)
        torch.manual_seed(seed)
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy.random").seed(seed % 2**32)
    groups = ProcessGroups.join(backend)
    session = Session(page, groups, sections)
    if session.is_lead:
        log.info("%s", json.dumps({"process group": groups.facts(), "agent": page is not None}))
    return session


# --- A training loop that belongs to a framework: its callbacks say where it is, and it saves in its own way ---
#     loop = FrameworkLoop(session, start=0, until=1000)
#     if loop.step_done(step) is not StopAction.NONE:     # all ranks get the same answer at the same step
#         ...                                             # let the framework save, now or a little later
#     loop.saved(step)
#     loop.answer()                                       # raises PlannedStop where that is what the save was for
#
# ``session.steps`` is for loops that can be written around; here the framework calls.


class FrameworkLoop:
    """The steps of one training. All ranks call the same methods in the same order, with the same steps."""

    pending: StopAction
    """The agreed action that still needs a save."""

    def __init__(self, session: Session, *, start: int, until: int) -> None:
        """Training goes on after ``start`` complete steps, which are on disk, or none.

        Raises:
            PlannedStop: the run was asked to stop before its first step.
        """
        self._session, self._page = session, session._page
        self._step = self._start = session._start = session._step = start
        self.is_busy, self._tick = False, session._tick(start)
        """Whether the last thing heard of was an evaluation or a save."""

        self.until, self.pending = until, StopAction.NONE
        page = self._page
        page[Slot.RESUMED] = page[Slot.STEP] = start
        page[Slot.UNTIL] = until
        page[Slot.SAVED] = NOTHING
        self.training()
        session._end_rehearsal(start + 1, start, until)
        self._ask(session._tick(start))
        self.answer()

    @property
    def has_pending(self) -> bool:
        """Whether an agreed action still needs a save."""
        return self.pending is not StopAction.NONE

    def step_done(self, step: int) -> StopAction:
        """``step`` steps are complete: what all ranks are to do now; it stays ``pending`` until ``answer``.

        There is no stop after the last step: the training ends by itself. A stop that is asked for during an evaluation
        comes after the step that follows it.
        """
        session, page = self._session, self._page
        session._step = self._step = step
        session.stragglers.end_step()
        session._signal.chain_again()
        session._note_span()
        page[Slot.STEP] = step
        page.touch(Slot.PROGRESS_AT)
        if step == self._start + 1:
            page.touch(Slot.FIRST_STEP_AT)
        session._sections.phase(Phase.STEP)  # anew: the limit is of one step
        session.stragglers.begin_step()
        if page[Slot.FAULT] != session._faults.seen:
            session._faults.strike(step)
        session._end_rehearsal(step + 1, self._start, self.until)  # after the first: a framework may save soon
        if step >= self.until:
            page[Slot.TICK] = END
            return self.pending
        return self._ask(session._tick(step))

    def evaluating(self) -> None:
        """An evaluation begins, or goes on to its next batch: each may take as long as the section's limit."""
        self.is_busy = True
        self._page[Slot.STATE] = State.EVALUATING
        self._session._sections.phase(Phase.EVALUATION)

    def saving(self) -> None:
        """The framework is about to save."""
        self.is_busy = True
        self._page[Slot.STATE], self._page[Slot.SAVE_BEGAN_NS] = State.SAVING, time.monotonic_ns()
        self._session._sections.phase(Phase.CHECKPOINTING)

    def training(self) -> None:
        """Neither an evaluation nor a save is under way."""
        self.is_busy = False
        self._page[Slot.STATE], self._page[Slot.SAVE_BEGAN_NS] = State.TRAINING, 0
        self._session._sections.phase(Phase.STEP)

    def saved(self, step: int) -> None:
        """The state after ``step`` steps is on disk, that of every rank."""
        began_ns = self._page[Slot.SAVE_BEGAN_NS]
        self.training()
        self._session._saves.note_saved(step, (time.monotonic_ns() - began_ns) / 1e9 if began_ns else 0.0)

    def answer(self) -> None:
        """What is ``pending`` has been done; where nothing is, this does nothing.

        Raises:
            PlannedStop: the run is to end here.
        """
        if self.pending is StopAction.NONE:
            return
        action, self.pending = self.pending, StopAction.NONE
        self._session._agreement.answered(self._tick)
        if action is StopAction.SAVE_AND_STOP:
            self._page[Slot.STATE] = State.STOPPED
            raise PlannedStop(self._step)
        self._session._safe_at_ns = time.monotonic_ns()

    def saves_with(self, save: SaveFunction) -> None:
        """``save(step)`` saves through a checkpoint manager, on every rank, for ``save`` and ``save_last``."""
        self._session._saves.begin(self._start, save)

    def save(self, *, is_due: bool) -> None:
        """Save between two steps, where that is due or pending. What is only due may become durable later, or fail.

        Raises:
            PlannedStop: the run is to end here; its state is durable.
            CheckpointError: it failed for a reason that does not pass with time.
        """
        saves, action = self._session._saves, self.pending
        self.training()
        if action is StopAction.NONE:
            if is_due:
                saves.now(self._step, is_periodic=True)
            return
        while not saves.now(self._step) and action is StopAction.SAVE_AND_STOP:  # until the time of the stop is up
            time.sleep(SAVE_RETRY_S)
        self.answer()

    def save_last(self, *, is_due: bool) -> None:
        """After the last step: return when its state is durable, or where none is due, what was saved before.

        Raises:
            CheckpointError: it failed for a reason that does not pass with time.
        """
        self.training()
        while is_due and not self._session._saves.now(self._step):
            time.sleep(SAVE_RETRY_S)
        if not is_due:
            SAVERS.wait()

    def end(self) -> None:
        """The training is over; later code belongs to no step."""
        self._session._sections.phase(Phase.NONE)
        self._page[Slot.TICK], self._page[Slot.STATE] = END, State.FINISHED

    def _ask(self, tick: int) -> StopAction:
        action = self._session._agreement.at(tick)
        if action is StopAction.NONE:
            self._session._safe_at_ns = time.monotonic_ns()
        else:
            self.pending, self._tick = action, tick
        return self.pending
