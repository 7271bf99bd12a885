"""What a worker's failure was: its record, its category, and a watchdog for a loop that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, ParamSpec, Self, TypeVar

from slurmft.errors import UsageError
from slurmft.policy.symptoms import TRACEBACK, FailureCategory, signature_of
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE, MAX_TEXT
from slurmft.system.files import replace_atomically

# --- failures ---
# What kind of failure an exception is. Needs neither an agent nor torch.

MAX_EXCEPTIONS = 1000
"""Limit for one chain or group; a loop that raises from its last error makes endless ones."""

MAX_HEAD = 4_000
"""Characters of a long text's beginning that are looked at where its end says nothing."""


def categorize_failure(error: object) -> FailureCategory:
    """The category of an exception, or of the text of one, such as a traceback in a log; never raises.

    The exception itself counts first, then those it was raised from, and the members of a group. An exception that no
    rule matches is ``code``, a text ``unknown``; any other object is ``unknown`` as well.
    """
    with contextlib.suppress(Exception):  # objects of others, whose every attribute may raise
        if isinstance(error, str):
            return _of_text(str.__str__(error)) or FailureCategory.UNKNOWN
        if isinstance(error, BaseException):
            found = (_of_one(one) for one in _chain(error))
            return next((category for category in found if category is not None), FailureCategory.CODE)
    return FailureCategory.UNKNOWN


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = deque([error]), set[int]()
    while waiting and len(seen) < MAX_EXCEPTIONS:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        with contextlib.suppress(Exception):
            further = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
            members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            waiting.extend([*members[:MAX_EXCEPTIONS], *([further] if further is not None else [])])


def _of_one(error: BaseException) -> FailureCategory | None:
    with contextlib.suppress(Exception):
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == EXIT_TEMPORARY):
            return FailureCategory.PREEMPTION
    found = _of_text(_words(error))
    return None if found in (FailureCategory.CODE, FailureCategory.UNKNOWN) else found


def _words(error: BaseException) -> str:
    """The exception as the last lines of its traceback name it, without those that it was raised from."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    notes = getattr(error, "__notes__", None)
    parts = [_text_of(error), *(_text_of(note) for note in (notes if isinstance(notes, list) else [])[:20])]
    return f"{TRACEBACK}\n{name}: " + "\n".join(parts)


def _text_of(value: object) -> str:
    try:
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001 - as traceback does: nothing that it raises says more than its type does
        return ""


def _of_text(text: str) -> FailureCategory | None:
    row = signature_of(text, loosely=True) or (signature_of(text[:MAX_HEAD].rstrip()) if len(text) > MAX_HEAD else None)
    return None if row is None else row.category


# --- ``@slurmft.record``: an exception of the decorated function leaves a file that says why this rank failed ---
# For trainers that run under srun or torchrun, or whose exceptions a framework swallows: the supervisor reads the file,
# and the exit code, which does not survive srun and torchrun, matters less. Needs no agent, and no torch.

TORCH_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for a worker's reason."""

