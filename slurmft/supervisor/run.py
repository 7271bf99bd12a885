"""``slurmft run``: take the run over, run one attempt, act on its verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from slurmft.config.run import RunConfig
from slurmft.errors import Fenced, RunBusy, StorageError, StorageUnavailable, UsageError
from slurmft.policy.job_identity import JobIdentity
from slurmft.policy.judge import DECIDING, Circumstances, judge
from slurmft.policy.verdict import EXIT_TEMPORARY, PLANNED, Action, Cause, Decision, End, Verdict
from slurmft.scheduler import own_jobs
from slurmft.scheduler.slurm import ignoring_signals
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName, newest_of
from slurmft.storage.patience import FolderThread, PatientJournal, patiently, writing
from slurmft.storage.run_folder import Attempt, Owner, Progress, RunFolder, progress_of
from slurmft.supervisor.act import FLUSH_S, AttemptEnd, Superfluous, in_folder, keep_ended, superfluous
from slurmft.supervisor.agents import Outlived, find_outlived
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.cluster import (
    LOCAL_JOB_VARIABLE,
    LOCAL_RESTART_VARIABLE,
    Cluster,
    SlurmCluster,
    Start,
    detect,
    this_process,
)
from slurmft.supervisor.crew import Crew, Roster
from slurmft.supervisor.guardian import hearing, job_of, keep, log_signal, lost_pids, owner_lives, owner_writes
from slurmft.supervisor.handover import call_off_for_good, candidate_of, end_lenders, handed_over
from slurmft.supervisor.observations import collect
from slurmft.supervisor.placement import EvidenceSender, next_cycle, settle
from slurmft.system import processes
from slurmft.system.background import Background, BackgroundLog, LoopThread
from slurmft.system.files import read_bytes, replace_atomically

if TYPE_CHECKING:
    from slurmft.supervisor.inference import InferenceAttempt
    from slurmft.supervisor.roles import RolesAttempt
    from slurmft.supervisor.serving import ServingAttempt

# --- The attempts of one start of a job, one after the other, with one crew of agents ---

SIGN_OF_LIFE_S = 1.0

log = logging.getLogger(__name__)


def _runner_of(config: RunConfig) -> type[AttemptRunner | InferenceAttempt | RolesAttempt]:
    """Imported when it is needed: with numpy, inference would take a third of the time that a supervisor starts in."""
    if config.launcher == "ray" and config.inference is None:
        from slurmft.supervisor.attempt import RayAttempt

        return RayAttempt
    if config.roles:
        from slurmft.supervisor.roles import RolesAttempt

        return RolesAttempt
    if config.inference is None:
        return AttemptRunner
    from slurmft.supervisor.inference import InferenceAttempt, SweepAttempt
    from slurmft.supervisor.serving import ServingAttempt

    if config.trials is not None:
        return SweepAttempt
    return InferenceAttempt if config.inference.serving is None else ServingAttempt


class Attempts:
    """Runs attempts until one of them ends the job; a context manager that leaves no agent behind.

    Attempts run in a loop of its own thread, which goes on between them: while this thread decides, asks Slurm or waits
    for the run folder, agents can connect and are kept, and the run folder is told of this supervisor.

    Args:
        outlived: agents of the supervisor before this one, in the same start of the job.
    """

    def __init__(self, config: RunConfig, log_file: BackgroundLog, outlived: Outlived | None = None) -> None:
        self._config, self._log_file, self._outlived = config, log_file, outlived
        self._loop = LoopThread("agents")
        self._background = Background()
        self._loop.call_soon(lambda: self._background.start(_tell_folder(lambda: self._present)))
        self._present: tuple[Start, Attempt] | None = None
        self._crew: Crew | None = None
        self._lost = False
        self.generation: int | None = None
        """As which this process owned the run in the last attempt; None while it has never."""

    @property
    def secret(self) -> bytes | None:
        """The control channel's secret, where agents exist already."""
        if self._crew is None:
            return None if self._outlived is None else self._outlived.secret or None
        return self._crew.secret

    def run(self, start: Start) -> int | None:
        """One attempt and what follows it: the exit code, or None when the next begins at once in this allocation.

        Raises:
            SlurmftError: nothing could be started.
        """
        sender = EvidenceSender(self._config, start)

        def ending_of(start: Start) -> AttemptEnd:
            return AttemptEnd(self._config, start, sender, self._log_file, dismiss=self.dismiss,
                              has_nodes=self._has_nodes)  # fmt: skip

        ending, escape = ending_of(start), settle(self._config, start)
        if escape is not None and in_folder(start, lambda: start.run.see_request("KILL")) is None:  # else it stops
            if start.candidate:
                return self._leave(ending, escape[0].reason, called_off=False)
            return ending.follow(*escape, may_stay=False)
        attempt = start.cluster.attempt
        self._present, where = (start, attempt), start.run.attempts / str(attempt)
        log.info("run %s, attempt %s; workers write to %s", self._config.name, attempt, where)
        log_signal("Signal handler installed for %d", self._config.preemption.signal)
        if self._crew is None:
            self._crew, self._outlived = Crew(self._config, start, self._outlived), None
        supervisor = _runner_of(self._config)(self._config, start, sender, self._crew)
        verdict = self._verdict_of(supervisor)
        self._lost = bool(start.cluster.lost)
        serves = self._config.serving is not None
        if serves:
            endpoint = cast("ServingAttempt", supervisor)
            if endpoint.start.candidate:
                return self._leave(ending, verdict.reason, called_off=endpoint.is_called_off)
            if endpoint.stops.superseded:
                return ending.leave(End.HANDED_ON, 0)
            start = endpoint.start  # a candidate owns the run by now
            ending = ending_of(start)
        self.generation = start.generation
        ending.ends_at_s = supervisor.stops.ends_at_s
        code = ending.act_on(verdict)
        if serves and ending.has_stopped:
            call_off_for_good(start.run, start.cluster, start.journal, verdict.reason)
        return code

    def _verdict_of(self, supervisor: AttemptRunner | InferenceAttempt | RolesAttempt) -> Verdict:
        heard: list[int] = []

        def on_signal(number: int) -> None:
            heard.append(number)
            self._loop.call_soon(supervisor.stops.on_own_signal, signal.Signals(number).name)

        with hearing(on_signal):
            verdict = self._loop.run(supervisor.run())
        if supervisor.stops.planned is None and verdict.cause not in PLANNED:
            keep(heard)  # they came when this attempt was over already: the next one stops for them
        return verdict

    def _leave(self, ending: AttemptEnd, reason: str, *, called_off: bool) -> int:
        """End a candidate, which decides nothing for the run."""
        log.warning("this job does not take the run over: %s", reason)
        ending.journal.append(EventName.CANDIDATE_LEFT, reason=reason)
        return ending.leave(End.HANDED_ON if called_off else End.OPEN, 0 if called_off else EXIT_TEMPORARY)

    def _has_nodes(self) -> bool:
        async def look(roster: Roster) -> bool:
            return roster.can_go_on()

        return self._crew is not None and self._loop.run(look(self._crew.roster))

    def dismiss(self) -> None:
        """End the agents. The next attempt, if there is one, starts new ones."""
        if self._crew is not None:
            crew, self._crew = self._crew, None
            self._loop.run(crew.dismiss(node_lost=self._lost))
        if self._outlived is not None:  # nothing came to the point of taking them over
            self._outlived.end()
            self._outlived = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        self._loop.close()


