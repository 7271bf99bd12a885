"""A run's jobs as Slurm has them now, another job with the id of one recognized; and requeueing and signalling them."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.job_identity import JobIdentity, OwnJob, is_same_job
from slurmft.policy.stop import JobTimes
from slurmft.policy.verdict import Requeueing
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import (
    ALIVE,
    JOB_FORMAT,
    JobEnding,
    JobRecord,
    NamedNodes,
    job_pairs,
    parse_ending,
    parse_identity,
    parse_jobs,
    parse_named,
    parse_requeueing,
    parse_time,
    scrubbed,
)
from slurmft.scheduler.slurm import PATIENCE_S, compress, parse_job_times
from slurmft.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig

# --- A run's jobs as Slurm has them now; another job that has got the id of one is recognized ---
# Job ids are reused. So the answer to an id is compared with what the run recorded of its job before it is believed or
# acted on. A job that is not the run's counts as gone.

UNKNOWN_ID = "Invalid job id specified"


class ForeignJob(SlurmError):
    """The job with this id is not the run's; the run's job is gone."""


def find(jobs: Sequence[OwnJob], *, patience_s: float = 5.0) -> dict[OwnJob, JobRecord]:
    """What squeue knows of these jobs, with one question for each cluster.

    One that is absent is gone, or so old that Slurm has forgotten it, which does not mean that it has finished.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused.
    """
    found, unknown = find_where_answered(jobs, patience_s=patience_s)
    for error in unknown.values():
        raise error
    return found


def find_where_answered(
    jobs: Sequence[OwnJob], *, patience_s: float = 5.0
) -> tuple[dict[OwnJob, JobRecord], dict[OwnJob, SlurmError]]:
    """The same for jobs of several runs; of the jobs of another cluster that cannot be asked, the error instead.

    Raises:
        SlurmUnavailable: this machine's own cluster did not answer; nothing is known.
        SlurmError: it refused.
    """
    found: dict[OwnJob, JobRecord] = {}
    unknown: dict[OwnJob, SlurmError] = {}
    for cluster in sorted({cluster_to_ask(job) for job in jobs}):
        mine = [job for job in jobs if cluster_to_ask(job) == cluster]
        try:
            found |= _find_in(cluster, mine, patience_s)
        except SlurmError as error:
            if not cluster:
                raise
            unknown |= dict.fromkeys(mine, error)
    return found, unknown


def _find_in(cluster: str, jobs: Sequence[OwnJob], patience_s: float) -> dict[OwnJob, JobRecord]:
    ids = list(dict.fromkeys(job.job_id for job in jobs))
    records = slurm.jobs(ids, patience_s=patience_s, cluster=cluster)
    found = {job: records[job.job_id] for job in jobs if job.job_id in records}
    return {job: record for job, record in found.items() if _is_ours(job, record.identity)}


def find_one(job: OwnJob, *, patience_s: float = 5.0) -> JobRecord | None:
    """One job, or None when it is gone or forgotten. Raises as ``find``."""
    return find([job], patience_s=patience_s).get(job)


def show(job: OwnJob, *, patience_s: float = 3.0) -> str:
    """What ``scontrol -o show job`` says of the job, which is the run's.

    Raises:
        ForeignJob: another job has its id now.
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused, or knows no such job.
    """
    argv = ["scontrol", "-a", "-o", "show", "job", job.job_id]
    text = slurm.run_patiently(argv, patience_s=patience_s, cluster=cluster_to_ask(job))
    refuse_another(job, text)
    return text


def refuse_another(job: OwnJob, text: str) -> None:
    """Return when ``text``, of ``scontrol -o show job``, is about the run's job.

    Raises:
        ForeignJob: it is about another one.
    """
    if is_same_job(job.known, parse_identity(text)) is False:
        raise ForeignJob(f"job {job} of this run is gone: another job has its number now")


def cluster_to_ask(job: OwnJob) -> str:
    """The job's cluster where it is another one than this machine's; else empty."""
    theirs = job.known.cluster
    if not theirs or theirs.lower() == (here := _local_cluster(os.environ.get("SLURM_CONF", ""))).lower():
        return ""
    return theirs if here else ""


def local_cluster() -> str:
    """The name of the cluster that plain commands ask; empty where it is not known."""
    return _local_cluster(os.environ.get("SLURM_CONF", ""))


@functools.cache
def _local_cluster(configuration: str) -> str:
    named = slurm.configured_cluster({"SLURM_CONF": configuration} if configuration else {})
    if named:
        return named
    try:
        return slurm.site().cluster
    except SlurmError:
        return ""


def _is_ours(job: OwnJob, seen: JobIdentity) -> bool:
    same = is_same_job(job.known, seen)
    if same is not None:
        return same
    try:
        show(job)
    except SlurmUnavailable:
        raise
    except SlurmError:  # another job, or gone since
        return False
    return True


def identity_of(text: str, cluster: str) -> JobIdentity:
    """The job in ``scontrol -o show job``, to be remembered."""
    return replace(parse_identity(text), cluster=cluster)


def ending(job: OwnJob, restart: int) -> JobEnding:
    """Why Slurm is ending the job around this process, or that it is not.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    return why_ending(show(job), restart)


