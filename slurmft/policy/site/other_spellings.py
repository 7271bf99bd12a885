"""Keys of other packages that a configuration may hold: another spelling of a key of ours, or a switch that is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def ours(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``raw`` in keys of ours alone, and one line for each switch that was left out.

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
