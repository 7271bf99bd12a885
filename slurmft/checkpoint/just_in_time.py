"""The last complete step, kept by whoever still has it when a rank fails.

In a replicated run every rank has all weights. When one dies, the others wait for it in a collective of the next step,
with the weights of the last complete one. Each node's first rank that is asked, or that leaves with an error, copies
them to its place in memory, together with what every rank of the node had for itself (``rank_records``); so the next
attempt goes on where this one was, bit for bit.

That needs the weights to be still those of the step: nothing but the optimizer changes them, and its hook tells when.
Buffers, which a forward pass changes, are copied at every boundary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slurmft.checkpoint.folders import own_generation
from slurmft.checkpoint.plain_state import as_json
from slurmft.checkpoint.rank_records import RankRecord, read_record
from slurmft.checkpoint.state import Trainee, unwrapped
from slurmft.errors import CheckpointError, UsageError
from slurmft.launch.heartbeat import IN_UPDATE, NOTHING, PAGE_VARIABLE, RESCUE_SUFFIX
from slurmft.storage.memory_folder import ranks_of_this_node
from slurmft.training.background import BACKGROUND, weakly

MAX_SHARE = 0.05
"""Of the time of a step, which the notes at its boundaries may take; about 0.1 ms of processor time."""

TRIAL_STEPS = 50

log = logging.getLogger(__name__)

Stage = Callable[[int, Trainee, Mapping[int, dict[str, Any]], Mapping[str, torch.Tensor]], None]
"""Copies the state after so many steps, with each local rank's own and these buffers, to where a restart finds it."""