def is_newest_start(job: OwnJob, restart: int, host: str) -> bool:
    """Whether the start of this job that has had ``restart`` restarts, with its batch script on ``host``, is the one
    that Slurm knows of.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
        SlurmError: Slurm refused, knows no such job, or another job has the id.
    """
    pairs = job_pairs(show(job))
    restarts, batch_host = pairs.get("Restarts", ""), pairs.get("BatchHost", "")
    if pairs.get("JobState") not in ALIVE or (restarts.isdecimal() and int(restarts) > restart):
        return False
    return not (host and batch_host) or host == batch_host


def restarts(job: OwnJob) -> int:
    """How often Slurm has started the job again.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    told = job_pairs(show(job)).get("Restarts", "")
    return int(told) if told.isdecimal() else 0


def why_ending(text: str, restart: int) -> JobEnding:
    """``parse_ending``, which has to know the grace when a user may have cancelled a job that is being preempted."""
    found = parse_ending(text, restart)
    if found is not JobEnding.PREEMPTED:
        return found
    partition = job_pairs(text).get("Partition", "")
    try:
        if not slurm.site().preempt_type.endswith("partition_prio"):
            return found  # the grace is a QOS's, which only the accounting knows
        grace_s = next((each.grace_s for each in slurm.partitions() if each.name == partition), None)
    except SlurmError:
        return found
    return parse_ending(text, restart, grace_s=grace_s or 0.0)


def job_times(job: OwnJob, *, patience_s: float = 3.0) -> JobTimes:
    """When a job started, when Slurm will end it, and when a preemption of it began.

    Raises:
        SlurmError: Slurm refused or did not answer; nothing is known.
    """
    return parse_job_times(show(job, patience_s=patience_s))


def requeueing(job: OwnJob, restart: int, *, patience_s: float) -> Requeueing:
    """Whether Slurm may requeue the job around this process, and whether it has a reason to.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id; nothing is known.
    """
    return parse_requeueing(show(job, patience_s=patience_s), restart)


def named_nodes(job: OwnJob) -> NamedNodes:
    """Nodes that the job will not be placed on, and those that it asks for.

    Raises:
        SlurmError: Slurm refused, did not answer, or its answer cannot be parsed.
    """
    return parse_named(show(job, patience_s=5.0))


def cancelled_by(job: OwnJob) -> int | None:
    """Id of the user who cancelled the job, from the accounting; None where it is not recorded there."""
    argv = ["sacct", "-X", "-D", "-P", "-n", "-o", "UID,Submit,State,WorkDir,JobName", "-j", job.job_id]
    try:
        text = slurm.run(argv, timeout_s=5.0, cluster=cluster_to_ask(job))
    except SlurmError:
        return None
    rows = [fields for line in text.splitlines() if len(fields := line.split("|", 4)) == 5]
    seen = [(_identity_of_row(fields), fields[2]) for fields in rows]
    ours = [(identity, state) for identity, state in seen if is_same_job(job.known, identity) is not False]
    # what began when it did is the job itself; a later row may be another one with its id
    certain = [each for each in ours if set(each[0].submitted) & set(job.known.submitted)]
    for _, state in [*certain, *ours[-1:]]:
        if match := re.search(r"CANCELLED by (\d+)", state):
            return int(match.group(1))
    return None


def _identity_of_row(fields: Sequence[str]) -> JobIdentity:
    user, submitted, _, folder, name = fields
    at = parse_time(submitted)
    return JobIdentity(
        user=int(user) if user.isdecimal() else None, name=name, folder=folder or None,
        submitted=() if at is None else (at,), restarts=1,
    )  # fmt: skip


def release(job: OwnJob) -> None:
    """Release a job that is held.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    show(job, patience_s=5.0)
    slurm.run_patiently(["scontrol", "release", job.job_id], patience_s=5.0, cluster=cluster_to_ask(job))


