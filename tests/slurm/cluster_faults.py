"""The faults that any run on a cluster can meet, and how each is undone."""

from typing import ClassVar

from slurm.conftest import preempt
from slurm.storm import Kind, Storm
from slurmft.errors import LabError


def kill_supervisor(storm: Storm, *, also_guardian: bool = False, itself: bool = True) -> str | None:
    owner = storm.run.folder.owner()
    if owner is None:
        return None
    asked = storm.lab.run_on_as_admin(owner.host, ["ps", "-o", "ppid=", "-p", str(owner.pid)], check=False)
    guardian = asked.stdout.strip()
    if not guardian:
        return None
    pids = [*([guardian] if also_guardian else []), *([str(owner.pid)] if itself else [])]
    sent = storm.lab.run_on_as_admin(owner.host, ["kill", "-KILL", *pids], check=False)
    return f"on {owner.host}" if sent.returncode == 0 else None


def kill_one(storm: Storm, host: str, pattern: str, signal: str = "KILL", *, oldest: bool = False) -> str | None:
    pids = storm.lab.run_on_as_admin(host, ["pgrep", "-f", pattern], check=False).stdout.split()
    if not pids:
        return None
    pid = min(pids, key=int) if oldest else storm.chance.choice(sorted(pids, key=int))
    sent = storm.lab.run_on_as_admin(host, ["kill", f"-{signal}", pid], check=False)
    return f"{signal} on {host}" if sent.returncode == 0 else None


class ReplicasStorm(Storm):
    """A storm over replicas, whose engines and drivers get signals too."""

    engine: ClassVar[str]
    """Pattern of an engine's command line."""

    def hosts(self) -> list[str]:
        started = self.last("attempt started")
        answering = [event for event in self.journal() if event.event == "node answers"]
        if started is None:
            return []
        return sorted({event.details["node"] for event in answering if event.seconds() >= started.seconds()})

    def signal_engine(self, signal: str) -> str | None:
        hosts = self.hosts()
        return kill_one(self, self.chance.choice(hosts), self.engine, signal) if hosts else None

    def signal_driver(self, signal: str) -> str | None:
        if not (hosts := self.hosts()):
            return None
        host = self.chance.choice(hosts)
        if not (pids := self.run.pids(host)):
            return None
        rank = self.chance.choice(sorted(pids))
        sent = self.lab.run_on_as_admin(host, ["kill", f"-{signal}", pids[rank]], check=False)
        return f"{signal} to replica {rank} on {host}" if sent.returncode == 0 else None


def power_off(storm: Storm, host: str) -> str | None:
    if not host:
        return None

    def undo() -> bool:
        # where Slurm knows of the loss: a node that comes back before loses its jobs in other ways
        if storm.is_over() or storm.lab.node_states().get(host, "").startswith("DOWN"):
            storm.lab.start_node(host)
            return True
        return False

    storm.lab.kill_node(host)
    storm.hold(f"power of {host}", undo, for_s=2.0)
    return host


def power_off_other(storm: Storm) -> str | None:
    others = [host for host in storm.hosts() if host != storm.batch_host()]
    return power_off(storm, storm.chance.choice(others)) if others else None


def cut_off(storm: Storm, host: str = "", seconds: float | None = None) -> str | None:
    """One node of the run for so long; any of those that train, and half a second to twelve, where nothing is given."""
    if not (hosts := [host] if host else storm.hosts()):
        return None
    host, for_s = storm.chance.choice(hosts), storm.chance.uniform(0.5, 12.0) if seconds is None else seconds

    def undo() -> bool:
        storm.lab.heal(host)
        return True

    storm.lab.partition(host)
    storm.hold("partition", undo, for_s=for_s)
    return f"{host} for {for_s:.1f} s"


def slow_down(storm: Storm) -> str | None:
    if not (hosts := storm.hosts()):
        return None
    host, for_s = storm.chance.choice(hosts), storm.chance.uniform(2.0, 6.0)

    def undo() -> bool:
        storm.lab.restore_speed(host)
        return True

    storm.lab.slow_node(host, cpus=0.1, for_s=for_s + 20)
    storm.hold("slow node", undo, for_s=for_s)
    return f"{host} has 0.1 CPUs for {for_s:.1f} s"


def crash_controller(storm: Storm) -> str:
    for_s = storm.chance.uniform(0.5, 6.0)

    def undo() -> bool:
        storm.lab.start_controller()
        return True

    storm.lab.crash_controller()
    storm.hold("controller", undo, for_s=for_s, excuses=True)
    return f"for {for_s:.1f} s"


