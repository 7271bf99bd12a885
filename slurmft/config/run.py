"""YAML to frozen, validated settings.

Every section is one model; every field has its meaning beside it. A typo costs one second on the login node, not two
hours in the queue: unknown keys are refused with the nearest known one, and all problems are reported at once.
For any file ``load`` returns settings that can be written down and read back, or raises a ConfigError.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from slurmft.config import base as config_base
from slurmft.config.base import Count, Folder, Text, Words, section_of
from slurmft.config.base import Section as _Section
from slurmft.config.inference import STANDARD_INPUT, InferenceConfig, ServingConfig, TrialsConfig
from slurmft.config.sections import (
    CheckpointConfig,
    ContainerConfig,
    DigestsConfig,
    ElasticConfig,
    ExclusionsConfig,
    FaultToleranceConfig,
    MetricsConfig,
    NcclConfig,
    NoticesConfig,
    NotifyConfig,
    OomConfig,
    PreemptionConfig,
    RerunConfig,
    SlurmConfig,
    StragglerDetectionConfig,
    SyncConfig,
)
from slurmft.config.sections import problem_of as sync_problem_of
from slurmft.errors import ConfigError
from slurmft.policy import sbatch
from slurmft.policy import values as plain
from slurmft.policy.container import Container, problem_of
from slurmft.policy.decide import Size
from slurmft.policy.sbatch import second_owner, unknown_options
from slurmft.policy.verdict import ExitAction, lists_as_texts, unambiguous
from slurmft.system.files import UnsafeFile, read_bytes, read_pipe

MAX_FILE_BYTES = 1024 * 1024
PIPE_S = 8.0
"""How long a configuration may take to come out of a pipe."""

MAX_NODES, MAX_NPROC_PER_NODE = 65_536, 1024
"""More than any cluster has; on one machine a slip of the finger would start a million processes."""

log = logging.getLogger(__name__)

RoleName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""A folder, and part of a variable's name."""

Own = TypeVar("Own", bound=BaseModel)
"""A section that has a file of its own."""