def cancel(job: OwnJob) -> None:
    """Cancel a job; one that is gone already is fine.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    try:
        show(job, patience_s=5.0)
    except SlurmError as error:
        if UNKNOWN_ID in error.what:
            return
        raise
    slurm.run_patiently(["scancel", job.job_id], patience_s=5.0, cluster=cluster_to_ask(job))


# --- Requeueing a job: its begin time, and its excluded nodes ---

SOONEST_S = 2
"""Begin time of a job that is started anew from outside. slurmd refuses one that starts within a second of its last
end ("Job credential revoked"), and the job fails for good: Slurm's own 121 s are there to prevent that."""

REQUEUE_PAUSE_S = 0.5
SILENT_S = 8.0
COMPLETION_RETRY_S = 62
"""A controller that was away has not heard that the steps have ended: slurmd reports it again after 60 s. Until then
the job is COMPLETING, and a begin time before that would fall back to Slurm's 121 s."""

STEPS_END_S = 1.0
"""How long a step that has ended in order may still be counted as running, where its end has not got lost."""

SLOWNESS = 10
"""A job's begin time is at least so many times the duration of the requeue call itself: a slow controller is slow to
end a job, too, and a begin time that passes before that falls back to Slurm's 121 s."""

EARLY_S, EARLY_WITHOUT_EPILOG_S = 0.5, 1.0
"""How much sooner than asked a begin time may be, since Slurm counts in whole seconds. With no process left and no
epilog to wait for, the rest of a job was over 0.1 s after the last command, and 0.7 s on a machine with six processes
for each core."""

AHEAD_EVERY_S = 0.5
"""A process that ends in order is gone before the first time."""

log = logging.getLogger(__name__)


class JobCancelled(SlurmError):
    """The job was cancelled."""


class RequeueDisabled(SlurmError):
    """The site, or the job's own options, forbid requeueing it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requeued:
    """Which options of a requeue were applied. The job is in the queue in any case."""

    on_time: bool
    """The begin time could be set; if not, the job waits Slurm's own 121 s."""

    avoiding: bool
    """The excluded nodes are what they were asked to be; if not, they are what they were before."""

    delay_s: int
    """Seconds, from the moment at which it was set."""

    refusal: str = ""
    """Slurm's message where an option could not be set."""

    def in_words(self) -> dict[str, Any]:
        """The details for the journal."""
        facts: dict[str, Any] = {"delay_s": self.delay_s if self.on_time else "Slurm's own, about 121"}
        if not self.avoiding:
            facts["excluded_refused"] = self.refusal
        return facts