async def _tell_folder(present: Callable[[], tuple[Start, Attempt] | None]) -> None:
    """Give signs of life, and write what the journal could not take: a rescue of the run looks at both."""
    while True:
        await asyncio.sleep(SIGN_OF_LIFE_S)
        if (now := present()) is None:
            continue
        start, attempt = now
        start.journal.retry()
        with contextlib.suppress(OSError, StorageError):
            await start.thread.ask(functools.partial(run_folder.touch, start.run, attempt))


# --- The supervisor's side of the process that publishes metrics and tells events (``reporting.metrics``) ---

END_S = 1.0


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

    def __exit__(self, *_: object) -> None:
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


# --- ``slurmft run``: take the run over, run one attempt, act on its verdict ---

STORAGE_PATIENCE_S = 120.0
"""How long a start waits, with its nodes, for a run folder that is full, read-only or does not answer."""

STORAGE_DELAY_S = 300
"""Begin time of the job that tries again after that."""

MAX_STORAGE_RETRIES = 12
LOOK_S = 5.0


def supervise(
    config: RunConfig, environment: Mapping[str, str], outlived: Outlived | None = None,
    known: JobIdentity | None = None,
) -> int:  # fmt: skip
    """Run attempts of ``config`` in this allocation, and what follows them; returns the batch script's exit code.

    Args:
        outlived: agents that have outlived the supervisor before this one.
        known: what that supervisor has recorded of the job.

    Raises:
        RunBusy: another live job trains this run.
        SlurmftError: nothing was started.
    """
    cluster, run = detect(config, environment), RunFolder(config.run_folder)
    _refuse_too_few_nodes(config, cluster)
    log_file = BackgroundLog()
    if isinstance(cluster, SlurmCluster):
        cluster.identify(known)
    with Companion(config, run) as companion, Attempts(config, log_file, outlived) as attempts:
        return _train(config, environment, run, cluster, companion=companion, attempts=attempts)


