"""The accounts that run commands in the lab, and their environment.

The caller's environment is not passed on: like a login, it starts clean, so that no secret of root's shell ends up in
a job (sbatch exports the submitter's environment) and no root-only folder is searched.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import LabError
from slurmft.lab.members import Member, enter_argv
from slurmft.lab.processes import SEARCH_PATH, make_folder, run
from slurmft.lab.slurm_conf import LOGIN, LabPaths

USER = "slurmft-lab"
SECOND_USER = "slurmft-lab-2"
KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "COLUMNS", "LINES", "NO_COLOR", "CI")
"""Variables taken over from the caller's environment: those of the terminal only."""


@dataclass(frozen=True, slots=True)
class Account:
    """The ordinary user that jobs run as, on the host as in the lab."""

    name: str
    uid: int
    gid: int


def ensure_account(home: Path, name: str = USER) -> Account:
    """A user of the lab, created when missing and shared by all labs; its home exists afterwards and belongs to it.

    Raises:
        LabError: the user cannot be created, or that name belongs to root.
    """
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        words = ["--system", "--user-group", "--no-create-home", "--home-dir", str(home), "--shell", "/bin/bash"]
        run(["useradd", *words, name], doing=f"creating the user {name}")
        entry = pwd.getpwnam(name)
    if entry.pw_uid == 0:
        raise LabError(f"the user {name} has uid 0; jobs of the lab never run as root")
    make_folder(home)
    os.chown(home, entry.pw_uid, entry.pw_gid)
    return Account(name, entry.pw_uid, entry.pw_gid)


def environment_of(account: Account | None, paths: LabPaths, caller: Mapping[str, str]) -> dict[str, str]:
    """A login's environment for the account (None: root), with this interpreter first in PATH."""
    kept = {name: caller[name] for name in KEPT if name in caller}
    name, home = (account.name, str(paths.home)) if account else ("root", "/root")
    return kept | {
        "HOME": home,
        "USER": name,
        "LOGNAME": name,
        "SHELL": "/bin/bash",
        "PATH": f"{Path(sys.prefix) / 'bin'}:{SEARCH_PATH}",
        "SLURM_CONF": str(paths.slurm_conf),
    }


def command_argv(member: Member, account: Account | None, folder: Path, argv: Sequence[str]) -> list[str]:
    """The whole command line that runs ``argv`` inside a member as an account (None: root) in ``folder``."""
    words = enter_argv(member)
    become = [f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups"] if account else []
    if member.name != LOGIN:
        # nsenter had to fork and passes no signal on: at least the command must not outlive it
        become.append("--pdeathsig=TERM")
    if become:
        words += ["setpriv", *become, "--"]
    return [*words, "env", f"--chdir={folder}", "--", *argv]


def can_enter(member: Member, account: Account | None, folder: Path) -> bool:
    """Whether the account may work in ``folder`` as the member sees it; the kernel judges, not us."""
    argv = command_argv(member, account, Path("/"), ["test", "-x", str(folder), "-a", "-d", str(folder)])
    try:
        run(argv, doing=f"entering {folder}")
    except LabError:
        return False
    return True


def verify_exposure(member: Member, account: Account, paths: Sequence[Path]) -> None:
    """Prove that the account can run this Python and read what was exposed.

    Raises:
        LabError: it cannot; names what is unreadable.
    """
    check = "import os, sys; sys.stdout.writelines(p + '\\n' for p in sys.argv[1:] if not os.access(p, os.R_OK))"
    argv = command_argv(member, account, Path("/"), [sys.executable, "-I", "-S", "-c", check, *map(str, paths)])
    try:
        unreadable = run(argv, doing=f"running {sys.executable} as {account.name}", timeout_s=20).splitlines()
    except LabError as error:
        raise LabError(error.what, hint=f"chmod -R go+rX {sys.prefix} {sys.base_prefix}") from error
    if unreadable:
        raise LabError(
            f"the lab's user {account.name} cannot read {' '.join(unreadable)}",
            hint=f"chmod -R go+rX {' '.join(str(Path(path).parent) for path in unreadable)}",
        )
