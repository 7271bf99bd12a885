"""YAML to frozen, validated settings. The only home of yaml.

Every section is one model; every field has its meaning beside it. A typo costs one second on the login node, not two
hours in the queue: unknown keys are refused with the nearest known one, and all problems are reported at once.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from slurmft.errors import ConfigError
from slurmft.policy.exit_actions import ExitAction, parse_codes
from slurmft.policy.sbatch_options import OWNED_OPTIONS, SBATCH_OPTIONS

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]
"""A string that YAML may have read as a number."""


def _as_argv(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1:30:00 is a time and not 5400, ``no`` and 010 are what they look like (YAML 1.2)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), [*"-+0123456789"])
# fractions stay text until the field that takes them is known: 1.50 may be the name of a partition


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SlurmConfig(_Section):
    """sbatch's long options with ``_`` for ``-``; any option of sbatch's manual page may be given."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    partition: Text | None = None
    """Partition to submit to; the cluster's default when empty."""

    time: Text | None = None
    """Time limit as sbatch reads it: minutes, ``"H:MM:SS"`` or ``"D-HH:MM:SS"``."""

    account: Text | None = None
    """Account to charge."""

    qos: Text | None = None
    """Quality of service."""

    cpus_per_task: int | None = Field(default=None, ge=1)
    """CPUs of each node's agent, shared by its workers."""

    gpus_per_node: Text | None = None
    """GPUs on each node, as a number or ``type:number``."""

    mem: Text | None = None
    """Memory of each node, such as ``64G``; ``0`` asks for all of it."""

    constraint: Text | None = None
    """Node features."""

    exclude: Text | None = None
    """Nodes never to run on (a hostlist); the exclusion list is added to it."""

    job_name: Text | None = None
    """Name in squeue; the run's name when empty."""

    output: Text | None = None
    """Log of the batch script; in the run folder when empty."""

    requeue: bool = True
    """Let Slurm restart the job (``--requeue``)."""

    no_kill: bool = False
    """Keep the allocation when one of its nodes dies (``--no-kill``)."""

    srun_args: tuple[str, ...] = ()
    """More options for the ``srun`` that starts the agents, such as ``--mpi=none``."""


class CheckpointConfig(_Section):
    """When and where checkpoints are written."""

    directory: Path | None = None
    """Folder of the checkpoints; ``checkpoints`` in the run folder when empty. Must be shared by all nodes."""

    interval_steps: int = Field(default=100, ge=0)
    """Steps between two periodic checkpoints; 0 saves only at stops and at the end."""


class FaultToleranceConfig(_Section):
    """What may go wrong, how often, and for how long."""

    num_job_retries_on_failure: int = Field(default=2, ge=0)
    """Restarts of the job after failures, counted anew whenever the run has made progress in between."""

    max_no_progress_cycles: int = Field(default=3, ge=1)
    """Time limits in a row without one new step before the run is given up with exit code 93."""

    launch_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until every agent must have reported."""

    supervisor_lease_s: float = Field(default=60.0, gt=0)
    """Seconds an agent keeps its workers running without hearing from the supervisor (fencing)."""

    preload: bool = True
    """Fork workers from a process that has torch imported already. Off: every worker starts its own interpreter."""


class PreemptionConfig(_Section):
    """What happens when Slurm asks for a stop."""

    signal: Literal["SIGTERM", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """Signal of ``sbatch --signal``. A preemption sends SIGTERM in any case, so SIGTERM is always obeyed too."""

    signal_lead_s: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which Slurm sends the signal; up to 30 s earlier."""

    continue_by: Literal["auto", "requeue", "resubmit", "nothing"] = "auto"
    """How the run continues: requeue this job, submit a successor, or only say how. auto: requeue, else resubmit."""

    requeue_delay_s: int = Field(default=2, ge=1, le=600)
    """Begin time of a requeued job, seconds from now. It must lie after the end of the job's processes and epilog:
    a shorter one falls back to Slurm's own 121 s."""

    stop_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the save of a stop that has no deadline of its own (``slurmft stop``, a signal by hand)."""


class NcclConfig(_Section):
    """Process groups, their timeouts, and the flight recorder. Holds for gloo as well."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl where the worker has a GPU, else gloo."""

    init_timeout_minutes: float = Field(default=30.0, gt=0)
    """Collective timeout until the first step of the process is done (start-up, compilation, first load)."""

    step_timeout_minutes: float = Field(default=10.0, gt=0)
    """Collective timeout afterwards."""

    flight_recorder_buffer_size: int = Field(default=2000, ge=0)
    """Collectives that torch's flight recorder remembers; 0 switches it off."""