class JustInTime:
    """One rank's part. ``arm`` it with the objects that are trained; without that it does nothing.

    Args:
        folder: the node's memory folder, which outlives the rank.
        stage: does the copy; raises where it cannot.
    """

    def __init__(self, folder: Path, stage: Stage) -> None:
        self._folder, self._stage = folder, stage
        self._rank = int(os.environ.get("RANK", "0"))
        self._local = ranks_of_this_node()
        self._lock = threading.Lock()
        self._trainee: Trainee | None = None
        self._record: RankRecord | None = None
        self._step = self._kept = NOTHING
        self._is_whole = self._is_steady = True
        self._early: tuple[int, bytes] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._live: tuple[object, ...] = ()
        self._rates: list[Any] = []
        self._spent_s = 0.0
        self._since: tuple[float, int] | None = None
        self.reason = "nothing was saved or loaded yet"
        """Why the last complete step cannot be kept; empty when it can."""

    def arm(self, trainee: Trainee, *, reason: str = "", step: int | None = None) -> None:
        """From now on be ready to keep ``trainee``; with a ``reason`` do not, for that reason.

        ``step`` steps are complete, where that is known; of the first boundary nobody else has told. What goes wrong
        here is told, and what it is called for goes on.
        """
        try:
            with self._lock:
                self._arm(trainee, reason)
            if step is not None and self._step == NOTHING:
                self.at_boundary(step)
        except Exception as error:  # noqa: BLE001 - of the user's model or loader, at a save that they let pass
            self.disarm(f"{type(error).__name__}: {error}")

    def _arm(self, trainee: Trainee, reason: str) -> None:
        self.reason = reason
        self._trainee = None if reason else trainee
        if reason:
            return self._disarm(reason)
        if self._record is None:
            try:
                self._record = RankRecord(self._folder, self._rank, own_generation())
            except OSError as error:
                return self._disarm(f"no memory for it: {error}")
            hook = register_optimizer_step_pre_hook(weakly(self._before_optimizer))
            weakref.finalize(self, hook.remove)
            self._listen()
        model = unwrapped(trainee.model)
        live = dict(model.named_buffers())
        known = (id(model), *((name, value.dtype, value.shape, value.device) for name, value in live.items()))
        if self._live != known:  # the training loop waits: not anew at every save
            kept = model.state_dict(keep_vars=True).keys() & live.keys()
            self._buffers = {name: live[name].detach().clone() for name in sorted(kept)}
            self._live = known
        self._copy_buffers()
        BACKGROUND.is_armed = True
        return None

    def disarm(self, reason: str) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._disarm(reason)

    def loaded(self) -> None:
        """The state is another one: steps that were known come again."""
        with self._lock:
            self._step = self._kept = NOTHING

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
        """As ``training.background.Saver``."""
        if self._trainee is None or self._record is None:
            return None
        began = time.thread_time()
        with self._lock:
            self._step, self._is_whole = step, True
            try:
                noted = self._record.note(step, self._loader_state(), is_final=True)
            except (UsageError, CheckpointError) as error:
                return self._disarm(error.what)
            if self._early is not None and self._early[0] == step and self._early[1] != noted:
                self._is_steady = False  # it draws after its first collective, so a dead rank's early note is no help
            self._early, self._rates = None, _rates(self._trainee)
            self._copy_buffers()
            self._tell()
        return self._account(began, step)

    def before_update(self, step: int) -> None:
        """As ``training.background.Saver``."""
        if self._trainee is None or self._record is None or (self._early is not None and self._early[0] == step):
            return
        began = time.thread_time()
        with contextlib.suppress(UsageError, CheckpointError):
            self._early = step, self._record.note(step, self._loader_state(), is_final=False, is_steady=self._is_steady)
        self._spent_s += time.thread_time() - began

    def rescue(self) -> None:
        """As ``training.background.Saver``. The first rank of a node that gets here does it for all."""
        listener = BACKGROUND.listener
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
        step = self._step
        if self._trainee is None or not self._is_whole or step <= self._kept:
            return
        if self._buffers and self._rank and 0 in self._local:
            return  # buffers are each rank's own, and rank 0's count: DDP sends them to all before every step
        self._kept = step
        try:
            os.close(os.open(self._folder / f"rescue-{own_generation()}-{step}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return  # another rank of this node does it
        except OSError as error:
            log.warning("step %d is not kept: %s", step, error)
            return
        began = time.monotonic()
        try:
            self._stage(step, self._trainee, self._own_states(step), self._buffers)
        except Exception as error:  # noqa: BLE001 - this process fails anyway: of something else, which must be told
            log.warning("step %d is not kept just in time: %s", step, error)
            return
        log.info("kept step %d just in time, in %.3f s", step, time.monotonic() - began)
        if BACKGROUND.listener is not None:
            BACKGROUND.listener.on_rescued(step)

    def _own_states(self, step: int) -> dict[int, dict[str, Any]]:
        if self._trainee is not None and _rates(self._trainee) != self._rates:
            raise UsageError("the learning rate was changed before the weights were")
        states: dict[int, dict[str, Any]] = {}
        for rank in self._local:
            state = read_record(self._folder, rank, step, own_generation())
            if state is None:
                raise UsageError(f"what rank {rank} had for itself after step {step} is not known")
            states[rank] = state
        return states

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._trainee is None or optimizer is not self._trainee.optimizer or not self._is_whole:
            return
        self.before_update(self._step + 1)
        with self._lock:  # a copy that is under way gets to its end
            self._is_whole = False
            self._tell()

    def _loader_state(self) -> dict[str, Any] | None:
        loader = self._trainee.loader if self._trainee is not None else None
        return None if loader is None else as_json(loader.state_dict())

    def _copy_buffers(self) -> None:
        if self._buffers and self._trainee is not None:
            live = dict(unwrapped(self._trainee.model).named_buffers())
            torch._foreach_copy_(list(self._buffers.values()), [live[name] for name in self._buffers])

    def _tell(self) -> None:
        if BACKGROUND.listener is not None:
            can = self._trainee is not None and self._step > self._kept - (not self._is_whole)
            BACKGROUND.listener.on_rescuable((self._step if self._is_whole else IN_UPDATE) if can else NOTHING)

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

    def _disarm(self, reason: str) -> None:
        if self._trainee is not None or reason != self.reason:
            log.info("no step is kept just in time: %s", reason)
        self.reason, self._trainee = reason, None
        self._step = NOTHING  # boundaries are not told of any more
        self._tell()

    def _listen(self) -> None:
        """Wait in a thread for the agent's word: the main thread may hang in a collective."""
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
                BACKGROUND.rescue()

        threading.Thread(target=listen, name="slurmft-rescue", daemon=True).start()


def _rates(trainee: Trainee) -> list[Any]:
    """What a scheduler changes; some trainers call theirs at the beginning of a step."""
    groups = [value for group in trainee.optimizer.param_groups for value in group.values() if type(value) is float]
    return [*groups, getattr(trainee.scheduler, "last_epoch", None)]
