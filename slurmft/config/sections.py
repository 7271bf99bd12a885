"""The sections of the configuration, but for those of health, inference and planning.

In one piece, since it is a list: one class for each section, made of the same parts, and read one class at a time.
"""

from __future__ import annotations

import ipaddress
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from slurmft.config.base import (
    MAX_SECONDS,
    Count,
    Folder,
    Minutes,
    ModuleName,
    Positive,
    Seconds,
    Section,
    Share,
    Text,
    Words,
)
from slurmft.policy import values as plain
from slurmft.policy.container import SHARED_MEMORY, STARTED_BY_SRUN, Container, Mount, all_mounts
from slurmft.policy.decide import Size
from slurmft.policy.hangs import CHECKPOINTING, EVALUATION, SETUP, STEP, Limits
from slurmft.policy.sbatch import NODE_OPTIONS, option_value
from slurmft.policy.suspicion import HALF_LIFE_HOURS, Rules
from slurmft.policy.verdict import Cause, by_cause
from slurmft.policy.worker_settings import CheckpointSettings

if TYPE_CHECKING:
    from slurmft.config.inference import InferenceConfig

# --- The section ``checkpoint`` of the configuration ---

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _as_bytes(value: Any) -> Any:
    """Bytes behind ``500M``, ``1.5 GiB/s`` or a plain number; units are powers of 1024, as in Slurm's ``--mem``.

    Raises:
        ValueError: it is not such an amount.
    """
    if not isinstance(value, str):
        return value
    form = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(?:i?b)?(?:/s)?", value.strip().lower())
    if form is None:
        raise ValueError(f"{value[:40]!r} is not a number of bytes per second, such as 500M or 1.5G")
    return int(float(form[1]) * _UNITS[form[2]])


