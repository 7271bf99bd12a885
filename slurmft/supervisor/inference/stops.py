"""Stops of an inference attempt: nothing new is leased, what is in flight is finished in time or given back."""

from __future__ import annotations

import asyncio
import time

from slurmft.config.config import RunConfig
from slurmft.inference.coordinator import Coordinator
from slurmft.inference.serving.roster import Roster
from slurmft.ipc.calls import Drain
from slurmft.ipc.channel import UNANSWERED
from slurmft.policy.timing.grace import REQUEUE_COST_S
from slurmft.policy.verdicts.verdict import Cause
from slurmft.storage.events import EventName
from slurmft.supervisor.fleet.agents import AgentPool
from slurmft.supervisor.job_state import SlurmsWord
from slurmft.supervisor.signals import log_signal
from slurmft.supervisor.start import Start
from slurmft.system.background import Background

COMMIT_MARGIN_S = 3.0
"""Kept free at the end of a stop, for the last commits."""

LOOK_S = 0.02


class InferenceStops:
    """Carries out at most one stop; the first one counts, but for a user's wish to end the run.

    Args:
        over: set when the stop is complete.
    """

    def __init__(
        self, config: RunConfig, start: Start, pool: AgentPool, slurm: SlurmsWord, *, over: asyncio.Event,
        background: Background,
    ) -> None:  # fmt: skip
        self._section, self._journal, self._cluster = config.preemption, start.journal, start.cluster
        self._pool, self._slurm, self._over, self._background = pool, slurm, over, background
        self.coordinator: Coordinator | Roster | None = None
        """None before there is anything to stop."""

        self.joined: set[int] = set()
        """Nodes that take part."""

        self.drained: set[int] = set()
        """Those of them that have finished, and reported everything."""

        self.planned: Cause | None = None
        self.reason = ""
        self.ends_at_s: float | None = None
        """Monotonic time at which Slurm will have ended the job, as far as a stop has shown it."""

    def on_own_signal(self, name: str) -> None:
        """The supervisor itself got a signal."""
        if self._cluster.name == "local" and name == "SIGINT":
            self.stop_for(Cause.STOPPED_BY_USER, "stopped with Ctrl-C")
        else:
            self._background.start(self._judge_own_signal(name))

    def on_signal(self, name: str, where: str) -> None:
        """A signal that asks for a stop was seen ``where``; further ones of the row change nothing."""
        if self.planned is None:
            self.planned, self.reason = Cause.SIGNALLED, f"{name} at {where}"
            log_signal("Received signal %d, initiating graceful stop", name)
            self._background.start(self._stop_for_signal(time.monotonic()))

    def stop_for(self, cause: Cause, reason: str) -> None:
        """Begin a stop that has no deadline of Slurm's."""
        if self.planned is None:
            self.planned, self.reason = cause, reason
            self._background.start(self._drain(self._section.stop_timeout_s))
        elif cause is Cause.STOPPED_BY_USER:  # a stop is under way; only the later action changes
            self.planned, self.reason = cause, reason
            self._journal.append(EventName.WILL_NOT_CONTINUE, reason=reason)

    async def _judge_own_signal(self, name: str) -> None:
        await self._slurm.is_ending()
        self.on_signal(name, "the supervisor")

    async def _stop_for_signal(self, at_s: float) -> None:
        if isinstance(self.coordinator, Coordinator):  # an endpoint goes on while a successor may come
            self.coordinator.stop()  # at once; Slurm's answers only say why, and how long there is
        cause, left_s = await self._slurm.cause_and_time(self._section, at_s)
        if self._slurm.outside is None and self._cluster.name != "local":
            self._background.start(self._slurm.look_again())
        if self.planned is not Cause.STOPPED_BY_USER:
            self.planned = cause
        if cause in (Cause.PREEMPTED, Cause.TIME_LIMIT):
            self.ends_at_s = at_s + left_s + REQUEUE_COST_S
        await self._drain(left_s)

    async def _drain(self, left_s: float) -> None:
        cause = self.planned
        self._journal.append(EventName.STOP_REQUESTED, cause=cause.value if cause else "", reason=self.reason,
                             signal_at=time.time(), seconds_left=round(left_s, 3))  # fmt: skip
        if self.coordinator is not None and self.joined:
            self.coordinator.stop()
            within_s = max(0.5, left_s - COMMIT_MARGIN_S)
            deadline_s = time.monotonic() + within_s
            self._tell_to_drain(within_s)
            # Slurm's own end may become known only now, and is sooner
            while (
                not self._over.is_set()
                and self.joined - self.drained
                and (time.monotonic() < min(deadline_s, self._slurm.kill_at_s))
            ):
                await asyncio.sleep(LOOK_S)
            await self.coordinator.commit_now(COMMIT_MARGIN_S)
            self._journal.append(EventName.STOP_SAVED, step=self.coordinator.requests.done)
        self._over.set()

    def _tell_to_drain(self, within_s: float) -> None:
        drain = Drain(within_s=within_s).as_call(UNANSWERED)
        for link in [self._pool.links.get(node) for node in self.joined]:
            if link is not None and link.channel is not None:
                link.channel.send(drain)
