"""How agents are started inside of a container: settings in, options of srun and words of a command out.

Paths are mounted where they are outside, since the run's files hold absolute paths. Of pyxis and enroot, apptainer and
Slurm's own ``--container`` only documented options are used.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the name of the mount
STARTED_BY_SRUN = ("pyxis", "oci")
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 6)
PLACEHOLDERS = ("mounts", "image", "workdir")
"""In the words of ``container.command``."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_OURS = ("--container-image", "--container-mounts", "--container-workdir", "--container")
_SEPARATORS = ",:"
"""Of the paths in the options of pyxis and apptainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A path of the node, and where it is seen inside."""

    source: str
    target: str
    read_only: bool = False

    @property
    def is_same_path(self) -> bool:
        """It is seen where it is outside, and can be written to."""
        return self.source == self.target and not self.read_only


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """The container of a run's agents and workers."""

    runtime: str
    image: str
    mounts: tuple[Mount, ...]
    workdir: str
    python: str
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()
    bind_read_only: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages: the runtime and its image."""
        what = self.command[0] if self.runtime == "command" else self.runtime
        return f"{what} {self.image}".strip()

    @property
    def is_started_by_srun(self) -> bool:
        """srun's own options start it: the task is inside from its first instruction on."""
        return self.runtime in STARTED_BY_SRUN


def all_mounts(own: Sequence[Mount], needed: Sequence[str], wished: Sequence[str] = ()) -> tuple[Mount, ...]:
    """What has to be mounted, outer targets first.

    Args:
        own: the user's.
        needed: paths that the run reads and writes, and of which nothing may be hidden.
        wished: paths in which the user may mount something else.

    Raises:
        ValueError: the user's mounts hide a path that is needed, or two of them have one target.
    """
    for index, mount in enumerate(own):
        if any(mount.target == other.target for other in own[:index]):
            raise ValueError(f"mounts: two of them are seen at {mount.target}")
    found = list(own)
    for path in needed:
        for mount in own:
            if mount.source != mount.target and _is_in(mount.target, path):
                raise ValueError(f"mounts: {mount.source} at {mount.target} hides what the run needs in {path}")
            if mount.read_only and mount.target == path:
                raise ValueError(f"mounts: {path} is mounted read-only, and the run writes there")
    for path in (*needed, *wished):
        cover = max((mount for mount in found if _is_in(path, mount.target)), key=_depth, default=None)
        is_there = cover is not None and (cover.is_same_path or (path in wished and cover.target == path))
        if not is_there:
            found.append(Mount(source=path, target=path))
    return tuple(sorted(found, key=_depth))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _depth(mount: Mount) -> int:
    return len([part for part in mount.target.split("/") if part])


def problem_of(container: Container) -> str:
    """Why the runtime cannot be given these settings; empty where it can."""
    if container.runtime == "command":
        return _problem_of_command(container)
    if container.runtime in ("pyxis", "apptainer"):
        for mount in container.mounts:
            for path in (mount.source, mount.target):
                if found := next((sign for sign in _SEPARATORS if sign in path), ""):
                    what = f"{container.runtime} takes {found!r} in {path!r} for the end of the path"
                    return f"mounts: {what}; use a path without it (a link will do)"
    for option in container.options:
        if container.is_started_by_srun and option.partition("=")[0] in _OURS:
            return f"options: {option!r} is set by slurmft: use container.image, mounts and workdir"
    return ""


def _problem_of_command(container: Container) -> str:
    if "{mounts}" not in container.command:
        return "command: one of its words must be {mounts}, for the paths that the run needs"
    named = [(word, name) for word in container.command for name in _PLACEHOLDER.findall(word)]
    for word, name in named:
        if name not in PLACEHOLDERS:
            return f"command: {word!r} holds {{{name}}}; known are {', '.join(f'{{{each}}}' for each in PLACEHOLDERS)}"
        if name == "mounts" and word != "{mounts}":
            return f"command: {{mounts}} must be a word of its own, not part of {word!r}"
        if name == "image" and not container.image:
            return f"command: {word!r} needs container.image"
    for option, words in (("bind", container.bind), ("bind_read_only", container.bind_read_only)):
        missing = [each for each in ("{source}", "{target}") if not any(each in word for word in words)]
        if missing:
            return f"{option}: {missing[0]} is missing in it"
    return _problem_of_separators(container)


def _problem_of_separators(container: Container) -> str:
    """Where one word holds both paths, such as ``--volume={source}:{target}``, neither may hold what separates them."""
    for mount in container.mounts:
        for sign in _separators([*container.bind, *container.bind_read_only]):
            if sign in mount.source + mount.target:
                return f"mounts: {mount.source!r} holds {sign!r}, which separates the paths in container.bind"
    return ""


