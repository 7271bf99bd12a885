"""The configuration of the probes: a file of its own, ``health.yaml``; all thresholds, and where results go."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from slurmft.config.base import Count, Folder, Positive, Seconds, Section, Share, Text
from slurmft.policy import values as plain
from slurmft.policy.node_health import HealthRules

Amount = Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(1e15))]
Limit = Annotated[float, Field(gt=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(3600))]
_Natural = Annotated[Count, Field(ge=0)]


class HostLimits(Section):
    """Load, processes, clock, boot, left-over shared memory."""

    load_per_cpu_warning: Amount = 4.0
    """Mean number of processes that want a CPU, over five minutes and per CPU. Never more than a warning."""

    zombies_warning: Positive = 100
    """Zombies: processes that have ended and that their parents have not waited for."""

    stuck_warning: Positive = 8
    """Processes in uninterruptible sleep (state D) at this moment."""

    stuck_critical: Positive | None = None
    """The same, for CRITICAL; null: never, since a busy filesystem looks like this too."""

    clock_offset_warning_s: Amount = 0.1
    """Seconds that the clock is off, according to chrony or the kernel."""

    clock_offset_critical_s: Amount = 60.0
    """The same, for CRITICAL: munge refuses credentials at 300 s."""

    clock_must_be_disciplined: bool = False
    """Warn where nothing corrects the clock, so that its offset is not known."""

    min_uptime_s: Seconds = Field(default=0.0, ge=0)
    """Warn within so many seconds after a boot; 0: never."""

    max_uptime_days: Amount = 0.0
    """Warn after so many days without a boot; 0: never."""

    shared_memory_warning_mib: Amount = 256.0
    """MiB in /dev/shm that no running process owns."""


class MemoryLimits(Section):
    """Memory that is left, pressure, and ECC errors that EDAC has counted."""

    available_warning: Share = 0.03
    """Share of the memory that is still available."""

    available_critical: Share = 0.0
    """The same, for CRITICAL; 0: never, since a job may use all that it has."""

    pressure_warning: Share = 0.2
    """Share of the last minute in which all processes waited for memory (PSI, full)."""

    corrected_warning: Positive = 1000
    """Corrected ECC errors within ``window_hours``."""

    uncorrected_critical: Positive = 1
    """Uncorrected ECC errors within ``window_hours``."""


class DiskLimits(Section):
    """Local filesystems: space, inodes, remounts after errors, and whether bytes come back."""

    paths: tuple[Folder, ...] = (Path("/"), Path("/tmp"))  # noqa: S108 - looked at; files in it get random names
    """Folders whose filesystems must be writable and have space and inodes left; those that are missing are skipped."""

    space_warning: Share = 0.05
    """Share of the space that is free to users."""

    space_critical: Share = 0.01
    """The same, for CRITICAL."""

    inodes_warning: Share = 0.05
    """Share of the inodes that is free."""

    inodes_critical: Share = 0.01
    """The same, for CRITICAL."""

    write_to: tuple[Folder, ...] = (Path("/tmp"),)  # noqa: S108 - as above
    """Folders in which a small file is written, read back and compared."""

    write_kib: Annotated[Count, AfterValidator(plain.at_most(65_536))] = Field(default=256, ge=1)
    """Its size in KiB."""


class FilesystemLimits(Section):
    """Shared filesystems: they must answer."""

    paths: tuple[Folder, ...] = ()
    """Folders that must answer and be there; those that are missing are critical."""

    detect: bool = True
    """Also ask every network filesystem that is mounted."""

    answer_s: Limit = 1.2
    """Seconds within which each must answer. In HealthCheckProgram ten times as long, in cron five times."""

    slow_warning_s: Limit = 0.8
    """Seconds from which on an answer is slow."""


class NetworkLimits(Section):
    """Links, InfiniBand ports, names."""

    links: tuple[Text, ...] = ()
    """Interfaces that must be up; the one with the default route where none is named."""

    min_speed_mbps: _Natural = 0
    """Speed that each of them must have; 0: any."""

    error_share_warning: Share = 0.001
    """Share of packets with errors since boot."""

    infiniband_ports: _Natural | None = None
    """Ports that must be active; null: those that have a link."""

    infiniband_min_gbps: _Natural = 0
    """Rate that each active one must have; 0: any."""

    link_downed_warning: Positive = 10
    """Times that an InfiniBand link went down within ``window_hours``."""

    resolve: tuple[Text, ...] = ()
    """Names that must resolve; the node's own where none is given."""

    resolve_s: Limit = 1.0
    """Seconds within which all must."""

    min_all_reduce_mbps: _Natural = 0
    """Megabytes in a second that the all-reduce of a pair must reach (level 2); 0: any."""


