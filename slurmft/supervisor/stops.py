"""Stops of an attempt: requests for one, its deadline, and the save at an agreed step before it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.config.sections import PreemptionConfig
from slurmft.ipc.messages import Commit, Kill, LookNow, Looks, PassOnTerm, Propose, Withdraw
from slurmft.ipc.pages import StopAction
from slurmft.policy import life, stop
from slurmft.policy.verdict import Cause, ExitAction, codes_of
from slurmft.storage.journal import EventName, Journal
from slurmft.supervisor.agents import AgentLost, AgentPool
from slurmft.supervisor.cluster import Cluster, Start
from slurmft.supervisor.guardian import log_signal
from slurmft.supervisor.hangs import look_at_all
from slurmft.supervisor.observations import Observations
from slurmft.system.background import Background

# --- Slurm's state of the supervisor's own job: whether and why Slurm ends it, and how long is left ---


class SlurmNotices:
    """Asks Slurm in threads, so that one that does not answer blocks nothing; answers are remembered."""

    def __init__(self, cluster: Cluster, journal: Journal) -> None:
        self._cluster, self._journal = cluster, journal
        self.terms = stop.Terms(stop.SlurmClock(time.time(), time.monotonic()))
        self.outside: tuple[Cause, str] | None = None
        """Why Slurm ends the job; None while it does not, or that is unknown."""

        self.kill_at_s = math.inf
        """Monotonic time by which the workers must be gone, once Slurm ends the job."""

        self.on_ending: Callable[[], None] = lambda: None
        """Called once, when it has become known that Slurm ends the job."""

    async def read_terms(self) -> None:
        """Learn Slurm's clock and how long it lets a job live that it ends."""
        self.terms = await asyncio.to_thread(self._cluster.terms)

    async def times(self) -> stop.JobTimes:
        """When the job began and will end; unknown when Slurm does not answer."""
        return await asyncio.to_thread(self._cluster.times)

    async def is_ending(self) -> bool:
        """Whether Slurm ends the job from outside."""
        if self.outside is None:
            why = await asyncio.to_thread(self._cluster.why_ending)
            if why is not None and self.outside is None:  # two may have asked
                self.outside = why
                self._journal.append(EventName.ENDED_FROM_OUTSIDE, reason=why[1])
                self.kill_at_s = time.monotonic() + stop.seconds_in_kill_wait(self.terms.kill_wait_s)
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
        cause = stop.cause_of_signal(times, now=now, lead_s=lead_s)
        left_s = stop.seconds_for_stop(times, cause=cause, now=now, lead_s=lead_s, timeout_s=section.stop_timeout_s)
        return cause, left_s

    async def look_again(self) -> None:
        """Ask once more: Slurm signals a job a moment before its state shows the end."""
        await asyncio.sleep(life.LOOK_AGAIN_S)
        await self.is_ending()


# --- stop agreement ---
# The stop agreement, the supervisor's side: look, propose, confirm, commit. See ``policy.stop``.

MAX_TRIES = 30
HOLD_POLL_S = 0.01

log = logging.getLogger(__name__)


async def agree(pool: AgentPool, action: StopAction) -> stop.Plan:
    """Make all ranks act at one tick that none of them has passed.

    Returns the committed ``StopAt``, or why there is none. The workers keep training until the commit, but for those
    that have reached the proposal and wait for the answer.

    Raises:
        AgentLost: an agent does not answer; workers may be waiting at the proposal, and only their end frees them.
    """
    plan = stop.plan_stop(_looks(await pool.call_all(LookNow())))
    for tries in range(1, MAX_TRIES):
        if not isinstance(plan, stop.StopAt):
            await pool.call_all(Withdraw())
            return plan
        looks = _looks(await pool.call_all(Propose(tick=plan.tick, action=int(action))))
        while stop.inside_an_evaluation(plan.tick) and _undecided(looks, plan.tick):
            # a rank may leave its evaluation without ever coming to this tick: no rank acts before all are there
            await asyncio.sleep(HOLD_POLL_S)
            looks = _looks(await pool.call_all(LookNow()))
        if not stop.passed(looks, plan.tick):
            await pool.call_all(Commit(tick=plan.tick))
            return plan
        log.info("step boundaries come faster than the agreement; trying further ahead (try %d)", tries)
        plan = stop.plan_stop(looks, tries)
    raise RuntimeError(f"no agreement after {MAX_TRIES} tries although the distance doubled each time")


