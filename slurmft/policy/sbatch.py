"""Batch scripts: options of sbatch in a configuration, commands that are launchers themselves, and what a user's script
launches.

The script itself is not read, but for its head: whether options are set in it that ``slurmft sbatch`` would add.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slurmft.errors import UsageError
from slurmft.policy.values import CONTROL, did_you_mean, shown

# --- A command that is a launcher itself: torchrun, or nvidia-resiliency-ext's, inside of a run ---

PROGRAMS = frozenset({"torchrun", "ft_launcher"})
MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})


def second_owner(command: Sequence[str]) -> str:
    """Why ``command`` cannot be run; empty where it can: a launcher that decides on the number of nodes by itself.

    With a range of nodes torch's c10d rendezvous waits for nodes and admits them, so two would decide: it waits for
    ones that the supervisor will not start, and takes ranks up again that the supervisor has stopped.
    """
    words = _words(command)
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in PROGRAMS or (word in MODULES and index and words[index - 1] == "-m"):
            asked = _nnodes(words[index + 1 :])
            least, colon, most = asked.partition(":")
            if colon and least != most:
                return (
                    f"{name} --nnodes={asked} would decide on its nodes by itself (c10d rendezvous), and so does "
                    f"the supervisor: write nodes: {most} and elastic: {{min_nodes: {least}}}, with the script as the "
                    "command; launcher: torchrun starts it through torchrun"
                )
    return ""


def _words(command: Sequence[str]) -> Sequence[str]:
    """The command's words; those of the text behind ``sh -c``, as far as they can be told without a shell."""
    if command[0].rpartition("/")[2] in _SHELLS and len(command) > 2:
        try:
            return shlex.split(command[-1])
        except ValueError:
            return command
    return command


def _nnodes(words: Sequence[str]) -> str:
    """The value of the launcher's ``--nnodes``; empty where there is none before the script."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--nnodes":
            return value if equals else "".join(words[index + 1 : index + 2])
        if word.endswith(".py"):
            return ""
    return ""


# --- other spellings ---
# Keys of other packages that a configuration may hold: another spelling of a key of ours, or a switch that is on.

SPELLINGS: Mapping[str, str] = {"exitActions": "exit_actions", "ignoreNonleadStatus": "ignore_nonlead_status"}
"""Of OSMO's workflows."""

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("workflow", "groups", "tasks", "resources", "default-values"),
                    "a key of OSMO's workflows: a run is one task; write its command, nodes and nproc_per_node at the "
                    "top, and its checkpoint: and inputs: as sync:"),
    **dict.fromkeys(("inputs", "outputs"), "a key of OSMO's tasks: write sync: [{path: ..., url: ...}]"),
}  # fmt: skip
"""Keys without a counterpart of the same shape, and what to write."""

_SAVES = "a stop always saves first"
_SHIELDED = "processes of data loaders are always shielded from the signal"

ALWAYS_ON: Mapping[str, Mapping[str, str]] = {
    "fault_tolerance": {"enable_ft_package": "faults are always detected and answered"},
    "preemption": {
        "exit_signal_handler": _SAVES,
        "enable_exit_handler": _SAVES,
        "exit_signal_handler_for_dataloader": _SHIELDED,
        "enable_exit_handler_for_data_loader": _SHIELDED,
    },
}
"""Section -> switches of Megatron-LM, Megatron Bridge and NeMo-Run, and why they cannot be switched off here. They may
also stand at the top, outside of the section."""

GONE: Mapping[str, Mapping[str, str]] = {
    "fault_tolerance": {
        "standby_supervisor": "there is no standby supervisor any more; Slurm requeues a job whose batch host dies, "
        "and under no_kill `slurmft requeue --rescue`, from cron, does"
    }
}
"""Section -> keys of earlier versions, which stand in run folders of theirs, and what is there instead of each."""