def _train(
    config: RunConfig, environment: Mapping[str, str], run: RunFolder, cluster: Cluster, *, companion: Companion,
    attempts: Attempts,
) -> int:  # fmt: skip
    """Attempts until one is followed by none; returns the exit code."""
    thread, held = FolderThread(), None
    while True:
        claim = _Claim(environment, secret=attempts.secret, held=held)
        try:
            start = patiently(
                lambda claim=claim: thread.call(  # type: ignore[misc]
                    lambda: writing(run.path)(_begin)(config, cluster, run, thread, claim), timeout_s=STORAGE_PATIENCE_S
                ),
                patience_s=STORAGE_PATIENCE_S,
            )
        except StorageUnavailable as error:
            return _try_again_later(config, cluster, run, error)
        if start is None:
            return 0
        if isinstance(start, Superfluous):
            return _end_superfluous(config, start, cluster, run, thread)
        companion.see_to_it()
        if (code := attempts.run(start)) is not None:
            return code
        held = attempts.generation


@dataclass(frozen=True, slots=True)
class _Claim:
    """The state of a process that wants to own the run."""

    environment: Mapping[str, str]
    secret: bytes | None
    """The secret of agents that exist already."""

    held: int | None
    """The generation as which this process has owned the run before; None before its first attempt."""


def recover(config: RunConfig, environment: Mapping[str, str], number: int) -> int:
    """Act in the place of a supervisor that signal ``number`` has ended; returns the batch script's exit code."""
    cluster, run = detect(config, environment), RunFolder(config.run_folder)
    thread = FolderThread()
    try:
        owner, known, history, is_done = patiently(
            lambda: thread.call(lambda: _left_behind(run), timeout_s=STORAGE_PATIENCE_S), patience_s=STORAGE_PATIENCE_S
        )
        outlived = thread.call(lambda: find_outlived(config, run, cluster), timeout_s=STORAGE_PATIENCE_S)
    except StorageUnavailable as error:
        if isinstance(cluster, SlurmCluster):
            cluster.identify()
        return _try_again_later(config, cluster, run, error)
    if is_done or owner is None or not _is_lost(owner, environment):
        if outlived is not None:
            outlived.end()
        # it had not taken the run over yet; if another process has, this raises
        return 0 if is_done else supervise(config, environment)
    cluster.attempt = Attempt(job=owner.job, restart=owner.restart, cycle=owner.cycle)
    if isinstance(cluster, SlurmCluster):
        cluster.identify(known)
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    start = Start(cluster=cluster, run=run, journal=journal, thread=thread, generation=owner.generation,
                  history=history, secret=b"")  # fmt: skip
    name = signal.Signals(number).name
    journal.append(EventName.SUPERVISOR_LOST, signal=name, host=owner.host)
    lost = Verdict(cause=Cause.SUPERVISOR_LOST, reason=f"the supervisor on {owner.host} was ended by {name}")
    how = f"{name} ended the supervisor"
    verdict = in_folder(start, lambda: _verdict_in_its_place(run, cluster.attempt, lost, config.world_size, how=how))
    verdict = lost if verdict is None else verdict
    # the guardian has ended its agents, but for those that outlive a supervisor
    ending = AttemptEnd(
        config, start, EvidenceSender(config, start), BackgroundLog(),
        dismiss=lambda: None if outlived is None else outlived.end(), has_nodes=lambda: outlived is not None,
        outlived=outlived is not None,
    )  # fmt: skip
    loop, background, attempt = LoopThread("folder"), Background(), cluster.attempt
    loop.call_soon(lambda: background.start(_tell_folder(lambda: (start, attempt))))
    try:
        code = _act_in_its_place(ending, start, verdict)
    finally:
        loop.close()
    if code is not None:
        _end_endpoint(config, start)
        return code
    if cluster.name == "local":  # whose name would be that of this process
        environment = {
            **environment, LOCAL_JOB_VARIABLE: owner.job, LOCAL_RESTART_VARIABLE: str(owner.restart)
        }  # fmt: skip
    return supervise(config, environment, outlived, known)


