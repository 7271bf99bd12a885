"""Building and submitting jobs with submitit: the only home of submitit.

submitit writes the script, calls sbatch (or starts its local controller) and keeps the files. Its own signal handling
must not control the stop: its handler saves and requeues inside the handler, and the requeue's own TERM enters it
again. So the script runs the supervisor itself, with ``exec``: Slurm's batch step is the supervisor.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from slurmft.config.run import Component, RunConfig, components_of
from slurmft.errors import SlurmError, SlurmUnavailable, UsageError
from slurmft.policy.job_identity import JobIdentity, OwnJob, merged
from slurmft.policy.sbatch import FLAGS, OWNED_OPTIONS, SBATCH_OPTIONS, SHORT_OPTIONS, unusable_value
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import Asked, JobRecord, refusal_hint, scrubbed, why_never
from slurmft.scheduler.slurm import compress, ignoring_signals, known_options, options_of_site, parse_limit_s
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import appending, read_text, replace_atomically

_FOREVER_MINUTES = 10 * 365 * 24 * 60
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSupervisor:
    """What submitit is asked to run: the supervisor, in place of the calling process."""

    config: Path

    def argv(self) -> list[str]:
        """The supervisor's command, in the interpreter that submits."""
        return [sys.executable, "-P", "-u", "-m", "slurmft", "run", str(self.config)]

    def __call__(self) -> None:
        """Become the supervisor; returns only by raising OSError."""
        os.execv(sys.executable, self.argv())  # noqa: S606 - an argument list, no shell


class _SupervisorInSlurm(SlurmExecutor):
    """Writes a script whose last line becomes the supervisor."""

    supervisor: RunSupervisor
    others: Sequence[_SupervisorInSlurm] = ()
    """Of the other components of a heterogeneous job: their options are wanted, in the script of the first one."""

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text = str(super()._make_submission_file_text(command, uid))
        head, mark, rest = text.partition("\n\n# command\n")
        for other in self.others:
            lines = other._make_submission_file_text(command, uid).splitlines()
            head = "\n".join([head, "#SBATCH hetjob", *(line for line in lines if line.startswith("#SBATCH "))])
        return head + mark + rest

    @classmethod
    def affinity(cls) -> int:
        return 2  # a script can be written, and shown by --dry-run, where there is no Slurm

    @property
    def _submitit_command_str(self) -> str:
        return f"exec {shlex.join(self.supervisor.argv())}"


class _SupervisorHere(LocalExecutor):
    """Starts the supervisor as a process of this machine, below submitit's controller."""

    supervisor: RunSupervisor

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(self.supervisor.argv())


def parse_sbatch_options(arguments: Sequence[str]) -> dict[str, Any]:
    """sbatch's options, as given behind ``--``, by their long names; a flag is True.

    Raises:
        UsageError: not an option of sbatch, or one that slurmft sets itself.
    """
    options: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and not word.startswith("--"):
            name, value = SHORT_OPTIONS.get(word[1:2], word[1:2]), word[2:]
            equals = "=" if value else ""
        elif not word.startswith("--"):
            raise UsageError(f"{word!r} is not an option of sbatch", hint="give --option=value behind --")
        if name in OWNED_OPTIONS:
            raise UsageError(f"--{name} is set by slurmft", hint=OWNED_OPTIONS[name])
        is_ours = name in SBATCH_OPTIONS
        if not is_ours and not known_options(frozenset({name})):
            raise UsageError(f"{word!r} is not an option of sbatch", hint="see the manual page sbatch(1)")
        if not equals and words and not words[0].startswith("-"):
            equals, value = "=", words.pop(0)
        _refuse_control_characters(name, value)
        flags = FLAGS if is_ours else options_of_site().flags
        if not equals and name not in flags:  # in a script it would take the next line's option for its value
            raise UsageError(f"{word!r} needs a value", hint=f"give --{name}=VALUE behind --")
        if equals and (problem := unusable_value(name, value)):
            raise UsageError(f"--{name}: {problem}")
        options[name] = value if equals else True
    return options


def script_text(config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]) -> str:
    """The exact script that ``submit_to_slurm`` would submit."""
    executor = _slurm_executor(config, run, options, avoid)
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def try_options(config: RunConfig, run: RunFolder) -> str:
    """When the run's job would start, in sbatch's words. Nothing is submitted.

    Raises:
        SlurmError: sbatch would refuse it, with its own message.
        SlurmUnavailable: Slurm did not answer.
    """
    with tempfile.NamedTemporaryFile("w", prefix="slurmft-", suffix=".sh") as script:
        script.write(script_text(config, run, {}, frozenset()))
        script.flush()
        kept = {*scrubbed(os.environ), "SLURM_CLUSTERS"}
        given = {name: value for name, value in os.environ.items() if name in kept}
        try:
            return slurm.run(["sbatch", "--test-only", script.name], timeout_s=10.0, environment=given)
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            words = error.what.partition(script.name)[2].lstrip(": ") or error.what
            raise SlurmError(f"sbatch would refuse the job: {words}", hint=refusal_hint(words)) from error


