"""After a requeue Slurm makes a job wait for ``cred_expire`` + 1 s, 121 by default. On the controller, as SlurmUser,
that wait can be cut short for the jobs of all users, as ``bin/slurmft-epilog-slurmctld`` does.

The job is COMPLETING as long as EpilogSlurmctld runs, so the follower is a process that outlives it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from slurmft.errors import SlurmError
from slurmft.policy.site.job_identity import OwnJob
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing.parsing import JobRecord
from slurmft.scheduler.queueing import SOONEST_S, begin_in

SLURMS_WAIT_S = 130.0
"""A begin time that is further away was requested."""

FOLLOW_S = 180.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0


def follow_in_background(job: str) -> None:
    """Start the follower in a session of its own: slurmctld ends the group of the script that started it."""
    argv = [sys.executable, "-P", "-m", "slurmft", "hooks", "run", "follow-requeue", job]
    subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     start_new_session=True, close_fds=True)  # fmt: skip


def follow(
    job: str,
    *,
    look: Callable[[str], JobRecord | None] = slurm.job,
    begin: Callable[[OwnJob, int], None] = begin_in,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the job is in the queue again, and let it begin at once; False where it was not requeued, was put off
    on purpose, is held, or does not come within three minutes.

    Raises:
        SlurmError: Slurm refused or did not answer; the job begins after Slurm's own wait.
    """
    deadline, pause = now() + FOLLOW_S, FIRST_PAUSE_S
    while now() < deadline:
        record = look(job)
        if record is None:
            return False
        if waits_for_slurm(record, now()):
            begin(OwnJob(job, record.identity), SOONEST_S)
            return True
        # right after COMPLETING it is PENDING for a moment for no reason
        if record.state != "COMPLETING" and (record.state, record.reason) != ("PENDING", "None"):
            return False
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return False


def waits_for_slurm(record: JobRecord, now: float) -> bool:
    """Whether it waits only for the time after a requeue, and for longer than it must."""
    if record.state != "PENDING" or record.reason != "BeginTime" or record.start is None:
        return False
    return SOONEST_S + 1 < record.start - now <= SLURMS_WAIT_S


def follow_quietly(job: str) -> str:
    """``follow``, with its result in words."""
    try:
        return f"job {job} may begin now" if follow(job) else f"job {job} is left alone"
    except SlurmError as error:
        return f"job {job} begins after Slurm's own wait: {error.what}"