def suspend(storm: Storm) -> str | None:
    job, for_s = storm.run.folder.jobs()[-1], storm.chance.uniform(1.0, 8.0)

    def undo() -> bool:
        storm.lab.run_as_admin(["scontrol", "resume", job], check=False)
        return "SUSPENDED" not in storm.lab.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout

    if storm.lab.run_as_admin(["scontrol", "suspend", job], check=False).returncode != 0:
        return None
    storm.hold("suspended", undo, for_s=for_s, excuses=True)
    return f"job {job} for {for_s:.1f} s"


def stop_and_submit(storm: Storm) -> str:
    def undo() -> bool:
        try:
            storm.run.submit()
        except IndexError:  # its job has not ended yet
            return storm.is_over()
        except LabError:
            return storm.is_over()
        return True

    said = storm.run.slurmft("stop", str(storm.run.path)).strip()
    storm.hold("stopped", undo, for_s=1.0, excuses=True)
    return said


def fill_disk(storm: Storm) -> str:
    for_s = storm.chance.uniform(0.5, 6.0)

    def undo() -> bool:
        storm.disk.free()
        return True

    storm.disk.fill()
    storm.hold("full disk", undo, for_s=for_s, excuses=True)
    return f"for {for_s:.1f} s"


def requeue_by_hand(storm: Storm) -> str | None:
    job = storm.run.folder.jobs()[-1]
    return f"job {job}" if storm.lab.run(["scontrol", "requeue", job], check=False).returncode == 0 else None


def send_term(storm: Storm) -> str | None:
    job = storm.run.folder.jobs()[-1]
    sent = storm.lab.run(["scancel", "--signal=TERM", job], check=False)
    return f"job {job}" if sent.returncode == 0 and not sent.stderr.strip() else None


def kill_agent(storm: Storm) -> str | None:
    hosts = storm.hosts()
    pattern = f"^[^ ]*python[^ ]* .*slurmft agent {storm.run.path}"
    return kill_one(storm, storm.chance.choice(hosts), pattern, oldest=True) if hosts else None


def kill_zygote(storm: Storm) -> str | None:
    hosts = storm.hosts()
    return kill_one(storm, storm.chance.choice(hosts), "[s]lurmft.agent.zygote", oldest=True) if hosts else None


def kill_srun(storm: Storm) -> str | None:
    host = storm.batch_host()
    return kill_one(storm, host, f"^srun .*slurmft agent {storm.run.path}", oldest=True) if host else None


BACK = "power comes back once Slurm calls the node DOWN"

CLUSTER_KINDS = {
    "agent": Kind(3, kill_agent),
    "zygote": Kind(3, kill_zygote),
    "srun": Kind(2, kill_srun, 20),
    "supervisor": Kind(3, kill_supervisor, 12),
    "guardian": Kind(1, lambda storm: kill_supervisor(storm, also_guardian=True, itself=False), 20, ends=True),
    "guardian and supervisor": Kind(1, lambda storm: kill_supervisor(storm, also_guardian=True), 20, ends=True),
    "preemption": Kind(1, lambda storm: f"by job {preempt(storm.lab)}", 20, ends=True, clear=True),
    "slurmft requeue": Kind(
        1, lambda storm: storm.run.slurmft("requeue", str(storm.run.path), check=False).strip() or None, 10, ends=True
    ),
    "scontrol requeue": Kind(1, requeue_by_hand, 10, ends=True),
    "TERM": Kind(1, send_term, 10, ends=True),
    "power": Kind(2, power_off_other, 25, clear=True, undone=BACK),
    "power of the batch host": Kind(1, lambda storm: power_off(storm, storm.batch_host()), 30, clear=True, undone=BACK),
    "partition": Kind(2, cut_off, 25, clear=True, undone="healed after 0.5 to 12 s"),
    "controller crash": Kind(2, crash_controller, 15, clear=True, undone="started after 0.5 to 6 s"),
    "slow node": Kind(2, slow_down, 20, clear=True, undone="after 2 to 6 s"),
    "suspend": Kind(2, suspend, 15, clear=True, undone="resumed after 1 to 8 s"),
    "stop and submit": Kind(1, stop_and_submit, 15, ends=True, clear=True, undone="submitted again once it has ended"),
    "full disk": Kind(2, fill_disk, 20, clear=True, undone="room after 0.5 to 6 s"),
}  # fmt: skip
"""What any run on a cluster can meet."""
