"""Submitting a run, or continuing one that has stopped: what ``slurmft submit`` and ``slurmft.submit`` do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, SlurmftError, SlurmUnavailable, StorageError, UsageError
from slurmft.operations import preflight
from slurmft.operations.run_configuration import refuse_shared
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.stop import Severity
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.environment import asked_for
from slurmft.scheduler.nodes import compress
from slurmft.storage import run_index
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import avoided_nodes, grace
from slurmft.supervisor.avoided_nodes import Avoidance
from slurmft.system import processes
from slurmft.system.files import refuse_uncreatable, replace_atomically

Tell = Callable[[str], None]
"""Takes a line for the user: a warning, or what is avoided."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run that was just submitted."""

    run: RunFolder
    job: str
    """Slurm's job id; for a local run its process and log, in words."""

    where: str
    """``slurm`` or ``local``."""

    before: int
    """Events that the journal had before: those of earlier submissions."""

    settings: RunConfig


def plan(
    settings: RunConfig, sbatch_options: tuple[str, ...], *, strict: bool, cluster: str, tell: Tell,
    unchecked: bool = False,
) -> str:  # fmt: skip
    """What ``submit_run`` would submit, as text; changes nothing.

    Raises:
        SlurmftError: it would be refused.
    """
    run, where, _, options, avoiding = _considered(settings, sbatch_options, strict=strict, cluster=cluster, tell=tell)
    run.create(only_look=True)
    _refuse_if_finished_or_busy(run, where)
    refuse_shared(run, settings.checkpoint_dir)
    _make_checkpoint_dir(settings, only_look=True)
    settings = _with_a_command_that_works(settings, unchecked=unchecked)
    text = submission.script_text(settings, run, options, frozenset(avoiding.nodes))
    return text if where == "slurm" else " ".join(submission.RunSupervisor(run.config).argv())


def submit_run(
    settings: RunConfig, sbatch_options: tuple[str, ...] = (), *, strict: bool = False, cluster: str = "auto",
    who: str, command: str, tell: Tell, call: bytes | None = None, unchecked: bool = False,
) -> Submitted:  # fmt: skip
    """Submit the run that ``settings`` describe, or continue it where it has stopped.

    Args:
        cluster: ``slurm``, ``local``, or ``auto``: Slurm where its commands are, else this machine.
        who: the user, for the journal.
        command: how it was asked for, for the journal.
        call: a pickled callable that the workers run (``slurmft.worker.call``).
        unchecked: do not look for the command's program and script here: only the nodes have them.

    Raises:
        SlurmftError: it was refused; nothing was submitted. What sbatch refuses leaves no new folder behind.
    """
    run, where, named, options, avoiding = _considered(
        settings, sbatch_options, strict=strict, cluster=cluster, tell=tell
    )
    with _new_or_kept(run, settings, tell):
        _refuse_if_finished_or_busy(run, where)
        refuse_shared(run, settings.checkpoint_dir)
        settings = _with_a_command_that_works(settings, unchecked=unchecked or call is not None)
        _prepare(run, settings, tell, call)
        before = len(run.journal().read())
        job = _submit(where, settings, run, options, avoiding, named=named, who=who, command=command)
    run_index.note(run.path, os.environ)
    return Submitted(run, job, where, before, settings)


@dataclass(frozen=True, slots=True)
class RequestsRead:
    """The requests of a batch that was read for the first time."""

    total: int
    bad: int
    """Lines that are no requests, and will be in errors.jsonl."""


def read_requests(settings: RunConfig, tell: Callable[[int], None]) -> RequestsRead | None:
    """Read and check the requests of a batch before it is submitted; None where that was done before.

    Args:
        tell: takes the count of requests that were read so far.

    Raises:
        SlurmftError: a line is no request, the input has changed, or the output is of another batch.
    """
    # not for training: they cost an import of numpy
    from slurmft.inference.ledger import refuse_foreign_output, refuse_unwritable
    from slurmft.inference.requests import folder_of, load, prepare

    if settings.inference is None:
        raise TypeError("this configuration has no section inference")
    file = settings.inference.output_file
    refuse_unwritable(settings.inference.output_format if file is None else file.suffix[1:])
    run = RunFolder(settings.run_folder)
    run.create()
    folder = folder_of(run.path)
    output = settings.inference.output_folder(run.path)
    if (before := load(folder)) is None:
        refuse_foreign_output(output, None)
        if file is not None and file.exists():
            raise UsageError(f"inference.output: {file} is there already", hint="choose another name, or move it away")
    batch = prepare(settings.inference, folder, tell)
    refuse_foreign_output(output, batch.digest)
    if before is not None:
        return None
    return RequestsRead(batch.total, sum(last - first for first, last in batch.bad))


