"""Submitting a run, or continuing one that has stopped: what ``slurmft submit`` and ``slurmft.submit`` do."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.config.run import RunConfig, partitions_of, roles_of
from slurmft.errors import RunBusy, SlurmError, SlurmftError, SlurmUnavailable, StorageError, UsageError
from slurmft.operations.run_configuration import configuration_of, refuse_shared
from slurmft.policy import checkpoints, stop
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.site import Finding, Level
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.parsing import asked_for
from slurmft.scheduler.slurm import compress
from slurmft.storage import history, run_folder
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder, progress_of
from slurmft.supervisor import avoided_nodes
from slurmft.supervisor.avoided_nodes import Avoidance
from slurmft.system import processes
from slurmft.system.files import read_bytes, read_text, refuse_uncreatable, replace_atomically
from slurmft.system.processes import end_group, output_of

if TYPE_CHECKING:
    from slurmft.inference.trials import Added

log = logging.getLogger(__name__)

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
    run_folder.note_run(run.path, os.environ)
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
        refuse_unusable_command(settings, os.environ)
    roles = dict(settings.roles)
    for role in roles_of(settings):
        config = _with_a_command_that_works(role.config, unchecked=unchecked)
        if config.command:
            roles[role.name] = {**roles[role.name], "command": list(config.command)}
    return with_the_shells_python(settings.model_copy(update={"roles": roles}), os.environ)


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
        findings = check_grace(settings, options, os.environ)
        named = naming.result()  # refuses several
    for finding in findings:
        tell(f"{'warning' if finding.severity is stop.Severity.WARNING else 'grace'}: {finding.text}")
    if strict:
        refuse_warnings(findings)
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


# --- Sweeps: trials are put into the run folder, and the run is submitted where it does not run already ---

TAKEN_WITHIN_S, LOOK_S = 20.0, 0.2


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a submission of trials has done."""

    added: Added
    made: Submitted | None
    """None: it runs, or waits, already, or there is nothing to be done."""

    is_finished: bool = False


def submit_trials(
    settings: RunConfig, sbatch_options: tuple[str, ...] = (), *, cluster: str, who: str, command: str, tell: Tell,
    retry: bool = False, choose: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
) -> Sweep:  # fmt: skip
    """Add the trials that are new, or those again that have failed (``retry``), and have them run.

    Args:
        choose: names the trials in place of the configuration, while no other submission adds any.

    Raises:
        SlurmftError: it was refused. Trials that were added stay, for the next submission.
    """
    from slurmft.inference.requests import folder_of
    from slurmft.inference.trials import add, add_values, retry_failed

    run, trials = RunFolder(settings.run_folder), settings.trials
    if trials is None:
        raise UsageError("this configuration has no section trials", hint="slurmft submit trains")

    def put() -> Added:
        if choose is not None:
            return add_values(run.path, ((each, f"trial {number}") for number, each in enumerate(choose(), 1)))
        return retry_failed(run.path) if retry else add(run.path, trials)

    if run.has_records() and not folder_of(run.path).is_dir():
        raise UsageError(f"{run.path} is the folder of a run that is no sweep", hint="choose another run_folder")
    run.create()
    with run.lock():
        if not retry:
            _refuse_another_sweep(run, settings)
        added = put()
        if has_ended := run.done() is not None:
            if not added.new:
                return Sweep(added, None, is_finished=True)
            run.forget_end()
    made = _begun(lambda: submit_run(settings, sbatch_options, cluster=cluster, who=who, command=command, tell=tell),
                  run, added, has_ended=has_ended)  # fmt: skip
    return Sweep(added, made)


def _refuse_another_sweep(run: RunFolder, settings: RunConfig) -> None:
    if not run.has_records() or (before := configuration_of(run)).trials is None or settings.trials is None:
        return
    # python may be the path that the shell has found for it
    calls = [(Path(each.command[0]).name, *each.command[1:]) if each.command else () for each in (before, settings)]
    if calls[0] != calls[1] or before.trials.callable != settings.trials.callable:
        there = shlex.join(before.command) if before.command else before.trials.callable
        raise UsageError(
            f"{run.path} has a sweep that runs {there}, and this one is another",
            hint=f"choose another run_folder; to go on with this sweep, change its command in {run.config} as well",
        )


