"""Finding the moment at which a rank stops working for itself: just before DDP's first gradient reduction of a step.

One hook on one parameter is enough for that: the one whose gradient fills DDP's first bucket. A gradient hook runs
before DDP's own, which starts the reduction, and changes no number. The first backward pass shows which parameter it
is; until then there is a hook on each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

FIRST_BUCKET_BYTES = 1 << 20
"""torch's first bucket. In models with larger buckets the moment is a little early, which is harmless."""


class FirstCollective:
    """Calls ``reached`` before the first reduction of each step, and ``waits``/``goes_on`` around buffer broadcasts."""

    def __init__(
        self,
        model: DistributedDataParallel,
        reached: Callable[[], None],
        waits: Callable[[], None],
        goes_on: Callable[[], None],
    ) -> None:
        self._model, self._reached = model, reached
        self._order: list[Tensor] = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._number = len(trained)
        self._handles: list[Any] = [
            parameter.register_hook(self._recorder(parameter))  # type: ignore[no-untyped-call]
            for parameter in trained
        ]
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            model.register_forward_pre_hook(_Hook(waits))
            model.module.register_forward_pre_hook(_Hook(goes_on))

    def settle(self) -> None:
        """Between two steps: when the order is known, one hook remains. Costs nothing afterwards."""
        if not self._order:
            return
        for handle in self._handles:
            handle.remove()
        last = filling(self._order, FIRST_BUCKET_BYTES)
        self._handles = [last.register_hook(self._on_gradient)]  # type: ignore[no-untyped-call]
        self._order = []

    def _recorder(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def note(_gradient: Tensor) -> None:
            if len(self._order) < self._number:  # it may never be settled
                self._order.append(parameter)

        return note

    def _on_gradient(self, _gradient: Tensor) -> None:
        if self._model.require_backward_grad_sync:  # not in the passes of an accumulation that reduce nothing
            self._reached()


class _Hook:
    """A module's hook that stays behind when the module is copied or pickled, as users do with their models."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, _module: Any, _inputs: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def filling(order: list[Tensor], limit_bytes: int) -> Tensor:
    """The first parameter with which those before it exceed the limit; the last one when they never do."""
    filled = 0
    for parameter in order:
        filled += parameter.numel() * parameter.element_size()
        if filled >= limit_bytes:
            return parameter
    return order[-1]
