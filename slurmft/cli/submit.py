"""``slurmft submit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from slurmft.cli.arguments import who
from slurmft.cli.output import say, say_block
from slurmft.config.config import RunConfig
from slurmft.errors import RunBusy, SlurmError, SlurmUnavailable, StorageError, UsageError
from slurmft.operations.run_configuration import load_given, refuse_shared
from slurmft.policy.site.job_identity import OwnJob
from slurmft.policy.timing.grace import Severity
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.nodes import compress
from slurmft.storage.events import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import grace
from slurmft.supervisor.recovery import avoided_nodes
from slurmft.supervisor.recovery.avoided_nodes import Avoidance
from slurmft.supervisor.recovery.place_elsewhere import duty_of
from slurmft.system.files import refuse_uncreatable, replace_atomically


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--strict", is_flag=True, help="Refuse to submit when a stop would not have the time for its save.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key, such as slurm.time=30.")
@click.option("--data", help="Text file or folder to train on: added to the command as --data.")
def submit(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, strict: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], data: str | None,
) -> int:  # fmt: skip
    """Submit a run, or continue one that has stopped. Options behind -- go to sbatch."""
    settings = load_given(config, overrides)
    if data is not None:
        if not Path(data).exists():
            raise UsageError(f"--data: there is no {data}")
        settings = settings.model_copy(update={"command": (*settings.command, "--data", str(Path(data).absolute()))})
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=strict, wait=wait, cluster=cluster)


def submit_run(
    settings: RunConfig, sbatch_options: tuple[str, ...], *, dry_run: bool, strict: bool, wait: bool, cluster: str
) -> int:
    """Submit the run that ``settings`` describe, as the options of ``slurmft submit`` say; returns the exit code."""
    run = RunFolder(settings.run_folder)
    where = _where(cluster)
    options = submission.parse_sbatch_options(sbatch_options)
    cluster_of_job = submission.wished_cluster(options, os.environ) if where == "slurm" else ""
    if where == "local" and options:
        raise UsageError("options behind -- go to sbatch, but this run is local", hint="use --cluster slurm")
    avoiding = Avoidance()
    if where == "slurm":
        findings = grace.check(settings, options, os.environ)
        for finding in findings:
            say(f"{'warning' if finding.severity is Severity.WARNING else 'grace'}: {finding.text}", err=True)
        if strict:
            grace.refuse_warnings(findings)
        suspects = duty_of(run.journal().read()).undecided if run.exists() else ()
        avoiding = avoided_nodes.for_submission(settings, options, os.environ, suspects)
        for line in avoiding.lines():
            say(line, err=True)
    if dry_run:
        run.create(only_look=True)
        _refuse_if_finished_or_busy(run, where)
        refuse_shared(run, settings.checkpoint_dir)
        _make_checkpoint_dir(settings, only_look=True)
        text = submission.script_text(settings, run, options, frozenset(avoiding.nodes))
        say_block(text if where == "slurm" else _local_plan(run))
        return 0
    run.create()
    _warn_if_replaceable(run)
    with run.lock():  # two submissions at once: the second one must find the first one's job
        _refuse_if_finished_or_busy(run, where)
        refuse_shared(run, settings.checkpoint_dir)
        _prepare(run, settings)
        told = len(run.journal().read())
        job = _submit(where, settings, run, options, avoiding, cluster=cluster_of_job)
    say(f"submitted {settings.name} as job {job}" if where == "slurm" else f"started {settings.name} ({job})")
    say(f"run folder: {run.path}")
    if wait:
        from slurmft.cli.progress import watch

        return watch(run, told=told, stop_on_interrupt=where == "local")
    say(f"watch it with: slurmft status {run.path} --watch", err=True)
    return 0


def _where(cluster: str) -> str:
    if cluster == "auto":
        return "slurm" if slurm.available() else "local"
    if cluster == "slurm" and not slurm.available():
        raise SlurmUnavailable("there is no sbatch on this machine", hint="use --cluster local, or a login node")
    return cluster


def _local_plan(run: RunFolder) -> str:
    return " ".join(submission.RunSupervisor(run.config).argv())


def _refuse_if_finished_or_busy(run: RunFolder, where: str) -> None:
    if (done := run.done()) is not None:
        raise UsageError(
            f"run {run.path.name} is finished ({done.get('reason')})",
            hint=f"choose another run_folder, or remove {run.path}/done.json to train on",
        )
    if not run.exists():
        return
    from slurmft.operations import control  # not for a new run: they take 60 ms
    from slurmft.supervisor.owner import local_owner_lives

    owner = run.owner()
    if owner is not None and local_owner_lives(owner):
        raise RunBusy(f"run {run.path.name} is running here (process {owner.pid})", hint=f"slurmft stop {run.path}")
    if where == "slurm" or slurm.available():
        records = control.records_of(run)
        for record in records.values():
            if record.alive or record.waiting:
                raise RunBusy(
                    f"run {run.path.name} has job {record.job_id} in state {record.state}",
                    hint=f"slurmft stop {run.path} ends it after a save",
                )
        if control.is_unseen(run, records):
            raise RunBusy(
                f"run {run.path.name} is being trained, although Slurm does not know its job {owner and owner.job}",
                hint="is this the cluster it runs on? If its nodes are gone, try again in a minute",
            )


def _warn_if_replaceable(run: RunFolder) -> None:
    try:
        run.refuse_replaceable()
    except StorageError as error:
        say(f"warning: {error.what}; requeue --rescue will leave the run alone ({error.hint})", err=True)


def _prepare(run: RunFolder, settings: RunConfig) -> None:
    try:
        replace_atomically(run.config, settings.as_yaml())
        if run.take_request("KILL") is not None:
            say("removed the KILL file: this submission continues the run that it stopped", err=True)
    except OSError as error:
        raise StorageError(f"cannot write into {run.path}: {error.strerror or error}") from error
    _make_checkpoint_dir(settings)


def _make_checkpoint_dir(settings: RunConfig, *, only_look: bool = False) -> None:
    folder = settings.checkpoint_dir
    try:
        if only_look:
            refuse_uncreatable(folder)
        else:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create the folder of the checkpoints {folder}: {error.strerror or error}",
                           hint="see checkpoint.directory") from error  # fmt: skip


def _submit(
    where: str, settings: RunConfig, run: RunFolder, options: dict[str, Any], avoiding: Avoidance, *, cluster: str
) -> str:
    journal = run.journal()
    if where == "local":
        journal.append(EventName.SUBMITTING, cluster="local", who=who())
        pid = submission.submit_here(settings, run)
        return f"local process {pid}, log {submission.local_log(run, pid)}"
    own = compress(avoided_nodes.excluded_by_user(settings, options))
    wishes = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    journal.append(EventName.SUBMITTING, cluster="slurm", who=who(), command=" ".join(sys.argv),
                   **({"excluded": own} if own else {}), **({"wishes": wishes} if wishes else {}))  # fmt: skip
    if not avoiding.is_silent:
        journal.append(EventName.AVOIDING, **avoiding.as_event())
    try:
        job, avoided = avoided_nodes.submitted(
            avoiding, lambda nodes: submission.submit_to_slurm(settings, run, options, nodes)
        )
    except SlurmError as error:
        journal.append(EventName.SUBMISSION_FAILED, reason=error.what)
        raise
    seen = submission.look_at_submitted(job, cluster)
    try:
        run.add_job(job, seen)
    except StorageError as error:
        raise _withdrawn(OwnJob(job, seen), error) from error
    if avoided != avoiding:
        journal.append(EventName.AVOIDING, **avoided.as_event())
    journal.append(EventName.SUBMITTED, job=job, host=os.uname().nodename)
    return job


def _withdrawn(job: OwnJob, error: StorageError) -> StorageError:
    """What to say of a job that cannot be noted; it is cancelled, as the next submission would not know of it."""
    try:
        own_jobs.cancel(job)
    except SlurmError as refusal:
        return StorageError(f"{error.what}; job {job}, just submitted, cannot be cancelled: {refusal.what}",
                            hint=f"scancel {job}, or the next submission makes a second job of this run")  # fmt: skip
    return type(error)(f"{error.what}; job {job}, just submitted, is cancelled", hint=error.hint)
