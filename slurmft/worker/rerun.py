"""The re-run state machine: a result that looks wrong is computed again, here and on other hardware, and judged.

In one piece, since it is one state machine: each part reads or changes the state of the iteration that is being judged.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from slurmft.errors import UsageError
from slurmft.policy.reruns import (
    MAX_ROUNDS_IN_PLACE,
    Injection,
    LossWindow,
    Mode,
    Phase,
    RerunOutcome,
    RerunSettings,
    Seen,
    Variability,
    after_rerun,
    largest_difference,
    on_suspects,
    strikes,
    variability,
)
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED, Cause, Evidence, Kind, Suspect
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.verdicts import EVIDENCE_VARIABLE, VERDICT_VARIABLE, WorkerVerdict, add_evidence, write_verdict
from slurmft.trainer.savers import Team, any_rank
from slurmft.worker.rerun_data import IterationStart, RerunDataIterator

# --- How every rank learns that one of them has rejected a result, without a collective of its own while none has ---
# With DDP the flag rides on the gradients: a rank that rejects a result makes its own gradients NaN before they are
# reduced, so that every rank's reduced gradients are. All ranks look at one element of one gradient after the backward
# pass. What they find is equal everywhere, so that all of them take the slow path together or none does.

log = logging.getLogger(__name__)

Resolve = Callable[[], bool]
"""Whether this rank has rejected a result; waits for the GPU where the result lies on one."""


class Agreement:
    """Shows every rank alike whether one of them has rejected a result of this iteration."""

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """This rank has rejected a result (or has where the tensor is true); called before the backward pass."""

    def alarm(self, resolve: Resolve) -> bool:
        """Whether some rank may have; the same on all ranks. Called after the backward pass."""
        raise NotImplementedError

    def clear(self) -> None:
        """The next run of the iteration begins."""


class Alone(Agreement):
    """One process: there are no other ranks."""

    def alarm(self, resolve: Resolve) -> bool:
        """This rank's own flag."""
        return resolve()


class ByCollective(Agreement):
    """The last resort: one small all-reduce in every iteration."""

    def alarm(self, resolve: Resolve) -> bool:
        """Whether it is so on some rank."""
        return any_rank(resolve())


class ByLoop(Agreement):
    """The user's own reduction carries the flag: ``machine.flag`` goes in, ``machine.agree(reduced)`` comes out."""

    def __init__(self) -> None:
        self.reduced: float | None = None

    def alarm(self, resolve: Resolve) -> bool:
        """The result of the loop's reduction.

        Raises:
            RuntimeError: the loop did not call ``agree``.
        """
        if self.reduced is None:
            raise RuntimeError("machine.agree(reduced_flag) was not called in this iteration")
        return self.reduced != 0  # NaN too

    def clear(self) -> None:
        """A new reduction is due."""
        self.reduced = None


