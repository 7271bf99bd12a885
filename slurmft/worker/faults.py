"""Faults that a worker's session carries out on itself, on request (``slurmft inject``).

A step costs one comparison of an integer in the heartbeat page; everything else happens only when there is a fault.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from slurmft.errors import StorageError
from slurmft.ipc.pages import FAULT_SUFFIX, PAGE_VARIABLE, Page, Slot
from slurmft.policy.values import Fault
from slurmft.system.files import read_json
from slurmft.trainer.savers import SAVERS

_BITS = {
    torch.float64: (torch.int64, 51), torch.float32: (torch.int32, 22), torch.bfloat16: (torch.int16, 6),
    torch.float16: (torch.int16, 9),
}  # fmt: skip
"""Integers of the same size, and the highest bit of the mantissa."""

log = logging.getLogger(__name__)


class InjectedFault(RuntimeError):
    """Raised on purpose, on request."""


class InjectedFaults:
    """The faults of one worker. ``seen`` differs from the page's number when there is something to do."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.seen = page[Slot.FAULT]

    def strike(self, step: int) -> None:
        """Do what was asked for. Call it at a step boundary when ``seen`` differs.

        Raises:
            InjectedFault: that was asked for.
        """
        self.seen = self._page[Slot.FAULT]
        if (fault := _newest()) is None:
            return
        log.warning("injected fault at step %d: %s", step, fault.value)
        match fault:
            case Fault.HANG:
                hang_until_killed()
            case Fault.EXCEPTION:
                raise InjectedFault(f"injected by slurmft inject, at step {step}")
            case Fault.NAN:
                _spoil_next_forward_pass()
            case Fault.BIT_FLIP | Fault.BIT_FLIP_MOMENT | Fault.BIT_FLIP_GRADIENT:
                _flip_bit(fault)


def hang_until_killed() -> None:
    """Like a deadlock from outside: asleep, alive, and ended by SIGKILL only."""
    while True:
        time.sleep(60.0)


def _newest() -> Fault | None:
    try:
        value = read_json(Path(os.environ[PAGE_VARIABLE]).with_suffix(FAULT_SUFFIX)) or {}
        return Fault(value["fault"])
    except (StorageError, KeyError, ValueError, OverflowError) as error:
        log.warning("an injected fault cannot be read: %s", error)
        return None


def _spoil_next_forward_pass() -> None:
    """The first module of the next training pass computes NaN, once."""

    def spoil(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return None
        handle.remove()
        return output * float("nan")

    handle = register_module_forward_hook(spoil)


def _flip_bit(fault: Fault) -> None:
    """Change one bit, which no exception and no NaN shows."""
    if SAVERS.trained is None:
        log.warning("%s: no checkpoint manager has seen a model and an optimizer yet", fault.value)
        return
    model, optimizer = SAVERS.trained
    if fault is Fault.BIT_FLIP:
        flip_bit(next(model.parameters()))
    elif fault is Fault.BIT_FLIP_MOMENT:
        states = (value for state in optimizer.state.values() for value in state.values())
        moment = next((each for each in states if isinstance(each, torch.Tensor) and each.dim()), None)
        if moment is None:
            log.warning("%s: the optimizer has no state yet", fault.value)
        else:
            flip_bit(moment)
    else:

        def spoil(stepped: torch.optim.Optimizer, *_: Any) -> None:
            parameters = (each for group in stepped.param_groups for each in group["params"])
            gradient = next((each.grad for each in parameters if each.grad is not None), None)
            if gradient is not None:
                handle.remove()
                flip_bit(gradient)

        handle = optimizer.register_step_pre_hook(spoil)


@torch.no_grad()
def flip_bit(tensor: torch.Tensor) -> None:
    """Flip the highest bit of the mantissa of the middle element, in place."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    integer, bit = _BITS[local.dtype]
    bits = local.view(integer).flatten()[local.numel() // 2]
    index = torch.tensor(local.numel() // 2, device=local.device)
    at = torch.unravel_index(index, local.shape)
    local.view(integer)[at] = bits ^ (1 << bit)