def _left_behind(run: RunFolder) -> tuple[Owner | None, JobIdentity | None, list[Event], bool]:
    """The run's owner, the identity of its job, the journal, and whether the run is finished.

    Raises:
        StorageError: the run folder cannot be read.
    """
    with writing(run.path):
        owner = run.owner()
        known = None if owner is None else job_of(run, owner.job).known
        return owner, known, run.journal().read_past(), run.done() is not None


def _end_endpoint(config: RunConfig, start: Start) -> None:
    """The routers of a lost supervisor's endpoint have ended with its agents: no client is to be sent there, and no job
    to lend it a node.
    """
    if config.serving is None:
        return
    from slurmft.inference.endpoint import HighAvailabilityCluster  # an endpoint's alone

    if isinstance(start.cluster, SlurmCluster):
        end_lenders(start)
    try:
        with start.run.lock():
            owner = start.run.owner()
            if owner is not None and owner.generation == start.generation:
                HighAvailabilityCluster().write(start.run.path)
    except (StorageError, RunBusy) as error:
        log.warning("the endpoint's routers are still named: %s", error)


def _is_lost(owner: Owner, environment: Mapping[str, str]) -> bool:
    """Whether the owner is a supervisor in whose place this process acts."""
    return owner.pid in lost_pids(environment) and owner.host == os.uname().nodename


def _act_in_its_place(ending: AttemptEnd, start: Start, verdict: Verdict) -> int | None:
    """Carry out what a lost supervisor had decided for this attempt, or decide now; returns as ``act_on`` does."""
    mine = [event for event in start.history if event.attempt == str(start.cluster.attempt)]
    decided = newest_of(mine, EventName.DECISION)
    return ending.act_on(verdict) if decided is None else ending.follow(verdict, _decision_of(decided))


def _decision_of(event: Event) -> Decision:
    """The decision that the event of one has written down."""
    facts = event.details
    return Decision(
        action=Action(facts["action"]),
        reason=str(facts.get("reason")),
        exit_code=int(facts.get("exit_code", EXIT_TEMPORARY)),
        avoid=tuple(map(str, facts.get("avoid", []))),
        elsewhere=bool(facts.get("elsewhere")),
    )


def _verdict_in_its_place(run: RunFolder, attempt: Attempt, lost: Verdict, world_size: int, *, how: str) -> Verdict:
    """The verdict on an attempt whose supervisor is gone, worded by ``how``; ``lost`` where nothing tells more."""
    progress = progress_of(run)
    mine = progress if progress.attempt == str(attempt) else Progress()
    facts: dict[str, Any] = {
        "first_step": mine.resumed or 0, "last_step": mine.step or 0, "saved_step": mine.saved_step,
    }  # fmt: skip
    if (who := run.see_request("KILL")) is not None:
        return Verdict(cause=Cause.STOPPED_BY_USER, reason=f"stopped by {who}; {how}", **facts)
    # the evidence of its workers still counts: without it, a rerun would go on where it was
    seen = Circumstances(
        heard=collect(run, attempt, ()), reached=(facts["first_step"], facts["last_step"]), saved=mine.saved_step
    )
    told = judge((), world_size=world_size, seen=seen)
    return told if told.cause in DECIDING else replace(lost, **facts)