class ByGradients(Agreement):
    """DDP's own all-reduce carries the flag. Results must be validated before the backward pass.

    On a CPU hooks are added only when a result is rejected. On a GPU the host does not know yet, so one hook stays on
    one parameter and writes NaN where the device's flag is set.
    """

    def __init__(self, model: DistributedDataParallel, *, on_device: bool = False) -> None:
        self._parameters = _trainable(model)
        self._on_device = on_device
        self._bad: torch.Tensor | None = None
        self._hooks: list[Any] = []
        self._poisoned = False
        if on_device:  # which parameter takes part is not known yet, so all carry the flag in the first iteration
            self._hooks = [_hooked(one, self._nan_where_bad) for one in self._parameters]
        self._canary: nn.Parameter | None = None
        self._is_plain_float = False

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """Make this rank's gradients NaN; on a device, where ``rejected`` is true."""
        if self._on_device:
            flag = torch.as_tensor(rejected, device=self._parameters[0].device)
            self._bad = flag if self._bad is None else self._bad | flag
        elif not self._poisoned:
            self._poisoned = True
            self._hooks = [_hooked(one, _all_nan) for one in self._parameters]

    def alarm(self, resolve: Resolve) -> bool:
        """Whether the reduced gradient that is looked at is NaN; on a GPU this waits for it.

        A gradient that is NaN by itself, such as with too large a loss scale, is a false alarm: it costs one exchange.

        Raises:
            RuntimeError: a result of this rank was rejected after the backward pass, or DDP did not reduce.
        """
        grad = self._canary.grad if self._canary is not None else None
        if grad is None or grad.is_sparse:
            grad = self._find_canary()
        if self._is_plain_float:
            value = ctypes.c_float.from_address(grad.data_ptr()).value  # a seventh of what indexing costs
        else:
            value = float(grad.detach().reshape(-1)[0])
        alarm = value != value  # noqa: PLR0124 - NaN
        if self._poisoned and not alarm:
            raise RuntimeError("a result was rejected after its backward pass: validate it before loss.backward()")
        return alarm

    def clear(self) -> None:
        """Take the hooks away again."""
        if self._poisoned or self._bad is not None:
            for hook in self._hooks if not self._on_device else []:
                hook.remove()
            self._poisoned, self._bad = False, None

    def _watch(self, parameter: nn.Parameter) -> None:
        self._canary = parameter
        self._is_plain_float = parameter.dtype is torch.float32 and parameter.device.type == "cpu"
        if self._on_device:
            for hook in self._hooks:
                hook.remove()
            self._hooks = [_hooked(parameter, self._nan_where_bad)]

    def _nan_where_bad(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self._bad is None else torch.where(self._bad, torch.nan, grad)

    def _find_canary(self) -> torch.Tensor:
        """The last parameter that takes part in the backward pass; DDP makes that the same one on all ranks."""
        for parameter in reversed(self._parameters):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self._watch(parameter)
                return parameter.grad
        raise RuntimeError("no parameter has a gradient: call loss.backward() within the loop that may be run again")


def _hooked(parameter: nn.Parameter, hook: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _all_nan(grad: torch.Tensor) -> torch.Tensor:
    return torch.full_like(grad, torch.nan)


class Ranks:
    """Exchanges what ranks have seen among all of them, on the slow path only."""

    def __init__(self) -> None:
        self._team = Team()
        self.rank, self.size = self._team.rank, self._team.world_size
        self.is_distributed = self.size > 1

    def exchange(self, row: Any, kind: Any) -> list[Any]:
        """Every rank's row, in the order of ranks: values of the type ``kind``, and no code, as a pickle would be.

        Raises:
            msgspec.ValidationError: another rank sends something else.
        """
        if not self.is_distributed:
            return [row]
        rows = self._team.bytes_of_all(msgspec.msgpack.encode(row))
        return [msgspec.msgpack.decode(each, type=kind) for each in rows]


def agreement_for(model: nn.Module | None, ranks: Ranks, *, on_device: bool) -> Agreement:
    """The cheapest that works for ``model``."""
    if not ranks.is_distributed:
        return Alone()
    inner = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = getattr(inner, "_orig_mod", None)
    if inner is not None and dist.get_world_size(inner.process_group) == ranks.size and _trainable(inner):
        return ByGradients(inner, on_device=on_device)
    log.info("reruns: no DDP over all ranks to ride on; one small all-reduce in every iteration")
    return ByCollective()


def _trainable(model: nn.Module) -> Sequence[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad and one.numel()]


# --- The model at the start of an iteration: what a forward and backward pass changes, and how to restore it ---
# Gradients: an iteration begins without any, so taking back means dropping them. Buffers, such as BatchNorm's running
# statistics: the first iteration shows which of them a pass changes, and only those are copied from then on, in one
# call; a model without such buffers costs nothing. Weights: a pass does not change them.

_FEW = 16


class ModelStart:
    """Remembers what ``mark`` finds. Does nothing without a model."""

    def __init__(self, model: nn.Module | None) -> None:
        self._parameters = list(model.parameters()) if model is not None else []
        self._buffers = [one for one in model.buffers() if one.numel()] if model is not None else []
        # torch does not count its own writes into running statistics, and they rest while a module only evaluates
        norms = [one for one in model.modules() if isinstance(one, _NormBase)] if model is not None else []
        self._statistics = {id(buffer) for one in norms for buffer in one.buffers(recurse=False)}
        self._moving = self._buffers
        """Those that a pass changes: all of them until the first iteration is over."""

        self._copies: list[torch.Tensor] = []
        self._resting: list[torch.Tensor] = []
        self._resting_versions: list[int] = []
        self._versions: list[int] = []
        self._is_settled = not self._buffers
        self._weight = self._parameters[0] if self._parameters else None
        self._weight_version = 0

    def mark(self) -> None:
        """Remember the state of now."""
        if self._weight is not None:
            self._weight_version = self._weight._version
        if self._buffers:
            self._mark_buffers()

    def settle(self) -> None:
        """The first iteration is over: now it is known which buffers move."""
        if not self._is_settled:
            self._is_settled = True
            versions = zip(_versions(self._buffers), self._versions, strict=True)
            moved = [
                now != before or id(buffer) in self._statistics or not torch.equal(buffer, copy)
                for (now, before), buffer, copy in zip(versions, self._buffers, self._copies, strict=True)
            ]
            self._moving = [one for one, moves in zip(self._buffers, moved, strict=True) if moves]
            self._resting = [one for one, moves in zip(self._buffers, moved, strict=True) if not moves]
            self._resting_versions = _versions(self._resting)
            self._copies = []

    def unexpected_change(self) -> str:
        """Changes of this iteration that ``restore`` cannot undo; empty when there are none."""
        if self._weight is not None and self._weight._version != self._weight_version:
            return "weights were changed before the iteration was over: step the optimizer after the loop"
        if self._is_settled and self._resting_versions != _versions(self._resting):
            return "the model changed a buffer that it had not changed before"
        return ""

    def restore(self) -> None:
        """Back to the state of ``mark``, without gradients."""
        with torch.no_grad():
            for buffer, copy in zip(self._moving, self._copies, strict=True):
                buffer.copy_(copy)
        for one in self._parameters:
            one.grad = None

    def is_finite(self) -> bool:
        """Whether all weights and buffers are; waits for the GPU."""
        values = [one for one in (*self._parameters, *self._buffers) if one.is_floating_point()]
        return all(bool(torch.isfinite(one).all()) for one in values)

    def _mark_buffers(self) -> None:
        with torch.no_grad():
            if len(self._copies) != len(self._moving):
                self._copies = [one.detach().clone() for one in self._moving]
            elif self._copies:
                torch._foreach_copy_(self._copies, self._moving)
        if not self._is_settled:
            self._versions = _versions(self._buffers)
        elif len(self._resting) <= _FEW:
            self._resting_versions = _versions(self._resting)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [one._version for one in tensors]


# --- The re-run state machine's record of a rejected result: within the process, and in the checkpoint ---

MAX_VALUES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """One rank's rejected result."""

    rank: int
    invocation: int
    """Number of the validation within the iteration, from 0."""

    message: str
    values: tuple[float, ...]
    tolerance: float
    producers: tuple[int, ...]
    """Ranks that could have produced it."""

    suspects: tuple[Suspect, ...] = ()
    """Where they ran; known once all ranks have been asked."""

    def on(self, hardware: Sequence[Suspect]) -> Rejection:
        """With the suspects filled in; ``hardware`` is that of all ranks, in their order.

        Ranks that do not exist are left out. The rank that rejected it is suspected where no other one is: with no
        suspect, a rerun on the same hardware would count as one elsewhere.
        """
        known = [rank for rank in self.producers if 0 <= rank < len(hardware)] or [self.rank]
        return replace(self, suspects=tuple(hardware[rank] for rank in known))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """An iteration that waits for its rerun on other hardware; saved with the checkpoint, the same on all ranks."""

    iteration: int
    attempts: int
    """Placements asked for so far."""

    world_size: int
    rejections: tuple[Rejection, ...]

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """All of them, each once."""
        return suspects_of(self.rejections)

    def plain(self) -> dict[str, Any]:
        """For the checkpoint."""
        facts: dict[str, Any] = msgspec.to_builtins(self)
        return facts

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Pending:
        """As ``plain`` has written it.

        Raises:
            TypeError: it has not.
        """
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise TypeError(f"the rerun that waits is damaged: {error}") from error


def suspects_of(rejections: Sequence[Rejection]) -> tuple[Suspect, ...]:
    """Each suspect once, in the order of ranks."""
    return tuple(dict.fromkeys(suspect for one in rejections for suspect in one.suspects))


def as_tensor(result: Any) -> torch.Tensor:
    """A result in one tensor: itself, or the numbers of (nested) lists and tuples, of tensors in them, of an array.

    Raises:
        UsageError: there is something in it that is not a number.
    """
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, list | tuple):
        parts = [as_tensor(one).detach().reshape(-1) for one in result]
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        return torch.cat([torch.zeros(0, dtype=torch.double, device=device), *(part.to(device) for part in parts)])
    try:
        if isinstance(result, str | bytes):
            raise TypeError("a text")
        return torch.as_tensor(result, dtype=torch.double)  # a float beyond those of 32 bits is not infinite
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"a result to validate is {result!r:.60}", hint="it is a number, a tensor, or a list or tuple of them"
        ) from error