def requeue(
    job: OwnJob, *, restart: int, delay_s: int, patience_s: float = PATIENCE_S, avoid: Collection[str] | None = None,
    nodes: int | str | None = None, orderly: bool = False, has_epilog: bool = True,
) -> Requeued:  # fmt: skip
    """Put a job back into the queue, to begin ``delay_s`` seconds from now instead of Slurm's 121, elsewhere if asked.

    Where Slurm is slow it begins later (``SLOWNESS``), and where Slurm was away at the end of a step, later still
    (``COMPLETION_RETRY_S``).

    The begin time must lie in the future when the job's last process and epilog are gone; else Slurm adds its own
    wait (``slurmctld/job_mgr.c``, batch_requeue_fini). Called from inside the job, the requeue ends the caller: call it
    with signals ignored (``slurm.ignoring_signals``). Idempotent: a job that is pending already, or further than
    ``restart``, counts as requeued.

    Args:
        avoid: nodes that replace the job's excluded ones; None leaves those alone.
        nodes: size, or range of sizes, that the job gets back after it was shrunk.
        orderly: all steps of the job have ended by themselves, so one that Slurm still counts is one whose end it has
            not heard of.
        has_epilog: the site runs a script after each job.

    Raises:
        JobCancelled: the job was cancelled; a requeue would bring it back to life.
        ForeignJob: another job has its number now.
        RequeueDisabled: requeueing is off for this job and could not be switched on.
        SlurmUnavailable: Slurm did not answer for ``patience_s`` seconds.
        SlurmError: Slurm refused.
    """
    began = time.monotonic()
    try:
        _requeue_only(job, restart, patience_s)
    except RequeueDisabled:
        try:
            argv = ["scontrol", "update", f"JobId={job}", "Requeue=1"]
            slurm.run_patiently(argv, patience_s=patience_s, cluster=cluster_to_ask(job))
        except SlurmError as error:
            raise RequeueDisabled(f"job {job} may not be requeued: {error.what}") from error
        _requeue_only(job, restart, patience_s)
    took_s = time.monotonic() - began
    if took_s > SILENT_S or (orderly and _is_end_unheard(job)):
        delay_s += COMPLETION_RETRY_S
    else:
        delay_s = max(delay_s, math.ceil(SLOWNESS * took_s))
    early_s = min(EARLY_WITHOUT_EPILOG_S, delay_s / 2) if orderly and not has_epilog else EARLY_S
    return place(job, delay_s, avoid=avoid, nodes=nodes, patience_s=patience_s, early_s=early_s)


def place(
    job: OwnJob, delay_s: int, *, avoid: Collection[str] | None, nodes: int | str | None = None,
    patience_s: float = PATIENCE_S, early_s: float = EARLY_S,
) -> Requeued:  # fmt: skip
    """Set the begin time and excluded nodes of a pending or completing job; in one update, or what Slurm accepts.

    One unknown name among ``avoid`` makes Slurm refuse all of them: then the job keeps those it had, and the begin time
    is set by itself.
    """
    refusal = ""
    if avoid is not None:
        try:
            begin_in(job, delay_s, avoid=avoid, nodes=nodes, patience_s=patience_s, early_s=early_s)
        except SlurmError as error:
            refusal = error.what
            log.warning("job %s keeps the excluded nodes that it had: %s", job, refusal)
        else:
            return Requeued(on_time=True, avoiding=True, delay_s=delay_s)
    try:
        begin_in(job, delay_s, nodes=nodes, patience_s=patience_s, early_s=early_s)
    except SlurmError as error:
        log.warning("job %s is requeued, but begins only after Slurm's own delay: %s", job, error.what)
        return Requeued(on_time=False, avoiding=avoid is None, delay_s=delay_s, refusal=error.what)
    return Requeued(on_time=True, avoiding=avoid is None, delay_s=delay_s, refusal=refusal)


