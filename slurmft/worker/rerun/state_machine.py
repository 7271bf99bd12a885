"""The re-run state machine: a result that looks wrong is computed again, here and on other hardware, and judged.

    machine = RerunStateMachine(model=model)
    data = RerunDataIterator(loader)
    for step in range(steps):
        while machine.should_run_forward_backward(data):
            loss = loss_of(model, next(data))
            machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN")
            optimizer.zero_grad()
            loss.backward()
        should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
        ...
        optimizer.step()

Within slurmft's session, ``session.rerun_machine(model, loader)`` does the last part as well. Every rank calls the same
methods in the same order; results are validated before their backward pass, and the optimizer steps after the loop.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slurmft.errors import UsageError
from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.nodes.rerun_settings import RerunSettings
from slurmft.policy.nodes.reruns import Mode, Phase, Seen
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.worker.data.generators import IterationStart
from slurmft.worker.rerun.agreement import Alone, ByLoop, Ranks, agreement_for
from slurmft.worker.rerun.checks import Injector
from slurmft.worker.rerun.data import RerunDataIterator
from slurmft.worker.rerun.model import ModelStart
from slurmft.worker.rerun.proceedings import Proceedings, Row
from slurmft.worker.rerun.reports import Departure
from slurmft.worker.rerun.validation import Validation

log = logging.getLogger(__name__)

Data = RerunDataIterator | Sequence[RerunDataIterator] | None

_FORMAT = "rerun"


class RerunStateMachine(Validation):
    """Reruns of iterations whose results are rejected; see the module for the loop around it.

    Args:
        settings: the section ``rerun:``; by default as the agent passes it.
        model: restored before a rerun, and DDP carries the flag; pass the wrapped one.
        data: the iterator of every iteration, if there is one for all; its state is then part of this object's.
        step: returns the number of the iteration under way; counted here when it is not given.
        reads_late: leave results on the device until the backward pass is over; as the device needs it by default.
        leave: called with the Departure instead of waiting for ``should_checkpoint_and_exit``; must not return.
        carried_by_loop: the loop's own reduction carries the flag: ``flag`` into it, its result to ``agree``.
    """

    def __init__(
        self,
        settings: RerunSettings | None = None,
        *,
        model: nn.Module | None = None,
        data: RerunDataIterator | None = None,
        step: Callable[[], int] | None = None,
        leave: Callable[[Departure], Any] | None = None,
        carried_by_loop: bool = False,
        reads_late: bool | None = None,
    ) -> None:
        settings = settings or WorkerSettings.from_environment(os.environ).rerun
        device = next((one.device for one in model.parameters()), None) if model is not None else None
        late = device is not None and device.type == "cuda" if reads_late is None else reads_late
        hardware, ranks = own_hardware(device), Ranks()
        super().__init__(
            settings,
            ByLoop() if carried_by_loop else agreement_for(model, ranks, on_device=late),
            Injector(settings, hardware, ranks.rank) if settings.injects else None,
            ranks.rank,
            reads_late=late,
        )
        self.data = data
        self._randomness, self._model = IterationStart(), ModelStart(model)
        self._proceedings = Proceedings(settings, ranks, hardware)
        self._is_alone = isinstance(self._agreement, Alone) and not late
        self._is_usual = self._twice is None and not self._off
        self._has_to_tidy = True
        self._step, self._leave = step, leave
        self._is_between = True
        self._given: Data = None
        self._data: tuple[RerunDataIterator, ...] = ()

    # the loop

    def should_run_forward_backward(self, data: Data = None) -> bool:
        """Whether to do the forward and backward pass: once for each iteration, and again for each rerun.

        Raises:
            UsageError: ``data`` is neither a RerunDataIterator nor a sequence of them.
        """
        if self._is_between:
            self._is_between = False
            if data is None:
                data = self.data
            if data is not self._given:
                self._data = _as_iterators(data)
                self._given = data
                for one in self._data:
                    one.within(lambda: self.is_under_way)
            for one in self._data:
                one.advance()
            if not self._is_usual and self._off:
                return True
            self._invocation = 0
            self._randomness.mark()
            self._model.mark()
            return self._proceedings.pending is None or self._begin_elsewhere()
        if not self._is_usual:
            return self._after_other_run()
        if self._is_alone:
            if self._rejection is not None:
                return self._after_alarm()
        elif self._agreement.alarm(self._resolve):
            return self._after_alarm()
        if self._has_to_tidy or self._losses:
            return self._finish()
        self._iteration += 1
        self._is_between = True
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has begun and is not over."""
        return not self._is_between

    def check_is_over(self) -> None:
        """Raises UsageError when the loop was left early: it is unknown then whether a result was rejected."""
        if not self._is_between:
            raise UsageError(
                "the loop `while machine.should_run_forward_backward()` was left before it was over",
                hint="let it run to its end: no break, and no exception that is caught outside of it",
            )

    def change_mode(self, mode: Mode) -> None:
        """Go on in another mode, from the next iteration on.

        Raises:
            UsageError: an iteration is under way.
        """
        self.check_is_over()
        self.settings = replace(self.settings, mode=mode)
        self._choose_path()
        self._is_usual = self._twice is None and not self._off

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """After the loop, before the optimizer's step: whether to save, whether to exit, and with which code.

        Save the state before this iteration, which everything has been restored to, together with this object's state
        and the data's.

        Raises:
            UsageError: the loop was left before it was over.
        """
        self.check_is_over()
        departure = self._proceedings.departure
        if departure is None:
            return False, False, 0
        departure.write_verdict()
        return departure.should_checkpoint, True, departure.exit_code

    # the checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; this rank's own."""
        return {
            _FORMAT: 1,
            "iteration": self._iteration,
            "rank": self._rank,
            "losses": self._checks.state_dict(),
            "proceedings": self._proceedings.state_dict(),
            "hashes": list(self._second.hashes) if self._proceedings.pending is not None else [],
            "data": self.data.state_dict() if self.data is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on as after ``state_dict``; the state of a loader that was saved without a machine is loaded as such."""
        is_ours = _FORMAT in state
        data = state["data"] if is_ours else state
        if self.data is not None and data is not None:
            self.data.load_state_dict(data)
        if not is_ours:
            return
        self._iteration, self._second.hashes = int(state["iteration"]), [str(one) for one in state["hashes"]]
        self._checks.load_state_dict(state["losses"])
        self._fine_up_to = self._checks.fine_up_to
        self._proceedings.load_state_dict(state["proceedings"])
        if int(state["rank"]) != self._rank and self.data is not None:
            self.data.forget_replay()
        if self.settings.mode is not Mode.VALIDATE_RESULTS and self._proceedings.pending is not None:
            log.warning("rerun.mode is %s: the result that waited for its rerun is not judged", self.settings.mode)
            self._proceedings.pending = None

    def shared_position(self, state: Mapping[str, Any], /) -> Any:
        """The part of the position in the data that all ranks share; None where the loader does not report it."""
        data = state["data"] if _FORMAT in state else state
        return None if self.data is None or data is None else self.data.shared_position(data)

    def report(self) -> None:
        """In the mode ``report_stats``: log how much results have differed so far."""
        if self._twice is not None:
            self._twice.report()

    # from here on: the slow path

    def _finish(self) -> bool:
        self._agreement.clear()
        self._model.settle()
        self._has_to_tidy = self._reads_late or isinstance(self._agreement, ByLoop)
        if self._second.unread:
            self._resolve()
        if self._losses:
            self._checks.remember(self._losses)
            self._fine_up_to = self._checks.fine_up_to
            self._losses = []
        self._iteration += 1
        self._is_between = True
        return False

    def _after_other_run(self) -> bool:
        """After an unusual run: a rerun, one that is not judged, or one of two."""
        if self._off:
            self._iteration += 1
            self._is_between = True
            return False
        if self._phase is not Phase.INITIAL:
            return self._after_rerun()
        if self._twice is not None and self._twice.wants_second_run():
            self._take_back()
            return True
        return self._finish()

    def _after_alarm(self) -> bool:
        self._resolve()
        if not self._proceedings.open(self._rejection, self.iteration):
            return self._finish()
        return self._again_in_place()

    def _again_in_place(self) -> bool:
        self._rejection = self._proceedings.own
        self._second.hashes = self._batch_hashes()
        self._second.doubt = self._doubts()
        self._take_back()
        self._begin_phase(Phase.IN_PLACE)
        return True

    def _begin_elsewhere(self) -> bool:
        departure = self._proceedings.reopen(self.iteration)
        if departure is not None:
            return self._depart(departure)
        if self._proceedings.pending is None:
            return True  # of another iteration: not to be judged
        self._rejection = self._proceedings.own
        self._second.doubt = "the saved batches are damaged" if any(one.is_damaged() for one in self._data) else ""
        self._begin_phase(Phase.ELSEWHERE)
        return True

    def _begin_phase(self, phase: Phase) -> None:
        self._phase, self._is_quick, self._is_usual, self._second.anew = phase, False, False, None
        self._second.seen = Seen.NOTHING if self._rejection is None else Seen.UNKNOWN

    def _after_rerun(self) -> bool:
        doubt = self._second.doubt or self._doubts()
        if not doubt and self._batch_hashes() != self._second.hashes:
            doubt = "the rerun got other data"
        if self._second.seen is Seen.UNKNOWN and not doubt:
            doubt = "the rerun did not validate the result again"
        row = Row(seen=self._second.seen, doubt=doubt, is_finite=self._model.is_finite(), anew=self._second.anew)
        departure, again = self._proceedings.conclude(self._phase, row)
        if departure is not None:
            return self._depart(departure)
        if again:
            return self._again_in_place()
        self._end_phase()
        return self._finish()

    def _end_phase(self) -> None:
        self._phase, self._rejection, self._second.doubt = Phase.INITIAL, None, ""
        self._is_quick, self._is_usual = self._may_be_quick, True

    def _depart(self, departure: Departure) -> bool:
        self._take_back()
        self._end_phase()
        self._is_between = True
        self._proceedings.departure = departure
        if self._leave is not None:
            self._leave(departure)
        return False

    def _take_back(self) -> None:
        """Restore everything from before the iteration: data, random numbers, buffers, no gradients."""
        for one in self._data:
            one.rewind()
        self._agreement.clear()
        self._randomness.restore()
        self._model.restore()
        self._invocation = 0
        self._losses, self._second.unread = [], []

    def _batch_hashes(self) -> list[str]:
        return [one_hash for one in self._data for one_hash in one.hashes()]

    def _doubts(self) -> str:
        """Why a rerun of this iteration would prove nothing; empty when it would be a proof."""
        if not self._data:
            return "no RerunDataIterator was passed, so nothing proves that a rerun gets the same data"
        if any(one.changed_in_place() for one in self._data):
            return "the loop has written into a batch"
        return self._model.unexpected_change()


def _as_iterators(data: Data) -> tuple[RerunDataIterator, ...]:
    if data is None:
        return ()
    iterators = (
        (data,) if isinstance(data, RerunDataIterator) else tuple(data) if isinstance(data, list | tuple) else ()
    )
    if not iterators or not all(isinstance(one, RerunDataIterator) for one in iterators):
        raise UsageError(f"{type(data).__name__} cannot be rewound", hint="wrap it: RerunDataIterator(loader)")
    return iterators


def own_hardware(device: torch.device | None = None) -> Suspect:
    """This rank's node and, where ``device`` is a GPU, that GPU's UUID in the form of nvidia-smi."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    gpu = ""
    if device is not None and device.type == "cuda":
        uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
        gpu = uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}"
    return Suspect(node=node, gpu=gpu, rank=int(os.environ.get("RANK", "0")))
