"""The output of Slurm's commands, srun and slurmstepd as values. Pure; tested on recorded output of every version
from 22.05 on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from slurmft.policy.job_identity import NOTHING_KNOWN, JobIdentity
from slurmft.policy.verdict import Cause, Requeueing

if TYPE_CHECKING:
    from slurmft.config.sections import SlurmConfig
    from slurmft.policy.judge import StepWords, TaskEnd

# --- parsing ---

_FIELD, _RECORD = "\x1f", "\x1e"
JOB_FORMAT = "%i|%T|%r|%N|%B|%S|%e|%l|%P|%U" + "".join(_FIELD + field for field in ("%V", "%j", "%Z", "%o")) + _RECORD
"""squeue's fields, portable from 22.05 on. The user's texts, such as the name, may hold bars and line breaks."""

_NOTHING = frozenset({"", "N/A", "NONE", "None", "(null)", "Unknown", "n/a", "INVALID", "UNLIMITED", "NOT_SET"})

ALIVE = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
)
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """One job as squeue shows it."""

    job_id: str
    state: str
    reason: str
    nodes: str
    """Hostlist of the allocation; empty while pending."""

    batch_host: str
    start: float | None
    """Unix time; of a pending job the expected one."""

    end: float | None
    """Unix time at which Slurm will end it: the limit, or the end of a preemption's grace."""

    limit_s: float | None
    partition: str
    identity: JobIdentity = NOTHING_KNOWN
    """Distinguishes it from another job with the same id."""

    @property
    def alive(self) -> bool:
        """It has nodes."""
        return self.state in ALIVE

    @property
    def waiting(self) -> bool:
        """It is in the queue."""
        return self.state in WAITING


def ended_tasks(text: str) -> list[tuple[str, str]]:
    """Node and manner of every end of a task in srun's errors: Terminated, Killed, Exited with exit code 1."""
    return re.findall(r"^srun: error: (\S+): tasks? [\d,-]+: (.+?)\s*$", text, re.MULTILINE)


def parse_jobs(text: str) -> list[JobRecord]:
    """The jobs in the output of ``squeue -o JOB_FORMAT``; lines of another shape (banners, errors) are skipped."""
    found = []
    for record in text.split(_RECORD) if _RECORD in text else text.splitlines():
        head, *identity = record.split(_FIELD)
        line = head.splitlines()[-1] if head.strip() else ""  # a banner may stand before it
        if len(fields := line.strip().split("|")) == 10:
            found.append(_job(fields, identity))
    return _whole_jobs(found)


def _whole_jobs(found: list[JobRecord]) -> list[JobRecord]:
    """A heterogeneous job is the component with its script, on the nodes of all."""
    nodes: dict[str, list[str]] = {}
    for job in found:
        leader, is_other, _ = job.job_id.partition("+")
        if is_other and job.nodes:
            nodes.setdefault(leader, []).append(job.nodes)
    return [replace(job, nodes=",".join(filter(None, [job.nodes, *nodes.get(job.job_id, ())])))
            for job in found if "+" not in job.job_id]  # fmt: skip


def _identity(user: str, fields: list[str]) -> JobIdentity:
    user_id = int(user) if user.isdecimal() else None
    if len(fields) != 4:
        return JobIdentity(user=user_id)
    submitted, name, folder, script = fields
    at = parse_time(submitted.strip())
    return JobIdentity(
        user=user_id, name=name, folder=folder, script=_or_nothing(script), submitted=() if at is None else (at,)
    )


def _or_nothing(value: str) -> str:
    return "" if value in _NOTHING else value


def _job(fields: list[str], identity: list[str]) -> JobRecord:
    job_id, state, reason, nodes, batch_host, start, end, limit, partition, user = (field.strip() for field in fields)
    return JobRecord(
        job_id=job_id.removesuffix("+0"),  # the first part of a heterogeneous job, and the one that has the script
        state=state,
        reason=reason,
        nodes=_or_nothing(nodes),
        batch_host=_or_nothing(batch_host),
        start=parse_time(start),
        end=parse_time(end),
        limit_s=parse_duration_s(limit),
        partition=partition,
        identity=_identity(user, identity),
    )