class GpuLimits(Section):
    """NVIDIA GPUs; without one all of this is skipped, unless some are expected."""

    expected: _Natural | None = None
    """GPUs that the node must have; null: as many as the PCI bus shows."""

    temperature_warning_c: Amount = 87.0
    """Degrees Celsius."""

    uncorrected_warning: Positive = 1
    """Uncorrected ECC errors within ``window_hours``."""

    uncorrected_critical: Positive = 5
    """The same, for CRITICAL."""

    pcie_width: _Natural = 0
    """Lanes that each GPU's link must have; 0: warn where it has fewer than it could."""

    pcie_generation: _Natural = 0
    """PCIe generation that each link must be capable of; 0: any."""

    nvlinks: _Natural | None = None
    """NVLinks that must be active on each GPU; null: warn where some are and others are not."""

    nvlink_errors_warning: Positive = 10
    """Recoveries of one GPU's NVLinks from errors within ``window_hours``."""

    xid_hours: Amount = 24.0
    """How far back the kernel log is read for Xid messages."""

    answer_s: Limit = 30.0
    """Seconds after which a driver that does not answer is CRITICAL, in HealthCheckProgram (40 at most) and cron, which
    can wait; anywhere else a late answer is UNKNOWN."""

    matmul_size: Annotated[Count, AfterValidator(plain.at_most(65_536))] = Field(default=4096, ge=64)
    """Rows of the matrices whose products are checked (level 2)."""

    matmul_min_tflops: Amount = 0.0
    """Speed in bfloat16 that each GPU must reach (level 2); 0: any."""

    memory_share: Share = 0.8
    """Share of the free memory that is written and read back (level 2)."""

    diagnose: bool = True
    """Run ``dcgmi diag -r 1`` where it is installed (level 2)."""