def values_of(result: torch.Tensor | float) -> tuple[float, ...]:
    """A result as plain numbers, a complex one as two; waits for the GPU where it lies on one.

    Raises:
        UsageError: it has too many values to keep.
    """
    if not isinstance(result, torch.Tensor):
        return (float(result),)
    if result.numel() > MAX_VALUES:
        raise UsageError(
            f"a result of {result.numel()} values is validated; at most {MAX_VALUES} can be compared",
            hint="validate its sum or its norm",
        )
    plain = torch.view_as_real(result.detach().resolve_conj()) if result.is_complex() else result.detach()
    return tuple(plain.double().cpu().reshape(-1).tolist())


def number_of(result: torch.Tensor | float) -> float:
    """A result of one value."""
    return float(result.item() if isinstance(result, torch.Tensor) else result)


def is_rejected(verdict: Any) -> bool:
    """The result of a rejection function: a bool, or a tensor, array or sequence of which any element is true."""
    if isinstance(verdict, list | tuple):
        return any(is_rejected(one) for one in verdict)
    if isinstance(verdict, torch.Tensor) and verdict.numel() == 1:
        return bool(verdict)
    return bool(verdict.any() if hasattr(verdict, "any") else verdict)


# --- Checks of results: the loss's own checks, the user's, and errors that are injected for tests ---