def _undecided(looks: Sequence[stop.Look], tick: int) -> bool:
    return not stop.passed(looks, tick) and not stop.all_hold(looks, tick) and all(look.alive for look in looks)


def describe(plan: stop.Plan) -> dict[str, Any]:
    """A plan as the journal records it."""
    if isinstance(plan, stop.StopAt):
        return {"plan": "save at step", "step": stop.step_of(plan.tick)}
    return {"plan": plan.value}


def _looks(replies: Sequence[Looks]) -> list[stop.Look]:
    return [stop.Look(*look) for reply in replies for look in reply.looks]


# --- The life of an attempt; its stops: requests for one, its deadline, and the save at an agreed step before it ---

POLL_S = 0.25
CAUSE_PATIENCE_S = 15.0
"""At least so long between two looks at the time limit, which may change."""

LAST_S = 10.0
"""Before the time of a stop is up, workers without a session that know another signal get SIGTERM, too."""

SHARE_OF_WORKERS = 0.7
"""Of the time of a stop, where folders are kept (``sync:``); what they do not use is for the upload, too."""


class Machine:
    """Feeds the machine of one attempt (``policy.life``), and has its actions carried out.

    Args:
        carried_out: what is done for each kind of action.
    """

    def __init__(self, rules: life.Rules, carried_out: Mapping[type, Callable[[Any], object]]) -> None:
        self.state, self._carried_out = life.State(rules), carried_out
        self.over = asyncio.Event()
        """Set when the attempt is over."""

        self._told = asyncio.Event()
        """A stop, its cause and its deadline are known."""

    def feed(self, event: life.Event) -> None:
        """Let this have happened now."""
        self.state, actions = life.step(self.state, event, time.monotonic())
        if self.state.phase is life.Phase.OVER:
            self.over.set()  # first: from now on the errors of the others say nothing
        if any(isinstance(action, life.BeginStop) for action in actions):
            self._told.set()
        for action in actions:
            self._carried_out[type(action)](action)

    @property
    def planned(self) -> Cause | None:
        """The cause of the stop that is under way."""
        return self.state.stop.cause if self.state.stop is not None else None

    @property
    def reason(self) -> str:
        """Why it is under way."""
        return self.state.stop.reason if self.state.stop is not None else ""

    @property
    def ends_at_s(self) -> float | None:
        """Monotonic time at which Slurm will have ended the job, as far as a stop has shown it."""
        return self.state.ends_at_s

    async def cause_is_known(self) -> None:
        """Return when it is known what a signal came for, or that takes too long."""
        if self.planned is Cause.SIGNALLED:  # a slow answer of Slurm must not lose the cause
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_PATIENCE_S):
                    await self._told.wait()


