"""Which step's state lies on a GPU now, independent of the work that the host has queued since.

The host runs ahead: when it is at the end of step 9, the device may hang in a collective of step 8, with the weights of
step 7. So events are recorded at the end of each step, and around each update of the weights. The state of a step is
trusted where the device has passed its end and not yet begun to change it for the next one: before a copy, and again
after it. State of the host alone (the schedule, an optimizer's counters in main memory) is noted at the end of each
step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from slurmft.checkpoint.format.flat_state import GROUPS, PARAMS, STATE
from slurmft.checkpoint.state import Trainee
from slurmft.errors import UsageError
from slurmft.trainer.streams import Device, Event, is_on_device

AHEAD = 4
"""Steps that the host may be ahead of its device; ``rank_records`` remembers as many."""


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
