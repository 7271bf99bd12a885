"""Building and submitting jobs: the batch script that becomes the supervisor, or a supervisor on this machine.

The script runs the supervisor itself, with ``exec``: Slurm's batch step is the supervisor, which nothing of ours stands
between. A program of submitit's finds the variables there by which that package knows where it runs.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.config.run import Component, RunConfig, components_of
from slurmft.errors import SlurmError, SlurmUnavailable, UsageError
from slurmft.policy.job_identity import JobIdentity, OwnJob, merged
from slurmft.policy.sbatch import FLAGS, OWNED_OPTIONS, SBATCH_OPTIONS, SHORT_OPTIONS, unusable_value
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import Asked, JobRecord, refusal_hint, scrubbed, why_never
from slurmft.scheduler.slurm import compress, ignoring_signals, known_options, options_of_site, parse_limit_s
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import appending, replace_atomically

_HERE = 'export SUBMITIT_LOCAL_JOB_ID=$$; exec "$@" >> "$0/$$_0_log.out" 2>&1'
_AS_SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_LOCALID": "0", "SUBMITIT_LOCAL_GLOBALID": "0",
}  # fmt: skip
log = logging.getLogger(__name__)


def supervisor_argv(config: Path) -> list[str]:
    """The supervisor's command, in the interpreter that submits."""
    return [sys.executable, "-P", "-u", "-m", "slurmft", "run", str(config)]


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
    """The exact script that ``submit_to_slurm`` would submit.

    Raises:
        UsageError: the run folder, or an option, cannot stand in one.
    """
    if any(ord(character) < 32 for character in str(run.path)):
        raise UsageError(f"the run folder {str(run.path)!r} holds a line break or control character")
    if pattern := re.search(r"%[jtAa]", str(run.path)):
        raise UsageError(f"the run folder {str(run.path)!r} holds {pattern.group()}, which stands for a job's number")
    own = _sbatch_parameters(config, run, options, avoid)
    head = "\n#SBATCH hetjob\n".join(_directives(each, config, own) for each in components_of(config))
    command = f"export SUBMITIT_EXECUTOR=slurm\nexec {shlex.join(supervisor_argv(run.config))}"
    return f"#!/bin/bash\n\n# Parameters\n{head}\n\n# command\n{command}\n"


def _directives(component: Component, config: RunConfig, own: Mapping[str, Any]) -> str:
    size = {"nodes": component.nodes, "ntasks-per-node": 1, "job-name": config.name}
    options = sorted({**size, **own, **component.options}.items())
    return "\n".join(
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in options
    )


def try_options(config: RunConfig, run: RunFolder) -> str:
    """When the run's job would start, in sbatch's words. Nothing is submitted.

    Raises:
        SlurmError: sbatch would refuse it, with its own message.
        SlurmUnavailable: Slurm did not answer.
    """
    with tempfile.NamedTemporaryFile("w", prefix="slurmft-", suffix=".sh") as script:
        script.write(script_text(config, run, {}, frozenset()))
        script.flush()
        try:
            return slurm.run(["sbatch", "--test-only", script.name], timeout_s=10.0, environment=_of_the_user())
        except SlurmUnavailable:
            raise
        except SlurmError as error:
            words = _words(error, script.name)
            raise SlurmError(f"sbatch would refuse the job: {words}", hint=refusal_hint(words)) from error


def submit_to_slurm(config: RunConfig, run: RunFolder, options: Mapping[str, Any], avoid: frozenset[str]) -> str:
    """Submit the run; returns the job id and leaves the script at ``run.script`` for successors.

    Raises:
        SlurmError: sbatch refused, with its own message; nothing is left of the attempt.
        SlurmUnavailable: Slurm did not answer.
    """
    text = script_text(config, run, options, avoid)
    if shutil.which("sbatch") is None:
        raise SlurmUnavailable("there is no sbatch on this machine", hint="use --cluster local")
    script = run.submissions / f"submission_file_{secrets.token_hex(16)}.sh"
    replace_atomically(script, text)
    try:
        job_id = _submitted(script)
    except BaseException:
        script.unlink(missing_ok=True)
        raise
    try:  # whole or not at all: successors are submitted from it for months
        script.rename(run.submissions / f"{job_id}_submission.sh")
        replace_atomically(run.script, text)
    except OSError as error:
        log.warning("%s cannot be written (%s): Slurm's own copy of it serves", run.script, error.strerror or error)
        run.script.unlink(missing_ok=True)
    return job_id