def keep_ahead(job: OwnJob, placed: Requeued) -> None:
    """Keep the begin time in the future for as long as this process lives: it is set anew every half second.

    Writes between the requeue and the end of the process may take longer than the delay, on a disk that is
    slow; the job is COMPLETING until then. A second is added, as the process may end just before the next time.
    """
    if not placed.on_time:
        return

    def work() -> None:
        while True:
            time.sleep(AHEAD_EVERY_S)
            try:
                begin_in(job, placed.delay_s + 1, patience_s=AHEAD_EVERY_S)
            except SlurmUnavailable:
                continue
            except SlurmError as error:
                log.warning("the begin time of job %s may be over too soon: %s", job, error.what)
                return

    threading.Thread(target=work, name="slurmft-begin", daemon=True).start()


def begin_in(
    job: OwnJob, delay_s: int, *, avoid: Collection[str] | None = None, nodes: int | str | None = None,
    patience_s: float = PATIENCE_S, early_s: float = EARLY_S,
) -> None:  # fmt: skip
    """Set the begin time of a pending or completing job, and its excluded nodes and size where they are given.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    when = "now" if delay_s <= 0 else f"now+{whole_seconds(delay_s, time.time(), early_s)}"
    argv = ["scontrol", "update", f"JobId={job}", f"StartTime={when}"]
    if avoid is not None:
        argv.append(f"ExcNodeList={compress(avoid)}")
    if nodes is not None:
        argv.append(f"NumNodes={nodes}")
    slurm.run_patiently(argv, patience_s=patience_s, cluster=cluster_to_ask(job))


def whole_seconds(delay_s: int, now_s: float, early_s: float = EARLY_S) -> int:
    """What to ask for where Slurm cuts its clock down to seconds: at least the delay less ``early_s``, and less than a
    second more than that. ``now+2``, asked late in a second, is a good one second.
    """
    return delay_s + (now_s % 1 > early_s)


def forbid_requeue(job: OwnJob, *, patience_s: float) -> None:
    """Make Slurm let the job end when it ends. ``requeue`` allows it again, as long as the job runs.

    Raises:
        ForeignJob: another job has its number now.
        SlurmError: Slurm refused or did not answer for ``patience_s`` seconds.
    """
    show(job, patience_s=patience_s / 2)
    argv = ["scontrol", "update", f"JobId={job}", "Requeue=0"]
    slurm.run_patiently(argv, patience_s=patience_s / 2, cluster=cluster_to_ask(job))


def shrink(job: OwnJob, nodes: Collection[str]) -> None:
    """Give back all nodes of a running job but these; the batch host must be one of them.

    A node that has died, which Slurm has not noticed yet, holds a requeued job in COMPLETING until SlurmdTimeout.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    with tempfile.TemporaryDirectory(prefix="slurmft-") as folder:  # scontrol leaves a script for the new environment
        argv = ["scontrol", "update", f"JobId={job}", f"NodeList={compress(nodes)}"]
        show(job)
        slurm.run(argv, folder=Path(folder), cluster=cluster_to_ask(job))


def requeue_ended(job: OwnJob, delay_s: int, *, avoid: Collection[str] | None) -> Requeued:
    """Bring back a job that has ended and is still in Slurm's memory (MinJobAge).

    Held for a moment, so that it cannot begin before it is placed. When the caller dies in between it stays held:
    ``release`` it.

    Raises:
        SlurmError: Slurm refused, did not answer, or has forgotten the job.
    """
    show(job, patience_s=5.0)
    slurm.run_patiently(["scontrol", "requeuehold", job.job_id], patience_s=5.0, cluster=cluster_to_ask(job))
    try:
        return place(job, delay_s, avoid=avoid)
    finally:
        release(job)


