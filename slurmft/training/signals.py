"""SIGTERM in a worker: remember it, call whoever else wants it, and keep it from the data loader's processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType


class StopSignal:
    """Remembers that SIGTERM came. The handler does nothing else but call the handler that was there before."""

    _installed: StopSignal | None = None

    def __init__(self) -> None:
        self.seen = False
        self._chained: signal._HANDLER = None
        self._calling = False

    @classmethod
    def install(cls) -> StopSignal:
        """Install it once per process; main thread only, elsewhere it stays deaf (the agent hears the signal)."""
        if cls._installed is None:
            stop = cls._installed = cls()
            stop.chain_again()
            os.register_at_fork(after_in_child=_keep_from_child)
        return cls._installed

    def chain_again(self) -> None:
        """Put us back in front of a handler that the user's code has installed since; theirs is still called."""
        current = signal.getsignal(signal.SIGTERM)
        if current == self._note:
            return
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, self._note)
            self._chained = current

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._chained) and not self._calling:
            self._calling = True  # theirs may in turn call the handler it replaced, which is this one
            try:
                self._chained(number, frame)
            finally:
                self._calling = False


def _keep_from_child() -> None:
    """In a forked child (a data-loader worker): TERM counts only when our own parent sends it.

    Some sites signal every process of the step. A data-loader worker that dies of it takes its trainer along before
    the trainer can save. torch installs its own C handler after this, so only a blocked signal is safe from it; a
    thread takes the blocked signals and looks at who sent them, so that ``terminate()`` by the parent still works.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def wait_for_parent() -> None:
        while True:
            sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
            if sender == parent or os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait_for_parent, daemon=True, name="slurmft-term").start()


def ignore_strangers_term(_worker_id: int = 0) -> None:
    """A ``worker_init_fn`` for data loaders that spawn their workers instead of forking them."""
    _keep_from_child()