RejectionFunction = Callable[[Any], Any]
"""Takes a result and says whether it is unexpected: a bool, or a tensor of which any element is true."""


class LossChecks:
    """NaN, infinities, spikes, and what the user has added."""

    def __init__(self, settings: RerunSettings) -> None:
        self._for_nan = settings.check_for_nan_in_loss
        self._window = (
            LossWindow(settings.spiky_loss_window, settings.spiky_loss_factor)
            if settings.check_for_spiky_loss
            else None
        )
        self._own: list[tuple[RejectionFunction, str]] = []
        self.remembers = self._window is not None
        """Whether accepted losses must be added."""

        self.bound = math.inf

    @property
    def fine_up_to(self) -> float:
        """A finite loss up to this is fine, and nothing else needs to be looked at."""
        return self.bound if self._for_nan and not self._own else -math.inf

    def add(self, check: RejectionFunction, message: str) -> None:
        """Reject a loss for which ``check`` is true as well."""
        self._own.append((check, message))

    def problem(self, loss: torch.Tensor | float) -> str:
        """The problem of a loss; empty when there is none. Waits for the GPU where it lies on one."""
        value = number_of(loss)
        if self._for_nan and math.isnan(value):
            return "loss is NaN"
        if self._for_nan and math.isinf(value):
            return "loss is infinite"
        if value > self.bound:
            return f"spiky loss (above {self.bound:.4g})"
        return next((message for check, message in self._own if is_rejected(check(loss))), "")

    def on_device(self, loss: torch.Tensor) -> torch.Tensor:
        """Whether ``problem`` would find anything, without waiting for it."""
        loss = loss.detach()
        bad = ~torch.isfinite(loss) if self._for_nan else torch.zeros_like(loss, dtype=torch.bool)
        if self.bound < math.inf:
            bad = bad | (loss > self.bound)
        for check, _ in self._own:
            bad = bad | torch.as_tensor(check(loss), device=loss.device).any()
        return bad.any()

    def remember(self, losses: list[float]) -> None:
        """The iteration is over, and these were accepted."""
        if self._window is not None:
            for loss in losses:
                self._window.add(loss)
            self.bound = self._window.bound

    def state_dict(self) -> dict[str, Any] | None:
        """The recent losses, for the checkpoint."""
        return None if self._window is None else self._window.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None, /) -> None:
        """Go on with the recent losses of ``state_dict``."""
        if self._window is not None and state is not None:
            self._window.load_state_dict(state)
            self.bound = self._window.bound


