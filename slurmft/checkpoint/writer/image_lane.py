"""The thread of a writer that makes images durable, one at a time; of those that wait the newest wins. No torch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from slurmft.checkpoint.format.image_writing import Mappings
from slurmft.checkpoint.writer.abandoned_saves import give_up
from slurmft.checkpoint.writer.durable_image import Pacing, write_durably
from slurmft.checkpoint.writer.priority import do_politely
from slurmft.checkpoint.writer.progress_page import Lane, Progress, ProgressPage
from slurmft.checkpoint.writer.writer_task import PAUSES_S, Left, Task
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import Identity
from slurmft.storage.patience import PASSING

POLITE_BYTES = 64 << 20
"""A smaller image is written without a noticeable slowdown of the training."""

log = logging.getLogger(__name__)


def size_of(path: Path) -> int:
    """In bytes; 0 where there is no such file."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


class ImageLane:
    """Writes offered images; the listening thread calls everything but ``run``, and never waits for a disk.

    Args:
        hand_over: called with each task whose image and receipt are durable.
    """

    def __init__(self, page: ProgressPage, hand_over: Callable[[Task], None]) -> None:
        self._page = page
        self._hand_over = hand_over
        self._changed = threading.Condition()
        self._waiting: Task | None = None
        self._current: Task | None = None
        self._dropped: list[Task] = []
        self._images = Mappings()

    def offer(self, task: Task) -> None:
        """Write this one next, instead of one that waits."""
        with self._changed:
            if self._waiting is not None:
                self._drop("superseded")
            self._waiting = task
            if (current := self._current) is not None:
                progress = self._page.progress()
                if task.request.urgent and 2 * progress.done_bytes < progress.size_bytes:
                    current.stop("superseded")
                if task.request.urgent:
                    current.throttle.lift()
                current.woken.set()  # an image that waits for free space is dropped
            self._changed.notify()

    def abandon(self, identity: Identity) -> bool:
        """Whether this lane had it."""
        with self._changed:
            if self._waiting is not None and self._waiting.request.identity == identity:
                self._drop("abandoned")
                return True
            if self._current is not None and self._current.request.identity == identity:
                self._current.stop("abandoned")
                return True
        return False

    def hurry(self) -> None:
        """Lift the bandwidth cap of present and waiting images."""
        with self._changed:
            for task in (self._current, self._waiting):
                if task is not None:
                    task.throttle.lift()

    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return not (self._waiting or self._current or self._dropped)

    def _drop(self, kind: str) -> None:
        task, self._waiting = self._waiting, None
        if task is not None:
            task.tell("abandoned" if kind == "abandoned" else "superseded", final=True)
            self._dropped.append(task)  # the folder is looked at by the thread that may wait for a disk
            self._changed.notify()

    def run(self) -> None:
        """Work for ever; the thread's own function."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._dropped)
                self._current, self._waiting = self._waiting, None
                dropped = list(self._dropped)
            self._page.show(Progress(0, 0))
            self._page.begin(Lane.IMAGE)
            for task in dropped:
                give_up(task.request.folder, task.request.shard, "superseded")
            if self._current is not None:
                if self._finish_politely(self._current):
                    self._hand_over(self._current)
                else:
                    self._current.end_claim()
            with self._changed:
                self._current = None
                del self._dropped[: len(dropped)]
            self._page.end(Lane.IMAGE)

    def _finish_politely(self, task: Task) -> bool:
        """``_finish``; a large image that no caller waits for, in a low-priority thread."""
        if task.request.urgent or size_of(task.request.image) < POLITE_BYTES:
            return self._finish(task)
        done: list[bool] = []
        do_politely(lambda: done.append(self._finish(task)))
        return done == [True]

    def _finish(self, task: Task) -> bool:
        """Whether the image is durable; other ends are reported. Retries errors that may pass by themselves."""
        told: set[int] = set()
        tries = 0
        while True:
            try:
                task.leave_if_stopped()
                size_bytes = write_durably(task, Pacing(task, self._page), self._images)
            except Left as left:
                reason = "superseded"
                task.tell(left.kind, final=True, phase=task.phase, text=left.text)
                if left.is_lost:
                    return False
            except OSError as error:
                passes = error.errno in PASSING
                if passes and self._waiting is None:
                    if error.errno not in told:
                        task.tell_failure(error, final=False)
                    told.add(error.errno or 0)
                    self._rest(task, PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                    tries += 1
                    continue
                if passes:
                    reason = "superseded"
                    task.tell("superseded", final=True, phase=task.phase, errno=error.errno or 0, text=str(error))
                else:
                    reason = str(error)
                    task.tell_failure(error, final=True)
            except StorageError as error:
                reason = error.what
                task.tell_failure(error, final=True)
            except Exception as error:
                log.exception("%s failed while %s", task.request.identity.folder_name, task.phase)
                reason = repr(error)
                task.tell_failure(error, final=True)
            else:
                task.tell("written", final=task.request.commit is None, size_bytes=size_bytes)
                return True
            give_up(task.request.folder, task.request.shard, reason)
            return False

    def _rest(self, task: Task, pause_s: float) -> None:
        """Until the pause is over, or there is something newer to do."""
        for _ in range(int(pause_s * 4)):
            if task.leave or self._waiting is not None or task.woken.wait(0.25):
                break
            self._page.tick(Lane.IMAGE)
        task.woken.clear()