def _requeue_only(job: OwnJob, restart: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            # checked before every try: the user may have cancelled the job while Slurm did not answer
            found = _ending_now(job, restart)
            if found is JobEnding.CANCELLED:
                raise JobCancelled(f"job {job} was cancelled")
            if found is not JobEnding.REQUEUED:
                slurm.run(["scontrol", "requeue", job.job_id], cluster=cluster_to_ask(job))
            return
        except SlurmUnavailable:
            if time.monotonic() + REQUEUE_PAUSE_S > deadline:
                raise
            time.sleep(REQUEUE_PAUSE_S)
        except SlurmError as error:
            if "pending execution" in error.what:
                show(job)  # which may have lost its number since
                return
            if "presently disabled" in error.what:
                raise RequeueDisabled(f"requeueing job {job} is switched off") from error
            raise


def _is_end_unheard(job: OwnJob) -> bool:
    """Whether Slurm goes on counting a step as running; asked until then, since it may just be about to hear of it."""
    deadline = time.monotonic() + STEPS_END_S
    try:
        while _steps(job):
            if time.monotonic() > deadline:
                return True
            time.sleep(REQUEUE_PAUSE_S / 2)
    except SlurmError:
        return False
    return False


def _steps(job: OwnJob) -> list[str]:
    """The job's steps that Slurm counts, without the batch script and what Slurm starts by itself."""
    argv = ["squeue", "-h", "-a", "-s", "-j", job.job_id, "-o", "%i"]
    found = slurm.run(argv, timeout_s=STEPS_END_S + 1, cluster=cluster_to_ask(job)).split()
    return [step for step in found if "." in step and step.rpartition(".")[2].isdecimal()]


def _ending_now(job: OwnJob, restart: int) -> JobEnding:
    try:
        argv = ["scontrol", "-a", "-o", "show", "job", job.job_id]
        text = slurm.run(argv, cluster=cluster_to_ask(job))
    except SlurmUnavailable:
        raise
    except SlurmError:  # the requeue will meet the same error
        return JobEnding.NOT_ENDING
    refuse_another(job, text)
    return why_ending(text, restart)


# --- Disturbing an own job on purpose: the signal of a preemption, or a preemption ---


def signal_argv(job_id: str) -> list[str]:
    """The command that sends SIGTERM to the processes of the job's steps."""
    return ["scancel", "--signal=TERM", job_id]


def signal_job(job: OwnJob) -> None:
    """Send SIGTERM to the processes of the job's steps, as the beginning of a grace does; the job stays.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    show(job)
    slurm.run(signal_argv(job.job_id), cluster=cluster_to_ask(job))


def preempt_argv(nodes: str, partition: str) -> list[str]:
    """The command that submits a job of one second for just these nodes (a hostlist), exclusively."""
    return ["sbatch", "--parsable", f"--partition={partition}", f"--nodelist={nodes}", "--exclusive", "--time=1",
            "--job-name=slurmft-drill-preemptor", "--output=/dev/null", "--no-requeue", "--wrap=sleep 1"]  # fmt: skip


# --- The job whose only purpose is to lend its nodes to a run ---

LEAD_S = 60
"""Seconds before its time limit at which a lending job gives its nodes back; Slurm may be up to 30 s earlier."""

_NOT_TAKEN = frozenset({"requeue", "no_kill", "srun_args", "job_name", "output", "hold"})


def lending_command(
    config: RunConfig, run: RunFolder, *, nodes: int, options: Mapping[str, Any], avoid: frozenset[str]
) -> list[str]:
    """The sbatch that submits it: the run's own options, then the ones given, which override them."""
    section = config.slurm.model_dump(exclude_none=True, exclude=set(_NOT_TAKEN))
    chosen: dict[str, Any] = {key.replace("_", "-"): value for key, value in section.items()}
    chosen |= {
        "job-name": f"join-{config.name}"[:200],
        "output": str(run.logs).replace("%", "%%") + "/join-%j.log",
        **options,
    }
    if excluded := [str(part) for part in (chosen.get("exclude"), compress(avoid)) if part]:
        chosen["exclude"] = ",".join(excluded)
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items() if value is not False
    ]
    inside = shlex.join([sys.executable, "-P", "-u", "-m", "slurmft", "join", str(run.path), "--here"])
    return [
        "sbatch", "--parsable", f"--nodes={nodes}", "--ntasks-per-node=1", "--open-mode=append", "--requeue",
        f"--signal=SIGTERM@{LEAD_S}", *words, f"--wrap=exec {inside}",
    ]  # fmt: skip


