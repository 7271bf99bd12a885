"""A user's batch script, submitted as it is; and its launches in the job, those that train as runs.

The script is the batch step itself. At its beginning it reads the functions of ``slurmft/launchers``, which call
``slurmft launch`` in the place of srun, torchrun and others. A launch that does not train becomes the real program. One
that trains becomes a run with a supervisor of its own (``slurmft run``), and returns when the training has ended for
good: an end that goes on through the queue ends the script, as Slurm ends everything of the job then.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from slurmft.config.run import RunConfig, from_values
from slurmft.errors import SlurmftError, UsageError
from slurmft.policy import sbatch as policy
from slurmft.policy.sbatch import Known, Line, Places, split_line
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import PART_VARIABLE, TASKS_VARIABLE, current_job
from slurmft.storage import run_folder
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.storage.verdicts import ERROR_DIR_VARIABLE
from slurmft.system import files

LAUNCHERS = Path(__file__).parent.parent / "launchers"
MAX_SCRIPT_BYTES = 4 << 20
AS_IT_IS = "surrogateescape"
"""For a script's bytes: a comment may be of any encoding."""

_MAX_LINE_BYTES = 1 << 16

# --- submission ---


Tell = Callable[[str], None]
"""Takes a line for the user."""


def submit_script(
    words: Sequence[str], environment: Mapping[str, str], *, overrides: Sequence[str], again: bool, tell: Tell
) -> int:
    """Submit the script as sbatch would with these words; sbatch's exit code.

    Args:
        overrides: ``key.sub=value`` of the configuration of each run that its launches become.

    Raises:
        ConfigError: an override names no key, or its value makes no sense.
        UsageError: there is no script, or what it launches could not be met.
        SlurmUnavailable: there is no sbatch.
    """
    from_values(
        {"command": ["train"], "run_folder": "runs/job"}, overrides, source="sbatch", known_here=lambda names: names
    )
    line = split_line(words, policy.sbatch_flags(slurm.options_of_site().flags))
    if {"help", "usage", "version", "h", "V"} & {name for name, _ in line.options}:
        return slurm.sbatch_as_given(words, environment)
    policy.refuse_several(line.command)
    text, name = _script_of(line)
    text = policy.without_guard(text)
    if (plain := policy.plain(text)) != text:
        tell(
            "the script was written on another system: it is submitted without its byte order mark and carriage returns"
        )
    policy.refuse_several(line.command, text)
    if late := policy.late_options(plain):
        tell(f"#SBATCH behind the first command does not count, as for sbatch: line {', '.join(map(str, late))}")
    options = list(_without_wrap(line))
    given = [policy.head_of(plain), options]
    added = policy.added_options(given, environment)
    sent = None if policy.OWN_SIGNAL in added else policy.signal_of(given, environment)
    guarded = policy.with_guard(text, _guard(sent, overrides, again=again))
    with tempfile.TemporaryDirectory(prefix="slurmft-sbatch-") as folder:
        path = Path(folder) / name  # its name is the job's where none is given
        files.write_bytes(path, guarded.encode(errors=AS_IT_IS))
        return slurm.sbatch_as_given([*options, *added, str(path), *line.command[1:]], environment)


def _script_of(line: Line) -> tuple[str, str]:
    """The script's text and name."""
    try:
        if (wrapped := line.value("wrap")) is not None:
            if line.command:
                raise UsageError("--wrap and a script were given", hint="give one of them")
            return f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n", "wrap"
        if not line.command:
            return sys.stdin.buffer.read(MAX_SCRIPT_BYTES).decode(errors=AS_IT_IS), "sbatch"
        path = Path(line.command[0])
        if not path.exists() and "/" not in line.command[0] and (found := shutil.which(line.command[0])):
            path = Path(found)
        return files.read_text(path, limit_bytes=MAX_SCRIPT_BYTES, errors=AS_IT_IS), path.name
    except OSError as error:
        raise UsageError(
            f"cannot read {(line.command or ('standard input',))[0]}: {error.strerror or error}"
        ) from error