def submit_to_slurm(config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]) -> str:
    """Submit the run; returns the job id and leaves the script at ``run.script`` for successors.

    Raises:
        SlurmError: sbatch refused, with its own message; nothing is left of the attempt.
        SlurmUnavailable: Slurm did not answer.
    """
    executor = _slurm_executor(config, run, options, avoid)
    kept = {*scrubbed(os.environ), "SLURM_CLUSTERS"}  # the user's wish, as SBATCH_* are
    inside = {name: value for name, value in os.environ.items() if name not in kept}
    with _without(inside), _removing_left_overs(run.submissions), contextlib.redirect_stderr(io.StringIO()):
        try:
            job = executor.submit(executor.supervisor)
        except (FailedSubmissionError, FailedJobError) as error:
            raise _refusal(error) from error
        except FileNotFoundError as error:
            raise SlurmUnavailable("there is no sbatch on this machine", hint="use --cluster local") from error
    job_id = str(job.job_id)
    try:  # whole or not at all: successors are submitted from it for months
        replace_atomically(run.script, read_text(run.submissions / f"{job_id}_submission.sh"))
    except OSError as error:
        log.warning("%s cannot be written (%s): Slurm's own copy of it serves", run.script, error.strerror or error)
        run.script.unlink(missing_ok=True)
    return job_id