def parse_time(text: str) -> float | None:
    """Unix seconds from ``SLURM_TIME_FORMAT=%s`` or from Slurm's standard local time; None where it says nothing."""
    if text in _NOTHING:
        return None
    if text.isdecimal():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_duration_s(text: str) -> float | None:
    """Seconds in ``[D-]HH:MM:SS``, ``MM:SS`` or ``MM``; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_pairs(text: str) -> dict[str, str]:
    """``Key=Value`` words of scontrol, the first of equal keys; a value with blanks is cut at the first one."""
    return dict(word.split("=", 1) for word in reversed(text.split()) if "=" in word)


_NEVER = {
    "PartitionConfig": "the partition has not that many nodes, or none that large",
    "PartitionNodeLimit": "the partition does not allow that many nodes, or has not that many",
    "PartitionTimeLimit": "the time limit is longer than the partition allows",
    "BadConstraints": "no node has everything that is asked for and is not excluded",
    "InvalidAccount": "there is no such account, or it is not yours",
    "InvalidQOS": "there is no such quality of service, or it is not yours",
    "AccountNotAllowed": "the partition does not admit the account",
    "QOSNotAllowed": "the partition does not admit the quality of service",
    "DependencyNeverSatisfied": "a job that it depends on has ended in another way",
    "ReservationDeleted": "its reservation is gone",
}
"""Reasons of a waiting job that do not pass with time."""


def why_never(reason: str) -> str:
    """Why a job that waits for this reason of Slurm's will not start as things are; empty when it may."""
    if reason.endswith("PerJobLimit"):  # QOSMaxNodePerJobLimit and a dozen more
        return "it asks for more than one job of yours may have"
    return _NEVER.get(reason, "")


_HELD_BY_LAUNCH = ("launch failed requeued held", "user env retrieval failed requeued held",
                   "launch failure limit exceeded requeued held")  # fmt: skip


def _words(reason: str) -> str:
    return reason.replace("_", " ").strip("()").lower()


def is_held_by_launch(reason: str) -> bool:
    """Whether Slurm itself holds a job for this reason, because a node could not start it. Its owner may release it."""
    return _words(reason).startswith(_HELD_BY_LAUNCH)


def is_held_for_good(reason: str) -> bool:
    """Whether Slurm holds a job that it has requeued ``MaxBatchRequeue`` times: its owner may not release it."""
    return _words(reason) == "jobholdmaxrequeue"


def why_held(reason: str) -> str:
    """Why a waiting job is held, and how it is released; empty when it is not held."""
    if is_held_for_good(reason):
        return "Slurm has requeued it too often, and holds it; slurmft requeue submits another one in its place"
    if is_held_by_launch(reason):
        return (
            "a node could not start it, and Slurm holds it; slurmft requeue --rescue releases it, away from that node"
        )
    if re.fullmatch(r"reservation .* was deleted", _words(reason)):
        return "its reservation is gone; scontrol release lets it begin outside of one"
    if "held" not in _words(reason):
        return ""
    who = "an administrator holds it" if "admin" in _words(reason) else "it is held"
    return f"{who}; scontrol release lets it begin"


def is_held_by_requeue(reason: str) -> bool:
    """Whether a job is held by ``scontrol requeuehold``, which we use for a moment, and by nothing else."""
    return _words(reason).startswith("job requeued in held state")


