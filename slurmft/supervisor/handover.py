"""Jobs beside the run's own: the successor that an endpoint is handed over to, both sides of it, and jobs that lend
nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import Fenced, SlurmError, SlurmUnavailable, StorageError
from slurmft.inference.endpoint import Handover, call_off, folder_of, read_handover, write_handover
from slurmft.ipc.channel import BadMessage
from slurmft.ipc.messages import ReplicaPlace
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.serving import (
    LOAN_PAUSE_S,
    PAUSE_S,
    Loan,
    Step,
    Successor,
    due_s,
    lead_s,
    lending,
    next_step,
)
from slurmft.policy.verdict import End
from slurmft.scheduler import own_jobs
from slurmft.scheduler.parsing import JobRecord
from slurmft.scheduler.slurm import compress, expand
from slurmft.storage import run_folder
from slurmft.storage.journal import Event, EventName, Journal
from slurmft.storage.patience import write_state
from slurmft.storage.run_folder import Attempt, Owner, RunFolder
from slurmft.supervisor import avoided_nodes
from slurmft.supervisor.act import Superfluous, restart_of, successor_options
from slurmft.supervisor.agents import AgentLink
from slurmft.supervisor.cluster import Cluster, SlurmCluster, Start, this_process
from slurmft.supervisor.guardian import job_of, owner_lives
from slurmft.supervisor.placement import next_placement
from slurmft.supervisor.stops import SlurmNotices
from slurmft.system.files import read_json

# --- candidacy ---
# The successor's side of a handover: a job that prepares an endpoint beside its owner, and then takes the run over.
#
# Until then it decides nothing for the run, and changes nothing in the run folder but its own attempt's folder, its
# job's identity and lines of the journal.

GONE_LOOK_S = 10.0
"""How often Slurm is asked for an owner that gives no signs of life."""


def candidate_of(config: RunConfig, run: RunFolder, cluster: SlurmCluster) -> Owner | None:
    """The owner that wants to hand the endpoint over to this job; None where there is none that lives.

    Raises:
        Fenced: this start of the job is not the newest one.
    """
    if config.serving is None:
        return None
    with run.lock():
        owner, handover = run.owner(), read_handover(run.path)
        job = cluster.attempt.job
        if owner is None or handover is None or handover.predecessor != owner.job or owner.job == job:
            return None
        if not handover.successor:  # sbatch has not answered the owner yet
            handover = replace(handover, successor=job)
            write_handover(run.path, handover)
        if handover.successor != job:
            return None
    if not owner_lives(run, owner):
        return None
    if cluster.is_newest_start() is False:
        raise Fenced("this start of the job is not the newest one any more", hint="nothing to do")
    with run.lock():
        run.add_job(job, cluster.own.known)
    return owner


def handed_over(run: RunFolder, cluster: Cluster) -> Superfluous | None:
    """Why this job has nothing to do, as it has handed its endpoint over to one that lives."""
    owner = run.owner()
    if owner is None or not is_heir(run, cluster.attempt.job, owner) or not owner_lives(run, owner):
        return None
    return Superfluous(f"job {owner.job} has taken the endpoint over", str(cluster.attempt), End.HANDED_ON, 0)


def is_heir(run: RunFolder, job: str, owner: Owner) -> bool:
    """Whether ``owner`` has the run out of a handover by ``job``.

    Raises:
        StorageError: the run folder cannot be read.
    """
    with run.lock():
        handover = read_handover(run.path)
    return handover is not None and owner.job != job and (handover.predecessor, handover.successor) == (job, owner.job)


class Candidacy:
    """What a candidate knows of its owner; blocking, but for the properties."""

    def __init__(self, run: RunFolder, cluster: Cluster) -> None:
        self._run, self._cluster = run, cluster
        self._looked_s = time.monotonic()
        self.before: Owner | None = None
        """The owner from whom the run was taken."""

    def why_over(self) -> str:
        """Why this job is not to take the run over any more; empty while it is.

        Raises:
            StorageError: the run folder cannot be read.
        """
        with self._run.lock():
            return self._why_over()

    def is_alone(self) -> bool:
        """Whether the owner is gone, so that the run has no other one; asks Slurm now and then.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        owner = self._run.owner()
        if owner is None or run_folder.is_fresh(self._run, owner):
            return owner is None
        if time.monotonic() - self._looked_s < GONE_LOOK_S:
            return False
        self._looked_s = time.monotonic()
        return not owner_lives(self._run, owner)

    def claim(self, places: tuple[ReplicaPlace, ...]) -> Owner | None:
        """Become the owner; returns its record, or None where the handover is over or the run is to stop.

        Args:
            places: of the replicas here, for the routers of the owner before.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        write_state(_places_file(self._run), {"replicas": [place.as_mapping() for place in places]})
        with self._run.lock():
            before = self._run.owner()
            if self._why_over() or before is None or self._run.see_request("KILL") is not None:
                return None
            mine = this_process(self._run, self._cluster, before.generation + 1)
            self._run.take_over(mine)
            self.before = before
            return mine

    def _why_over(self) -> str:
        owner, handover = self._run.owner(), read_handover(self._run.path)
        if handover is None:
            return "the handover was called off"
        if handover.successor != self._cluster.attempt.job:
            return f"job {handover.successor} is to take the run over instead"
        if owner is not None and owner.job != handover.predecessor:
            return f"job {owner.job} owns the run, which this one was not to take over from"
        return ""


def taken_from(history: Sequence[Event], mine: Attempt) -> Attempt | None:
    """The newest attempt of the job from which this start of ours has taken the run over; None where it has from none.

    By the journal, as the process that took it over may have died since.
    """
    candidacies = [
        event for event in history
        if event.event == EventName.CANDIDATE_STARTED and restart_of(event) == (mine.job, mine.restart)
    ]  # fmt: skip
    job = candidacies[-1].details.get("owner") if candidacies else None
    starts = [e.attempt for e in history if e.event == EventName.ATTEMPT_STARTED and restart_of(e)[0] == job]
    if job is None or not starts:
        return None
    restart, cycle = starts[-1].split(".")[1:]
    return Attempt(job=job, restart=int(restart), cycle=int(cycle))


def see_off(run: RunFolder, before: Owner | Attempt) -> str | None:
    """Cancel the job of the owner before, if that gives no signs of life any more: it would keep its nodes.

    Returns its state when it was cancelled, empty when it is gone, and None while it may be leaving; blocking.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run folder cannot be read or written.
    """
    if run_folder.is_fresh(run, before):
        return None
    job = job_of(run, before.job)
    found = own_jobs.find_one(job)
    if found is None:
        return ""
    if found.state == "COMPLETING":
        return None
    own_jobs.cancel(job)
    return found.state


def places_of_owner(run: RunFolder) -> tuple[ReplicaPlace, ...]:
    """The replicas of the job that has taken the run over; none where that cannot be read.

    Raises:
        StorageError: the file cannot be read.
    """
    found = (read_json(_places_file(run)) or {}).get("replicas")
    try:
        return tuple(ReplicaPlace.parse(each, "a replica") for each in found or [])
    except (BadMessage, TypeError):
        return ()


def _places_file(run: RunFolder) -> Path:
    return folder_of(run.path) / "replicas.json"


# --- The owner's side of a handover: submits a successor in time, watches it, and calls it off when the run stops ---

LOOK_S = 0.5
ASK_S = 3.0
"""How often Slurm is asked for the successor."""

TIMES_S = 30.0
"""How often it is asked for this job's end: its time limit may be changed."""

