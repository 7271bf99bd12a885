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
from torch.nn.modules.module import register_module_forward_hook

from slurmft.errors import StorageError
from slurmft.ipc.pages.heartbeat import FAULT_SUFFIX, PAGE_VARIABLE, Page, Slot
from slurmft.policy.faults import Fault
from slurmft.system.files import read_json

SLOW_STEP_S = 0.5
LEAK_STEP_BYTES, LEAK_BYTES = 32 << 20, 512 << 20
_LASTING = -1
"""No number of a fault, so that every step looks again."""

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


def _fill_disk_once() -> None:
    """The next fsync of this process finds no space: there a write that was accepted before may still fail."""
    real = os.fsync

    def full(fd: Any) -> None:
        os.fsync = real
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")

    os.fsync = full