_HINTS = {
    "Invalid node name": "exclude or nodelist names a node that this cluster does not have; see sinfo -N",
    "Invalid partition": "sinfo -s lists the partitions; see slurm.partition",
    "invalid partition": "sinfo -s lists the partitions; see slurm.partition",
    "Invalid account": "sacctmgr show associations user=$USER lists yours; see slurm.account and slurm.partition",
    "Invalid qos": "see slurm.qos",
    "Invalid --time": 'see slurm.time: minutes, "H:MM:SS" or "D-HH:MM:SS"',
    "Requested time limit is invalid": "the partition allows less (sinfo -o '%P %l'); see slurm.time",
    "generic resource": "sinfo -o '%N %G' lists the GPUs and others; see slurm.gpus_per_node and slurm.gres",
    "feature": "sinfo -o '%N %f' lists the features of nodes; see slurm.constraint",
    "Memory specification": "sinfo -o '%N %m' lists the memory of nodes in MB; see slurm.mem",
    "CPU count": "sinfo -o '%N %c' lists the CPUs of nodes; see slurm.cpus_per_task",
    "Node count": "the partition allows fewer nodes (scontrol show partition); see nodes",
    "node configuration is not available": "no set of nodes has all of it (sinfo -N -l), or of the reservation has it, "
    "or it ends too soon; see nodes, slurm.exclude and the option reservation",
    "reservation": "scontrol show reservation lists them; see the option reservation",
    "license": "scontrol show licenses lists them; see the option licenses",
    "dependency": "see the option dependency",
    "violates accounting": "a limit of your account or quality of service; sacctmgr show qos",
}  # fmt: skip


def refusal_hint(words: str) -> str:
    """A hint after sbatch has refused with this message; empty when the message is enough."""
    return next((hint for part, hint in _HINTS.items() if part in words), "")


def job_pairs(text: str) -> dict[str, str]:
    """What ``scontrol -o show job`` says of a job, less what its user says; of several parts, of the first.

    Job name and comment are the user's text and may look like fields: the first stands before all others, the
    other behind them.
    """
    text = _first_part(text)
    users = _users(text)
    return parse_pairs(text[users[-1].start() :] if users else text)


def _users(text: str) -> list[re.Match[str]]:
    """Where the job's user may stand, before its command: once, unless the job's name looks like it, too."""
    before, command, _ = text.rpartition(" Command=")
    return list(re.finditer(r"\bUserId=\S*?\((\d+)\) GroupId=", before if command else text))


def _first_part(text: str) -> str:
    return text.strip().split("\nJobId=", maxsplit=1)[0]


def parse_identity(text: str) -> JobIdentity:
    """The job's identity in ``scontrol -o show job``; of several parts of a job, the first."""
    line = _first_part(text)
    users = _users(line)
    name = re.search(r"\bJobName=(.*?) (?:\w+=\S* )?$", line[: users[-1].start()] if users else "", re.DOTALL)
    pairs = job_pairs(line)
    at, restarts = parse_time(pairs.get("SubmitTime", "")), pairs.get("Restarts", "")
    return JobIdentity(
        user=int(users[0][1]) if len({user[1] for user in users}) == 1 else None,
        name=name[1] if name else "",
        script=_long_value(line, "Command"),
        folder=_long_value(line, "WorkDir"),
        submitted=() if at is None else (at,),
        restarts=int(restarts) if restarts.isdecimal() else None,
    )


def _long_value(line: str, key: str) -> str | None:
    """A value that may hold blanks: up to where the next key begins."""
    match = re.search(rf" {key}=(.*?)(?= [A-Z]\w*=|\s*$)", line, re.DOTALL)
    return _or_nothing(match[1].strip()) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedNodes:
    """Nodes that a job names."""

    excluded: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    """It is placed on these, and perhaps on others beside them."""


def parse_named(text: str) -> NamedNodes:
    """The nodes that ``scontrol -o show job`` names."""
    pairs = job_pairs(text)

    def names(key: str) -> frozenset[str]:
        value = pairs.get(key, "")
        with contextlib.suppress(ValueError):  # what the user wrote need not be one
            return frozenset() if value in _NOTHING else frozenset(expand_hostlist(value))
        return frozenset()

    return NamedNodes(excluded=names("ExcNodeList"), required=names("ReqNodeList"))


class JobEnding(StrEnum):
    """Why Slurm is ending a job, as seen from the job itself."""

    NOT_ENDING = "not ending"
    NODE_LOST = "node lost"
    REQUEUED = "requeued"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    BATCH_LOST = "batch step lost"
    CANCELLED = "cancelled"


