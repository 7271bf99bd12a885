"""SIGTERM in a worker: remember it, call the user's handler, and shield its child processes from outside senders.

Some sites signal every process of a step (proctrack/linuxproc, proctrack/pgid). A data-loader worker that dies of it
takes its trainer along before the trainer can save. So each process that the worker starts with ``multiprocessing``, by
fork, spawn or forkserver, obeys a TERM from its parent or from itself only, from its first instruction on.

Programs started with ``subprocess`` get TERM as Slurm sends it: an ignored or blocked signal would stay so for good,
and ``Popen.terminate()`` would do nothing. For the same reason a process that is shielded passes the blocked signal on
to programs that it starts itself: it ends them with ``kill()``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import multiprocessing.context
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE, Page, Slot, StopAction
from slurmft.policy.stop import END, step_of, tick_of
from slurmft.trainer.savers import SAVERS, any_rank

log = logging.getLogger(__name__)

# --- signals ---

_TERM = frozenset({signal.SIGTERM})
_getsignal: Callable[[int], Any] = importlib.import_module("_signal").getsignal
"""As ``signal.getsignal``, without the attempt to make an enum of the handler, which took a third of a safe point."""

_KINDS = (
    multiprocessing.context.ForkProcess,
    multiprocessing.context.SpawnProcess,
    multiprocessing.context.ForkServerProcess,
)


class StopSignal:
    """Remembers that SIGTERM came. The handler does nothing else but call the handler that was there before.

    What it remembers counts without an agent alone: under one, ranks stop where its page says (``AgreementByAgent``).
    """

    _installed: StopSignal | None = None

    def __init__(self) -> None:
        self.seen = False
        self._owner = os.getpid()
        self._chained: signal._HANDLER = None
        self._calling = False

    @classmethod
    def install(cls) -> StopSignal:
        """Install it once per process; main thread only; elsewhere it does nothing (the agent gets the signal)."""
        if cls._installed is None or cls._installed._owner != os.getpid():
            _forget_the_parents()
            stop = cls._installed = cls()
            stop.chain_again()
            util.register_after_fork(stop, lambda _stop: _heed_only())
            _shield_children()
        SAVERS.on_stop_signal = cls._installed.takes
        return cls._installed

    def chain_again(self) -> None:
        """Put us back in front of a handler that the user's code has installed since; theirs is still called."""
        if _getsignal(15) == self._note:
            return
        current = signal.getsignal(signal.SIGTERM)
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, self._note)
            self._chained = current

    def takes(self, number: int) -> bool:
        """Remember it, where it is one that stops the run at the end of a step."""
        is_configured = signal.Signals(number).name == os.environ.get(STOP_SIGNAL_VARIABLE)
        self.seen = self.seen or is_configured or number in _TERM
        return is_configured or number in _TERM

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if self._step_aside():  # a plain os.fork() took us along
                signal.raise_signal(number)
            return
        self.seen = True
        if callable(self._chained) and not self._calling:
            self._calling = True  # theirs may in turn call the handler it replaced, which is this one
            try:
                self._chained(number, frame)
            finally:
                self._calling = False

    def _step_aside(self) -> bool:
        """Restore the handler that was there before us; False when another one has replaced ours already."""
        if signal.getsignal(signal.SIGTERM) != self._note:
            return False
        signal.signal(signal.SIGTERM, self._chained if self._chained is not None else signal.SIG_DFL)
        return True


def _forget_the_parents() -> None:
    """In a fork: the handler that came along remembers for the parent."""
    stop = StopSignal._installed
    if stop is not None and stop._owner != os.getpid():
        with contextlib.suppress(ValueError):  # not the main thread
            stop._step_aside()


def ignore_strangers_term(_worker_id: int = 0) -> None:
    """In this process, from now on, SIGTERM counts only when its parent or itself sends it.

    Processes that a trainer starts with ``multiprocessing`` after ``start_session`` (data loaders, executors, helpers)
    need nothing: they are shielded by themselves. Call it in a child by plain ``os.fork()``, or in one that was started
    before the session; it is also a ``worker_init_fn``. ``terminate()`` works as ever, handlers of the child's own
    included. Programs that the process starts inherit a blocked SIGTERM: end them with ``kill()``.
    """
    _heed_only()