class RunConfig(_Section):
    """One run: what to train, where, and how it survives."""

    command: Annotated[tuple[Text, ...], BeforeValidator(_as_argv), Field(min_length=1)]
    """The trainer: a list of arguments, or one string that is split like a shell would, without running one."""

    run_folder: Path
    """Folder of this run on the shared filesystem; its last part is the run's name. Relative to where you submit."""

    nodes: int = Field(default=1, ge=1)
    """Nodes to train on."""

    nproc_per_node: int = Field(default=1, ge=1)
    """Workers on each node: one per GPU."""

    environment: dict[str, Text] = Field(default_factory=dict)
    """Variables added to every worker's environment. Not for secrets: they are stored in the run folder."""

    working_directory: Path | None = None
    """Where the trainer starts; where you submit when empty."""

    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig)
    preemption: PreemptionConfig = Field(default_factory=PreemptionConfig)
    nccl: NcclConfig = Field(default_factory=NcclConfig)

    exit_actions: dict[ExitAction, Text] = Field(default_factory=dict)
    """The trainer's own exit codes: ``{COMPLETE: "0", RESCHEDULE: "11-20", FAIL: "17"}``; beats the defaults."""

    @field_validator("exit_actions")
    @classmethod
    def _codes_are_readable(cls, value: dict[ExitAction, str]) -> dict[ExitAction, str]:
        seen: dict[int, ExitAction] = {}
        for action, codes in value.items():
            for code in parse_codes(codes):
                if seen.setdefault(code, action) is not action:
                    raise ValueError(f"exit code {code} is in both {seen[code]} and {action}")
        return value

    @field_validator("environment")
    @classmethod
    def _names_are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        return value

    @property
    def name(self) -> str:
        """The run's name: the last part of its folder."""
        return self.run_folder.name

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.nproc_per_node

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints live."""
        return self.checkpoint.directory or self.run_folder / "checkpoints"

    def as_yaml(self) -> str:
        """The settings as a file that ``load`` reads back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path``, apply ``key.sub=value`` overrides, validate, and make every path absolute.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known one.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}", hint="see configs/quickstart.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold keys and values", hint="see configs/reference.yaml")
    for override in overrides:
        _apply(raw, override)
    return _absolute(validate(raw, source=str(path)), Path.cwd())


def validate(raw: Mapping[str, Any], *, source: str) -> RunConfig:
    """Validate plain values; ``source`` names them in errors.

    Raises:
        ConfigError: one line for each problem.
    """
    problems = _unknown_sbatch_options(raw.get("slurm"))
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        problems += [_problem(detail) for detail in error.errors()]
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{source}: {count}\n{lines}", hint="configs/reference.yaml documents every key")
    return config


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def _unknown_sbatch_options(section: Any) -> list[str]:
    if not isinstance(section, Mapping):
        return []
    problems = []
    known = [name.replace("-", "_") for name in SBATCH_OPTIONS] + list(SlurmConfig.model_fields)
    for key in section:
        option = str(key).replace("_", "-")
        if key in SlurmConfig.model_fields:
            continue
        if option in OWNED_OPTIONS:
            problems.append(f"slurm.{key} is set by slurmft: {OWNED_OPTIONS[option]}")
        elif option not in SBATCH_OPTIONS:
            problems.append(f"slurm.{key} is not an option of sbatch{_did_you_mean(str(key), known)}")
    return problems


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} is not of the form key.sub=value")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from error
    *parents, last = key.split(".")
    target = raw
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent} is a value, not a section")
        target = child
    target[last] = value


def _problem(detail: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {where}{_did_you_mean(str(detail['loc'][-1]), _known_keys(detail['loc'][:-1]))}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{where}: missing; it has no default"
    return f"{where}: {message}" if where and not message.startswith(where) else message


def _known_keys(section: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in section:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)


def _did_you_mean(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _absolute(config: RunConfig, base: Path) -> RunConfig:
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else Path(os.path.abspath(base / path.expanduser()))  # noqa: PTH100 - keeps links

    checkpoint = config.checkpoint.model_copy(update={"directory": absolute(config.checkpoint.directory)})
    return config.model_copy(
        update={
            "run_folder": absolute(config.run_folder),
            "working_directory": absolute(config.working_directory or Path()),
            "checkpoint": checkpoint,
        }
    )