class Injector:
    """Makes results wrong on purpose, the same ones on every start."""

    def __init__(self, settings: RerunSettings, hardware: Suspect, rank: int) -> None:
        self._settings, self._node, self._rank = settings, hardware.node, rank

    def strikes(self, iteration: int, invocation: int, phase: Phase) -> bool:
        """Whether this validation shall see a wrong result."""
        settings = self._settings
        if settings.error_injection_rank not in (None, self._rank):
            return False
        if settings.error_injection_step is not None:
            is_due = iteration == settings.error_injection_step and invocation == 0
        else:
            rate = settings.error_injection_rate
            is_due = strikes(settings.error_injection_seed, self._rank, iteration, invocation, rate)
        return is_due and self._computes_wrongly(phase)

    def _computes_wrongly(self, phase: Phase) -> bool:
        is_bad_node = self._settings.error_injection_node in (None, self._node)
        match self._settings.error_injection_type:
            case Injection.TRANSIENT_ERROR:
                return is_bad_node and phase is Phase.INITIAL
            case Injection.PERSISTENT_ERROR:  # without a name, the node that ran the step first is bad
                return is_bad_node and (self._settings.error_injection_node is not None or phase is not Phase.ELSEWHERE)
            case Injection.CORRECT_RESULT:
                return True


# --- The output of a rerun's outcome: log lines, evidence against hardware, and the verdict file of an exit ---

KINDS = {
    RerunOutcome.TRANSIENT: Kind.RERUN_TRANSIENT,
    RerunOutcome.UNDECIDED: Kind.RERUN_UNDECIDED,
    RerunOutcome.PERSISTENT: Kind.RERUN_PERSISTENT,
    RerunOutcome.CORRECT: Kind.RERUN_ACQUITTED,
}

LINES = {
    RerunOutcome.TRANSIENT: (
        "First rerun: unexpected result is not reproducible within the tolerance",
        "Possible transient error!",
    ),
    RerunOutcome.UNDECIDED: (
        "First rerun: unexpected result is reproducible within the tolerance",
        "Need to rerun on a different GPU to verify correctness",
    ),
    RerunOutcome.PERSISTENT: (
        "Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect",
        "Possible persistent error!",
    ),
    RerunOutcome.CORRECT: (
        "Second rerun: unexpected result is reproducible on a different GPU, therefore it was likely correct",
        "Correct result (but possible Application error)",
    ),
}

