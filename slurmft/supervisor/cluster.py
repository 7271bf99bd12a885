"""Where a supervisor runs: in a Slurm job, or on this machine alone. The code above is the same for both."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import re
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from slurmft.config.run import RunConfig, components_of
from slurmft.errors import LaunchError, SlurmError, SlurmUnavailable, UsageError
from slurmft.ipc.zygote_start import as_variable, useful
from slurmft.policy import container as policy
from slurmft.policy.container import Container
from slurmft.policy.job_identity import JobIdentity, OwnJob, is_same_job, merged
from slurmft.policy.stop import JobTimes, SlurmClock, Terms
from slurmft.policy.verdict import Cause
from slurmft.scheduler import own_jobs, slurm
from slurmft.scheduler.parsing import JobEnding, SlurmJob, component_suffix, current_job
from slurmft.storage.journal import Event
from slurmft.storage.patience import FolderThread, PatientJournal, writing
from slurmft.storage.run_folder import LOCAL_PREFIX, Attempt, Owner, RunFolder
from slurmft.supervisor.guardian import keep_across_exec
from slurmft.system import processes
from slurmft.system.files import appending, read_bytes, replace_atomically, replace_link

# --- launch ---
# The command of an agent, inside of the run's container where it has one. srun and plain processes run it alike.

_OF_ANOTHER_PYTHON = frozenset({"PYTHONHOME"})
_OF_THE_BATCH_TASK = frozenset({
    "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_TOPOLOGY_ADDR",
})  # fmt: skip
"""Slurm gives ``--container`` no variables of its tasks (seen on 22.05), so that those around srun would be taken."""


def launch_of(config: RunConfig, attempt: Attempt, *, with_srun: bool) -> tuple[list[str], list[str]]:
    """What is added to srun's options, and the agent's command; the secret's place follows from the attempt, the secret
    itself is in no argument.

    Args:
        with_srun: srun starts it, so that its options can, too.

    Raises:
        UsageError: only srun could start this container.
        LaunchError: the container's bundle cannot be used.
    """
    arguments = ["agent", str(config.run_folder / "config.yaml"), str(attempt)]
    container = config.contained()
    if container is None:
        return [], [sys.executable, "-P", "-u", "-m", "slurmft", *arguments]
    inner = policy.starting(container, version=importlib.metadata.version("slurmft"), arguments=arguments)
    with contextlib.suppress(OSError):  # the runtime reports a mount whose source is missing
        config.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    if not container.is_started_by_srun:
        return [], [*outside(config, container), *inner]
    if not with_srun:
        raise UsageError(f"container.runtime {container.runtime} is started by srun, and there is none without Slurm",
                         hint="submit to a cluster; on one machine: runtime apptainer or command")  # fmt: skip
    bundle = str(bundle_for(container, RunFolder(config.run_folder).bundle)) if container.runtime == "oci" else ""
    return policy.srun_options(container, bundle=bundle), inner


def outside(config: RunConfig, container: Container) -> list[str]:
    """The words in front of a command that start it inside and stay outside, with the container's own."""
    local = config.checkpoint.local_directory
    return [sys.executable, "-P", "-u", "-m", "slurmft.agent.container_outside", container.name,
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
        preload = useful(config.fault_tolerance.preloaded(config.launcher, config.inference), config.command)
        more = as_variable(preload, name=config.name, per_node=config.nproc_per_node, own=config.environment)
        return {**environment, **more}
    left_out = _OF_ANOTHER_PYTHON
    left_out |= _OF_THE_BATCH_TASK if config.container.runtime == "oci" else frozenset()
    return {name: value for name, value in environment.items() if name not in left_out}


# --- cluster ---

log = logging.getLogger(__name__)
LOCAL_JOB_VARIABLE = "SLURMFT_LOCAL_JOB"
LOCAL_RESTART_VARIABLE = "SLURMFT_LOCAL_RESTART"

_OUTSIDE = {
    JobEnding.REQUEUED: (Cause.REQUEUED, "Slurm puts the job back into the queue (scontrol requeue, or preemption)"),
    JobEnding.PREEMPTED: (Cause.PREEMPTED, "Slurm ends the job: preempted"),
    JobEnding.TIME_LIMIT: (Cause.TIME_LIMIT, "Slurm ends the job: time limit"),
    JobEnding.NODE_LOST: (Cause.NODE_LOST, "Slurm ends the job: a node failed"),
    JobEnding.BATCH_LOST: (Cause.SUPERVISOR_LOST, "Slurm ends the job: its batch step was killed"),
    JobEnding.CANCELLED: (Cause.CANCELLED, "the job was cancelled (scancel)"),
}

GPUS_OF_A_TASK = frozenset({
    "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES",
})  # fmt: skip
"""With the last two, srun also refuses the ``--ntasks-per-node`` of the agents."""

TRES_OF_A_TASK = frozenset({"SLURM_TRES_PER_TASK", "SLURM_TRES_BIND"})
"""These may also list processors."""


class Cluster(ABC):
    """A supervisor's interface to the place it runs in; what is not said here is unknown without a scheduler."""

    name = ""
    """``slurm`` or ``local``."""

    listen_host: str | None = None
    """Interface of the control channel; None for all."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.nodes: tuple[str, ...] = ()
        """Nodes to run the next attempt on; empty for the first ones of the allocation, as many as are needed."""

        self.lost: set[str] = set()
        """Nodes whose agents are gone, over all attempts."""

    @abstractmethod
    def size(self, config: RunConfig) -> int:
        """Nodes that agents run on, spares included."""

    @abstractmethod
    def agent_hosts(self, config: RunConfig) -> list[str]:
        """The host of each agent, in the order of their numbers."""

    @abstractmethod
    def control_hosts(self) -> list[str]:
        """Names and addresses at which agents find the supervisor, best first."""

    @abstractmethod
    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[asyncio.subprocess.Process]:
        """Start one agent per node; the processes end when the agents have.

        Raises:
            UsageError: only srun could start the run's container, and there is no Slurm.
            SlurmUnavailable: there is no srun.
            LaunchError: the container's bundle cannot be used.
        """

    @abstractmethod
    async def start_agent(
        self, config: RunConfig, log_folder: Path, attempt: Attempt, *, host: str, index: int
    ) -> asyncio.subprocess.Process:
        """Start the agent of one node alone; it finds the supervisor by the folder of ``attempt``. Raises as above."""

    def give_back(self, host: str) -> str:
        """Take a lost node out of the allocation; why that was not possible, else empty; blocking."""
        return f"{host} is this machine"

    def times(self) -> JobTimes:
        """When the job started and will end; blocking."""
        return JobTimes(start=None, end=None, limit_s=None)

    def terms(self) -> Terms:
        """The clock of those times, and how long a job has that is being ended; blocking."""
        return Terms(SlurmClock(time.time(), time.monotonic()))

    def why_ending(self) -> tuple[Cause, str] | None:
        """Why the job is being ended from outside; None when it is not, or that is unknown; blocking."""
        return None

    def is_newest_start(self) -> bool | None:
        """Whether this is the newest start of the job; None when it is unknown; blocking."""
        return None

    def node_states(self) -> Mapping[str, str]:
        """Slurm's states of the allocation's nodes, as far as it reports them; blocking."""
        return {}


class SlurmCluster(Cluster):
    """Inside a Slurm job's batch step."""

    name = "slurm"

    def __init__(self, job: SlurmJob) -> None:
        super().__init__(Attempt(job=job.job_id, restart=job.restart))
        self.job = job
        self.own = OwnJob(job.job_id, job.identity)
        """The same job, with its recorded identity."""

        self.given_back: set[str] = set()
        """Lost nodes that are not in the allocation any more: a requeue must ask for their number again."""

        self.has_epilog = True
        """Whether the site runs a script after each job; True as well while Slurm has not said so."""

    def present(self) -> list[str]:
        """The run's nodes of the allocation, in its order, without those that are lost.

        Raises:
            ValueError: Slurm's node list cannot be parsed.
        """
        nodes = self.job.part or self.job.nodes
        return [node for node in slurm.expand(nodes) if node not in self.lost]

    @property
    def count(self) -> int:
        """Nodes of the allocation, or of the run's part of it."""
        return len(slurm.expand(self.job.part)) if self.job.part else self.job.node_count

    def size(self, config: RunConfig) -> int:
        """All nodes of the allocation, or of the run's part of it."""
        return max(self.count, config.size.minimum)

    def agent_hosts(self, config: RunConfig) -> list[str]:
        """The run's nodes of the allocation, as srun numbers its tasks."""
        return slurm.expand(self.job.part or self.job.nodes)

    def control_hosts(self) -> list[str]:
        """The node's own name, then every address that is not of this machine alone."""
        addresses = [
            address.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for interface in psutil.net_if_addrs().values()
            for address in interface
            if address.family == family and not address.address.startswith(("127.", "::1", "fe80:"))
        ]
        return list(dict.fromkeys([os.environ.get("SLURMD_NODENAME") or socket.gethostname(), *addresses]))

    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[asyncio.subprocess.Process]:
        """One srun with one agent per node."""
        return [await self._agents(config, log_folder, self.size(config), self.attempt, host=self.job.part)]

    async def start_agent(
        self, config: RunConfig, log_folder: Path, attempt: Attempt, *, host: str, index: int
    ) -> asyncio.subprocess.Process:
        """A step of one node."""
        return await self._agents(config, log_folder, 1, attempt, host=host, SLURMFT_NODE_INDEX=str(index))

    async def _agents(
        self, config: RunConfig, log_folder: Path, count: int, attempt: Attempt, *, host: str, **more: str
    ) -> asyncio.subprocess.Process:
        component = component_of(self.job, host)
        environment = os.environ if component is None else of_component(os.environ, component)
        argv = agents_argv(config, environment, count, attempt, host=host, component=component)
        given = {**environment_for(config, agents_environment(environment)), **more}
        with writing(log_folder / "srun.err"), appending(log_folder / "srun.err") as errors:
            try:
                # a session of its own: a Ctrl-C at the terminal must not reach srun, which would kill the step; with
                # the cluster that a submission was sent to, it would ask the accounting where it is
                return await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    env={name: value for name, value in given.items() if name != "SLURM_CLUSTERS"},
                )
            except FileNotFoundError as error:
                raise SlurmUnavailable("there is no srun on this node") from error

    def give_back(self, host: str) -> str:
        """Shrink the job."""
        if self.job.components:
            return "a heterogeneous job keeps its nodes"
        try:
            left = [node for node in slurm.expand(self.job.nodes) if node not in self.lost | {host}]
            own_jobs.shrink(self.own, left)
        except (SlurmError, ValueError) as error:  # Slurm may have noticed by itself, and does not know it any more
            return str(error)
        self.given_back.add(host)
        return ""

    def times(self) -> JobTimes:
        """From scontrol; all unknown when Slurm does not answer."""
        try:
            return own_jobs.job_times(self.own)
        except SlurmError:
            return super().times()

    def terms(self) -> Terms:
        """From scontrol; this machine's clock and Slurm's defaults when Slurm does not answer."""
        try:
            terms = slurm.terms()
        except SlurmError:
            return super().terms()
        self.has_epilog = terms.has_epilog
        return terms

    def node_states(self) -> Mapping[str, str]:
        """From sinfo; none when Slurm does not answer."""
        try:
            own = set(slurm.expand(self.job.part or self.job.nodes))
            seen = slurm.nodes(timeout_s=3.0)
            return {record.node: record.state for record in seen if record.node in own and record.state}
        except (SlurmError, ValueError):
            return {}

    def identify(self, known: JobIdentity | None = None) -> None:
        """Read what distinguishes this job from earlier and later ones with its number; blocking.

        Args:
            known: what the run has recorded of this job; another one may have its number by now.
        """
        self.own = OwnJob(self.job.job_id, self.job.identity if known is None else known)
        try:
            text = own_jobs.show(self.own)
        except SlurmError as error:
            source = "environment" if known is None else "run folder"
            log.warning("job %s is known from its %s only: %s", self.job.job_id, source, error.what)
            return
        seen = own_jobs.identity_of(text, self.job.identity.cluster)
        self.own = OwnJob(self.job.job_id, merged(self.own.known, seen))

    def recall(self, recorded: Sequence[OwnJob]) -> None:
        """Add what the run has recorded of a job of its own script. It counts where Slurm shows another one under its
        number: a controller that was restored from an older state gives numbers again.
        """
        known = next((job.known for job in recorded if job.job_id == self.job.job_id), None)
        if known is not None and known.own_script:
            is_another = is_same_job(known, self.own.known) is False
            self.own = OwnJob(self.job.job_id, known if is_another else merged(known, self.own.known))

    def is_newest_start(self) -> bool | None:
        """From scontrol: the job runs here, and was not requeued since."""
        try:
            return own_jobs.is_newest_start(self.own, self.job.restart, os.environ.get("SLURMD_NODENAME", ""))
        except SlurmUnavailable:
            return None
        except SlurmError:  # another job has the number, or none
            return False

    def why_ending(self) -> tuple[Cause, str] | None:
        """From scontrol; None when Slurm does not answer."""
        try:
            return _OUTSIDE.get(own_jobs.ending(self.own, self.job.restart))
        except SlurmError:
            return None