def _without_wrap(line: Line) -> Iterator[str]:
    words = iter(line.words)
    for word in words:
        if word == "--wrap":
            next(words, None)
        elif not word.startswith("--wrap="):
            yield word


def _guard(sent: tuple[str, int] | None, overrides: Sequence[str], *, again: bool) -> str:
    """The words in front of the script's first command."""
    values = {
        "slurmft_is_batch_script": "yes", "SLURMFT_PYTHON": sys.executable, "SLURMFT_LAUNCHERS": str(LAUNCHERS),
        "SLURMFT_SIGNAL": "" if sent is None else "@".join(map(str, sent)), "SLURMFT_SET": json.dumps(overrides),
        "SLURMFT_AGAIN": "yes" if again else "",
    }  # fmt: skip
    return (
        "".join(f"{name}={shlex.quote(value)}; " for name, value in values.items())
        + 'if [ -r "$SLURMFT_LAUNCHERS/functions.sh" ]; then . "$SLURMFT_LAUNCHERS/functions.sh"; fi; '
    )


# --- launches ---

_OF_GUARD = ("SLURMFT", "SLURMFT_PYTHON", "SLURMFT_LAUNCHERS", "SLURMFT_SIGNAL", "SLURMFT_SET", "SLURMFT_AGAIN",
             "SLURMFT_BATCH_JOB", "SLURMFT_SCRIPT", "SLURMFT_BASH_ENV", "SLURMFT_LINE", "SLURMFT_SOURCE",
             "BASH_ENV")  # fmt: skip
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEAVING_S = 120.0
"""How long a launch whose run goes on through the queue waits for Slurm to end the script."""

SCRIPT_ENDS_S = 5
"""Begin time of a requeue: the script and its handlers have to end as well, and a second too few costs two minutes."""

UNSEEN_CYCLES = 50
"""Ends in a row without a saved step: what a script saves by itself is not seen."""

_LEAVES = frozenset({EventName.REQUEUED, EventName.PLACED, EventName.LEFT_TO_SLURM, EventName.RESUBMITTED})


ReadRanks = Callable[[Sequence[str]], Mapping[str, Any]]
"""Makes the words behind torchrun keys of a configuration, its command without an interpreter among them; raises
UsageError for what slurmft has no counterpart for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    places: Places
    settings: Mapping[str, Any]
    ranks_are_tasks: bool
    """Each worker is one task of the user's srun, and no rank of a launcher."""

    attached: bool
    """Workers are ranks, or may be; else each is a launcher that starts ranks."""


class _Script:
    """The batch script around this launch."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = given = environment
        self.own = {name: value for name, value in given.items() if name not in _OF_GUARD}
        """The environment as the script has it without slurmft."""

        ours = f"{given.get('SLURMFT_LAUNCHERS', '')}/bin"
        self.own["PATH"] = ":".join(part for part in given.get("PATH", os.defpath).split(":") if part != ours)
        if before := given.get("SLURMFT_BASH_ENV"):
            self.own["BASH_ENV"] = before
        job = current_job(given)
        identity = "none" if job is None else job.job_id
        name = re.sub(r"[^A-Za-z0-9._-]", "-", given.get("SLURM_JOB_NAME", "job")).lstrip(".-")[:80] or "job"
        root = Path(given.get("SLURMFT_RUNS") or Path(given.get("SLURM_SUBMIT_DIR", ".")) / "runs")
        self.base = root.absolute() / f"{name}-{identity}"
        """Of the folders of its runs: the first one's path."""

        self.start = f"{identity}.{given.get('SLURM_RESTART_COUNT', '0')}"

    @property
    def is_ours(self) -> bool:
        """Whether this is the job that ``slurmft sbatch`` has submitted, and none of its tasks."""
        job = self.environment.get("SLURMFT_BATCH_JOB")
        return (
            job is not None and job == self.environment.get("SLURM_JOB_ID") and "SLURM_STEP_ID" not in self.environment
        )

    @property
    def record(self) -> Path:
        """What is known of its launches, one in a line."""
        return self.base.with_name(f"{self.base.name}.launches")

    def run(self, number: int) -> RunFolder:
        """Of the launch with this number."""
        return RunFolder(self.base if number == 1 else self.base.with_name(f"{self.base.name}-{number}"))

    def lines(self) -> list[dict[str, Any]]:
        """The record; damaged lines are left out."""
        try:
            lines = list(files.read_lines(self.record, limit_bytes=64 << 20, line_limit_bytes=_MAX_LINE_BYTES))
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found += [value] if isinstance(value := json.loads(line), dict) else []
        return found

    def note(self, **facts: Any) -> None:
        """Add a line to the record.

        Raises:
            OSError: it cannot be written.
        """
        self.record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.append_line(self.record, json.dumps({"start": self.start, **facts}))

    def known(self) -> list[Known]:
        """Its launches that trained."""
        found: dict[int, Known] = {}
        for line in self.lines():
            match line:
                case {"number": int(number), "words": list(words), "start": str(start), "code": None | int() as code}:
                    found[number] = Known(number=number, words=tuple(map(str, words)), code=code, start=start)
        return list(found.values())