def _begin(
    config: RunConfig, cluster: Cluster, run: RunFolder, thread: FolderThread, claim: _Claim
) -> Start | Superfluous | None:
    """Make the run ours; None when it is finished. May be repeated after StorageUnavailable."""
    run.create()
    if not run.config.exists():
        with writing(run.config):
            replace_atomically(run.config, config.as_yaml())
    PatientJournal(run.path, thread).catch_up()  # budgets count what the attempt before has ended with
    history = run.journal().read_past()
    cluster.attempt = next_cycle(cluster.attempt, history)
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    if (done := run.done()) is not None:
        # at once: this process ends before the journal's thread gets to it
        run.journal(cluster.attempt).append(EventName.ALREADY_FINISHED, step=done.get("step"))
        log.info("run %s is finished (%s); nothing to do", config.name, done.get("reason"))
        return None
    owner = None
    if claim.held is None and isinstance(cluster, SlurmCluster):
        is_told = bool(cluster.own.known.submitted)  # else the newest time that is known is of an earlier start
        cluster.recall(run.own_jobs())
        submitted = cluster.own.known.submitted  # none where the job recorded is another one, and was never seen
        queued_at = submitted[-1] if is_told and submitted else None
        if (over := superfluous(history, cluster.attempt, queued_at)) is not None:
            return over
        if (handed := handed_over(run, cluster)) is not None:
            return handed
        owner = candidate_of(config, run, cluster)
    generation, overruled = _take_over(run, cluster, claim) if owner is None else (owner.generation, "")
    run.attempt_folder(cluster.attempt)
    run_folder.touch(run, cluster.attempt)
    if overruled:
        journal.append(EventName.CLAIM_OVERRULED, outcome=overruled)
    if (secret := claim.secret) is None:
        secret = read_bytes(run.new_secret(cluster.attempt), owners={os.geteuid()})
    start = Start(cluster=cluster, run=run, journal=journal, thread=thread, generation=generation, history=history,
                  secret=secret, candidate=owner is not None)  # fmt: skip
    if owner is not None:
        journal.append(EventName.CANDIDATE_STARTED, owner=owner.job, host=os.uname().nodename,
                       nodes=os.environ.get("SLURM_JOB_NODELIST", ""))  # fmt: skip
        return start
    container, before = config.contained(), _last_seen(run, history)
    nodes = cluster.job.part or cluster.job.nodes if isinstance(cluster, SlurmCluster) else ""
    journal.append(EventName.ATTEMPT_STARTED, generation=generation, cluster=cluster.name, host=os.uname().nodename,
                   nodes=nodes, folder=str(Path.cwd()),
                   **({"container": container.name} if container else {}),
                   **({"before": before} if before else {}))  # fmt: skip
    if cluster.attempt.cycle == 0:
        _drop_stale_requests(run, journal)
    return replace(start, reached=_reached(history, before))


def _last_seen(run: RunFolder, history: Sequence[Event]) -> dict[str, Any]:
    """The last report of an attempt that has left no verdict, such as one whose node died with its supervisor."""
    newest = progress_of(run)
    judged = {event.attempt for event in history if event.event == EventName.VERDICT}
    if not newest.attempt or newest.attempt in judged or not newest.step:
        return {}
    names = ("attempt", "at", "resumed", "step", "saved", "step_at", "stall_s", "saves_done")
    return {name: value for name in names if (value := getattr(newest, name)) is not None}


def _reached(history: Sequence[Event], before: Mapping[str, Any]) -> int:
    """Newest step that earlier attempts have done."""
    told = [event.details.get("last_step") for event in history if event.event == EventName.VERDICT]
    lost = [event.details.get("before") for event in history if event.event == EventName.ATTEMPT_STARTED]
    told += [each.get("step") for each in (*lost, before) if isinstance(each, Mapping)]
    return max((step for step in told if type(step) is int), default=0)


def _end_superfluous(
    config: RunConfig, over: Superfluous, cluster: Cluster, run: RunFolder, thread: FolderThread
) -> int:  # fmt: skip
    """End a start that Slurm has made at an end of the run, without training; the same exit code as then."""
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    log.warning("nothing is trained: %s (attempt %s)", over.reason, over.earlier)
    journal.append(EventName.SUPERFLUOUS_START, reason=over.reason, earlier=over.earlier)
    journal.flush(FLUSH_S)
    keep_ended(config, over.end, cluster, journal, thread.call(journal.read_past, timeout_s=STORAGE_PATIENCE_S))
    journal.flush(FLUSH_S)
    return over.exit_code


def _try_again_later(config: RunConfig, cluster: Cluster, run: RunFolder, error: StorageUnavailable) -> int:
    """Give the nodes back and requeue: idle nodes cost more than a wait in the queue."""
    log.error("%s", error)
    if isinstance(cluster, SlurmCluster) and config.preemption.continue_by in ("auto", "requeue"):
        before, who = _look(run)
        if who is not None:
            log.warning("not trying again: stopped by %s", who)
            return error.exit_code
        since = cluster.attempt.restart - (before.restart if before and before.job == cluster.attempt.job else 0)
        if since <= MAX_STORAGE_RETRIES:
            log.warning("trying again in %d s (%d of %d)", STORAGE_DELAY_S, since, MAX_STORAGE_RETRIES)
            with ignoring_signals():
                own_jobs.requeue(cluster.own, restart=cluster.attempt.restart, delay_s=STORAGE_DELAY_S)
    return error.exit_code


