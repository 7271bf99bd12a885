"""Stops of an attempt: requests for one, its deadline, and the save at an agreed step before it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.config.sections import PreemptionConfig
from slurmft.ipc.messages import Commit, LookNow, Looks, PassOnTerm, Propose, Withdraw
from slurmft.ipc.pages import StopAction
from slurmft.policy.grace import (
    NOTICE_S,
    REQUEUE_COST_S,
    JobTimes,
    SlurmClock,
    Terms,
    cause_of_signal,
    is_limit_usable,
    seconds_for_stop,
    seconds_in_kill_wait,
)
from slurmft.policy.stop import (
    ByThemselves,
    Finishing,
    Look,
    NothingToSave,
    Plan,
    StopAt,
    all_hold,
    inside_an_evaluation,
    passed,
    plan_stop,
    step_of,
)
from slurmft.policy.verdict import Cause
from slurmft.storage.journal import EventName, Journal
from slurmft.supervisor.agents import PEER_GRACE_S, AgentLost, AgentPool, kill_workers
from slurmft.supervisor.cluster import Cluster, Start
from slurmft.supervisor.guardian import log_signal
from slurmft.supervisor.hangs import look_at_all
from slurmft.supervisor.observations import Observations
from slurmft.system.background import Background

# --- Slurm's state of the supervisor's own job: whether and why Slurm ends it, and how long is left ---

LOOK_AGAIN_S = 1.0


class SlurmsWord:
    """Asks Slurm in threads, so that one that does not answer blocks nothing; answers are remembered."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self._cluster, self._journal = cluster, journal
        self.terms = Terms(SlurmClock(time.time(), time.monotonic()))
        self.outside: tuple[Cause, str] | None = None
        """Why Slurm ends the job; None while it does not, or that is unknown."""

        self.kill_at_s = math.inf
        """Monotonic time by which the workers must be gone, once Slurm ends the job."""

        self.on_ending: Callable[[], None] = lambda: None
        """Called once, when it has become known that Slurm ends the job."""

    async def read_terms(self) -> None:
        """Learn Slurm's clock and how long it lets a job live that it ends."""
        self.terms = await asyncio.to_thread(self._cluster.terms)

    async def times(self) -> JobTimes:
        """When the job began and will end; unknown when Slurm does not answer."""
        return await asyncio.to_thread(self._cluster.times)

    async def is_ending(self) -> bool:
        """Whether Slurm ends the job from outside."""
        if self.outside is None:
            why = await asyncio.to_thread(self._cluster.why_ending)
            if why is not None and self.outside is None:  # two may have asked
                self.outside = why
                self._journal.append(EventName.ENDED_FROM_OUTSIDE, reason=why[1])
                self.kill_at_s = time.monotonic() + seconds_in_kill_wait(self.terms.kill_wait_s)
                self.on_ending()
        return self.outside is not None

    async def cause_and_time(self, section: PreemptionConfig, at_s: float) -> tuple[Cause, float]:
        """Why a signal that came at ``at_s`` (monotonic) asks for a stop, and the seconds it has from then on."""
        times, ending = await asyncio.gather(self.times(), self.is_ending())
        lead_s = float(section.signal_lead_s)
        if self._cluster.name == "local":
            return Cause.PREEMPTED, section.stop_timeout_s
        if ending and self.outside is not None:
            return self.outside[0], max(1.0, self.kill_at_s - at_s)
        now = self.terms.clock.at(at_s)
        cause = cause_of_signal(times, now=now, lead_s=lead_s)
        left_s = seconds_for_stop(times, cause=cause, now=now, lead_s=lead_s, timeout_s=section.stop_timeout_s)
        return cause, left_s

    async def look_again(self) -> None:
        """Ask once more: Slurm signals a job a moment before its state shows the end."""
        await asyncio.sleep(LOOK_AGAIN_S)
        await self.is_ending()


# --- stop agreement ---
# The stop agreement, the supervisor's side: look, propose, confirm, commit. See ``policy.stop``.

MAX_TRIES = 30
HOLD_POLL_S = 0.01

log = logging.getLogger(__name__)


