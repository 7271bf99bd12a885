"""Inside a job that lends its nodes: agents there report to the run's supervisor, as long as both live.

They find it as its own agents do, by the address and the secret in the run folder, which only the run's user can read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Mapping

from slurmft.agent.workers import LENDER_VARIABLE
from slurmft.config.run import RunConfig
from slurmft.errors import SlurmUnavailable, StorageError, UsageError
from slurmft.operations.run_configuration import configuration_of
from slurmft.policy.verdict import EXIT_TEMPORARY, Action
from slurmft.scheduler.environment import SlurmJob, current_job
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.agents import crew_of
from slurmft.supervisor.cluster import agents_argv, environment_for

LOOK_S = 2.0
_GOES_ON = (EventName.SUBMITTING, EventName.ATTEMPT_STARTED, EventName.REQUEUED_MEANWHILE)
PATIENCE_S = 1800.0
"""How long a lending job waits for a run that is between two jobs, before it gives its nodes back."""

log = logging.getLogger(__name__)


def lend(run: RunFolder, environment: Mapping[str, str]) -> int:
    """Keep agents for the run on this job's nodes; returns when the run is over, or has not used them for long.

    Raises:
        UsageError: this is not a job, or not the run's user.
        SlurmUnavailable: there is no srun.
    """
    job = current_job(environment)
    if job is None:
        raise UsageError("this is not inside a Slurm job", hint=f"slurmft join {run.path}")
    config = configuration_of(run)
    wanted_s = time.monotonic()
    while run.done() is None and time.monotonic() - wanted_s < PATIENCE_S:
        if (crew := crew_of(run)) is None:
            if _was_stopped(run):
                return 0
            time.sleep(LOOK_S)
            continue
        code = _serve(config, crew, job, environment)
        if code == EXIT_TEMPORARY:  # the agents were notified that this job ends, and have given their nodes back
            return 0
        wanted_s = time.monotonic()
        time.sleep(LOOK_S)
    return 0


def _was_stopped(run: RunFolder) -> bool:
    """Whether nothing follows the last attempt, and the run is not queued again; False where that cannot be known."""
    with contextlib.suppress(StorageError):
        told = [one for one in run.journal().read() if one.event in (EventName.DECISION, *_GOES_ON)]
        return bool(told) and told[-1].event == EventName.DECISION and told[-1].details.get("action") == Action.STOP
    return False


def _serve(config: RunConfig, crew: Attempt, job: SlurmJob, environment: Mapping[str, str]) -> int:
    argv = agents_argv(config, environment, job.node_count, crew)
    log.info("lending %s to run %s", job.nodes, config.name)
    try:
        with subprocess.Popen(
            argv,
            env={**environment_for(config, os.environ), LENDER_VARIABLE: job.job_id},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            return process.wait()
    except FileNotFoundError as error:
        raise SlurmUnavailable("there is no srun on this node") from error