def _with_a_command_that_works(settings: RunConfig, *, unchecked: bool) -> RunConfig:
    if not unchecked:
        preflight.refuse_unusable(settings, os.environ)
    return preflight.with_the_shells_python(settings, os.environ)


def _considered(
    settings: RunConfig, sbatch_options: tuple[str, ...], *, strict: bool, cluster: str, tell: Tell
) -> tuple[RunFolder, str, str, dict[str, Any], Avoidance]:
    """Where it would run, on which named cluster, with which options, and which nodes it avoids.

    Warnings of the grace are said.
    """
    run = RunFolder(settings.run_folder)
    where = _where(cluster)
    options = submission.parse_sbatch_options(sbatch_options)
    if where == "local":
        if options:
            raise UsageError("options behind -- go to sbatch, but this run is local", hint="use --cluster slurm")
        return run, where, "", options, Avoidance()
    with ThreadPoolExecutor(1) as beside:  # it may ask Slurm, as the next line does
        naming = beside.submit(submission.wished_cluster, settings, options, os.environ)
        findings = grace.check(settings, options, os.environ)
        named = naming.result()  # refuses several
    for finding in findings:
        tell(f"{'warning' if finding.severity is Severity.WARNING else 'grace'}: {finding.text}")
    if strict:
        grace.refuse_warnings(findings)
    suspects: frozenset[str] = frozenset()
    if run.exists():
        from slurmft.supervisor.placement import duty_of  # not for a new run: 10 ms

        suspects = duty_of(run.journal().read()).undecided
    avoiding = avoided_nodes.for_submission(settings, options, os.environ, suspects)
    for line in avoiding.lines():
        tell(line)
    return run, where, named, options, avoiding


def _where(cluster: str) -> str:
    if cluster == "auto":
        return "slurm" if slurm.available() else "local"
    if cluster == "slurm" and not slurm.available():
        raise SlurmUnavailable("there is no sbatch on this machine", hint="use --cluster local, or a login node")
    return cluster


def _refuse_if_finished_or_busy(run: RunFolder, where: str) -> None:
    if (done := run.done()) is not None:
        raise UsageError(
            f"run {run.path.name} is finished ({done.get('reason')})",
            hint=f"choose another run_folder, or remove {run.path}/done.json to train on",
        )
    if not run.exists():
        return
    from slurmft.operations import control  # not for a new run: they take 60 ms

    control.refuse_busy(run, ask_slurm=where == "slurm" or slurm.available())


@contextlib.contextmanager
def _new_or_kept(run: RunFolder, settings: RunConfig, tell: Tell) -> Iterator[None]:
    """Hold the run folder, which exists; nothing that is made for it is left where the submission is refused."""
    made = [each for folder in (settings.checkpoint_dir, run.path) for each in (folder, *folder.parents)]
    made = [each for each in made if not os.path.lexists(each)]
    run.create()
    try:
        run.refuse_replaceable()
    except StorageError as error:
        tell(f"warning: {error.what}; requeue --rescue will leave the run alone ({error.hint})")
    try:
        with run.lock():  # two submissions at once: the second one must find the first one's job
            run.create()  # a submission that was refused meanwhile has removed the parts of its folder
            try:
                yield
            except SlurmftError as error:
                made = [] if isinstance(error, SlurmUnavailable) else made  # a job may have arrived
                run.empty(made)
                raise
    except SlurmftError:
        for folder in made:  # without the lock: NFS keeps the name of an open file
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _prepare(run: RunFolder, settings: RunConfig, tell: Tell, call: bytes | None) -> None:
    try:
        if call is not None:
            run.result.unlink(missing_ok=True)
            replace_atomically(run.call, call)
        replace_atomically(run.config, settings.as_yaml())
        if run.take_request("KILL") is not None:
            tell("removed the KILL file: this submission continues the run that it stopped")
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
    where: str, settings: RunConfig, run: RunFolder, options: dict[str, Any], avoiding: Avoidance, *,
    named: str, who: str, command: str,
) -> str:  # fmt: skip
    journal = run.journal()
    if where == "local":
        journal.append(EventName.SUBMITTING, cluster="local", who=who)
        pid = submission.submit_here(settings, run)
        me = processes.me().host
        journal.append(EventName.STARTED_HERE, process=pid, birth=processes.birth_of(pid), host=me)
        return f"local process {pid}, log {submission.local_log(run, pid)}"
    own = compress(avoided_nodes.excluded_by_user(settings, options))
    wishes = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
    journal.append(EventName.SUBMITTING, cluster="slurm", who=who, command=command,
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
    seen = submission.look_at_submitted(job, named, asked_for(settings.slurm, options, os.environ))
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
