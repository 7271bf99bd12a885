"""Signals to the supervisor itself: handled while it listens, kept pending otherwise; none ends the process.

A blocked mask alone would not do: any thread that was started while the mask was open takes the signal, and its default
action ends the whole process.
"""

from __future__ import annotations

import atexit
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = frozenset({*HEARD, signal.SIGQUIT})
"""The signals that a guardian forwards to its child."""

_kept: list[int] = []
_listeners: list[Callable[[int], None]] = []


log = logging.getLogger(__name__)


def log_signal(line: str, name: str) -> None:
    """Log a line that other packages have as well, with the signal's number."""
    log.info(line, signal.Signals.__members__.get(name, 0))


def block_signals() -> None:
    """Keep signals pending while this process has one thread and no handlers yet; across a fork, and an exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def keep_signals() -> None:
    """From now on a signal in any thread waits for ``hearing``; call after ``block_signals``, with one thread."""
    for number in HEARD:
        signal.signal(number, _note)
    atexit.register(_ignore_signals)  # an interpreter on its way out has default actions again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def any_kept() -> bool:
    """Whether a signal is pending."""
    return bool(_kept)


@contextmanager
def hearing(listener: Callable[[int], None]) -> Iterator[None]:
    """Within the block ``listener`` is called with each signal, first with those that were kept.

    It runs inside a signal handler: it may only schedule.
    """
    _listeners.append(listener)
    try:
        while _kept:
            listener(_kept.pop(0))
        yield
    finally:
        _listeners.remove(listener)


def keep_across_exec() -> None:
    """Before an exec, which keeps neither handlers nor memory: leave what was kept pending for the next program."""
    block_signals()
    for number in _kept:
        signal.pthread_kill(threading.get_ident(), number)


def _note(number: int, _frame: FrameType | None) -> None:
    if _listeners:
        _listeners[-1](number)
    elif number not in _kept:
        _kept.append(number)


def _ignore_signals() -> None:
    for number in HEARD:
        signal.signal(number, signal.SIG_IGN)
