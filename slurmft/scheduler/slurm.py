"""Everything slurmft asks of Slurm. Add a question here, nowhere else."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.node_health import NodeFact
from slurmft.policy.stop import KILL_WAIT_S, JobTimes, SlurmClock, Terms
from slurmft.scheduler import parsing
from slurmft.system.files import read_text
from slurmft.system.processes import user_name

# --- Running one Slurm command: an argument list, a time limit, both streams captured, errors translated once ---

COMMAND_TIMEOUT_S, SUBMIT_S = 20.0, 60.0
TASKS_S = 300.0
"""A step may wait for one before it, and many nodes take their time."""

NOT_ANSWERING = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Zero Bytes were transmitted",
    "Unexpected message received",
    "backup controller",
    "Resource temporarily unavailable",
    "munge",
    "Protocol authentication error",
    "Transport endpoint is not connected",
    "Insane message length",
    "Rate limit exceeded",
    "rate limit exceeded",
    "No route to host",
    "Network is unreachable",
    "Connection reset by peer",
)
"""Messages of a client that reached no controller, or not in time, or were asked to try later: nothing is known, trying
again is safe."""

_CHANGING_ANSWERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SBATCH_", "SLURM_CLUSTERS")
"""Beginnings of variables that filter or redirect what Slurm's commands answer, also about a job that is named."""


def undisturbed(environment: Mapping[str, str], *, cluster: str = "") -> dict[str, str]:
    """The environment of a command whose answer must not depend on the shell or crontab that it was started from.

    Args:
        cluster: the cluster to ask, where that is another one than the machine's own.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_CHANGING_ANSWERS)}
    return kept | {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CLUSTERS": cluster} if cluster else {})


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    cluster: str = "",
) -> str:
    """The command's standard output.

    Args:
        environment: exactly this one, for a job that is submitted as its user wishes; None: ours, ``undisturbed``.
        cluster: the cluster to ask, where that is another one than the machine's own.

    Raises:
        SlurmUnavailable: the command is missing, timed out, or reached no controller.
        SlurmError: Slurm refused; the message is its own.
    """
    try:
        result = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=undisturbed(os.environ, cluster=cluster) if environment is None else dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmUnavailable(f"the command {argv[0]} is not on this machine") from error
    except OSError as error:
        raise SlurmUnavailable(f"the command {argv[0]} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"{argv[0]} did not answer within {timeout_s:.0f} s") from error
    if result.returncode == 0:
        return result.stdout
    message = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
    kind = SlurmUnavailable if any(text in message for text in NOT_ANSWERING) else SlurmError
    raise kind(f"{' '.join(argv[:3])}: {message}")


def run_patiently(
    argv: Sequence[str],
    *,
    patience_s: float,
    cluster: str = "",
    pause_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Like ``run``, trying again for ``patience_s`` seconds while Slurm does not answer. For commands that may be
    repeated without harm.

    Raises:
        SlurmUnavailable: no answer in all that time.
        SlurmError: Slurm refused.
    """
    deadline = clock() + patience_s
    while True:
        try:
            return run(argv, timeout_s=min(COMMAND_TIMEOUT_S, max(2.0, deadline - clock())), cluster=cluster)
        except SlurmUnavailable:
            if clock() + pause_s >= deadline:
                raise
            sleep(pause_s)