def parse_requeueing(text: str, restart: int) -> Requeueing:
    """Whether Slurm may requeue the job in ``scontrol -o show job``, seen from its ``restart``, and has a reason to."""
    pairs = job_pairs(text)
    is_newest = int(pairs.get("Restarts", "0")) <= restart
    return Requeueing(
        allowed=pairs.get("Requeue") != "0",
        running=is_newest and pairs.get("JobState") in ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"),
        preempted=pairs.get("PreemptTime", "None") not in _NOTHING,
    )


BY_TERM = ("0:15", "143:0")
"""Exit codes of a batch script that TERM has ended, which is what Slurm sends to a job that is cancelled."""


def parse_ending(text: str, restart: int, *, grace_s: float = 0.0) -> JobEnding:
    """Why the job in ``scontrol -o show job`` is ending, seen from its ``restart``.

    COMPLETING hides the base state, but a requeue counts the restart at once, a preemption leaves its time, a time
    limit leaves its reason, or an end that is the start plus the limit; the end of the batch step leaves its exit code;
    what remains is a cancellation (22.05 to 26.05). So is an end within the ``grace_s`` of a preemption, and the end of
    a batch step by TERM: a shell that waits for us obeys it at once.
    """
    pairs = job_pairs(text)
    state = pairs.get("JobState", "")
    # a later start may run already, elsewhere, where this one's node was given up
    if state in WAITING or int(pairs.get("Restarts", "0")) > restart:
        return JobEnding.REQUEUED
    if state in ("", "RUNNING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STOPPED", "RESIZING"):
        return JobEnding.NOT_ENDING
    start, end = parse_time(pairs.get("StartTime", "")), parse_time(pairs.get("EndTime", ""))
    preempted = parse_time(pairs.get("PreemptTime", "None"))
    if state == "PREEMPTED" or (preempted and not (end and end < preempted + grace_s - 1)):
        return JobEnding.PREEMPTED
    if state in ("NODE_FAIL", "BOOT_FAIL"):
        return JobEnding.NODE_LOST
    limit = parse_duration_s(pairs.get("TimeLimit", ""))
    # the end of a reservation is a time limit, too, whatever the job's own
    if state == "TIMEOUT" or pairs.get("Reason") == "TimeLimit" or (start and end and limit and end - start >= limit):
        return JobEnding.TIME_LIMIT
    if state in ("COMPLETING", "FAILED") and pairs.get("ExitCode", "0:0") not in ("0:0", *BY_TERM):
        return JobEnding.BATCH_LOST
    return JobEnding.CANCELLED


MAX_HOSTS = 100_000
"""More than any cluster has; a slip of the finger, as in n[0-99999999], would fill the memory."""

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def expand_hostlist(text: str, *, most: int = MAX_HOSTS) -> list[str]:
    """The hosts in a hostlist such as ``gpu[01-03,7],login``, in order, zero padding kept.

    Raises:
        ValueError: brackets do not match or hold something else than numbers, or it names more hosts than ``most``.
    """
    named = (host for part in _split_outside_brackets(text) for host in _expand(part))
    hosts = list(itertools.islice(named, most + 1))
    if len(hosts) > most:
        raise ValueError(f"{text[:80]!r} is not a hostlist: it stands for more than {most} nodes")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a hostlist")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError(f"{text!r} is not a hostlist")
    return [part for part in [*parts, text[start:]] if part]


def _expand(part: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([^\]]+)\](.*)", part)
    if match is None:
        yield part
        return
    prefix, ranges, rest = match.groups()
    for item in ranges.split(","):
        if (found := _RANGE.fullmatch(item)) is None:
            raise ValueError(f"{part[:80]!r} is not a hostlist: [{ranges[:40]}] holds something else than numbers")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"{part[:80]!r} is not a hostlist: [{item}] runs backwards")
        for number in range(int(first), int(last) + 1):
            yield from (f"{prefix}{number:0{len(first)}}{tail}" for tail in _expand(rest))


# --- sbatch help ---
# The options in the output of ``sbatch --help``. Pure; tested on recorded output.

