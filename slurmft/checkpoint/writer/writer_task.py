"""One save inside the writer process, its reports, and how the threads that work on it reach the worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slurmft.checkpoint.format.shard_index import ShardIndex
from slurmft.checkpoint.staging.holding import Claim
from slurmft.checkpoint.writer.priority import Throttle
from slurmft.checkpoint.writer.write_requests import Report, ReportKind, WriteRequest, report_line

PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Pauses between retries of errors that may pass by themselves; the last one repeats for ever."""


class Outbox:
    """Reports on their way to the worker; any thread may put one in, the listening one sends them."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lines: deque[bytes] = deque()

    def put(self, report: Report) -> None:
        """Have it sent."""
        self._lines.append(report_line(report))
        os.eventfd_write(self.wake, 1)

    def take(self) -> bytes:
        """All waiting reports."""
        taken = bytearray()
        while self._lines:
            taken += self._lines.popleft()
        return bytes(taken)


@dataclass(eq=False, slots=True)
class Task:
    """A request, and its state."""

    request: WriteRequest
    outbox: Outbox
    on_hashed: Callable[[WriteRequest], None] = lambda _: None
    """Called once the snapshot in memory has its digests, and is as good as it will be on disk."""

    throttle: Throttle = field(init=False)
    leave: ReportKind | None = None
    """Set by the listening thread: stop at the next piece, and report this."""

    written: ShardIndex | None = None
    """The receipt, where this process has written it."""

    phase: str = ""
    claim: Claim | None = None
    """Of the checkpoint's folder."""

    since: float = field(default_factory=time.monotonic)
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        request = self.request
        self.throttle = Throttle(0.0 if request.urgent else request.max_bytes_per_s)

    def begin_claim(self) -> None:
        """On rank 0: until ``end_claim`` the folder does not count as a left-over. Best effort, and idempotent."""
        if self.claim is None and self.request.commit is not None:
            with contextlib.suppress(OSError):
                self.claim = Claim(self.request.folder)

    def end_claim(self) -> None:
        """The save has ended, with any result."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    def stop(self, kind: ReportKind) -> None:
        """Give it up as soon as possible."""
        self.leave = kind
        self.woken.set()

    def leave_if_stopped(self) -> None:
        """Raises Left where it is to be given up."""
        if self.leave:
            raise Left(self.leave)

    def tell(self, kind: ReportKind, **details: Any) -> None:
        """Send a report on it."""
        seconds = time.monotonic() - self.since
        self.outbox.put(Report(kind=kind, identity=self.request.identity, seconds=seconds, **details))

    def tell_failure(self, error: BaseException, *, final: bool, fenced: bool = False) -> None:
        """Report an error, in its present phase."""
        number = error.errno or 0 if isinstance(error, OSError) else 0
        text = error.strerror or str(error) if isinstance(error, OSError) else str(getattr(error, "what", error))
        self.tell("failed", final=final, phase=self.phase, errno=number, text=text or repr(error), fenced=fenced)


class Left(Exception):
    """The save was given up; its kind is the one to report."""

    def __init__(self, kind: ReportKind, text: str = "", *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text
        self.is_lost = is_lost
        """Its folder is gone, or rank 0 has given it up: we must not remove files there now."""
