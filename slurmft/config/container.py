"""The section ``container`` of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, model_validator

from slurmft.config.types import Folder, Section, Text, Words
from slurmft.policy.site.container import SHARED_MEMORY, STARTED_BY_SRUN, Container, Mount, all_mounts


def _as_mount(value: Any) -> Any:
    """``SOURCE``, ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro`` as its parts."""
    if not isinstance(value, str):
        return value
    parts = value.split(":")
    if len(parts) > 3 or not all(parts) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ValueError(
            f"{value!r} is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro; a path with a colon is given as "
            "{source: ..., target: ...}"
        )
    return {"source": parts[0], "target": parts[1] if len(parts) > 1 else None, "read_only": parts[2:] == ["ro"]}


def _absolute(value: Path) -> Path:
    if not value.is_absolute() or ".." in value.parts:
        raise ValueError(f"{str(value)!r} is a path inside of the container: absolute, and without ..")
    return value


Inside = Annotated[Folder, AfterValidator(_absolute)]
"""A path inside of the container."""


class MountConfig(Section):
    """One path of the nodes that is seen inside."""

    source: Folder
    """The path on the nodes. Relative to where you submit."""

    target: Inside | None = None
    """The path inside; the same when empty."""

    read_only: bool = False
    """Nothing can be written there."""


class ContainerConfig(Section):
    """The container that agents and workers run in. The supervisor, which calls Slurm, runs outside."""

    runtime: Literal["none", "pyxis", "apptainer", "oci", "command"] = "none"
    """none: no container. pyxis: srun's options of that plug-in. apptainer: ``apptainer exec``. oci: Slurm's own
    ``srun --container``. command: any other command (``container.command``)."""

    image: Text | None = None
    """The image: for pyxis a name or a squashfs file, for apptainer a file, folder or address, for oci the folder of a
    bundle; for a command what ``{image}`` stands for."""

    mounts: tuple[Annotated[MountConfig, BeforeValidator(_as_mount)], ...] = ()
    """Paths of the nodes that are seen inside: ``SOURCE``, ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``. The run folder,
    its checkpoints, /dev/shm and the working directory are mounted in any case."""

    workdir: Inside | None = None
    """Where the trainer starts, inside; working_directory, which is mounted for it, when empty."""

    python: Text = "python3"
    """The Python inside, with slurmft (of this version) and torch."""

    options: tuple[Text, ...] = ()
    """More options: of srun for pyxis and oci, of ``apptainer exec`` for apptainer, such as ``--nv``."""

    command: Words = ()
    """With ``runtime: command``: the words that start a program inside of the container; the program follows them.
    ``{mounts}`` stands for the mounts, ``{image}`` and ``{workdir}`` for those settings."""

    bind: Words = ("--bind", "{source}", "{target}")
    """What that command is given for each mount in the place of ``{mounts}``."""

    bind_read_only: Words = ("--ro-bind", "{source}", "{target}")
    """The same for mounts that are read-only."""

    @model_validator(mode="after")
    def _fits_the_runtime(self) -> Self:
        if self.runtime == "none":
            given = sorted(self.model_fields_set - {"runtime", "python"})
            if any(getattr(self, name) for name in given if name not in ("bind", "bind_read_only")):
                raise ValueError(f"{', '.join(given)} without container.runtime")
            return self
        if self.runtime != "command" and self.command:
            raise ValueError(f"container.command is for runtime: command, not {self.runtime}")
        if self.runtime == "command" and not self.command:
            raise ValueError("runtime: command needs container.command")
        if self.runtime == "command" and self.options:
            raise ValueError("with runtime: command further options belong into container.command")
        if self.runtime != "command" and not self.image:
            raise ValueError(f"runtime: {self.runtime} needs container.image")
        return self

    @property
    def is_started_by_srun(self) -> bool:
        """srun's own options start it, so there is no process of ours outside of it."""
        return self.runtime in STARTED_BY_SRUN

    def plan(self, needed: Sequence[Path], working_directory: Path) -> Container | None:
        """The container of a run that needs these paths; None where it has none.

        Raises:
            ValueError: its mounts hide one of them.
        """
        if self.runtime == "none":
            return None
        own = [
            Mount(source=str(each.source), target=str(each.target or each.source), read_only=each.read_only)
            for each in self.mounts
        ]
        paths = [*dict.fromkeys([*map(str, needed), SHARED_MEMORY])]
        return Container(
            runtime=self.runtime,
            image=self.image or "",
            mounts=all_mounts(own, paths, [] if self.workdir else [str(working_directory)]),
            workdir=str(self.workdir or working_directory),
            python=self.python,
            options=self.options,
            command=self.command,
            bind=self.bind,
            bind_read_only=self.bind_read_only,
        )