PATIENCE_S = 30.0
SUBMITTING_S = 90.0
"""The longest wait, at the end, for a submission that is under way: its job would be an orphan."""

log = logging.getLogger(__name__)


class Giver:
    """Hands the endpoint of this job over to another one, where that is wanted and possible.

    Args:
        startup_s: the measured seconds of a start; None before that is known.
    """

    def __init__(
        self, config: RunConfig, start: Start, cluster: SlurmCluster, slurm: SlurmNotices,
        startup_s: Callable[[], float | None],
    ) -> None:  # fmt: skip
        assert config.serving is not None
        self._config, self._serving, self._start, self._slurm = config, config.serving, start, slurm
        self._cluster, self._run, self._journal, self._startup_s = cluster, start.run, start.journal, startup_s
        self._job, self._since_s, self._in_folder = cluster.attempt.job, self._now(), start.thread.ask
        self._reason = ""
        self._ends_s: float | None = None
        self._asked_s = self._timed_s = -1e9
        self._alive_since_s: float | None = None
        self._again_s = 0.0
        self._told_waits = ""
        self._submitting: asyncio.Task[None] | None = None
        self._given_up = False
        self._wanted = asyncio.Event()
        self.is_held: Callable[[], bool] = lambda: False
        """Whether none may begin at the moment."""

        self.suspects: Sequence[str] = ()
        """Nodes that the successor is to do without."""

        self._record: Handover | None = None
        self._tries = 0
        self.successor = Successor.NONE
        """As of the last look."""

    def want(self, reason: str) -> bool:
        """Begin at once; whether that is still to be tried, and was not wanted before."""
        if self._given_up or self._reason or self._record is not None:
            return False
        self._reason = reason
        self._wanted.set()
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether a successor is submitted, or is about to be."""
        return self._record is not None or self._submitting is not None

    async def watch(self) -> None:
        """Do what is to be done, until cancelled."""
        self._since_s = self._now()
        await self._try(self._adopt)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), LOOK_S)
            self._wanted.clear()
            await self._try(self._look)

    async def call_off(self, reason: str) -> None:
        """The run stops, and its successor with it."""
        await self._try(lambda: self._in_folder(self._forget))
        if self._submitting is not None:
            await asyncio.wait([self._submitting], timeout=SUBMITTING_S)
        if self._record is None or not self._record.successor:
            return
        job = self._record.successor
        self._record = None
        self._journal.append(EventName.HANDOVER_CALLED_OFF, job=job, reason=reason)
        await self._try(lambda: asyncio.to_thread(cancel, self._run, job))

    async def finish(self) -> None:
        """Wait for a submission that is under way: what it submits is to be known."""
        if self._submitting is not None:
            await asyncio.wait([self._submitting], timeout=SUBMITTING_S)

    # The loop

    async def _adopt(self) -> None:
        """Go on with what an earlier supervisor of this job has begun."""
        found = await self._in_folder(lambda: read_handover(self._run.path))
        if found is not None and found.predecessor == self._job:
            self._record, self._tries, self._reason = found, found.tries, found.reason
            if not found.successor:
                self._submitting = asyncio.create_task(self._submit(tried=True))

    async def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._timed_s > TIMES_S:
            self._timed_s = now_s
            self._ends_s = (await self._slurm.times()).end
        if self._submitting is not None:
            if not self._submitting.done():
                return
            task, self._submitting = self._submitting, None
            task.result()
        if self._record is not None and self._record.successor and now_s - self._asked_s > ASK_S:
            self._asked_s = now_s
            await self._ask(self._record)
        match self._next_step():
            case Step.SUBMIT if not self.is_held():
                self._tries += 1
                self._submitting = asyncio.create_task(self._submit(tried=False))
            case Step.REPLACE if self._record is not None:
                job = self._record.successor
                await asyncio.to_thread(cancel, self._run, job)
                await self._lost(job, "it did not become ready in time (inference.startup_timeout_s)")
            case Step.GIVE_UP if not self._given_up:
                self._given_up = True
                self._journal.append(EventName.HANDOVER_FAILED, reason=f"no successor took over in {self._tries} tries")

    def _next_step(self) -> Step:
        assert self._config.inference is not None
        limit_s = self._config.inference.startup_timeout_s + self._config.fault_tolerance.launch_timeout_s
        return next_step(
            self.successor, now_s=self._now(), due_s=self._due_s(), alive_since_s=self._alive_since_s,
            start_limit_s=limit_s, tries=self._tries, again_s=self._again_s,
        )  # fmt: skip

    def _due_s(self) -> float | None:
        if self._reason:
            return self._since_s
        lead = lead_s(self._serving.handover_lead_s, startup_s=self._startup_s(),
                      stop_s=float(self._config.preemption.signal_lead_s))  # fmt: skip
        return due_s(lead, owned_since_s=self._since_s, ends_s=self._ends_s)

    def _now(self) -> float:
        return self._slurm.terms.clock.at(time.monotonic())

    # The successor

    async def _submit(self, *, tried: bool) -> None:
        reason = self._reason or "the time limit comes"
        self._record = Handover(predecessor=self._job, reason=reason, tries=self._tries)
        record = self._record
        if not tried:
            await self._in_folder(lambda: self._locked(lambda: write_handover(self._run.path, record)))
            self._journal.append(EventName.HANDOVER_BEGUN, reason=reason, tries=self._tries)
        try:
            job = await asyncio.to_thread(self._sbatch, tried)
        except SlurmUnavailable as error:  # it may have arrived: the next try looks for it
            log.warning("the successor could not be submitted yet: %s", error.what)
            self._submitting = asyncio.create_task(self._submit(tried=True))
            return
        except (SlurmError, OSError) as error:
            await self._in_folder(lambda: self._locked(lambda: call_off(self._run.path)))
            self._record, self.successor = None, Successor.NONE
            self._again_s = self._now() + PAUSE_S
            self._journal.append(EventName.HANDOVER_FAILED, reason=str(error))
            return
        if await self._in_folder(lambda: self._note(job)):
            self._record, self.successor, self._asked_s = replace(record, successor=job), Successor.UNKNOWN, -1e9
            self._alive_since_s = None
        else:
            self._record = None
            self._journal.append(EventName.HANDOVER_CALLED_OFF, job=job, reason="the handover was called off meanwhile")
            await asyncio.to_thread(cancel, self._run, job)

    def _sbatch(self, tried: bool) -> str:
        script = self._run.script
        options = successor_options(self._config, script, self._cluster)
        placement = next_placement(
            self._config, partition=self._cluster.job.partition, job=self._cluster.own, history=self._start.history,
            suspects=tuple(self.suspects),
        )  # fmt: skip
        excluded = set(placement.excluded if placement is not None else ())
        if self._serving.port:  # two routers cannot have the same port of a node
            excluded |= set(expand(self._cluster.job.nodes))
        if excluded:
            options.append(f"--exclude={compress(excluded)}")
        with self._run.lock():
            known = self._run.own_jobs()
        job = own_jobs.submit_beside(script, beside=self._cluster.own, options=options, environment=os.environ,
                                      patience_s=PATIENCE_S, known=known, tried=tried)  # fmt: skip
        self._journal.append(EventName.SUCCESSOR_SUBMITTED, job=job, excluded=sorted(excluded))
        return job

    def _note(self, job: str) -> bool:
        """Remember the job; whether it is to be the successor."""
        with self._run.lock():
            self._run.add_successor(job, self._cluster.own)
            found = read_handover(self._run.path)
            if found is None or found.successor not in ("", job):
                return False
            write_handover(self._run.path, replace(found, successor=job))
            return True

    async def _ask(self, record: Handover) -> None:
        job = await self._in_folder(lambda: job_of(self._run, record.successor))
        try:
            found = await asyncio.to_thread(own_jobs.find_one, job)
        except SlurmError as error:
            log.debug("the successor: %s", error.what)
            self.successor = Successor.UNKNOWN
            return
        if found is not None and found.waiting:
            self.successor, self._alive_since_s = Successor.WAITING, None
            await self._tell_waits(record, found.reason, found.start)
        elif found is not None and found.alive and found.state != "COMPLETING":
            if self.successor is not Successor.ALIVE:
                self._alive_since_s = self._now()
                await self._tell_waits(record, "", None)
            self.successor = Successor.ALIVE
        else:
            await self._lost(record.successor, "it has ended" if found is None else found.state.lower())

    async def _tell_waits(self, record: Handover, reason: str, expected_s: float | None) -> None:
        """Say early that the endpoint may be away for a while, in the journal and for ``slurmft status``."""
        if reason == self._told_waits:
            return
        self._told_waits, words = reason, ""
        if reason:
            ends_s, startup_s = self._ends_s, self._startup_s()
            away_s = None
            if ends_s is not None and expected_s is not None and startup_s is not None:
                away_s = max(0.0, expected_s + startup_s - ends_s)
            self._journal.append(EventName.SUCCESSOR_WAITS, job=record.successor, reason=reason, expected=expected_s,
                                 ends=ends_s, away_s=away_s)  # fmt: skip
            words = f"job {record.successor} waits ({reason})"
            if ends_s is not None:
                at = time.strftime("%H:%M", time.localtime(ends_s))
                until = "until that job is ready" if away_s is None else f"for about {away_s:.0f} s"
                words += f"; the endpoint will be away from {at} {until}" if away_s != 0 else ""
        await self._in_folder(lambda: self._locked(lambda: self._note_waits(words)))

    def _note_waits(self, words: str) -> None:
        if (found := read_handover(self._run.path)) is not None and found.predecessor == self._job:
            write_handover(self._run.path, replace(found, waits=words))

    async def _lost(self, job: str, reason: str) -> None:
        self._journal.append(EventName.SUCCESSOR_LOST, job=job, reason=reason)
        await self._in_folder(self._forget)
        self._record, self.successor, self._alive_since_s, self._told_waits = None, Successor.GONE, None, ""
        self._again_s = self._now() + PAUSE_S

    # The run folder

    def _forget(self) -> None:
        with self._run.lock():
            found, owner = read_handover(self._run.path), self._run.owner()
            if found is not None and found.predecessor == self._job and (owner is None or owner.job == self._job):
                call_off(self._run.path)

    def _locked(self, work: Callable[[], None]) -> None:
        with self._run.lock():
            owner = self._run.owner()
            if owner is not None and owner.job == self._job:
                work()

    async def _try(self, work: Callable[[], Any]) -> None:
        try:
            await work()
        except (SlurmError, StorageError, OSError) as error:
            log.warning("the handover: %s", error)


def call_off_for_good(run: RunFolder, cluster: Cluster, journal: Journal, reason: str) -> None:
    """The run has been decided to stop: no successor may go on with it; blocking."""
    try:
        with run.lock():
            found, owner = read_handover(run.path), run.owner()
            if found is None or owner is None or found.predecessor != owner.job or owner.job != cluster.attempt.job:
                return
            call_off(run.path)
        if found.successor:
            journal.append(EventName.HANDOVER_CALLED_OFF, job=found.successor, reason=reason)
            cancel(run, found.successor)
    except (SlurmError, StorageError, OSError) as error:
        log.error("the successor job may be left: %s", error)


def cancel(run: RunFolder, job_id: str) -> None:
    """Cancel a job of the run, if it is still that job; blocking.

    Raises:
        SlurmError: Slurm refused or did not answer.
        StorageError: the run folder cannot be read.
    """
    job = next((each for each in run.own_jobs() if each.job_id == job_id), None)
    if job is not None:
        own_jobs.cancel(job)


# --- Jobs that lend nodes, for those that are lost and for those that the load needs ---

BORROW_S, LEAST_LOAN_S, LEAST_PATIENT_LOAN_S = 10.0, 300.0, 60.0
"""How often it is looked after loans, and of the job's time what makes one worth it."""