def _separators(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if "{source}" in word and "{target}" in word:
            yield from set(re.findall(r"[,:;]", re.sub(r"\{source\}|\{target\}", " ", word)))


def srun_options(container: Container, *, bundle: str = "") -> list[str]:
    """The options of srun that start its tasks inside; none where a command does that.

    Args:
        bundle: the folder whose config.json holds the mounts, for Slurm's own ``--container``.
    """
    if container.runtime == "oci":
        return [f"--container={bundle or container.image}", *container.options]
    if container.runtime != "pyxis":
        return []
    mounts = ",".join(f"{each.source}:{each.target}{':ro' if each.read_only else ''}" for each in container.mounts)
    home = [] if "--container-mount-home" in container.options else ["--no-container-mount-home"]
    return [f"--container-image={container.image}", f"--container-mounts={mounts}",
            f"--container-workdir={container.workdir}", *home, *container.options]  # fmt: skip


def command_prefix(container: Container) -> list[str]:
    """The words in front of a program that run it inside; none where srun does that."""
    if container.runtime == "apptainer":
        words = ["apptainer", "exec"]
        for each in container.mounts:
            words += ["--bind", f"{each.source}:{each.target}{':ro' if each.read_only else ''}"]
        return [*words, "--pwd", container.workdir, *container.options, container.image]
    if container.runtime != "command":
        return []
    words = []
    for word in container.command:
        if word == "{mounts}":
            words += [part for mount in container.mounts for part in _bound(container, mount)]
        else:
            words.append(_filled(word, {"image": container.image, "workdir": container.workdir}))
    return words


def _bound(container: Container, mount: Mount) -> list[str]:
    words = container.bind_read_only if mount.read_only else container.bind
    return [_filled(word, {"source": mount.source, "target": mount.target}) for word in words]


def _filled(word: str, values: Mapping[str, str]) -> str:
    """In one pass: a path may look like a placeholder."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word)


ROOT = "rootfs"


def with_mounts(spec: Mapping[str, Any], container: Container) -> tuple[dict[str, Any], str]:
    """The config.json of an OCI bundle (``spec``) with this container's mounts and working directory, and its root.

    The root must be found as ``ROOT`` beside the new file: Slurm 22.05 looks for it there whatever the file says. The
    old one is relative to the bundle's folder, ``container.image``. Mounts of its own with one of our targets are left
    out, such as its /dev/shm.

    Raises:
        ValueError: it is not a bundle's.
    """
    if not isinstance(spec, dict):
        raise ValueError("it is not an object")
    root, mounts, process = spec.get("root"), spec.get("mounts") or [], spec.get("process") or {}
    if not isinstance(root, dict) or not isinstance(root.get("path"), str):
        raise ValueError("it has no root.path")
    if not isinstance(mounts, list) or not all(isinstance(each, dict) for each in mounts):
        raise ValueError("its mounts are not a list of objects")
    if not isinstance(process, dict):
        raise ValueError("its process is not an object")
    targets = {each.target for each in container.mounts}
    kept = [each for each in mounts if str(each.get("destination", "")).rstrip("/") not in targets]
    added = [
        {"destination": each.target, "type": "bind", "source": each.source,
         "options": ["rbind", "ro" if each.read_only else "rw"]}
        for each in container.mounts
    ]  # fmt: skip
    made = {
        **spec,
        "root": {**root, "path": ROOT},
        "mounts": [*kept, *added],
        "process": {**process, "cwd": container.workdir, "terminal": False},
    }
    return made, posixpath.join(container.image, root["path"])


def starting(container: Container, *, version: str, arguments: Sequence[str]) -> list[str]:
    """The words that run ``python -P -u -m slurmft ARGUMENTS`` inside, after a look at that Python.

    Any Python from 2.7 on can take this look; its errors name the container.
    """
    return [container.python, "-c", LOOK, version, container.name, *arguments]


LOOK = f"""
import os, sys
where = "slurmft: container " + sys.argv[2] + ": "
python = sys.executable + " " + ".".join(map(str, sys.version_info[:3]))
sys.path = [path for path in sys.path if path]
if sys.version_info < {LEAST_PYTHON}:
    least = "{LEAST_PYTHON[0]}.{LEAST_PYTHON[1]}"
    sys.exit(where + "slurmft needs Python " + least + " or newer, and container.python is " + python)
import importlib.metadata, importlib.util, re
try:
    import slurmft
except ImportError as error:
    sys.exit(where + "slurmft cannot be imported by " + python + ": " + str(error))
if slurmft.__version__ != sys.argv[1]:
    sys.exit(where + "it has slurmft " + slurmft.__version__ + ", and the supervisor outside is " + sys.argv[1])
if importlib.util.find_spec("torch") is None:
    sys.exit(where + "there is no torch for " + python)
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = ""
found = re.match(r"(\\d+)[.](\\d+)", torch)
if found and (int(found[1]), int(found[2])) < {LEAST_TORCH}:
    sys.exit(where + "slurmft needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer, and it has " + torch)
if len(sys.argv) > 3:
    os.execv(sys.executable, [sys.executable, "-P", "-u", "-m", "slurmft"] + sys.argv[3:])
try:
    import torch
except Exception as error:
    sys.exit(where + "torch cannot be imported by " + python + ": " + str(error).strip().split("\\n")[-1])
print("Python " + python + ", slurmft " + slurmft.__version__ + ", torch " + torch.__version__)
""".strip()
"""Run by the Python inside. Without arguments for slurmft it imports torch, and says what it has found."""
