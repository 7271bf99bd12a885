"""Faults that a worker's session carries out on itself, on request (``slurmft inject``).

A step costs one comparison of an integer in the heartbeat page; everything else happens only when there is a fault.
"""

from __future__ import annotations

import errno
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
from slurmft.ipc.pages.heartbeat import FAULT_SUFFIX, PAGE_VARIABLE, Page, Slot
from slurmft.policy.faults import Fault
from slurmft.system.files import read_json
from slurmft.trainer.savers import SAVERS

SLOW_STEP_S = 0.5
LEAK_STEP_BYTES, LEAK_BYTES = 32 << 20, 512 << 20
_LASTING = -1
"""No number of a fault, so that every step looks again."""

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
        self.seen = self._number = page[Slot.FAULT]
        self._lasting: Fault | None = None
        self._leaked: list[bytes] = []

    def strike(self, step: int) -> None:
        """Do what was asked for. Call it at a step boundary when ``seen`` differs.

        Raises:
            InjectedFault, torch.OutOfMemoryError, MemoryError: that was asked for.
        """
        if self._number != self._page[Slot.FAULT]:
            self._number = self.seen = self._page[Slot.FAULT]
            if (fault := _newest()) is not None:
                log.warning("injected fault at step %d: %s", step, fault.value)
                self._begin(fault, step)
        if self._lasting is Fault.SLOW:
            time.sleep(SLOW_STEP_S)
        elif self._lasting is Fault.LEAK and len(self._leaked) * LEAK_STEP_BYTES < LEAK_BYTES:
            self._leaked.append(b"\x01" * LEAK_STEP_BYTES)

    def _begin(self, fault: Fault, step: int) -> None:
        why = f"injected by slurmft inject, at step {step}"
        match fault:
            case Fault.HANG:
                hang_until_killed()
            case Fault.EXCEPTION:
                raise InjectedFault(why)
            case Fault.OOM:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 GiB ({why})")
            case Fault.HOST_OOM:
                raise MemoryError(why)
            case Fault.NAN:
                _spoil_next_forward_pass()
            case Fault.FULL_DISK:
                _fill_disk_once()
            case Fault.BIT_FLIP | Fault.BIT_FLIP_MOMENT | Fault.BIT_FLIP_GRADIENT:
                _flip_bit(fault)
            case Fault.SLOW | Fault.LEAK:
                self._lasting, self.seen = fault, _LASTING


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


def _fill_disk_once() -> None:
    """The next fsync of this process finds no space: there a write that was accepted before may still fail."""
    real = os.fsync

    def full(fd: Any) -> None:
        os.fsync = real
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")

    os.fsync = full
