"""The settings of a lab cluster: one frozen value, refused at once when it makes no sense."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.errors import UsageError

FOLDER_VARIABLE = "SLURMFT_LAB_FOLDER"
MAX_NODES = 64

_NODE = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,14}", re.ASCII)
_TAKEN = frozenset({"ctl", "login", "localhost", "lo", "br0"})


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the lab keeps its files: ``$SLURMFT_LAB_FOLDER`` or ``/var/lib/slurmft-lab``."""
    return Path(environment.get(FOLDER_VARIABLE) or "/var/lib/slurmft-lab")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabSettings:
    """The cluster to build. Two labs with different folders run side by side without meeting.

    Raises:
        UsageError: a value makes no sense; names all of them at once.
    """

    folder: Path = dataclasses.field(default_factory=default_folder)
    """Root-owned folder for configuration, logs, Slurm's state and the lab user's home."""

    nodes: int = 4
    """Compute nodes, named n1, n2, ... unless they have ``names``."""

    names: tuple[str, ...] = ()
    """Names of the nodes, as many as there are ``nodes``; empty: n1, n2, ..."""

    cpus: int = 8
    """CPUs every node claims to have; may exceed the machine's, they share its real cores."""

    accounting: bool = False
    """Run MariaDB and slurmdbd too, so that sacct answers."""

    kill_wait_s: int = 5
    """Slurm's KillWait: seconds between TERM and KILL."""

    slurmd_timeout_s: int = 10
    """Slurm's SlurmdTimeout: seconds until a silent node is DOWN."""

    grace_s: int = 20
    """GraceTime of the partitions ``low`` and ``cancel``, in seconds."""

    release: str = ""
    """Slurm's release, such as ``24.11``, out of a newer Debian; empty: the one that this machine has installed."""

    lines: tuple[str, ...] = ()
    """More lines of slurm.conf; of a key that is set twice, Slurm takes the last."""

    files: tuple[Path, ...] = ()
    """Copied into the folder of slurm.conf when the lab is built, under their own names: ``job_submit.lua``."""

    expose: tuple[Path, ...] = ()
    """More paths the lab's user must be able to read, besides this interpreter and this package."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} is outside {low}..{high}"
            for name, value, low, high in (
                ("nodes", self.nodes, 1, MAX_NODES),
                ("cpus", self.cpus, 1, 1024),
                ("kill_wait_s", self.kill_wait_s, 1, 600),
                ("slurmd_timeout_s", self.slurmd_timeout_s, 4, 3600),
                ("grace_s", self.grace_s, 0, 3600),
            )
            if not low <= value <= high
        ]
        # The path goes unquoted into slurm.conf and into mount names.
        if not re.fullmatch(r"(/[A-Za-z0-9._+-]+){2,}", str(self.folder)) or ".." in self.folder.parts:
            problems.append(f"folder={str(self.folder)!r} must be an absolute path of letters, digits, . _ + -")
        # munged refuses a longer path: a socket's address has 108 bytes
        if len(str(self.folder)) > 70:
            problems.append(f"folder={str(self.folder)!r} is longer than 70 characters")
        problems += self._of_names()
        problems += [f"lines={line!r} is not one line" for line in self.lines if not line.isprintable()]
        problems += [f"files={str(path)!r} is not an absolute path" for path in self.files if not path.is_absolute()]
        if problems:
            raise UsageError("the lab's settings cannot be used: " + "; ".join(problems))

    def _of_names(self) -> list[str]:
        # a name is also that of the node's link, of which Linux takes 15 characters
        bad = [name for name in self.names if not _NODE.fullmatch(name) or name in _TAKEN]
        problems = [f"names={name!r} is not the name of a node, of at most 15 letters, digits and -" for name in bad]
        if self.names and not len(self.names) == len(set(self.names)) == self.nodes:
            problems.append(f"names={','.join(self.names)} are not {self.nodes} different ones")
        return problems

    @property
    def node_names(self) -> tuple[str, ...]:
        """``("n1", "n2", ...)``, or the names that were given."""
        return self.names or tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def address(self, node: str) -> str:
        """The address of a node of this lab: 10.213.0.11 is the first one's."""
        return f"10.213.0.{11 + self.node_names.index(node)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, for the state file and for comparing two labs."""
        plain = dataclasses.asdict(self)
        paths = {name: [str(path) for path in plain[name]] for name in ("files", "expose")}
        return plain | paths | {"folder": str(self.folder)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LabSettings:
        """The inverse of :meth:`as_json`; unknown keys are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in plain.items() if name in known}
        values["folder"] = Path(values["folder"])
        values |= {name: tuple(Path(path) for path in values.get(name, ())) for name in ("files", "expose")}
        values |= {name: tuple(values.get(name, ())) for name in ("names", "lines")}
        return cls(**values)