def agents_argv(
    config: RunConfig, environment: Mapping[str, str], count: int, attempt: Attempt, *, host: str = "",
    together: bool = False, component: int | None = None,
) -> list[str]:  # fmt: skip
    """The srun that starts the agents: one task on each of ``count`` nodes. No task's end ends the others, except where
    they are of use only ``together``. ``component``: of the heterogeneous job that they are in.

    Raises:
        LaunchError: the container's bundle cannot be used.
    """
    nodes = str(count)
    argv = ["srun", "--overlap", f"--kill-on-bad-exit={int(together)}", "--export=ALL", "--mpi=none", "--input=none"]
    argv += ["--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1"]
    # since 22.05 srun does not inherit it from sbatch
    if cpus := environment.get("SLURM_CPUS_PER_TASK"):
        argv += ["--cpus-per-task", cpus]
    if config.survives_nodes and not together:
        argv.append("--no-kill")
    argv += ["--nodelist", host] if host else []
    argv += [] if component is None else [f"--het-group={component}"]
    options, command = launch_of(config, attempt, with_srun=True)
    return [*argv, *config.slurm.srun_args, *options, *command]


def component_of(job: SlurmJob, hosts: str) -> int | None:
    """The component of a heterogeneous job that these nodes (a hostlist) are in; None of another job."""
    wanted = slurm.expand(hosts)[:1]
    parts = [slurm.expand(nodes) for nodes in job.components]
    return next((number for number, nodes in enumerate(parts) if wanted and wanted[0] in nodes), None)