def submit(
    argv: Sequence[str], *, environment: Mapping[str, str] | None = None, folder: Path | None = Path("/")
) -> str:
    """The id of the job that this ``sbatch --parsable`` makes.

    Args:
        environment: as of ``run``.
        folder: becomes its SLURM_SUBMIT_DIR, to which a script's relative paths belong; every node has the default.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return run(argv, timeout_s=SUBMIT_S, environment=environment, folder=folder).strip().split(";")[0]


@contextlib.contextmanager
def ignoring_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore these signals, by default those that a requeue sends to the very processes that ask for it.

    Ignored signals stay ignored across exec, handlers do not: a handler would leave ``scontrol`` itself to be killed
    between the requeue and the update that follows it. Only the main thread can; others ignore nothing.
    """
    numbers = numbers or (signal.SIGTERM, signal.SIGCONT, signal.SIGINT, signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


# --- Containers that srun starts: whether it can, and a trial of one ---

TRY_ON_A_NODE = "salloc --nodes=1 slurmft doctor CONFIG"
"""For a person: the command that tries on a node what cannot be tried elsewhere."""


def srun_knows(option: str) -> bool:
    """Whether srun's help names the long option; a plug-in's options are among them.

    Raises:
        SlurmUnavailable: there is no srun.
        SlurmError: it refused.
    """
    return names_option(run(["srun", "--help"]), option)


def names_option(text: str, option: str) -> bool:
    """Whether ``text``, the output of ``srun --help``, has a line for the long option itself."""
    return re.search(rf"^\s*(?:-\w, )?{re.escape(option)}(?:=|\s|$)", text, re.MULTILINE) is not None


def run_inside(options: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> str:
    """Run a command as one task of the job around us, with these options; its standard output.

    Raises:
        SlurmUnavailable: srun is missing or was too slow.
        SlurmError: it did not end with 0; with its words, and srun's.
    """
    one = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--input=none"]
    return run([*one, *options, *argv], timeout_s=timeout_s, environment=os.environ)


def sbatch_as_given(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run sbatch with these words, our standard streams and no time limit (``--wait``); its exit code.

    Raises:
        SlurmUnavailable: there is no sbatch.
    """
    try:
        return subprocess.run(["sbatch", *words], env=dict(environment), check=False).returncode
    except OSError as error:
        raise SlurmUnavailable(f"the command sbatch cannot be run: {error.strerror or error}") from error


def tasks_of(options: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environments of the tasks that srun starts with these options, by a step that does nothing else.

    Each task writes its own into a file of ``folder``, which is removed: on one stream, those of many would mix.

    Raises:
        SlurmError: srun refused, or a task has not written it; with its words.
    """
    out = ["--output", f"{folder}/task-%t", "--error", f"{folder}/task-%t", "--input=none", "--kill-on-bad-exit=1"]
    try:
        run(["srun", *options, *out, "env", "-0"], timeout_s=TASKS_S, environment=environment)
        files = sorted(folder.glob("task-*"))
        texts = [read_text(path, errors="surrogateescape", owners={os.geteuid()}) for path in files]
    except (OSError, ValueError) as error:
        raise SlurmError(f"the places of its tasks are not known: {error}") from error
    finally:
        for path in folder.glob("task-*"):
            path.unlink(missing_ok=True)
    found = [dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair) for text in texts]
    if not found or any(not task.keys() >= {"SLURM_PROCID", "SLURM_STEP_NODELIST"} for task in found):
        raise SlurmError("the places of its tasks are not known: env did not say them")
    return found


# --- site ---
# A site's settings, parsed from the output of ``scontrol``: partitions, preemption, Slurm's clock. Pure.

_NO_LIMIT = frozenset({"UNLIMITED", "INFINITE", "-1"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition of ``scontrol show partition``; None where it says nothing."""

    name: str
    is_default: bool
    grace_s: float | None
    preempt_mode: str
    """As printed: words such as REQUEUE or GANG,SUSPEND; the cluster's where the partition has none of its own."""

    priority_tier: int | None
    default_limit_s: float | None
    """Limit of a job that asks for none: infinite where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What ``scontrol show config`` says of the whole cluster; empty or None where it says nothing."""

    preempt_type: str
    kill_wait_s: float | None
    clock: float | None
    """Unix time on the controller when it answered."""

    cluster: str = ""
    has_epilog: bool = True
    """Whether a script of the site's runs on every node after each job; a job is COMPLETING until it has ended."""


def parse_partitions(text: str) -> list[Partition]:
    """The partitions in the output of ``scontrol -o show partition``, one on each line; other lines are skipped."""
    lines = (parsing.parse_pairs(line) for line in text.splitlines())
    return [_partition(pairs) for pairs in lines if pairs.get("PartitionName")]


def _partition(pairs: dict[str, str]) -> Partition:
    default, longest = pairs.get("DefaultTime", ""), pairs.get("MaxTime", "")
    grace, tier = pairs.get("GraceTime", ""), pairs.get("PriorityTier", "")
    return Partition(
        name=pairs["PartitionName"],
        is_default=pairs.get("Default") == "YES",
        grace_s=float(grace) if grace.isdecimal() else None,
        preempt_mode=pairs.get("PreemptMode", ""),
        priority_tier=int(tier) if tier.isdecimal() else None,
        default_limit_s=parse_limit_s(longest if default in ("", "NONE") else default),
    )


def parse_site(text: str) -> Site:
    """The facts in the output of ``scontrol show config``."""
    facts = parse_configuration(text)
    wait = re.match(r"\d+", facts.get("KillWait", ""))
    return Site(
        preempt_type=facts.get("PreemptType", ""),
        kill_wait_s=float(wait.group()) if wait else None,
        clock=parsing.parse_time(facts.get("as of", "")),
        cluster=facts.get("ClusterName", ""),
        # from 24.11 on there is a line for each script, and none where there is no script
        has_epilog="EpilogMsgTime" not in facts
        or re.search(r"^Epilog(\[\d+\])?\s*=\s*(?!\(null\))\S", text, re.MULTILINE) is not None,
    )


def parse_configuration(text: str) -> dict[str, str]:
    """Every ``Key = value`` in the output of ``scontrol show config``; under ``as of`` its time."""
    facts = dict(re.findall(r"^(\w+)\s*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    if match := re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE):
        facts["as of"] = match[1]
    if facts.get("PreemptType") == "(null)":  # newer versions; 22.05 says it
        facts["PreemptType"] = "preempt/none"
    return facts


def parse_limit_s(text: str) -> float | None:
    """Seconds of a time limit as sbatch takes it, in the whole minutes that Slurm makes of it: infinite where there is
    none, None where it is not known or cannot be read."""
    text = text.strip()
    if text.upper() in _NO_LIMIT:
        return math.inf
    seconds = parsing.parse_duration_s(text)
    if seconds is None:
        return None
    return math.inf if seconds == 0 else math.ceil(seconds / 60) * 60.0


def parse_job_times(text: str) -> JobTimes:
    """Start, end, limit and preemption of the job in the output of ``scontrol -o show job``."""
    pairs = parsing.job_pairs(text)
    return JobTimes(
        start=parsing.parse_time(pairs.get("StartTime", "")),
        end=parsing.parse_time(pairs.get("EndTime", "")),
        limit_s=parsing.parse_duration_s(pairs.get("TimeLimit", "")),
        preempted=parsing.parse_time(pairs.get("PreemptTime", "")),
    )


# --- Options of sbatch that the site's own Slurm has, and no list of ours: of a newer version, or of a plug-in ---

ASK_S = 5.0

log = logging.getLogger(__name__)


def known_options(options: frozenset[str]) -> frozenset[str]:
    """Those of ``options`` that the site's sbatch has; none where there is no sbatch, or it does not answer."""
    return options & options_of_site().names


@functools.cache
def options_of_site() -> parsing.HelpedOptions:
    """What ``sbatch --help`` lists; asks no controller. Asked once."""
    try:
        return parsing.parse_sbatch_help(run(["sbatch", "--help"], timeout_s=ASK_S))
    except SlurmError as error:
        log.debug("sbatch does not tell its options: %s", error.what)
        return parsing.HelpedOptions(frozenset(), frozenset())


# --- slurm ---

PATIENCE_S = 30.0
JOBS_AT_ONCE = 2000

_CONFIGURATIONS = [Path(path) for path in ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf")]


def available() -> bool:
    """Whether this machine belongs to a cluster: it has Slurm's client commands and a configuration for them.

    Packages alone, such as a test lab installs, are not a cluster. One whose controller is down is: a user who waits
    for it does not want to train on the login node instead.
    """
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        return False
    if "SLURM_CONF" in os.environ or any(path.exists() for path in _CONFIGURATIONS):
        return True
    try:  # a site may build its own paths in, or serve the configuration over the network
        return "ClusterName" in run(["scontrol", "show", "config"], timeout_s=3.0)
    except SlurmError:
        return False


def configured_cluster(environment: Mapping[str, str]) -> str:
    """The cluster's name in the configuration file of this machine, without a question to Slurm; empty where it is not
    set there: the file may include others, or be served over the network."""
    named = environment.get("SLURM_CONF")
    for path in [Path(named)] if named else _CONFIGURATIONS:
        try:
            text = read_text(path / "slurm.conf" if path.is_dir() else path, errors="replace")
        except OSError:
            continue
        if match := re.search(r"^\s*ClusterName\s*=\s*([^\s#]+)", text, re.MULTILINE | re.IGNORECASE):
            return match.group(1)
    return ""


def jobs(job_ids: Sequence[str], *, patience_s: float = 5.0, cluster: str = "") -> dict[str, parsing.JobRecord]:
    """What squeue knows of these ids; one that it has forgotten is absent, which does not mean that it finished.

    Their owners are not checked: ``own_jobs`` asks for those of a run.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
    """
    if not job_ids:
        return {}
    if len(job_ids) > JOBS_AT_ONCE:  # the length of one argument is limited
        return {**jobs(job_ids[:JOBS_AT_ONCE], patience_s=patience_s, cluster=cluster),
                **jobs(job_ids[JOBS_AT_ONCE:], patience_s=patience_s, cluster=cluster)}  # fmt: skip
    # -a: also those in partitions that are hidden from their own users
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(job_ids), "-o", parsing.JOB_FORMAT]
    try:
        text = run_patiently(argv, patience_s=patience_s, cluster=cluster)
    except SlurmError as error:
        if "Invalid job id specified" in error.what:  # all of them are forgotten; ": x" would be one that is not an id
            return {}
        raise
    return {record.job_id: record for record in parsing.parse_jobs(text)}


def job(job_id: str, *, patience_s: float = 5.0) -> parsing.JobRecord | None:
    """The job with this id, or None when squeue has forgotten it; for a job that was submitted just now.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known.
    """
    return jobs([job_id], patience_s=patience_s).get(job_id)


def terms(*, timeout_s: float = 3.0) -> Terms:
    """Slurm's clock, to the second, which a job's times refer to; its KillWait, and whether there is an epilog.

    Raises:
        SlurmError: Slurm did not answer, or did not say what time it is.
    """
    before_s = time.monotonic()
    answer = site(timeout_s=timeout_s)
    if answer.clock is None:
        raise SlurmError("scontrol show config does not say what time it is")
    # the time was cut to whole seconds, and was taken between the two readings
    clock = SlurmClock(answer.clock + 0.5, (before_s + time.monotonic()) / 2)
    return Terms(clock, KILL_WAIT_S if answer.kill_wait_s is None else answer.kill_wait_s, answer.has_epilog)


def partitions(*, timeout_s: float = 3.0) -> list[Partition]:
    """All partitions, hidden ones too: their jobs may preempt others. Not tried again: for advice, not for decisions.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return parse_partitions(run(["scontrol", "--all", "--oneliner", "show", "partition"], timeout_s=timeout_s))


def site(*, timeout_s: float = 3.0) -> Site:
    """What holds for the whole cluster. Not tried again.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return parse_site(run(["scontrol", "show", "config"], timeout_s=timeout_s))


def configuration(*, timeout_s: float = 10.0) -> dict[str, str]:
    """All that ``scontrol show config`` says, by key; ``as of`` is when. For advice, not for decisions.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return parse_configuration(run(["scontrol", "show", "config"], timeout_s=timeout_s))


def federation() -> str:
    """The federation that this cluster belongs to; empty where it belongs to none, or Slurm does not tell."""
    try:
        text = run(["scontrol", "show", "federation"], timeout_s=3.0)
    except SlurmError:
        return ""
    return match[1] if (match := re.search(r"^Federation:\s*(\S+)", text, re.MULTILINE)) else ""


def admin_level(user: str) -> str:
    """The user's level in the accounting, such as Operator; empty where it does not know the user.

    Raises:
        SlurmError: there is no accounting, or it did not answer.
    """
    argv = ["sacctmgr", "-n", "-P", "show", "user", user, "format=AdminLevel"]
    return run(argv, timeout_s=5.0).strip().partition("\n")[0]


def preempt_mode(partition: str) -> str:
    """How jobs of this partition are preempted: REQUEUE, CANCEL, SUSPEND or OFF, without extra flags.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        SlurmError: no such partition.
    """
    pairs = parsing.parse_pairs(run_patiently(["scontrol", "-o", "show", "partition", partition], patience_s=5.0))
    words = pairs.get("PreemptMode", "OFF").split(",")  # with GANG, in either order
    return next((word for word in words if word in ("REQUEUE", "CANCEL", "SUSPEND")), "OFF")


# --- Nodes: which can take jobs, many of them in one short hostlist, and what a sweep changes of them ---


NODE_FORMAT = "%N|%P|%T"
MAX_NODES = 65_536

_UNUSABLE = frozenset(
    "down drained draining drain fail failing error unknown future inval maint perfctrs blocked".split()  # noqa: SIM905
)
"""Base states of nodes that take no new job; reboots and power saving pass."""

_DENIED = "permission denied"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}", re.ASCII)
_MAX_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One node in one partition, as sinfo shows it."""

    node: str
    partition: str
    is_default: bool
    """The partition is the cluster's default."""

    usable: bool
    """It takes jobs now, or when those on it have ended."""

    state: str = ""
    """As sinfo shows it, in capital letters and with its suffixes: IDLE, MIXED, DOWN*; empty where it is not known."""

    @property
    def is_free(self) -> bool:
        """Nothing runs on it, and it takes jobs."""
        return self.usable and self.state.rstrip("~#") == "IDLE"


def nodes(*, timeout_s: float = 5.0) -> list[NodeRecord]:
    """Every node of every partition, hidden ones too; one that is in several is there several times. One question.

    Where the site keeps the states of nodes from its users (``PrivateData=nodes``), a second one asks the partitions
    for their names, and every node counts as one that takes jobs.

    Raises:
        SlurmUnavailable: Slurm did not answer; nothing is known, and silence is not health.
        SlurmError: Slurm refused.
    """
    try:
        return parse_nodes(run(["sinfo", "-h", "-a", "-N", "-o", NODE_FORMAT], timeout_s=timeout_s))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        if _DENIED not in error.what:
            raise
    return parse_named(run(["scontrol", "-a", "-o", "show", "partition"], timeout_s=timeout_s))


def parse_named(text: str) -> list[NodeRecord]:
    """The nodes in the output of ``scontrol -o show partition``, of unknown state."""
    found = []
    for pairs in map(parsing.parse_pairs, text.splitlines()):
        try:
            names = expand(pairs.get("Nodes", "").replace("(null)", ""))
        except ValueError:
            continue
        partition, is_default = pairs.get("PartitionName", ""), pairs.get("Default") == "YES"
        found += [NodeRecord(node=name, partition=partition, is_default=is_default, usable=True) for name in names]
    return found


def parse_nodes(text: str) -> list[NodeRecord]:
    """The nodes in the output of ``sinfo -N -o NODE_FORMAT``; lines of another shape are skipped."""
    lines = (line.split("|") for line in text.splitlines())
    return [
        NodeRecord(
            node=fields[0].strip(),
            partition=fields[1].strip().removesuffix("*"),
            is_default=fields[1].strip().endswith("*"),
            usable=is_usable(fields[2]),
            state=fields[2].strip().upper(),
        )
        for fields in lines
        if len(fields) == 3 and fields[0].strip()
    ]


def is_usable(state: str) -> bool:
    """Whether a node in this state, with sinfo's suffixes, takes jobs now or later."""
    word = state.strip().lower()
    base = word.rstrip("*~#!%$@^-+")
    suffixes = word[len(base) :]
    return bool(base) and base not in _UNUSABLE and not set(suffixes) & {"*", "$"}  # not responding, maintenance


def expand(text: str) -> list[str]:
    """The nodes of a hostlist such as ``gpu[01-03,7],login``, each once, in order; zero padding kept.

    Raises:
        ValueError: it is not a hostlist, or has more nodes than any cluster.
    """
    names = list(dict.fromkeys(parsing.expand_hostlist(re.sub(r"\s*,\s*", ",", text.strip()), most=MAX_NODES)))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not the name of a node")
    return names


def compress(names: Iterable[str]) -> str:
    """A short hostlist that every Slurm reads, such as ``n[1-3,08-10],login``; sorted, each name once.

    Only a number at the end of a name is folded: Slurm refuses ``unit[0-31]rack``.
    """
    plain: list[str] = []
    numbers: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        if not prefix or not digits or len(digits) > _MAX_DIGITS or "[" in name or "]" in name:
            plain.append(name)
        else:
            numbers.setdefault(prefix, []).append(digits)
    return ",".join([*(prefix + _folded(found) for prefix, found in numbers.items()), *plain])


def in_order(names: Sequence[str]) -> str:
    """As ``compress``, but in the order of ``names``: folded only where that is the order of a sorted list."""
    folded = compress(names)
    return folded if parsing.expand_hostlist(folded) == list(names) else ",".join(names)


def _folded(numbers: Sequence[str]) -> str:
    """``["08", "09", "10", "12"]`` -> ``[08-10,12]``; numbers of different padding are different."""
    ordered = sorted(numbers, key=lambda digits: (len(digits), int(digits)))
    parts: list[str] = []
    start = previous = ordered[0]
    for number in [*ordered[1:], ""]:
        if number and number == str(int(previous) + 1).zfill(len(start)):
            previous = number
            continue
        parts.append(start if start == previous else f"{start}-{previous}")
        start = previous = number
    return ordered[0] if len(ordered) == 1 else f"[{','.join(parts)}]"


# --- Nodes as a sweep sees them: all of them in one question, and changes that are made only to what was seen ---

FACT_FORMAT = "%N|%T|%E|%H"
PROBE_FORMAT = "%i|%T|%N|%n"
PROBE_NAME = "slurmft-probe"
QUESTION_S = 20.0

_REFUSED = re.compile(r"prolog|batch job complete failure|launch fail|duplicate jobid", re.IGNORECASE)
WITHIN_S = 5.0
"""Slurm drains a node that refuses a job and puts the job back into the queue in one go, to the second."""

_REFUSALS = ("permission denied", "Access/permission", "Invalid user id", "not authorized")


class NotPermitted(SlurmError):
    """Only an administrator may do this."""


def node_facts(*names: str) -> dict[str, NodeFact]:
    """Every node, or these. One question.

    Raises:
        SlurmUnavailable: Slurm did not answer, or named no node at all; nothing is known.
        SlurmError: Slurm refused.
    """
    only = ["-n", ",".join(names)] if names else []
    text = run(["sinfo", "-h", "-a", "-N", *only, "-o", FACT_FORMAT], timeout_s=QUESTION_S)
    facts = parse_facts(text)
    if not facts and not names:
        raise SlurmUnavailable("sinfo names no node")
    return facts


def parse_facts(text: str) -> dict[str, NodeFact]:
    """The nodes in the output of ``sinfo -N -o FACT_FORMAT``, each once; lines of another shape are skipped."""
    found: dict[str, NodeFact] = {}
    for line in text.splitlines():
        name, _, rest = line.strip().partition("|")
        state, bar, why = rest.partition("|")
        if not bar or not name or name in found:
            continue
        word = state.strip().upper()
        base = word.rstrip("*~#!%$@^-+")
        usable = is_usable(state)
        reason, since = _reason_and_time(why)
        found[name] = NodeFact(
            node=name, state=base, usable=usable, is_idle=usable and base == "IDLE" and word.rstrip("~#") == "IDLE",
            reason="" if reason.strip() == "none" else reason.strip(), since=since,
        )  # fmt: skip
    return found


def refusals(at: float) -> list[NodeFact]:
    """Nodes that were drained at that time by the controller's clock, because they could not start a job.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    found = node_facts().values()
    return [each for each in found if _REFUSED.search(each.reason) and abs((each.since or 0.0) - at) <= WITHIN_S]


def _reason_and_time(text: str) -> tuple[str, float | None]:
    """A reason, which may hold any character, and behind it the Unix time since when it holds; None: not known."""
    reason, bar, at = text.rpartition("|")
    if bar and at.strip().isdecimal() and len(at.strip()) <= 12:
        return reason, float(at)
    return (reason, None) if bar and at.strip() in ("Unknown", "None", "N/A") else (text, None)


def change_argv(node: str, changes: Sequence[str]) -> list[str]:
    """The administrator's command that makes these changes, such as ``State=RESUME``."""
    return ["scontrol", "update", f"NodeName={node}", *changes]


def change_node(seen: NodeFact, changes: Sequence[str]) -> str:
    """Change a node that still is as it was seen; returns why it was left alone, or nothing when it is done.

    Raises:
        NotPermitted: we may not.
        SlurmError: Slurm refused, or did not answer.
    """
    now = node_facts(seen.node).get(seen.node)
    if now is None or (now.usable, now.is_drained_by_us, now.reason) != (
        seen.usable, seen.is_drained_by_us, seen.reason,
    ):  # fmt: skip
        words = "Slurm does not name it" if now is None else f"{now.state} {now.reason}".strip()
        return f"{seen.node} has changed meanwhile: {words}"
    try:
        run(change_argv(seen.node, changes))
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        if any(word.lower() in error.what.lower() for word in _REFUSALS):
            raise NotPermitted(f"only an administrator may change {seen.node}") from error
        raise
    return ""


def nodes_under_test() -> frozenset[str]:
    """Nodes for which a job of ours waits or runs, also in a partition that is hidden. One question.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    argv = ["squeue", "-h", "-a", "-u", user_name(), "-n", PROBE_NAME, "-o", PROBE_FORMAT]
    return parse_under_test(run(argv, timeout_s=QUESTION_S))


def parse_under_test(text: str) -> frozenset[str]:
    """The nodes in the output of ``squeue -o PROBE_FORMAT``; of a waiting job those that it asks for."""
    found: set[str] = set()
    for fields in (line.strip().split("|") for line in text.splitlines()):
        for hostlist in fields[2:4] if len(fields) == 4 else ():
            if re.fullmatch(r"[A-Za-z0-9_.,\[\]:-]+", hostlist) and hostlist != "(null)":
                try:
                    found.update(expand(hostlist))
                except ValueError:
                    continue
    return frozenset(found)


def switches() -> dict[str, str]:
    """Node -> the switch, or the block, that it is plugged into; empty where Slurm is not told. One question.

    Raises:
        SlurmUnavailable: Slurm did not answer.
    """
    try:
        return parse_switches(run(["scontrol", "show", "topology"], timeout_s=QUESTION_S))
    except SlurmUnavailable:
        raise
    except SlurmError:
        return {}


def parse_switches(text: str) -> dict[str, str]:
    """The lowest switch of each node in the output of ``scontrol show topology``, of a tree or of blocks."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = facts.get("SwitchName") or facts.get("BlockName")
        if not name or facts.get("Level", "0") != "0":
            continue
        try:
            found.update(dict.fromkeys(expand(facts.get("Nodes", "")), name))
        except ValueError:
            continue
    return found


def probe_argv(
    nodes: Sequence[str], probe: Sequence[str], minutes: int, *, partition: str = "", qos: str = ""
) -> list[str]:
    """The command that submits a short look at one node, or at a pair, which reduces together: alone on them, never
    twice, at the lowest priority."""
    if len(nodes) > 1:
        probe = ["srun", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *probe]
    options = [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--exclusive", f"--time={minutes}",
               f"--job-name={PROBE_NAME}", "--no-requeue", "--nice=10000", "--output=/dev/null",
               f"--deadline=now+{2 * minutes + 10}minutes", f"--wrap={shlex.join(probe)}"]  # fmt: skip
    where = [f"--{name}={value}" for name, value in (("partition", partition), ("qos", qos)) if value]
    return ["sbatch", "--parsable", *where, *options]


def probe_command(configuration: Path | None) -> list[str]:
    """The look itself, with this interpreter, which the nodes must have as well."""
    named = [] if configuration is None else ["--config", str(configuration)]
    return [sys.executable, "-P", "-m", "slurmft", "health", "--context", "cron", "--level", "2", *named]
