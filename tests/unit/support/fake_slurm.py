"""A Slurm of memory alone, behind the commands that slurmft runs: it answers as 22.05 does, late, or not at all, loses
its state, gives numbers again, and obeys the variables of the shell that asks.

It replaces ``subprocess.run`` of ``scheduler.slurm``, so that everything above it is the real code.
"""

import copy
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALIVE, WAITING = ("RUNNING", "COMPLETING"), ("PENDING",)
UNREACHABLE_CLUSTER = "nowhere"
HELD_FOR_GOOD = "JobHoldMaxRequeue"
REQUEUE_DELAY_S = 121


@dataclass
class Job:
    """One job of the controller."""

    job_id: str
    script: str
    folder: str = "/home"
    user: int = 0
    name: str = "run"
    submitted: int = 0
    begin: int = 0
    after: str = ""
    restarts: int = 0
    state: str = "PENDING"
    reason: str = "None"
    node: str = ""
    batch_host: str = ""
    excluded: str = ""
    cancelled_by: int | None = None
    ended: int = 0

    @property
    def is_held(self) -> bool:
        return "held" in self.reason.lower() or self.reason == HELD_FOR_GOOD

    @property
    def is_over(self) -> bool:
        return self.state not in ALIVE + WAITING


@dataclass
class State:
    """What a controller keeps on disk."""

    jobs: dict[str, Job] = field(default_factory=dict)
    next_id: int = 1