def _begun(submit: Callable[[], Submitted], run: RunFolder, added: Added, *, has_ended: bool) -> Submitted | None:
    """What was submitted; None where the run that there is takes the trials. One that ends without them is waited for.

    Args:
        has_ended: the run was complete when they were added, though its processes may still be there.

    Raises:
        SlurmftError: it was refused.
    """
    until_s = time.monotonic() + TAKEN_WITHIN_S
    while True:
        try:
            return submit()
        except RunBusy:
            if not has_ended:
                if not added.new or not _has_ended(run, added.total, until_s):
                    return None
                has_ended, until_s = True, time.monotonic() + TAKEN_WITHIN_S
            elif (progress_of(run).until or 0) >= added.total:  # of another submission
                return None
            elif time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)  # its processes end


def _has_ended(run: RunFolder, total: int, until_s: float) -> bool:
    """Whether the run that was busy came to its end without having seen so many trials; it may begin again then.

    False also for one that has not begun by ``until_s`` (monotonic): it sees them when it does.
    """
    while (progress_of(run).until or 0) < total and time.monotonic() < until_s:
        if run.done() is not None:
            with run.lock():
                run.forget_end()
            return True
        time.sleep(LOOK_S)
    return False


# --- What can be seen of a run's command before it is submitted: its interpreter, its script, and what that imports ---

PYTHONS = ("python", "python3")
ASK_S = 30.0
_FIND = """\
import sys
sys.path = [each for each in sys.path if each]  # the script would import nothing of the current folder either
import importlib.util
sys.path.insert(0, sys.argv[1])
print("missing:", *[name for name in sys.argv[2:] if importlib.util.find_spec(name) is None])
"""


