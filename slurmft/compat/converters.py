"""Command lines and batch scripts of others, converted to a configuration."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from slurmft.compat.neighbours import FaultToleranceConfig
from slurmft.config.run import read
from slurmft.errors import ConfigError, UsageError
from slurmft.policy import plain_values as plain
from slurmft.policy.sbatch import FLAGS, MODULES, OWNED_OPTIONS, PROGRAMS, SHORT_OPTIONS

# --- ft launcher ---
# The command line of nvidia-resiliency-ext's ``ft_launcher``, which is torchrun's with ``--ft-*`` options, as a run.
#
# Source: its ``launcher.py``, main of 2026-08 and older versions (``--ft-param-*``). Options may be written with
# ``-`` or ``_``, and as ``--name=value`` or ``--name value``.

_FINDS = "slurmft finds the nodes, and gives each rank its variables"
_LOGS = "logs are in the run folder, one for each rank and attempt: slurmft logs"
_HERE = "the agent of each node starts the ranks"

WITHOUT: Mapping[str, str] = {
    "rdzv-backend": _FINDS, "rdzv-endpoint": _FINDS, "rdzv-conf": _FINDS, "master-addr": _FINDS, "master-port": _FINDS,
    "node-rank": _FINDS, "local-addr": _FINDS, "ft-rdzv-impl": _FINDS,
    "monitor-interval": _HERE, "start-method": _HERE, "role": _HERE,
    "workers-stop-timeout": "the ranks of a failed attempt are killed at once, after their evidence is taken",
    "log-dir": _LOGS, "redirects": _LOGS, "r": _LOGS, "tee": _LOGS, "t": _LOGS, "local-ranks-filter": _LOGS,
    "logs-specs": _LOGS, "ft-base-logfile": _LOGS,
}  # fmt: skip
"""Options with a value that have no counterpart, and what there is instead."""

FLAGS_WITHOUT: Mapping[str, str] = {
    "run-path": "the script runs in a process of its own",
    "ft-ignore-missing-cfg": "a configuration is not needed",
    "ignore-missing-fault-tol-cfg": "a configuration is not needed",
}
VALUES = ("nnodes", "nproc-per-node", "max-restarts", "rdzv-id", "term-timeout", "ft-cfg-path", "fault-tol-cfg-path",
          "ft-restart-policy")  # fmt: skip
LAUNCHER_FLAGS = ("standalone", "module", "m", "no-python")

OURS = ("run-folder", "cluster", "set", "print-config", "dry-run", "wait")
"""Options of the verb itself."""

_PREFIXES = ("ft-param-", "ft-")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line in our words."""

    settings: dict[str, Any]
    """Keys and values of a configuration, with the command, and a run folder by ``--rdzv-id`` or the script's name."""

    remarks: tuple[str, ...]
    """One line for each option without a counterpart."""

    standalone: bool = False
    """``--standalone``: on this machine alone."""


def parse(words: Sequence[str]) -> Launch:
    """The run that a command line of ``ft_launcher`` describes.

    Raises:
        ConfigError: an option's value makes no sense, or the file of ``--ft-cfg-path`` cannot be used.
        UsageError: an option does not exist there, has no value, or there is no script.
    """
    given, command = _split_options(words)
    if not command:
        raise UsageError("there is no script to launch", hint="slurmft ft-launch --nproc-per-node 8 train.py --lr 1e-4")
    remarks = [
        f"--{name} has no counterpart: {why}" for name, why in {**WITHOUT, **FLAGS_WITHOUT}.items() if name in given
    ]
    if given.get("ft-restart-policy", "any-failed") != "any-failed":
        remarks.append("--ft-restart-policy has no counterpart: all ranks are restarted when one fails; "
                       "elastic.min_nodes lets fewer nodes go on")  # fmt: skip
    ft = _fault_tolerance(given)
    settings: dict[str, Any] = {
        "command": _command(command, given), "run_folder": f"runs/{_run_name(command, given)}", **ft.settings()
    }  # fmt: skip
    if "max-restarts" in given:
        section = settings.setdefault("fault_tolerance", {})
        section["num_in_job_restarts"] = _integer("max-restarts", given["max-restarts"], at_least=0)
    if "term-timeout" in given:
        settings["preemption"] = {"stop_timeout_s": given["term-timeout"]}
    settings |= _size(given)
    return Launch(settings, (*remarks, *ft.remarks), standalone="standalone" in given)