async def agree(pool: AgentPool, action: StopAction) -> Plan:
    """Make all ranks act at one tick that none of them has passed.

    Returns the committed ``StopAt``, or why there is none. The workers keep training until the commit, but for those
    that have reached the proposal and wait for the answer.

    Raises:
        AgentLost: an agent does not answer; workers may be waiting at the proposal, and only their end frees them.
    """
    plan = plan_stop(_looks(await pool.call_all(LookNow())))
    for tries in range(1, MAX_TRIES):
        if not isinstance(plan, StopAt):
            await pool.call_all(Withdraw())
            return plan
        looks = _looks(await pool.call_all(Propose(tick=plan.tick, action=int(action))))
        while inside_an_evaluation(plan.tick) and _undecided(looks, plan.tick):
            # a rank may leave its evaluation without ever coming to this tick: no rank acts before all are there
            await asyncio.sleep(HOLD_POLL_S)
            looks = _looks(await pool.call_all(LookNow()))
        if not passed(looks, plan.tick):
            await pool.call_all(Commit(tick=plan.tick))
            return plan
        log.info("step boundaries come faster than the agreement; trying further ahead (try %d)", tries)
        plan = plan_stop(looks, tries)
    raise RuntimeError(f"no agreement after {MAX_TRIES} tries although the distance doubled each time")