def ours(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``raw`` in keys of ours alone, and one line for each key that was left out.

    Raises:
        ValueError: a key is there in both spellings, or the value of a switch is neither true nor false.
    """
    found, lines = dict(raw), list[str]()
    for theirs in found.keys() & INSTEAD.keys():
        raise ValueError(f"{theirs}: is {INSTEAD[theirs]}")
    if isinstance(found.get("checkpoint"), list | tuple):
        raise ValueError("checkpoint: is a list, as in OSMO's tasks: write it as sync: [{path, url, frequency}]")
    if "exit_signal" in found and isinstance(section := found.get("preemption", {}), Mapping):
        found["preemption"] = {"exit_signal": found.pop("exit_signal"), **section}
    if isinstance(section := found.get("preemption"), Mapping) and "exit_signal" in section:
        if "signal" in section:
            raise ValueError("exit_signal and preemption.signal are the same key: give one of them")
        found["preemption"] = {"signal" if key == "exit_signal" else key: each for key, each in section.items()}
    for theirs, key in SPELLINGS.items():
        if theirs in found:
            if key in found:
                raise ValueError(f"{theirs} and {key} are the same key: give one of them")
            found[key] = found.pop(theirs)
    for name, switches in ALWAYS_ON.items():
        lines += _without(found, switches, "")
        if isinstance(section := found.get(name), Mapping):
            found[name] = rest = dict(section)
            lines += _without(rest, switches, f"{name}.")
            gone = {key: why for key, why in GONE.get(name, {}).items() if rest.pop(key, None)}
            lines += [f"{name}.{key} is ignored: {why}" for key, why in gone.items()]
    return found, lines


def _without(values: dict[str, Any], switches: Mapping[str, str], prefix: str) -> list[str]:
    """Take the switches out of ``values``."""
    lines = []
    for name, why in switches.items():
        if name not in values:
            continue
        value = values.pop(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{prefix}{name} is {value!r:.60}; it is true or false")
        told = "is not needed" if value else "cannot be switched off"
        lines.append(f"{prefix}{name} {told} here: {why}")
    return lines


# --- The long options of sbatch, so that a misspelt one is refused before submission ---
# Source: the manual page sbatch(1) of Slurm 22.05 to 26.05; what is not in it is looked for in the site's
# ``sbatch --help``. Options that print and exit (``--help``, ``--usage``, ``--version``, ``--test-only``) or that make
# sbatch itself wait are left out.

SBATCH_OPTIONS = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment consolidate-segments
    constraint container container-id container-type contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export export-file extra
    extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nice no-requeue nodefile nodelist ntasks-per-core
    ntasks-per-gpu ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe partition power prefer
    priority profile propagate qos quiet reboot reservation resources resv-ports segment sockets-per-node spread-job
    spread-segments stepmgr switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    use-min-nodes verbose wait-all-nodes wckey x11
    """.split()  # noqa: SIM905 - a hundred quoted words would be harder to read
)

OWNED_OPTIONS = {
    "signal": "use preemption.signal and preemption.signal_lead_s",
    "nodes": "use nodes",
    "ntasks": "one agent runs on each node; use nproc_per_node for workers",
    "ntasks-per-node": "one agent runs on each node; use nproc_per_node for workers",
    "open-mode": "logs always append, so that a requeue keeps them",
    "no-requeue": "use slurm.requeue, as in requeue: false",
    "array": "a run is one job; submit each run by itself",
    "wrap": "use command",
    "requeue": "use slurm.requeue",
    "no-kill": "use slurm.no_kill",
}
"""Options that slurmft sets itself, with what to use instead."""

NODE_OPTIONS = frozenset(
    """
    constraint contiguous core-spec cores-per-socket cpus-per-gpu cpus-per-task exclusive gpus gpus-per-node gres
    gres-flags mem mem-per-cpu mem-per-gpu mincpus nodelist partition prefer reservation sockets-per-node switches
    threads-per-core tmp
    """.split()  # noqa: SIM905 - as above
)
"""Options that say on which nodes, and on how much of them: those that a component of a heterogeneous job may have."""

SHORT_OPTIONS = {
    "A": "account", "p": "partition", "q": "qos", "t": "time", "c": "cpus-per-task", "C": "constraint", "x": "exclude",
    "w": "nodelist", "J": "job-name", "G": "gpus", "d": "dependency", "b": "begin", "L": "licenses", "o": "output",
    "e": "error", "H": "hold", "D": "chdir", "N": "nodes", "n": "ntasks", "a": "array",
    "k": "no-kill", "M": "clusters", "F": "nodefile", "s": "oversubscribe", "m": "distribution", "S": "core-spec",
    "B": "extra-node-info", "I": "immediate", "K": "kill-on-bad-exit", "O": "overcommit", "Q": "quiet", "v": "verbose",
}  # fmt: skip


# --- Valid values of sbatch's options, as far as they do not depend on a site ---
# A wrong value costs a second on the login node, and does not wait for sbatch: `--dry-run` refuses it as well.

MAX_NUMBER = 2**32 - 3
"""Slurm counts in 32 bits; its highest values mean "not given" and "without limit"."""

MAX_NAME = 1024