def _split_options(words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """The options in front of the script, by their names with ``-``; and the script with its arguments."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in LAUNCHER_FLAGS or name in FLAGS_WITHOUT:
            if equals:
                raise UsageError(f"--{name} takes no value")
            value = "true"
        elif name in OURS:
            raise UsageError(f"--{name} is slurmft's own option", hint="write it in front of those of the launcher")
        elif not _exists(name):
            known = [*LAUNCHER_FLAGS, *FLAGS_WITHOUT, *VALUES, *WITHOUT, *(f"ft-{key}" for key in _ft_names())]
            raise UsageError(f"ft_launcher has no option {word[:60]}{plain.did_you_mean(name, known)}")
        elif not equals:
            if not rest:
                raise UsageError(f"--{name} needs a value")
            value = rest.pop(0)
        given[name] = value
    return given, rest


def _ft_names() -> list[str]:
    return [name.replace("_", "-") for name in FaultToleranceConfig.RULES]


def _exists(name: str) -> bool:
    return name in VALUES or name in WITHOUT or _ft_name(name) is not None


def _ft_name(name: str) -> str | None:
    """The option of ``FaultToleranceConfig`` that ``--ft-NAME`` or ``--ft-param-NAME`` sets."""
    for prefix in _PREFIXES:
        inner = name.removeprefix(prefix).replace("-", "_")
        if name.startswith(prefix) and inner in FaultToleranceConfig.RULES:
            return inner
    return None


def _fault_tolerance(given: Mapping[str, str]) -> FaultToleranceConfig:
    """The file's section, and above it the options."""
    options: dict[str, Any] = {}
    for name in ("ft-cfg-path", "fault-tol-cfg-path"):
        if name in given:
            options |= _section_in(read(Path(given[name])), given[name])
    options |= {inner: _value(value) for name, value in given.items() if (inner := _ft_name(name)) is not None}
    return FaultToleranceConfig(**options)


def _section_in(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The section ``fault_tolerance``, at whatever depth.

    Raises:
        ConfigError: there is none.
    """
    waiting = [values]
    for mapping in waiting:
        section = mapping.get("fault_tolerance")
        if isinstance(section, Mapping):
            return {str(key): value for key, value in section.items()}
        waiting += [value for value in mapping.values() if isinstance(value, Mapping)]
    raise ConfigError(f"{path} has no section fault_tolerance")


def _value(text: str) -> Any:
    """A value of the command line as one of Python; fractions are left to the section that takes them."""
    if ":" in text:  # section:seconds, ...
        return ",".join(part if _value(part.rpartition(":")[2]) is not None else f"{part.rpartition(':')[0]}:null"
                        for part in text.split(","))  # fmt: skip
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    return {"none": None, "null": None, "": None, "true": True, "false": False}.get(text.strip().lower(), text)


def _size(given: Mapping[str, str]) -> dict[str, Any]:
    least, colon, most = given.get("nnodes", "1").partition(":")
    nodes = _integer("nnodes", most if colon else least)
    settings: dict[str, Any] = {"nodes": nodes}
    if colon and (fewest := _integer("nnodes", least)) != nodes:
        settings["elastic"] = {"min_nodes": fewest}
    per_node = given.get("nproc-per-node", "1")
    if per_node in ("auto", "gpu", "cpu"):
        raise UsageError(
            f"--nproc-per-node={per_node} is not known here, where the nodes are not", hint="give a number"
        )
    return {**settings, "nproc_per_node": _integer("nproc-per-node", per_node)}


def _integer(name: str, text: str, *, at_least: int = 1) -> int:
    if not text.strip().isascii() or not text.strip().isdecimal() or len(text) > 9 or int(text) < at_least:
        raise UsageError(f"--{name}: {text[:40]!r} is not a whole number from {at_least} on")
    return int(text)


def _command(command: Sequence[str], given: Mapping[str, str]) -> list[str]:
    if "no-python" in given:
        return list(command)
    module = ["-m"] if "module" in given or "m" in given else []
    return ["python", *module, *command]


def _run_name(command: Sequence[str], given: Mapping[str, str]) -> str:
    name = given.get("rdzv-id", "none")
    if name == "none":
        name = PurePath(command[0]).stem or "run"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:100].lstrip(".") or "run"


# --- A user's batch script, with srun, torchrun or ft_launcher in it, as keys and values of a configuration ---
# Nothing is executed and nothing is guessed: what has no counterpart is named with its line.

_SIGNALS = {"TERM": "SIGTERM", "INT": "SIGINT", "USR1": "SIGUSR1", "USR2": "SIGUSR2",
            "15": "SIGTERM", "2": "SIGINT", "10": "SIGUSR1", "12": "SIGUSR2"}  # fmt: skip
_SIZES = {"nodes", "ntasks", "ntasks-per-node"}
_SRUN_FLAGS = {"label", "l", "unbuffered", "u", "exclusive", "overlap", "quiet", "Q", "verbose", "v", "overcommit", "O",
               "no-container-entrypoint", "container-mount-home", "no-container-mount-home", "container-writable",
               "container-remap-root", "no-container-remap-root", "pty", "wait-for-children"}  # fmt: skip
_OURS_IN_SRUN = {*_SIZES, "label", "l", "unbuffered", "u", "kill-on-bad-exit", "output", "error", "job-name", "wait",
                 "export", "nodelist", "pty", "N", "n"}  # fmt: skip
_OTHER_LAUNCHERS = {"accelerate", "deepspeed", "mpirun", "horovodrun", "composer", "colossalai"}
_PROFILERS = {"nsys", "ncu"}
_SET_HERE = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE"}
_SECRET = re.compile(
    r"TOKEN(?!IZ|S|_?ID)|SECRET|PASS(WORD|WD|PHRASE)|CREDENTIAL"
    r"|(^|[_-])(API|ACCESS|PRIVATE|AUTH|SSH)[_-]?KEY",
    re.IGNORECASE,
)
_NAMED_SECRET = re.compile(r"(?P<name>[A-Za-z_-][\w-]*)(?P<by>=|\s+)(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"']+)")
_SECRET_VALUE = re.compile(
    r"(?<![\w-])(hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA)[\w-]{10,}"
    r"|(?<=://)[^/\s@]+:[^/\s@]+(?=@)|(?<=[Bb]earer )[^\s\"']+"
)
_HIDDEN = "SECRET"
_ASSIGNMENT = re.compile(r"(?P<export>export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_COMMAND = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|(?<=\S)#")
"""What stands for itself: command substitutions, and a # inside of a word, which begins no comment."""

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)(?::?-[^}]*)?\}|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")
_HARMLESS = {"set", "echo", "date", "hostname", "nvidia-smi", "trap", "wait", "exit", "true", "printf", "ulimit",
             "sleep", "mkdir", "fi", "done", "then", "else", "env", "scontrol"}  # fmt: skip
