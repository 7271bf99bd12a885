"""A preemption fire drill: a small job with the user's own options, the real signal, and the results."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmft.config.checkpoint import CheckpointConfig
from slurmft.config.config import RunConfig
from slurmft.config.elastic import ElasticConfig
from slurmft.errors import LaunchError, SlurmError, StorageError
from slurmft.policy.site.drill import DrillFacts, Row, rows
from slurmft.policy.site.job_identity import OwnJob
from slurmft.policy.timing import grace as grace_policy
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.signalling import preempt, signal_job
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import grace

LOOK_S = 0.5
STEPS_FIRST = 5
"""Steps it has done before it is disturbed."""

END_S = 45.0
MOST_NODES, MOST_RANKS = 2, 2
MINUTES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One drill, prepared; nothing has been done yet."""

    settings: RunConfig
    user: RunConfig
    environment: Mapping[str, str]
    preempt_with: str = ""
    """A partition whose jobs preempt this one's; empty: the signal alone."""

    limit_s: float = 300.0

    @property
    def folder(self) -> Path:
        """All that it writes; removed at its end."""
        return self.settings.run_folder.parent

    @property
    def submission(self) -> list[str]:
        """What submits it."""
        return [sys.executable, "-P", "-m", "slurmft", "submit", str(self.folder / "drill.yaml"), "--cluster", "slurm"]


def prepared(user: RunConfig, environment: Mapping[str, str], *, preempt_with: str, limit_s: float) -> Drill:
    """A small run with the user's own options, beside the user's run folder."""
    folder = user.run_folder.parent / f".slurmft-drill-{secrets.token_hex(4)}"
    command = (sys.executable, "-P", "-m", "slurmft.examples.drill", "--marks", str(folder))
    settings = user.model_copy(
        update={
            "command": command, "run_folder": folder / "drill", "nodes": min(user.nodes, MOST_NODES),
            "nproc_per_node": min(user.nproc_per_node, MOST_RANKS), "spare_nodes": 0, "elastic": ElasticConfig(),
            "checkpoint": CheckpointConfig(interval_steps=20), "exit_actions": {},
            "slurm": user.slurm.model_copy(update={"time": str(MINUTES), "output": None, "job_name": "slurmft-drill"}),
        }
    )  # fmt: skip
    return Drill(settings=settings, user=user, environment=environment, preempt_with=preempt_with, limit_s=limit_s)


