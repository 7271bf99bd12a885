"""Where probes look and by which settings: roots that tests can move, and bounded reading of any file."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmft.config.health import HealthConfig

MAX_BYTES = 1 << 20

PATIENCE: Mapping[str, float] = {"healthcheck": 10.0, "cron": 5.0}
"""Context -> how many times longer than usual things may take: Slurm gives HealthCheckProgram 60 s."""


LONGEST_S: Mapping[str, float] = {"prolog": 5.0, "epilog": 5.0, "healthcheck": 40.0}
"""Context -> seconds that no probe may exceed: bin/slurmft-prolog has 10 s in all, bin/slurmft-healthcheck 50 s. A
probe that is cut short is UNKNOWN; without this, one slow probe would lose the results of all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One look: where, at which node, with which settings."""

    node: str
    now: float
    """Unix time."""

    config: HealthConfig = field(default_factory=HealthConfig)
    context: str = "manual"
    level: int = 1
    root: Path = Path("/")
    """Where /proc, /sys and /dev are found."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def patience(self) -> float:
        """How many times longer than usual things may take."""
        return PATIENCE.get(self.context, 1.0)

    def stretched(self, limit_s: float) -> float:
        """A limit in this context: with patience, and within the hook's own limit."""
        return min(limit_s * self.patience, LONGEST_S.get(self.context, math.inf))

    def path(self, name: str) -> Path:
        """``proc/loadavg`` below the root."""
        return self.root / name

    def text(self, name: str) -> str:
        """The text of this file below the root; empty where it is missing or may not be read."""
        return text_of(self.root / name)

    def integer(self, name: str) -> int | None:
        """The number that a file begins with; None where there is none."""
        match = re.match(r"\s*(-?\d{1,18})\b", self.text(name))
        return int(match[1]) if match else None

    def folders(self, name: str, pattern: str = "*") -> list[Path]:
        """What matches in a folder below the root, sorted; nothing where it is missing."""
        with contextlib.suppress(OSError):
            return sorted((self.root / name).glob(pattern))
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: Path
    kind: str
    """Type of the filesystem."""

    source: str
    mount_options: frozenset[str]
    super_options: frozenset[str]


def text_of(path: Path) -> str:
    """A file's text, at most a MiB of it, with any content; empty where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    try:
        pieces: list[bytes] = []
        while sum(len(each) for each in pieces) < MAX_BYTES and (piece := os.read(descriptor, 1 << 16)):
            pieces.append(piece)
        return b"".join(pieces).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def mounts(scene: Scene) -> Iterator[Mount]:
    """All mounts, as this process sees them (proc(5), mountinfo); lines of another shape are skipped."""
    for line in scene.text("proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if dash and len(left) >= 6 and len(right) >= 3:
            yield Mount(
                point=Path(_unescaped(left[4])), kind=right[0], source=_unescaped(right[1]),
                mount_options=frozenset(left[5].split(",")), super_options=frozenset(right[2].split(",")),
            )  # fmt: skip


def _unescaped(text: str) -> str:
    """Blanks and backslashes in paths are escaped in octal there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
