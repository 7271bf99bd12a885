"""Deliver a blocked signal to the calling thread as it came: with its first sender, which C handlers may ask for; and
which signal is being handled.

torch's handler in data-loader workers does: one that its parent ends exits with 0, others die of the signal. Python has
no call for it, so the kernel's record is laid out here, for rt_tgsigqueueinfo(2), the only system call that takes a
sender, and that only from the process itself. The plain way is ``signal.raise_signal``: this process is the sender.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

log = logging.getLogger(__name__)

RECORD = struct.Struct("=6i104x")
"""si_signo, si_errno, si_code, padding, si_pid, si_uid: siginfo_t of kill(2) on 64-bit Linux, 128 bytes."""

CALLS = {"x86_64": 297, "aarch64": 240, "ppc64le": 322}
"""The number of rt_tgsigqueueinfo, by machine."""

Deliver = Callable[[signal.struct_siginfo], None]


def redelivery(number: signal.Signals, machine: str | None = None) -> Deliver:
    """How to deliver signal ``number``, which this thread has blocked, to this thread.

    With its sender where a signal with a made-up one arrives as it was sent, which is tried here; else as this
    process's own, and the log says so.
    """
    call = CALLS.get(machine or os.uname().machine)
    if call is None or not _arrives(call, number):
        log.warning(
            "a forwarded %s will have this process as its sender: rt_tgsigqueueinfo is not known here", number.name
        )
        return functools.partial(_plainly, number)
    return functools.partial(_with_sender, call)


def _arrives(call: int, number: int) -> bool:
    """Whether a record that is laid out here is read as it was meant; this thread's own queue goes before others."""
    if number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return False
    sender, user = os.getppid() + 1, os.getuid() + 1
    if not _queue(call, RECORD.pack(number, 0, 0, 0, sender, user), number):
        return False
    came = signal.sigtimedwait({number}, 0)
    return came is not None and (came.si_pid, came.si_uid, came.si_code) == (sender, user, 0)


def _queue(call: int, record: bytes, number: int) -> bool:
    where = (ctypes.c_long(os.getpid()), ctypes.c_long(threading.get_native_id()), ctypes.c_long(number))
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(call), *where, record) == 0)


def _with_sender(call: int, came: signal.struct_siginfo) -> None:
    record = RECORD.pack(came.si_signo, came.si_errno, came.si_code, 0, came.si_pid, came.si_uid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {came.si_signo})
    if not _queue(call, record, came.si_signo):
        signal.raise_signal(came.si_signo)
    signal.pthread_sigmask(signal.SIG_BLOCK, {came.si_signo})


def _plainly(number: signal.Signals, _came: signal.struct_siginfo) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def handled_signal() -> int | None:
    """The signal in whose Python handler this thread runs, by its arguments: its number, and the frame below it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, below = frame.f_code, frame.f_back
        positional, has_rest = code.co_argcount, bool(code.co_flags & inspect.CO_VARARGS)
        if below is not None and (positional > 1 or has_rest):
            variables = frame.f_locals
            given = [variables.get(name) for name in code.co_varnames[:positional]]
            if has_rest:
                given += variables.get(code.co_varnames[positional + code.co_kwonlyargcount]) or ()
            if sys.version_info < (3, 13):  # else this copy would keep what the caller deletes, such as a model, alive
                variables.clear()
            found = next((one for one, other in pairwise(given) if other is below and isinstance(one, int)), None)
            if found is not None:
                return found
        frame = below
    return None
