"""The present state of a lab, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmft.lab import daemons
from slurmft.lab.building import is_healthy
from slurmft.lab.members import connected
from slurmft.lab.packages import require_root
from slurmft.lab.state import load


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node: Slurm's name for its state (``unknown`` without an answer), after ``dead`` or ``cut off`` if it is."""

    name: str
    address: str
    state: str


@dataclass(frozen=True, slots=True)
class LabStatus:
    """The state of the lab in a folder."""

    folder: str
    standing: bool
    healthy: bool = False
    user: str = ""
    home: str = ""
    slurm_conf: str = ""
    accounting: bool = False
    controller: str = "none"
    nodes: tuple[NodeStatus, ...] = ()


def status_of(folder: Path) -> LabStatus:
    """Look at the lab in ``folder``; never changes it.

    Raises:
        LabUnavailable: no root.
    """
    require_root()
    built = load(folder)
    if built is None or not built.login.is_alive(folder):
        return LabStatus(folder=str(folder), standing=False)
    answering = daemons.answers(built.controller, built.paths)
    states = daemons.node_states(built.controller, built.paths) if answering else {}
    plugged = connected(built.controller)
    nodes = []
    for name in built.settings.node_names:
        alive = built.member(name).is_alive(folder)
        state = states.get(name, "unknown").lower()
        if not alive:
            state = f"dead ({state})"
        elif name not in plugged:
            state = f"cut off ({state})"
        nodes.append(NodeStatus(name, built.settings.address(name), state))
    return LabStatus(
        folder=str(folder),
        standing=True,
        healthy=is_healthy(built),
        user=built.account.name,
        home=str(built.paths.home),
        slurm_conf=str(built.paths.slurm_conf),
        accounting=built.settings.accounting,
        controller="answers" if answering else "silent",
        nodes=tuple(nodes),
    )
