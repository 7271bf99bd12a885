"""``slurmft lab``: a real Slurm cluster on this machine, its commands and its faults."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from slurmft.cli.arguments import PATH, Amount
from slurmft.cli.main import Verbs, say_block, say_json
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab, LabStatus, status_of
from slurmft.lab.settings import LabPaths, LabSettings, default_folder, release_of

_DEFAULTS = LabSettings()


@click.group(cls=Verbs)
@click.option(
    "--folder",
    type=PATH,
    default=None,
    help="Where the lab lives [default: $SLURMFT_LAB_FOLDER or /var/lib/slurmft-lab]. Labs in different folders "
    "do not meet.",
)
@click.pass_context
def lab(context: click.Context, folder: Path | None) -> None:
    """A real Slurm cluster on this machine, for tests and for trying things out (needs root)."""
    context.obj = folder or default_folder()


def _number(option: str, setting: str, least: int, most: int, about: str) -> Callable[..., Any]:
    """An option for a number among the lab's settings, with the default that it has there."""
    return click.option(option, setting, type=click.IntRange(least, most), default=getattr(_DEFAULTS, setting),
                        show_default=True, help=about)  # fmt: skip


@lab.command()
@_number("--nodes", "nodes", 1, 512, "Compute nodes n1, n2, ...")
@_number("--cpus", "cpus", 1, 1024, "CPUs each node claims to have.")
@click.option("--accounting", is_flag=True, help="Also run MariaDB and slurmdbd, for sacct.")
@_number("--kill-wait", "kill_wait_s", 0, 65_533, "KillWait, seconds.")
@_number("--slurmd-timeout", "slurmd_timeout_s", 0, 65_533, "SlurmdTimeout, seconds.")
@_number("--grace", "grace_s", 0, 65_533, "GraceTime of low and cancel.")
@click.option("--release", default="", metavar="VERSION", help="Another release of Slurm than this machine's: 22.05, "
              "24.11 or 26.05, out of the Debian that has it.")  # fmt: skip
@click.option(
    "--name", "names", multiple=True, help="A node's name, once for each node, in the place of n1, n2, ... and --nodes."
)
@click.option("--conf", "lines", multiple=True, metavar="LINE", help="One more line of slurm.conf.")
@click.option("--conf-file", "files", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
              help="A file to be copied beside slurm.conf, such as job_submit.lua.")  # fmt: skip
@click.option("--expose", type=PATH, multiple=True, help="More paths the lab's user must be able to read.")
@click.pass_obj
def up(
    folder: Path, /, *, nodes: int, release: str, names: tuple[str, ...], files: tuple[Path, ...],
    expose: tuple[Path, ...], **others: Any,
) -> None:  # fmt: skip
    """Build the cluster and wait until it is ready; quick when it already stands with the same settings."""
    started = time.monotonic()
    settings = LabSettings(
        folder=folder, nodes=len(names) or nodes, names=names, release=release_of(release),
        files=tuple(path.absolute() for path in files), expose=tuple(path.absolute() for path in expose), **others,
    )  # fmt: skip
    built = Lab.up(settings)
    say_block(
        f"lab ready in {time.monotonic() - started:.1f} s: {', '.join(built.nodes)}, partitions low (default), "
        f"nograce, cancel, high\nuser {built.user}, home {built.home}\ntry: slurmft lab exec -- sinfo"
    )


@lab.command()
@click.option("--purge", is_flag=True, help="Also delete the lab's folder with home and logs.")
@click.pass_obj
def down(folder: Path, purge: bool) -> None:
    """End the cluster; no process, mount, namespace or link is left."""
    (cluster.purge if purge else cluster.down)(folder)


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.pass_obj
def status(folder: Path, as_json: bool) -> None:
    """Show the lab: nodes and their states. Exit code 0 when all is well, 1 otherwise."""
    found = status_of(folder)
    if as_json:
        say_json(dataclasses.asdict(found), indent=2)
    else:
        say_block(_as_text(found))
    sys.exit(0 if found.healthy else 1)


