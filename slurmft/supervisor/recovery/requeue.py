"""How a run goes on in Slurm: a requeue of this job, or a successor; on other nodes, where that is asked."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmError, SlurmUnavailable, StorageError
from slurmft.policy.site.job_identity import JobIdentity, OwnJob
from slurmft.policy.timing.begin_delay import delay_that_holds
from slurmft.policy.verdicts.verdict import PLANNED, Cause, Verdict
from slurmft.scheduler import own_jobs, queueing, slurm, successor
from slurmft.scheduler.nodes import compress, expand
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.recovery.place_elsewhere import Placement
from slurmft.supervisor.start import Start
from slurmft.system.files import replace_atomically

OTHERS_END_S = 4
"""Added to the begin time when the step did not end in order: its slurmstepds still look for an srun that is gone
(2.5 s were seen), and a begin time that has passed before they end falls back to Slurm's 121 s."""

BATCH_HOST_LOST_S = 30
"""Added where a standby requeues the job: without its batch host it was COMPLETING for 14 to 21 s (22.05, 26.05)."""

SHRUNK_S = 6
"""Added once more after a dead node was given back."""

FLUSH_S = 5.0
"""How long an action waits for the run folder to take the decision it follows."""

SLURM_PATIENCE_S = 600.0
"""How long a silent Slurm is asked again where no end of the job presses."""

OTHERS_PATIENCE_S = 2.0
"""How long a silent Slurm is asked for a job that may be this one's successor already."""

HANDED_ON = ("resubmitted", "left to job ")
"""Beginnings of what ``Continuation.begin`` returns where another job continues the run."""

log = logging.getLogger(__name__)


