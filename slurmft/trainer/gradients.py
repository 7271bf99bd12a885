"""Whether gradients wait for an optimizer at the end of a step: the middle of an accumulation is no place to save."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_USED_UP = "_slurmft_used_up"
"""Attribute of a gradient that an optimizer has used: how often it had been written to then."""

log = logging.getLogger(__name__)

MAX_SAMPLED = 64
"""Weights whose gradients are looked at, spread over all of them."""

LONGEST_WINDOW = 1000
"""Steps without an update after which updates are taken to be hidden from us: a run must be saved at some time."""


class OpenGradients:
    """Follows the optimizers of this process. ``at_boundary`` is called once at the end of each step of the loop.

    A step in which some optimizer has worked, or weights were written otherwise, has none waiting behind it.
    """

    def __init__(self) -> None:
        self.are_waiting = False
        """At the newest boundary, as far as this rank knows; costs nothing to ask."""

        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._weights: list[torch.Tensor] = []
        self._written: list[int] = []
        self._has_hook = self._has_update = self._is_blind = False
        self._open_for = 0

    def follow(self, optimizer: Any) -> None:
        """Its weights' gradients count from now on."""
        if not self._has_hook:
            self._has_hook = True
            register_optimizer_step_post_hook(self._after_update)
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._weights = []

    def at_boundary(self, model: torch.nn.Module | None) -> None:
        """A step has ended: ``are_waiting`` is true where it has left gradients that no optimizer has used since."""
        weights = self._sample()
        gradients = [one for weight in weights if (one := weight.grad) is not None]
        written = [_version(weight) for weight in weights]
        is_over = self._is_blind or self._has_update or written != self._written
        self._written, self._has_update = written, False
        are_new = any(getattr(one, _USED_UP, None) != _version(one) for one in gradients)
        self.are_waiting = not is_over and (are_new or (model is not None and _has_unsharded(model)))
        self._open_for = self._open_for + 1 if self.are_waiting else 0
        if self._open_for > LONGEST_WINDOW:
            log.warning(
                "gradients were not used for %d steps: saves do not wait for their use any more, and do not "
                "contain them",
                LONGEST_WINDOW,
            )
            self.are_waiting, self._is_blind = False, True
        if not self.are_waiting:
            for one in gradients:
                setattr(one, _USED_UP, _version(one))  # on the tensor itself: the next one may have its address

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_update = True
        self.follow(optimizer)

    def _sample(self) -> list[torch.Tensor]:
        if not self._weights:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            weights = [one for group in groups for one in group["params"] if one.requires_grad]
            self._weights = weights[:: -(-len(weights) // MAX_SAMPLED) or 1]
            self._written = [_version(one) for one in self._weights]
        return self._weights


def _version(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor)._version


def _has_unsharded(model: torch.nn.Module) -> bool:
    """Whether FSDP holds gradients that it has not given to its weights yet (``set_requires_gradient_sync(False)``)."""
    for module in model.modules():
        group = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_group", None)
        for one in getattr(group, "fsdp_params", ()):
            whole = getattr(one, "_unsharded_param", None)
            if one.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                return True
    return False
