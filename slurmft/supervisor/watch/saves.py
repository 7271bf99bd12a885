"""Failed saves, and copies of steps in memory, as the supervisor reports them: in journal, log and progress report."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from slurmft.ipc.worker_facts import WorkerFacts
from slurmft.policy.checkpoints.failing_saves import FailingSaves, News
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event, Journal

log = logging.getLogger(__name__)


class SaveWatch:
    """Looks at rank 0's reports: all ranks fail alike.

    Args:
        most: failures in a row after which it warns loudly.
    """

    def __init__(self, journal: Journal, most: int) -> None:
        self._journal, self._failing = journal, FailingSaves(most)
        self._reason = ""
        self._saved = -1
        self._copied: int | None = None
        self._copy_interval = 0

    def note(self, lead: WorkerFacts) -> None:
        """Take in a report."""
        news = self._failing.note(failures=lead.save_failures, done=lead.saves)
        self._saved = max(self._saved, lead.saved)
        self._note_copies(lead)
        if news in (News.FAILED, News.KEEP_FAILING):
            self._reason = _words(lead.save_errno)
            self._journal.append(
                EventName.SAVE_FAILED, step=lead.step, reason=self._reason, failures=lead.save_failures
            )
        if news is News.KEEP_FAILING:
            log.error("SAVES KEEP FAILING: %s", self._in_words(lead))
            self._journal.append(EventName.SAVES_KEEP_FAILING, step=lead.step, reason=self._in_words(lead),
                                 in_a_row=self._failing.in_a_row)  # fmt: skip
        elif news is News.WORK_AGAIN:
            log.warning("saves work again: step %d is saved", lead.saved)
            self._journal.append(EventName.SAVES_WORK_AGAIN, step=lead.step, saved=lead.saved)

    def facts(self) -> dict[str, Any]:
        """For the progress report: failures in a row and their reason, while there are any; the newest step in memory
        where steps are copied."""
        copied = {} if self._copied is None else {"copied": self._copied}
        if not self._failing.in_a_row:
            return copied
        return {"failed_saves": self._failing.in_a_row, "save_problem": self._reason, **copied}

    def _note_copies(self, lead: WorkerFacts) -> None:
        self._copied = lead.copied if lead.copied is not None else self._copied
        if (interval := lead.copy_interval or 0) > self._copy_interval:
            self._copy_interval = interval
            share = round((lead.copy_share_ppm or 0) / 1e6, 4)
            log.warning("steps are copied every %d steps now: it took %.1f %% of their time", interval, 100 * share)
            self._journal.append(EventName.STEP_COPIES_SPACED_OUT, step=lead.step, interval=interval, share=share)

    def _in_words(self, lead: WorkerFacts) -> str:
        newest = f"the newest checkpoint of this attempt is of step {self._saved}"
        saved = newest if self._saved >= 0 else "this attempt has saved nothing"
        return f"{self._failing.in_a_row} in a row, {self._reason}; {saved}, and the run is at step {lead.step}"


def saves_told(events: Sequence[Event]) -> list[tuple[str, str]]:
    """What ``slurmft explain`` shows of saves that keep failing, as names and texts: the attempt, then the facts.

    Empty when saves work again.
    """
    for event in reversed(events):
        if event.event == EventName.SAVES_KEEP_FAILING:
            text = str(event.details.get("reason", ""))
            return [("attempt", event.attempt), ("problem", text), ("remedy", _REMEDY)]
        if event.event == EventName.SAVES_WORK_AGAIN or (
            event.event == EventName.DECISION and event.details.get("action") == "finish"
        ):
            return []
    return []


_REMEDY = "free space or repair the filesystem; the run saves at its next try, or at once with slurmft save"


def _words(number: int) -> str:
    return os.strerror(number) if number > 0 else "for an unknown reason"
