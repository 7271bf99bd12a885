"""A trial of a run's container for ``slurmft doctor``: its image, its mounts, and the Python inside."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.errors import LaunchError, SlurmError
from slurmft.policy.site.container import Container, command_prefix, srun_options, starting
from slurmft.policy.site.doctor import ContainerFacts
from slurmft.scheduler import containers
from slurmft.supervisor.fleet.launch import bundle_for

TRIAL_S = 300.0
"""An image may have to be loaded first."""


def look_at_container(config: RunConfig, environment: Mapping[str, str]) -> ContainerFacts | None:
    """What this machine can say of the run's container; None where it has none. Leaves nothing behind."""
    container = config.contained()
    if container is None:
        return None
    starter, has_starter = _starter(container)
    image = _path_of_image(container)
    own = [str(each.source) for each in config.container.mounts]
    facts = ContainerFacts(
        name=container.name, runtime=container.runtime, starter=starter, has_starter=has_starter,
        image="" if image is None else str(image), has_image=image is None or image.exists(),
        missing_mounts=tuple(path for path in own if not Path(path).exists()),
    )  # fmt: skip
    if not facts.has_starter or not facts.has_image or facts.missing_mounts:
        return facts
    # nothing of the run is made yet, and the trial makes nothing
    there = tuple(each for each in container.mounts if Path(each.source).exists())
    workdir = container.workdir if config.container.workdir or Path(container.workdir).is_dir() else "/"
    trial = replace(container, mounts=there, workdir=workdir)
    look = starting(trial, version=importlib.metadata.version("slurmft"), arguments=())
    if not container.is_started_by_srun:
        return _tried(facts, [*command_prefix(trial), *look], environment)
    if "SLURM_JOB_ID" not in environment:
        return replace(facts, to_try=containers.TRY_ON_A_NODE)
    return _tried_by_srun(facts, config, trial, look)


def _starter(container: Container) -> tuple[str, bool]:
    if container.is_started_by_srun:
        option = "--container-image" if container.runtime == "pyxis" else "--container"
        try:
            return option, containers.srun_knows(option)
        except SlurmError:
            return option, False
    program = command_prefix(container)[0]
    return program, shutil.which(program) is not None


def _path_of_image(container: Container) -> Path | None:
    """Where the image is a file or a folder; None where it is an address, or anything that a command makes of it."""
    if container.runtime == "oci":
        return Path(container.image) / "config.json"
    is_path = container.image.startswith(("/", "./", "../", "~"))
    return Path(container.image).expanduser() if is_path else None


def _tried_by_srun(facts: ContainerFacts, config: RunConfig, trial: Container, look: Sequence[str]) -> ContainerFacts:
    there = next(each for each in config.run_folder.parents if each.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".slurmft-doctor-", dir=there) as folder:
            bundle = str(bundle_for(trial, Path(folder))) if trial.runtime == "oci" else ""
            options = [*config.slurm.srun_args, *srun_options(trial, bundle=bundle)]
            return _judged(facts, 0, containers.run_inside(options, look, timeout_s=TRIAL_S), "")
    except (SlurmError, LaunchError) as error:
        return _judged(facts, 1, "", error.what.replace(" slurmft: container ", "\nslurmft: container "))
    except OSError as error:
        return replace(facts, error=f"container {facts.name}: no bundle can be made in {there}: {error.strerror}")


def _tried(facts: ContainerFacts, argv: Sequence[str], environment: Mapping[str, str]) -> ContainerFacts:
    kept = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=TRIAL_S, check=False,
                              stdin=subprocess.DEVNULL, env=kept)  # fmt: skip
    except subprocess.TimeoutExpired:
        return replace(facts, error=f"container {facts.name}: its Python has not ended within {TRIAL_S:.0f} s")
    except OSError as error:
        return replace(facts, error=f"container {facts.name}: {argv[0]} cannot be started: {error.strerror}")
    return _judged(facts, done.returncode, done.stdout, done.stderr)


def _judged(facts: ContainerFacts, code: int, output: str, errors: str) -> ContainerFacts:
    """By what the look at Python (``policy.site.container``) has said, and else by the runtime's last words."""
    if code == 0 and (said := [line for line in output.splitlines() if line.startswith("Python ")]):
        return replace(facts, tried=said[-1])
    lines = [line for line in errors.splitlines() if line.strip()]
    own = [line.removeprefix("slurmft: ") for line in lines if line.startswith("slurmft: container ")]
    words = lines[-1] if lines else f"exit code {code}"
    return replace(facts, error=(own[0] if own else f"container {facts.name}: {words}")[:600])
