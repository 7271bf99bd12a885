"""Starting and ending the daemons inside the lab's members."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab.members import Member, enter_argv
from slurmft.lab.processes import CLEAN_ENVIRONMENT, lab_processes, make_folder, run, wait_until
from slurmft.lab.slurm_conf import LabPaths


def daemon_environment(paths: LabPaths) -> dict[str, str]:
    """The environment of every daemon; nothing of the caller's."""
    return {
        **CLEAN_ENVIRONMENT,
        "SLURM_CONF": str(paths.slurm_conf),
        # MariaDB's client library: where slurmdbd's `localhost` is
        "MYSQL_UNIX_PORT": str(paths.database_socket),
    }


def run_inside(member: Member, paths: LabPaths, argv: Sequence[str], *, doing: str, timeout_s: float = 30) -> str:
    """Run one command of the machinery inside a member, as root; see ``processes.run``."""
    return run([*enter_argv(member), *argv], doing=doing, timeout_s=timeout_s, environment=daemon_environment(paths))


def start_munged(controller: Member, paths: LabPaths) -> None:
    """Start the lab's own munged with a fresh key; its socket serves every member through the filesystem."""
    make_folder(paths.munge)
    key = paths.munge / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    for path in (paths.munge, key):
        shutil.chown(path, "munge", "munge")
    argv = [
        "setpriv",
        "--reuid=munge",
        "--regid=munge",
        "--clear-groups",
        "--",
        "munged",
        f"--socket={paths.munge_socket}",
        f"--key-file={key}",
        f"--pid-file={paths.munge}/munged.pid",
        f"--seed-file={paths.munge}/munged.seed",
        f"--log-file={paths.munge}/munged.log",
    ]
    run_inside(controller, paths, argv, doing="starting munged")


def start_slurmctld(controller: Member, paths: LabPaths) -> None:
    """Start slurmctld and return when it answers.

    Raises:
        LabError: it ended or stayed silent; quotes its log.
    """
    with log_on_failure(paths.log / "slurmctld.log"):
        argv = ["slurmctld", "-f", str(paths.slurm_conf)]
        if (paths.state / "clustername").exists() and not (paths.state / "assoc_usage").exists():
            argv.append("-i")  # first written after five minutes; without it, 26.05 does not start again after a crash
        run_inside(controller, paths, argv, doing="starting slurmctld")
        wait_until(lambda: answers(controller, paths), doing="waiting for slurmctld", within_s=20)


def answers(controller: Member, paths: LabPaths) -> bool:
    """Whether slurmctld answers a ping right now."""
    try:
        said = run_inside(controller, paths, ["scontrol", "ping"], doing="scontrol ping", timeout_s=10)
    except LabError:
        return False
    return said.rstrip().endswith("is UP")


def start_slurmds(nodes: Sequence[Member], paths: LabPaths) -> None:
    """Start slurmd on every node given, all at once."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda node: _start_slurmd(node, paths), nodes))


def _start_slurmd(node: Member, paths: LabPaths) -> None:
    with log_on_failure(paths.log / f"slurmd.{node.name}.log"):
        argv = ["slurmd", "-N", node.name, "-f", str(paths.slurm_conf)]
        run_inside(node, paths, argv, doing=f"starting slurmd on {node.name}")


def processes_named(folder: Path, member: str, program: str) -> list[int]:
    """Host process ids of a program inside a member."""
    return [pid for pid, owner in lab_processes(folder).items() if owner == member and _name_of(pid) == program]


def programs(folder: Path) -> set[tuple[str, str]]:
    """Every (member, program) that runs in the lab, started in any way."""
    return {(member, _name_of(pid)) for pid, member in lab_processes(folder).items()}


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def end_program(folder: Path, member: str, program: str, number: signal.Signals, *, within_s: float = 20) -> None:
    """Signal every process of a program inside a member and return when it is gone.

    Raises:
        LabError: it did not end in time.
    """
    for pid in processes_named(folder, member, program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    wait_until(
        lambda: not processes_named(folder, member, program),
        doing=f"waiting for {program} on {member} to end",
        within_s=within_s,
    )


@contextlib.contextmanager
def log_on_failure(log: Path, lines: int = 5) -> Iterator[None]:
    """Add the end of a daemon's own log to the error that its start raised."""
    try:
        yield
    except LabError as error:
        try:
            tail = log.read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            tail = ["(no log)"]
        raise LabError(error.what, hint=f"{log} ends with:\n    " + "\n    ".join(tail)) from error


def node_states(controller: Member, paths: LabPaths) -> dict[str, str]:
    """Each node's state as ``sinfo`` prints it (``IDLE``, ``DOWN*``); empty when slurmctld does not answer."""
    argv = ["sinfo", "-h", "-N", "-p", "low", "-o", "%N|%T"]
    try:
        said = run_inside(controller, paths, argv, doing="sinfo", timeout_s=10)
    except LabError:
        return {}
    rows = [line.split("|") for line in said.splitlines() if "|" in line]
    return {name: state.upper() for name, state in rows}
