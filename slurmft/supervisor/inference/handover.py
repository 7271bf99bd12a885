"""The owner's side of a handover: submits a successor in time, watches it, and calls it off when the run stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmError, SlurmUnavailable, StorageError
from slurmft.inference.serving.handover import Handover, call_off, read_handover, write_handover
from slurmft.policy.inference.handover import PAUSE_S, Situation, Step, Successor, due_s, lead_s, next_step
from slurmft.policy.site.job_identity import JobIdentity, OwnJob
from slurmft.scheduler import own_jobs, successor
from slurmft.scheduler.nodes import compress, expand
from slurmft.storage.events import EventName
from slurmft.storage.journal import Journal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.cluster import Cluster, SlurmCluster
from slurmft.supervisor.job_state import SlurmsWord
from slurmft.supervisor.recovery.place_elsewhere import next_placement
from slurmft.supervisor.recovery.requeue import successor_options
from slurmft.supervisor.start import Start

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
        self, config: RunConfig, start: Start, cluster: SlurmCluster, slurm: SlurmsWord,
        startup_s: Callable[[], float | None],
    ) -> None:  # fmt: skip
        assert config.inference is not None and config.inference.serving is not None
        self._config, self._serving, self._start, self._slurm = config, config.inference.serving, start, slurm
        self._cluster, self._run, self._journal, self._startup_s = cluster, start.run, start.journal, startup_s
        self._job, self._since_s = cluster.attempt.job, self._now()
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
        match next_step(self._situation()):
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

    def _situation(self) -> Situation:
        assert self._config.inference is not None
        limit_s = self._config.inference.startup_timeout_s + self._config.fault_tolerance.launch_timeout_s
        return Situation(
            now_s=self._now(), due_s=self._due_s(), successor=self.successor, alive_since_s=self._alive_since_s,
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
        job = successor.submit_beside(script, beside=self._cluster.own, options=options, environment=os.environ,
                                      patience_s=PATIENCE_S, known=known, tried=tried)  # fmt: skip
        self._journal.append(EventName.SUCCESSOR_SUBMITTED, job=job, excluded=sorted(excluded))
        return job

    def _note(self, job: str) -> bool:
        """Remember the job; whether it is to be the successor."""
        known = self._cluster.own.known
        with self._run.lock():
            seen = JobIdentity(user=os.getuid(), cluster=known.cluster, script=str(self._run.script))
            self._run.add_job(job, seen)
            found = read_handover(self._run.path)
            if found is None or found.successor not in ("", job):
                return False
            write_handover(self._run.path, replace(found, successor=job))
            return True

    async def _ask(self, record: Handover) -> None:
        known = await self._in_folder(self._run.own_jobs)
        job = next((each for each in known if each.job_id == record.successor), OwnJob(record.successor))
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

    async def _in_folder(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._start.thread.submit(work))

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