def _submitted(script: Path) -> str:
    hint = "try again; if it did arrive, squeue --me shows the job, and it keeps a second one from starting"
    try:
        said = slurm.run(["sbatch", str(script)], timeout_s=slurm.SUBMIT_S, environment=_of_the_user())
    except SlurmUnavailable as error:
        raise SlurmUnavailable(f"sbatch got no answer: {_words(error, str(script))}", hint=hint) from error
    except SlurmError as error:
        words = _words(error, str(script))
        raise SlurmError(f"sbatch refused the job: {words}", hint=refusal_hint(words)) from error
    if (job := re.search(r"job ([0-9]+)", said)) is None:
        raise SlurmUnavailable(f"sbatch got no answer: it said {said.strip()[:200]!r}", hint=hint)
    return job[1]


def _of_the_user() -> dict[str, str]:
    """Our environment without what describes a job around us; SLURM_CLUSTERS is the user's wish, as SBATCH_* are."""
    kept = {*scrubbed(os.environ), "SLURM_CLUSTERS"}
    return {name: value for name, value in os.environ.items() if name in kept}


def _words(error: SlurmError, script: str) -> str:
    """What sbatch has said of a script, each of its errors once; plug-ins say some twice."""
    said = error.what.partition(f"{script}: ")[2] or error.what
    errors = dict.fromkeys(part.strip() for part in re.split(r"\bsbatch: ", said) if "error" in part.lower())
    return " ".join(part.removeprefix("error: ") for part in errors) or said


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
    """Start the supervisor on this machine in the background; returns its process id.

    It ignores Ctrl-C, unless ``preemption.signal`` is SIGINT, and the end of the terminal: ``slurmft stop`` stops it.
    """
    environment = scrubbed(os.environ) | {**_AS_SUBMITIT, "CUDA_VISIBLE_DEVICES": _visible_gpus(config)}
    words = ["/bin/sh", "-c", _HERE, str(run.submissions), *supervisor_argv(run.config)]
    # its output is in a file before it runs: it must not hold on to our terminal, or to a pipe that ours is read from
    with ignoring_signals(signal.SIGINT, signal.SIGHUP), appending(run.submissions / "controller.log") as output:
        process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    # a notebook lives longer than the run: no zombie may be left in it
    threading.Thread(target=process.wait, daemon=True, name="slurmft-supervisor").start()
    return process.pid


def local_log(run: RunFolder, pid: int) -> Path:
    """Where the output of the supervisor goes that was started here as this process."""
    return run.submissions / f"{pid}_0_log.out"


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
        parameters["nodes"] = config.nodes_range  # in place of the component's own
    parameters |= options
    for name, value in parameters.items():
        _refuse_control_characters(name, str(value))
    if excluded := [str(part) for part in (parameters.get("exclude"), compress(avoid)) if part]:
        parameters["exclude"] = ",".join(excluded)
    return parameters


def _refuse_control_characters(name: str, value: str) -> None:
    if any(ord(character) < 32 for character in value):  # a line break would begin another #SBATCH line
        raise UsageError(f"--{name} {value!r} holds a line break or control character")


def _visible_gpus(config: RunConfig) -> str:
    """Of this machine: as many as a node's workers need, and all of them where roles choose among them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = [int(part) for part in visible.split(",") if part.strip().isdecimal()]
    else:
        gpus = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    return ",".join(map(str, gpus if config.roles else gpus[: config.nproc_per_node]))


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
