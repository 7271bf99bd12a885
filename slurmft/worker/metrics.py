"""The numbers that a trainer reports, as one curve over all restarts: ``metrics.jsonl`` in the run folder.

Rank 0 writes. A step costs a few microseconds; a thread writes the lines about once a second, so that a filesystem that
does not answer delays no step. Lines wait in a bounded queue; the oldest are dropped where it is full.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from slurmft.errors import Fenced, StorageError
from slurmft.storage.fence import RUN_FOLDER_VARIABLE, check_fence
from slurmft.storage.history.metrics_file import METRICS_FILE, append_lines, cut_back

EVERY_S = 1.0
MAX_WAITING = 100_000
MAX_NAMES = 200
"""Numbers of one step."""

AT_SAVE_S = 2.0
"""How long a save waits for the lines of its steps."""

log = logging.getLogger(__name__)


class MetricsLog:
    """The lines of one session; does nothing where ``folder`` is None."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / METRICS_FILE
        self._step, self._values = -1, dict[str, float | None]()
        self._lines: deque[str] = deque(maxlen=MAX_WAITING)
        self._wanted, self._idle = threading.Event(), threading.Event()
        self._is_closing = self._has_failed = False
        self._cut_to: int | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(cls, *, is_lead: bool) -> MetricsLog:
        """That of the run which this process belongs to, on rank 0 alone."""
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        return cls(Path(folder) if folder and is_lead else None)

    def begin(self, step: int) -> None:
        """The loop begins at ``step``: later lines of an earlier attempt are replaced."""
        if self._path is None:
            return
        self._step, self._values = -1, {}
        self._cut_to = step
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="slurmft metrics", daemon=True)
            self._thread.start()

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers of ``step``; several calls within one step are one line."""
        if self._thread is None:
            return
        if step != self._step:
            self.step_is_over()
            self._step = step
        for name, value in metrics.items():
            if name in self._values or len(self._values) < MAX_NAMES:
                number = float(value)
                self._values[str(name)[:200]] = number if math.isfinite(number) else None

    def step_is_over(self) -> None:
        """No more numbers come for the newest step."""
        if self._values:
            line: dict[str, Any] = {**self._values, "step": self._step, "at": round(time.time(), 3)}
            self._lines.append(json.dumps(line))
            self._values = {}

    def flush(self, within_s: float = AT_SAVE_S) -> None:
        """Return when the lines so far are written, or that takes too long."""
        self.step_is_over()
        deadline_s, self._has_failed = time.monotonic() + within_s, False
        while self._thread is not None and (self._lines or self._cut_to is not None) and not self._has_failed:
            self._idle.clear()
            self._wanted.set()
            if not self._idle.wait(max(0.0, deadline_s - time.monotonic())):
                return

    def close(self) -> None:
        """Write what is left; nothing is written afterwards."""
        self.flush()
        self._is_closing = True
        self._wanted.set()

    def _work(self) -> None:
        assert self._path is not None
        told = False
        while True:
            self._wanted.wait(EVERY_S)
            self._wanted.clear()
            try:
                self._write(self._path)
                told = False
            except Fenced as error:
                log.warning("no metrics are written any more: %s", error.what)
                self._lines.clear()
                self._cut_to, self._is_closing = None, True
            except (OSError, StorageError) as error:
                if not told:
                    log.warning("metrics wait: %s", error)
                told = self._has_failed = True
            self._idle.set()
            if self._is_closing:
                return

    def _write(self, path: Path) -> None:
        if self._cut_to is None and not self._lines:
            return
        check_fence()
        if (step := self._cut_to) is not None:
            cut_back(path, step)
            self._cut_to = None
        if not (lines := list(self._lines)):
            return
        try:
            append_lines(path, lines)
        except OSError:
            self._cut_to = json.loads(lines[0])["step"]  # a part of them may be there
            raise
        for _ in lines:
            self._lines.popleft()
