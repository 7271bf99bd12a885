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
    """Compute nodes, named n1, n2, ..."""

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
        if problems:
            raise UsageError("the lab's settings cannot be used: " + "; ".join(problems))

    @property
    def node_names(self) -> tuple[str, ...]:
        """``("n1", "n2", ...)``."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    def as_json(self) -> dict[str, Any]:
        """Plain values, for the state file and for comparing two labs."""
        plain = dataclasses.asdict(self)
        return plain | {"folder": str(self.folder), "expose": [str(path) for path in self.expose]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LabSettings:
        """The inverse of :meth:`as_json`; unknown keys are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in plain.items() if name in known}
        values["folder"] = Path(values["folder"])
        values["expose"] = tuple(Path(path) for path in values.get("expose", ()))
        return cls(**values)
