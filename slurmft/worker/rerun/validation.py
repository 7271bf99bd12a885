"""A rank's look at its own results: rejected in the first run of an iteration, compared in a rerun of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slurmft.policy.nodes.rerun_settings import RerunSettings
from slurmft.policy.nodes.reruns import Mode, Phase, Seen, Variability, largest_difference, variability
from slurmft.worker.rerun.agreement import Agreement, ByLoop
from slurmft.worker.rerun.checks import Injector, LossChecks, RejectionFunction
from slurmft.worker.rerun.record import Rejection, as_tensor, is_rejected, number_of, values_of

log = logging.getLogger(__name__)

Result = torch.Tensor | float
Results = Result | Sequence["Results"]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A validation on a GPU that the host has not looked at yet."""

    invocation: int
    result: Result
    rejected: Any
    message: str
    tolerance: float
    fatal: bool
    producers: tuple[int, ...]
    is_loss: bool = False


@dataclass(slots=True)
class SecondLook:
    """State of the slow path: results that are still on the device, and what a rerun has shown so far.

    Apart from the machine, because attributes beyond the 29th make all of an object's attributes slower.
    """

    unread: list[_Unread] = field(default_factory=list)

    seen: Seen = Seen.NOTHING
    anew: Rejection | None = None
    """Another result that was rejected in the rerun."""

    hashes: list[str] = field(default_factory=list)
    """Of the batches that the first run took."""

    doubt: str = ""
    """Why the rerun proves nothing; empty when it does."""


class Validation:
    """The part of the machine that a loop calls for each result. While all is well it compares one number.

    On a GPU nothing is read in the first run: the comparison stays on the device, and so does the flag, until all ranks
    look at it after the backward pass.
    """

    def __init__(
        self, settings: RerunSettings, agreement: Agreement, injector: Injector | None, rank: int, *, reads_late: bool
    ) -> None:
        self.settings = settings
        self._twice = StepTwice(settings.report_interval_steps) if settings.mode is Mode.REPORT_STATS else None
        self._agreement, self._injector, self._rank, self._reads_late = agreement, injector, rank, reads_late
        self._checks = LossChecks(settings)
        self._fine_up_to, self._remembers = self._checks.fine_up_to, self._checks.remembers
        self._is_quick = self._may_be_quick
        self._step: Callable[[], int] | None = None
        self._iteration = self._invocation = 0
        self._phase = Phase.INITIAL
        self._rejection: Rejection | None = None
        self._second = SecondLook()
        self._losses: list[float] = []

    def _choose_path(self) -> None:
        """After a change of the mode; statistics begin anew."""
        settings = self.settings
        self._twice = StepTwice(settings.report_interval_steps) if settings.mode is Mode.REPORT_STATS else None
        self._is_quick = self._may_be_quick

    @property
    def _off(self) -> bool:
        return self.settings.mode is Mode.DISABLED

    @property
    def _may_be_quick(self) -> bool:
        """Whether the first run of an iteration needs no more than a look at each result."""
        return self._injector is None and self._twice is None and not self._reads_late and not self._off

    @property
    def iteration(self) -> int:
        """The number of the iteration under way, from 0."""
        return self._iteration if self._step is None else self._step()

    def validate_result(  # noqa: PLR0917 - the signature that users of Megatron-LM know
        self,
        result: Results,
        rejection_func: RejectionFunction = torch.isnan,
        message: str = "unexpected result",
        tolerance: float = 0.0,
        fatal: bool = True,
        producers: Sequence[int] | None = None,
    ) -> None:
        """Look at a result; when it is rejected, the iteration will be run again.

        ``result`` is a number, a tensor, or a list or tuple of them, which counts as one tensor of all their values.
        ``rejection_func(tensor)`` is true, or has a true element, for an unexpected result. ``tolerance`` is the
        relative difference up to which two results count as equal. Not ``fatal``: it is only reported. ``producers``:
        the ranks that could have produced it; this one alone unless the model is spread over several.

        Raises:
            UsageError: ``result`` holds something that is not a number.
        """
        if self._off:
            return
        invocation = self._invocation
        self._invocation = invocation + 1
        if self._is_quick and rejection_func is torch.isnan and isinstance(result, torch.Tensor) and not result.dim():
            value = result.item()  # an eighth of what torch.isnan costs
            if value == value:  # noqa: PLR0124 - not NaN
                return
        looked_at = as_tensor(result)
        rejected = rejection_func(looked_at)
        if self._is_quick and not is_rejected(rejected):
            return
        kept = float(result) if isinstance(result, int | float) else looked_at
        self._examine(_Unread(invocation, kept, rejected, message, tolerance, fatal, self._producers(producers)))

    def validate_loss(
        self, loss: Result, *, tolerance: float = 0.0, fatal: bool = True, producers: Sequence[int] | None = None
    ) -> None:
        """Look at a loss as the settings say: NaN, infinite, spiky, and what ``add_check`` has added."""
        if self._is_quick:
            value = loss.item() if type(loss) is torch.Tensor else float(loss)
            if value - value == 0.0 and value <= self._fine_up_to:
                if self._remembers:
                    self._losses.append(value)
                self._invocation += 1
                return
        if self._off:
            return
        invocation = self._invocation
        self._invocation = invocation + 1
        checks = self._checks
        if self._reads_late and self._phase is Phase.INITIAL and isinstance(loss, torch.Tensor):
            rejected: Any = checks.on_device(loss)
            message = ""  # found when it is read
        else:
            message = checks.problem(loss)
            rejected = bool(message)
        who = self._producers(producers)
        self._examine(_Unread(invocation, loss, rejected, message, tolerance, fatal, who, is_loss=True))

    def add_check(self, check: RejectionFunction, message: str) -> None:
        """Reject a loss in ``validate_loss`` for which ``check(loss)`` is true as well."""
        self._checks.add(check, message)
        self._fine_up_to = self._checks.fine_up_to

    # the flag on the loop's own reduction

    @property
    def flag(self) -> float:
        """1 when this rank has rejected a result of this iteration; waits for the GPU where the result lies on one."""
        return float(self._resolve())

    def agree(self, reduced: float) -> None:
        """The sum or maximum of all ranks' ``flag``, in every iteration when the machine is ``carried_by_loop``."""
        if isinstance(self._agreement, ByLoop):
            self._agreement.reduced = float(reduced)

    def _examine(self, one: _Unread) -> None:
        if self._injector is not None and self._injector.strikes(self.iteration, one.invocation, self._phase):
            nan = torch.full_like(one.result.float(), torch.nan) if isinstance(one.result, torch.Tensor) else torch.nan
            one = replace(one, result=nan, rejected=True)
        rejected = one.rejected
        if self._twice is not None:
            self._twice.note(one.invocation, one.message or "loss", values_of(one.result))
        elif self._reads_late and self._phase is Phase.INITIAL:
            self._second.unread.append(one)
            if one.fatal:
                self._agreement.poison(rejected.any() if isinstance(rejected, torch.Tensor) else is_rejected(rejected))
        else:
            self._settle(one, rejected=is_rejected(rejected))

    def _settle(self, one: _Unread, *, rejected: bool) -> None:
        """A result that the host knows: rejected in the first run, compared in a rerun."""
        first = self._rejection
        if self._phase is not Phase.INITIAL and first is not None and one.invocation == first.invocation:
            apart, now = largest_difference(first.values, values_of(one.result)), shown(one.result)
            if apart <= first.tolerance:
                self._second.seen = Seen.REPRODUCED
            else:
                self._second.seen = Seen.DIFFERENT_REJECTED if rejected else Seen.DIFFERENT
            log.info("rank %d: was %s, is %s, relative difference %g", self._rank, first.values[:4], now, apart)
        elif rejected:
            self._reject(one)
        if one.is_loss and not rejected and self._remembers:
            self._losses.append(number_of(one.result))

    def _reject(self, one: _Unread) -> None:
        message = one.message or self._checks.problem(one.result) or "unexpected loss"
        log.warning(
            "Unexpected result %s on rank %d at iteration #%d invocation #%d (message='%s')%s",
            shown(one.result), self._rank, self.iteration, one.invocation + 1, message,
            "" if one.fatal else "; not fatal",
        )  # fmt: skip
        if not one.fatal:
            return
        rejection = Rejection(
            rank=self._rank, invocation=one.invocation, message=message, values=values_of(one.result),
            tolerance=one.tolerance, producers=one.producers,
        )  # fmt: skip
        if self._phase is not Phase.INITIAL:
            self._second.anew = self._second.anew or rejection
        elif self._rejection is None:
            self._rejection = rejection
            if not self._reads_late:
                self._agreement.poison(True)

    def _resolve(self) -> bool:
        unread, self._second.unread = self._second.unread, []
        for one in unread:
            self._settle(one, rejected=is_rejected(one.rejected))
        return self._rejection is not None

    def _producers(self, producers: Sequence[int] | None) -> tuple[int, ...]:
        return (self._rank,) if producers is None else tuple(producers)


