"""Command lines of other launchers, as a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from slurmft.compat.neighbours import FaultToleranceConfig
from slurmft.config.run import read
from slurmft.errors import ConfigError, UsageError
from slurmft.policy import plain_values as plain

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