REFUSED_S = 60.0
"""After a job that Slurm has refused, none is submitted."""

FLUSH_S = 10.0
BEGIN_S = 5.0


class Lenders:
    """Jobs that lend a node each to this endpoint, or the nodes of a trial to a sweep. They are found by their name, so
    that none is ever forgotten: not those of a supervisor before this one, of the job before, or whose submission got
    no answer.

    Args:
        is_patient: a job may wait for its node as long as it has to.
        spread: no two on one node.
        nodes: of each job.
    """

    def __init__(
        self, config: RunConfig, start: Start, slurm: SlurmNotices, *, is_patient: bool = False, spread: bool = True,
        nodes: int = 1,
    ) -> None:  # fmt: skip
        self._config, self._run, self._journal, self._slurm = config, start.run, start.journal, slurm
        self._is_patient, self._spread, self._nodes = is_patient, spread, nodes
        self.jobs: dict[str, JobRecord | None] = {}
        """Those that wait, or have a node; None for one that was submitted just now."""

        self._since_s: dict[str, float] = {}
        self._look_s, self._again_s, self._problem = 0.0, 0.0, ""
        self._is_known = False
        """Slurm has said once which there are."""

    @property
    def state(self) -> str:
        """What is waited for, in words behind others; empty for nothing."""
        waits = [(job, each.reason) for job, each in self.jobs.items() if each is not None and each.waiting]
        told = [f"job {job}, which will lend a node, waits: {reason}" for job, reason in waits[:2]]
        told += [f"{len(waits) - 2} more wait"] * (len(waits) > 2) + [self._problem] * bool(self._problem)
        return "".join(f"; {each}" for each in told)

    def own(self, links: Iterable[AgentLink]) -> int:
        """How many of the agents that take part are on nodes of the run's own job."""
        return sum(link.lender not in self.jobs and not link.leaving for link in links)

    async def balance_agents(
        self, links: Collection[AgentLink], nodes: Collection[str], is_used: Callable[[int], bool], *, needed: int,
        wanted: int, own: int, hoped: int,
    ) -> list[AgentLink]:  # fmt: skip
        """As ``balance``, for the agents that take part; returns those that are to be let go.

        Args:
            nodes: of the run's own job, and those that are lost.
            is_used: whether anything is, or ends, on the node of this number.
        """
        found: dict[str, list[AgentLink]] = {}
        for link in links:
            if link.lender in self.jobs and not link.leaving:
                found.setdefault(link.lender, []).append(link)
        lent = {job: mine for job, mine in found.items() if len(mine) >= self._nodes}
        given_back = await self.balance(
            {job: any(is_used(link.node) for link in mine) for job, mine in lent.items()},
            {*nodes, *(link.host for link in links if self._spread)},
            needed=needed, wanted=wanted, own=own, hoped=hoped,
        )  # fmt: skip
        return [link for job in given_back for link in lent.get(job, ())]

    async def balance(
        self, serving: Mapping[str, bool], beside: Collection[str], *, needed: int, wanted: int, own: int, hoped: int
    ) -> tuple[str, ...]:  # fmt: skip
        """Submit and cancel jobs; returns those that give their nodes back.

        Args:
            serving: jobs whose agents are there, and whether anything is, or ends, on their nodes.
            beside: nodes that are no use.
            needed, wanted, own, hoped: as for ``lending``.
        """
        now_s = time.monotonic()
        try:
            if now_s >= self._look_s and (self.jobs or needed > hoped or not self._is_known):
                self._look_s, was_known = now_s + BORROW_S, self._is_known
                self.jobs = {each.job_id: each for each in await asyncio.to_thread(own_jobs.lenders, self._run)}
                self._is_known = True
                await self._begin_requeued()
                if self.jobs and not was_known:  # left by another supervisor: their nodes were taken for our own
                    return ()
            fresh = {*serving} | {job for job, each in self.jobs.items() if self._is_patient and each and each.waiting}
            self._since_s = {job: now_s if job in fresh else self._since_s.get(job, now_s) for job in self.jobs}
            loans = [Loan(job=job, since_s=since_s, has_node=job in serving, serves=serving.get(job, False))
                     for job, since_s in self._since_s.items()]  # fmt: skip
            then = lending(loans, needed=needed, wanted=wanted, own=own, hoped=hoped, now_s=now_s,
                           again_s=self._again_s)  # fmt: skip
            if now_s >= self._again_s:
                self._problem = ""
            for job in then.give_back:
                await self._cancel(job, "no more nodes are needed")
            for job in then.give_up:
                self._problem, self._again_s = f"job {job} has lent no node for too long", now_s + LOAN_PAUSE_S
                await self._cancel(job, self._problem)
            if then.borrow and self._is_known and self._config.preemption.continue_by not in ("nothing", "job"):
                await self._borrow(then.borrow, beside)
        except SlurmError as error:  # what was submitted without an answer is found before the next one
            self._problem = f"no other node: {error.what}"
            self._look_s = now_s + BORROW_S
            # such as a limit on jobs, which is not to be tried all the time
            self._again_s = now_s + (BORROW_S if isinstance(error, SlurmUnavailable) else REFUSED_S)
            return ()
        return then.give_back

    async def _begin_requeued(self) -> None:
        """Slurm lets a job that was preempted, or has lost its node, wait for two minutes; one of these need not."""
        for job, record in self.jobs.items():
            if record is not None and record.waiting and record.reason == "BeginTime":
                with contextlib.suppress(SlurmError):  # it begins later then
                    await asyncio.to_thread(own_jobs.begin_in, OwnJob(job, record.identity), 0, patience_s=BEGIN_S)

    async def _borrow(self, count: int, beside: Collection[str]) -> None:
        end = (await self._slurm.times()).end
        left_s = math.inf if end is None else end - self._slurm.terms.clock.at(time.monotonic())
        if left_s < (LEAST_PATIENT_LOAN_S if self._is_patient else LEAST_LOAN_S):
            return
        name, options = own_jobs.lenders_name(self._run), {} if end is None else {"time": int(left_s / 60)}
        avoid = await asyncio.to_thread(avoided_nodes.for_submission, self._config, options, os.environ)
        argv = own_jobs.lending_command(
            self._config, self._run, nodes=self._nodes, options={**options, "job-name": name},
            avoid=frozenset({*beside, *avoid.nodes}),
        )  # fmt: skip
        self._journal.append(EventName.BORROWING, nodes=count * self._nodes, name=name)
        if not await asyncio.to_thread(self._journal.flush, FLUSH_S):
            return  # what is not noted is not submitted
        for _ in range(count):
            job = await asyncio.to_thread(own_jobs.submit_lender, argv)
            self.jobs[job], self._since_s[job], self._problem = None, time.monotonic(), ""
            self._journal.append(EventName.JOINING, job=job, nodes=self._nodes, who="the supervisor")

    async def _cancel(self, job: str, reason: str) -> None:
        record = self.jobs[job]
        await asyncio.to_thread(own_jobs.cancel, OwnJob(job) if record is None else OwnJob(job, record.identity))
        del self.jobs[job]
        self._since_s.pop(job, None)
        self._journal.append(EventName.LENDER_CANCELLED, job=job, reason=reason)


def end_lenders(start: Start) -> None:
    """Cancel the jobs that lend nodes to this run, at its end in this job, unless another job owns it; blocking."""
    try:
        owner = start.run.owner()
        if not start.candidate and (owner is None or owner.generation == start.generation):
            for job in own_jobs.end_lenders(start.run):
                start.journal.append(EventName.LENDER_CANCELLED, job=job, reason="the endpoint ends here")
    except (SlurmError, StorageError, OSError) as error:
        log.warning("jobs that lend nodes to this run may be left: %s", error)
