"""What a stored version consists of. It is written last; whatever it says is checked before anything is believed.

<address>/<run>/<place>/versions/<generation>-<sequence>-<random>.json
<address>/<run>/<place>/data/<sha256 of the content>
<address>/<run>/<place>/begun/<generation>
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from slurmft.errors import NewerFormat, StorageError
from slurmft.policy.synced_folders import Version

FORMAT = 1
VERSIONS, DATA, BEGUN = "versions", "data", "begun"
MAX_FILES = 100_000
"""Of one folder, folders and links in it included."""

MAX_MANIFEST_BYTES = 128 << 20
MAX_FILE_BYTES = 1 << 50
MAX_PATH_BYTES = 4000
MAX_LINKS = 40
"""On the way of one link, as the kernel counts."""

_NAME = re.compile(r"(\d{12})-(\d{12})-[0-9a-f]{8}\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file. ``path``: below the folder, with ``/``. ``mode``: its permissions. ``mtime_ns``: Unix time."""

    path: str
    size: int
    mode: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One version. ``links``: path and target of symbolic links that stay inside of the folder."""

    run: str
    version: Version
    files: tuple[Entry, ...]
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(each.size for each in self.files)

    def says_the_same(self, other: Manifest | None) -> bool:
        """Whether both have the same names and contents."""
        return other is not None and _content(self) == _content(other)

    def as_bytes(self) -> bytes:
        """As it is stored."""
        value = {
            "format": FORMAT, "run": self.run, "generation": self.version.generation,
            "sequence": self.version.sequence, "at": time.time(), "folders": self.folders, "links": self.links,
            "files": [[each.path, each.size, each.mode, each.mtime_ns, each.sha256] for each in self.files],
        }  # fmt: skip
        return json.dumps(value).encode()


def _content(manifest: Manifest) -> object:
    return {(each.path, each.sha256, each.mode) for each in manifest.files}, manifest.folders, manifest.links


def new_name(version: Version) -> str:
    """A name that sorts by version, and that no other writer takes."""
    return f"{VERSIONS}/{version.generation:012}-{version.sequence:012}-{secrets.token_hex(4)}.json"


def version_of(name: str) -> Version | None:
    """The version that a name in ``versions`` stands for; None where it is none of ours."""
    found = _NAME.fullmatch(name)
    return Version(int(found[1]), int(found[2])) if found else None


def is_blob(name: str) -> bool:
    """Whether a name in ``data`` is one of ours."""
    return _SHA256.fullmatch(name) is not None


def safe_path(path: str) -> bool:
    """Whether it names something below a folder, whatever folder that is."""
    return (
        isinstance(path, str)
        and 0 < len(path) <= MAX_PATH_BYTES
        and "\0" not in path
        and not path.startswith("/")
        and all(part not in ("", ".", "..") and len(part) <= 255 for part in path.split("/"))
    )


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path`` with this target ends below the folder, by the words alone."""
    if not target or target.startswith("/") or "\0" in target or len(target) > MAX_PATH_BYTES:
        return False
    depth = len(PurePosixPath(path).parent.parts)
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return False
    return True


def leading_outside(links: Mapping[str, str]) -> list[str]:
    """The links that end outside of the folder, or nowhere, when others on their way are followed as the kernel does;
    ``stays_inside`` has looked at each by itself."""
    found = []
    for start in links:
        here, left, followed = list[str](), start.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part == "..":
                if not here:
                    found.append(start)
                    break
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                if (target := links.get("/".join(here))) is not None:
                    followed += 1
                    if followed > MAX_LINKS:
                        found.append(start)
                        break
                    here.pop()
                    left += target.split("/")[::-1]
    return found


def parse(content: bytes, *, run: str, version: Version) -> Manifest:
    """A stored version.

    Raises:
        NewerFormat: a newer slurmft wrote it.
        StorageError: it is damaged, of another run or version, or names something outside of its folder.
    """
    try:
        value = json.loads(content)
        if isinstance(value, dict) and isinstance(value.get("format"), int) and value["format"] > FORMAT:
            raise NewerFormat(f"version {version} has format {value['format']}; this slurmft reads up to {FORMAT}",
                              hint="upgrade slurmft")  # fmt: skip
        found = Manifest(
            run=str(value["run"]),
            version=Version(int(value["generation"]), int(value["sequence"])),
            files=tuple(_entry(each) for each in value["files"]),
            folders=tuple(map(str, value["folders"])),
            links=tuple((str(path), str(target)) for path, target in value["links"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise StorageError(f"version {version} is damaged: {error!r}"[:300]) from error
    if (found.run, found.version) != (run, version):
        raise StorageError(f"version {version} says that it is {found.version} of {found.run[:80]!r}")
    _check(found)
    return found


def _entry(row: Any) -> Entry:
    path, size, mode, mtime_ns, sha256 = row
    numbers: Mapping[str, Any] = {"size": size, "mode": mode, "mtime_ns": mtime_ns}
    if any(type(each) is not int for each in numbers.values()) or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"{path!r} has {numbers}"[:200])
    if not isinstance(sha256, str) or not is_blob(sha256) or not 0 <= mtime_ns < 1 << 63:
        raise ValueError(f"{path!r} has no digest, or an impossible time"[:200])
    return Entry(path=path, size=size, mode=mode & 0o755 | 0o400, mtime_ns=mtime_ns, sha256=sha256)


def _check(manifest: Manifest) -> None:
    """Every name lies below the folder, none occurs twice, and nothing lies in what is no folder."""
    paths = [*(each.path for each in manifest.files), *manifest.folders, *(path for path, _ in manifest.links)]
    if len(paths) > MAX_FILES:
        raise StorageError(f"version {manifest.version} has {len(paths)} files; at most {MAX_FILES}")
    if bad := next((path for path in paths if not safe_path(path)), None):
        raise StorageError(f"version {manifest.version} names {bad[:80]!r}, which is not below a folder")
    if bad_link := next((path for path, target in manifest.links if not stays_inside(path, target)), None):
        raise StorageError(f"version {manifest.version} has a link out of its folder: {bad_link[:80]!r}")
    if bad_links := leading_outside(dict(manifest.links)):
        raise StorageError(f"version {manifest.version} has a link out of its folder by others: {bad_links[0][:80]!r}")
    folders = set(manifest.folders)
    if len(set(paths)) != len(paths):
        raise StorageError(f"version {manifest.version} has a name twice")
    for path in paths:
        above = path.rpartition("/")[0]
        if above and above not in folders:
            raise StorageError(f"version {manifest.version} has {path[:80]!r} in what is not a folder")