class Continuation:
    """Makes a job's run go on. Call its methods with signals ignored: a requeue signals its caller.

    Args:
        ends_at_s: monotonic time at which Slurm will have ended the job; None when no end is known.
        placement: where it must not go on; None leaves the job's excluded nodes alone.
        retry_delay_s: additional delay of a requeue.
    """

    def __init__(
        self, config: RunConfig, start: Start, cluster: SlurmCluster, *, ends_at_s: float | None,
        placement: Placement | None, retry_delay_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._config, self._start, self._cluster, self._ends_at_s = config, start, cluster, ends_at_s
        self._run, self._journal = start.run, start.journal
        self._placement, self._retry_delay_s = placement, retry_delay_s
        self._avoid = None if placement is None else placement.excluded

    def begin(self, verdict: Verdict) -> str:
        """How the run continues; empty when it does not."""
        how = self._config.preemption.continue_by
        outside = self._cluster.why_ending()
        if outside is not None and outside[0] in (Cause.REQUEUED, Cause.CANCELLED):
            # another process requeued the job first: a second requeue must not follow, and a cancelled run must stay
            # cancelled
            self._journal.append(EventName.LEFT_TO_SLURM, reason=outside[1])
            if outside[0] is Cause.REQUEUED:
                self._place()
            return outside[0].value
        if (other := self._other_job()) is not None:
            self._journal.append(
                EventName.NOT_CONTINUED, reason=f"job {other} of this run is in the queue", job=other.job_id
            )
            return f"left to job {other}"
        if how == "auto" and self._began_to_resubmit():
            how = "resubmit"
        if how == "auto" and verdict.cause is Cause.PREEMPTED and self._preemption_cancels():
            reason = f"partition {self._cluster.job.partition} cancels what it preempts"
            self._journal.append(EventName.REQUEUE_SKIPPED, reason=reason)
            how = "resubmit"
        if how in ("auto", "requeue") and (done := self._requeue(verdict)):
            return done
        if how in ("auto", "resubmit") and self._resubmit():
            return "resubmitted"
        return ""

    def begin_after_another(self) -> bool:
        """Whether another process has requeued or cancelled the job.

        The process that requeued it may have been killed before it could set a begin time that lies after our end.
        """
        outside = self._cluster.why_ending()
        if outside is not None and outside[0] is Cause.REQUEUED:
            self._place()
        return outside is not None and outside[0] in (Cause.REQUEUED, Cause.CANCELLED)

    def _began_to_resubmit(self) -> bool:
        """Whether an earlier supervisor was killed while it submitted a successor: a requeue must not follow then."""
        mine = str(self._cluster.attempt)
        return any(event.event == EventName.RESUBMITTING and event.attempt == mine for event in self._start.history)

    def _requeue(self, verdict: Verdict) -> str:
        job, delay_s = self._cluster.own, self._config.preemption.requeue_delay_s
        job_id = job.job_id
        if verdict.cause not in PLANNED:
            delay_s += OTHERS_END_S + round(self._retry_delay_s)
        lost = frozenset(self._cluster.lost).union(verdict.suspect_nodes if verdict.cause is Cause.NODE_LOST else ())
        if self._give_back(lost - self._cluster.given_back):
            delay_s += SHRUNK_S
        delay_s = delay_that_holds(delay_s + self._batch_host_s(), past_requeues(self._start.history, job_id))
        nodes = None
        if self._cluster.given_back:
            nodes = self._config.nodes_range or self._cluster.job.node_count
        self._journal.append(EventName.REQUEUEING, job=job_id, delay_s=delay_s, **self._in_words())
        self._flush()
        try:
            done = queueing.requeue(
                job, restart=self._cluster.attempt.restart, delay_s=delay_s, avoid=self._avoid, nodes=nodes,
                patience_s=self._patience_s(), orderly=verdict.cause in PLANNED and not self._cluster.lost,
                has_epilog=self._cluster.has_epilog,
            )  # fmt: skip
        except queueing.JobCancelled as error:
            self._journal.append(EventName.NOT_CONTINUED, reason=error.what)
            return "cancelled"
        except SlurmError as error:
            self._journal.append(EventName.REQUEUE_FAILED, job=job_id, reason=error.what)
            log.warning("the job could not be requeued: %s", error.what)
            return ""
        queueing.keep_ahead(job, done)
        self._journal.append(EventName.REQUEUED, job=job_id, **done.in_words())
        return "requeued"

    def _give_back(self, lost: frozenset[str]) -> bool:
        """Whether the job was shrunk to its living nodes: a node that Slurm believes alive would delay the requeue."""
        nodes = [node for node in expand(self._cluster.job.nodes) if node not in self._cluster.given_back]
        living = [node for node in nodes if node not in lost]
        if len(living) == len(nodes) or not living or nodes[0] in lost:  # the first one is the batch host
            return False
        try:
            queueing.shrink(self._cluster.own, living)
        except SlurmError as error:  # Slurm has noticed by itself, or does not answer
            self._journal.append(EventName.NOT_SHRUNK, reason=error.what)
            return False
        self._cluster.given_back |= lost
        self._journal.append(EventName.SHRUNK, lost=sorted(lost & set(nodes)))
        return True

    def _batch_host_s(self) -> int:
        is_watched = self._config.fault_tolerance.standby_supervisor
        is_lost = is_watched and expand(self._cluster.job.nodes)[0] in self._cluster.lost
        return BATCH_HOST_LOST_S if is_lost else 0

    def _place(self) -> None:
        """Set a begin time for a job that Slurm requeues, to save two minutes; other nodes' processes end later."""
        job, delay_s = self._cluster.own, self._config.preemption.requeue_delay_s + OTHERS_END_S + self._batch_host_s()
        delay_s = delay_that_holds(delay_s, past_requeues(self._start.history, job.job_id))
        done = queueing.place(job, delay_s, avoid=self._avoid)
        queueing.keep_ahead(job, done)
        self._journal.append(EventName.PLACED, job=job.job_id, **done.in_words(), **self._in_words())

    def _resubmit(self) -> bool:
        job_id, script = self._cluster.job.job_id, self._run.script
        try:
            next_job = self._successor(successor_options(self._config, script, self._cluster))
        except (SlurmError, OSError) as error:
            self._journal.append(EventName.RESUBMIT_FAILED, reason=str(error))
            log.warning("no successor could be submitted: %s", error)
            return False
        self._journal.append(EventName.RESUBMITTED, job=next_job, after=job_id)
        in_folder(self._start, lambda: self._note_successor(next_job))
        return True

    def _successor(self, options: Sequence[str]) -> str:
        if self._placement is None:
            return self._sbatch(options)
        try:
            return self._sbatch([*options, f"--exclude={compress(self._placement.excluded)}"])
        except SlurmUnavailable:
            raise
        except SlurmError as error:  # perhaps for what we exclude: a run on a suspect node is better than none
            if self._placement.excluded == self._placement.own:
                raise
            self._journal.append(EventName.EXCLUSIONS_REFUSED, reason=error.what)
            log.warning("submitting without the nodes that the run would keep off: %s", error.what)
            return self._sbatch([*options, f"--exclude={compress(self._placement.own)}"])

    def _sbatch(self, options: Sequence[str]) -> str:
        job, script = self._cluster.own, self._run.script
        command = successor.successor_command(script, after=job, options=options)
        self._journal.append(EventName.RESUBMITTING, command=shlex.join(command))
        self._flush()
        return successor.submit_successor(
            script, after=job, options=options, environment=os.environ, patience_s=self._patience_s(),
            known=in_folder(self._start, self._run.own_jobs) or [], tried=self._began_to_resubmit(),
        )  # fmt: skip

    def _note_successor(self, job_id: str) -> None:
        known = self._cluster.own.known
        seen = JobIdentity(user=os.getuid(), cluster=known.cluster, script=str(self._run.script))
        with self._run.lock():
            self._run.add_job(job_id, seen)

    def _other_job(self) -> OwnJob | None:
        """A later job of the run that is in the queue, or about to start: two of them would be one too many."""
        jobs: list[OwnJob] = in_folder(self._start, self._run.own_jobs) or []
        ids = [job.job_id for job in jobs]
        mine = self._cluster.job.job_id
        later = jobs[ids.index(mine) + 1 :] if mine in ids else []
        if not later:
            return None
        try:
            found = own_jobs.find(later, patience_s=OTHERS_PATIENCE_S)
        except SlurmError:
            return None  # two jobs are better than none: only one of them can own the run
        in_queue = [
            job for job, record in found.items() if record.waiting or record.state in ("CONFIGURING", "RUNNING")
        ]
        return in_queue[-1] if in_queue else None

    def _patience_s(self) -> float:
        """How long to wait for Slurm's answer: until the job's time is up, where that is known."""
        if self._ends_at_s is None:
            return SLURM_PATIENCE_S
        return max(slurm.PATIENCE_S, self._ends_at_s - time.monotonic())

    def _preemption_cancels(self) -> bool:
        try:
            return slurm.preempt_mode(self._cluster.job.partition) == "CANCEL"
        except SlurmError:
            return False

    def _flush(self) -> None:
        self._journal.flush(FLUSH_S)

    def _in_words(self) -> dict[str, Any]:
        return {} if self._avoid is None else {"excluded": compress(self._avoid)}


def successor_options(config: RunConfig, script: Path, cluster: SlurmCluster) -> list[str]:
    """sbatch options with which ``script`` makes a job like this one; writes the script where it is not there.

    Raises:
        SlurmError: Slurm has the script, and refused or did not answer.
        OSError: it cannot be written.
    """
    options = [f"--chdir={Path.cwd()}"]
    if not script.is_file():  # submitted with plain sbatch: Slurm has the script, the environment its options
        replace_atomically(script, successor.batch_script(cluster.own))
        section = config.preemption
        signal_option = f"--signal={section.signal}@{section.signal_lead_s}"
        options += ["--requeue", "--open-mode=append", signal_option, *successor.inherited_options(os.environ)]
    return options


def past_requeues(history: Iterable[Event], job_id: str) -> list[tuple[int, float]]:
    """Of each requeue of the job that asked for a begin time: the delay, and the seconds until the job began."""
    found: list[tuple[int, float]] = []
    requeued: dict[int, Event] = {}
    for event in history:
        job, restart = restart_of(event)
        if job != job_id:
            continue
        if event.event in (EventName.REQUEUED, EventName.PLACED):
            requeued[restart] = event
        elif event.event == EventName.ATTEMPT_STARTED and (before := requeued.pop(restart - 1, None)) is not None:
            delay_s = before.details.get("delay_s")
            found += [(delay_s, (event.at - before.at).total_seconds())] if isinstance(delay_s, int) else []
    return found


def restart_of(event: Event) -> tuple[str, int]:
    """Job and restart of the writer; ("", 0) where a user wrote it."""
    job, _, rest = event.attempt.partition(".")
    count = rest.partition(".")[0]
    return (job, int(count)) if count.isdecimal() else ("", 0)


def in_folder(start: Start, work: Callable[[], Any]) -> Any:
    """What ``work`` returns; None when the run folder fails, which must not block what follows."""
    try:
        return start.thread.call(work, timeout_s=FLUSH_S)
    except (StorageError, OSError) as error:
        log.warning("%s", error)
        return None
