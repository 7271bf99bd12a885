"""What the supervisor has seen of an attempt's workers, and what it tells the run folder about it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft.launch.channel import Message
from slurmft.launch.heartbeat import State
from slurmft.policy.judge import WorkerEnd
from slurmft.policy.verdict import Action
from slurmft.storage.journal import Event, Journal
from slurmft.storage.run_folder import Attempt, RunFolder


class Observations:
    """Newest facts of every rank, and how those that have ended did."""

    def __init__(self, run: RunFolder, journal: Journal, attempt: Attempt, world_size: int) -> None:
        self._run, self._journal, self._attempt, self._world_size = run, journal, attempt, world_size
        self._ranks: dict[int, Message] = {}
        self._first_step_seen = False
        self.ends: dict[int, WorkerEnd] = {}

    @property
    def all_ended(self) -> bool:
        """Every rank's end has been seen."""
        return len(self.ends) == self._world_size

    @property
    def any_started(self) -> bool:
        """Some agent has reported workers."""
        return bool(self._ranks)

    def reached(self) -> tuple[int, int]:
        """First and newest step of the attempt, as far as its ranks have told; zeros before."""
        told = [facts for facts in self._ranks.values() if facts["resumed"] >= 0]
        if not told:
            return 0, 0
        return max(facts["resumed"] for facts in told), max(facts["step"] for facts in told)

    def saved(self) -> int | None:
        """Newest step that every rank has saved; None when there is none."""
        steps = [facts["saved"] for facts in self._ranks.values() if facts["attached"]]
        return min(steps) if len(steps) == self._world_size and min(steps) >= 0 else None

    def all_answered(self, tick: int) -> bool:
        """Every rank has done what was agreed for ``tick``."""
        return bool(self._ranks) and all(facts["answered"] >= tick for facts in self._ranks.values())

    def note_progress(self, ranks: Sequence[Message]) -> None:
        """Take in one agent's report."""
        self._ranks.update({facts["rank"]: facts for facts in ranks})
        self._note_first_step()

    def note_exit(self, host: str, message: Message) -> WorkerEnd:
        """Take in the end of one worker."""
        rank = int(message["rank"])
        self.note_progress([message])
        end = self.ends[rank] = WorkerEnd(
            rank=rank,
            node=host,
            code=message["code"],
            attached=message["attached"],
            stopped=message["state"] == State.STOPPED,
            finished=message["state"] == State.FINISHED,
            killed=message["killed"],
            error=_error_in(self._run.verdicts / f"{self._attempt}.rank-{rank}.json"),
            step=message["step"],
        )
        return end

    def write_progress(self) -> None:
        """Replace the run's progress report; nothing before the first rank has reported.

        Raises:
            OSError: the run folder cannot be written.
        """
        if not self._ranks:
            return
        ranks = self._ranks.values()
        if not any(facts["attached"] for facts in ranks):
            # a script that does not use the session says nothing about its steps
            self._run.write_progress(at=time.time(), attempt=str(self._attempt), state="running")
            return
        metric = self._ranks.get(0, {}).get("metric", math.nan)
        self._run.write_progress(
            at=time.time(),
            attempt=str(self._attempt),
            step=max(facts["step"] for facts in ranks),
            until=max(facts["until"] for facts in ranks),
            saved=max(facts["saved"] for facts in ranks),
            state=State(min(facts["state"] for facts in ranks)).name.lower(),
            metric=metric if math.isfinite(metric) else None,
        )

    def _note_first_step(self) -> None:
        times = [facts["first_step_at"] for facts in self._ranks.values()]
        if self._first_step_seen or len(times) < self._world_size or min(times) <= 0:
            return
        self._first_step_seen = True
        resumed = max(facts["resumed"] for facts in self._ranks.values())
        facts = since_last_stop(self._journal.read(), max(times))
        self._journal.append("first step", resumed_from=resumed, **facts)


def since_last_stop(events: Sequence[Event], first_step_at: float) -> dict[str, Any]:
    """Seconds from the signal that asked for the newest stop to the first step after it.

    Empty when the newest end of an attempt was none that continues by itself.
    """
    decisions = [event for event in events if event.event == "decision"]
    stops = [event for event in events if event.event == "stop requested"]
    if not decisions or not stops or decisions[-1].details.get("action") != Action.CONTINUE:
        return {}
    if decisions[-1].attempt != stops[-1].attempt:
        return {}
    seconds = round(first_step_at - stops[-1].details["signal_at"], 3)
    return {"seconds_since_stop_request": seconds, "stop_of_attempt": stops[-1].attempt}


def _error_in(path: Path) -> str:
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["traceback"].strip().splitlines()
    except (OSError, ValueError, KeyError, AttributeError):
        return ""
    return str(lines[-1])[:500] if lines else ""