REJECTED_AGAIN = "First rerun: unexpected result is not reproducible within the tolerance, and was rejected again"
"""Instead of the first line where the rerun gave another result that is as unexpected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """The end of this worker: its exit code and verdict, the same on all ranks."""

    exit_code: int
    should_checkpoint: bool
    outcome: RerunOutcome
    message: str
    suspects: tuple[Suspect, ...] = ()
    has_say: bool = True
    """Whether this rank writes the verdict: rank 0 and those that have rejected a result do."""

    def write_verdict(self) -> None:
        """Into the file that the agent has named, if any. Call it after the checkpoint, before the exit."""
        if not self.has_say or not (path := os.environ.get(VERDICT_VARIABLE)):
            return
        elsewhere = self.exit_code == EXIT_RERUN_ELSEWHERE
        verdict = WorkerVerdict(
            cause=Cause.RERUN_ELSEWHERE if elsewhere else Cause.VALIDATION_FAILED, message=self.message,
            suspects=self.suspects, rerun=self.outcome,
        )  # fmt: skip
        try:
            write_verdict(Path(path), verdict)
        except OSError as error:
            log.error("the verdict %r cannot be written to %s: %s", self.message, path, error)


def describe(rejections: Sequence[Rejection], iteration: int) -> str:
    """One line for people: the rejected results, and their ranks."""
    parts = []
    for one in rejections[:4]:
        value = one.values[0] if len(one.values) == 1 else f"{len(one.values)} values"
        where = ", ".join(suspect.node + (f" {suspect.gpu}" if suspect.gpu else "") for suspect in one.suspects[:4])
        parts.append(f"{one.message}: {value} on rank {one.rank}" + (f" ({where})" if where else ""))
    more = f" and on {len(rejections) - 4} more ranks" if len(rejections) > 4 else ""
    return f"{'; '.join(parts)}{more} at step {iteration}"


def report(outcome: RerunOutcome, rejection: Rejection, iteration: int, seen: Seen) -> None:
    """The log lines, and one piece of evidence for each suspect. A full disk costs the evidence, not the training."""
    first, second = LINES[outcome]
    log.warning(
        "%s", REJECTED_AGAIN if outcome is RerunOutcome.UNDECIDED and seen is Seen.DIFFERENT_REJECTED else first
    )
    log.warning("%s", second)
    path = os.environ.get(EVIDENCE_VARIABLE)
    for suspect in rejection.suspects:
        message = f"{describe([rejection], iteration)}: {outcome}"
        log.warning("evidence: %s, %s: %s", KINDS[outcome], suspect.node, message)
        if path:
            evidence = Evidence(
                kind=KINDS[outcome], suspect=suspect, message=message, at=time.time(), step=iteration
            )  # fmt: skip
            try:
                add_evidence(Path(path), evidence)
            except OSError as error:
                log.error("it cannot be written to %s: %s", path, error)


# --- The slow path of the re-run state machine: the exchange between all ranks, and the outcome ---
# Nothing here runs while all is well. Every method is a collective: all ranks call it, and all get the same answer.

MAX_REJECTIONS = 256
"""Ranks whose results are remembered, in every rank's checkpoint. When more of them reject one, as all do after a
software error, these show as much as all would."""

SPOILED = "the weights themselves are not finite: an earlier step spoiled them; go on from an older checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One rank's report of a rerun."""

    seen: Seen
    doubt: str
    """Why its rerun proves nothing; empty when it does."""

    is_finite: bool
    """Whether the weights are."""

    anew: Rejection | None = None
    """Another result than the first time."""