_OPTION = re.compile(r"^ {1,8}(?:-\w, +)?--([a-z][a-z0-9-]*)(=|\[=|\[|\s|$)", re.MULTILINE)

NOT_FOR_A_RUN = frozenset({"help", "usage", "version", "test-only", "parsable", "wait"})
"""They print something else than the job's id, or make sbatch itself wait."""


@dataclass(frozen=True, slots=True)
class HelpedOptions:
    """The long options of one sbatch."""

    names: frozenset[str]
    flags: frozenset[str]
    """Those that may stand without a value."""


def parse_sbatch_help(text: str) -> HelpedOptions:
    """The options that ``text`` describes, less those that are not for a run."""
    found = [(name, mark) for name, mark in _OPTION.findall(text) if name not in NOT_FOR_A_RUN]
    return HelpedOptions(frozenset(name for name, _ in found), frozenset(name for name, mark in found if mark != "="))


# --- The output of srun and slurmstepd on srun's standard error, as values. Pure; every version from 22.05 on ---
# srun reports how tasks ended, but not why: a task that was ``Killed`` or ``Terminated`` did not fail by itself.

MAX_ENDS, MAX_LINE = 200, 4000
MAX_NODES = 20_000
"""No cluster has more; a damaged line such as ``n[1-999999999]`` must not fill the memory."""

_LABEL = r"^(?:\s*\d+: )?"  # srun --label
_TASKS = re.compile(_LABEL + r"srun: error: (?P<nodes>[^\s:]+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<word>.+?)\s*$")
_EXITED = re.compile(r"^Exited with exit code (\d+)$")
_FAILED = re.compile(_LABEL + r"srun: error: Node failure on (?P<nodes>\S+)")
_LAUNCH = re.compile(_LABEL + r"srun: error: Task launch for \S+ failed on node (?P<nodes>[^\s:]+): (?P<words>.+?)\s*$")
_NOT_THE_NODES = re.compile(r"credential|execve|job id", re.IGNORECASE)
"""A start that came too soon after the last one, or a program that is on no node."""

_OOM = re.compile(r"slurmstepd(?:-(?P<node>\S+?))?: error: .*\b(?:oom[-_]kill event|[Ee]xceeded .*memory limit)")
_ENDED = re.compile(r"slurmstepd\S{0,255}: error: \*\*\* \S+ \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+)")
_WORDS = {"TIME LIMIT": Cause.TIME_LIMIT, "PREEMPTION": Cause.PREEMPTED, "JOB REQUEUE": Cause.REQUEUED,
          "NODE FAILURE": Cause.NODE_LOST}  # fmt: skip


def parse_srun_lines(text: str) -> StepWords:
    """What ``text`` says; lines that say nothing of a task's or a node's end are skipped."""
    from slurmft.policy.judge import StepWords  # verbs would import a fifth more

    ends: dict[TaskEnd, None] = {}
    failed: dict[str, None] = {}
    oom: dict[str, None] = {}
    refused: dict[str, str] = {}
    oom_somewhere, ended = False, None
    for line in (each[:MAX_LINE] for each in text.splitlines()):
        if (match := _TASKS.search(line)) is not None:
            end = _task_end(match)
            if len(ends) < MAX_ENDS:
                ends[end] = None
            if end.word == "Out Of Memory":
                oom |= dict.fromkeys(end.nodes)
                oom_somewhere = True
        elif (match := _FAILED.search(line)) is not None:
            failed |= dict.fromkeys(_nodes(match["nodes"]))
        elif (match := _LAUNCH.search(line)) is not None:
            if not _NOT_THE_NODES.search(match["words"]):
                refused |= dict.fromkeys(_nodes(match["nodes"]), match["words"][:200])
        elif (match := _OOM.search(line)) is not None:
            oom_somewhere = True
            if match["node"]:
                oom[match["node"]] = None
        elif (match := _ENDED.search(line)) is not None:
            ended = ended or _WORDS.get(match[1].strip())
    return StepWords(
        ends=tuple(ends), failed_nodes=tuple(failed), oom_nodes=tuple(oom), oom_somewhere=oom_somewhere,
        refused=tuple(refused.items()), ended=ended,
    )  # fmt: skip