_RANK_VARIABLES = ("RANK", "SLURM_PROCID")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def record(main: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a trainer's main function; its exception is written down and raised again.

    The file is ``error.rank_N`` in the folder that SLURMFT_ERROR_DIR names; torchrun's own file is written as well
    where it asks for one that does not exist yet. Without either variable nothing is written. Ends that are meant,
    ``SystemExit`` and ``KeyboardInterrupt``, leave no file. That a file cannot be written never hides the exception.
    """

    @functools.wraps(main)
    def recorded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return main(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            leave_error(error, os.environ)
            raise

    return recorded


def leave_error(error: BaseException, environment: Mapping[str, str]) -> None:
    """Write what ``record`` writes; never raises."""
    text = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    if folder := environment.get(ERROR_DIR_VARIABLE):
        _write(Path(folder) / f"error.rank_{_rank(environment)}", text)
    # inside of torchrun, torch's own decorator may have been first
    if (torchs := environment.get(TORCH_VARIABLE)) and not Path(torchs).exists():
        words = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        _write(Path(torchs), json.dumps({"message": {"message": words, "extraInfo": details}}))


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # UnicodeEncodeError is a ValueError
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, text.encode(errors="backslashreplace").decode())


def _rank(environment: Mapping[str, str]) -> str:
    values = [environment.get(name, "") for name in _RANK_VARIABLES]
    return next((value for value in values if value.isascii() and value.isdecimal()), "0")


# --- A timer that has to be reset: when it runs out, all stacks are written down, and a callback is called ---

log = logging.getLogger(__name__)

DEFAULT_S = 60.0
SLICE_S = 0.5
OVERSLEPT_S = 1.0
"""A wait this much longer than requested is not a hang of the loop: the whole process was stopped, or starved."""


class WatchdogTimer:
    """Calls ``on_timeout()`` once, in a thread of its own, when ``reset()`` was not called for ``timeout_seconds``.

        with WatchdogTimer(60, lambda: os._exit(1)) as watchdog:
            for batch in loader:
                train(batch)
                watchdog.reset()

    ``on_timeout`` calls ``callback`` unless a subclass overrides it. Before it, the stacks of all threads go to
    ``file`` (standard error when not given). The thread does not keep the process alive. Time in which the whole
    process was stopped (SIGSTOP, a suspended job) does not count. A ``reset()`` after it has run out arms it again,
    also when ``on_timeout`` has raised, which is shown as any exception of a thread. Does not see a hang in C code that
    never gives the GIL back: no Python thread runs then. Not inherited by a fork.

    Args:
        timeout_seconds: the same as ``timeout``, by the name that other packages give it.

    Raises:
        UsageError: the timeout is not a positive number, or there are two, or what is to be called cannot be.
    """

    def __init__(
        self,
        timeout: float = DEFAULT_S,
        callback: Callable[[], object] | None = None,
        *,
        timeout_seconds: float | None = None,
        file: IO[str] | None = None,
    ) -> None:
        if timeout_seconds is not None and timeout != DEFAULT_S:
            raise UsageError("timeout and timeout_seconds are the same", hint="give one of them")
        if callback is not None and not callable(callback):
            raise UsageError(f"the callback is {callback!r:.60}, which cannot be called")
        limit = timeout if timeout_seconds is None else timeout_seconds
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < math.inf:
            raise UsageError(f"the timeout is {limit!r:.60}; it is a positive number of seconds")
        self.timeout = limit
        self._callback, self._file = callback, file
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._deadline_s: float | None = None
        self._look_at_s = 0.0
        self._stopped = True
        self._fired = 0

    @property
    def timeout_seconds(self) -> float:
        """The same as ``timeout``."""
        return self.timeout

    @property
    def active(self) -> bool:
        """Whether it has been started and not stopped."""
        return not self._stopped

    def on_timeout(self) -> None:
        """The time is up, and the stacks are written: to be overridden; calls the callback."""
        if self._callback is not None:
            self._callback()

    @property
    def expired(self) -> bool:
        """Whether it has ever run out since it was started."""
        return self._fired > 0

    def start(self) -> None:
        """Begin to count; a running timer is reset."""
        with self._changed:
            self._look_at_s = time.monotonic()
            self._deadline_s = self._look_at_s + self.timeout
            if self._thread is None or not self._thread.is_alive():
                self._stopped, self._fired = False, 0
                self._start_thread()
            self._changed.notify_all()

    def reset(self) -> None:
        """Count from the beginning; arms it again when it has run out. Costs a lock and a clock."""
        with self._changed:
            was_idle, self._deadline_s = self._deadline_s is None, time.monotonic() + self.timeout
            if was_idle:
                self._look_at_s = time.monotonic()
                self._changed.notify_all()

    def stop(self) -> None:
        """Never run out any more; returns when a callback that is running has ended, unless it is that which calls."""
        with self._changed:
            self._stopped, self._deadline_s = True, None
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True, name="slurmft-watchdog")
        self._thread.start()

    def _watch(self) -> None:
        try:
            while self._wait():
                self._run_out()
                with self._changed:
                    self._look_at_s = time.monotonic()
        finally:  # on_timeout has raised, which ends this thread: another one takes its place
            with self._changed:
                if not self._stopped and self._thread is threading.current_thread():
                    self._look_at_s = time.monotonic()
                    self._start_thread()

    def _wait(self) -> bool:
        """Return True when the time is up, False when it will never be."""
        with self._changed:
            while not self._stopped:
                now_s = time.monotonic()
                if self._deadline_s is None:
                    self._changed.wait()
                    continue
                if (late_s := now_s - self._look_at_s) > OVERSLEPT_S:
                    self._deadline_s += late_s
                left_s = self._deadline_s - now_s
                if left_s <= 0:
                    self._deadline_s, self._fired = None, self._fired + 1
                    return True
                slice_s = min(left_s, SLICE_S)
                self._look_at_s = now_s + slice_s
                self._changed.wait(slice_s)
        return False

    def _run_out(self) -> None:
        log.error("WATCHDOG TIMEOUT: nothing has reset the watchdog for %g s; all stacks follow", self.timeout)
        dump_stacks(self._file or sys.stderr)
        self.on_timeout()


def dump_stacks(file: IO[str]) -> None:
    """Write the stacks of all threads; never raises. A stream without a file behind it gets them too."""
    try:
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    except (AttributeError, ValueError, OSError, RuntimeError):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            text = f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            try:
                file.write(text)
            except (OSError, ValueError):
                return