class Proceedings:
    """One iteration with a rejected result, from the first rejection to its verdict."""

    pending: Pending | None
    """The iteration that waits for a rerun on other hardware; the same on all ranks."""

    departure: Departure | None
    """How this attempt ends, once it is known."""

    def __init__(self, settings: RerunSettings, ranks: Ranks, hardware: Suspect) -> None:
        self._settings, self._ranks, self._own_hardware = settings, ranks, hardware
        self.pending = self.departure = None
        self._hardware: Sequence[Suspect] = ()
        self._rejections: tuple[Rejection, ...] = ()
        self._iteration = self._rounds = 0

    @property
    def own(self) -> Rejection | None:
        """This rank's rejection of the case."""
        return next((one for one in self._rejections if one.rank == self._ranks.rank), None)

    def open(self, own: Rejection | None, iteration: int) -> bool:
        """Whether any rank has rejected a result; then the iteration is to be run again in place."""
        rows = self._ranks.exchange((self._own_hardware, own), tuple[Suspect, Rejection | None])
        self._hardware = [hardware for hardware, _ in rows]
        self._iteration, self._rounds = iteration, 1
        self._rejections = self._located([rejection for _, rejection in rows])
        if self._rejections and self._ranks.rank == 0:
            log.warning("%s; running it again in place", describe(self._rejections, iteration))
        return bool(self._rejections)

    def reopen(self, iteration: int) -> Departure | None:
        """After a restart: None when the pending case can be judged here, or nothing is pending any more."""
        pending = self.pending
        if pending is None:
            return None
        if pending.iteration != iteration:
            log.warning("the rerun of step %d is dropped: step %d begins", pending.iteration, iteration)
            self.pending = None
            return None
        self._iteration, self._rejections, self._rounds = iteration, pending.rejections, 1
        if pending.world_size != self._ranks.size:
            reason = f"{pending.world_size} ranks rejected it, and {self._ranks.size} go on"
            return self._inconclusive(reason)
        self._hardware = self._ranks.exchange(self._own_hardware, Suspect)
        landed = [
            one for rejection in pending.rejections
            for one in on_suspects(rejection.on(self._hardware).suspects, rejection.suspects)
        ]  # fmt: skip
        if not landed:
            return None
        where = ", ".join(dict.fromkeys(one.node for one in landed[:8]))
        if pending.attempts >= self._settings.max_attempts:
            return self._inconclusive(f"{pending.attempts} placements asked for, and again on suspects: {where}")
        self.pending = replace(pending, attempts=pending.attempts + 1)
        return self._elsewhere(f"landed on suspects again: {where}")

    def conclude(self, phase: Phase, row: Row) -> tuple[Departure | None, bool]:
        """After a rerun: how to leave, if so, and whether to run the iteration again in place."""
        rows: list[Row] = self._ranks.exchange(row, Row)
        seen = [Seen.UNKNOWN if one.doubt else one.seen for one in rows]
        anew = [one.anew for one in rows]
        outcome = after_rerun(phase, seen, rejected_others=any(anew))
        if outcome is RerunOutcome.INCONCLUSIVE:
            doubt = next((one.doubt for one in rows if one.doubt), "it came out otherwise and was rejected again")
            return self._inconclusive(doubt), False
        if outcome in (RerunOutcome.UNDECIDED, RerunOutcome.CORRECT) and not all(one.is_finite for one in rows):
            return self._inconclusive(SPOILED), False
        for rejection in self._rejections:
            if rejection.rank == self._ranks.rank:
                own = seen[rejection.rank]
                report(_of_one(phase, own), rejection, self._iteration, own)
        if outcome is RerunOutcome.AGAIN:
            return self._take_up(anew)
        if outcome is RerunOutcome.UNDECIDED:
            self._rejections = tuple(
                one for one in self._rejections if _of_one(phase, seen[one.rank]) is RerunOutcome.UNDECIDED
            )
            return self._ask_elsewhere(_why_elsewhere({seen[one.rank] for one in self._rejections})), False
        self.pending = None if outcome is not RerunOutcome.CORRECT else self.pending
        return self._after_verdict(outcome), False

    def state_dict(self) -> dict[str, Any]:
        """The pending iteration, for the checkpoint."""
        return {"pending": None if self.pending is None else self.pending.plain()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take up the pending iteration."""
        pending = state["pending"]
        self.pending = None if pending is None else Pending.from_plain(pending)

    def _located(self, rejections: Sequence[Rejection | None]) -> tuple[Rejection, ...]:
        return tuple(one.on(self._hardware) for one in rejections if one is not None)[:MAX_REJECTIONS]

    @property
    def _has_say(self) -> bool:
        return self._ranks.rank == 0 or self.own is not None

    def _take_up(self, anew: Sequence[Rejection | None]) -> tuple[Departure | None, bool]:
        """The first rejection is explained; go on with the one of the rerun."""
        self.pending = None
        self._rejections = self._located(anew)
        self._rounds += 1
        if self._rounds > MAX_ROUNDS_IN_PLACE:
            return self._ask_elsewhere("each rerun rejects something else"), False
        return None, True

    def _after_verdict(self, outcome: RerunOutcome) -> Departure | None:
        what = f"{describe(self._rejections, self._iteration)}: {outcome}"
        if self._ranks.rank == 0:
            log.warning("verdict: %s", what)
        if outcome is RerunOutcome.CORRECT or (
            outcome is RerunOutcome.PERSISTENT and self._settings.exit_on_persistent
        ):
            return Departure(
                exit_code=EXIT_VALIDATION_FAILED, should_checkpoint=outcome is RerunOutcome.PERSISTENT, outcome=outcome,
                message=what, suspects=suspects_of(self._rejections) if outcome is RerunOutcome.PERSISTENT else (),
                has_say=self._has_say,
            )  # fmt: skip
        return None

    def _ask_elsewhere(self, why: str) -> Departure:
        self.pending = Pending(
            iteration=self._iteration, attempts=1, world_size=self._ranks.size, rejections=self._rejections
        )
        return self._elsewhere(why)

    def _elsewhere(self, why: str) -> Departure:
        attempts = self.pending.attempts if self.pending is not None else 1
        message = (
            f"{describe(self._rejections, self._iteration)}: {why}; to be run again on other hardware "
            f"(placement {attempts} of {self._settings.max_attempts})"
        )
        if self._ranks.rank == 0:
            log.warning("verdict: %s", message)
        return Departure(
            exit_code=EXIT_RERUN_ELSEWHERE, should_checkpoint=True, outcome=RerunOutcome.UNDECIDED, message=message,
            suspects=suspects_of(self._rejections), has_say=self._has_say,
        )  # fmt: skip

    def _inconclusive(self, why: str) -> Departure:
        message = f"{describe(self._rejections, self._iteration)}: inconclusive: {why}"
        if self._ranks.rank == 0:
            log.error("verdict: %s", message)
        return Departure(
            exit_code=EXIT_VALIDATION_FAILED, should_checkpoint=False, outcome=RerunOutcome.INCONCLUSIVE,
            message=message, suspects=suspects_of(self._rejections), has_say=self._has_say,
        )  # fmt: skip


def _why_elsewhere(seen: Collection[Seen]) -> str:
    if Seen.DIFFERENT_REJECTED not in seen:
        return "reproduced in place"
    if Seen.REPRODUCED not in seen:
        return "different when run again in place, and rejected again"
    return "reproduced in place on some ranks, different and rejected again on others"


def _of_one(phase: Phase, seen: Seen) -> RerunOutcome:
    """The outcome for the hardware of one rank that had rejected a result."""
    if seen is Seen.DIFFERENT:
        return RerunOutcome.TRANSIENT if phase is Phase.IN_PLACE else RerunOutcome.PERSISTENT
    return RerunOutcome.UNDECIDED if phase is Phase.IN_PLACE else RerunOutcome.CORRECT


# --- A rank's look at its own results: rejected in the first run of an iteration, compared in a rerun of it ---

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


def shown(result: Result) -> object:
    """For a log line: a tensor without its history."""
    return result.detach() if isinstance(result, torch.Tensor) else result


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


# --- state machine ---
#     machine = RerunStateMachine(model=model)
#     data = RerunDataIterator(loader)
#     for step in range(steps):
#         while machine.should_run_forward_backward(data):
#             loss = loss_of(model, next(data))
#             machine.validate_result(loss, rejection_func=torch.isnan, message="loss is NaN")
#             optimizer.zero_grad()
#             loss.backward()
#         should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
#         ...
#         optimizer.step()
#
# Within slurmft's session, ``session.rerun_machine(model, loader)`` does the last part as well. Every rank calls the
# same methods in the same order; results are validated before their backward pass, and the optimizer steps after the
# loop.

Data = RerunDataIterator | Sequence[RerunDataIterator] | None

_FORMAT = "rerun"


class RerunStateMachine:
    """Reruns of iterations whose results are rejected; see the module for the loop around it.

    While all is well, a validation compares one number. On a GPU nothing is read in the first run: the comparison stays
    on the device, and so does the flag, until all ranks look at it after the backward pass.

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
        self.settings = settings
        self._agreement = ByLoop() if carried_by_loop else agreement_for(model, ranks, on_device=late)
        self._injector = Injector(settings, hardware, ranks.rank) if settings.injects else None
        self._rank, self._reads_late = ranks.rank, late
        self._checks = LossChecks(settings)
        self._fine_up_to, self._remembers = self._checks.fine_up_to, self._checks.remembers
        self._choose_path()
        self._iteration = self._invocation = 0
        self._phase = Phase.INITIAL
        self._rejection: Rejection | None = None
        self._second = SecondLook()
        self._losses: list[float] = []
        self.data = data
        self._randomness, self._model = IterationStart(), ModelStart(model)
        self._proceedings = Proceedings(settings, ranks, hardware)
        self._is_alone = isinstance(self._agreement, Alone) and not late
        self._has_to_tidy = True
        self._step, self._leave = step, leave
        self._is_between = True
        self._given: Data = None
        self._data: tuple[RerunDataIterator, ...] = ()

    def _choose_path(self) -> None:
        """By the mode; statistics begin anew."""
        settings = self.settings
        self._twice = StepTwice(settings.report_interval_steps) if settings.mode is Mode.REPORT_STATS else None
        self._is_quick, self._is_usual = self._may_be_quick, self._twice is None and not self._off

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
        rejection = Rejection(  # to be sent: no half of a character, and no number of numpy's
            rank=self._rank, invocation=one.invocation, message=str(message).encode(errors="replace").decode(),
            values=values_of(one.result), tolerance=float(one.tolerance), producers=tuple(map(int, one.producers)),
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