class FakeSlurm:
    """The controller, and the clients that ask it.

    Args:
        user: who asks.
        is_ours: whether a job may be changed by the run that is tested; changing another one fails the test.
    """

    def __init__(self, user: int, *, nodes: Sequence[str] = ("n1", "n2", "n3", "n4"), accounting: bool = True) -> None:
        self.user, self.nodes, self.accounting = user, nodes, accounting
        self.now = 1_800_000_000
        self.state = State()
        self.saved = State()
        self.records: dict[tuple[str, int], tuple[Job, str]] = {}
        """What the accounting has: it does not forget what the controller loses."""

        self.drained: dict[str, tuple[int, str]] = {}
        self.foreign: set[int] = set()
        """Python ids of jobs that are not the run's."""

        self.violations: list[str] = []
        self.calls: list[str] = []
        self.mood = ""
        """silent: no answer. late: it is done, and there is no answer."""

        self.mood_lasts = 0

    # What happens in the cluster

    def submit(self, script: str, *, foreign: bool = False, **facts: Any) -> Job:
        job = Job(str(self.state.next_id), script, user=self.user, submitted=self.now, begin=self.now, **facts)
        self.state.next_id += 1
        self.state.jobs[job.job_id] = job
        if foreign:
            self.foreign.add(id(job))
        self._account(job)
        return job

    def start(self, job: Job) -> None:
        assert job.state == "PENDING" and not job.is_held
        free = [node for node in self.nodes if node not in {*job.excluded.split(","), *self.drained}]
        busy = {other.node for other in self.state.jobs.values() if other.state in ALIVE}
        job.node = next((node for node in free if node not in busy), free[0])
        job.state, job.reason, job.batch_host = "RUNNING", "None", job.node
        self._account(job)

    def can_start(self, job: Job) -> bool:
        before = self.state.jobs.get(job.after)
        waits = before is not None and not before.is_over
        return job.state == "PENDING" and not job.is_held and job.begin <= self.now and not waits

    def end(self, job: Job, state: str) -> None:
        job.state, job.node, job.ended = state, "", self.now
        self._account(job)

    def requeue(self, job: Job, *, delay_s: int = REQUEUE_DELAY_S, reason: str = "BeginTime") -> None:
        job.restarts += 1
        job.state, job.reason, job.node, job.batch_host = "PENDING", reason, "", ""
        job.submitted, job.begin = self.now, self.now + delay_s
        self._account(job)

    def refuse(self, job: Job, node: str, *, reason: str = "launch failed requeued held") -> None:
        """Its Prolog fails on that node."""
        self.drained[node] = (self.now, "Prolog error")
        self.requeue(job, reason=reason)

    def cancel(self, job: Job, by: int) -> None:
        job.cancelled_by = by
        self.end(job, "CANCELLED")

    def forget(self) -> None:
        """MinJobAge is over."""
        for job_id, job in list(self.state.jobs.items()):
            if job.is_over and not getattr(job, "completing", False):
                del self.state.jobs[job_id]

    def write_state(self) -> None:
        self.saved = self._copied(self.state)

    def lose_state(self) -> None:
        """The controller was killed, and begins again with what it had written last."""
        self.state = self._copied(self.saved)

    def _copied(self, state: State) -> State:
        twin = copy.deepcopy(state)
        for job_id, job in state.jobs.items():
            if id(job) in self.foreign:
                self.foreign.add(id(twin.jobs[job_id]))
                self._kept = [*getattr(self, "_kept", []), twin.jobs[job_id]]  # so that its id stays its own
        return twin

    def _account(self, job: Job) -> None:
        self.records[job.job_id, job.submitted] = (job, job.state)

    # What the commands say

    def subprocess_run(self, argv: Sequence[str], *, env: Mapping[str, str], **_: Any) -> Any:
        self.calls.append(" ".join(argv))
        mood, self.mood_lasts = (self.mood if self.mood_lasts > 0 else ""), self.mood_lasts - 1
        if mood == "silent":
            return self._answer(argv, 1, "", "Unable to contact slurm controller (connect failure)")
        if env.get("SLURM_CLUSTERS") == UNREACHABLE_CLUSTER:
            said = f"{argv[0]}: error: No cluster '{UNREACHABLE_CLUSTER}' known by database."
            return self._answer(argv, 1, "", said)
        if env.get("SLURM_CLUSTERS", "") not in ("", "here") or ("SLURM_CLUSTERS" in env and argv[0] == "sacctmgr"):
            text, error = "", "" if argv[0] == "squeue" and "-j" not in argv else "Invalid job id specified"
        else:
            text, error = self._do(list(argv), env)
        if mood == "late":
            return self._answer(argv, 1, "", "Socket timed out on send/recv operation")
        return self._answer(argv, 1 if error else 0, text, error)

    @staticmethod
    def _answer(argv: Sequence[str], code: int, out: str, err: str) -> Any:
        return subprocess.CompletedProcess(argv, code, out, err)

    def _do(self, argv: list[str], env: Mapping[str, str]) -> tuple[str, str]:
        match argv:
            case ["squeue", *rest]:
                return self._squeue(rest, env)
            case ["scontrol", *rest] if "job" in rest:
                job = self.state.jobs.get(rest[-1])
                return (self._shown(job), "") if job else ("", "slurm_load_jobs error: Invalid job id specified")
            case ["scontrol", ("requeue" | "requeuehold" | "release" | "hold") as act, job_id]:
                return self._act(act, job_id)
            case ["scontrol", "update", job_id, *changes]:
                return self._update(job_id.removeprefix("JobId="), dict(each.split("=", 1) for each in changes))
            case ["scontrol", "show", "config"]:
                return f"Configuration data as of {self.now}\nClusterName = here\n", ""
            case ["scontrol", *rest] if "partition" in rest:
                return "PartitionName=low Default=YES PreemptMode=REQUEUE\n", ""
            case ["scancel", job_id]:
                if (job := self._mine(job_id, "scancel")) and not job.is_over:
                    self.cancel(job, self.user)
                return "", ""
            case ["sbatch", *rest]:
                return self._sbatch(rest)
            case ["sacct", *_, job_id]:
                return self._sacct(job_id)
            case ["sinfo", *rest] if "%H" in rest[-1]:
                told = {node: self.drained.get(node, ("Unknown", "none")) for node in self.nodes}
                states = {node: "drained" if node in self.drained else "idle" for node in told}
                return "".join(f"{node}|{states[node]}|{why}|{at}\n" for node, (at, why) in told.items()), ""
            case ["sinfo", *_]:
                return "".join(f"{node}|low*|idle\n" for node in self.nodes), ""
        return "", f"{argv[0]}: not here"

    def _squeue(self, rest: list[str], env: Mapping[str, str]) -> tuple[str, str]:
        jobs = list(self.state.jobs.values())
        if "-j" in rest:
            wanted = rest[rest.index("-j") + 1].split(",")
            jobs = [self.state.jobs[job_id] for job_id in wanted if job_id in self.state.jobs]
            if not jobs:
                return "", "slurm_load_jobs error: Invalid job id specified"
        if "-s" in rest:
            return "".join(f"{job.job_id}.batch\n" for job in jobs if job.state in ALIVE), ""
        if "-t" not in rest:
            jobs = [job for job in jobs if not job.is_over]
        if states := env.get("SQUEUE_STATES"):
            jobs = [job for job in jobs if job.state in states.split(",")]
        if users := env.get("SQUEUE_USERS"):
            jobs = [job for job in jobs if str(job.user) in users.split(",")]
        return "".join(self._line(job, rest[rest.index("-o") + 1]) for job in jobs), ""

    def _line(self, job: Job, wanted: str) -> str:
        values = {"%i": job.job_id, "%T": job.state, "%r": job.reason, "%N": job.node, "%B": job.batch_host or "n/a",
                  "%S": str(job.begin), "%e": "N/A", "%l": "10:00", "%P": "low", "%U": str(job.user),
                  "%V": str(job.submitted), "%j": job.name, "%Z": job.folder, "%o": job.script}  # fmt: skip
        return re.sub(r"%\w", lambda match: values[match[0]], wanted) + "\n"

    def _shown(self, job: Job) -> str:
        excluded = job.excluded or "(null)"
        end = "Unknown" if not job.is_over else job.ended
        return (
            f"JobId={job.job_id} JobName={job.name} UserId=me({job.user}) GroupId=me({job.user}) Priority=1 "
            f"JobState={job.state} Reason={job.reason.replace(' ', '_')} Requeue=1 Restarts={job.restarts} "
            f"ExitCode=0:0 TimeLimit=10:00 SubmitTime={job.submitted} StartTime={job.begin} EndTime={end} "
            f"PreemptTime=None Partition=low ReqNodeList=(null) ExcNodeList={excluded} NodeList={job.node} "
            f"BatchHost={job.batch_host} NumNodes=1 Command={job.script} WorkDir={job.folder} StdErr=/dev/null\n"
        )

    def _mine(self, job_id: str, act: str) -> Job | None:
        job = self.state.jobs.get(job_id)
        if job is not None and id(job) in self.foreign:
            self.violations.append(f"{act} of job {job_id}, which is another run's")
        return job

    def _act(self, act: str, job_id: str) -> tuple[str, str]:
        job = self._mine(job_id, act)
        if job is None:
            return "", "Invalid job id specified"
        if act == "release" and job.reason == HELD_FOR_GOOD:
            return "", f"Access/permission denied for job {job_id}"
        if act == "release":
            job.reason = "BeginTime" if job.is_held else job.reason
        elif act == "hold":
            job.reason = "JobHeldUser"
        elif job.state == "PENDING":
            return "", "Job is pending execution"
        else:
            held = act == "requeuehold"
            self.requeue(job, reason="job requeued in held state" if held else "BeginTime")
        return "", ""

    def _update(self, job_id: str, changes: dict[str, str]) -> tuple[str, str]:
        job = self._mine(job_id, "update")
        if job is None:
            return "", "Invalid job id specified"
        if job.state == "RUNNING" and ("StartTime" in changes or "ExcNodeList" in changes):
            return "", "Job is no longer pending execution"
        if "StartTime" in changes:
            job.begin = self.now + int(changes["StartTime"].partition("+")[2] or 0)
        job.excluded = changes.get("ExcNodeList", job.excluded)
        return "", ""

    def _sbatch(self, rest: list[str]) -> tuple[str, str]:
        if "--test-only" in rest:
            return "", ""
        after = next((each.rpartition(":")[2] for each in rest if each.startswith("--dependency=")), "")
        if after and self.state.jobs.get(after) is not None and id(self.state.jobs[after]) in self.foreign:
            self.violations.append(f"afterany of job {after}, which is another run's")
        if not Path(rest[-1]).is_file():
            return "", "Unable to open file"
        return f"{self.submit(rest[-1], after=after).job_id}\n", ""

    def _sacct(self, job_id: str) -> tuple[str, str]:
        if not self.accounting:
            return "", "Slurm accounting storage is disabled"
        rows = sorted((key, value) for key, value in self.records.items() if key[0] == job_id)
        lines = []
        for (_, submitted), (job, state) in rows:
            word = f"CANCELLED by {job.cancelled_by}" if state == "CANCELLED" else state
            lines.append(f"{job.user}|{submitted}|{word}|{job.folder}|{job.name}\n")
        return "".join(lines), ""
