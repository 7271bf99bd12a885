"""The faults injected into a standing lab, and their repair."""

from __future__ import annotations

import signal
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab import daemons, slowness
from slurmft.lab.building import exposed_paths, refuse_inside
from slurmft.lab.members import Starting, connect, remove_link, set_link
from slurmft.lab.packages import require_root
from slurmft.lab.processes import kill_processes
from slurmft.lab.releases import ensure_release
from slurmft.lab.slurm_conf import CONTROLLER
from slurmft.lab.state import Built, exclusive, load, save


def standing(folder: Path) -> Built:
    """The lab in this folder.

    Raises:
        LabError: there is none.
    """
    require_root()
    built = load(folder)
    if built is None or not built.login.is_alive(folder):
        raise LabError(f"no lab stands in {folder}", hint="slurmft lab up")
    return built


def kill_node(folder: Path, name: str) -> None:
    """End a node as a power cut does: at once, without closing its connections."""
    refuse_inside(folder)
    with exclusive(folder):
        built = standing(folder)
        node = built.node(name)
        if node.is_alive(folder):
            # first the cable: a dying process would still close its connections
            set_link(built.controller, name, "down")
        kill_processes(folder, member=name)


def start_node(folder: Path, name: str) -> None:
    """Start a node again; when it still lives, only its slurmd and cable are seen to."""
    refuse_inside(folder)
    with exclusive(folder):
        built = standing(folder)
        node = built.node(name)
        if not node.is_alive(folder):
            kill_processes(folder, member=name)
            remove_link(built.controller, name)
            root = ensure_release(built.settings.release)
            node = Starting(name, built.paths, exposed_paths(built.settings), root=root).wait()
            connect(built.controller, [node], built.settings)
            save(built.with_holder(node))
        set_link(built.controller, name, "up")
        if not daemons.processes_named(folder, name, "slurmd"):
            daemons.start_slurmds([node], built.paths)


def partition(folder: Path, name: str) -> None:
    """Cut a node off the network; everything on it goes on running."""
    _set_cable(folder, name, "down")


def heal(folder: Path, name: str) -> None:
    """Connect a node again that ``partition`` cut off."""
    _set_cable(folder, name, "up")


def _set_cable(folder: Path, name: str, state: str) -> None:
    with exclusive(folder):
        built = standing(folder)
        if not built.node(name).is_alive(folder):
            raise LabError(f"node {name} is dead", hint=f"slurmft lab start-node {name}")
        set_link(built.controller, name, state)


def slow_node(folder: Path, name: str, *, cpus: float, for_s: float) -> None:
    """Leave a node no more than so many CPUs, for so many seconds; its jobs, later ones too, run on."""
    refuse_inside(folder)
    with exclusive(folder):
        if not standing(folder).node(name).is_alive(folder):
            raise LabError(f"node {name} is dead", hint=f"slurmft lab start-node {name}")
        slowness.limit(folder, name, cpus=cpus, for_s=for_s)


def restore_speed(folder: Path, name: str) -> None:
    """Undo ``slow_node`` before its time is up; nothing where the node is not slow."""
    with exclusive(folder):
        standing(folder).node(name)
        slowness.unlimit(folder, name)


def stop_controller(folder: Path) -> None:
    """Stop slurmctld cleanly, as for maintenance: its state is saved, jobs go on."""
    with exclusive(folder):
        standing(folder)
        daemons.end_program(folder, CONTROLLER, "slurmctld", signal.SIGTERM)


def crash_controller(folder: Path) -> None:
    """Kill slurmctld; state that it had not saved yet (up to some seconds) is lost."""
    with exclusive(folder):
        standing(folder)
        daemons.end_program(folder, CONTROLLER, "slurmctld", signal.SIGKILL)


def start_controller(folder: Path) -> None:
    """Start slurmctld from its saved state and return when it answers; no effect on one that does."""
    with exclusive(folder):
        built = standing(folder)
        if not daemons.processes_named(folder, CONTROLLER, "slurmctld"):
            daemons.start_slurmctld(built.controller, built.paths)
