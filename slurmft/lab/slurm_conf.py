"""Slurm's configuration files as text: settings in, text out. Touches nothing.

The lines are the ones measured to work for slurmd in namespaces on Debian's 22.05; why each exception is there is said
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurmft.lab.settings import LabSettings

CLUSTER = "slurmftlab"
CONTROLLER, LOGIN = "ctl", "login"
CONTROLLER_ADDRESS = "10.213.0.1"
NETWORK_BITS = 24
DATABASE_USER = "slurm"
DATABASE = "slurm_acct"


@dataclass(frozen=True, slots=True)
class LabPaths:
    """Every path inside the lab's folder; nothing else spells them."""

    folder: Path

    @property
    def etc(self) -> Path:
        """Slurm's configuration folder, world-readable."""
        return self.folder / "etc"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF points to."""
        return self.etc / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """Seen as /etc/hosts by every member."""
        return self.etc / "hosts"

    @property
    def resolv_conf(self) -> Path:
        """Empty; seen as /etc/resolv.conf by every member."""
        return self.etc / "resolv.conf"

    @property
    def log(self) -> Path:
        """One log per daemon and holder."""
        return self.folder / "log"

    @property
    def munge(self) -> Path:
        """munged's key, socket and seed; owned by the munge user."""
        return self.folder / "munge"

    @property
    def munge_socket(self) -> Path:
        """The lab's own munged; the host's is never used."""
        return self.munge / "munge.socket"

    @property
    def database(self) -> Path:
        """MariaDB's data and socket; owned by the mysql user."""
        return self.folder / "db"

    @property
    def database_socket(self) -> Path:
        """Where slurmdbd finds MariaDB."""
        return self.database / "mysqld.sock"

    @property
    def state(self) -> Path:
        """slurmctld's StateSaveLocation."""
        return self.folder / "state"

    @property
    def spool(self) -> Path:
        """slurmd's spool folders, one per node."""
        return self.folder / "spool"

    @property
    def run(self) -> Path:
        """Process id files of the daemons."""
        return self.folder / "run"

    @property
    def home(self) -> Path:
        """The lab user's home, the same path on every member; survives `lab up` and `lab down`."""
        return self.folder / "home"

    @property
    def mark(self) -> Path:
        """Mount point of the mark that identifies the lab's processes."""
        return self.folder / "mark"

    @property
    def state_file(self) -> Path:
        """The built lab: settings and holders."""
        return self.folder / "lab.json"

    @property
    def lock(self) -> Path:
        """Held by every command that changes the lab; its presence says that the folder is a lab's."""
        return self.folder / "slurmft-lab.lock"


def hosts_text(settings: LabSettings) -> str:
    """/etc/hosts of every member: itself, the controller and all nodes."""
    lines = ["127.0.0.1 localhost", "::1 localhost", f"{CONTROLLER_ADDRESS} {CONTROLLER} {LOGIN}"]
    lines += [f"{settings.address(name)} {name}" for name in settings.node_names]
    return "\n".join(lines) + "\n"


def slurm_conf_text(settings: LabSettings) -> str:
    """slurm.conf for these settings; the same on every member."""
    parts = (_cluster(settings), _scheduling(settings), _accounting(settings), _nodes(settings), settings.lines)
    return "\n".join([*(line for part in parts for line in part), ""])


def _cluster(settings: LabSettings) -> list[str]:
    paths = LabPaths(settings.folder)
    return [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={CONTROLLER}({CONTROLLER_ADDRESS})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={paths.munge_socket}",
        "CryptoType=crypto/munge",
        f"StateSaveLocation={paths.state}",
        f"SlurmdSpoolDir={paths.spool}/%n",
        f"SlurmctldPidFile={paths.run}/slurmctld.pid",
        f"SlurmdPidFile={paths.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={paths.log}/slurmctld.log",
        f"SlurmdLogFile={paths.log}/slurmd.%n.log",
        "MpiDefault=none",
        # without a mail program slurmctld complains at each start
        "MailProg=/bin/true",
        # cgroup plugins need a writable cgroup tree, which containers rarely have
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        # more CPUs per node than the machine has, and the node is not drained for it
        "SlurmdParameters=config_overrides",
        # a node that was DOWN serves again as soon as its slurmd registers
        "ReturnToService=2",
        f"SlurmdTimeout={settings.slurmd_timeout_s}",
        f"KillWait={settings.kill_wait_s}",
        "MessageTimeout=5",
        "TCPTimeout=2",
    ]


def _scheduling(settings: LabSettings) -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
    ]


def _accounting(settings: LabSettings) -> list[str]:
    if not settings.accounting:
        return ["AccountingStorageType=accounting_storage/none", "JobAcctGatherType=jobacct_gather/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={CONTROLLER}",
        # for connections to slurmdbd this, not AuthInfo, names munged's socket
        f"AccountingStoragePass={LabPaths(settings.folder).munge_socket}",
        "JobAcctGatherType=jobacct_gather/linux",
    ]


def _nodes(settings: LabSettings) -> list[str]:
    # No memory is ever allocated (CR_CPU); a generous figure keeps --mem requests valid.
    nodes = [
        f"NodeName={name} NodeAddr={settings.address(name)} CPUs={settings.cpus} RealMemory=64000 State=UNKNOWN"
        for name in settings.node_names
    ]
    every = f"Nodes={','.join(settings.node_names)} MaxTime=INFINITE State=UP"
    grace = settings.grace_s
    return [
        *nodes,
        f"PartitionName=low Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} {every}",
        f"PartitionName=nograce PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 {every}",
        f"PartitionName=cancel PriorityTier=1 PreemptMode=CANCEL GraceTime={grace} {every}",
        f"PartitionName=high PriorityTier=10 PreemptMode=OFF {every}",
    ]


def slurmdbd_conf_text(settings: LabSettings, password: str) -> str:
    """slurmdbd.conf; keep it at mode 600, slurmdbd refuses anything looser."""
    paths = LabPaths(settings.folder)
    return "\n".join(
        [
            f"DbdHost={CONTROLLER}",
            f"DbdAddr={CONTROLLER_ADDRESS}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={paths.munge_socket}",
            f"LogFile={paths.log}/slurmdbd.log",
            f"PidFile={paths.run}/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            f"StorageUser={DATABASE_USER}",
            f"StoragePass={password}",
            f"StorageLoc={DATABASE}",
            "",
        ]
    )