def submit_lender(argv: list[str]) -> str:
    """The new job's id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return slurm.submit(argv, environment=scrubbed(os.environ), folder=None)


def lenders_name(run: RunFolder) -> str:
    """The name of the jobs that the run itself has lend nodes: no other job of the user has it."""
    whole = hashlib.sha256(os.fsencode(os.path.realpath(run.path))).hexdigest()[:12]
    return f"lend-{re.sub('[^A-Za-z0-9._-]', '_', run.path.name)[:100]}-{whole}"


def lenders(run: RunFolder) -> list[JobRecord]:
    """Those of them that wait, or have a node.

    Raises:
        SlurmError: Slurm refused or did not answer; nothing is known.
    """
    argv = ["squeue", "-h", "-a", "--me", f"--name={lenders_name(run)}", "-o", JOB_FORMAT]
    return [each for each in parse_jobs(slurm.run(argv)) if each.waiting or (each.alive and each.state != "COMPLETING")]


def end_lenders(run: RunFolder) -> list[str]:
    """Cancel them; returns their ids.

    Raises:
        SlurmError: Slurm refused or did not answer; some may be left.
    """
    found = lenders(run)
    for each in found:
        cancel(OwnJob(each.job_id, each.identity))
    return [each.job_id for each in found]


# --- Submitting a run's script again: as the successor of the job around us, or anew from outside ---

TEST_S = 2.0


def batch_script(job: OwnJob) -> str:
    """The script a job was submitted with.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    show(job, patience_s=5.0)
    argv = ["scontrol", "write", "batch_script", job.job_id, "-"]
    return slurm.run_patiently(argv, patience_s=5.0, cluster=cluster_to_ask(job))


def successor_command(script: Path, *, after: OwnJob, options: Sequence[str] = ()) -> list[str]:
    """The command that submits ``script`` to start when job ``after`` has ended, however it ends."""
    return ["sbatch", "--parsable", f"--dependency=afterany:{after}", *options, str(script)]


def submit_successor(
    script: Path, *, after: OwnJob, restart: int, options: Sequence[str], environment: Mapping[str, str],
    patience_s: float, known: Sequence[OwnJob] = (), tried: bool = False,
) -> str:  # fmt: skip
    """Submit ``script`` to start when job ``after``, at its ``restart``, has ended; returns the new job id.

    A try that got no answer, or whose supervisor was killed, may have arrived all the same, and two successors are
    worse than none: each further try looks for the job of an earlier one first; the first as well when ``tried``.

    Args:
        known: jobs of the run that are not successors of this one.

    Raises:
        JobCancelled: job ``after`` was cancelled; a successor would bring the run back to life.
        SlurmError: Slurm refused, or did not answer for ``patience_s`` seconds.
    """

    def command() -> list[str]:
        argv = successor_command(script, after=after, options=options)
        # before every try: the user may have cancelled the job while Slurm did not answer
        is_gone = _is_gone(after, restart)  # another job that has its number now may run for weeks
        return [word for word in argv if not (is_gone and word.startswith("--dependency="))]

    return _once(script, [*known, after], command, environment, patience_s, tried=tried)


def submit_beside(
    script: Path, *, beside: OwnJob, options: Sequence[str], environment: Mapping[str, str], patience_s: float,
    known: Sequence[OwnJob] = (), tried: bool = False,
) -> str:  # fmt: skip
    """Submit ``script`` to start at once, while job ``beside`` still runs; returns the new job id.

    As ``submit_successor`` it looks for the job of an earlier try first.

    Raises:
        SlurmError: Slurm refused, or did not answer for ``patience_s`` seconds.
    """
    argv = ["sbatch", "--parsable", *options, str(script)]
    return _once(script, [*known, beside], lambda: argv, environment, patience_s, tried=tried)