def carry_out(drill: Drill, tell: Callable[[str], None]) -> list[Row]:
    """Run the drill, and clean up in any case; ``tell`` gets a line about each wait.

    Raises:
        LaunchError: it did not start to train in time.
        SlurmError: Slurm refused, or did not answer.
        StorageError: there is no place for its folder.
    """
    deadline = time.monotonic() + drill.limit_s
    run = RunFolder(drill.settings.run_folder)
    try:
        drill.folder.mkdir(mode=0o700)
        (drill.folder / "drill.yaml").write_text(drill.settings.as_yaml(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {drill.folder}: {error.strerror or error}") from error
    try:
        tell(_submit(drill))
        _wait_for_training(run, deadline)
        job = run.own_jobs()[-1]
        tell(f"job {job} trains; now the signal")
        how = _disturb(drill, job, tell)
        events = _wait_for_return(run, deadline)
        return rows(_with_site(_facts(drill, run, events, how), run))
    finally:
        _clean_up(run, drill.folder, tell)


def _submit(drill: Drill) -> str:
    done = subprocess.run(
        drill.submission, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        env=dict(drill.environment), check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).removeprefix("slurmft: ")
        raise LaunchError(f"the drill could not be submitted: {words[-1000:]}")
    return done.stdout.strip()


def _wait_for_training(run: RunFolder, deadline: float) -> None:
    while ((run.progress() or {}).get("step") or 0) < STEPS_FIRST:
        if time.monotonic() > deadline:
            raise LaunchError("the drill's job did not train in time", hint="the queue may be long: see --limit")
        time.sleep(LOOK_S)


def _disturb(drill: Drill, job: OwnJob, tell: Callable[[str], None]) -> str:
    if not drill.preempt_with:
        signal_job(job)
        return "scancel --signal=TERM"
    record = own_jobs.find_one(job)
    if record is None or not record.nodes:
        raise LaunchError(f"job {job} of the drill is gone")
    other = preempt(record.nodes, drill.preempt_with)
    tell(f"job {other} in partition {drill.preempt_with} preempts it")
    return f"preemption by a job in partition {drill.preempt_with}"


def _wait_for_return(run: RunFolder, deadline: float) -> list[Event]:
    """The journal, when the run has come back, or will not, or the time is up."""
    while True:
        events = run.journal().read()
        names = [event.event for event in events]
        if names.count(EventName.FIRST_STEP) > 1 or time.monotonic() > deadline or EventName.NOT_CONTINUED in names:
            return events
        time.sleep(LOOK_S)


_REFUSALS = (EventName.REQUEUE_FAILED, EventName.REQUEUE_SKIPPED, EventName.NOT_CONTINUED)


def _facts(drill: Drill, run: RunFolder, events: Sequence[Event], how: str) -> DrillFacts:
    found = {event.event: event for event in reversed(events)}  # the first of each name
    stop, saved = found.get(EventName.STOP_REQUESTED), found.get(EventName.STOP_SAVED)
    firsts = [event for event in events if event.event == EventName.FIRST_STEP]
    started = [event for event in events if event.event == EventName.ATTEMPT_STARTED]
    again = next((e for e in (EventName.REQUEUED, EventName.RESUBMITTED) if e in found), "")
    before = [found[again]] if again else []
    if not again and len(started) > 1:  # Slurm did it by itself
        before = [event for event in events if event.seconds() < started[1].seconds()]
    waited_s = started[1].seconds() - before[-1].seconds() if before and len(started) > 1 else None
    agreed = found[EventName.STOP_AGREED].details.get("step") if EventName.STOP_AGREED in found else None
    resumed = firsts[1].details.get("resumed_from") if len(firsts) > 1 else None
    same_job = len(started) > 1 and started[0].attempt.split(".")[0] == started[1].attempt.split(".")[0]
    # a run that resumes from the agreed step has saved it, even if no process was left to report that
    unsaid = resumed if resumed is not None and resumed == agreed else None
    refused = [found[name].details.get("reason", "") for name in _REFUSALS if name in found]
    need = grace.need_of(drill.user)
    return DrillFacts(
        how=how,
        stop_reason=None if stop is None else str(stop.details.get("reason")),
        stop_cause="" if stop is None else str(stop.details.get("cause")),
        world_size=drill.settings.world_size,
        marked=len(list(drill.folder.glob("term.rank-*"))),
        saved_step=unsaid if saved is None else saved.details.get("step"),
        save_s=None if saved is None else saved.details.get("seconds"),
        requeued=EventName.REQUEUED in found or same_job,
        resubmitted=EventName.RESUBMITTED in found,
        why_not=str(refused[0]) if refused else "",
        waited_s=waited_s,
        resumed_from=resumed,
        workload_needs_s=need.total_s if need.known else None,
    )


def _with_site(facts: DrillFacts, run: RunFolder) -> DrillFacts:
    """``facts`` with the preemption settings of the drill's partition, where Slurm reports them."""
    with contextlib.suppress(SlurmError):
        jobs = run.own_jobs()
        job = own_jobs.find_one(jobs[0]) or own_jobs.find_one(jobs[-1])
        site, partitions = slurm.site(), slurm.partitions()
        tiers = [each.priority_tier for each in partitions if each.priority_tier is not None]
        for each in partitions:
            if job is not None and each.name == job.partition:
                kind = grace_policy.preempts(
                    kind=site.preempt_type, mode=each.preempt_mode, tier=each.priority_tier, tiers=tiers
                )  # fmt: skip
                return replace(
                    facts, partition=each.name, preempts=kind, preempt_mode=each.preempt_mode, grace_s=each.grace_s,
                    kill_wait_s=site.kill_wait_s,
                )  # fmt: skip
    return facts


def _clean_up(run: RunFolder, folder: Path, tell: Callable[[str], None]) -> None:
    """End its jobs, and remove its folder once no process writes there any more."""
    try:
        jobs = run.own_jobs()
        if run.exists():
            run.request("KILL", "drill")  # a successor that starts meanwhile ends by itself
        for job in jobs:
            own_jobs.cancel(job)
        until = time.monotonic() + END_S
        while jobs and any(each.alive or each.waiting for each in own_jobs.find(jobs).values()):
            if time.monotonic() > until:
                tell(f"jobs {', '.join(map(str, jobs))} of the drill are still ending; remove {folder} afterwards")
                return
            time.sleep(LOOK_S)
    except (SlurmError, StorageError, OSError) as error:
        tell(f"the drill could not be cleaned up: {error}; look for its jobs, and remove {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)
