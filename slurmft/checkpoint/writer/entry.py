"""The writer: one process beside each worker that makes its snapshots durable, and on rank 0 commits them. No torch.

Run as ``python -m slurmft.checkpoint.writer.entry SOCKET_FD PAGE_FD LIFETIME_S``: requests and reports are JSON
objects, one on each line (checkpoint.writer.write_requests); the page shows its progress. When its worker closes the
socket, or dies, it finishes its present work and ends, after ``LIFETIME_S`` seconds at the latest.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from slurmft.checkpoint.writer.copier import CopyLane, Staged
from slurmft.checkpoint.writer.image_lane import ImageLane
from slurmft.checkpoint.writer.priority import ignore_signals
from slurmft.checkpoint.writer.progress_page import Lane, ProgressPage
from slurmft.checkpoint.writer.step_copy_lane import StepCopyLane
from slurmft.checkpoint.writer.write_requests import WriteRequest, identity_from, request_from
from slurmft.checkpoint.writer.writer_task import Outbox, Task
from slurmft.system.log_format import log_to_stderr

if TYPE_CHECKING:
    from slurmft.checkpoint.writer.committer import CommitLane

_RECEIVE_BYTES = 64 * 1024
_LOOK_S = 0.1
_STEP_COPY_S = 30.0
"""How long the copy of a step may go on without its worker."""

_SIGN_S = 0.5
"""How often it shows that it lives while it copies a step: to a slow peer that takes long, which is no stall."""

log = logging.getLogger(__name__)


class Writer:
    """Listens to its worker while other threads do all work that may wait for a disk or a peer."""

    def __init__(self, worker: socket.socket, page: ProgressPage) -> None:
        self._worker, self._page = worker, page
        self._in, self._out = b"", bytearray()
        self._is_closing = False
        self._is_alone = False
        self._outbox = Outbox()
        self._copies = CopyLane()
        self._steps = StepCopyLane()
        self._lock = threading.Lock()
        self._commits: CommitLane | None = None
        self._images = ImageLane(page, self._commit)
        worker.setblocking(False)
        threading.Thread(target=self._images.run, daemon=True).start()

    def serve(self, lifetime_s: float) -> int:
        """Return an exit code when the worker has closed and nothing is left to do, or the lifetime is over."""
        ends_at: float | None = None
        while True:
            self._listen()
            if not self._is_closing:
                continue
            if ends_at is None:
                ends_at = time.monotonic() + lifetime_s
                self._steps.end_within(_STEP_COPY_S)
                if self._commits is not None:
                    self._commits.left_alone()
            lanes = (self._images, self._commits, self._copies, self._steps)
            if all(lane is None or lane.is_idle() for lane in lanes):
                self._send()
                return 0
            if time.monotonic() > ends_at:
                log.error("not everything could be written in %.0f s; it stays unfinished", lifetime_s)
                return 1

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._outbox.wake, select.POLLIN)
        if not self._is_alone:
            poll.register(self._worker, select.POLLIN | (select.POLLOUT if self._out else 0))
        pause_s = _LOOK_S if self._is_closing else None if self._steps.is_idle() else _SIGN_S
        for descriptor, _ in poll.poll(None if pause_s is None else pause_s * 1000):
            if descriptor == self._outbox.wake:
                os.eventfd_read(descriptor)
            elif not self._receive():
                self._is_alone = self._is_closing = True
        self._page.tick(Lane.LISTENING)
        self._send()

    def _receive(self) -> bool:
        """Whether the worker is still there."""
        try:
            data = self._worker.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            self._obey(line)
        return bool(data)

    def _obey(self, line: bytes) -> None:
        value = json.loads(line)
        if value["kind"] == "write":
            task = Task(request_from(value), self._outbox, on_hashed=self._copy)
            if task.request.is_step_copy:
                self._steps.offer(task)
            else:
                (self._commit if task.request.is_written else self._images.offer)(task)
        elif value["kind"] == "abandon":
            identity = identity_from(value)
            is_found = self._steps.abandon(identity) or self._images.abandon(identity)
            if not is_found and self._commits is not None:
                self._commits.abandon(identity)
        elif value["kind"] == "hurry":
            self._images.hurry()
        elif value["kind"] == "close":
            self._is_closing = True

    def _commit(self, task: Task) -> None:
        """Commit a save of rank 0's. The others never need the code for it, whose import is half of their start."""
        if task.request.commit is None:
            return
        with self._lock:  # both the listening thread and that of the images come here
            if self._commits is None:
                from slurmft.checkpoint.writer.committer import CommitLane

                self._commits = CommitLane(self._page)
                threading.Thread(target=self._commits.run, daemon=True).start()
                if self._is_closing:
                    self._commits.left_alone()
        self._commits.add(task)

    def _copy(self, request: WriteRequest) -> None:
        cap, directory = None if request.urgent else request.max_bytes_per_s or None, request.folder.parent
        self._copies.offer(
            Staged(
                index=request.snapshot, image=request.image, checkpoint_dir=directory, bytes_per_s=cap,
                goes_to_peers=request.goes_to_peers,
            )
        )  # fmt: skip

    def _send(self) -> None:
        self._out += self._outbox.take()
        if self._is_alone:
            self._out.clear()
        try:
            while self._out:
                del self._out[: self._worker.send(self._out, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            self._is_alone = self._is_closing = True


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve one worker, then end."""
    ignore_signals()
    log_to_stderr("%(asctime)s %(levelname)s writer: %(message)s")
    worker, page = socket.socket(fileno=int(arguments[0])), ProgressPage(int(arguments[1]))
    for descriptor in (worker.fileno(), page.descriptor):
        os.set_inheritable(descriptor, False)
    code = Writer(worker, page).serve(float(arguments[2]))
    os._exit(code)  # a thread that a filesystem holds must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
