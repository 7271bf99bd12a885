"""Whether gradients wait for an optimizer at the end of a step: the middle of an accumulation is no place to save."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from slurmft.errors import UsageError

_USED_UP = "_slurmft_used_up"
"""Attribute of a gradient: how often it had been written to when an optimizer used it; ``_LEFT`` where none has."""

_LEFT = -1

log = logging.getLogger(__name__)

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
            return now > used + 1 and bool(_local(gradient).any())
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
    return _local(tensor)._version


def _local(tensor: torch.Tensor) -> torch.Tensor:
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
