"""What each rank does now, for people and monitoring: asked of the agents every few seconds, written to live.json."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from slurmft.config.run import RunConfig
from slurmft.ipc.messages import WorkerFacts
from slurmft.policy.hangs import WorkerLook, used
from slurmft.policy.verdict import BUDGETED, Verdict
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import LiveView, RunFolder
from slurmft.supervisor.cluster import Start
from slurmft.supervisor.hangs import Hangs
from slurmft.supervisor.observations import Observations, budget_after, past_ends
from slurmft.supervisor.stops import SlowNodes

# --- The supervisor's side of the process that publishes metrics and tells events (``reporting.metrics``) ---

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


# --- The journal's newest look at the ranks, for people: culprits, victims, and where the files lie ---

"""Its name in the journal."""

MAX_SHOWN = 8
"""Culprits that are shown in full."""


def look_told(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and texts, the attempt first; empty where there was no look at the ranks.

    The journal may be damaged or of a newer slurmft: what does not fit is left out.
    """
    newest = next((event for event in reversed(events) if event.event == EventName.LAST_LOOK), None)
    if newest is None:
        return []
    facts = newest.details
    culprits = [each for each in _listed(facts.get("culprits")) if isinstance(each, Mapping)]
    rows = [row for each in culprits[:MAX_SHOWN] for row in _culprit(each)]
    if len(culprits) > MAX_SHOWN:
        rows.append(("culprit", f"and {len(culprits) - MAX_SHOWN} more"))
    if not culprits:
        rows.append(("culprit", f"not found: {facts.get('undecided') or 'no reason given'}"))
    rows += [("victims", str(each)) for each in _listed(facts.get("victims"))]
    rows += [("collective", str(each)) for each in _listed(facts.get("collectives"))]
    rows.append(("files", str(facts.get("folder") or "")))
    return [("attempt", newest.attempt), *((name, text) for name, text in rows if text.strip())]


def _culprit(each: Mapping[str, Any]) -> list[tuple[str, str]]:
    reason = str(each.get("reason", ""))
    where = f"rank {each.get('rank', '?')} on {each.get('node') or '?'}"
    step = f" (step {each['step']})" if type(each.get("step")) is int and " at step " not in reason else ""
    sections = " > ".join(map(str, _listed(each.get("sections"))))
    return [
        ("culprit", f"{where}{step}: {reason}"),
        ("section", sections),
        *(("stack", str(call)) for call in _listed(each.get("stack"))),
    ]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


# --- live ---

PAUSE_S = 2.0
AGENTS_PER_S = 100
"""So many agents are asked in a second: with 2,000 of them a look comes every 20 s."""


class Live:
    """One attempt's looks. A look never waits for the run folder."""

    def __init__(self, config: RunConfig, start: Start, seen: Observations, hangs: Hangs, slow: SlowNodes) -> None:
        self._config, self._start, self._seen = config, start, seen
        self._hangs, self._slow = hangs, slow
        self._before: dict[int, tuple[int, float]] = {}
        self._step_s: dict[int, float] = {}
        self._left: dict[bool, int] = {}
        self._writing: asyncio.Future[None] | None = None

    async def watch(self) -> None:
        """Look, until cancelled."""
        while True:
            await asyncio.sleep(max(PAUSE_S, self._config.nodes / AGENTS_PER_S))
            if self._writing is not None and not self._writing.done():
                continue  # the run folder is silent: its thread has other work to do first
            view = self._view(await self._hangs.looks())
            self._writing = asyncio.wrap_future(
                self._start.thread.submit(lambda view=view: self._write(view))  # type: ignore[misc]
            )

    def _write(self, view: LiveView) -> None:
        with contextlib.suppress(OSError):
            run_folder.write(self._start.run.path, view)

    def _view(self, looks: Sequence[WorkerLook]) -> LiveView:
        facts, at = self._seen.ranks(), {look.rank: look for look in looks}
        world = range(self._seen.world_size)
        self._note_steps(facts)
        own = self._slow.work_s()
        newest = [_newest(at.get(rank)) for rank in world]
        limits = self._hangs.limits_now()
        signs = [look.quiet_s if look.heartbeat_s is None else look.heartbeat_s for look in looks]
        return LiveView(
            at=time.time(),
            attempt=str(self._start.cluster.attempt),
            steps=[facts[rank].step if rank in facts else None for rank in world],
            step_s=[_rounded(own.get(rank, self._step_s.get(rank))) for rank in world],
            nodes=[at[rank].node if rank in at else "" for rank in world],
            sections=[name for name, _ in newest],
            section_s=[_rounded(held_s) for _, held_s in newest],
            heartbeat_s=_rounded(max(signs, default=None)),
            hang_used=_rounded(max((used(look, limits) for look in looks), default=None)),
            restarts_left=self._restarts_left(),
            save_interval_steps=(self._config.checkpoint.interval == "steps" and self._config.checkpoint.interval_steps)
            or None,
            tiers=_tiers(facts.values()),
        )

    def _note_steps(self, facts: Mapping[int, WorkerFacts]) -> None:
        now_s = time.monotonic()
        for rank, each in facts.items():
            step, at_s = self._before.get(rank, (each.step, now_s))
            if each.step > step:
                self._step_s[rank] = (now_s - at_s) / (each.step - step)
            if each.step != step or rank not in self._before:
                self._before[rank] = each.step, now_s

    def _restarts_left(self) -> int:
        first, saved = self._seen.reached()[0], self._seen.saved()
        progressed = saved is not None and saved > first
        if progressed not in self._left:
            self._left[progressed] = least_left(self._config, self._start, first, saved)
        return self._left[progressed]


def least_left(config: RunConfig, start: Start, first: int, saved: int | None) -> int:
    """Failures of one kind that the run survives yet without further progress: the least of all kinds."""
    left, past = [], past_ends(start.history)
    for cause in BUDGETED:
        verdict = Verdict(cause=cause, reason="", first_step=first, saved_step=saved)
        budget = budget_after(past, verdict, config, str(start.cluster.attempt))
        retries = max(0, budget.max_failures - budget.failures_so_far)
        restarts = max(0, budget.max_restarts - budget.restarts_so_far)
        left.append(retries + restarts)
    return min(left)


def _newest(look: WorkerLook | None) -> tuple[str, float | None]:
    if look is None:
        return "", None
    return look.sections[-1] if look.sections else ("", look.quiet_s)


def _tiers(facts: Iterable[WorkerFacts]) -> dict[str, str]:
    ranks = list(facts)
    saved, durable = min((each.saved for each in ranks), default=-1), max((each.durable for each in ranks), default=-1)
    found = {"memory": saved, "checkpoint directory": durable}
    return {name: f"step {step}" for name, step in found.items() if step >= 0}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)