Rate = Annotated[
    Positive,
    BeforeValidator(_as_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]


class CheckpointConfig(Section):
    """When and where checkpoints are written, how many stay, and what the training loop pays for them."""

    directory: Folder | None = None
    """Folder of the checkpoints; ``checkpoints`` in the run folder when empty. Must be shared by all nodes."""

    interval: Literal["steps", "seconds", "auto"] = "steps"
    """What spaces periodic checkpoints: interval_steps, interval_seconds, or (auto) the time between them at which the
    cost of saving and the work lost by failures are smallest together, from what both were seen to be."""

    interval_steps: Count = Field(default=100, ge=0)
    """Steps between two periodic checkpoints; 0 saves only at stops and at the end. With seconds and auto it is not
    used."""

    interval_seconds: Seconds = Field(default=0.0, ge=0)
    """Seconds between two periodic checkpoints with ``interval: seconds``; with auto the longest time between two, and
    0 means an hour."""

    keep_last_n: Positive = 3
    """Checkpoints of this many steps are kept, the newest ones."""

    keep_every: Count = Field(default=0, ge=0)
    """Keep for good the first checkpoint at or after every multiple of so many steps; 0: none."""

    save_best: bool = True
    """Keep the checkpoint with the best metric as well, however old."""

    best_metric: Text = "loss"
    """Which of the metrics that are given to ``save`` counts."""

    best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest value is best."""

    async_save: bool = True
    """Train on while a checkpoint is written: the loop pays only for a copy in memory. false: save returns when it is
    durable."""

    when_busy: Literal["skip", "wait"] = "skip"
    """When two saves are under way already: a periodic one takes the place of the one that still waits for the disk, or
    is left out where both are being written (skip); or it waits. Saves of a stop, at the end, and of the script's own
    are never left out."""

    max_failed_saves: Positive = 3
    """Failed saves in a row after which the run warns loudly: journal, status, explain and the log."""

    bandwidth: Rate | None = None
    """Bytes per second that a rank's writer may write at most, as ``500M`` or ``1.5G`` (powers of 1024); no cap when
    empty. Saves of a stop know none."""

    peer_copies: Count = Field(default=0, ge=0, le=8)
    """Other nodes that hold a copy of each node's newest state in memory: so many nodes may be lost at once without
    going back to the newest checkpoint on disk. Of replicated states not even a step, with ``just_in_time``."""

    peer_interval: Count = Field(default=0, ge=0)
    """Steps between two copies of the present state in memory: the node's own and, with ``peer_copies``, that of other
    nodes. 1: after every step; 0: of saves alone. Nothing is written to disk. A rank or a node that is lost, also of a
    sharded model (FSDP), costs no more than so many steps and those that a copy is under way. Each rank needs memory
    for a third snapshot. Where the copies hold up the training for more than 5 % of its time, the interval doubles. A
    run that begins anew saves after its first step. ``extra``, where it is used, must be a function."""

    local_directory: Folder | None = None
    """Folder on a disk of each node, the same path on all, for another copy that is read faster; none when empty. Only
    ``directory`` counts as durable."""

    just_in_time: bool = True
    """When a fault hits some ranks, healthy replicas keep the last completed step for the restart: of all weights, or
    with FSDP2 on a mesh of replicas by shards, of each shard."""

    stall_timeout_s: Seconds = Field(default=30.0, ge=1)
    """Seconds without progress after which the writer counts as stuck and its save as failed."""

    @field_validator("best_metric")
    @classmethod
    def _metric_is_named(cls, value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise ValueError(f"{value[:60]!r} is not the name of a metric")
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.interval == "seconds" and not self.interval_seconds:
            raise ValueError("checkpoint.interval: seconds needs interval_seconds above 0")
        if self.interval == "steps" and self.interval_seconds:
            raise ValueError(
                f"checkpoint.interval_seconds={self.interval_seconds:g} does nothing with interval: steps; "
                "say interval: seconds"
            )
        if self.local_directory is not None and self.local_directory == self.directory:
            raise ValueError(
                "checkpoint.local_directory is the shared directory; name a folder on the nodes' own disks"
            )
        return self

    @property
    def is_periodic(self) -> bool:
        """Whether any checkpoint is saved before a stop or the end."""
        return self.interval != "steps" or self.interval_steps > 0

    def settings(self, mtbf_s: float | None = None) -> CheckpointSettings:
        """The section for workers; ``mtbf_s`` is the time between two failures, as the supervisor expects it."""
        return CheckpointSettings(**self.model_dump(mode="json", exclude={"directory"}), mtbf_s=mtbf_s)


# --- The section ``container`` of the configuration ---


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


# --- The section ``digests`` of the configuration ---


class DigestsConfig(Section):
    """Whether replicas in data-parallel training are still bitwise equal; where not, data was corrupted silently."""

    interval_steps: Count = Field(default=0, ge=0)
    """Compare digests of parameters and optimizer state every so many steps, and before every save; 0: never."""


# --- The section ``elastic`` of the configuration ---

MAX_NODES = 65_536


class ElasticConfig(Section):
    """How small and how large the run may become while it trains; a run of one size when neither is given."""

    min_nodes: Count | None = Field(default=None, ge=1, le=MAX_NODES)
    """Fewest nodes to go on with when some are lost and no spare is left; below that the run goes back into the queue.
    As many as ``nodes`` when empty."""

    max_nodes: Count | None = Field(default=None, ge=1, le=MAX_NODES)
    """Most nodes, with those that ``slurmft join`` lends, or that an endpoint borrows while its load needs them
    (``inference.serving.replicas``). As many as ``nodes`` when empty."""

    start_with_fewer: bool = False
    """Let Slurm start the job as soon as ``min_nodes`` are free. A job cannot grow: missing nodes only come with a
    restart, or are lent."""

    batch: Literal["keep_global_batch", "keep_micro_batch"] = "keep_global_batch"
    """keep_global_batch: the samples of one optimizer step stay the same on any number of ranks, and so should the
    learning rate. keep_micro_batch: each rank's share stays the same; the learning rate is the trainer's business."""

    def size(self, nodes: int) -> Size:
        """The sizes of a run that aims at ``nodes``.

        Raises:
            ValueError: the bounds do not hold ``nodes``; names the key.
        """
        minimum = nodes if self.min_nodes is None else self.min_nodes
        maximum = nodes if self.max_nodes is None else self.max_nodes
        if minimum > nodes:
            raise ValueError(f"elastic.min_nodes={minimum} is more than nodes={nodes}")
        if maximum < nodes:
            raise ValueError(f"elastic.max_nodes={maximum} is less than nodes={nodes}")
        if self.start_with_fewer and minimum == nodes:
            raise ValueError(f"elastic.start_with_fewer needs elastic.min_nodes below nodes={nodes}")
        return Size(nodes=nodes, minimum=minimum, maximum=maximum)


# --- The section ``exclusions`` of the configuration ---

MAX_HOURS = 10 * 365 * 24.0
_Hours = Annotated[float, Field(gt=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_HOURS))]
_Score = Annotated[float, Field(gt=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(1000))]


class ExclusionsConfig(Section):
    """The exclusion list: where it is, and when suspicion becomes exclusion."""

    path: Folder | None = None
    """The list; a folder that a group shares makes it the group's. ``{cluster}`` stands for the cluster's name. One per
    cluster and user, in the user's state folder, when empty."""

    mode: Text = "0600"
    """Permissions of the list's files, in octal: 0600 for one user, 0660 for a group."""

    threshold: _Score = 1.0
    """Score from which on a node is excluded: a proven persistent error has 2, and for half an hour a node that
    its cloud takes away is above 1; anything else alone is below."""

    probation: _Score = 0.25
    """Score from which on a node is on probation; below it, it is free."""

    half_life_hours: dict[str, _Hours] = Field(default_factory=dict)
    """Hours in which half of the suspicion fades, by kind of observation, where the default is to be another one."""

    max_excluded_fraction: Share = 0.5
    """Share of a partition's nodes that the list may exclude at most; the weakest suspicion is dropped first."""

    @field_validator("path")
    @classmethod
    def _path_names_a_file(cls, value: Path | None) -> Path | None:
        if value is not None and not value.name:
            raise ValueError(f"{str(value)!r} does not name a file")
        return value

    @field_validator("mode")
    @classmethod
    def _mode_is_one(cls, value: str) -> str:
        if not re.fullmatch(r"0?[67][0-7][0145]", value):
            raise ValueError(f"{value!r} must be octal, writable for the owner and not for others: '0660'")
        return value

    @field_validator("half_life_hours", mode="before")
    @classmethod
    def _kinds_are_known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = {str(key).replace("_", " "): hours for key, hours in value.items()}
        for name in names:
            if name not in HALF_LIFE_HOURS:
                raise ValueError(
                    f"unknown kind {plain.shown(name)}{plain.did_you_mean(name, list(HALF_LIFE_HOURS))} "
                    f"(kinds: {', '.join(HALF_LIFE_HOURS)})"
                )
        return names

    @model_validator(mode="after")
    def _probation_comes_first(self) -> Self:
        if self.probation > self.threshold:
            raise ValueError(f"probation {self.probation:g} is above the threshold {self.threshold:g}")
        return self

    def rules(self) -> Rules:
        """What these settings mean to the policy."""
        return Rules(threshold=self.threshold, probation=self.probation, half_life_hours=self.half_life_hours)

    def mode_bits(self) -> int:
        """The mode as a number."""
        return int(self.mode, 8)


# --- The section ``metrics`` of the configuration ---


class MetricsConfig(Section):
    """Measured values of a running job for Prometheus: a file, a port, or both. Neither: ``slurmft metrics`` writes
    them from outside."""

    textfile_folder: Folder | None = None
    """Folder of node_exporter's textfile collector on the node of the supervisor, which must let you write there. The
    file is removed when the job ends."""

    port: Annotated[Count, Field(ge=0, le=65_535)] | None = None
    """Port of ``/metrics`` beside the supervisor; 0: a free one. null: none."""

    address: Text = "127.0.0.1"
    """IP address on which it listens. Any other than that of the machine itself needs token_file."""

    token_file: Annotated[Path, BeforeValidator(plain.usable_path)] | None = None
    """A file of mode 0600 with the token that scrapes send as ``Authorization: Bearer``."""

    interval_s: Annotated[float, Field(ge=1, le=3600), BeforeValidator(plain.no_bool)] = 15.0
    """Seconds between two writes of the file."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f"{value[:60]!r} is not an IP address") from None
        return value

    @model_validator(mode="after")
    def _is_not_open_to_all(self) -> Self:
        if self.port is not None and self.token_file is None and not ipaddress.ip_address(self.address).is_loopback:
            raise ValueError(f"metrics.address: {self.address} lets others read the metrics; it needs token_file")
        return self

    @property
    def is_on(self) -> bool:
        """Something is to be written or served."""
        return self.textfile_folder is not None or self.port is not None


# --- The section ``nccl`` of the configuration ---


class NcclConfig(Section):
    """Process groups, their timeouts, and the flight recorder. Holds for gloo as well."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl where the worker has a GPU, else gloo."""

    init_timeout_minutes: Minutes = Field(default=30.0, gt=0)
    """Collective timeout until the first step of the process is done (start-up, compilation, first load)."""

    step_timeout_minutes: Minutes = Field(default=10.0, gt=0)
    """Collective timeout afterwards."""

    flight_recorder_buffer_size: Count = Field(default=2000, ge=0)
    """Collectives that torch's flight recorder remembers; 0 switches it off."""


# --- The section ``notices`` of the configuration ---


class NoticesConfig(Section):
    """Notices of a cloud that it will take a machine away, and faults of GPUs: how each node looks for them."""

    enabled: Literal["auto", "off"] = "auto"
    """auto: every node asks the metadata service of the cloud that its firmware names, and none where it names none.
    off: no service is asked, no plug-in is run, and GPUs are not watched. Else they are, where NVIDIA's library and its
    Python binding (nvidia-ml-py) are."""

    poll_seconds: Annotated[float, Field(ge=0.1, le=60), BeforeValidator(plain.no_bool)] = 5.0
    """Seconds between two looks."""

    plugin: Words = ()
    """A command that runs on every node and prints one line for each notice:
    ``{"ends": true, "what": "evicted", "left_s": 90}``; started again poll_seconds after it has ended. With
    ``"fault": true`` hardware of the node has failed: the run leaves it at once, without a save."""


# --- The section ``notify`` of the configuration ---

DEFAULT_EVENTS = ("decision: stop", "decision: finish", "saves keep failing", "straggler detected", "not continued",
                  "supervisor lost", "replica down", "router down")  # fmt: skip
_EVENT = re.compile(r"[a-z_ ]{1,40}(: [a-z ]{1,40})?")


class NotifyConfig(Section):
    """Messages about chosen events of a run, without Prometheus. They never delay the training."""

    command: Words = ()
    """A command that is run for each message, on the node of the supervisor, with the message as one JSON object on its
    standard input: a list of arguments, or one string that is split as a shell would split it, without running one."""

    webhook_file: Annotated[Path, BeforeValidator(plain.usable_path)] | None = None
    """A file of mode 0600 with the URL that messages are posted to. The URL is a secret and shown nowhere."""

    webhook_variable: Text | None = None
    """The environment variable that holds that URL, instead of a file."""

    form: Literal["json", "slack"] = "json"
    """What is posted: the message as a JSON object, or the text of a message of Slack (Mattermost, Rocket.Chat)."""

    events: tuple[Text, ...] = DEFAULT_EVENTS
    """Events of the journal that are worth a message; ``decision: stop`` is a decision to stop, ``verdict: hang`` a
    verdict with that cause."""

    per_hour: Annotated[int, Field(ge=1, le=3600), BeforeValidator(plain.no_bool)] = 20
    """Most messages in an hour. Further ones are counted, and their number is in the next message."""

    timeout_s: Annotated[Seconds, Field(ge=0.1, le=300)] = 10.0
    """Seconds that one try may take."""

    retries: Annotated[int, Field(ge=0, le=10), BeforeValidator(plain.no_bool)] = 3
    """Further tries of a message that was not taken; the pause before each is twice as long as the one before."""

    last_s: Annotated[Seconds, Field(ge=0, le=60)] = 5.0
    """Seconds that the end of the job waits for messages about it, after all else is done. 0: they may be lost with
    the job's processes, or come with its next start."""

    @field_validator("events")
    @classmethod
    def _can_be_events(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _EVENT.fullmatch(name):
                raise ValueError(f"{name[:60]!r} is not the name of an event, such as 'saves keep failing'")
        return value

    @field_validator("webhook_variable")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            # not repeated here: it may be the URL itself
            raise ValueError("webhook_variable is the name of an environment variable that holds the URL")
        return value

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if self.webhook_file is not None and self.webhook_variable is not None:
            raise ValueError("notify: give webhook_file or webhook_variable, not both")
        return self

    @property
    def is_on(self) -> bool:
        """Messages go somewhere."""
        return bool(self.command or self.webhook_file or self.webhook_variable)


# --- The section ``oom`` of the configuration ---


class OomConfig(Section):
    """Action after a worker has run out of memory, the device's or the host's."""

    action: Literal["none", "reduce_batch"] = "none"
    """reduce_batch: the next start halves the micro-batch and doubles the accumulation, with the same global batch. The
    trainer takes part: it asks session.micro_batch and session.accumulation. none: a failure like any other."""

    min_batch: Positive = 1
    """Samples below which no micro-batch goes; when that is not enough, the run ends with 93."""


# --- The section ``fault_tolerance:``: limits for failures, restarts, hangs and silence ---

MAX_NAME_BYTES = 47
MAX_NAMES = 100
DEFAULTS: Mapping[str, float] = {SETUP: 1800.0, STEP: 3600.0, CHECKPOINTING: 3600.0, EVALUATION: 1800.0}
"""Long enough for healthy runs: a limit that was not configured must never cause a false alarm."""

OUT_OF_SECTION_S = 3600.0
START_UP_S = 1800.0


def _defaults() -> dict[str, float | None]:
    return {**DEFAULTS}


def _off_is_zero(value: Any) -> Any:
    return 0.0 if value is None or (isinstance(value, str) and value.strip().lower() in ("null", "off")) else value


def _section_name(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        if not value or not value.isprintable():
            raise ValueError(f"{value[:60]!r} is not the name of a section")
        if len(value.encode(errors="replace")) > MAX_NAME_BYTES:
            raise ValueError(f"{value[:60]!r} is longer than {MAX_NAME_BYTES} bytes")
    return value


def _as_mapping(value: Any) -> Any:
    """``setup:600,step:180`` as on a command line, or a mapping; names that are missing keep their defaults.

    Raises:
        ValueError: a part of the text is not of that form, or a name is there twice.
    """
    if isinstance(value, str):
        found: dict[str, Any] = {}
        for part in filter(str.strip, value.split(",")):
            name, colon, seconds = part.rpartition(":")
            if not colon or not name.strip():
                raise ValueError(f"{part.strip()[:60]!r} is not of the form name:seconds, such as step:180")
            if name.strip() in found:
                raise ValueError(f"{name.strip()[:60]!r} is there twice")
            found[name.strip()] = seconds.strip()
        value = found
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_NAMES:
        raise ValueError(f"{len(value)} sections are too many; at most {MAX_NAMES}")
    return {**DEFAULTS, **value}


Limit = Annotated[
    float | None, Field(ge=0), BeforeValidator(plain.no_bool), BeforeValidator(_off_is_zero),
    AfterValidator(plain.at_most(MAX_SECONDS)),
]  # fmt: skip
"""Seconds; 0, null or off: no limit. Always a number afterwards."""

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.optim", "numpy",
    "slurmft.worker.session", "slurmft.checkpoint.manager",
)  # fmt: skip
"""torch.optim pulls torch._dynamo in when the first optimizer is built: 1.1 s that every worker would pay."""


def or_a_number(schema: dict[str, Any]) -> None:
    """The schema of a mapping that may be one whole number as well."""
    own = {key: schema.pop(key) for key in [*schema] if key not in ("title", "description", "default")}
    schema["anyOf"] = [{"type": "integer", "minimum": 0}, own]


class FaultToleranceConfig(Section):
    """Limits for failures, restarts, hangs and silence."""

    retries: Annotated[dict[Cause, Annotated[Count, Field(ge=0)]], BeforeValidator(by_cause)] = Field(
        default_factory=dict, json_schema_extra=or_a_number
    )
    """The budget: a number of further tries in a row without progress, in place or through the queue. The three keys
    below beat it, and so do numbers of single causes: ``{node lost: 5, worker error: 1}``."""

    num_in_job_restarts: Count = Field(default=3, ge=0)
    """Restarts within one start of the job, on the nodes that it has, before it goes back into the queue; counted anew
    whenever the run has made progress in between."""

    num_job_retries_on_failure: Count = Field(default=2, ge=0)
    """Restarts of the job after failures of one cause, counted anew whenever the run has made progress in between."""

    max_no_progress_cycles: Count = Field(default=3, ge=1)
    """Attempts in a row that end, for any cause, without a newly saved step, before the run is given up with exit code
    93. Preemptions, requeues and stops by signal are not counted."""

    retry_delay_s: Seconds = Field(default=1.0, ge=0)
    """Seconds before the second retry in a row without progress; they double with each further one, with jitter. The
    first one is immediate. 0 switches the delay off."""

    max_retry_delay_s: Seconds = Field(default=300.0, ge=0)
    """The longest delay; a restart in the allocation waits no longer than 10 s."""

    launch_timeout_s: Seconds = Field(default=300.0, gt=0)
    """Seconds until every agent must have reported."""

    supervisor_lease_s: Seconds = Field(default=60.0, gt=0)
    """Seconds an agent keeps its workers running without hearing from the supervisor (fencing)."""

    agent_timeout_s: Seconds = Field(default=3.0, ge=1)
    """Seconds without a message from a node's agent, which reports every 0.5 s, until the node counts as lost and
    another one takes its place; four times as long where there is none, since a requeue costs more than the wait."""

    preload: bool | tuple[ModuleName, ...] = True
    """Fork workers from a process that has torch imported already. A list names modules of installed packages that it
    imports as well, before the script sets any variable. For each worker it keeps one process more, for a faster
    restart (some 15 MB of their own). Off: every worker starts its own interpreter, as it does in any case where the
    command is not this Python with a script or ``-m module``: nothing is imported ahead then."""

    rank_section_timeouts: Annotated[
        dict[Annotated[Text, AfterValidator(_section_name)], Limit], BeforeValidator(_as_mapping)
    ] = Field(default_factory=_defaults)
    """Seconds a section may be open: setup (start of the session to the first step), step, checkpointing, evaluation
    (one batch), and your own. A mapping, or ``setup:600,step:180``. Each open section has its own limit. null: none."""

    rank_out_of_section_timeout: Limit = OUT_OF_SECTION_S
    """Seconds a rank may spend outside of any section; null: no limit. The default, and that of the setup, hold only
    for scripts that are known to count steps (session.steps, or own sections named step)."""

    initial_rank_heartbeat_timeout: Limit = START_UP_S
    """Seconds from the start of a process to its first call of slurmft; null: no limit. The default holds only for
    scripts that are known to call it."""

    rank_heartbeat_timeout: Limit = 0.0
    """Seconds without a sign of life (``session.heartbeat()``, a section begun or ended) after the first heartbeat of a
    rank; null: no limit."""

    workload_check_interval: Annotated[float, Field(gt=0, le=3600), BeforeValidator(plain.no_bool)] = 5.0
    """Seconds between two looks at the workers, at most: a limit that comes near is looked at in time."""

    calc_ft_timeouts: bool = False
    """Learn the limits of all sections from how long they take. A value that is configured, and not the default, is the
    least then."""

    safety_factor: Annotated[float, Field(ge=1, le=1000), BeforeValidator(plain.no_bool)] = 5.0
    """A learned limit is so many times what a section takes, when it takes long."""

    num_warmup_iterations: Count = Field(default=5, ge=0)
    """First steps of a process, which may compile: they, and what is nested in them, may take as long as the setup."""

    poison_after: Count = Field(default=3, ge=1)
    """Attempts that die from one checkpoint before their next save, until it is quarantined (they died on different
    nodes) or the node is suspected (on the same one). Planned stops and lost nodes are not counted."""

    poison_from_scratch: bool = False
    """Begin anew when no checkpoint is left but quarantined ones. false: the run ends with 93."""

    simulate_fault: bool = False
    """For tests: inject one fault, once in the run's life."""

    simulated_fault_type: Literal["rank_killed", "rank_hung", "random"] = "random"
    """For tests: SIGKILL, SIGSTOP, or one of them by chance."""

    simulated_fault_rank: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the rank to hit; by chance when empty."""

    simulated_fault_base_delay: Seconds = Field(default=0.0, ge=0)
    """For tests: seconds from the start of the workers; up to a tenth more, by chance."""

    @model_validator(mode="before")
    @classmethod
    def _one_budget(cls, value: Any) -> Any:
        match value:
            case {"retries": int(most)} if type(most) is int and most >= 0:
                whole = {"num_in_job_restarts": most, "num_job_retries_on_failure": most}
                return {**whole, "max_no_progress_cycles": most + 1, **value, "retries": {}}
        return value

    def preloaded(self, launcher: str, inference: InferenceConfig | None) -> tuple[str, ...]:
        """What a node's zygote imports before workers are forked: torch only where workers use it."""
        if self.preload is False or launcher == "ray":  # whose workers are no forks of the zygote
            return ()
        asked_for = () if self.preload is True else self.preload
        if inference is None:
            return (*PRELOAD, *asked_for)
        if inference.serving is not None:
            return ("slurmft.inference.driver", "slurmft.inference.gate", "slurmft.inference.router")
        driver = ("slurmft.inference.driver", "aiohttp", *asked_for)
        return (*driver, "torch") if inference.engine.callable else driver

    def limits(self) -> Limits:
        """What these settings mean to the policy."""
        return Limits(
            sections={name: seconds or 0.0 for name, seconds in self.rank_section_timeouts.items()},
            out_of_section_s=self.rank_out_of_section_timeout or 0.0,
            start_up_s=self.initial_rank_heartbeat_timeout or 0.0,
            heartbeat_s=self.rank_heartbeat_timeout or 0.0,
        )

    @property
    def start_up_is_given(self) -> bool:
        """Whether the limit of the start-up is the user's, and not the default."""
        return self.initial_rank_heartbeat_timeout != START_UP_S

    @property
    def setup_is_given(self) -> bool:
        """Whether the limit of the setup is the user's, and not the default."""
        return self.rank_section_timeouts.get(SETUP) != DEFAULTS[SETUP]

    @property
    def out_of_section_is_given(self) -> bool:
        """Whether the limit of the time out of any section is the user's, and not the default."""
        return self.rank_out_of_section_timeout != OUT_OF_SECTION_S

    def given_sections(self) -> frozenset[str]:
        """Sections whose limit is the user's, and not the default."""
        return frozenset(name for name, seconds in self.rank_section_timeouts.items() if DEFAULTS.get(name) != seconds)


# --- The section ``preemption`` of the configuration ---


def _named(value: Any) -> Any:
    """A signal's number, or its name without SIG, as its name."""
    if type(value) not in (int, str, signal.Signals):
        return value
    known = signal.Signals.__members__
    names = {**{f"{number:d}": name for name, number in known.items()}, **{name[3:]: name for name in known}}
    return names.get(value if isinstance(value, str) else f"{value:d}", value)


class PreemptionConfig(Section):
    """Stops that Slurm asks for: signal, lead time, and how the run continues."""

    signal: Annotated[Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], BeforeValidator(_named)] = "SIGTERM"
    """Signal of ``sbatch --signal``. A preemption sends SIGTERM in any case, so SIGTERM is always obeyed too.
    Whichever it is, workers with a session save at the end of a step: the signal itself is ignored there, unless the
    script handles it. Workers without a session get it, and SIGTERM ten seconds before the time is up. With SIGINT,
    Ctrl-C on a local run is such a signal as well."""

    signal_lead_s: Count = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which Slurm sends the signal; up to 30 s earlier."""

    continue_by: Literal["auto", "requeue", "resubmit", "nothing", "job"] = "auto"
    """How the run continues: requeue this job, submit a successor, or only say how. auto: requeue, else resubmit. job:
    the run is a role of a job (``roles``), which sees to that for all of them."""

    requeue_delay_s: Count = Field(default=2, ge=1, le=600)
    """Begin time of a requeued job, seconds from now. It must lie after the end of the job's processes and epilog:
    a shorter one falls back to Slurm's own 121 s. Where there is no epilog it may be up to one second sooner."""

    stop_timeout_s: Seconds = Field(default=600.0, gt=0)
    """Longest wait for the save of a stop that has no deadline of its own (``slurmft stop``, a signal by hand)."""


# --- The section ``rerun:`` of the configuration ---


class RerunConfig(Section):
    """Checks of a trainer with ``session.rerun_machine``, and their consequences."""

    mode: Literal["validate_results", "report_stats", "disabled"] = "validate_results"
    """validate_results: a step with a rejected result is run again. report_stats: every step is run twice, to see how
    much results differ by themselves. disabled: nothing is looked at."""

    check_for_nan_in_loss: bool = True
    """Reject a loss that is NaN or infinite."""

    check_for_spiky_loss: bool = False
    """Reject a loss far above the recent ones."""

    spiky_loss_factor: Annotated[float, BeforeValidator(plain.no_bool)] = Field(default=10.0, gt=0, le=1e9)
    """How far: robust standard deviations (median absolute deviation) above their median."""

    spiky_loss_window: Count = Field(default=100, ge=20, le=10_000)
    """How many losses are recent; they are saved with the checkpoint."""

    max_attempts: Count = Field(default=3, ge=1, le=1000)
    """Placements on other nodes that are asked for before a result counts as inconclusive."""

    wait_for_others: bool = True
    """Wait in the queue when all other nodes are busy. false: a result that cannot be computed again on different nodes
    at once is inconclusive, and the run ends with 17."""

    exit_on_persistent: bool = False
    """Stop with exit code 17 when the first node is found faulty; otherwise training goes on with the good result."""

    report_interval_steps: Count = Field(default=100, ge=0)
    """Steps between two reports in the mode report_stats; 0: only at the end."""

    error_injection_rate: Count = Field(default=0, ge=0)
    """For tests: about one in so many results is taken for wrong; 0: none."""

    error_injection_type: Literal["transient_error", "persistent_error", "correct_result"] = "transient_error"
    """For tests: wrong once, wrong on one node, or unusual and right."""

    error_injection_step: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the step with the wrong result; by chance, as the rate says, when empty."""

    error_injection_rank: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the rank with the wrong result; all when empty."""

    error_injection_node: Text | None = None
    """For tests: the node that computes wrongly."""

    error_injection_seed: Count = Field(default=0, ge=0)
    """For tests: another choice of wrong results at the same rate."""


# --- The section ``slurm`` of the configuration ---

_HOSTLIST = re.compile(r"([^\[\]]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])*", re.ASCII)


class SlurmConfig(Section):
    """sbatch's long options with ``_`` for ``-``: any of its manual page, or of the site's own ``sbatch --help``."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _options_are_words(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        for key in ("exclude", "nodelist"):
            text = str(section.get(key) or "")
            if "/" not in text and not _HOSTLIST.fullmatch(text):  # sbatch reads a file of that name
                raise ValueError(f"{key}: {text[:80]!r} is no list of nodes, such as n[1-3,7],login1")
        return {key: value if key == "srun_args" else option_value(key, value) for key, value in section.items()}

    partition: Text | None = None
    """Partition to submit to; the cluster's default when empty."""

    time: Text | None = None
    """Time limit as sbatch reads it: minutes, ``"H:MM:SS"`` or ``"D-HH:MM:SS"``."""

    account: Text | None = None
    """Account to charge."""

    qos: Text | None = None
    """Quality of service."""

    cpus_per_task: Positive | None = None
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

    def node_options(self) -> dict[str, Any]:
        """sbatch's options that are given here and describe the nodes, by their own names; a flag is True."""
        given = {key.replace("_", "-"): value for key, value in self.model_dump(exclude_none=True).items()}
        return {key: value if value is True else str(value) for key, value in given.items()
                if key in NODE_OPTIONS and value is not False}  # fmt: skip


# --- The section ``straggler_detection`` of the configuration ---


class StragglerDetectionConfig(Section):
    """Which ranks are slow: each rank's own work is timed, and compared with its equals and its own past."""

    enabled: bool = True
    """Time the ranks' own work and report slow ranks."""

    report_time_interval: Seconds = Field(default=300.0, ge=0.5)
    """Seconds of one window; there is one report for each."""

    calc_relative_gpu_perf: bool = True
    """Compare each rank with the median of its cohort, the ranks of equal role; where one half of it takes twice as
    long as the other, with the faster half."""

    calc_individual_gpu_perf: bool = True
    """Compare each rank with the best that it ever did on this node."""

    num_gpu_perf_scores_to_print: Count = Field(default=5, ge=0, le=1000)
    """Ranks that a report names: so many of the worst, and so many of the best; 0: only warnings are reported."""

    gpu_relative_perf_threshold: Share = 0.7
    """Relative score below which a rank is slow; 1 is as fast as the median."""

    gpu_individual_perf_threshold: Share = 0.7
    """Individual score below which a rank is slow; 1 is as fast as it ever was."""

    stop_if_detected: bool = False
    """Save, stop, and go on without the slow node where that pays. Off: it is only reported."""

    enable_logging: bool = True
    """Write each report to the supervisor's log."""

    profiling_interval: Positive = 1
    """Time every n-th step, and every n-th entry of a named section."""

    logger_name: Text = "slurmft.stragglers"
    """Logger of the reports; another name than this one stands in front of them in the log."""

    windows_needed: Positive = 3
    """Windows that must accuse a node before there is a verdict, ..."""

    windows_considered: Count = Field(default=5, ge=1, le=1000)
    """... among this many newest ones."""

    min_difference_s: Seconds = Field(default=0.005, ge=0)
    """Seconds a rank must be behind in each step; less is noise, even with a low score."""

    requeue_cost_s: Seconds = Field(default=300.0, ge=0)
    """Seconds of training that a move costs: save, queue, start. The run moves when it gains more than that."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.windows_needed > self.windows_considered:
            raise ValueError(
                f"windows_needed={self.windows_needed} of windows_considered={self.windows_considered} never happens"
            )
        return self


# --- The section ``sync`` of the configuration: folders of the nodes that are kept at an address ---

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SECRETS = re.compile(r"AWS_SECRET_ACCESS_KEY|AWS_SESSION_TOKEN|AZURE_STORAGE_(KEY|CONNECTION_STRING|SAS_TOKEN)")


def _as_seconds(value: Any) -> Any:
    """``30s``, ``5m``, ``1.5h`` or a number of seconds."""
    if not isinstance(value, str):
        return value
    if (found := _DURATION.fullmatch(value.strip())) is None:
        raise ValueError(f"{value!r} is not a duration such as 30s, 5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def _own_folder(value: Any) -> Any:
    path = PurePosixPath(str(value))
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 3:
        raise ValueError(f"{str(value)!r}: an absolute path without .., of a folder of its own such as /tmp/models")
    return value


def address(value: str) -> str:
    """``value``, unless it is no address, or holds a secret.

    Raises:
        ValueError: says why; the address itself is not repeated where it may hold a secret.
    """
    try:
        parts = urlsplit(value)
    except ValueError:
        raise ValueError("it is not an address such as file:///shared/saves or s3://bucket/saves") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "user names, passwords, ? and # do not belong into an address, which is stored in the run folder; "
            "credentials come from the environment or from the usual files, such as ~/.aws/credentials"
        )
    if not parts.scheme or "::" in value or parts.scheme in ("memory", "local"):
        raise ValueError(f"{value!r} is not an address such as file:///shared/saves or s3://bucket/saves")
    if parts.scheme == "file" and (parts.netloc or len(PurePosixPath(parts.path).parts) < 2 or ".." in value):
        raise ValueError(f"{value!r}: file:/// and the absolute path of a folder")
    return value.rstrip("/")


class SyncConfig(Section):
    """One folder of the nodes that is kept at an address, for scripts that save there by themselves."""

    path: Annotated[Folder, AfterValidator(_own_folder)]
    """The folder on the nodes, absolute; the script saves into it, and looks there when it starts."""

    url: Annotated[Text, AfterValidator(address)]
    """Where it is kept: ``file:///shared/saves``, ``s3://bucket/saves``, or any other address of fsspec
    (``pip install fsspec s3fs``). Without user name and password."""

    frequency: Annotated[Seconds, BeforeValidator(_as_seconds), Field(ge=1)] = 300.0
    """Seconds between two uploads, or ``30s``, ``5m``, ``1h``; also when the workers have ended."""

    each_node: bool = False
    """false: what the first node has is kept, and every node gets it. true: each node has its own, by its place among
    the nodes; versions of different nodes may be of different moments."""

    keep: Positive = 3
    """Versions that are kept."""

    exclude: tuple[Text, ...] = ()
    """Patterns of files that are left out, such as ``*.log``; of names, or of paths below the folder."""

    bandwidth_mb_s: Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool)] = 0.0
    """Most megabytes (10^6 bytes) per second that a node sends for this folder; 0: as fast as it can."""

    restore_timeout_s: Annotated[Seconds, Field(ge=1)] = 900.0
    """Seconds that a node may take to fetch it before the workers start; after that the start has failed."""

    upload_timeout_s: Annotated[Seconds, Field(ge=1)] = 300.0
    """Seconds that the last upload may take after the workers have ended. At a stop it is at most what the stop has
    left."""


def problem_of(folders: tuple[SyncConfig, ...], run_folder: str, names: tuple[str, ...]) -> str:
    """Why these folders cannot be kept together, or the run's environment (``names``) holds a secret; else nothing."""
    paths = [PurePosixPath(each.path) for each in folders]
    for index, path in enumerate(paths):
        others = [*paths[:index], PurePosixPath(run_folder)]
        others += [PurePosixPath(urlsplit(each.url).path) for each in folders if each.url.startswith("file:")]
        if found := next((each for each in others if path.is_relative_to(each) or each.is_relative_to(path)), None):
            return f"sync: {path} and {found} lie in each other; each needs a folder of its own"
    if folders and (found_name := next((name for name in names if _SECRETS.fullmatch(name)), None)):
        return (
            f"environment.{found_name}: credentials are not stored in the run folder; set it where you submit, "
            "or use ~/.aws/credentials"
        )
    return ""
