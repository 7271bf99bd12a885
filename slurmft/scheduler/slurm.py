"""Everything slurmft asks of Slurm. Add a question here, nowhere else."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmft.errors import SlurmError
from slurmft.policy.timing.grace import KILL_WAIT_S, SlurmClock, Terms
from slurmft.scheduler import command
from slurmft.scheduler.parsing.parsing import (
    JOB_FORMAT,
    JobRecord,
    parse_jobs,
    parse_pairs,
)
from slurmft.scheduler.site import (
    Partition,
    Site,
    parse_configuration,
    parse_partitions,
    parse_site,
)
from slurmft.system.opening import read_text

PATIENCE_S = 30.0
JOBS_AT_ONCE = 2000

log = logging.getLogger(__name__)
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
        return "ClusterName" in command.run(["scontrol", "show", "config"], timeout_s=3.0)
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


def jobs(job_ids: Sequence[str], *, patience_s: float = 5.0, cluster: str = "") -> dict[str, JobRecord]:
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
    argv = ["squeue", "-h", "-a", "-t", "all", "-j", ",".join(job_ids), "-o", JOB_FORMAT]
    try:
        text = command.run_patiently(argv, patience_s=patience_s, cluster=cluster)
    except SlurmError as error:
        if "Invalid job id specified" in error.what:  # all of them are forgotten; ": x" would be one that is not an id
            return {}
        raise
    return {record.job_id: record for record in parse_jobs(text)}


def job(job_id: str, *, patience_s: float = 5.0) -> JobRecord | None:
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
    return parse_partitions(command.run(["scontrol", "--all", "--oneliner", "show", "partition"], timeout_s=timeout_s))


def site(*, timeout_s: float = 3.0) -> Site:
    """What holds for the whole cluster. Not tried again.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return parse_site(command.run(["scontrol", "show", "config"], timeout_s=timeout_s))


def configuration(*, timeout_s: float = 10.0) -> dict[str, str]:
    """All that ``scontrol show config`` says, by key; ``as of`` is when. For advice, not for decisions.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return parse_configuration(command.run(["scontrol", "show", "config"], timeout_s=timeout_s))


def federation() -> str:
    """The federation that this cluster belongs to; empty where it belongs to none, or Slurm does not tell."""
    try:
        text = command.run(["scontrol", "show", "federation"], timeout_s=3.0)
    except SlurmError:
        return ""
    return match[1] if (match := re.search(r"^Federation:\s*(\S+)", text, re.MULTILINE)) else ""


def admin_level(user: str) -> str:
    """The user's level in the accounting, such as Operator; empty where it does not know the user.

    Raises:
        SlurmError: there is no accounting, or it did not answer.
    """
    argv = ["sacctmgr", "-n", "-P", "show", "user", user, "format=AdminLevel"]
    return command.run(argv, timeout_s=5.0).strip().partition("\n")[0]


def preempt_mode(partition: str) -> str:
    """How jobs of this partition are preempted: REQUEUE, CANCEL, SUSPEND or OFF, without extra flags.

    Raises:
        SlurmUnavailable: Slurm did not answer.
        SlurmError: no such partition.
    """
    pairs = parse_pairs(command.run_patiently(["scontrol", "-o", "show", "partition", partition], patience_s=5.0))
    words = pairs.get("PreemptMode", "OFF").split(",")  # with GANG, in either order
    return next((word for word in words if word in ("REQUEUE", "CANCEL", "SUSPEND")), "OFF")