_NONE_MET = (
    "it calls no launcher by its name (srun, torchrun, python -m torch.distributed.run, accelerate launch, deepspeed): "
    "an absolute path or exec passes slurmft by"
)


def last_word(environment: Mapping[str, str]) -> str:
    """What to say at the end of a script of which nothing was supervised; empty where something was."""
    script = _Script(environment)
    if not script.is_ours:
        return ""
    lines = [line for line in script.lines() if line.get("start") == script.start]
    if any("number" in line for line in lines):
        return ""
    whys = [str(line["why"]) for line in lines if "why" in line]
    tried = [str(line["why"]) for line in lines if "why" in line and line.get("trains")]
    advice = "" if tried else "; SLURMFT=train srun COMMAND supervises it"
    return f"nothing of this script was supervised, because {(tried or whys or [_NONE_MET])[0]}{advice}"


def launch(
    name: str, words: Sequence[str], environment: Mapping[str, str], *, read_ranks: ReadRanks, tell: Tell
) -> int:
    """Stand for the launcher ``name`` of a batch script: become it, or train and return the exit code.

    Args:
        read_ranks: reads the command line of torchrun.

    Raises:
        StorageError: how the training has ended cannot be read; it was not begun anew.
    """
    script = _Script(environment)
    if not script.is_ours:
        _become(name, words, script.own)
    if name == policy.SUBMITS:
        return _submitted(name, words, script, tell)
    line = split_line(words, policy.SRUN_FLAGS) if name == "srun" else Line((), (), tuple(words))
    rule = policy.judged(name, _with_scripts(name, line, script.own), said=_said(environment), environment=script.own)
    if not rule.trains:
        with contextlib.suppress(OSError):
            script.note(why=rule.why)
        _become(name, words, script.own)
    try:
        script.base.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready = _prepared(name, words, line, script, read_ranks)
    except (OSError, ValueError, SlurmftError) as error:
        ready = str(error).partition("\n")[0]
    if isinstance(ready, str):
        tell(f"{name} is not supervised: {ready}")
        with contextlib.suppress(OSError):
            script.note(why=ready, trains=True)
        _become(name, words, script.own)
    if ready.code is not None:
        tell(f"{name} has finished before with exit code {ready.code} ({ready.run.path.name}); it is not repeated")
        return ready.code
    code = _supervised(ready)
    if code is None:
        return 128 + signal.SIGTERM
    if not ready.plan.ranks_are_tasks and code not in (0, 2, 16, 17, 75, 93):
        code = 1  # torchrun's, whatever its workers' was
    script.note(number=ready.number, words=[name, *words], code=code)
    return code


