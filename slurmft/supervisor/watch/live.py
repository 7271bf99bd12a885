"""What each rank does now, for people and monitoring: asked of the agents every few seconds, written to live.json."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence

from slurmft.config.config import RunConfig
from slurmft.ipc.worker_facts import WorkerFacts
from slurmft.policy.timing.hangs import Limits, WorkerLook, used
from slurmft.policy.verdicts.verdict import BUDGETED, Verdict
from slurmft.storage.history import live_view
from slurmft.storage.history.live_view import LiveView
from slurmft.supervisor.budget import budget_of
from slurmft.supervisor.start import Start
from slurmft.supervisor.watch.hangs import Hangs
from slurmft.supervisor.watch.observations import Observations
from slurmft.supervisor.watch.slow_nodes import SlowNodes

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
            live_view.write(self._start.run.path, view)

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
            hang_used=_rounded(_most_used(looks, limits)),
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
    left = []
    for cause in BUDGETED:
        verdict = Verdict(cause=cause, reason="", first_step=first, saved_step=saved)
        budget = budget_of(start.history, verdict, config, str(start.cluster.attempt))
        retries = max(0, budget.max_failures - budget.failures_so_far)
        restarts = max(0, budget.max_restarts - budget.restarts_so_far)
        left.append(retries + restarts)
    return min(left)


def _most_used(looks: Sequence[WorkerLook], limits: Limits) -> float | None:
    return max((used(look, limits) for look in looks), default=None)


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
