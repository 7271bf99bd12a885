"""Keys of other packages that a configuration may hold: another spelling of a key of ours, or a switch that is on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPELLINGS: Mapping[str, str] = {"exitActions": "exit_actions", "ignoreNonleadStatus": "ignore_nonlead_status"}
"""Of OSMO's workflows."""

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