class Life(Machine):
    """The machine of an attempt that asks Slurm why it stops."""

    def __init__(
        self, config: RunConfig, start: Start, slurm: SlurmNotices, background: Background,
        carried_out: Mapping[type, Callable[[Any], object]], *, steps_are_signalled: bool = False,
    ) -> None:  # fmt: skip
        self._section, self._journal, self._cluster = config.preemption, start.journal, start.cluster
        self._slurm, self.background = slurm, background
        rules = life.Rules(
            signal=self._section.signal, stop_timeout_s=self._section.stop_timeout_s,
            is_local=start.cluster.name == "local", steps_are_signalled=steps_are_signalled,
            complete_codes=codes_of(ExitAction.COMPLETE, config.exit_actions), only_lead=config.ignore_nonlead_status,
        )  # fmt: skip
        super().__init__(rules, {
            life.AskWhetherEnding: lambda ask: background.start(self._ask_whether_ending(ask.name)),
            life.AwaitWorkersWord: lambda wait: background.start(self._await_workers_word(wait.name)),
            life.AskCause: self._ask_cause,
            life.WillNotContinue: lambda will: self._journal.append(EventName.WILL_NOT_CONTINUE, reason=will.reason),
            life.EndBy: lambda _: None,
            **carried_out,
        })  # fmt: skip
        slurm.on_ending = lambda: self.feed(life.SlurmEnds(slurm.kill_at_s))

    def on_own_signal(self, name: str) -> None:
        """The supervisor itself got a signal."""
        self.feed(life.OwnSignal(name))

    def on_signal(self, name: str, where: str) -> None:
        """A signal that asks for a stop was seen ``where``; further ones of the row change nothing."""
        self.feed(life.Signalled(name, where))

    def stop_for(self, cause: Cause, reason: str) -> None:
        """Begin a stop that has no deadline of Slurm's; where one is under way, only the later action may change."""
        self.feed(life.Asked(cause, reason))

    def on_request(self, kind: str, who: str) -> bool:
        """Begin the stop that a user's request is for; False for a save."""
        if (asked := life.asked_by(kind, who)) is not None:
            self.feed(asked)
        return asked is not None

    async def _ask_whether_ending(self, name: str) -> None:
        self.feed(life.EndingKnown(name, await self._slurm.is_ending()))

    async def _await_workers_word(self, name: str) -> None:
        await asyncio.sleep(life.LOOK_AGAIN_S)
        self.feed(life.SignalDue(name))

    def _ask_cause(self, ask: life.AskCause) -> None:
        log_signal("Received signal %d, initiating graceful stop", ask.name)
        self.background.start(self._find_cause(ask.at_s))

    async def _find_cause(self, at_s: float) -> None:
        cause, left_s = await self._slurm.cause_and_time(self._section, at_s)
        if self._slurm.outside is None and self._cluster.name != "local":
            self.background.start(self._slurm.look_again())
        self.feed(life.CauseFound(cause, left_s, at_s))