def _as_text(found: LabStatus) -> str:
    if not found.standing:
        return f"no lab stands in {found.folder}"
    lines = [f"lab in {found.folder}, user {found.user}", f"controller  {found.controller}"]
    lines += [f"{node.name:<11} {node.state:<12} {node.address}" for node in found.nodes]
    return "\n".join([*lines, "healthy" if found.healthy else "not healthy"])


@lab.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--root", is_flag=True, help="Run as root, which is also Slurm's administrator.")
@click.option("--node", default=None, help="Run inside this node (n1, ctl) instead of on the login member.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def execute(folder: Path, root: bool, node: str | None, command: tuple[str, ...]) -> None:
    """Run a command in the lab as its ordinary user; its exit code is passed on.

    The working folder is kept where the user may enter it; the environment starts clean, like a login.
    """
    _become(Lab.standing(folder), list(command), root=root, node=node)


@lab.command()
@click.option("--root", is_flag=True, help="A shell of root, which is also Slurm's administrator.")
@click.option("--node", default=None, help="A shell inside this node (n1, ctl) instead of on the login member.")
@click.pass_obj
def shell(folder: Path, root: bool, node: str | None) -> None:
    """Open a shell in the lab, on the login member by default."""
    _become(Lab.standing(folder), ["bash"], root=root, node=node)


def _become(standing: Lab, command: list[str], *, root: bool, node: str | None) -> None:
    argv, environment = standing.command(command, node=node, admin=root, cwd=_working_folder())
    sys.stdout.flush()
    os.execvpe(argv[0], argv, environment)  # noqa: S606 - becoming the command passes signals and exit code untouched


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _changeable(folder: Path) -> Lab:
    """The lab, as soon as no other command builds or changes it."""
    if LabPaths(folder).lock.exists():
        with cluster.exclusive(folder):
            pass
    return Lab.standing(folder)


def _of_node(name: str, act: Callable[[Lab, str], None], about: str) -> None:
    """Add a verb that does something to one node."""

    @lab.command(name, help=about)
    @click.argument("node")
    @click.pass_obj
    def command(folder: Path, /, node: str) -> None:
        act(_changeable(folder), node)


_of_node("kill-node", Lab.kill_node, "End a node at once, with everything on it, as a power cut does.")
_of_node("start-node", Lab.start_node, "Start a dead node again.")
_of_node("partition", Lab.partition, "Cut a node off the network; its processes go on.")
_of_node("heal", Lab.heal, "Connect a node again that `partition` cut off.")


@lab.command("slow-node")
@click.argument("node")
@click.option(
    "--cpus", type=Amount(0.01, 1024), default=0.2, show_default=True, help="CPUs that everything on it shares."
)
@click.option(
    "--seconds", type=Amount(0, 86_400), default=120.0, show_default=True, help="When it becomes fast again by itself."
)
@click.option("--undo", is_flag=True, help="Make it fast again now.")
@click.pass_obj
def slow_node(folder: Path, node: str, *, cpus: float, seconds: float, undo: bool) -> None:
    """Limit the CPU time of a node, as a failing fan or a noisy neighbour does."""
    standing = _changeable(folder)
    if undo:
        standing.restore_speed(node)
    else:
        standing.slow_node(node, cpus=cpus, for_s=seconds)


@lab.command("stop-controller")
@click.option("--crash", is_flag=True, help="SIGKILL: what slurmctld had not saved yet is forgotten.")
@click.pass_obj
def stop_controller(folder: Path, crash: bool) -> None:
    """Stop slurmctld; jobs go on, no command is answered."""
    (Lab.crash_controller if crash else Lab.stop_controller)(_changeable(folder))


@lab.command("start-controller")
@click.pass_obj
def start_controller(folder: Path) -> None:
    """Start slurmctld again from its saved state."""
    _changeable(folder).start_controller()