def _submitted(name: str, words: Sequence[str], script: _Script, tell: Tell) -> int:
    """Stand for an ``sbatch`` of the script: one that submits itself again is supervised, too.

    While what it has launched has not finished, it means that the training goes on. The job is requeued then, once: two
    jobs would train side by side.
    """
    line = split_line(words, policy.SBATCH_FLAGS)
    if not _is_itself(line, script):
        _become(name, words, script.own)
    left = [each for each in script.known() if each.code is None]
    if not left:
        overrides = json.loads(script.environment.get("SLURMFT_SET") or "[]")
        return submit_script(words, script.own, overrides=overrides, again=False, tell=tell)
    tell("this job goes on through the queue itself: its script is not submitted a second time")
    runs = [script.run(each.number) for each in left if each.start == script.start]  # others have not begun again
    for run in runs:
        run.request("REQUEUE", "sbatch in its script")
    deadline_s = time.monotonic() + LEAVING_S
    while not all(run.done() is not None or _has_left(run) for run in runs) and time.monotonic() < deadline_s:
        time.sleep(RELAY_S)
    sys.stdout.write(
        f"{'' if line.value('parsable') is not None else 'Submitted batch job '}{script.own['SLURM_JOB_ID']}\n"
    )
    return 0


def _is_itself(line: Line, script: _Script) -> bool:
    """Whether sbatch is given the script that calls it: its copy at the node (``$0``), or the file that it was."""
    if line.value("wrap") is not None or not line.command:
        return False
    try:
        own, given = (files.read_text(path, limit_bytes=MAX_SCRIPT_BYTES, errors="replace")
                      for path in (script.environment.get("SLURMFT_SCRIPT", ""), line.command[0]))  # fmt: skip
    except OSError:
        return False
    return policy.plain(policy.without_guard(own)) == policy.plain(policy.without_guard(given))


def _has_left(run: RunFolder) -> bool:
    """Whether its newest attempt goes on through the queue."""
    events = [event.event for event in run.journal().read()]
    decided = len(events) - 1 - events[::-1].index(EventName.DECISION) if EventName.DECISION in events else 0
    return bool(_LEAVES.intersection(events[decided:]))


def _with_scripts(name: str, line: Line, own: Mapping[str, str]) -> list[str]:
    """The command, and that of a shell script which srun runs: ``srun ./launch.sh``, ``srun bash launch.sh``."""
    words = list(line.command)
    for each in policy.scripts_of(line) if name == "srun" else ():
        with contextlib.suppress(OSError, ValueError, SlurmftError):
            path = Path(line.value("chdir", "D") or ".", each)
            found = path if path.is_file() else shutil.which(each, path=own.get("PATH")) or each
            words.append(policy.commands_in(files.read_part(found, 0, _MAX_LINE_BYTES).decode(errors="replace")))
    return words


def _said(environment: Mapping[str, str]) -> str:
    """What the script says of this launch."""
    if (said := environment.get("SLURMFT", "")) in ("train", "off"):
        return said
    line = environment.get("SLURMFT_LINE", "")
    try:
        text = files.read_text(environment.get("SLURMFT_SOURCE", ""), limit_bytes=MAX_SCRIPT_BYTES, errors=AS_IT_IS)
    except (OSError, ValueError):
        return ""
    return policy.said_in(text.split("\n"), int(line)) if line.isdecimal() else ""