def _undecided(looks: Sequence[Look], tick: int) -> bool:
    return not passed(looks, tick) and not all_hold(looks, tick) and all(look.alive for look in looks)


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as the journal records it."""
    if isinstance(plan, StopAt):
        return {"plan": "save at step", "step": step_of(plan.tick)}
    return {"plan": {NothingToSave: "nothing to save", Finishing: "the workers are finishing"}.get(
        type(plan), "the workers stop by themselves")}  # fmt: skip


def _looks(replies: Sequence[Looks]) -> list[Look]:
    return [Look(*look) for reply in replies for look in reply.looks]


# --- Stops of an attempt: requests for one, its deadline, and the save at an agreed step before it ---

POLL_S = 0.25
CAUSE_PATIENCE_S = 15.0
LIMIT_LOOK_S = 30.0
"""At least so long between two looks at the time limit, which may change."""

LAST_S = 10.0
"""Before the time of a stop is up, workers without a session that know another signal get SIGTERM, too."""

SHARE_OF_WORKERS = 0.7
"""Of the time of a stop, where folders are kept (``sync:``); what they do not use is for the upload, too."""


class Stops:
    """Carries out at most one stop, and any number of saves on demand.

    Args:
        over: set when the attempt has ended; a stop sets it where there is nothing to wait for.
    """

    def __init__(
        self, config: RunConfig, start: Start, pool: AgentPool, seen: Observations, slurm: SlurmsWord,
        *, over: asyncio.Event, background: Background,
    ) -> None:  # fmt: skip
        self._section, self._journal, self._cluster = config.preemption, start.journal, start.cluster
        self._may_miss_notices = start.lease is not None
        self._pool, self._seen, self._slurm = pool, seen, slurm
        self._over, self.background = over, background
        self._folder = start.run.attempts / str(start.cluster.attempt)
        self._timer: asyncio.Timeout | None = None
        self._agreement = asyncio.Lock()
        self._told = asyncio.Event()
        """The journal has the stop, its cause and its deadline."""

        self._own_signals = 0
        self.began = False
        """The attempt's workers are being started; before, agents answer for those of the last one."""

        self.planned: Cause | None = None
        self.reason = ""
        self.ends_at_s: float | None = None
        """Monotonic time at which Slurm will have ended the job, as far as a stop has shown it."""

        self._share = SHARE_OF_WORKERS if config.sync else 1.0
        self._up_at_s = math.inf
        slurm.on_ending = self._hurry

    def time_is_up_s(self) -> float:
        """Monotonic time at which everything of this stop must be done; infinite while there is none."""
        return min(self._up_at_s, self._slurm.kill_at_s)

    def _workers_until(self, at_s: float, since_s: float) -> float:
        """The workers' share of the time until ``at_s``; the rest is for the upload of kept folders."""
        return at_s if math.isinf(at_s) else since_s + self._share * (at_s - since_s)

    async def cause_is_known(self) -> None:
        """Return when a stop that is under way has found out its cause, or takes too long to."""
        if self.planned is not None:  # a slow answer of Slurm must not lose the cause
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), CAUSE_PATIENCE_S)

    def on_own_signal(self, name: str) -> None:
        """The supervisor itself got a signal."""
        self._own_signals += 1
        if self._own_signals == 1:
            self.background.start(self._judge_own_signal(name))

    async def _judge_own_signal(self, name: str) -> None:
        """Slurm signals the batch step only when it ends the job; a user may at any time."""
        is_ctrl_c = name == "SIGINT" != self._section.signal
        if self._cluster.name == "local" and is_ctrl_c and self.planned is None:
            self.stop_for(Cause.STOPPED_BY_USER, "stopped with Ctrl-C")
        elif not await self._slurm.is_ending():
            self._own_signals = 0
            self.on_signal(name, "the supervisor")

    def on_signal(self, name: str, where: str) -> None:
        """A signal that asks for a stop was seen ``where``; further ones of the row change nothing."""
        if self.planned is None:
            self.planned = Cause.SIGNALLED  # remembered at once; the second one of a row must find it
            log_signal("Received signal %d, initiating graceful stop", name)
            self.background.start(self._stop_for_signal(name, where, time.monotonic()))
        elif self.planned is Cause.RESIZED:  # the save is under way; only the later action changes
            self.planned, self.reason = Cause.SIGNALLED, f"{name} at {where}"

    async def watch_limit(self) -> None:
        """With a standby: stop before the time limit without Slurm's notice, which is sent once.

        It may come while no supervisor lives, or not at all while the controller is away.
        """
        lead_s, end = float(self._section.signal_lead_s), math.inf
        if self._may_miss_notices:
            await self._slurm.read_terms()
        while self._may_miss_notices and self.planned is None:
            times = await self._slurm.times()
            if times.end is not None:  # else the one before holds
                is_of_limit = times.grace_s is None and is_limit_usable(times, lead_s=lead_s)
                end = times.end if is_of_limit else math.inf
            left_s = end - self._slurm.terms.clock.at(time.monotonic())
            if left_s <= 0:  # the job lives, so that clock is wrong
                left_s = math.inf
            until_s = left_s - lead_s + NOTICE_S
            if until_s <= 0 and self.planned is None:
                self.ends_at_s = time.monotonic() + left_s
                self.stop_for(Cause.TIME_LIMIT, "the time limit is near, and no notice has come",
                              within_s=max(1.0, left_s - REQUEUE_COST_S))  # fmt: skip
            await asyncio.sleep(LIMIT_LOOK_S if math.isinf(until_s) else min(until_s, max(LIMIT_LOOK_S, until_s / 2)))

    def on_request(self, kind: str, who: str) -> None:
        """Handle a request for KILL, REQUEUE or SAVE."""
        if kind == "KILL" and self.planned is not None:  # a stop is under way; only the later action changes
            self.planned, self.reason = Cause.STOPPED_BY_USER, f"stopped by {who}"
            self._journal.append(EventName.WILL_NOT_CONTINUE, reason=self.reason)
        elif kind == "REQUEUE" and self.planned is Cause.RESIZED:
            self.planned, self.reason = Cause.REQUEUED_BY_USER, f"requeued by {who}"
        elif self.planned is not None:
            return
        elif kind == "KILL":
            self.stop_for(Cause.STOPPED_BY_USER, f"stopped by {who}")
        elif kind == "REQUEUE":
            self.stop_for(Cause.REQUEUED_BY_USER, f"requeued by {who}")
        else:
            self.background.start(self._save_now(who))

    def on_notice(self, cause: Cause, reason: str, *, left_s: float) -> None:
        """A node will be gone in ``left_s`` seconds: stop before that, even if a stop is under way."""
        stop_s = max(1.0, left_s - REQUEUE_COST_S)
        if self.planned is None:
            self.stop_for(cause, reason, within_s=stop_s)
            return
        if (
            self.planned is Cause.RESIZED and cause is not Cause.RESIZED
        ):  # the save is under way; only the later action changes
            self.planned, self.reason = cause, reason
        self._end_by(time.monotonic() + stop_s)

    def stop_for(self, cause: Cause, reason: str, *, within_s: float = math.inf) -> None:
        """Begin a stop that has no deadline of Slurm's."""
        self.planned = cause
        stopping = asyncio.create_task(self._agreed_stop())
        left_s = min(within_s, self._section.stop_timeout_s)
        self.background.start(self._stop(cause, reason, stopping, at_s=time.monotonic(), left_s=left_s))

    def _hurry(self) -> None:
        self._end_by(self._slurm.kill_at_s)

    def _end_by(self, at_s: float) -> None:
        self._up_at_s = min(self._up_at_s, at_s)
        at_s = self._workers_until(at_s, time.monotonic())
        if self._timer is not None and (self._timer.when() or 0.0) > at_s:
            with contextlib.suppress(RuntimeError):  # its time was up meanwhile
                self._timer.reschedule(at_s)

    async def _stop_for_signal(self, name: str, where: str, at_s: float) -> None:
        # the save must not wait for Slurm's answers: they only say why, and how long there is
        stopping = asyncio.create_task(self._agreed_stop())
        cause, left_s = await self._slurm.cause_and_time(self._section, at_s)
        if self._slurm.outside is None and self._cluster.name != "local":
            self.background.start(self._slurm.look_again())
        if self.planned is Cause.STOPPED_BY_USER:  # asked for in the meantime
            cause = Cause.STOPPED_BY_USER
        if cause in (Cause.PREEMPTED, Cause.TIME_LIMIT):
            self.ends_at_s = at_s + left_s + REQUEUE_COST_S
        await self._stop(cause, f"{name} at {where}", stopping, at_s=at_s, left_s=left_s)
        log.info("exiting program after receiving %s.", name)

    async def _stop(
        self, cause: Cause, reason: str, stopping: asyncio.Task[None], *, at_s: float, left_s: float
    ) -> None:
        """Save at an agreed step and end the workers; by force when the time is up, which runs from ``at_s`` on."""
        at = time.time() - (time.monotonic() - at_s)
        if cause is not Cause.RESIZED:
            self.planned = cause
        self.reason = self.reason or reason
        self._journal.append(EventName.STOP_REQUESTED, cause=cause.value, reason=reason, signal_at=at,
                             seconds_left=round(left_s, 3))  # fmt: skip
        self._told.set()
        try:
            self._up_at_s = min(self._up_at_s, at_s + left_s)
            async with asyncio.timeout_at(self._workers_until(self.time_is_up_s(), at_s)) as self._timer:
                await stopping
                await self._over.wait()
            left_s = min(left_s, self._slurm.kill_at_s - at_s)
            if (facts := self._seen.save_of_stop(since_s=at_s, left_s=left_s)) is not None:
                self._journal.append(EventName.STOP_SAVED, **facts)
        except TimeoutError:
            took_s = time.monotonic() - at_s
            self._journal.append(EventName.STOP_OVERDUE, seconds=round(took_s, 3), **self._seen.unsaved_at_stop())
            log.error("THE SAVE OF THIS STOP DID NOT FINISH within %.0f s; the newest checkpoint continues", took_s)
            look = await look_at_all(self._pool, self._folder, ends=list(self._seen.ends.values()))
            look.conclude(self._journal)
            await kill_workers(self._pool, self._journal, "the time of the stop is up")
            await asyncio.sleep(PEER_GRACE_S)
            self._over.set()  # a node that is cut off cannot report that its workers are gone

    async def _agreed_stop(self) -> None:
        if not self.began or (not self._seen.any_started and not await self._workers_run()):
            self._over.set()  # nothing runs yet
            return
        told = False
        while not self._over.is_set():
            async with self._agreement:
                try:
                    plan = await agree(self._pool, StopAction.SAVE_AND_STOP)
                except AgentLost as error:
                    log.warning("no agreement: %s", error)
                    return
            if isinstance(plan, NothingToSave):
                reason = "no rank has begun a step, so there is nothing to save"
                await kill_workers(self._pool, self._journal, reason)
            elif isinstance(plan, ByThemselves) and not told:
                # no worker uses a session (yet): the signal is all that they can handle
                await self._pool.tell_all(PassOnTerm())
            elif isinstance(plan, ByThemselves) and time.monotonic() > self.time_is_up_s() - LAST_S:
                await self._pool.tell_all(PassOnTerm(at_last=True))
            if not told:
                await self._told.wait()
                self._journal.append(EventName.STOP_AGREED, **describe(plan))
            told = True
            if not isinstance(plan, ByThemselves):
                return
            await asyncio.sleep(POLL_S)

    async def _workers_run(self) -> bool:
        with contextlib.suppress(AgentLost):
            return any(reply.looks for reply in await self._pool.call_all(LookNow()))
        return False

    async def _save_now(self, who: str) -> None:
        async with self._agreement:
            try:
                plan = await agree(self._pool, StopAction.SAVE)
                self._journal.append(EventName.SAVE_REQUESTED, who=who, **describe(plan))
                tick = getattr(plan, "tick", None)  # there is none where no worker uses a session: nothing is saved
                while tick is not None and not self._over.is_set():
                    if self._seen.all_answered(tick):
                        break
                    await asyncio.sleep(POLL_S)
                await self._pool.call_all(Withdraw())
            except AgentLost as error:
                log.warning("the save could not be agreed on: %s", error)