def wished_cluster(config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The cluster that the user names for the job; empty for the one around us.

    Raises:
        UsageError: several are named, or none in a federation: later commands must go to a single cluster.
    """
    given = {**(config.slurm.model_extra or {}), **options}
    named = given.get("clusters") or environment.get("SBATCH_CLUSTERS") or environment.get("SLURM_CLUSTERS") or ""
    if "," in str(named) or str(named).lower() == "all":
        raise UsageError(
            f"the job is to go to one of several clusters ({named})", hint="name one: --clusters, or SLURM_CLUSTERS"
        )
    if not named and (federation := slurm.federation()):
        raise UsageError(
            f"this cluster belongs to the federation {federation}: Slurm would start the job on any of its clusters",
            hint="name one, which the job then keeps to: slurm: {clusters: NAME}, --clusters, or SLURM_CLUSTERS",
        )
    return str(named)


def look_at_submitted(job_id: str, cluster: str, asked: Asked) -> JobIdentity:
    """What distinguishes the job that was just submitted from later ones with its number.

    Warns when Slurm accepted the job and reports at once that it cannot start, or that the site has changed it.
    """
    job = OwnJob(job_id, JobIdentity(user=os.getuid(), cluster=cluster or own_jobs.local_cluster()))
    try:
        record = own_jobs.find_one(job, patience_s=0.0)
    except SlurmError:  # one quick look; ``slurmft status`` says the same later, and the job records its own identity
        return job.known
    if record is None:
        return job.known
    _warn_if_never(record)
    if changes := changed_by_site(record, asked):
        log.warning("the site has changed job %s: %s", job_id, "; ".join(changes))
    return merged(job.known, record.identity)


def submit_here(config: RunConfig, run: RunFolder) -> int:
    """Start the supervisor on this machine in the background; returns the process id of submitit's controller.

    The controller ignores Ctrl-C and the end of the terminal: the run is stopped with ``slurmft stop``.
    """
    executor = _SupervisorHere(run.submissions)
    executor.supervisor = RunSupervisor(run.config)
    executor.update_parameters(
        timeout_min=_FOREVER_MINUTES, signal_delay_s=0, stderr_to_stdout=True, **_visible_gpus(config)
    )
    inside = {name: value for name, value in os.environ.items() if name not in scrubbed(os.environ)}
    output = _output_to(run.submissions / "controller.log")
    with _without(inside), ignoring_signals(signal.SIGINT, signal.SIGHUP), output:
        job = cast(LocalJob[None], executor.submit(executor.supervisor))
    # a notebook lives longer than the run: no zombie may be left in it
    if job._process is not None:
        threading.Thread(target=job._process.wait, daemon=True, name="slurmft-controller").start()
    return int(job.job_id)


def local_log(run: RunFolder, controller_pid: int) -> Path:
    """Where submitit's controller sends the supervisor's output."""
    return run.submissions / f"{controller_pid}_0_log.out"


def _slurm_executor(
    config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]
) -> _SupervisorInSlurm:
    if any(ord(character) < 32 for character in str(run.path)):
        raise UsageError(f"the run folder {str(run.path)!r} holds a line break or control character")
    if pattern := re.search(r"%[jtAa]", str(run.path)):
        raise UsageError(f"the run folder {str(run.path)!r} holds {pattern.group()}, which stands for a job's number")
    first, *others = [_executor_of(each, config, run, options, avoid) for each in components_of(config)]
    first.others = others
    return first


def _executor_of(
    component: Component, config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]
) -> _SupervisorInSlurm:
    executor = _SupervisorInSlurm(run.submissions)
    executor.supervisor = RunSupervisor(run.config)
    parameters = {**_sbatch_parameters(config, run, options, avoid), **component.options}
    executor.update_parameters(
        nodes=component.nodes,
        ntasks_per_node=1,
        use_srun=False,
        stderr_to_stdout=True,
        job_name=parameters.pop("job-name", config.name),
        time=parameters.pop("time", None),  # submitit's default would limit the job to 5 minutes
        wckey=parameters.pop("wckey", None),
        additional_parameters=parameters,
    )
    return executor


def _sbatch_parameters(
    config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]
) -> dict[str, Any]:
    section = config.slurm
    values = section.model_dump(exclude_none=True, exclude={"requeue", "no_kill", "srun_args"})
    parameters = {key.replace("_", "-"): value for key, value in values.items() if value is not False}
    parameters["output"] = section.output or str(run.logs).replace("%", "%%") + "/%j.log"
    parameters["signal"] = f"{config.preemption.signal}@{config.preemption.signal_lead_s}"
    parameters["open-mode"] = "append"
    parameters["requeue" if section.requeue else "no-requeue"] = True
    if config.survives_nodes:
        parameters["no-kill"] = True
    if config.nodes_range:
        parameters["nodes"] = config.nodes_range  # overrides the executor's
    parameters |= options
    for name, value in parameters.items():
        _refuse_control_characters(name, str(value))
    if excluded := [str(part) for part in (parameters.get("exclude"), compress(avoid)) if part]:
        parameters["exclude"] = ",".join(excluded)
    return parameters


def _refuse_control_characters(name: str, value: str) -> None:
    if any(ord(character) < 32 for character in value):  # a line break would begin another #SBATCH line
        raise UsageError(f"--{name} {value!r} holds a line break or control character")


def _visible_gpus(config: RunConfig) -> dict[str, Any]:
    """Of this machine: as many as a node's workers need, and all of them where roles choose among them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = [int(part) for part in visible.split(",") if part.strip().isdecimal()]
    else:
        gpus = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    count = len(gpus) if config.roles else config.nproc_per_node
    return {"gpus_per_node": min(count, len(gpus)), "visible_gpus": gpus[:count]} if gpus else {}


def _warn_if_never(record: JobRecord) -> None:
    """sbatch takes jobs that no node, partition or quota will ever fit, unless a site switches that off."""
    if record.waiting and (why := why_never(record.reason)):
        log.warning("job %s waits, and as things are it cannot start: %s (Slurm: %s)\n  hint: scancel %s, then ask "
                    "for less or for another partition", record.job_id, why, record.reason, record.job_id)  # fmt: skip


def changed_by_site(record: JobRecord, asked: Asked) -> list[str]:
    """What a job_submit plug-in has made of the partition and the time limit that were asked for; in words."""
    found = []
    if asked.partition and not set(record.partition.split(",")) <= set(asked.partition.split(",")):
        found.append(f"it is in partition {record.partition}, not {asked.partition}")
    limit_s = parse_limit_s(asked.time)
    if limit_s is not None and record.limit_s is not None and limit_s != record.limit_s:
        found.append(f"its time limit is {round(record.limit_s / 60)} minutes, not {asked.time}")
    return found


def _refusal(error: Exception) -> SlurmError:
    words = _last_words(error)
    if isinstance(error, FailedSubmissionError) or any(text in words for text in slurm.NOT_ANSWERING):
        hint = "try again; if it did arrive, squeue --me shows the job, and it keeps a second one from starting"
        return SlurmUnavailable(f"sbatch got no answer: {words}", hint=hint)
    return SlurmError(f"sbatch refused the job: {words}", hint=refusal_hint(words))


@contextlib.contextmanager
def _removing_left_overs(folder: Path) -> Iterator[None]:
    """submitit leaves what it wrote for a job that sbatch then refuses."""
    before = set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            path.unlink(missing_ok=True)
        raise


def _last_words(error: Exception) -> str:
    lines = dict.fromkeys(line for line in str(error).splitlines() if "error" in line.lower())
    return " ".join(line.replace("sbatch: error: ", "").strip() for line in lines) or str(error)


@contextlib.contextmanager
def _without(variables: Mapping[str, str]) -> Iterator[None]:
    for name in variables:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(variables)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Children started inside hold on to ``path``, not to our terminal or to a pipe that our output is read from."""
    saved = [os.dup(descriptor) for descriptor in range(3)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        with appending(path) as log:
            for descriptor, target in enumerate((nothing, log, log)):
                os.dup2(target, descriptor)
        yield
    finally:
        for descriptor, before in enumerate(saved):
            os.dup2(before, descriptor)
        for opened in (*saved, nothing):
            os.close(opened)
