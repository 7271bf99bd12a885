"""Checks of results: the loss's own checks, the user's, and errors that are injected for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from slurmft.policy.nodes.evidence import Suspect
from slurmft.policy.nodes.rerun_settings import RerunSettings
from slurmft.policy.nodes.reruns import Injection, LossWindow, Phase, strikes
from slurmft.worker.rerun.record import is_rejected, number_of

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
