"""How every rank learns that one of them has rejected a result, without a collective of its own while none has.

With DDP the flag rides on the gradients: a rank that rejects a result makes its own gradients NaN before they are
reduced, so that every rank's reduced gradients are. All ranks look at one element of one gradient after the backward
pass. What they find is equal everywhere, so that all of them take the slow path together or none does.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmft.trainer.host_group import host_group

log = logging.getLogger(__name__)

Resolve = Callable[[], bool]
"""Whether this rank has rejected a result; waits for the GPU where the result lies on one."""


class Agreement(Protocol):
    """Shows every rank alike whether one of them has rejected a result of this iteration."""

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """This rank has rejected a result (or has where the tensor is true); called before the backward pass."""

    def alarm(self, resolve: Resolve) -> bool:
        """Whether some rank may have; the same on all ranks. Called after the backward pass."""

    def clear(self) -> None:
        """The next run of the iteration begins."""


class Alone:
    """One process: there are no other ranks."""

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """Nothing to do."""

    def alarm(self, resolve: Resolve) -> bool:
        """This rank's own flag."""
        return resolve()

    def clear(self) -> None:
        """Nothing to do."""


class ByCollective:
    """The last resort: one small all-reduce in every iteration."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """Nothing to do yet."""

    def alarm(self, resolve: Resolve) -> bool:
        """The maximum over all ranks."""
        flag = torch.tensor([int(resolve())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def clear(self) -> None:
        """Nothing to do."""


class ByLoop:
    """The user's own reduction carries the flag: ``machine.flag`` goes in, ``machine.agree(reduced)`` comes out."""

    def __init__(self) -> None:
        self.reduced: float | None = None

    def poison(self, rejected: bool | torch.Tensor) -> None:
        """Nothing to do: the loop asks for the flag."""

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


class ByGradients:
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
    """Exchanges plain values among all ranks, on the slow path only."""

    def __init__(self) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.size = dist.get_world_size() if self.is_distributed else 1
        self.group: Any = host_group() if self.is_distributed else None

    def exchange(self, row: Any) -> list[Any]:
        """Every rank's row, in the order of ranks."""
        if not self.is_distributed:
            return [row]
        rows: list[Any] = [None] * self.size
        dist.all_gather_object(rows, row, group=self.group)
        return rows


def agreement_for(model: nn.Module | None, ranks: Ranks, *, on_device: bool) -> Agreement:
    """The cheapest that works for ``model``."""
    if not ranks.is_distributed:
        return Alone()
    inner = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = getattr(inner, "_orig_mod", None)
    if inner is not None and _spans_all(inner, ranks.size):
        return ByGradients(inner, on_device=on_device)
    log.info("reruns: no DDP over all ranks to ride on; one small all-reduce in every iteration")
    return ByCollective(ranks.group)


def _spans_all(model: DistributedDataParallel, size: int) -> bool:
    return dist.get_world_size(model.process_group) == size and bool(_trainable(model))


def _trainable(model: nn.Module) -> Sequence[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad and one.numel()]