_PREPARES = {"source", ".", "module", "ml", "conda", "micromamba", "mamba", "spack", "eval", "pip"}


@dataclass(frozen=True, slots=True)
class Converted:
    """A script in our words."""

    settings: dict[str, Any]
    remarks: tuple[str, ...]
    """What was not mapped, or needs a look, each with its line."""


@dataclass(slots=True)
class _Script:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    slurm: dict[str, Any] = field(default_factory=dict)
    tasks_per_node: str = ""
    tasks: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    launched: int = 0
    """The line of the command that was taken."""

    def remark(self, line: int, text: str) -> None:
        self.remarks.append(f"line {line}: {_without_secrets(text)}")


def convert(text: str, name: str) -> Converted:
    """The run that a batch script describes.

    Args:
        name: for the run folder, where the script gives its job no name.

    Raises:
        UsageError: there is no command that trains in it, or one of its options makes no sense.
    """
    script = _Script(name)
    is_head = True
    for line, words in _logical_lines(text):
        if words.startswith("#SBATCH") and is_head:
            _directive(script, line, words.removeprefix("#SBATCH"))
        elif not words or words.startswith("#"):
            continue
        else:
            if is_head:
                is_head = False
                _know_slurms_variables(script)
            _command_line(script, line, words)
    if not script.launched:
        raise UsageError(f"{name}: no command that trains was found: srun, torchrun, ft_launcher or python",
                         hint="write the configuration by hand: configs/quickstart.yaml")  # fmt: skip
    return _finished(script)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    begun, number = "", 0
    for at, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        number = number if begun else at
        begun += line
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            begun = begun[:-1] + " "
            continue
        yield number, begun.strip()
        begun = ""
    if begun:
        yield number, begun.strip()


