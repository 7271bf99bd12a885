"""Megatron-LM's re-run state machine by its own names, over ``worker.rerun``.

    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        optimizer.zero_grad()
        loss = forward(next(data_iterator))
        rerun_state_machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN", tolerance=0.0)
        loss.backward()
    should_checkpoint, should_exit, exit_code = rerun_state_machine.should_checkpoint_and_exit()

Results are validated from the first iteration on. There is one machine in a process, as there.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from slurmft.compat.neighbours import RerunErrorInjector, RerunMode, mode_of
from slurmft.errors import UsageError
from slurmft.policy.reruns import Mode, RerunSettings
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.worker import rerun
from slurmft.worker.rerun import RejectionFunction, as_tensor, is_rejected, number_of
from slurmft.worker.rerun_data import RerunDataIterator

log = logging.getLogger(__name__)

Iterators = RerunDataIterator | Sequence[RerunDataIterator | None] | None

_DATA = "data_iterators"


class RerunStateMachine(rerun.RerunStateMachine):
    """The machine with Megatron's arguments; ``get_rerun_state_machine`` returns it.

    Args:
        state_save_func: what to put back before a rerun, beside batches, random numbers and ``model``.
        state_restore_func: puts it back.
        mode: by default as the run's section ``rerun:`` says.
        error_injector: wrong results on purpose, for tests.
        result_rejected_tracker_filename: not written: the run's journal, verdicts and evidence hold what it would.
        model: the model, if buffers and gradients are to be put back as well, and DDP is to carry the flag.

    Raises:
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode | str | None = None,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | None = None,
        *,
        model: nn.Module | None = None,
        settings: RerunSettings | None = None,
    ) -> None:
        if (state_save_func is None) != (state_restore_func is None):
            raise UsageError("state_save_func and state_restore_func belong together", hint="give both, or none")
        for name, function in (("state_save_func", state_save_func), ("state_restore_func", state_restore_func)):
            if function is not None and not callable(function):
                raise UsageError(f"{name} is {function!r:.60}, which cannot be called")
        settings = settings or WorkerSettings.from_environment(os.environ).rerun
        if mode is not None:
            settings = replace(settings, mode=mode_of(mode))
        if error_injector is not None:
            if not isinstance(error_injector, RerunErrorInjector):
                raise UsageError(f"error_injector is {error_injector!r:.60}; it is a RerunErrorInjector")
            settings = replace(
                settings, error_injection_rate=error_injector.error_injection_rate,
                error_injection_type=error_injector.error_injection_type,
            )  # fmt: skip
        if result_rejected_tracker_filename is not None:
            log.warning("result_rejected_tracker_filename is not written: verdicts/ and the journal hold what it would")
        super().__init__(settings, model=model)
        self._save_state, self._restore_state = state_save_func, state_restore_func
        self._saved: Any = None
        self._loaded_data: list[Any] | None = None
        self._largest: dict[str, tuple[int, float]] = {}

    def should_run_forward_backward(self, data_iterator: Iterators = None) -> bool:
        """Whether to do the forward and backward pass: once for each iteration, and again for each rerun.

        Raises:
            UsageError: the data cannot be rewound: it is no RerunDataIterator, and no list of them.
        """
        begins, data = not self.is_under_way, _present(data_iterator)
        if begins:
            self._give_back_data(data)
        # one iterator is handed on as such: the machine then sees that it is the same as before
        again = super().should_run_forward_backward(data[0] if len(data) == 1 else data or None)
        if begins and again:
            self._saved = self._save_state() if self._save_state is not None else None
        elif again or self.should_exit:
            self._put_back()
        return again

    def validate_result(  # type: ignore[override]  # noqa: PLR0917 - Megatron-LM's order
        self,
        result: Any,
        rejection_func: RejectionFunction = torch.isnan,
        message: str = "unexpected result",
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Look at a result; when it is rejected, the iteration is run again. See the machine's own ``validate_result``.

        Raises:
            RuntimeError: the mode is DISABLED, and a fatal result is rejected.
            UsageError: a ``comparison_func`` was given, ``tolerance`` is no number from 0 on, or the result is none.
        """
        if comparison_func is not None:
            raise UsageError("comparison_func has no counterpart: values are compared by their relative difference",
                             hint="tolerance= is how large it may be")  # fmt: skip
        if not callable(rejection_func):
            raise UsageError(f"rejection_func is {rejection_func!r:.60}, which cannot be called")
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise UsageError(f"tolerance is {tolerance!r:.60}; it is a number from 0 on")
        if self.settings.mode is not Mode.DISABLED:
            super().validate_result(result, rejection_func, message, tolerance=tolerance, fatal=fatal)
        elif is_rejected(rejection_func(as_tensor(result))):
            text = f"iteration {self.iteration}: Unexpected result {result} (message='{message}')"
            if fatal:
                raise RuntimeError(text)
            log.warning("%s", text)

    def is_unexpectedly_large(
        self, result: Any, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Whether a result is more than ``threshold`` times the largest of the first ``num_samples`` of its context.

        Infinite is; NaN is not, which has a check of its own. ``resample`` begins anew. ``rerun.check_for_spiky_loss``
        with ``validate_loss`` compares with recent losses instead, and keeps them in the checkpoint.
        """
        value = abs(number_of(result))
        seen, largest = (0, 0.0) if resample else self._largest.get(context, (0, 0.0))
        if not math.isfinite(value):
            return math.isinf(value)
        if seen < num_samples:
            self._largest[context] = seen + 1, max(largest, value)
            return False
        return value > threshold * largest

    def get_mode(self) -> RerunMode:
        """The present mode."""
        return RerunMode(self.settings.mode)

    def set_mode(self, mode: RerunMode | str) -> None:
        """Change the mode between two iterations, as an evaluation does: DISABLED before, and back behind it.

        Raises:
            UsageError: there is no such mode, or an iteration is under way.
        """
        self.change_mode(mode_of(mode))

    def state_dict(
        self, data_iterator: Iterators = None, ckpt_format: str = "torch", force: bool = True
    ) -> dict[str, Any]:
        """Plain values and tensors of this rank, with the state of the data: save it with the checkpoint.

        ``force`` changes nothing: the state is always complete.

        Raises:
            UsageError: ``ckpt_format`` is one in which a rank's own dict cannot be kept.
        """
        if ckpt_format != "torch":
            raise UsageError(f"ckpt_format is {ckpt_format!r:.60}; the state is a plain dict, each rank's own",
                             hint="save it as such, or as loader= of CheckpointManager.save")  # fmt: skip
        return {**super().state_dict(), _DATA: [one.state_dict() for one in _present(data_iterator)]}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on as after ``state_dict``; the data gets its state when the next iteration names it.

        Raises:
            UsageError: it is no such state.
        """
        if not isinstance(state, Mapping) or _DATA not in state:
            raise UsageError("this is not a state of the re-run state machine", hint="pass what state_dict() returned")
        super().load_state_dict(state)
        self._loaded_data = list(state[_DATA])

    @property
    def should_exit(self) -> bool:
        """Whether ``should_checkpoint_and_exit`` asks for an end."""
        return self._proceedings.departure is not None

    def _put_back(self) -> None:
        if self._restore_state is not None and self._saved is not None:
            self._restore_state(self._saved)

    def _give_back_data(self, data: Sequence[Any]) -> None:
        states, self._loaded_data = self._loaded_data, None
        if not states:
            return
        iterators = [one for one in data if isinstance(one, RerunDataIterator)]
        if len(iterators) != len(states):
            raise UsageError(f"the state is of {len(states)} data iterators, and there are {len(iterators)}",
                             hint="pass those that state_dict() was given")  # fmt: skip
        for one, own in zip(iterators, states, strict=True):
            one.load_state_dict(own)


def _present(data_iterator: Iterators) -> list[RerunDataIterator]:
    """The iterators, without the places of a list that hold none."""
    given: Sequence[Any] = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
    return [one for one in given if one is not None]


class _Process:
    machine: ClassVar[RerunStateMachine | None] = None
    """The machine of this process."""


def initialize_rerun_state_machine(**kwargs: Any) -> None:
    """Make the machine of this process; arguments as of ``RerunStateMachine``.

    Raises:
        UsageError: there is one already, or an argument makes no sense.
    """
    if _Process.machine is not None:
        raise UsageError("there is a re-run state machine already", hint="destroy_rerun_state_machine() first")
    try:
        _Process.machine = RerunStateMachine(**kwargs)
    except TypeError as error:
        raise UsageError(f"the re-run state machine does not take these arguments: {error}") from error


def get_rerun_state_machine() -> RerunStateMachine:
    """The machine of this process, made from the run's section ``rerun:`` where there is none yet."""
    if _Process.machine is None:
        initialize_rerun_state_machine()
    assert _Process.machine is not None
    return _Process.machine


def destroy_rerun_state_machine() -> None:
    """Forget the machine of this process."""
    _Process.machine = None
