"""The supervisor's side of the process that publishes metrics and tells events (``reporting.companion``)."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from types import TracebackType
from typing import Self

from slurmft.config.config import RunConfig
from slurmft.storage.run_folder import RunFolder

END_S = 1.0

log = logging.getLogger(__name__)


class Companion:
    """A context manager: at its end the companion is given ``notify.last_s`` seconds for its last messages."""

    def __init__(self, config: RunConfig, run: RunFolder) -> None:
        self._config, self._run = config, run
        self._is_wanted = config.metrics.is_on or config.notify.is_on
        self._process: subprocess.Popen[bytes] | None = None

    def see_to_it(self) -> None:
        """Start it, where something is to be published or told and it does not live; a failure is only logged."""
        if not self._is_wanted or (self._process is not None and self._process.poll() is None):
            return
        # the stored configuration, which the first attempt has written: the one given may be replaced meanwhile
        words = [sys.executable, "-P", "-m", "slurmft", "companion", str(self._run.config)]
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:
            log.warning("neither metrics nor messages: %s cannot be started: %s", words[0], error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S + (self._config.notify.last_s if self._config.notify.is_on else 0.0))
        except subprocess.TimeoutExpired:
            log.warning("the last messages about the run may not have been taken")
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a silent filesystem may hold it
                self._process.wait(END_S)