def _become(name: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the real program; as a shell, where there is none."""
    path = shutil.which(name, path=environment.get("PATH"))
    if path is None:
        sys.stderr.write(f"{name}: command not found\n")
        sys.exit(127)
    sys.stdout.flush()
    os.execve(path, [name, *words], dict(environment))  # noqa: S606 - an argument list, no shell


def _plan(name: str, line: Line, script: _Script, read_ranks: ReadRanks) -> _Plan | str:
    """How a launch that trains becomes a run; or why it cannot."""
    own = script.own
    if own.get("SLURM_HET_SIZE", "1") != "1":
        return "a job of several components (hetjob) is not one run"
    command = list(line.command)
    if name == "srun":
        if why := policy.why_not_srun(line):
            return why
        folder = line.value("chdir", "D") or "."
        if not any(shutil.which(each, path=own.get("PATH")) for each in (command[0], f"{folder}/{command[0]}")):
            return f"there is no {command[0]} here"
        with tempfile.TemporaryDirectory(dir=script.base.parent, prefix=".tasks-") as folder:
            tasks = slurm.tasks_of(policy.options_for_tasks(line), Path(folder), own)
        if line.value("label", "l") is not None:  # which would label what the tasks say as well
            tasks = [{**task, "SLURM_LABELIO": "1"} for task in tasks]
    else:
        if shutil.which(name, path=own.get("PATH")) is None:
            return "there is no such command"
        command = [name, *command]
        tasks = [{**own, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
                  "SLURM_STEP_NODELIST": own.get("SLURMD_NODENAME", "")}]  # fmt: skip
    places = policy.places_of(tasks)
    if isinstance(places, str):
        return places
    first = next(iter(places.hosts.values()))
    own_gpus = [f"--gres=gpu:{gpus * len(first)}"] if (gpus := policy.gpus_of(first[0], first)) else []
    section = {"srun_args": [*policy.options_for_agents(line), *own_gpus]}
    settings: dict[str, Any] = {"nodes": places.nodes, "nproc_per_node": places.per_node, "slurm": section,
                                "working_directory": line.value("chdir", "D") or str(Path.cwd())}  # fmt: skip
    if places.per_node == 1 and (found := _ranks(command, own, places, read_ranks)) is not None:
        return _Plan(places=places, settings={**settings, **found}, ranks_are_tasks=False, attached=True)
    if name == "deepspeed" and int(own.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        return "deepspeed starts its ranks on other nodes by itself (ssh)"
    read = [name, *_with_scripts(name, line, own)]
    attached = name in ("python", "python3", "srun") and not policy.starts_ranks(read, own)
    settings["command"] = _found(command, own)
    return _Plan(places=places, settings=settings, ranks_are_tasks=True, attached=attached)


def _ranks(command: Sequence[str], own: Mapping[str, str], places: Places, read: ReadRanks) -> dict[str, Any] | None:
    """The settings of a torchrun on these nodes, whose ranks agents can start themselves; None where they cannot."""
    program, found = command[0].rpartition("/")[2], shutil.which(command[0], path=own.get("PATH"))
    match command[1:]:
        case rest if program in ("torchrun", "ft_launcher"):
            interpreter = _interpreter_of(found)
        case ["-m", module, *rest] | ["-u", "-m", module, *rest] if program.startswith("python") and module.endswith(
            "distributed.run"
        ):
            interpreter = found
        case _:
            return None
    try:
        settings = dict(read(rest))
    except SlurmftError:
        return None
    settings.pop("run_folder", None)
    if settings.get("nodes") != places.nodes or "elastic" in settings or interpreter is None:
        return None
    words = list(settings["command"])
    if words[0] == "python":
        words[:1] = [interpreter, "-u"]  # as torchrun starts its workers
    return {**settings, "command": words}


def _interpreter_of(program: str | None) -> str | None:
    """The interpreter in the first line of a program of Python's."""
    if program is None:
        return None
    with contextlib.suppress(OSError):
        first = files.read_part(Path(program), 0, 256).partition(b"\n")[0].decode(errors="replace")
        path = first.removeprefix("#!").strip()
        if first.startswith("#!/") and " " not in path and "python" in path:
            return path
    return None


def _found(command: Sequence[str], own: Mapping[str, str]) -> list[str]:
    """The command, with a Python of the script's in the place of one of the agent's.

    Whatever ends in .py is run by the interpreter that it names itself, not by ours.
    """
    found = shutil.which(command[0], path=own.get("PATH"))
    if command[0].rpartition("/")[2].startswith("python") and found is not None:
        return [found, *command[1:]]
    if found is not None and not command[0].endswith(".py"):
        return list(command)
    return ["env", command[0] if found or "/" in command[0] else f"./{command[0]}", *command[1:]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A run of this launch that may begin."""

    number: int
    code: int | None
    """With which it has ended for good in an earlier start."""

    plan: _Plan
    run: RunFolder
    environment: Mapping[str, str]
    """Of its supervisor."""

    relay: _Relay


def _prepared(name: str, words: Sequence[str], line: Line, script: _Script, read_ranks: ReadRanks) -> _Ready | str:
    """The run of a launch that trains; or why it cannot be one."""
    plan = _plan(name, line, script, read_ranks)
    if isinstance(plan, str):
        return plan
    for pattern in filter(None, (line.value("output", "o"), line.value("error", "e"))):
        if policy.output_name(pattern, script.own, user="") is None:
            return f"srun's output to {pattern} cannot be carried over to a supervised run"
    own_errors = _has_own_errors(line)
    if own_errors:
        plan = replace(plan, settings={**plan.settings, "command": _apart(plan)})
    sign, _, lead_s = script.environment.get("SLURMFT_SIGNAL", "").partition("@")
    preemption = {"signal": sign or "SIGUSR2", "signal_lead_s": int(lead_s or 120), "continue_by": "requeue",
                  "requeue_delay_s": SCRIPT_ENDS_S, **plan.settings.get("preemption", {})}  # fmt: skip
    tolerance = {"max_no_progress_cycles": UNSEEN_CYCLES, **plan.settings.get("fault_tolerance", {})}
    own: dict[str, Any] = {} if sign else {"exit_actions": {"COMPLETE": "0"}}  # our own signal ends no program
    own |= {"fault_tolerance": tolerance, "run_folder": str(script.base), "preemption": preemption}
    values = {**plan.settings, **own}
    overrides = json.loads(script.environment.get("SLURMFT_SET") or "[]")
    config = from_values(values, overrides, source=name, known_here=lambda options: options)
    number, code = _claimed([name, *words], script)
    run = script.run(number)
    config = config.placed_in(run.path)
    supervisors = {**script.own, PART_VARIABLE: plan.places.nodelist, TASKS_VARIABLE: str(run.path / "tasks.json")}
    supervisors.pop("SLURM_CPUS_PER_TASK", None)
    if plan.places.cpus_per_node:
        supervisors["SLURM_CPUS_PER_TASK"] = plan.places.cpus_per_node
    if code is None:
        run.create()
        run_folder.note_run(run.path, script.own)
        files.replace_atomically(run.config, config.as_yaml())
        _leave_tasks(run.path / "tasks.json", plan, config, supervisors)
    relay = _Relay(run, line, plan, script, own_errors=own_errors)
    return _Ready(number=number, code=code, plan=plan, run=run, environment=supervisors, relay=relay)


def _claimed(words: Sequence[str], script: _Script) -> tuple[int, int | None]:
    """The number of this launch, and its exit code where it has ended for good in an earlier start."""
    script.record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.opened(script.record, os.O_RDWR | os.O_CREAT, owners={os.geteuid()}) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # all launches of a script are on the batch host
        known = script.known()
        before = policy.same_launch(words, known, script.start)
        if before is not None and before.code is not None and not script.environment.get("SLURMFT_AGAIN"):
            script.note(number=before.number, words=list(words), code=before.code)
            return before.number, before.code
        is_new = before is None or before.code is not None
        number = max((each.number for each in known), default=0) + 1 if is_new or before is None else before.number
        script.note(number=number, words=list(words), code=None)
        return number, None


def _leave_tasks(path: Path, plan: _Plan, config: RunConfig, supervisors: Mapping[str, str]) -> None:
    """The file by which agents make workers of tasks; one task of a node stands for all its ranks under torchrun."""
    hosts = {}
    for host, tasks in plan.places.hosts.items():
        each = [
            {"changes": policy.changes_for(task, supervisors, ranks_are_tasks=plan.ranks_are_tasks,
                                           attached=plan.attached),
             "gpus": policy.gpus_of(task, tasks) if plan.ranks_are_tasks else 0}
            for task in tasks
        ]  # fmt: skip
        hosts[host] = each * (config.nproc_per_node // len(each))
    files.write_json(path, {"hosts": hosts})


def _supervised(ready: _Ready) -> int | None:
    """The exit code of a supervisor of this run; None where the run goes on in another start of the job."""
    run, environment = ready.run, ready.environment
    got: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        got.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number)

    child: subprocess.Popen[bytes] | None = None
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    argv = [sys.executable, "-P", "-u", "-m", "slurmft", "run", str(run.config)]
    with ready.relay, files.appending(run.logs / f"{environment['SLURM_JOB_ID']}.log") as log:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment))
        code = child.wait()
    if run.done() is None and _has_left(run):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if signal.SIGTERM not in got:
            signal.sigtimedwait({signal.SIGTERM}, LEAVING_S)
        return None
    return code if code >= 0 else 128 - code


# --- output ---

RELAY_S = 0.1
_PART_BYTES = 1 << 16


def _has_own_errors(line: Line) -> bool:
    """Whether standard error goes elsewhere than standard output."""
    if line.value("error", "e") is not None:
        return True
    out, errors = os.fstat(1), os.fstat(2)
    return line.value("output", "o") is None and (out.st_dev, out.st_ino) != (errors.st_dev, errors.st_ino)


def _apart(plan: _Plan) -> list[str]:
    """The command with its standard output in a file of its own, beside the log, which keeps the errors as evidence."""
    rank = "SLURM_PROCID" if plan.ranks_are_tasks else "RANK"
    return ["/bin/sh", "-c", f'exec "$@" >> "${{{ERROR_DIR_VARIABLE}}}/rank-${{{rank}}}.out"', "sh",
            *plan.settings["command"]]  # fmt: skip


class _Relay:
    """Copies what ranks write from now on to where srun would have written it.

    Args:
        own_errors: their standard output is in ``.out``, so that ``.log`` has errors alone.
    """

    def __init__(self, run: RunFolder, line: Line, plan: _Plan, script: _Script, *, own_errors: bool) -> None:
        self._run, self._labelled = run, line.value("label", "l") is not None
        out, errors = (line.value("output", "o"), 1), (line.value("error", "e"), 2)
        self._targets = {".out": out, ".log": errors if own_errors else out}
        self._job, _, self._restart = script.start.rpartition(".")
        self._tasks = [task for tasks in plan.places.hosts.values() for task in tasks]
        self._over = threading.Event()
        self._read: dict[Path, int] = {}
        self._thread = threading.Thread(target=self._copy_all, daemon=True, name="output")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _copy_all(self) -> None:
        while not self._over.wait(RELAY_S):
            self._copy()
        self._copy(to_the_end=True)

    def _copy(self, *, to_the_end: bool = False) -> None:
        found = self._run.attempts.glob(f"{self._job}.{self._restart}.*/rank-*")
        for path in sorted(path for path in found if path.suffix in self._targets):
            while part := self._next(path, to_the_end=to_the_end):
                with contextlib.suppress(OSError):
                    self._write(path, part)

    def _next(self, path: Path, *, to_the_end: bool) -> bytes:
        at = self._read.get(path, 0)
        try:
            part = files.read_part(path, at, _PART_BYTES)
        except OSError:
            return b""
        if not to_the_end and len(part) < _PART_BYTES:  # whole lines: several ranks write to one file
            part = part[: max(part.rfind(b"\n"), part.rfind(b"\r")) + 1]
        self._read[path] = at + len(part)
        return part

    def _write(self, path: Path, part: bytes) -> None:
        rank, (pattern, descriptor) = int(path.stem.partition("-")[2]), self._targets[path.suffix]
        if self._labelled:
            part = b"".join(b"%d: %s" % (rank, line) for line in part.splitlines(keepends=True))
        task = self._tasks[min(rank, len(self._tasks) - 1)]
        if pattern is not None and (name := policy.output_name(pattern, task, user=getpass.getuser())) is not None:
            files.write_bytes(name, part, append=True)
            return
        files.write_all(descriptor, part)
