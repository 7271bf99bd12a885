"""One writer process on its worker's side: its start, the messages over a socket, its end. Never blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

from slurmft.checkpoint.writer.priority import IGNORED
from slurmft.checkpoint.writer.progress_page import ProgressPage
from slurmft.system.opening import UnsafeFile, open_regular
from slurmft.system.processes import MARK_VARIABLE

_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); from slurmft.checkpoint.writer.entry import main; main(sys.argv[1:])"
)
"""As ``python -m slurmft.checkpoint.writer.entry``, from our own package, independent of the working folder."""

_RECEIVE_BYTES = 64 * 1024


class SpawnedWriter:
    """A running ``checkpoint.writer.entry`` in a session of its own: it outlives its worker and finishes by itself.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, *, lifetime_s: float, log: Path | None) -> None:
        self.page = ProgressPage.new()
        self._socket, theirs = socket.socketpair()
        self._in, self._out = b"", bytearray()
        try:
            self.pid = self._start(theirs, lifetime_s, log)
        except BaseException:
            self.let_go()
            raise
        finally:
            theirs.close()
        self._socket.setblocking(False)
        self._status: int | None = None
        _living.add(self)

    def _start(self, theirs: socket.socket, lifetime_s: float, log: Path | None) -> int:
        root = str(Path(__file__).resolve().parents[3])
        numbers = [theirs.fileno(), self.page.descriptor]
        argv = [sys.executable, "-P", "-c", _START, root, *map(str, numbers), str(lifetime_s)]
        with contextlib.ExitStack() as stack:
            # its worker's own output may be a pipe, whose reader would wait for the writer's end
            output = subprocess.DEVNULL if log is None else _appending(log, stack)
            stack.enter_context(_blocked())
            process = subprocess.Popen(
                argv,
                env=os.environ | {MARK_VARIABLE: ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=numbers,
            )
        process.returncode = 0  # reaped below; no warning that it outlives its worker, which is its purpose
        return process.pid

    def fileno(self) -> int:
        """For waiting until it sends something, or ends."""
        return self._socket.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether lines wait until it takes them."""
        return bool(self._out)

    def send(self, line: bytes) -> None:
        """Have ``line`` sent as soon as it can be."""
        self._out += line
        self.flush()

    def flush(self) -> None:
        """Send what it takes now. That it is gone shows at the next ``receive``."""
        with contextlib.suppress(OSError):
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_NOSIGNAL)]

    def receive(self) -> list[bytes] | None:
        """Lines that have come; None when it is gone."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._in = (self._in + data).split(b"\n")
        return lines

    def kill(self) -> None:
        """End it; a process inside a filesystem call that hangs only ends when that returns."""
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether it has ended; reaps it."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has reaped it
                pid, status = self.pid, 0
            if pid:
                self._status = status
        return self._status is not None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self._status is None:
            return "has closed its socket"
        code = os.waitstatus_to_exitcode(self._status)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def let_go(self) -> None:
        """Close this side: it finishes its present work, and ends."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self.page.descriptor)
            self.page.descriptor = -1


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """A child that is started meanwhile keeps signals pending until it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_living: weakref.WeakSet[SpawnedWriter] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child, such as a loader's worker, must not keep the socket open when its parent has died."""
    for writer in list(_living):
        writer.let_go()


os.register_at_fork(after_in_child=_forget_in_child)


def _appending(log: Path, stack: contextlib.ExitStack) -> int:
    """A descriptor to write behind what is there; nothing is logged where something else than a file lies."""
    try:
        descriptor = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o666)
    except UnsafeFile:
        return subprocess.DEVNULL
    stack.callback(os.close, descriptor)
    return descriptor