_PART = r"[0-9]{1,9}"
_SIXTIETHS = r"[0-5]?[0-9]"  # Slurm takes 1:99:99 for 2:40:39, but it is a typo
_LIMIT = rf"{_PART}(:{_SIXTIETHS}){{0,2}}|{_PART}-{_PART}(:{_SIXTIETHS}){{0,2}}|-1|infinite|unlimited|partition_limit"
_CLOCK = r"([01]?[0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?[ ]?([ap]m)?"
_MONTH, _DAY_OF_MONTH = "(0?[1-9]|1[0-2])", "(0?[1-9]|[12][0-9]|3[01])"
_SHORT_DATE = r"(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])([0-9]{2})?"
_DATE = rf"[0-9]{{4}}-{_MONTH}-{_DAY_OF_MONTH}|{_SHORT_DATE}|{_MONTH}[./]{_DAY_OF_MONTH}([./][0-9]{{2,4}})?"
_DAY = rf"today|tomorrow|{_DATE}"
_HOUR = rf"midnight|noon|elevenses|fika|teatime|{_CLOCK}"
_UNIT = r"seconds?|minutes?|hours?|days?|weeks?"
_MOMENT = rf"now([+-]{_PART}[ ]?({_UNIT})?)?|({_DAY})([T \-]({_HOUR}))?|({_HOUR})([ ]({_DAY}))?|uptime[+-]?{_PART}"
_NAME = r"(?![-.]+$)(?!-)[^\s/\\'\"`$;&|<>()\[\]{}*?!,]+"
_NAMES = rf"{_NAME}(,{_NAME})*"
_SIZE = r"[0-9]{1,15}[kmgt]?b?"
_COUNTS = rf"([a-z][\w.+-]*:)?{_PART}(,([a-z][\w.+-]*:)?{_PART})*"

_FORMS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("time", "time-min"), (_LIMIT, 'minutes, "H:MM:SS" or "D-HH:MM:SS"')),
    **dict.fromkeys(("begin", "deadline"), (_MOMENT, "a time, such as 18:00, 2030-01-31T18:00 or now+1hour")),
    **dict.fromkeys(("partition",), (_NAMES, "names, with commas between them")),
    **dict.fromkeys(("account", "qos", "reservation"), (_NAMES, "a name")),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "tmp"), (_SIZE, "a size, such as 500M or 64G")),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
                    (_COUNTS, "a number, or type:number")),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus", "ntasks-per-core", "ntasks-per-gpu",
                     "ntasks-per-socket", "threads-per-core", "cores-per-socket", "sockets-per-node"),
                    (_PART, "a number")),
}  # fmt: skip
_NAMED = frozenset({"partition", "account", "qos", "reservation", "job-name"})
_MAY_BE_NEGATIVE = frozenset({"nice", "time", "time-min"})


def unusable_value(option: str, value: Any) -> str:
    """Why ``value`` cannot be that of sbatch's long option ``option``; empty when it may be."""
    if isinstance(value, bool) or value is None:
        return ""
    text = str(value) if not isinstance(value, int) or abs(value) <= 10**18 else ""
    if isinstance(value, int) and (abs(value) > MAX_NUMBER or (value < 0 and option not in _MAY_BE_NEGATIVE)):
        return f"{text or 'a number of more than 18 digits'} is not a number that Slurm accepts"
    if not text.strip() and option in _FORMS.keys() | _NAMED:
        return "it is empty"
    if CONTROL.search(text):
        return f"{text[:80]!r} holds a line break or control character"
    if option in _NAMED and len(text) > MAX_NAME:
        return f"{text[:40]!r}... is a name of {len(text)} characters; at most {MAX_NAME}"
    if option in ("partition", "account", "qos", "reservation"):
        fits = re.fullmatch(_NAMES, text) is not None
    else:  # compiled only when such an option is given
        flags = re.IGNORECASE | re.ASCII
        fits = option not in _FORMS or re.fullmatch(_FORMS[option][0], text.strip(), flags) is not None
    return "" if fits else f"{text[:80]!r} is not {_FORMS[option][1]}"


# --- The options of sbatch in a configuration: which there are, and what their values may be ---

FLAGS = frozenset(
    """
    contiguous exclusive get-user-env hold ignore-pbs nice overcommit oversubscribe propagate quiet reboot spread-job
    spread-segments consolidate-segments stepmgr use-min-nodes verbose x11
    """.split()  # noqa: SIM905 - as in sbatch_options
)
"""Options that may stand without a value; any other one would take the next line of the script for it."""


def option_value(key: Any, value: Any) -> Any:
    """The value of one option; fractions become text again.

    Raises:
        ValueError: it is none.
    """
    if key == "srun_args":
        return value
    if not isinstance(value, (str, int, float, type(None))):
        raise ValueError(f"{shown(key)} must be one text, number, true or false")
    option = shown(key).replace("_", "-")
    if value is True and option in SBATCH_OPTIONS - FLAGS and option not in OWNED_OPTIONS:
        raise ValueError(f"{shown(key)} needs a value, not true")
    if isinstance(value, str) and CONTROL.search(value):
        raise ValueError(f"{shown(key)}: {value!r} holds a line break or control character")
    return str(value) if type(value) is float else value