def _task_end(match: re.Match[str]) -> TaskEnd:
    word, code = match["word"], None
    if (exited := _EXITED.match(word)) is not None:
        word, code = "Exited", int(exited[1])
    word = word.removesuffix(" (core dumped)")
    from slurmft.policy.judge import TaskEnd

    return TaskEnd(nodes=tuple(_nodes(match["nodes"])), tasks=match["tasks"][:200], word=word[:100], code=code)


def _nodes(text: str) -> list[str]:
    text = text.rstrip(",.")
    try:
        return expand_hostlist(text, most=MAX_NODES)
    except ValueError:
        return [text[:255]]


# --- The job around us as the environment describes it, and the variables that must not leak into another job ---

_LEAKING = ("SLURM_", "SLURMD_", "SLURMFT_", "SUBMITIT_", "PMI_", "PMIX_", "TORCHELASTIC_", "SRUN_DEBUG")
_KEPT = frozenset({"SLURM_CONF", "SLURMFT_RUNS", "SUBMITIT_PREEMPT_SIGNAL"})


PART_VARIABLE = "SLURMFT_NODES"
TASKS_VARIABLE = "SLURMFT_TASKS"
"""A file with the variables of the tasks that workers stand for (``slurmft sbatch``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The job this process runs in."""

    job_id: str
    """As commands take it: ``123``, or ``123_4`` for an array task."""

    restart: int
    nodes: str
    """Hostlist of the allocation."""

    node_count: int
    partition: str
    """Of a heterogeneous job those of all components, with commas between them."""

    part: str = ""
    """Hostlist of the nodes that the run is for, where that is not the whole allocation."""

    components: tuple[str, ...] = ()
    """Of a heterogeneous job: the hostlist of each component. ``nodes`` are then those of the first one."""

    identity: JobIdentity = NOTHING_KNOWN
    """The job's identity as far as the environment shows it."""


def component_suffix(number: int) -> str:
    """Behind a variable's name that says of a component of a heterogeneous job what the plain one says of a job."""
    return f"_HET_GROUP_{number}"


def current_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """The Slurm job around this process; None outside of one."""
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        job_id = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    components = range(int(environment.get("SLURM_HET_SIZE", "0")))
    partitions = [environment.get(f"SLURM_JOB_PARTITION{component_suffix(number)}", "") for number in components]
    return SlurmJob(
        job_id=job_id,
        restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
        nodes=environment.get("SLURM_JOB_NODELIST", ""),
        node_count=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
        partition=",".join(dict.fromkeys(partitions)) or environment.get("SLURM_JOB_PARTITION", ""),
        components=tuple(environment.get(f"SLURM_JOB_NODELIST{component_suffix(number)}", "") for number in components),
        part=environment.get(PART_VARIABLE, ""),
        identity=JobIdentity(
            user=os.getuid(),
            cluster=environment.get("SLURM_CLUSTER_NAME", ""),
            name=environment.get("SLURM_JOB_NAME", ""),
        ),
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What a new job asks for, as sbatch ranks where it is said; empty where the site's default is taken."""

    partition: str
    """One, or several with commas between them."""

    time: str


def asked_for(section: SlurmConfig, options: Mapping[str, Any], environment: Mapping[str, str]) -> Asked:
    """Partition and time limit; ``options`` are sbatch's from behind ``--``."""
    # as for sbatch: its command line overrides its variables, and these override the script
    partition = options.get("partition") or environment.get("SBATCH_PARTITION") or section.partition
    limit = options.get("time") or environment.get("SBATCH_TIMELIMIT") or section.time
    return Asked(str(partition or ""), str(limit or ""))


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a job that is submitted from inside a job: without what describes the parent.

    Slurm exports all of it otherwise, and the child would take over its parent's restart count and node list.
    """
    return {name: value for name, value in environment.items() if name in _KEPT or not name.startswith(_LEAKING)}