class UserProbe(Section):
    """An executable with Nagios's exit codes; its first line is the detail, behind ``|`` comes performance data."""

    command: Annotated[
        tuple[Text, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(min_length=1),
    ]  # fmt: skip
    """The program and its arguments; no shell reads it."""

    timeout_s: Limit = 1.5
    """Seconds it may take; then it is UNKNOWN."""

    level: Annotated[Count, Field(ge=1, le=2)] = 1
    """1: in every run; 2: in the long one."""

    remedy: Text = ""
    """The remedy for an admin when it fails."""

    is_hardware: bool = False
    """Its failure is the hardware's, which the drain reason says."""


class VerdictLimits(Section):
    """When results become a verdict on a node."""

    needed: Positive = 2
    """Looks that must have failed the same check, ..."""

    considered: Annotated[Count, Field(ge=1, le=12)] = 3
    """... among so many newest ones."""

    clean_needed: Positive = 2
    """Looks without a failure, newest ones, after which a node is healthy again."""

    min_spacing_s: Seconds = Field(default=30.0, ge=0)
    """Seconds; looks closer together count as one."""

    max_age_s: Seconds = Field(default=7200.0, gt=0)
    """Seconds after which a look counts no more."""

    cluster_problem_fraction: Share = 0.3
    """Share of the nodes looked at: where more of them, and at least two, fail the same check it is the cluster's
    problem, and no node is changed."""

    max_nodes_per_hour: _Natural = 4
    """Nodes that may be taken out within an hour."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.needed > self.considered:
            raise ValueError(f"needed={self.needed} of considered={self.considered} never happens")
        return self

    def rules(self) -> HealthRules:
        """What these settings mean to the policy."""
        return HealthRules(**self.model_dump())


class HookSettings(Section):
    """Actions of Slurm's hooks."""

    prolog_refuses: bool = False
    """Let a CRITICAL result fail the prolog: Slurm then drains the node, and the job is requeued held. Off: it is only
    written down, for the sweep."""

    prolog_answer_s: Limit | None = None
    """Seconds after which a driver that does not answer is CRITICAL in the prolog, too; null: it is UNKNOWN there, and
    no job waits for it longer than 5 s. Slurm must let the prolog run for 5 s more (PrologEpilogTimeout, and
    BatchStartTimeout, 10 by default). Too short where devices wake up slowly: persistence mode is off."""

    clean: bool = True
    """Let the epilog end left-over processes and remove left-over shared memory of the ended job."""


class HealthConfig(Section):
    """Everything about the probes of a node."""

    results_folder: Folder | None = None
    """Folder that all nodes share, for the results of HealthCheckProgram, prolog and cron; null: results are only kept
    on the node."""

    evidence_folder: Folder | None = None
    """Node-local folder for the evidence of the newest look and the totals of counters; null: /run/slurmft for root,
    else the state folder of the user."""

    window_hours: Annotated[Seconds, AfterValidator(plain.at_most(1000))] = Field(default=24.0, gt=0)
    """Counters that only grow (ECC errors, NVLink recoveries, links that went down) count by how much they have grown
    within so many hours."""

    disabled: tuple[Text, ...] = ()
    """Probes that do not run."""

    limits_s: dict[Text, Limit] = Field(default_factory=dict)
    """Seconds that single probes may take, where they differ from their own, such as {gpu-count: 10} (all that the
    driver is asked) where it takes long to wake up: persistence mode is off."""

    host: HostLimits = Field(default_factory=HostLimits)
    memory: MemoryLimits = Field(default_factory=MemoryLimits)
    disk: DiskLimits = Field(default_factory=DiskLimits)
    filesystems: FilesystemLimits = Field(default_factory=FilesystemLimits)
    network: NetworkLimits = Field(default_factory=NetworkLimits)
    gpu: GpuLimits = Field(default_factory=GpuLimits)
    verdict: VerdictLimits = Field(default_factory=VerdictLimits)
    hooks: HookSettings = Field(default_factory=HookSettings)

    user_probes: dict[Text, UserProbe] = Field(default_factory=dict)
    """Name -> an executable of the site."""

    platforms: dict[Text, dict[str, Any]] = Field(default_factory=dict)
    """Name -> {nodes: [patterns such as gpu-h*], and any of the sections above}: what differs on those nodes. The first
    one that matches a node holds."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for name in ("results_folder", "evidence_folder"):
            path = getattr(self, name)
            if path is not None and not path.is_absolute():
                raise ValueError(f"{name}: {str(path)!r} is not absolute; hooks run in any folder")
        for name, changes in self.platforms.items():
            patterns = changes.get("nodes")
            if not isinstance(patterns, list) or not patterns or not all(isinstance(each, str) for each in patterns):
                raise ValueError(f"platforms.{plain.shown(name)}.nodes: a list of patterns of node names is needed")
            if "platforms" in changes or "verdict" in changes:
                raise ValueError(f"platforms.{plain.shown(name)}: platforms and verdict hold for all nodes")
            try:
                self._with(changes)
            except ValidationError as error:
                where = ".".join(map(str, error.errors()[0]["loc"]))
                raise ValueError(f"platforms.{plain.shown(name)}.{where}: {error.errors()[0]['msg']}") from error
        return self

    def for_node(self, node: str) -> HealthConfig:
        """The settings of this node."""
        for changes in self.platforms.values():
            if any(fnmatch.fnmatchcase(node, pattern) for pattern in changes["nodes"]):
                return self._with(changes)
        return self

    def _with(self, changes: Mapping[str, Any]) -> HealthConfig:
        base = self.model_dump(exclude_unset=True, exclude={"platforms"})
        return HealthConfig.model_validate(_merged(base, {k: v for k, v in changes.items() if k != "nodes"}))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    def pairs() -> Iterator[tuple[str, Any]]:
        for key in {**base, **changes}:
            old, new = base.get(key), changes.get(key, base.get(key))
            both = isinstance(old, Mapping) and isinstance(new, Mapping)
            yield key, _merged(old, new) if both and key in changes else new  # type: ignore[arg-type]

    return dict(pairs())