def _heed_only(*senders: int) -> None:
    """Block SIGTERM; a thread takes it, checks the sender, and raises it where it counts.

    torch installs a C handler of its own in data-loader workers, after this, so only a blocked signal is safe from it.
    Once the parent is gone, every sender counts.
    """
    if _Watch.process == os.getpid():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    _forget_the_parents()
    _Watch.process, parent = os.getpid(), os.getppid()
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
            signal.signal(signal.SIGURG, lambda _number, _frame: None)
    counting = frozenset({os.getpid(), parent, *senders})
    threading.Thread(target=_watch, args=(counting, parent), daemon=True, name="slurmft-term").start()


class _Watch:
    process = 0
    """The process that has its watching thread: a fork has the value, and not the thread."""


def _watch(counting: frozenset[int], parent: int) -> None:
    deliver = redelivery(signal.SIGTERM)  # torch's handler asks for the sender, too
    while True:
        came = signal.sigwaitinfo(_TERM)
        if came.si_pid not in counting and os.getppid() == parent:
            continue
        deliver(came)  # the end, unless the process has a handler of its own
        if (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGURG)  # Python runs handlers there, and it may be waiting in the kernel


def _shield_children() -> None:
    for kind in _KINDS:
        start = kind._Popen
        if getattr(start, "func", None) is not _start_shielded:
            kind._Popen = staticmethod(functools.partial(_start_shielded, start))  # type: ignore[method-assign]


def _start_shielded(start: Callable[[BaseProcess], Any], process: Any) -> Any:
    """Start a process of multiprocessing with TERM blocked, until it is watched there: in a fork by the hook that runs
    before everything else, in a new interpreter when it unpickles its process object."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TERM if process._start_method == "fork" else ())
    process._slurmft_shield = _Shield(os.getpid())
    try:
        return start(process)
    finally:
        del process._slurmft_shield
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Shield:
    """Part of a process object on its way to a new interpreter, where unpickling it makes a call."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __reduce__(self) -> tuple[Callable[..., None], tuple[int, ...]]:
        # here and not earlier: a process object that does not pickle all its parts must not leave the signal blocked
        resource_tracker.ensure_running()  # where it starts later it unblocks TERM (Python 3.11)
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
        return _heed_only, (self._parent,)


# --- The stop agreement, the worker's side: one integer compare per step ---

HOLD_PAUSE_S = 0.0005
COLLECTIVE_EVERY_STEPS = 8


class Agreement(Protocol):
    """The action of all ranks at each tick."""

    def at(self, tick: int) -> StopAction:
        """What to do at this tick; the same on all ranks."""

    def answered(self, tick: int) -> None:
        """It has been done."""


class AgreementByAgent:
    """Through the heartbeat page: no collective, no system call while no stop is requested."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._acted_on = -1

    def at(self, tick: int) -> StopAction:
        """Publish the tick, then compare; hold at a proposal until it is committed, moved or withdrawn."""
        page = self._page
        page[Slot.TICK] = tick
        if tick < page[Slot.PROPOSED]:
            return StopAction.NONE
        while True:
            proposed = page[Slot.PROPOSED]
            if tick < proposed or proposed == self._acted_on:
                page[Slot.HOLDING] = -1
                return StopAction.NONE
            page[Slot.HOLDING] = proposed
            if page[Slot.COMMITTED] == proposed:
                self._acted_on = proposed
                return StopAction(page[Slot.ACTION])
            time.sleep(HOLD_PAUSE_S)

    def answered(self, tick: int) -> None:
        """Tell the agent."""
        self._page[Slot.ANSWERED] = tick


class AgreementByCollective:
    """Without an agent (plain srun, torchrun): one small all-reduce every few steps."""

    def __init__(self, stop: StopSignal, world_size: int) -> None:
        self._stop, self._world_size = stop, world_size

    def at(self, tick: int) -> StopAction:
        """Whether any rank has seen the signal; asked of all every COLLECTIVE_EVERY_STEPS steps."""
        if self._world_size == 1 or not dist.is_initialized():
            return StopAction.SAVE_AND_STOP if self._stop.seen else StopAction.NONE
        step = step_of(tick)  # only boundaries are the same on all ranks; evaluations may differ in length
        if tick >= END or tick != tick_of(step) or step % COLLECTIVE_EVERY_STEPS:
            return StopAction.NONE
        return StopAction.SAVE_AND_STOP if any_rank(self._stop.seen) else StopAction.NONE

    def answered(self, tick: int) -> None:
        """Nothing to do: there is no agent."""


# --- Delivering a blocked signal to the calling thread as it came: with its first sender ---
# torch's handler in data-loader workers asks for it: one that its parent ends exits with 0, others die of the signal.
# Python has no call for it: the kernel's record is laid out here, for rt_tgsigqueueinfo(2), the only system call that
# takes a sender, and that only from the process itself.

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