class Stops(Life):
    """The life of an attempt whose workers save at an agreed step; and any number of saves on demand."""

    def __init__(
        self, config: RunConfig, start: Start, pool: AgentPool, seen: Observations, slurm: SlurmNotices,
        *, background: Background, carried_out: Mapping[type, Callable[[Any], object]],
    ) -> None:  # fmt: skip
        own = {life.BeginStop: self._begin, life.EndBy: lambda end: self._end_by(end.at_s)}
        super().__init__(config, start, slurm, background, {**own, **carried_out}, steps_are_signalled=True)
        self._pool, self._seen = pool, seen
        self._folder = start.run.attempts / str(start.cluster.attempt)
        self._timer: asyncio.Timeout | None = None
        self._agreement = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None
        self._begun: life.BeginStop | None = None
        """The stop that has not been concluded, in time or too late."""

        self._signal = ""
        self._share = SHARE_OF_WORKERS if config.sync else 1.0

    def time_is_up_s(self) -> float:
        """Monotonic time at which everything of this stop must be done; infinite while there is none."""
        return self.state.up_at_s

    def _workers_until(self, at_s: float, since_s: float) -> float:
        """The workers' share of the time until ``at_s``; the rest is for the upload of kept folders."""
        return at_s if math.isinf(at_s) else since_s + self._share * (at_s - since_s)

    def on_request(self, kind: str, who: str) -> bool:
        is_stop = super().on_request(kind, who)
        if not is_stop and self.planned is None:
            self.background.start(self._save_now(who))
        return is_stop

    def _end_by(self, at_s: float) -> None:
        at_s = self._workers_until(at_s, time.monotonic())
        if self._timer is not None and (self._timer.when() or 0.0) > at_s:
            with contextlib.suppress(RuntimeError):  # its time was up meanwhile
                self._timer.reschedule(at_s)

    def _ask_cause(self, ask: life.AskCause) -> None:
        # the save must not wait for Slurm's answers: they only say why, and how long there is
        self._stopping, self._signal = asyncio.create_task(self._agreed_stop()), ask.name
        super()._ask_cause(ask)

    def _begin(self, begin: life.BeginStop) -> None:
        at = time.time() - (time.monotonic() - begin.at_s)
        self._journal.append(EventName.STOP_REQUESTED, cause=begin.stop.cause.value, reason=begin.stop.reason,
                             signal_at=at, seconds_left=round(begin.left_s, 3))  # fmt: skip
        if begin.saves:
            self._stopping = asyncio.create_task(self._agreed_stop())
        self._begun = begin
        self.background.start(self._end_in_time(begin.at_s))

    async def _end_in_time(self, at_s: float) -> None:
        """Have the workers saved and ended; by force when the time is up, which runs from ``at_s`` on."""
        assert self._stopping is not None
        try:
            async with asyncio.timeout_at(self._workers_until(self.time_is_up_s(), at_s)) as self._timer:
                await self._stopping
                await self.over.wait()
        except TimeoutError:
            self._begun = None
            took_s = time.monotonic() - at_s
            self._journal.append(EventName.STOP_OVERDUE, seconds=round(took_s, 3), **self._seen.unsaved_at_stop())
            log.error("THE SAVE OF THIS STOP DID NOT FINISH within %.0f s; the newest checkpoint continues", took_s)
            look = await look_at_all(self._pool, self._folder, ends=list(self._seen.ends.values()))
            look.conclude(self._journal)
            await kill_workers(self._pool, self._journal, "the time of the stop is up")
            await asyncio.sleep(life.PEER_GRACE_S)
            self.feed(life.Ended())  # a node that is cut off cannot report that its workers are gone

    def conclude(self) -> None:
        """The attempt is over: write down what the stop has saved, if there was one and it was in time."""
        begun, self._begun = self._begun, None
        if begun is not None:
            left_s = min(begun.left_s, self._slurm.kill_at_s - begun.at_s)
            if (facts := self._seen.save_of_stop(since_s=begun.at_s, left_s=left_s)) is not None:
                self._journal.append(EventName.STOP_SAVED, **facts)
        if self._signal:
            log.info("exiting program after receiving %s.", self._signal)

    async def _agreed_stop(self) -> None:
        if not self.state.began or (not self._seen.any_started and not await self._workers_run()):
            self.feed(life.Ended())  # nothing runs yet
            return
        told = False
        while not self.over.is_set():
            async with self._agreement:
                try:
                    plan = await agree(self._pool, StopAction.SAVE_AND_STOP)
                except AgentLost as error:
                    log.warning("no agreement: %s", error)
                    return
            if plan is stop.Instead.NOTHING_TO_SAVE:
                reason = "no rank has begun a step, so there is nothing to save"
                await kill_workers(self._pool, self._journal, reason)
            elif plan is stop.Instead.BY_THEMSELVES and not told:
                # no worker uses a session (yet): the signal is all that they can handle
                await self._pool.tell_all(PassOnTerm())
            elif plan is stop.Instead.BY_THEMSELVES and time.monotonic() > self.time_is_up_s() - LAST_S:
                self.on_signal("SIGTERM", "the supervisor, at last")
                await self._pool.tell_all(PassOnTerm(at_last=True))
            if not told:
                await self._told.wait()
                self._journal.append(EventName.STOP_AGREED, **describe(plan))
            told = True
            if plan is not stop.Instead.BY_THEMSELVES:
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
                while tick is not None and not self.over.is_set():
                    if self._seen.all_answered(tick):
                        break
                    await asyncio.sleep(POLL_S)
                await self._pool.call_all(Withdraw())
            except AgentLost as error:
                log.warning("the save could not be agreed on: %s", error)


async def kill_workers(pool: AgentPool, journal: Journal, reason: str) -> None:
    """Kill every worker whose agent can be reached."""
    journal.append(EventName.KILLING_WORKERS, reason=reason)
    await pool.tell_all(Kill())
