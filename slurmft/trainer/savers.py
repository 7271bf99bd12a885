"""The connection of a session and the checkpoint managers of the same process; neither needs the other.

The session knows when a step is complete, when the run must stop, and when a rank has failed. A manager knows the state
to save, and when a save in the background has become durable.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from slurmft.errors import UsageError
from slurmft.system.siginfo import handled_signal
from slurmft.trainer.gradients import OpenGradients
from slurmft.trainer.rng import RandomState

log = logging.getLogger(__name__)


class Outcome(Enum):
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
        self.outcome = Outcome.DONE
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
        self.outcome, self.is_urgent, self.is_periodic = Outcome.DONE, urgent, not urgent

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
