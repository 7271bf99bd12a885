"""The options of sbatch in a configuration, and commands that are launchers themselves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from slurmft.policy.plain_values import CONTROL, did_you_mean, shown

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