def _split_words(line: int, text: str) -> list[str]:
    """The words of a line; a command substitution is one word, which is left as it is."""
    found: list[str] = []

    def hide(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"\0{len(found) - 1}\0"

    lexer = shlex.shlex(_COMMAND.sub(hide, text), posix=True, punctuation_chars="|&;<>()")
    lexer.commenters, lexer.whitespace_split = "#", True
    try:
        words = list(lexer)
    except ValueError as error:
        raise UsageError(f"line {line}: {error}: {text[:80]!r}") from error
    return [re.sub("\0([0-9]+)\0", lambda match: found[int(match[1])], word) for word in words]


# sbatch's options


def _options(line: int, words: Sequence[str], flags: frozenset[str] | set[str]) -> Iterator[tuple[str, str]]:
    """Names and values of the options at the front; a flag's value is empty. Ends with ("", index of the rest)."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = SHORT_OPTIONS.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = value
        if not equals and name not in flags and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        yield name, value
    yield "", str(at)


def _directive(script: _Script, line: int, text: str) -> None:
    for name, value in _options(line, _split_words(line, text), FLAGS | {"requeue", "no-requeue", "no-kill"}):
        if name:
            _sbatch_option(script, line, name, value)


def _sbatch_option(script: _Script, line: int, name: str, value: str) -> None:
    match name:
        case "nodes":
            _nodes(script, line, value)
        case "ntasks-per-node":
            script.tasks_per_node = value
        case "ntasks":
            script.tasks = value
        case "signal":
            _signal(script, line, value)
        case "requeue" | "no-requeue":
            if name == "no-requeue":
                script.slurm["requeue"] = False
        case "no-kill":
            script.slurm["no_kill"] = True
        case "open-mode":
            pass  # logs always append
        case "chdir":
            script.settings["working_directory"] = value
        case _ if name in OWNED_OPTIONS:
            script.remark(line, f"--{name} is not taken over: {OWNED_OPTIONS[name]}")
        case _:
            script.slurm[name.replace("-", "_")] = value if value else True


def _nodes(script: _Script, line: int, value: str) -> None:
    least, dash, most = value.partition("-")
    if not (least.isdecimal() and (most.isdecimal() or not dash)):
        raise UsageError(f"line {line}: --nodes={value[:40]} is not a number of nodes or a range of them")
    script.settings["nodes"] = int(most or least)
    if dash and int(least) != int(most):
        script.settings["elastic"] = {"min_nodes": int(least)}


def _signal(script: _Script, line: int, value: str) -> None:
    match = re.fullmatch(r"(?:([BR]+):)?(?:SIG)?([A-Z0-9]+)(?:@([0-9]+))?", value)
    if match is None or (signal := _SIGNALS.get(match[2])) is None:
        script.remark(line, f"--signal={value} is not taken over: preemption.signal is SIGTERM, SIGINT, SIGUSR1 or "
                      "SIGUSR2")  # fmt: skip
        return
    script.settings["preemption"] = {"signal": signal, "signal_lead_s": int(match[3] or 60)}


# The commands


def _know_slurms_variables(script: _Script) -> None:
    """What Slurm sets in the script, as far as its options tell."""
    nodes = script.settings.get("nodes", 1)
    per_node = _per_node(script) or ""
    gpus = _gpus(script)
    known = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS_PER_NODE": per_node,
             "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus,
             "SLURM_CPUS_PER_TASK": script.slurm.get("cpus_per_task", "")}  # fmt: skip
    script.variables.update({name: str(value) for name, value in known.items() if value not in ("", None)})


def _per_node(script: _Script) -> int | None:
    if script.tasks_per_node.isdecimal():
        return int(script.tasks_per_node)
    nodes = script.settings.get("nodes", 1)
    return int(script.tasks) // nodes if script.tasks.isdecimal() and int(script.tasks) % nodes == 0 else None


def _gpus(script: _Script) -> int | None:
    """GPUs of a node, from the options that say so."""
    text = str(script.slurm.get("gpus_per_node") or script.slurm.get("gres") or "")
    found = re.search(r"(?:^|:)([0-9]+)$", text.removeprefix("gres/"))
    return int(found[1]) if found else None


def _command_line(script: _Script, line: int, text: str) -> None:
    if (assigned := _ASSIGNMENT.fullmatch(text)) is not None and _is_one_value(line, assigned["value"]):
        _assign(script, line, assigned)
        return
    words = _split_words(line, re.sub(r"(?<=\s)[0-9]+(?=[<>])", "", _known(script, text)))
    if words and words[0] in ("exec", "time"):
        words = words[1:]
    if not words:
        return
    first = words[0].rpartition("/")[2]
    if first == "cd" and len(words) == 2:
        script.settings["working_directory"] = words[1]
    elif first in _PREPARES:
        script.remark(line, f"{text[:80]!r} is not run by slurmft: do that before slurmft submit; the job gets the "
                      "environment you submit from")  # fmt: skip
    elif first == "srun" or first in _PROFILERS or _is_trainer(words):
        _launch(script, line, words)
    elif first in _OTHER_LAUNCHERS:
        script.remark(line, f"{first} is not converted: command is the script itself, nproc_per_node its processes on "
                      "a node")  # fmt: skip
    elif first not in _HARMLESS:
        script.remark(line, f"{text[:80]!r} has no counterpart")


def _is_one_value(line: int, value: str) -> bool:
    return len(_split_words(line, value)) <= 1


def _assign(script: _Script, line: int, found: re.Match[str]) -> None:
    name = found["name"]
    value = "".join(_split_words(line, _known(script, found["value"])))
    is_plain = "$" not in value and "`" not in value
    if is_plain and not _SECRET.search(name):
        script.variables[name] = value
    if not found["export"] or name in _SET_HERE:
        return
    if _SECRET.search(name) or _SECRET_VALUE.search(value):
        script.remark(line, f"{name} is not stored in a configuration: export it before slurmft submit")
    elif is_plain:
        script.settings.setdefault("environment", {})[name] = value
    else:
        script.remark(line, f"{name}={value[:60]} is found out when the script runs: set it in the trainer, or write "
                      "its value into environment")  # fmt: skip


def _known(script: _Script, text: str) -> str:
    """The text with the variables that the script or its options give a value; not inside of single quotes."""

    def value(match: re.Match[str]) -> str:
        return script.variables.get(match["braced"] or match["bare"], match[0])

    parts = re.split(r"('[^']*')", text)
    return "".join(part if part.startswith("'") else _VARIABLE.sub(value, part) for part in parts)


def _is_trainer(words: Sequence[str]) -> bool:
    return _launcher(words) > 0 or re.fullmatch(r"python[0-9.]*", PurePath(words[0]).name) is not None


def _launcher(words: Sequence[str]) -> int:
    """How many words in front are torchrun's or ft_launcher's name; 0 where another program is called."""
    if PurePath(words[0]).name in PROGRAMS:
        return 1
    return 3 if words[1:2] == ["-m"] and words[2:3] and words[2] in MODULES else 0


def _launch(script: _Script, line: int, words: list[str]) -> None:
    if script.launched:
        script.remark(line, f"a second command is not taken over: a run has one, here that of line {script.launched}")
        return
    through_srun = PurePath(words[0]).name == "srun"
    if through_srun:
        words = _srun(script, line, words[1:])
    if len(words) > 2 and PurePath(words[0]).name in ("bash", "sh") and words[1].lstrip("-") in ("c", "lc"):
        words = _split_words(line, _known(script, words[2]))
    at = next((at for at in range(1, len(words)) if _is_trainer(words[at:])), 0)
    if words and PurePath(words[0]).name in _PROFILERS and at:
        script.remark(
            line,
            f"{' '.join(words[:at])[:60]!r} is left out: signals, exit codes and restarts are the "
            "trainer's own; to profile a run all the same, write it in front of command",
        )
        words = words[at:]
    cut = next((at for at, word in enumerate(words) if word and set(word) <= set("|&;<>()")), len(words))
    if cut < len(words):
        script.remark(line, f"{' '.join(words[cut:])[:60]!r} is not taken over: slurmft logs shows the output")
    words = words[:cut]
    if not words:
        raise UsageError(f"line {line}: srun has no command")
    script.launched = line
    if front := _launcher(words):
        launch = parse(words[front:])
        settings = dict(launch.settings)
        settings.pop("run_folder")
        if not any(word.startswith("--nnodes") for word in words):
            settings.pop("nodes", None)
        script.remarks += [f"line {line}: {remark}" for remark in launch.remarks if "slurmft finds" not in remark]
        script.settings |= settings
    else:
        script.settings["command"] = list(words)
        script.settings["nproc_per_node"] = _per_node(script) or 1
        if not through_srun and (_per_node(script) or 1) > 1:
            script.remark(line, "the script runs this command once, on the first node; slurmft runs it as "
                          f"{_per_node(script)} workers on each node")  # fmt: skip
    for word in script.settings["command"]:
        if "$" in word or "`" in word:
            script.remark(line, f"{word[:60]!r} is passed on as it is: no shell expands it")


def _srun(script: _Script, line: int, words: Sequence[str]) -> list[str]:
    """The command behind srun's options, which are noted."""
    args: list[str] = []
    container: dict[str, Any] = {}
    rest = 0
    for name, value in _options(line, words, _SRUN_FLAGS):
        if not name:
            rest = int(value)
        elif name == "container-image":
            container |= {"runtime": "pyxis", "image": value}
        elif name == "container-mounts":
            container["mounts"] = value.split(",")
        elif name == "container-workdir":
            container["workdir"] = value
        elif name in _SIZES:
            if name == "ntasks-per-node" and not script.tasks_per_node:
                script.tasks_per_node = value
        elif name not in _OURS_IN_SRUN:
            word = f"--{name}" if len(name) > 1 else f"-{name}"
            args.append(f"{word}={value}" if value else word)
    if container:
        extra = [each for each in args if each.startswith(("--container-", "--no-container-"))]
        args = [each for each in args if each not in extra]
        script.settings["container"] = {**container, **({"options": extra} if extra else {})}
    if args:
        script.slurm["srun_args"] = args
    return list(words[rest:])


def _without_secrets(text: str) -> str:
    """The text, with the values of what is named like a secret, and what looks like one, replaced."""

    def hidden(match: re.Match[str]) -> str:
        option = match["by"] == "=" or match["name"].startswith("--")
        is_secret = option and match["value"][:1] != "$" and _SECRET.search(match["name"])
        return f"{match['name']}{match['by']}{_HIDDEN}" if is_secret else match[0]

    return _SECRET_VALUE.sub(_HIDDEN, _NAMED_SECRET.sub(hidden, text))


def _words_without_secrets(words: Sequence[str]) -> list[str]:
    found = [_without_secrets(word) for word in words]
    for at in range(1, len(words)):
        option = words[at - 1]
        if option.startswith("--") and "=" not in option and _SECRET.search(option) and words[at][:1] not in "-$":
            found[at] = _HIDDEN
    return found


def _finished(script: _Script) -> Converted:
    """The keys in the order of the reference, with a run folder."""
    command = script.settings["command"]
    script.settings["command"] = _words_without_secrets(command)
    if command != script.settings["command"]:
        script.remark(
            script.launched,
            f"a secret in the command is not stored in a configuration ({_HIDDEN} stands "
            "there): have the trainer read it from the environment",
        )
    settings, name = script.settings, str(script.slurm.get("job_name") or script.name)
    name = re.sub(r"[^\w.-]", "-", name).strip("-.")[:100] or "run"
    settings.setdefault("nodes", 1)
    ordered: dict[str, Any] = {key: settings[key] for key in ("command", "nodes", "nproc_per_node") if key in settings}
    rest = {key: value for key, value in settings.items() if key not in ordered}
    slurm = {"slurm": script.slurm} if script.slurm else {}
    return Converted({**ordered, "run_folder": f"runs/{name}", **rest, **slurm}, tuple(script.remarks))
