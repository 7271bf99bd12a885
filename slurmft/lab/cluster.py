"""The lab as one object: bring it up, run commands in it, break it, take it down."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmft.errors import LabError
from slurmft.lab import access, building, daemons, faults
from slurmft.lab.members import Member
from slurmft.lab.packages import why_unavailable
from slurmft.lab.processes import wait_until
from slurmft.lab.settings import LabSettings, default_folder
from slurmft.lab.state import Built, load


class Lab:
    """A standing Slurm cluster on this machine.

    Every method raises LabError with what failed and what to do; commands run in the lab are the caller's to judge.
    """

    def __init__(self, built: Built) -> None:
        self._built = built

    @staticmethod
    def availability(*, accounting: bool = False) -> str | None:
        """Why no lab can be built here right now, or None. Installs nothing; for skipping tests by name."""
        return why_unavailable(accounting=accounting)

    @classmethod
    def up(cls, settings: LabSettings | None = None) -> Lab:
        """The lab with these settings, built when none stands; see :func:`building.up`."""
        return cls(building.up(settings or LabSettings()))

    @classmethod
    def standing(cls, folder: Path | None = None) -> Lab:
        """The lab that stands in ``folder``.

        Raises:
            LabError: there is none.
        """
        return cls(faults.standing(folder or default_folder()))

    def down(self) -> None:
        """End the lab: no process, mount, namespace or link is left. Home and logs stay."""
        building.down(self.folder)

    @property
    def settings(self) -> LabSettings:
        """What it was built from."""
        return self._built.settings

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self._built.settings.folder

    @property
    def user(self) -> str:
        """The ordinary user that jobs run as."""
        return self._built.account.name

    @property
    def uid(self) -> int:
        """The user's numeric id, the same on the host."""
        return self._built.account.uid

    @property
    def gid(self) -> int:
        """The user's group id."""
        return self._built.account.gid

    @property
    def home(self) -> Path:
        """A folder of the user that every node sees at the same path: the shared filesystem."""
        return self._built.paths.home

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the compute nodes."""
        return self.settings.node_names

    @property
    def slurm_conf(self) -> Path:
        """The configuration in use, world-readable."""
        return self._built.paths.slurm_conf

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as the lab's user on the login member; options as for :func:`run_command`."""
        return run_command(self._built, self._built.login, self._built.account, argv, **options)

    def second_user(self) -> access.Account:
        """Another ordinary user, who shares nothing with the first; made when it is missing."""
        return access.ensure_account(self.folder / "home2", access.SECOND_USER)

    def run_as(
        self, account: access.Account, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command as ``second_user`` on the login member, in that user's home."""
        home = str(self.folder / "home2")
        return run_command(self._built, self._built.login, account, argv, cwd=home, env={"HOME": home}, **options)

    def run_as_admin(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The same as root, which is also Slurm's administrator."""
        return run_command(self._built, self._built.login, None, argv, **options)

    def run_on(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as the lab's user inside a node, beside its jobs, not through Slurm."""
        return run_command(self._built, self._member(node), self._built.account, argv, **options)

    def run_on_as_admin(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """The same as root."""
        return run_command(self._built, self._member(node), None, argv, **options)

    def _member(self, name: str) -> Member:
        self._built = load(self.folder) or self._built  # start_node changes holders, perhaps from another process
        return self._built.member(name)

    def command(
        self, argv: Sequence[str], *, node: str | None = None, admin: bool = False, cwd: Path | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Argv and environment for the caller's own ``Popen`` or ``exec``; falls back to home where cwd is closed."""
        member = self._member(node) if node else self._built.login
        account = None if admin else self._built.account
        folder = cwd or self.home
        if not access.can_enter(member, account, folder):
            folder = self.home
        environment = access.environment_of(account, self._built.paths, os.environ)
        return access.command_argv(member, account, folder, argv), environment

    def kill_node(self, name: str) -> None:
        """End a node at once, as a power cut does."""
        faults.kill_node(self.folder, name)

    def start_node(self, name: str) -> None:
        """Start a dead node again (or the slurmd of a living one)."""
        faults.start_node(self.folder, name)

    def partition(self, name: str) -> None:
        """Cut a node off the network; its processes go on."""
        faults.partition(self.folder, name)

    def heal(self, name: str) -> None:
        """Undo :meth:`partition`."""
        faults.heal(self.folder, name)

    def slow_node(self, name: str, *, cpus: float, for_s: float = 120.0) -> None:
        """Leave a node no more than so many CPUs, for so many seconds."""
        faults.slow_node(self.folder, name, cpus=cpus, for_s=for_s)

    def restore_speed(self, name: str) -> None:
        """Undo :meth:`slow_node`."""
        faults.restore_speed(self.folder, name)

    def stop_controller(self) -> None:
        """Stop slurmctld cleanly."""
        faults.stop_controller(self.folder)

    def crash_controller(self) -> None:
        """Kill slurmctld."""
        faults.crash_controller(self.folder)

    def start_controller(self) -> None:
        """Start slurmctld again from its saved state."""
        faults.start_controller(self.folder)

    def node_states(self) -> dict[str, str]:
        """Each node's state as sinfo prints it in capitals; empty when slurmctld does not answer."""
        return daemons.node_states(self._built.controller, self._built.paths)

    def wait_until_idle(self, timeout: float = 60) -> None:
        """Return when no job is left and every node is idle.

        Raises:
            LabError: not within ``timeout`` seconds; says what was still there.
        """
        try:
            wait_until(self._is_idle, doing="waiting for an idle lab", within_s=timeout, every_s=0.1)
        except LabError as error:
            jobs = self.run_as_admin(["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout.strip()
            raise LabError(f"{error.what}; nodes {self.node_states()}, jobs: {jobs or 'none'}") from error

    def _is_idle(self) -> bool:
        jobs = self.run_as_admin(["squeue", "-h", "-o", "%i"], check=False)
        return jobs.returncode == 0 and not jobs.stdout.strip() and set(self.node_states().values()) == {"IDLE"}


def run_command(
    built: Built,
    member: Member,
    account: access.Account | None,
    argv: Sequence[str],
    *,
    check: bool = True,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in the lab and capture its text output.

    Args:
        cwd: working folder, the user's home by default; must be one the user may enter.
        env: added to a clean login environment; the caller's own is not passed on.

    Raises:
        LabError: ``check`` is set and it did not exit with 0, or it exceeded ``timeout`` and was killed.
    """
    environment = access.environment_of(account, built.paths, os.environ) | dict(env or {})
    words = access.command_argv(member, account, Path(cwd or built.paths.home), argv)
    result = _captured(words, environment, input, timeout=timeout, name=" ".join(map(str, argv)))
    if check and result.returncode != 0:
        said = f"{result.stderr.strip()}\n{result.stdout.strip()}".strip()
        raise LabError(f"{' '.join(map(str, argv))}: ended with {result.returncode}\n{said}".rstrip())
    return result


def _captured(
    words: Sequence[str], environment: Mapping[str, str], given: str | None, *, timeout: float, name: str
) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # so that a timeout ends the children of the command too
    ) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"{name}: no end within {timeout:g} s, killed") from error
            raise
    return subprocess.CompletedProcess(list(words), process.returncode, out, err)