def _look(run: RunFolder) -> tuple[Owner | None, str | None]:
    """The run's owner, and the user who asked for a stop; unknown where the run folder does not answer."""
    try:  # in a thread of its own: the other one may be stuck
        return FolderThread().call(lambda: (run.owner(), run.see_request("KILL")), timeout_s=LOOK_S)
    except (StorageError, OSError):
        return None, None


def _refuse_too_few_nodes(config: RunConfig, cluster: Cluster) -> None:
    allocated = cluster.count if isinstance(cluster, SlurmCluster) else config.nodes
    if allocated < config.size.minimum:
        raise UsageError(
            f"the configuration asks for nodes: {config.size.minimum}, but this job has {allocated}",
            hint="make --nodes of the batch script and nodes of the configuration agree",
        )


def _take_over(run: RunFolder, cluster: Cluster, claim: _Claim) -> tuple[int, str]:
    """Become the run's owner; returns the generation, and a decision that another process has made about this start.

    Raises:
        RunBusy: another start trains the run.
        Fenced: another start has taken this one's place.
    """
    while True:
        if (before := run.owner()) is not None:
            _refuse_to_replace(before, run, cluster, claim)  # not with the lock held: Slurm may take its time
        if (taken := _take_over_from(before, run, cluster)) is not None:
            return taken


def _take_over_from(before: Owner | None, run: RunFolder, cluster: Cluster) -> tuple[int, str] | None:
    """As ``_take_over`` returns; None where ``before`` is not the owner any more."""
    with run.lock():
        if run.owner() != before:
            return None
        generation = 1 if before is None else before.generation + 1
        run.take_over(this_process(run, cluster, generation))
        run.add_job(cluster.attempt.job, cluster.own.known if isinstance(cluster, SlurmCluster) else None)
        # this start lives: a process that settled its end took it for gone, or meant an earlier job with its number
        ending = run.ending(cluster.attempt)
        if overruled := ending.outcome() or "":
            ending.give_back()
    return generation, overruled


def _refuse_to_replace(before: Owner, run: RunFolder, cluster: Cluster, claim: _Claim) -> None:
    attempt, me = cluster.attempt, processes.me()
    if (before.host, before.pid, before.birth) == (me.host, me.pid, me.birth):
        return  # a disk was full right after this process had taken the run over, and it tries again
    if claim.held is not None:
        if before.generation > claim.held:
            raise _superseded(run, before)
        return
    is_newest = cluster.is_newest_start()
    if is_newest is False:
        raise _superseded(run, before)
    if before.job != attempt.job:
        if owner_lives(run, before):
            raise RunBusy(
                f"run {run.path.name} is being trained by job {before.job}",
                hint=f"slurmft stop {run.path.name} ends it after a save",
            )
        return
    is_of_us = before.host == me.host and (before.pid == me.pid or before.pid in lost_pids(claim.environment))
    if before.restart < attempt.restart or is_of_us:
        return
    if before.restart == attempt.restart and before.host == me.host:
        if processes.lives(before.pid, before.birth):
            raise _second(run, before)
        return
    # the controller may have gone back to an older state, so that a number of restarts comes twice
    if is_newest and not (before.restart == attempt.restart and owner_writes(run, before)):
        return
    raise _superseded(run, before) if before.restart > attempt.restart else _second(run, before)


def _second(run: RunFolder, owner: Owner) -> RunBusy:
    """The owner supervises this very start of this job: a batch script has started two supervisors."""
    return RunBusy(
        f"run {run.path.name} has a supervisor in this job already: process {owner.pid} on {owner.host}",
        hint="slurmft run belongs into the batch script once, and not behind srun",
    )


def _superseded(run: RunFolder, owner: Owner) -> Fenced:
    return Fenced(
        f"this start of the job is not the newest one any more: run {run.path.name} belongs to job {owner.job}, "
        f"restart {owner.restart}, on {owner.host}",
        hint="nothing to do: a start that Slurm has made since continues the run",
    )


def _drop_stale_requests(run: RunFolder, journal: PatientJournal) -> None:
    """A SAVE or REQUEUE left for an earlier start has been overtaken; a KILL has not: it still means stop."""
    for kind in ("SAVE", "REQUEUE"):
        if (run.path / kind).exists() and (who := run.take_request(kind)) is not None:
            journal.append(EventName.STALE_REQUEST_DROPPED, request=kind, who=who)