def unknown_options(
    section: Any, ours: Sequence[str], known_here: Callable[[frozenset[str]], Collection[str]]
) -> list[str]:
    """The problems with the keys of the section.

    Args:
        ours: keys that have a meaning beside sbatch's.
        known_here: asked which of these options, of no sbatch that we know, this site's has.
    """
    if not isinstance(section, Mapping):
        return []
    problems = []
    known = [name.replace("-", "_") for name in SBATCH_OPTIONS] + list(ours)
    strange = frozenset(shown(key).replace("_", "-") for key in section if key not in ours)
    strange -= SBATCH_OPTIONS | OWNED_OPTIONS.keys()
    strange -= frozenset(known_here(strange) if strange else ())
    for key in section:
        option = shown(key).replace("_", "-")
        if key in ours:
            continue
        if option in OWNED_OPTIONS:
            problems.append(f"slurm.{shown(key)} is set by slurmft: {OWNED_OPTIONS[option]}")
        elif option in strange:
            problems.append(f"slurm.{shown(key)} is not an option of sbatch{did_you_mean(shown(key), known)}")
    return [*problems, *_unusable_values(section)]


def _unusable_values(section: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in section.items():
        is_one = key != "srun_args" and isinstance(value, str | int | float)
        if is_one and (problem := unusable_value(shown(key).replace("_", "-"), value)):
            yield f"slurm.{shown(key)}: {problem}"


# --- sbatch's command line, and the script ---

OWN_SIGNAL = "--signal=USR2@120"
ADDED: Mapping[str, tuple[str, ...]] = {
    "--requeue": ("requeue", "no-requeue"),
    "--open-mode=append": ("open-mode",),
    OWN_SIGNAL: ("signal",),
}
"""What is added to sbatch's command line, and the options of the user's that leave it out. A program without a handler
ignores USR2 as a worker: a TERM would end it two minutes early."""

_VARIABLES = {"requeue": "SBATCH_REQUEUE", "no-requeue": "SBATCH_NO_REQUEUE", "open-mode": "SBATCH_OPEN_MODE",
              "signal": "SBATCH_SIGNAL"}  # fmt: skip
SBATCH_FLAGS = frozenset(
    """
    contiguous exclusive get-user-env help hold H ignore-pbs k nice no-kill no-requeue O oom-kill-step overcommit
    oversubscribe s parsable propagate Q quiet reboot requeue resv-ports spread-job stepmgr test-only usage
    use-min-nodes v verbose V version W wait x11 consolidate-segments spread-segments
    """.split()  # noqa: SIM905 - a hundred quoted words would be harder to read
)
"""Options of sbatch that stand without a value, or whose value needs a ``=``."""


def sbatch_flags(of_site: Collection[str]) -> frozenset[str]:
    """Those of a site as well, by its ``sbatch --help``, which shows ``--export[=names]`` where a value is needed."""
    return SBATCH_FLAGS | (frozenset(of_site) - SBATCH_OPTIONS - OWNED_OPTIONS.keys())


_SHELLS_OF_SCRIPTS = frozenset({"sh", "bash", "dash"})
_SIGNAL = re.compile(r"(?:SIG)?(TERM|INT|USR1|USR2|15|2|10|12)(?:@(\d+))?", re.IGNORECASE)
_SIGNALS = {"15": "TERM", "2": "INT", "10": "USR1", "12": "USR2"}
_LEAD_S = 60
"""Of ``--signal`` without a time, by its manual page."""


@dataclass(frozen=True, slots=True)
class Line:
    """A command line of sbatch or srun."""

    options: tuple[tuple[str, str], ...]
    """Names without dashes, as they were written; a flag's value is empty."""

    words: tuple[str, ...]
    """The options as they were written."""

    command: tuple[str, ...]
    """The script or program, with its arguments; empty where there is none."""

    def value(self, *names: str) -> str | None:
        """Of the last option with one of these names."""
        return next((value for name, value in reversed(self.options) if name in names), None)


def split_line(words: Sequence[str], flags: Collection[str]) -> Line:
    """Options and command as getopt finds them: the first word that is neither an option nor its value begins the
    command."""
    options: list[tuple[str, str]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word, at = words[at], at + 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes_next = not equals and name not in flags
        else:
            name, value = word[1:2], word[2:]
            while name in flags and value and name not in ("k", "K", "W", "I"):  # several flags in one word
                options.append((name, ""))
                name, value = value[:1], value[1:]
            value = value.removeprefix("=")
            takes_next = not value and name not in flags
        if takes_next and at < len(words):
            value, at = words[at], at + 1
        options.append((name, value))
    end = at + (at < len(words) and words[at] == "--")
    return Line(tuple(options), tuple(words[:at]), tuple(words[end:]))


def _is_command(line: str) -> bool:
    """Whether sbatch looks for options no further than to this line."""
    return line.lstrip()[:1] not in ("", "#")


def head_of(text: str) -> list[str]:
    """The words of the ``#SBATCH`` lines that sbatch reads: those before the first command."""
    words: list[str] = []
    for line in text.splitlines():
        if _is_command(line):
            break
        if line.startswith("#SBATCH"):
            try:
                words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                continue  # sbatch says what is wrong with it
    return words


_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*[\"'\\]?(\w+)")


def late_options(text: str) -> list[int]:
    """The numbers of ``#SBATCH`` lines that sbatch does not read: those behind the first command, but for the scripts
    that this one writes itself."""
    found, is_head, until = [], True, ""
    for number, line in enumerate(text.split("\n"), start=1):
        is_head = is_head and not _is_command(line)
        if until:
            until = "" if line.strip() == until else until
        elif line.startswith("#SBATCH"):
            found += [] if is_head else [number]
        elif _is_command(line) and (match := _HERE_DOCUMENT.search(line)):
            until = match[1]
    return found


def added_options(given: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[str]:
    """What slurmft adds to sbatch's command line; ``given`` are the words of the command line and of the head."""
    names = {word[2:].partition("=")[0] for words in given for word in words if len(word) > 4 and word[:2] == "--"}
    names |= {name for name, variable in _VARIABLES.items() if variable in environment}
    return [
        option for option, others in ADDED.items()
        if not any(other.startswith(name) for other in others for name in names)  # getopt takes beginnings
    ]  # fmt: skip


def signal_of(given: Sequence[Sequence[str]], environment: Mapping[str, str]) -> tuple[str, int]:
    """The signal that Slurm will send, and seconds before the limit; as sbatch ranks where it is said.

    Args:
        given: the words of the script's head, and those of the command line.
    """
    head, command_line = (
        [
            value
            for name, value in split_line(words, SBATCH_FLAGS).options
            if len(name) > 1 and "signal".startswith(name)
        ]
        for words in given
    )
    variable = [environment["SBATCH_SIGNAL"]] if "SBATCH_SIGNAL" in environment else []
    texts = ["USR2@120", *head, *variable, *command_line]
    match = _SIGNAL.fullmatch(texts[-1].rpartition(":")[2].strip())
    if match is None:
        return "SIGUSR2", _LEAD_S  # another one than those that a run answers to
    name = match[1].upper()
    return f"SIG{_SIGNALS.get(name, name)}", max(1, int(match[2] or _LEAD_S))


def refuse_several(command: Sequence[str], text: str = "") -> None:
    """Return for a job of one component.

    Args:
        command: what follows sbatch's options.
        text: the script's, once it has been read.

    Raises:
        UsageError: it has several (a heterogeneous job).
    """
    if command[:1] == (":",) or re.search(r"^#SBATCH[ \t]+(hetjob|packjob)\b", text, re.MULTILINE):
        raise UsageError("a job of several components (hetjob) is not one run, and is not supervised",
                         hint="submit it with sbatch, or each component as a job of its own")  # fmt: skip


def plain(text: str) -> str:
    """The script without a byte order mark and carriage returns, as bash needs it."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def with_guard(text: str, guard: str) -> str:
    """The script with ``guard`` in front of its first command, on the same line: its lines keep their numbers.

    Raises:
        UsageError: no shell that could read it runs this script.
    """
    text = plain(text)
    lines = text.split("\n")
    if not lines[0].startswith("#!"):
        raise UsageError("this is no batch script: its first line does not begin with #!",
                         hint="#!/bin/bash, or --wrap for a single command")  # fmt: skip
    words = lines[0][2:].split()
    names = [word.rpartition("/")[2] for word in words if not word.startswith("-")]
    program = next((name for name in names if name != "env"), "")
    if program not in _SHELLS_OF_SCRIPTS:
        raise UsageError(f"the script is run by {program or 'nothing'}: what it launches cannot be met",
                         hint="slurmft sbatch takes scripts of sh, bash and dash; others: sbatch")  # fmt: skip
    for number, line in enumerate(lines):
        if _is_command(line):
            lines[number] = guard + line
            return "\n".join(lines)
    return text.rstrip("\n") + "\n" + guard + "\n"


_GUARD = re.compile(r'slurmft_is_batch_script=yes; .*?/functions\.sh"; fi; ')


def without_guard(text: str) -> str:
    """The script as its user has written it, for one that ``with_guard`` may have changed."""
    return _GUARD.sub("", text, count=1)


# --- which launch trains ---

SUBMITS = "sbatch"
LAUNCHERS = frozenset({"torchrun", "ft_launcher", "accelerate", "deepspeed"})
_BEFORE = r"(?:^|[\s/;&|('\"])"
_LAUNCHES = re.compile(
    rf"{_BEFORE}(?:torchrun|ft_launcher|deepspeed|accelerate\s+launch)(?=\s+\S)|"
    r"(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher\.\w+)\b"
)
_PYTHON = re.compile(
    rf"{_BEFORE}(?:[\w.-]{{0,40}}python[\w.-]{{0,40}}|uv\s+run)((?:\s+-[uBEIOPqsS]+|\s+-[WX]\s*\S+)*)\s+"
    r"(?:-[uBEIOPqsS]*m\s*(?!(?:pip|venv|ensurepip|json|site|http|compileall|torch\.utils\.collect_env)\b)\w|[^-\s][^;&|\n]{0,400}?\.py\b|[\"']?\$)"
)
_PROGRAM = re.compile(r"(?:^|[;&|]\s*)[^\s;&|]+\.py(?:[\s;&|]|$)")


@dataclass(frozen=True, slots=True)
class Rule:
    """Whether a launch trains, and why."""

    trains: bool
    why: str


def _text(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The words in one, with what a shell among them will find in its environment: ``bash -c '$LAUNCHER x.py'``."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda name: environment.get(name[1] or name[2], name[0]), " ".join(words))


def judged(name: str, words: Sequence[str], *, said: str, environment: Mapping[str, str]) -> Rule:
    """Whether the launch ``name`` with these words, its own options left out, trains.

    The rule: launchers of training always do. srun does where its command runs a Python program, or one of them, also
    in a text for a shell. What the script says goes first.

    Args:
        said: ``train`` or ``off``, as the script says of this launch; else empty.
        environment: the launch's.
    """
    if said:
        return Rule(said == "train", f"the script says {said} of it")
    text = _text(words, environment)
    if name in ("accelerate", "python", "python3", "uv"):
        if _LAUNCHES.search(f"{name} {text}"):
            return Rule(True, "it starts ranks")
        return Rule(False, f"{name} without a launcher does not count as training")
    if name in LAUNCHERS:
        return Rule(True, "it starts ranks")
    if name == "mpirun":
        return Rule(False, "ranks of mpirun get their places from MPI, and not from Slurm's variables")
    if _LAUNCHES.search(text) or _PYTHON.search(text) or _PROGRAM.search(text):
        return Rule(True, "its command runs a Python program")
    return Rule(False, "no srun of it runs a Python program, and no launcher")


def starts_ranks(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the command is a launcher of ranks, or a text for a shell with one in it."""
    return _LAUNCHES.search(_text(command, environment)) is not None


def scripts_of(line: Line) -> list[str]:
    """The words of srun's command that may name a shell script, which is run: the first one, and those behind a shell.

    The first one may be srun's list of programs (``--multi-prog``) as well.
    """
    words = [word for word in line.command if not word.startswith("-")]
    return words[:1] + [word for shell, word in pairwise(words) if shell.rpartition("/")[2] in _SHELLS]


def commands_in(text: str) -> str:
    """The commands of a shell script in one line; none where it is something else."""
    if "\0" in text or re.match(r"#!(?!.*\b(?:ba|da|z)?sh\b)", text):
        return ""
    lines = text.replace("\\\n", " ").splitlines()
    return "; ".join(line.strip() for line in lines if not line.lstrip().startswith("#"))


def said_in(lines: Sequence[str], line: int) -> str:
    """``train`` or ``off``, where ``#SLURMFT`` says so at the end of the command in ``line``, or right above it."""
    at = line - 1
    while 0 <= at < len(lines):
        if match := re.search(r"(?:^|\s)#SLURMFT\s+(train|off)\s*$", lines[at]):
            return match[1]
        at -= 1
        if at < 0 or not (lines[at].rstrip().endswith("\\") or lines[at].lstrip().startswith("#SLURMFT")):
            return ""
    return ""


# --- srun's options ---

SRUN_FLAGS = frozenset(
    """
    bcast compress contiguous disable-status E exact exclusive H help hold I immediate interactive k K kill-on-bad-exit
    l label multi-prog nice no-allocate Z no-kill no-shell O oom-kill-step overcommit overlap oversubscribe s
    preserve-env propagate pty Q quiet quit-on-interrupt reboot resv-ports send-libs spread-job u unbuffered usage
    use-min-nodes v verbose V version X x11 whole wait-for-children
    container-mount-home container-writable container-readonly container-remap-root container-entrypoint
    no-container-mount-home no-container-remap-root no-container-entrypoint
    """.split()  # noqa: SIM905 - as above
)
"""Those of srun, and of pyxis."""

_OF_OUTPUT = frozenset({"output", "o", "error", "e", "label", "l", "unbuffered", "u", "quiet", "Q", "verbose", "v",
                        "kill-on-bad-exit", "K", "wait", "W", "job-name", "J"})  # fmt: skip
"""Options that say nothing of where and with what tasks run."""

_OF_PLACE = frozenset(
    """
    N nodes n ntasks ntasks-per-node tasks-per-node c cpus-per-task w nodelist x exclude export D chdir m distribution
    mem mem-per-cpu cpu-bind cpu_bind mem-bind mem_bind t time jobid overlap threads-per-core hint r relative k no-kill
    C constraint p partition A account q qos gres gpus-per-node mpi gpus-per-task ntasks-per-gpu gpu-bind G gpus
    cpus-per-gpu mem-per-gpu ntasks-per-socket network comment reservation
    """.split()  # noqa: SIM905 - as above
)
_FOR_AGENTS = frozenset({"gres", "gpus-per-node", "mem", "hint", "threads-per-core", "network"})
"""Options of place that hold for a whole node, and so for its agent; ``--gpus`` counts those of all nodes."""


def why_not_srun(line: Line) -> str:
    """Why a step with these options cannot be one of agents; empty where it can."""
    if not line.command:
        return "this srun has no command"
    strange = [name for name, value in line.options if name not in _OF_OUTPUT | _OF_PLACE
               and (name not in ("i", "input") or value not in ("none", "/dev/null"))]  # fmt: skip
    if strange:
        dashes = "-" if len(strange[0]) == 1 else "--"
        return f"srun {dashes}{strange[0]} cannot be carried over to a supervised run"
    if (line.value("mpi") or "none") != "none":
        return "ranks of srun --mpi get their places from MPI, and not from Slurm's variables"
    if line.command[0].rpartition("/")[2].startswith("python") and line.command[1:2] == ("-",):
        return "its program comes from standard input"
    return ""


def options_for_tasks(line: Line) -> list[str]:
    """The options of place, as those of another step on the same places."""
    found = []
    for name, value in line.options:
        if name in _OF_PLACE or name in ("u", "unbuffered"):
            found += [f"-{name}{value}" if len(name) == 1 else f"--{name}={value}" if value else f"--{name}"]
    return found


def options_for_agents(line: Line) -> list[str]:
    """Those that the step of agents needs as well."""
    named = ((SHORT_OPTIONS.get(name, name), value) for name, value in line.options)
    return [f"--{name}={value}" for name, value in named if name in _FOR_AGENTS]


def output_name(pattern: str, environment: Mapping[str, str], *, user: str) -> str | None:
    """The file that srun's ``--output`` names for one task, whose environment this is; None where that is unknown."""
    job = environment.get("SLURM_JOB_ID", "")
    known = {
        "%": "%", "A": environment.get("SLURM_ARRAY_JOB_ID", job), "a": environment.get("SLURM_ARRAY_TASK_ID", "0"),
        "j": job, "J": f"{job}.{environment.get('SLURM_STEP_ID', '0')}", "s": environment.get("SLURM_STEP_ID", "0"),
        "N": environment.get("SLURMD_NODENAME", ""), "n": environment.get("SLURM_NODEID", "0"),
        "t": environment.get("SLURM_PROCID", "0"), "u": user, "x": environment.get("SLURM_JOB_NAME", ""),
    }  # fmt: skip
    if pattern.isdecimal() or pattern in ("all", "none"):
        return None
    parts = re.split(r"%(\d*)(.)", pattern)
    text = parts[0]
    for width, letter, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if letter not in known:
            return None
        text += known[letter].zfill(int(width or 0)) + rest
    return text


# --- where Slurm has put the tasks ---

AGENTS_OWN = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT",
              "SLURM_STEP_LAUNCHER_PORT", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_PRIO_PROCESS")  # fmt: skip
"""Variables of a task that belong to its step, and so are those of the agent's."""

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
         "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS")  # fmt: skip
"""Variables that a worker gets as a rank: a task of srun has none of them, unless the user has set them."""

ATTACHED = ("SLURMFT_PAGE", "SLURMFT_TIMING_PAGE", "SLURMFT_VERDICT_FILE", "SLURMFT_EVIDENCE_FILE")
"""Variables for one rank: a worker that is a launcher itself has several, none of which may take them."""

_OF_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
VISIBLE = "CUDA_VISIBLE_DEVICES"

OURS = frozenset({"SLURMFT_NODES", "SLURMFT_TASKS", "SLURMFT_ZYGOTE"})
_OF_A_PROCESS = frozenset(
    {*AGENTS_OWN, *OURS, VISIBLE, "SLURM_CONF", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "TMPDIR"}
)
_ELSEWHERE = ("PMI_", "PMI2_", "PMIX_", "SLURM_PMI", "SLURM_MPI_TYPE")
"""Of a step's own process manager, which workers do not have."""

Changes = dict[str, str | None]
"""Variables, and what a worker has in their place; None where it has none."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tasks of a step are."""

    nodelist: str
    nodes: int
    per_node: int
    cpus_per_node: str
    """``--cpus-per-task`` of one agent for all tasks of its node; empty for all CPUs of the job."""

    hosts: Mapping[str, tuple[Mapping[str, str], ...]]
    """Each node's tasks in their order, as the environments that Slurm has given them."""


def places_of(tasks: Sequence[Mapping[str, str]]) -> Places | str:
    """The places of these tasks, by their environments; or why they cannot be those of workers.

    Raises:
        KeyError: one of them is not that of a task.
    """
    ordered = sorted(tasks, key=lambda task: int(task["SLURM_PROCID"]))
    hosts: dict[str, list[Mapping[str, str]]] = {}
    for task in ordered:
        hosts.setdefault(task["SLURMD_NODENAME"], []).append(task)
    per_node = len(ordered) // len(hosts)
    for number, task in enumerate(ordered):
        place = (int(task["SLURM_NODEID"]), int(task["SLURM_LOCALID"]))
        if len(ordered) % len(hosts) or place != divmod(number, per_node):
            return f"its {len(ordered)} tasks are not spread over {len(hosts)} nodes in equal blocks"
    first = ordered[0]
    cpus = first.get("SLURM_CPUS_PER_TASK", "1" if "SLURM_MEM_PER_CPU" in first else "")
    total = str(int(cpus) * per_node) if cpus.isdecimal() else ""
    return Places(first["SLURM_STEP_NODELIST"], len(hosts), per_node, total,
                  {host: tuple(each) for host, each in hosts.items()})  # fmt: skip


def changes_for(
    task: Mapping[str, str], base: Mapping[str, str], *, ranks_are_tasks: bool, attached: bool = True
) -> Changes:
    """What makes the environment of a worker that of the task it stands for.

    Args:
        task: the task's environment.
        base: the environment that its agent is started with.
        ranks_are_tasks: each worker is a task of its own, which Slurm tells nothing of ranks.
        attached: the worker itself is a rank; else it starts ranks.
    """
    names = {name for name in {*task, *base} if not name.startswith(_ELSEWHERE)} - _OF_A_PROCESS
    changes: Changes = {
        name: task.get(name) for name in names if name.startswith("SLURM_") or task.get(name) != base.get(name)
    }
    if ranks_are_tasks or not attached:
        changes |= {name: task.get(name) for name in RANKS}
    return changes | (dict.fromkeys(ATTACHED) if not attached else {})


def gpus_of(task: Mapping[str, str], beside: Sequence[Mapping[str, str]] = ()) -> int:
    """How many GPUs Slurm has given to this task alone; 0 where it sees those of the whole node.

    Args:
        beside: all tasks of its node; where they see different devices, those are their own. What srun is told on its
            command line is not in a task's environment.
    """
    own = task.get(VISIBLE, "")
    is_own = any(name in task for name in _OF_GPUS) or len({each.get(VISIBLE) for each in beside}) > 1
    return len(own.split(",")) if own and is_own else 0


def worker_of_task(
    environment: Mapping[str, str], changes: Mapping[str, str | None], *, gpus: int, local: int
) -> dict[str, str]:
    """The environment of a worker that stands for the task number ``local`` of its node.

    A task with GPUs of its own may count them from 0 in its cgroup, but a worker sees those of the whole node.
    """
    kept = {name: value for name, value in environment.items() if name not in changes and not _is_of_agents(name)}
    kept |= {name: value for name, value in changes.items() if value is not None}
    if "SLURM_STEP_NODELIST" in kept:
        kept |= {name: environment[name] for name in AGENTS_OWN if name in environment}
    mine = environment.get(VISIBLE, "").split(",")[local * gpus : (local + 1) * gpus]
    return {**kept, VISIBLE: ",".join(mine)} if mine and len(mine) == gpus else kept


def _is_of_agents(name: str) -> bool:
    return (name.startswith("SLURM_") and name != "SLURM_CONF") or name in OURS


# --- launches of earlier starts ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A launch of this script that trained, or trains."""

    number: int
    words: tuple[str, ...]
    code: int | None
    """With which it has ended for good; None where it has not."""

    start: str
    """The start of the job that it was in last."""


def same_launch(words: Sequence[str], known: Sequence[Known], start: str) -> Known | None:
    """The launch of an earlier start that this one is again; None for a new one.

    A script may give other arguments after a requeue (``--resume``): an unfinished launch with the same program is the
    same one then.
    """
    left = [each for each in known if each.start != start]
    exact = [each for each in left if each.words == tuple(words)]
    program = [each for each in left if each.code is None and _programs(each.words) == _programs(words)]
    return next(iter([*exact, *program]), None)


def _programs(words: Sequence[str]) -> list[str]:
    return [word for word in words if re.search(r"\.(py|sh)$", word)] or list(words[:2])
