"""The command of an agent, inside of the run's container where it has one. srun and plain processes run it alike."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.ipc.zygote_start import as_variable
from slurmft.policy.site import container as policy
from slurmft.policy.site.container import Container
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.system.files import replace_atomically, replace_link
from slurmft.system.opening import read_bytes

_OF_ANOTHER_PYTHON = frozenset({"PYTHONHOME"})
_OF_THE_BATCH_TASK = frozenset({
    "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_TOPOLOGY_ADDR",
})  # fmt: skip
"""Slurm gives ``--container`` no variables of its tasks (seen on 22.05), so that those around srun would be taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How an agent is started."""

    srun_options: tuple[str, ...]
    argv: tuple[str, ...]


def launch_of(config: RunConfig, attempt: Attempt, *, with_srun: bool) -> Launch:
    """The agent's command; the secret's place follows from the attempt, the secret itself is in no argument.

    Args:
        with_srun: srun starts it, so that its options can, too.

    Raises:
        UsageError: only srun could start this container.
        LaunchError: the container's bundle cannot be used.
    """
    arguments = ["agent", str(config.run_folder / "config.yaml"), str(attempt)]
    container = config.contained()
    if container is None:
        return Launch(srun_options=(), argv=(sys.executable, "-P", "-u", "-m", "slurmft", *arguments))
    inner = policy.starting(container, version=importlib.metadata.version("slurmft"), arguments=arguments)
    with contextlib.suppress(OSError):  # the runtime reports a mount whose source is missing
        config.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    if not container.is_started_by_srun:
        return Launch(srun_options=(), argv=(*outside(config, container), *inner))
    if not with_srun:
        raise UsageError(f"container.runtime {container.runtime} is started by srun, and there is none without Slurm",
                         hint="submit to a cluster; on one machine: runtime apptainer or command")  # fmt: skip
    bundle = str(bundle_for(container, RunFolder(config.run_folder).bundle)) if container.runtime == "oci" else ""
    return Launch(srun_options=tuple(policy.srun_options(container, bundle=bundle)), argv=tuple(inner))


def outside(config: RunConfig, container: Container) -> list[str]:
    """The words in front of a command that start it inside and stay outside, with the container's own."""
    local = config.checkpoint.local_directory
    return [sys.executable, "-P", "-u", "-m", "slurmft.agent.container.outside", container.name,
            "" if local is None else str(local), "--", *policy.command_prefix(container)]  # fmt: skip


def bundle_for(container: Container, own: Path) -> Path:
    """A bundle in the folder ``own``: that of the image, with the run's mounts.

    Raises:
        LaunchError: the image is no bundle.
    """
    named = Path(container.image) / "config.json"
    try:
        spec, root = policy.with_mounts(json.loads(read_bytes(named)), container)
        own.mkdir(exist_ok=True)
        replace_link(own / policy.ROOT, root)
        replace_atomically(own / "config.json", json.dumps(spec, indent=1))
    except FileNotFoundError as error:
        raise LaunchError(
            f"container.image {container.image} is no OCI bundle: there is no config.json in it",
            hint="make one (podman export, then crun spec); see docs/how-to/containers.md",
        ) from error
    except (ValueError, OSError) as error:
        raise LaunchError(f"the bundle {container.image} cannot be used: {error}") from error
    return own


def environment_for(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent: in a container without what only concerns the process that starts it.

    Elsewhere with what its zygote needs, which is begun before the agent has read the configuration.
    """
    if config.container.runtime == "none":
        section = config.fault_tolerance
        return {**environment, **as_variable(section.preloaded(config.launcher, config.inference), name=config.name,
                                             per_node=config.nproc_per_node, own=config.environment)}  # fmt: skip
    left_out = _OF_ANOTHER_PYTHON
    left_out |= _OF_THE_BATCH_TASK if config.container.runtime == "oci" else frozenset()
    return {name: value for name, value in environment.items() if name not in left_out}