class RunConfig(_Section):
    """One run: what to train, where, and how it survives."""

    command: Words = ()
    """The trainer: a list of arguments, or one string that is split like a shell would, without running one. Needed,
    unless there is a section ``inference``."""

    run_folder: Annotated[Path, BeforeValidator(plain.usable_run_folder)]
    """Folder of this run on the shared filesystem; its last part is the run's name. Relative to where you submit."""

    nodes: Annotated[Count, AfterValidator(plain.at_most(MAX_NODES))] = Field(default=1, ge=1)
    """Nodes to train on."""

    spare_nodes: Annotated[Count, AfterValidator(plain.at_most(MAX_NODES))] = Field(default=0, ge=0)
    """Nodes allocated beyond those, agent and torch warm: one takes over where a node is lost or suspected."""

    spares: Literal["import", "rehearse"] = "import"
    """What a spare does while it waits: it imports torch; or it also runs the trainer for two steps in a world of its
    own, so that compiled kernels are in its node's caches. For trainers with ``session.steps`` or an integration."""

    nproc_per_node: Annotated[Count, AfterValidator(plain.at_most(MAX_NPROC_PER_NODE))] = Field(default=1, ge=1)
    """Workers on each node: one per GPU."""

    launcher: Literal["agent", "torchrun", "ray"] = "agent"
    """What starts the workers of a node: slurmft's agent, or torch's own elastic agent under it. Stops, checkpoints,
    verdicts and restarts are slurmft's either way; without torchrun a restart is faster. ray: the nodes become a Ray
    cluster, and the command runs once, on the first of them."""

    environment: dict[str, Text] = Field(default_factory=dict)
    """Variables added to every worker's environment. Not for secrets: they are stored in the run folder."""

    working_directory: Folder | None = None
    """Where the trainer starts; where you submit when empty."""

    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    container: ContainerConfig = Field(default_factory=ContainerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    fault_tolerance: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig)
    preemption: PreemptionConfig = Field(default_factory=PreemptionConfig)
    nccl: NcclConfig = Field(default_factory=NcclConfig)
    oom: OomConfig = Field(default_factory=OomConfig)
    notices: NoticesConfig = Field(default_factory=NoticesConfig)
    rerun: RerunConfig = Field(default_factory=RerunConfig)
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    exclusions: ExclusionsConfig = Field(default_factory=ExclusionsConfig)
    straggler_detection: StragglerDetectionConfig = Field(default_factory=StragglerDetectionConfig)
    digests: DigestsConfig = Field(default_factory=DigestsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    notify: NotifyConfig = Field(default_factory=NotifyConfig)

    sync: tuple[SyncConfig, ...] = ()
    """Folders of the nodes that are kept elsewhere, for scripts that save by themselves: restored before the workers
    start, uploaded every ``frequency`` and when they have ended. See docs/how-to/scripts-that-cannot-change.md."""

    inference: InferenceConfig | None = None
    """Answer a batch of requests instead of training; ``slurmft infer`` submits it."""

    trials: TrialsConfig | None = None
    """Run ``command`` once for each trial of a sweep instead of training; ``slurmft trials`` submits it."""

    roles: dict[RoleName, dict[str, Any]] = Field(default_factory=dict)
    """Several parts in one job, each a run of its own on its own nodes: ``{trainer: {command: ...}, rollout: {engine:
    ...}}``. A role has the keys of a configuration, and ``needs`` and ``ends_run``; ``slurm`` says what nodes it asks
    for, where they are others than the job's. See docs/how-to/roles.md."""

    ignore_nonlead_status: bool = False
    """Only rank 0's end counts: other ranks may fail without ending or restarting anything. false: any rank's failure
    restarts all."""

    exit_actions: Annotated[
        dict[ExitAction, Text], BeforeValidator(lists_as_texts), AfterValidator(unambiguous)
    ] = Field(default_factory=dict)  # fmt: skip
    """The trainer's own exit codes: ``{COMPLETE: "0", RESCHEDULE: "11-20", FAIL: "17"}``; beats the defaults. COMPLETE
    counts for workers without a session also when a stop was asked for by another signal than SIGTERM."""

    @field_validator("command")
    @classmethod
    def _program_is_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and not value[0].strip():
            raise ValueError("its first word, the program, is empty")
        if value and (why := second_owner(value)):
            raise ValueError(why)
        return value

    @field_validator("environment")
    @classmethod
    def _names_are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        return value

    @model_validator(mode="after")
    def _has_one_task(self) -> Self:
        if self.roles:
            if self.command or self.inference is not None:
                raise ValueError("roles: a run with roles has no command or inference of its own")
            if of_no_use := [name for name in RunConfig.model_fields if name not in OF_RUN and self._says(name)]:
                raise ValueError("; ".join(map(_of_no_use, of_no_use)))
            return self
        if self.trials is not None:
            if self.inference is not None:
                raise ValueError("trials: a run with a section inference has none; remove one of the two")
            if bool(self.command) == bool(self.trials.callable):
                raise ValueError("trials: give one of command and trials.callable, which runs once for each trial")
            return self
        if self.inference is None and not self.command:
            raise ValueError("command: missing; it has no default (a run without a trainer has a section inference)")
        if self.inference is not None and self.command:
            raise ValueError("command: a run with a section inference has no trainer; remove one of the two")
        return self

    def _says(self, name: str) -> bool:
        """Whether a key has another value than its default: a stored configuration has all keys."""
        return bool(getattr(self, name) != RunConfig.model_fields[name].get_default(call_default_factory=True))

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.launcher == "ray" and self.nproc_per_node != 1:
            raise ValueError("nproc_per_node: must be 1 with launcher: ray, which starts workers as the command asks")
        if self.spares == "rehearse" and (self.launcher != "agent" or self.inference is not None):
            raise ValueError("spares: rehearse needs a trainer that is started by slurmft's agent (launcher: agent)")
        self.elastic.size(self.nodes)
        if 0 < self.nodes <= (copies := self.checkpoint.peer_copies):
            raise ValueError(f"checkpoint.peer_copies={copies} needs more than {copies} nodes; nodes={self.nodes}")
        if self.inference is not None and self.inference.serving is not None:
            scaled, places = self.inference.serving.replicas, self.inference.replicas_on(self.size.maximum)
            for name, value in (("min", scaled.min), ("max", scaled.max)):
                if value is not None and value > places:
                    raise ValueError(
                        f"inference.serving.replicas.{name} ({value}) is above replicas_per_node times nodes, or times "
                        f"elastic.max_nodes ({places})"
                    )
        if self.inference is not None and self.nodes % self.inference.engine.nodes:
            raise ValueError(f"nodes ({self.nodes}) is no multiple of inference.engine.nodes "
                             f"({self.inference.engine.nodes}); nodes in reserve are spare_nodes")  # fmt: skip
        if self.sync and self.inference is not None:
            raise ValueError("sync: it is for trainers; a run with a section inference keeps its answers itself")
        if problem := sync_problem_of(self.sync, str(self.run_folder), tuple(self.environment)):
            raise ValueError(problem)
        return self

    @property
    def size(self) -> Size:
        """How many nodes it may train on."""
        return self.elastic.size(self.nodes)

    @property
    def nodes_range(self) -> str:
        """What ``--nodes`` asks for where the job may start with fewer; empty where it may not.

        Seen on 22.05: such a job starts on what is free, keeps its range through a requeue, and never grows in between.
        """
        most = self.nodes + self.spare_nodes
        return f"{self.size.minimum}-{most}" if self.elastic.start_with_fewer else ""

    @property
    def serving(self) -> ServingConfig | None:
        """What makes it an endpoint, which answers requests until it is stopped; None where it is none."""
        return None if self.inference is None else self.inference.serving

    @property
    def survives_nodes(self) -> bool:
        """Whether the allocation outlives one of its nodes (``--no-kill``): the run can go on without it."""
        return self.slurm.no_kill or self.spare_nodes > 0 or self.size.is_elastic or self.inference is not None

    @property
    def name(self) -> str:
        """The run's name: the last part of its folder."""
        return self.run_folder.name

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.nproc_per_node

    @property
    def workload(self) -> dict[str, Any]:
        """What the speed of its training depends on, and not where, when or how long it is."""
        return {
            "command": self.command, "nodes": self.nodes, "nproc_per_node": self.nproc_per_node,
            "environment": self.environment, "working_directory": self.working_directory,
        }  # fmt: skip

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints live."""
        return self.checkpoint.directory or self.run_folder / "checkpoints"

    @property
    def trainer_directory(self) -> Path:
        """Where the trainer starts, inside of its container."""
        return self.container.workdir or self.working_directory or Path.cwd()

    def contained(self) -> Container | None:
        """The container of its agents and workers; None where there is none.

        Raises:
            ValueError: the container cannot show the run what it needs.
        """
        needed = filter(None, [self.run_folder, self.checkpoint_dir, self.checkpoint.local_directory])
        found = self.container.plan([*needed], self.working_directory or Path.cwd())
        if found is not None and (problem := problem_of(found)):
            raise ValueError(problem)
        return found

    def placed_in(self, folder: Path) -> Self:
        """The same run in ``folder``: paths inside of the run folder move there."""
        directory = self.checkpoint.directory
        if directory is not None and directory.is_relative_to(self.run_folder):
            directory = folder / directory.relative_to(self.run_folder)
        checkpoint = self.checkpoint.model_copy(update={"directory": directory})
        return self.model_copy(update={"run_folder": folder, "checkpoint": checkpoint})

    def as_yaml(self) -> str:
        """The settings as a file that ``load`` reads back to an equal value."""
        follows = {"inference"} if self.trials is not None else {"nodes"} if self.roles else None  # from these sections
        return config_base.written(self.model_dump(mode="json", exclude_none=True, exclude=follows))


KnownHere = Callable[[frozenset[str]], Collection[str]]
"""Which of these options of sbatch, that are in no list of ours, may be given all the same."""


def none_of_them(options: frozenset[str]) -> frozenset[str]:
    """``KnownHere`` where there is no Slurm to ask."""
    return options & frozenset()


def load(path: Path, overrides: Sequence[str] = (), *, known_here: KnownHere = none_of_them) -> RunConfig:
    """Read ``path``, apply ``key.sub=value`` overrides, validate, and make every path absolute.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known one.
    """
    return from_values(read(path), overrides, source=str(path), known_here=known_here)


def from_values(
    raw: dict[str, Any], overrides: Sequence[str] = (), *, source: str, known_here: KnownHere = none_of_them
) -> RunConfig:
    """As ``load``, from plain values that ``source`` names in errors.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known one.
    """
    for override in overrides:
        _apply(raw, override)
    source = " ".join([source, *(f"--set {plain.shown(override)}" for override in overrides)])
    config = _absolute(validate(raw, source=source, known_here=known_here), source=source)
    config = _with_roles(_with_trials(config))
    if problem := sync_problem_of(config.sync, str(config.run_folder), ()):
        raise ConfigError(f"{source}: {problem}")
    try:
        config.contained()
    except ValueError as error:
        raise ConfigError(f"{source}: container.{error}", hint="see docs/how-to/containers.md") from error
    return config


def _with_trials(config: RunConfig) -> RunConfig:
    """A sweep as the batch of requests that it is, on as many nodes as its jobs have."""
    if (trials := config.trials) is None:
        return config
    nodes = config.nodes if "nodes" in config.model_fields_set else trials.nodes
    if nodes % trials.nodes:
        raise ConfigError(f"trials: nodes ({nodes}) is no multiple of trials.nodes ({trials.nodes})",
                          hint="without nodes the run's own job has as many as one trial")  # fmt: skip
    most = max(config.elastic.max_nodes or 0, nodes + (trials.max_jobs - 1) * trials.nodes)
    update = {"nodes": nodes, "inference": trials.as_inference(config.command, config.run_folder),
              "elastic": config.elastic.model_copy(update={"max_nodes": most})}  # fmt: skip
    return config.model_copy(update=update)


def read(path: Path) -> dict[str, Any]:
    """The plain keys and values of a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    raw = config_base.parsed(_text_of(path), of=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold keys and values", hint="slurmft examples reference.yaml")
    return raw


def load_section(path: Path | None, model: type[Own], overrides: Sequence[str] = ()) -> Own:
    """Read a file that holds one section by itself, such as health.yaml, and apply ``key.sub=value`` overrides.

    Without a file the section has its defaults.

    Raises:
        ConfigError: names every wrong key at once, with the nearest known one.
    """
    raw = {} if path is None else config_base.parsed(_text_of(path), of=str(path)) or {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold keys and values")
    for override in overrides:
        _apply(raw, override)
    source = "the command line" if path is None else str(path)
    given, problems = _given(raw, source)
    return _made(model, given, problems, source)


def _given(raw: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """The keys that have a value, and what is wrong with values whatever their keys are."""
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        return given, list(plain.unusable(given))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}", hint="look at its aliases (*name)") from error


def _made(model: type[Own], given: Mapping[str, Any], problems: list[str], source: str, hint: str = "") -> Own:
    try:
        section = model.model_validate(given)
    except ValidationError as error:
        problems += [_problem(detail, model) for detail in error.errors(include_input=False, include_url=False)]
    if problems:
        raise ConfigError(f"{source}: {plain.as_text(problems)}", hint=hint)
    return section


def _with_all_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that were not given, empty: their defaults, without the validator that each would build for itself."""
    kinds = {name: field.default_factory for name, field in RunConfig.model_fields.items()}
    sections = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, _Section)]
    return {**{name: {} for name in sections}, **given}


def validate(raw: Mapping[str, Any], *, source: str, known_here: KnownHere = none_of_them) -> RunConfig:
    """Validate plain values; ``source`` names them in errors.

    Raises:
        ConfigError: one line for each problem.
    """
    given, problems = _given(raw, source)
    try:
        given, lines = sbatch.ours(given)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    for line in lines:
        log.warning("%s: %s", source, line)
    problems += unknown_options(given.get("slurm"), list(SlurmConfig.model_fields), known_here)
    hint = "every key: slurmft examples reference.yaml"
    return _made(RunConfig, _with_all_sections(given), problems, source, hint)


# --- roles ---

SHARED = ("environment", "working_directory", "container", "fault_tolerance", "nccl", "oom", "notices", "rerun",
          "exclusions", "straggler_detection", "notify")  # fmt: skip
"""Keys of a run with roles that are those of each role as well, where that says nothing else."""

OF_RUN = frozenset({*SHARED, "run_folder", "nodes", "slurm", "preemption", "metrics", "roles"})
"""Keys that a run with roles may have itself."""

NOT_OF_ROLES = frozenset({"run_folder", "roles", "trials", "elastic", "spare_nodes"})
"""Keys that a role may not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One part of a job."""

    name: str
    config: RunConfig
    nodes: int
    """Nodes of its own; 0: it is on the first node of the job, beside another one."""

    needs: tuple[str, ...]
    """Roles that must be ready before it begins."""

    ends_run: bool
    """The run ends when it, and all others that have this, have finished."""

    node_options: Mapping[str, Any]
    """sbatch's options that describe its nodes, where they are others than the run's."""

    component: int = 0
    """Of a heterogeneous job: its nodes are in that one."""

    @property
    def is_endpoint(self) -> bool:
        """Whether it answers requests until it is stopped."""
        return self.config.serving is not None


def _of_no_use(name: str) -> str:
    remedy = "leave it out" if name in NOT_OF_ROLES else f"give it to the role that it is for (roles.NAME.{name})"
    return f"{name}: of no use next to roles; {remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Alike nodes of a job; a job of several components is a heterogeneous one."""

    nodes: int
    options: Mapping[str, Any]
    """sbatch's options in which it differs from what the run itself asks for."""


def components_of(config: RunConfig) -> list[Component]:
    """The components of the run's job, the one with its batch script first; a single one without roles that differ."""
    nodes: dict[int, int] = {}
    options: dict[int, Mapping[str, Any]] = {}
    for role in roles_of(config):
        nodes[role.component] = nodes.get(role.component, 0) + role.nodes
        if role.nodes:
            options[role.component] = role.node_options
    if len(nodes) < 2:
        return [Component(nodes=config.nodes + config.spare_nodes, options=options.get(0, {}))]
    return [Component(nodes=nodes[number], options=options[number]) for number in sorted(nodes)]


def partitions_of(config: RunConfig, partition: str) -> str:
    """The partitions of all components, with commas between them; of those that name none it is ``partition``."""
    return ",".join(dict.fromkeys(str(each.options.get("partition", partition)) for each in components_of(config)))


def roles_of(config: RunConfig) -> list[Role]:
    """The roles of a run in the order in which they get nodes: by their components, then by their names.

    Raises:
        ConfigError: one of them is no configuration, or needs what there is not.
    """
    given = config.model_dump(mode="json", exclude_unset=True, include=set(SHARED))
    roles = [_role(config, name, values, given) for name, values in sorted(config.roles.items())]
    if roles and not any(role.ends_run for role in roles):
        raise ConfigError(f"{config.name}: roles: all of them are endpoints, so that the run would never end",
                          hint="give one a command, or submit an endpoint without roles")  # fmt: skip
    by_variable: dict[str, str] = {}
    for role in roles:
        other = by_variable.setdefault(role.name.replace("-", "_"), role.name)
        if other != role.name:
            raise ConfigError(f"{config.name}: roles: {other} and {role.name} would share the names of variables")
    names, ready = {role.name for role in roles}, set[str]()
    for role in roles:
        if unknown := set(role.needs) - names:
            raise ConfigError(f"{config.name}: roles.{role.name}.needs: there is no role {', '.join(sorted(unknown))}")
    while waiting := [role for role in roles if role.name not in ready]:
        able = {role.name for role in waiting if set(role.needs) <= ready}
        if not able:
            circle = ", ".join(role.name for role in waiting)
            raise ConfigError(f"{config.name}: roles: {circle} wait for each other (needs), and none would begin")
        ready |= able
    return _in_components(roles)


def _in_components(roles: Sequence[Role]) -> list[Role]:
    """Those that ask for nothing of their own are in the first one, unless none of them has nodes."""
    kinds: list[Mapping[str, Any]] = []
    for role in sorted(roles, key=lambda role: bool(role.node_options)):
        if role.nodes and role.node_options not in kinds:
            kinds.append(role.node_options)
    placed = [replace(each, component=kinds.index(each.node_options) if each.nodes else 0) for each in roles]
    return sorted(placed, key=lambda role: (role.component, role.name))


def _role(config: RunConfig, name: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> Role:
    source = f"roles.{name}"
    own = {key: value for key, value in values.items() if value is not None}  # a key without a value: not given
    needs, ends_run, nodes = own.pop("needs", []), own.pop("ends_run", None), own.pop("nodes", 1)
    if refused := NOT_OF_ROLES & set(own):
        raise ConfigError(
            f"{source}.{min(refused)}: not of a role: it belongs to the whole job, or to a run of its own"
        )
    if not isinstance(needs, list) or not all(isinstance(each, str) for each in needs):
        raise ConfigError(f"{source}.needs: a list of names of roles")
    if ends_run not in (None, True, False) or not str(nodes).isdecimal():
        raise ConfigError(f"{source}: ends_run is true or false, and nodes a number")
    if isinstance(asked := own.get("slurm"), Mapping):
        if strange := {plain.shown(key) for key in asked if str(key).replace("_", "-") not in sbatch.NODE_OPTIONS}:
            raise ConfigError(f"{source}.slurm.{min(strange)}: not of a role, whose slurm says what nodes it has: "
                              "partition, constraint, gres, gpus_per_node, mem, cpus_per_task")  # fmt: skip
        if asked and not int(nodes):
            raise ConfigError(f"{source}.slurm: it has no nodes of its own (nodes: 0)")
    if (engine := own.pop("engine", None)) is not None:
        wanted, places = str(own.pop("replicas", 0)), max(1, int(nodes))
        replicas = int(wanted) if wanted.isdecimal() else -1
        if replicas < 0 or replicas % places:
            raise ConfigError(f"{source}.replicas: {wanted} is no multiple of its nodes ({places})")
        own["inference"] = {"engine": engine, "serving": own.pop("serving", {}),
                            **({"replicas_per_node": replicas // places} if replicas else {})}  # fmt: skip
    for key, value in given.items():
        mine = own.get(key, {} if isinstance(value, dict) else value)
        own[key] = {**value, **mine} if isinstance(value, dict) and isinstance(mine, dict) else mine
    if isinstance(mine := own.get("preemption", {}), dict):
        own["preemption"] = {
            **config.preemption.model_dump(mode="json", exclude_unset=True), **mine, "continue_by": "job"
        }  # fmt: skip
    own |= {"run_folder": str(config.run_folder / "roles" / name), "nodes": max(1, int(nodes))}
    child = from_values(own, source=source, known_here=lambda options: options)
    return Role(
        name=name, config=child, nodes=int(nodes), needs=tuple(needs),
        ends_run=child.serving is None if ends_run is None else bool(ends_run),
        node_options=child.slurm.node_options(),
    )  # fmt: skip


def _with_roles(config: RunConfig) -> RunConfig:
    """A run on as many nodes as its roles have together."""
    if not config.roles:
        return config
    nodes = max(1, sum(role.nodes for role in roles_of(config)))
    if "nodes" in config.model_fields_set and config.nodes != nodes:
        raise ConfigError(f"{config.name}: nodes ({config.nodes}) is not the sum of its roles' ({nodes}); leave it out")
    config = config.model_copy(update={"nodes": nodes})
    if len(components_of(config)) > 1:
        _refuse_in_components(config)
    return config


def _refuse_in_components(config: RunConfig) -> None:
    named = config.slurm.model_extra or {}
    refused = {
        "slurm.no_kill": (config.slurm.no_kill, "Slurm never starts such a job again once one of its nodes has died"),
        "slurm.nodelist": ("nodelist" in named, "the components cannot share nodes; name them in slurm of the roles"),
        "slurm.nodefile": ("nodefile" in named, "the components cannot share nodes; name them in slurm of the roles"),
    }
    for key, (is_given, why) in refused.items():
        if is_given:
            raise ConfigError(f"{config.name}: {key} does not go with roles that have slurm of their own: {why}")


def _text_of(path: Path) -> str:
    try:
        # a pipe of the shell's, but no named pipe in a folder
        if str(path).startswith(("/dev/", "/proc/")) and path.is_fifo():
            return read_pipe(path, limit_bytes=MAX_FILE_BYTES, within_s=PIPE_S).decode()
        return read_bytes(path, limit_bytes=MAX_FILE_BYTES).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {path}", hint="slurmft init SCRIPT writes one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnsafeFile as error:
        raise ConfigError(f"cannot read {path}: it {error.strerror}", hint="give the path of a YAML file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}", hint="give the path of a YAML file") from error


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} is not of the form key.sub=value")
    value = config_base.parsed(text, of=f"--set {override!r}: the value")
    *parents, last = key.split(".")
    target = raw
    for parent in parents:
        child = target[parent] = {} if target.get(parent) is None else target[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent} is a value, not a section")
        target = child
    target[last] = value


def _problem(detail: Mapping[str, Any], of: type[BaseModel]) -> str:
    where = ".".join(plain.shown(part) for part in detail["loc"])
    *section, last = detail["loc"] or ("",)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {where}{plain.did_you_mean(plain.shown(last), _known_keys(of, section))}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{where}: missing; it has no default"
    return f"{where}: {message}" if where and not message.startswith(where) else message


def _known_keys(model: type[BaseModel], section: Sequence[Any]) -> list[str]:
    for part in section:
        field = model.model_fields.get(str(part))
        if field is None or (inner := section_of(field.annotation)) is None:
            return []
        model = inner
    return list(model.model_fields)


def _absolute(config: RunConfig, *, source: str) -> RunConfig:
    base = Path.cwd()
    try:
        return _placed(config.model_copy(update={"working_directory": config.working_directory or base}), base)
    except RuntimeError as error:  # ~name of an unknown user
        raise ConfigError(f"{source}: a path begins with the home folder of a user who does not exist here") from error


def _placed(section: Own, base: Path) -> Own:
    """The section with each path in it, and in the sections below it, absolute; standard input stays what it is."""
    placed: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Path) and not (name == "input" and value == STANDARD_INPUT):
            placed[name] = Path(os.path.abspath(base / value.expanduser()))  # noqa: PTH100 - keeps links
        elif isinstance(value, BaseModel):
            placed[name] = _placed(value, base)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            placed[name] = tuple(_placed(each, base) for each in value)
    return section.model_copy(update=placed)