def shown(result: Result) -> object:
    """For a log line: a tensor without its history."""
    return result.detach() if isinstance(result, torch.Tensor) else result


log = logging.getLogger(__name__)

MAX_DIFFERENCES = 100_000


class StepTwice:
    """Collects the results of the first run of a step and compares those of the second."""

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._first: list[tuple[str, Sequence[float]]] = []
        self._differences: dict[str, list[float]] = {}
        self._steps = 0
        self._is_second = False

    def note(self, invocation: int, message: str, values: Sequence[float]) -> None:
        """One result of the run under way."""
        if not self._is_second:
            self._first.append((message, values))
            return
        first = self._first[invocation][1] if invocation < len(self._first) else ()
        found = self._differences.setdefault(message, [])
        found.append(largest_difference(first, values))
        del found[:-MAX_DIFFERENCES]

    def wants_second_run(self) -> bool:
        """After a run: whether the step is to be run once more. Reports now and then."""
        if not self._is_second:
            self._is_second = True
            return True
        self._is_second, self._first = False, []
        self._steps += 1
        if self._interval_steps and self._steps % self._interval_steps == 0:
            self.report()
        return False

    def report(self) -> None:
        """One log line for each kind of result."""
        for message, found in self.variabilities().items():
            log.info("rerun statistics after %d steps: %s: %s", self._steps, message, found)

    def variabilities(self) -> dict[str, Variability]:
        """By the message that each result was validated with."""
        return {message: variability(found) for message, found in self._differences.items()}
