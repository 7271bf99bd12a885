"""The lab's state file, and the lock that lets one command at a time change a lab."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import LabError, StorageError, UsageError
from slurmft.lab.access import Account
from slurmft.lab.members import Member
from slurmft.lab.packages import require_root
from slurmft.lab.processes import make_folder
from slurmft.lab.settings import LabSettings
from slurmft.lab.slurm_conf import CONTROLLER, LOGIN, LabPaths
from slurmft.system.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class Built:
    """A lab that was built: its settings, its user, and the holder of every member."""

    settings: LabSettings
    account: Account
    exposed: tuple[str, ...]
    """The expose mounts' targets; another interpreter or checkout needs another lab."""
    holders: Mapping[str, int]
    """Member name to the holder's process id on the host."""

    @property
    def paths(self) -> LabPaths:
        """Where its files are."""
        return LabPaths(self.settings.folder)

    @property
    def controller(self) -> Member:
        """Where slurmctld runs."""
        return self.member(CONTROLLER)

    @property
    def login(self) -> Member:
        """Where users' commands run: the controller's network, no PID namespace of its own."""
        return self.member(LOGIN)

    def member(self, name: str) -> Member:
        """A member by name.

        Raises:
            UsageError: there is no such member.
        """
        if name not in self.holders:
            raise UsageError(f"the lab has no member {name!r}", hint=f"it has {', '.join(self.holders)}")
        return Member(name, self.holders[name])

    def node(self, name: str) -> Member:
        """A compute node by name; the controller is not one.

        Raises:
            UsageError: there is no such node.
        """
        if name not in self.settings.node_names:
            raise UsageError(f"the lab has no node {name!r}", hint=f"it has {', '.join(self.settings.node_names)}")
        return self.member(name)

    def with_holder(self, member: Member) -> Built:
        """The same lab after one member was started again."""
        return dataclasses.replace(self, holders={**self.holders, member.name: member.pid})


def save(built: Built) -> None:
    """Write the state file; readable by everyone, so that ``status`` needs no root."""
    plain = {
        "settings": built.settings.as_json(),
        "account": dataclasses.asdict(built.account),
        "exposed": list(built.exposed),
        "holders": dict(built.holders),
    }
    write_json(built.paths.state_file, plain, mode=0o644)


def load(folder: Path) -> Built | None:
    """The lab in the state file, or None when there is none or it cannot be believed."""
    try:
        plain = read_json(LabPaths(folder).state_file)
        if plain is None:
            return None
        return Built(
            settings=LabSettings.from_json(plain["settings"]),
            account=Account(**plain["account"]),
            exposed=tuple(plain["exposed"]),
            holders={str(name): int(pid) for name, pid in plain["holders"].items()},
        )
    except (StorageError, UsageError, KeyError, TypeError, ValueError):
        return None  # a torn or foreign file says nothing; the processes themselves are found by their mark


@contextlib.contextmanager
def exclusive(folder: Path, *, within_s: float = 120) -> Iterator[None]:
    """Be the only command that changes this lab; the lock vanishes with its process, in any case.

    Raises:
        LabError: another command still holds it after ``within_s`` seconds, or the folder holds something else.
        LabUnavailable: no root.
    """
    require_root()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not LabPaths(folder).lock.exists() and any(folder.iterdir()):
        # parts of it are about to be deleted; `--folder /home` must not delete a home
        raise LabError(f"{folder} is not a lab's folder, and not empty", hint="choose a new folder, or an empty one")
    make_folder(folder)
    deadline = time.monotonic() + within_s
    with LabPaths(folder).lock.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(f"another lab command has held {lock.name} for {within_s:g} s") from None
                time.sleep(0.05)
        yield