def of_component(environment: Mapping[str, str], number: int) -> dict[str, str]:
    """The environment with what Slurm says of this component, such as its memory, in the place of the first one's.

    srun takes such variables for options, and would ask a small node for what the first component has.
    """
    suffixes = re.compile(r"(?!SLURM_JOB_)(SLURM_\w+?)_HET_GROUP_\d+")
    said = {match[1] for name in environment if (match := suffixes.fullmatch(name))}
    own = {name: environment.get(f"{name}{component_suffix(number)}") for name in said}
    return {name: value for name, value in {**environment, **own}.items() if value is not None}


def agents_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agents' srun: without the variables that assign GPUs to a task.

    srun takes these variables of the job for options of its own. An agent is one task for all ranks of its node, and
    would see the GPUs of one rank.
    """
    return {
        name: value for name, value in environment.items()
        if name not in GPUS_OF_A_TASK and not (name in TRES_OF_A_TASK and "gpu" in value.lower())
    }  # fmt: skip


class LocalCluster(Cluster):
    """This machine alone: agents are plain processes, and a requeue is the supervisor starting itself anew.

    Nothing limits or ends it from outside but signals, which ask for a stop.
    """

    name = "local"
    listen_host = "127.0.0.1"

    def __init__(self, environment: Mapping[str, str]) -> None:
        job = environment.get(LOCAL_JOB_VARIABLE) or f"{LOCAL_PREFIX}{os.getpid()}"
        super().__init__(Attempt(job=job, restart=int(environment.get(LOCAL_RESTART_VARIABLE, "0"))))

    def size(self, config: RunConfig) -> int:
        """As many as the configuration asks for, all on this machine."""
        return config.nodes + config.spare_nodes

    def agent_hosts(self, config: RunConfig) -> list[str]:
        """Loopback, for each."""
        return ["127.0.0.1"] * self.size(config)

    def control_hosts(self) -> list[str]:
        """Loopback."""
        return ["127.0.0.1"]

    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[asyncio.subprocess.Process]:
        """One process per node of the configuration, all on this machine."""
        return [
            await self.start_agent(config, log_folder, self.attempt, host="127.0.0.1", index=index)
            for index in range(self.size(config))
        ]

    async def start_agent(
        self, config: RunConfig, log_folder: Path, attempt: Attempt, *, host: str, index: int
    ) -> asyncio.subprocess.Process:
        """A process."""
        _, command = launch_of(config, attempt, with_srun=False)
        with writing(log_folder / "agents.log"), appending(log_folder / "agents.log") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment_for(config, os.environ), "SLURMFT_NODE_INDEX": str(index), "SLURMD_NODENAME": host},
                start_new_session=True,
            )

    def start_anew(self, argv: Sequence[str]) -> None:
        """Replace this process by the next start of the run; returns only by raising OSError."""
        environment = os.environ | {
            LOCAL_JOB_VARIABLE: self.attempt.job,
            LOCAL_RESTART_VARIABLE: str(self.attempt.restart + 1),
        }
        keep_across_exec()
        os.execve(argv[0], list(argv), environment)  # noqa: S606 - an argument list, no shell


def detect(config: RunConfig, environment: Mapping[str, str]) -> Cluster:
    """The cluster around this process. A run with components of its own has the nodes of all of them."""
    job = current_job(environment)
    if job is not None and job.components and len(components_of(config)) > 1:
        job = replace(job, part=",".join(job.components))
    return LocalCluster(environment) if job is None else SlurmCluster(job)


def this_process(run: RunFolder, cluster: Cluster, generation: int) -> Owner:
    """The record of this process as the run's owner."""
    me = processes.me()
    return Owner(
        job=cluster.attempt.job,
        restart=cluster.attempt.restart,
        cycle=cluster.attempt.cycle,
        generation=generation,
        cluster=cluster.name,
        host=me.host,
        pid=me.pid,
        birth=me.birth,
        folder=str(run.path),
        inode=run.path.stat().st_ino,
    )


# --- One attempt that may begin: the run is ours ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The inputs of an attempt's supervisor."""

    cluster: Cluster
    run: RunFolder
    journal: PatientJournal
    thread: FolderThread
    """Does everything in the run folder that the supervisor must not wait for."""

    generation: int
    """As which this process owns the run; of a candidate the owner's."""

    history: Sequence[Event] = field(repr=False)
    """The journal as it was before."""

    reached: int = 0
    """Newest step that an earlier attempt has done; those up to it are done again."""

    secret: bytes = field(repr=False)
    """The control channel's."""

    candidate: bool = False
    """Another job owns the run, and this one is to take it over: it decides nothing."""