def _once(
    script: Path, known: Sequence[OwnJob], command: Callable[[], list[str]], environment: Mapping[str, str],
    patience_s: float, *, tried: bool,
) -> str:  # fmt: skip
    """Submit until there is an answer, with the command of the moment; the job of an earlier try counts."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if tried and (found := earlier_try(script, known)):
                return found
            argv, tried = command(), True
            return slurm.submit(argv, environment=scrubbed(environment), folder=Path.cwd())
        except SlurmUnavailable:
            if time.monotonic() + 1.0 > deadline:
                raise
            time.sleep(1.0)


def test_placement(script: Path, *, excluded: Collection[str]) -> str:
    """Ask Slurm whether it could ever place ``script`` without these nodes; returns its estimate.

    Raises:
        SlurmError: it could not, or did not answer, or there is no such script.
    """
    argv = ["sbatch", "--test-only", f"--exclude={compress(excluded)}", str(script)]
    return slurm.run(argv, timeout_s=TEST_S, environment=scrubbed(os.environ))


def _is_gone(job: OwnJob, restart: int) -> bool:
    try:
        is_cancelled = why_ending(show(job, patience_s=0.0), restart) is JobEnding.CANCELLED
    except ForeignJob:
        return True
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        return UNKNOWN_ID in error.what
    if is_cancelled:
        raise JobCancelled(f"job {job} was cancelled")
    return False


def submit_script(
    script: Path, *, known: Sequence[OwnJob], options: Sequence[str] = (), environment: Mapping[str, str], folder: Path
) -> str:
    """Submit ``script`` anew, from ``folder``, now that the run's ``known`` jobs are gone; returns the job id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    if found := earlier_try(script, known):  # it got no answer, or could not be noted
        return found
    argv, cluster = ["sbatch", "--parsable", f"--chdir={folder}", *options, str(script)], _cluster_of(known)
    clean = scrubbed(environment) | ({"SLURM_CLUSTERS": cluster} if cluster else {})
    return slurm.submit(argv, environment=clean, folder=folder)


def _cluster_of(known: Sequence[OwnJob]) -> str:
    return cluster_to_ask(known[-1]) if known else ""


def earlier_try(script: Path, known: Sequence[OwnJob]) -> str | None:
    """A job of ours that waits or runs, was submitted with ``script``, and is none that the run knows.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    text = slurm.run(["squeue", "-h", "-a", "--me", "-o", JOB_FORMAT], cluster=_cluster_of(known))
    mine = [record for record in parse_jobs(text) if record.identity.script == str(script)]
    return next((record.job_id for record in mine if not any(_is_of(record, job) for job in known)), None)


def _is_of(record: JobRecord, job: OwnJob) -> bool:
    # a job that was never seen is recognized by its script alone
    seen = bool(job.known.submitted) and not set(job.known.submitted) & set(record.identity.submitted)
    return record.job_id == job.job_id and is_same_job(job.known, record.identity) is not False and not seen


def inherited_options(environment: Mapping[str, str] = os.environ) -> list[str]:
    """sbatch options that give a successor the size and place of the job around us, where its script may not say."""
    names = {
        "SLURM_JOB_PARTITION": "--partition",
        "SLURM_JOB_NUM_NODES": "--nodes",
        "SLURM_JOB_ACCOUNT": "--account",
        "SLURM_JOB_QOS": "--qos",
        "SLURM_JOB_NAME": "--job-name",
        "SLURM_CPUS_PER_TASK": "--cpus-per-task",
        "SLURM_GPUS_PER_NODE": "--gpus-per-node",
        "SLURM_MEM_PER_NODE": "--mem",
        "SLURM_JOB_RESERVATION": "--reservation",
    }
    options = [f"{option}={value}" for name, option in names.items() if (value := environment.get(name))]
    record = slurm.job(environment["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environment else None
    if record is not None and record.limit_s is not None:
        options.append(f"--time={round(record.limit_s / 60)}")
    return options
