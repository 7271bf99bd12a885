"""One kept folder, from its restore to its last upload, in a thread of its own: another one's store may be silent."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)

from slurmft.config.sync import SyncConfig
from slurmft.errors import Fenced, StorageError, StorageUnavailable
from slurmft.policy.synced_folders import Choice
from slurmft.sync.record import Record
from slurmft.sync.restoring import newest, restore
from slurmft.sync.stores import Store, open_store
from slurmft.sync.uploading import Uploader, begin

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
PATIENCE_S = 60.0
"""How long one upload waits for files to come to rest."""

SILENT_S = 120.0
"""A regular upload that has sent nothing for so long has failed, as far as is told: its store may hang for ever."""

Say = Callable[[Mapping[str, Any]], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the agent wants done. ``number``: comes back in the answer. ``place``: of the node among the run's."""

    action: str
    number: int
    run: str = ""
    place: int = 0
    generation: int = 0
    within_s: float = 0.0


class KeptFolder:
    """Carries out orders, and uploads in between.

    Args:
        say: sends a message to the agent; from any thread.
    """

    def __init__(self, config: SyncConfig, index: int, say: Say) -> None:
        self._config, self._index, self._say = config, index, say
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._wanted = threading.Event()
        """There is an order: whatever waits for a better time gives way."""

        self._order: Order | None = None
        self._uploader: Uploader | None = None
        self._next_s: float | None = None
        self._failing = self._told_first = False
        self._moved_s: float | None = None
        """When the regular upload that is under way has last come on; None where none is."""

        threading.Thread(target=self._work, daemon=True, name=f"sync {index}").start()
        threading.Thread(target=self._watch, daemon=True, name=f"sync {index} watch").start()

    def take(self, order: Order) -> None:
        """Have it carried out; returns at once."""
        self._orders.put(order)
        self._wanted.set()

    def _work(self) -> None:
        while True:
            try:
                wait_s = None if self._next_s is None else max(0.0, self._next_s - time.monotonic())
                order = self._orders.get(timeout=wait_s)
            except queue.Empty:
                self._upload_regularly()
                continue
            if self._orders.empty():
                self._wanted.clear()
            problem = ""
            try:
                self._carry_out(order)
            except StorageError as error:
                problem = str(error)
            self._say({"kind": "done", "folder": self._index, "number": order.number, "problem": problem[:2000]})

    def _watch(self) -> None:
        """Tell of a store that does not answer: the thread that waits for it cannot."""
        while True:
            time.sleep(SILENT_S / 8)
            moved_s = self._moved_s
            if moved_s is not None and not self._failing and (silent_s := time.monotonic() - moved_s) > SILENT_S:
                what = f"{self._config.path} is not uploaded: {self._config.url} has not answered for {silent_s:.0f} s"
                self._fail(StorageUnavailable(what, hint="training goes on, and the upload when it answers"))

    def _moves(self) -> None:
        self._moved_s = time.monotonic()

    def _carry_out(self, order: Order) -> None:
        if order.action == "upload":
            self._upload_last(order.within_s)
            return
        self._order, self._uploader, self._next_s = order, None, None
        self._failing = self._told_first = False
        if order.action == "restore":
            self._restore(order)
        if self._stores:
            self._next_s = time.monotonic() + self._config.frequency

    @property
    def _stores(self) -> bool:
        """This node's folder is stored."""
        return self._order is not None and (self._config.each_node or self._order.place == 0)

    def _store(self, order: Order) -> Store:
        place = f"node-{order.place}" if self._config.each_node else "lead"
        return open_store(self._config.url, f"{order.run}/{place}")

    def _restore(self, order: Order) -> None:
        began_s = time.monotonic()
        for attempt in self._retrying(within_s=self._config.restore_timeout_s):
            with attempt:
                store = self._store(order)
                if self._stores:
                    begin(store, order.generation)
                found = newest(store, order.run)
                record = Record(self._config.path)
                with record.locked():
                    done = restore(
                        record, store, found, run=order.run, generation=order.generation,
                        follows_lead=not self._stores, exclude=self._config.exclude,
                    )  # fmt: skip
        what = {Choice.KEEP: "kept", Choice.RESTORE: "restored", Choice.SET_ASIDE: "set aside"}[done.choice]
        aside = f"; what was there is in {done.aside}" if done.aside else ""
        self._tell(what, done.reason + aside, version=done.version, files=done.files, size=done.size_bytes,
                   began_s=began_s)  # fmt: skip

    def _upload_regularly(self) -> None:
        self._moves()
        try:
            for attempt in self._retrying(within_s=None):
                with attempt:
                    self._moves()
                    self._upload(at_end=False, patience_s=PATIENCE_S)
        except Fenced as error:
            self._fail(error)
            self._next_s = None
            return
        except StorageError as error:
            self._fail(error)
        finally:
            self._moved_s = None
        self._next_s = time.monotonic() + self._config.frequency

    def _upload_last(self, within_s: float) -> None:
        """The workers have ended: what is there now is what the next attempt is to find."""
        self._next_s = None
        if not self._stores:
            return
        try:
            for attempt in self._retrying(within_s=within_s):
                with attempt:
                    self._upload(at_end=True, patience_s=within_s)
        except StorageError as error:
            self._fail(error)
            raise
        finally:
            self._moved_s = None

    def _upload(self, *, at_end: bool, patience_s: float) -> None:
        if (order := self._order) is None:
            return
        began_s = time.monotonic()
        if self._uploader is None:
            store = self._store(order)
            self._uploader = Uploader(
                store, Record(self._config.path), run=order.run, generation=order.generation,
                newest=newest(store, order.run), keep=self._config.keep, exclude=self._config.exclude,
                bytes_per_s=self._config.bandwidth_mb_s * 1e6, moves=self._moves,
            )  # fmt: skip
        found = self._uploader.upload(at_end=at_end, patience_s=patience_s)
        if self._failing:
            self._failing = False
            self._tell("works again", "")
        if found is not None and (at_end or not self._told_first):
            self._told_first = True
            self._tell("uploaded", "at the end" if at_end else "the first of this attempt", version=str(found.version),
                       files=len(found.files), size=found.size_bytes, began_s=began_s)  # fmt: skip

    def _retrying(self, within_s: float | None) -> Retrying:
        stop = stop_when_event_set(self._wanted)
        return Retrying(
            retry=retry_if_exception_type(StorageUnavailable),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S) + wait_random(0, FIRST_PAUSE_S),
            stop=stop if within_s is None else stop | stop_after_delay(within_s),
            sleep=sleep_using_event(self._wanted),
            before_sleep=self._before_sleep,
            reraise=True,
        )

    def _before_sleep(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, StorageError):
            self._uploader = None  # what is stored is looked up again
            self._fail(error)

    def _fail(self, error: StorageError) -> None:
        """Say so once in a row of failures."""
        if not self._failing:
            log.warning("%s", error.what)
            self._tell("failed", str(error))
        self._failing = True

    def _tell(
        self, what: str, reason: str, *, version: str = "", files: int = 0, size: int = 0, began_s: float | None = None
    ) -> None:
        took_s = 0.0 if began_s is None else time.monotonic() - began_s
        self._say(
            {"kind": "event", "what": what, "path": str(self._config.path), "reason": reason[:2000],
             "version": version, "files": files, "bytes": size, "took_s": round(took_s, 3)}
        )  # fmt: skip
