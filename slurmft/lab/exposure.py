"""The mounts that let an ordinary user reach paths in private folders of other users.

An interpreter below /root or a checkout in a 0700 folder cannot be used by the lab's user. Nothing on the host is
changed for it: inside the lab's mount namespaces the private folder is covered by an empty one, and only what is
needed is bound back at its own path.
"""

from __future__ import annotations

import compileall
import stat
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import slurmft

PRIVATE_MEMORY = Path("/dev/shm")  # noqa: S108 - a mount point of every member, not a place for temporary files
MAX_LINKS = 40


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount inside a member; carried out by ``holder.py`` in the order given."""

    kind: Literal["bind", "tmpfs", "copy", "link", "folder"]
    """The last three make what a fresh root lacks: a copy of a tree, a symbolic link, an empty folder."""
    source: str
    target: str
    read_only: bool = False
    mode: str = "0755"

    def as_json(self) -> dict[str, Any]:
        """Plain values for the holder's plan."""
        return asdict(self)


def root_mounts(root: Path, mark: str) -> tuple[Mount, ...]:
    """The mounts that make a file tree of a Debian release the root of a member, in memory but for its programs.

    Users and groups are the host's: a process has the same owner on both sides.
    """
    tops = [path for path in sorted(root.iterdir()) if path.is_symlink()]  # bin, lib, lib64 and sbin
    return (
        Mount("tmpfs", mark, "/"),
        *(Mount("link", str(path.readlink()), f"/{path.name}") for path in tops),
        *(Mount("folder", "", f"/{name}") for name in ("proc", "root", "run", "var/lib", "var/log")),
        Mount("link", "/run", "/var/run"),
        Mount("copy", str(root / "etc"), "/etc"),
        Mount("bind", str(root / "usr"), "/usr"),
        *(Mount("bind", f"/{name}", f"/{name}") for name in ("dev", "sys", "tmp")),
        *(Mount("bind", f"/etc/{name}", f"/etc/{name}", read_only=True) for name in ("passwd", "group")),
    )


def needed_paths() -> tuple[Path, ...]:
    """What running this very Python with this very slurmft takes: interpreter, environment, source."""
    package = Path(slurmft.__file__).parent
    return (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), package.parent)


def compile_sources() -> None:
    """Compile this slurmft, as its installation did, where its sources have changed since.

    The lab's user cannot write beside them: each of its processes would compile half of the package by itself. A
    package that cannot be written is left as it is.
    """
    compileall.compile_dir(Path(slurmft.__file__).parent, quiet=2)


def paths_to_expose(
    paths: Iterable[Path], *, writable: Collection[Path] = (), covered: Collection[Path] = (PRIVATE_MEMORY,)
) -> tuple[Mount, ...]:
    """The mounts after which every user can read ``paths``; none when all users already can.

    Guarantees: nothing else of a covered folder stays visible; binds are read-only except for ``writable``; symbolic
    links on the way work. Does not help against unreadable files *inside* a given path: a bind keeps their modes.

    Args:
        covered: folders that other mounts of the plan, made earlier, hide already.
    """
    plan = _Plan(writable=frozenset(writable), covered=set(covered))
    wanted = {step for path in (*paths, *writable) for step in _through_links(path) if step.exists()}
    for path in sorted(wanted, key=lambda path: (len(path.parts), path)):
        plan.reveal(path)
    return tuple(plan.mounts)


def _through_links(path: Path) -> Iterator[Path]:
    """The path itself, then what it becomes each time one of its symbolic links is followed."""
    path = Path("/", path)
    for _ in range(MAX_LINKS):
        yield path
        link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None)
        if link is None:
            return
        # lexical ".." would be wrong across links, so the folder of the link is resolved first
        target = Path(link.parent.resolve(), link.readlink())
        target = target.parent.resolve() / target.name if ".." in target.parts else target
        path = target / path.relative_to(link)


class _Plan:
    """Remembers which folders are covered and which are bound back while paths are revealed, parents first."""

    def __init__(self, *, writable: frozenset[Path], covered: set[Path]) -> None:
        self.writable = writable
        self.covered = covered
        self.bound: set[Path] = set()
        self.mounts: list[Mount] = []

    def reveal(self, path: Path) -> None:
        hidden = False
        for folder in (*reversed(path.parents), path):
            if folder in self.bound:
                hidden = False
            elif folder in self.covered:
                hidden = True
            elif not hidden and folder.is_symlink():
                return  # reachable here; where it leads is a path of its own
            elif not hidden and _is_private(folder, needs_reading=folder == path):
                self._cover(folder)
                hidden = True
        if hidden:
            self._bind(path)

    def _cover(self, folder: Path) -> None:
        self.covered.add(folder)
        self.mounts.append(Mount("tmpfs", "slurmft-lab-cover", str(folder)))

    def _bind(self, path: Path) -> None:
        if not _is_private(path, needs_reading=True):
            self._bind_one(path)
            return
        # a bind would keep the private mode: leave a fresh folder in its place and bind what it holds
        self.covered.add(path)
        for child in sorted(path.iterdir()):
            if child.exists() and child not in self.bound:
                self._bind_one(child)

    def _bind_one(self, path: Path) -> None:
        self.bound.add(path)
        self.mounts.append(Mount("bind", str(path), str(path), read_only=path not in self.writable))


def _is_private(path: Path, *, needs_reading: bool) -> bool:
    """Whether a stranger cannot pass (or read) this folder. Owner and group never count: a stranger is neither."""
    mode = path.stat().st_mode
    if not stat.S_ISDIR(mode):
        return False
    needed = stat.S_IXOTH | (stat.S_IROTH if needs_reading else 0)
    return mode & needed != needed
