"""The verbs that act: ``run``, ``agent``, ``stop``, ``save``, ``requeue``; and ``schema``."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import time
from pathlib import Path

import click

from slurmft import config as configuration
from slurmft.cli.names import run_argument
from slurmft.errors import SlurmError, StorageError
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import JobRecord, expand_hostlist
from slurmft.storage.run_folder import Attempt, RunFolder


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def run(*, config: Path) -> int:
    """Be the supervisor of one job (what the batch script runs)."""
    from slurmft.launch.run import supervise

    return supervise(configuration.load(config), os.environ)


@click.command(hidden=True)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("attempt")
def agent(*, config: Path, attempt: str) -> int:
    """Be one node's agent (what the supervisor starts with srun)."""
    from slurmft.launch.agent import serve

    return asyncio.run(serve(configuration.load(config), attempt, os.environ))


@click.command()
@run_argument
@click.option("--timeout", default=0.0, show_default=True, help="Seconds to wait until it has ended.")
def stop(*, run: RunFolder, timeout: float) -> int:
    """Save, then end the run; it is not requeued. A waiting job is cancelled."""
    who = _who()
    run.journal().append("stop asked for", who=who)
    waiting = [record for record in _records(run) if record.waiting]
    for record in waiting:
        slurm.cancel(record.job_id)
        click.echo(f"cancelled the waiting job {record.job_id}")
    if waiting and not _alive(run):
        run.journal().append("cancelled", jobs=[record.job_id for record in waiting], who=who)
        return 0
    if not _alive(run):
        click.echo(f"run {run.path.name} is not running")
        return 0
    run.request("KILL", who)
    click.echo(f"run {run.path.name} will save and end")
    return 0 if timeout <= 0 or _wait_until_ended(run, timeout) else 1


@click.command()
@run_argument
def save(*, run: RunFolder) -> int:
    """Save a checkpoint now and go on training."""
    run.request("SAVE", _who())
    click.echo(f"run {run.path.name} will save at the next step")
    return 0


@click.command()
@run_argument
@click.option("--rescue", is_flag=True, help="Only rescue a job that has lost its batch script; leave a healthy one.")
def requeue(*, run: RunFolder, rescue: bool) -> int:
    """Save and go through the queue again; start a waiting job now; rescue one that lost its batch script."""
    journal = run.journal()
    records = _records(run)
    for record in records:
        if record.alive and _orphaned(record):
            _rescue(run, record)
            return 0
        if record.waiting and not rescue:
            if record.state == "REQUEUE_HOLD" or "held" in record.reason.lower():
                slurm.release(record.job_id)
            slurm.begin_in(record.job_id, 0)
            journal.append("begin now", job=record.job_id, who=_who())
            click.echo(f"job {record.job_id} may begin now")
            return 0
    if rescue:
        click.echo(f"no job of run {run.path.name} needs to be rescued")
        return 0
    if not _alive(run):
        raise StorageError(f"run {run.path.name} is not running", hint=f"slurmft submit {run.config} continues it")
    run.request("REQUEUE", _who())
    click.echo(f"run {run.path.name} will save and requeue")
    return 0


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    click.echo(json.dumps(configuration.schema(), indent=2))
    return 0


def _who() -> str:
    return f"{getpass.getuser()}@{os.uname().nodename}"


def _records(run: RunFolder) -> list[JobRecord]:
    job_ids = [job for job in run.jobs() if not job.startswith("local-")][-20:]
    return list(slurm.jobs(job_ids).values()) if job_ids else []


def _alive(run: RunFolder) -> bool:
    from slurmft.launch.run import owner_lives

    owner = run.owner()
    if owner is not None and owner.cluster == "local":
        return owner_lives(owner)
    return any(record.alive for record in _records(run))


def _wait_until_ended(run: RunFolder, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _alive(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _orphaned(record: JobRecord) -> bool:
    """Under --no-kill a job whose batch host died stays RUNNING without its script until its time limit."""
    return (
        record.state == "RUNNING" and bool(record.batch_host) and record.batch_host not in expand_hostlist(record.nodes)
    )


def _rescue(run: RunFolder, record: JobRecord) -> None:
    owner = run.owner()
    restart = owner.restart if owner is not None and owner.job == record.job_id else 0
    journal = run.journal()
    if not run.claim_ending(Attempt(job=record.job_id, restart=restart), _who()):
        click.echo(f"somebody else is already rescuing job {record.job_id}")
        return
    journal.append("rescuing", job=record.job_id, lost_batch_host=record.batch_host, nodes=record.nodes, who=_who())
    slurm.requeue(record.job_id, delay_s=2)
    _begin_when_pending(record.job_id)
    journal.append("requeued", job=record.job_id, who=_who())
    click.echo(f"job {record.job_id} had lost its batch host {record.batch_host}; it is requeued")


def _begin_when_pending(job_id: str) -> None:
    """From outside, a requeued job that is pending can be started at once instead of after 121 s."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        record = slurm.job(job_id)
        if record is None or record.state == "RUNNING":
            return
        if record.state == "PENDING":
            try:
                slurm.begin_in(job_id, 0)
            except SlurmError:
                return  # it began by itself in between
            return
        time.sleep(0.5)