def with_the_shells_python(settings: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """The settings with ``python`` in the command as the path that the user's shell finds.

    Unchanged where that is slurmft's own, which workers are forked from, where there is none, and in a container, whose
    ``python`` is its own.
    """
    if not settings.command or settings.command[0] not in PYTHONS or settings.contained() is not None:
        return settings
    found = _found(settings, environment)
    if found is None or _is_own(found):
        return settings
    return settings.model_copy(update={"command": (found, *settings.command[1:])})


def refuse_unusable_command(settings: RunConfig, environment: Mapping[str, str]) -> None:
    """Return where nothing is wrong with the command, as far as this machine can see.

    Raises:
        UsageError: its program, its script or a package is not here; names what to do.
    """
    found = command_finding(settings, environment)
    if found is not None and found.level is Level.PROBLEM:
        raise UsageError(f"{found.check}: {found.text}", hint=f"{found.remedy}; --unchecked submits it all the same")


def command_finding(settings: RunConfig, environment: Mapping[str, str]) -> Finding | None:
    """The command's program, script and packages; None where a container has them, or where there is no command."""
    if not settings.command or settings.contained() is not None:
        return None
    where, (program, *rest) = settings.trainer_directory, settings.command
    if settings.launcher == "torchrun" and _missing(sys.executable, ["torch"], where=where):
        return _problem(
            f"launcher: torchrun is started by {sys.executable}, which does not have torch",
            "submit with a slurmft that is installed beside torch, or leave out the launcher",
        )
    found = sys.executable if program.endswith(".py") else _found(settings, environment)
    if found is None and program not in PYTHONS:
        return _problem(f"there is no program {program} in PATH",
                        "correct its name, or activate the environment that has it")  # fmt: skip
    is_python = program.endswith(".py") or re.fullmatch(r"python[\d.]*t?", Path(program).name) is not None
    script = program if program.endswith(".py") else _script_in(rest) if is_python else None
    module = _module_in(rest) if is_python and script is None else None
    if script is None and module is None:
        return Finding(check="command", level=Level.OK, text=f"{found or sys.executable}")
    if script is not None and not (where / script).exists():
        return _problem(f"there is no {script} in {where}",
                        "submit from the folder that it lies in, or give its whole path")  # fmt: skip
    interpreter = sys.executable if found is None or _is_own(found) else found
    own = settings.environment
    given = {**environment, **own} if interpreter != sys.executable or "PYTHONPATH" in own else None
    if script is None:
        what, wanted, beside = f"-m {module} needs", [str(module).partition(".")[0]], where
    else:
        what, wanted, beside = f"{script} imports", _imported(where / script), (where / script).parent
    if missing := _missing(interpreter, wanted, where=beside, environment=given):
        return _problem(
            f"{what} {' and '.join(missing)}, which {interpreter} does not have",
            "activate the environment that has it, install it there, or name the interpreter in command",
        )
    return Finding(check="command", level=Level.OK, text=f"{script or f'-m {module}'} with {interpreter}")


def _problem(text: str, remedy: str) -> Finding:
    return Finding(check="command", level=Level.PROBLEM, text=text, remedy=remedy)


def _found(settings: RunConfig, environment: Mapping[str, str]) -> str | None:
    path = settings.environment.get("PATH", environment.get("PATH"))
    found = shutil.which(str(settings.trainer_directory / settings.command[0]) if "/" in settings.command[0]
                         else settings.command[0], path=path)  # fmt: skip
    return None if found is None else os.path.abspath(found)  # noqa: PTH100 - the links of an environment are its names


def _is_own(found: str) -> bool:
    """Whether that is this interpreter, by any of the names that it has in its folder."""
    one, other = Path(found), Path(sys.executable)
    return os.path.realpath(one.parent) == os.path.realpath(other.parent) and one.resolve() == other.resolve()


_FLAGS = ("-u", "-O", "-OO", "-P", "-I", "-s", "-S", "-E", "-B")


def _script_in(words: Sequence[str]) -> str | None:
    """The script among an interpreter's words; None for ``-m`` and ``-c``, and where options hide it."""
    word = next((word for word in words if word not in _FLAGS), "-")
    return None if word.startswith("-") else word


def _module_in(words: Sequence[str]) -> str | None:
    """The module behind ``-m``; None where there is none, or options hide it."""
    rest = [word for word in words if word not in _FLAGS]
    return rest[1] if rest[:1] == ["-m"] and rest[1:] else None


def _imported(script: Path) -> list[str]:
    """Which of the packages that a worker needs the script needs as well: no import in a ``try`` counts."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(read_bytes(script)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level}
    return [name for name in ("torch", "slurmft") if name in {each.partition(".")[0] for each in found}]


def _missing(
    interpreter: str, names: Sequence[str], *, where: Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Those that the interpreter finds neither among its packages nor in the folder ``where``; none where it could not
    be asked. Without an ``environment`` this process looks itself.
    """
    if environment is None:
        beside = importlib.machinery.PathFinder
        return [
            name for name in names
            if importlib.util.find_spec(name) is None and beside.find_spec(name, [str(where)]) is None
        ]  # fmt: skip
    if not names:
        return []
    try:
        process = subprocess.Popen(
            [interpreter, "-c", _FIND, str(where), *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, env=environment,
        )  # fmt: skip
    except OSError:
        return []
    try:
        (said,), code = output_of(process, ASK_S, 1 << 16)
    finally:
        end_group(process, 1.0)  # one that hangs, with what it has started
    _, asked, answer = said.decode(errors="replace").rpartition("missing:")
    return [name for name in names if name in answer.split()] if asked and code == 0 else []


# --- Batch inference to look at: prompts, a replica that is killed on the way, and what came of it ---

PROMPT_BYTES = 48
KILLER_LOOK_S = 0.05


def trained_model(runs: Path) -> Path | None:
    """The checkpoints of the newest finished run of the quickstart below ``runs``."""
    for folder in sorted(runs.glob("quickstart-[0-9]*"), reverse=True):
        run = RunFolder(folder)
        with contextlib.suppress(StorageError):
            if run.exists() and run.done() is not None:
                return configuration_of(run).checkpoint_dir
    return None


def write_prompts(path: Path, count: int) -> None:
    """Requests for the byte GPT: beginnings of lines of Python's own source.

    Raises:
        OSError: they cannot be written.
    """
    lines = [line for line in read_text(Path(textwrap.__file__)).splitlines() if len(line.strip()) > 8]
    requests = [
        {"custom_id": f"prompt-{number}", "prompt": lines[number % len(lines)][:PROMPT_BYTES]}
        for number in range(count)
    ]  # fmt: skip
    replace_atomically(path, "".join(json.dumps(request) + "\n" for request in requests))


class ReplicaKiller:
    """Kills the process of one replica, once, when some answers are there; a thread of its own.

    Args:
        run: on this machine.
        after: answers that must be committed before.
    """

    def __init__(self, run: RunFolder, after: int) -> None:
        self._run, self._after = run, after
        self._over = threading.Event()
        self.killed = 0
        """Processes that it has killed."""

        self._thread = threading.Thread(target=self._work, name="replica killer", daemon=True)

    def start(self) -> None:
        """Begin to watch the run."""
        self._thread.start()

    def stop(self) -> None:
        """Kill nothing any more."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(KILLER_LOOK_S):
            with contextlib.suppress(StorageError):
                if ((self._run.progress() or {}).get("step") or 0) >= self._after and self._kill_one():
                    return

    def _kill_one(self) -> bool:
        import psutil

        logs = re.compile(rf"{re.escape(str(self._run.path.resolve()))}/.*/rank-\d+\.log")
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if logs.fullmatch(str(Path(f"/proc/{pid}/fd/1").readlink())):
                    os.kill(pid, signal.SIGKILL)
                    self.killed += 1
                    return True
        return False


def summary_of(run: RunFolder, killed: int) -> dict[str, Any]:
    """How the batch of a finished run went, of which ``killed`` replicas were killed; as names and values to print.

    Raises:
        StorageError: its files cannot be read.
    """
    from slurmft.inference.ledger import segments_of  # numpy and more, which no other submission needs
    from slurmft.inference.requests import folder_of
    from slurmft.storage.queue import read

    events = run.journal().read()
    written = [event for event in events if event.event == EventName.OUTPUT_WRITTEN]
    if not written:
        raise StorageError(f"run {run.path.name} has no output yet", hint=f"slurmft explain {run.path}")
    begun = [event for event in events if event.event == EventName.REQUESTS_OPENED]
    died = sum(event.event == EventName.REPLICA_DIED for event in events)
    again = sum(event.details["start"] > 1 for event in events if event.event == EventName.REPLICA_READY)
    seen: Counter[int] = Counter()
    for path in segments_of(folder_of(run.path)).iterdir():
        seen.update(record.value["index"] for record in read(path) if "index" in record.value)
    facts, seconds = written[-1].details, written[-1].seconds() - begun[0].seconds()
    return {
        "requests": begun[0].details["total"], "answered": facts["answers"], "errors": facts["errors"],
        "replicas killed": f"{killed} (died: {died}, started again: {again})",
        "computed twice": f"{sum(count - 1 for count in seen.values())}; one answer of each counts",
        "seconds": f"{seconds:.1f}", "answers": Path(facts["folder"]) / "answers.jsonl",
    }  # fmt: skip


# --- The grace budget of a submission: what earlier runs needed, what Slurm leaves, and the warnings that follow ---


def check_grace(
    config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str], need: stop.GraceNeed | None = None
) -> list[stop.Finding]:
    """The findings about the grace budget of this submission; ``options`` are sbatch's from behind ``--``.

    Slurm is asked twice, once each, and what it does not say is unknown. ``need``: as of ``grace_need``, if known.
    """
    return stop.findings(need or grace_need(config), _offers(config, options, environment))


def refuse_warnings(findings: Sequence[stop.Finding]) -> None:
    """The check of ``--strict``.

    Raises:
        UsageError: there are warnings.
    """
    if count := sum(finding.severity is stop.Severity.WARNING for finding in findings):
        raise UsageError(
            f"--strict: the grace budget has {count} problem{'s' if count > 1 else ''}, named above",
            hint="fix them, or submit without --strict",
        )


def grace_need(config: RunConfig) -> stop.GraceNeed:
    """The needs of a stop, from earlier runs of the same workload."""
    return grace_need_from(config, history.earlier(config.run_folder, history.fingerprint(config.workload)))


def grace_need_from(config: RunConfig, measured: Sequence[history.Timings]) -> stop.GraceNeed:
    """The needs of a stop, from measurements of earlier attempts, oldest first."""
    save_s = history.p99_save_s(measured)
    cut_off_s = max((one.unfinished_save_s or 0.0 for one in measured), default=0.0)
    return stop.GraceNeed(
        longest_step_s=history.longest_step_s(measured),
        save_s=max(cut_off_s, save_s or 0.0) or None,
        cut_off=cut_off_s > (save_s or 0.0),
        start_s=max((one.start_s for one in measured if one.start_s is not None), default=None),
        step_s=next((one.step_s for one in reversed(measured) if one.step_s is not None), None),
        **_interval_of(config),
    )


def _interval_of(config: RunConfig) -> dict[str, Any]:
    section = config.checkpoint
    if section.interval == "steps":
        return {"interval_steps": section.interval_steps}
    return {"interval_s": section.interval_seconds or checkpoints.LONGEST_S}


def _offers(config: RunConfig, options: Mapping[str, Any], environment: Mapping[str, str]) -> list[stop.GraceOffer]:
    site, partitions = _ask_of_grace(elsewhere="clusters" in {*options, *(config.slurm.model_extra or {})})
    asked = asked_for(config.slurm, options, environment)
    defaults = [partition.name for partition in partitions if partition.is_default]
    wanted = partitions_of(config, asked.partition).split(",")
    names = list(dict.fromkeys(name for each in wanted for name in ([each] if each else defaults)))
    known = {partition.name: partition for partition in partitions}
    tiers = [partition.priority_tier for partition in partitions if partition.priority_tier is not None]
    asked_s = slurm.parse_limit_s(asked.time) if asked.time else None
    lead_s = float(config.preemption.signal_lead_s)
    return [_offer(known.get(name), asked_s if asked.time else _default_s(known.get(name)), lead_s, site, tiers)
            for name in names or [""]]  # fmt: skip


def _offer(
    partition: slurm.Partition | None, limit_s: float | None, lead_s: float, site: slurm.Site, tiers: Sequence[int]
) -> stop.GraceOffer:
    if partition is None:
        return stop.GraceOffer(lead_s=lead_s, limit_s=limit_s, kill_wait_s=site.kill_wait_s)
    return stop.GraceOffer(
        lead_s=lead_s,
        limit_s=limit_s,
        partition=partition.name,
        preempts=stop.preempts(
            kind=site.preempt_type, mode=partition.preempt_mode, tier=partition.priority_tier, tiers=tiers
        ),
        grace_s=partition.grace_s,
        kill_wait_s=site.kill_wait_s,
    )


def _default_s(partition: slurm.Partition | None) -> float | None:
    return None if partition is None else partition.default_limit_s


def _ask_of_grace(*, elsewhere: bool) -> tuple[slurm.Site, list[slurm.Partition]]:
    nothing = slurm.Site(preempt_type="", kill_wait_s=None, clock=None)
    if elsewhere:  # scontrol reports this cluster, and the job goes to another one
        return nothing, []
    try:
        with ThreadPoolExecutor(1) as pool:  # both at once: a user waits for this at a prompt
            partitions = pool.submit(slurm.partitions)
            return slurm.site(), partitions.result()
    except SlurmError as error:
        log.debug("the grace budget cannot be checked against Slurm: %s", error.what)
        return nothing, []
