"""The model at the start of an iteration: what a forward and backward pass changes, and how to restore it.

Gradients: an iteration begins without any, so taking back means dropping them. Buffers, such as BatchNorm's running
statistics: the first iteration shows which of them a pass changes, and only those are copied from then on, in one call;
a model without such buffers costs nothing. Weights: a pass does not change them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

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
