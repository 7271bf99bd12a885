"""``slurmft run``: take the run over, run one attempt, act on its verdict."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping

import psutil

from slurmft.config import RunConfig
from slurmft.errors import RunBusy, SlurmError, UsageError
from slurmft.launch.cluster import Cluster, detect
from slurmft.launch.ending import Ending
from slurmft.launch.supervisor import Supervisor
from slurmft.scheduler import slurm
from slurmft.storage.files import replace_atomically
from slurmft.storage.journal import Journal
from slurmft.storage.run_folder import Owner, RunFolder

log = logging.getLogger(__name__)


def supervise(config: RunConfig, environment: Mapping[str, str]) -> int:
    """Run one attempt of ``config`` and what follows it; returns the batch script's exit code.

    Raises:
        RunBusy: another live job trains this run.
        SlurmftError: nothing was started.
    """
    cluster, run = detect(environment), RunFolder(config.run_folder)
    _refuse_too_few_nodes(config, environment)
    run.create()
    if not run.config.exists():
        replace_atomically(run.config, config.as_yaml())
    journal = run.journal(cluster.attempt)
    if (done := run.done()) is not None:
        journal.append("already finished", step=done.get("step"))
        log.info("run %s is finished (%s); nothing to do", config.name, done.get("reason"))
        return 0
    generation = _take_over(run, cluster)
    journal.append("attempt started", generation=generation, cluster=cluster.name, host=os.uname().nodename,
                   nodes=environment.get("SLURM_JOB_NODELIST", ""))  # fmt: skip
    log.info("run %s, attempt %s; workers write to %s", config.name, cluster.attempt,
             run.attempts / str(cluster.attempt))  # fmt: skip
    _drop_stale_requests(run, journal)
    verdict = asyncio.run(Supervisor(config, cluster, run, journal, generation).run())
    return Ending(config, cluster, run, journal).act_on(verdict)


def _refuse_too_few_nodes(config: RunConfig, environment: Mapping[str, str]) -> None:
    allocated = int(environment.get("SLURM_JOB_NUM_NODES", config.nodes))
    if allocated < config.nodes:
        raise UsageError(
            f"the configuration asks for nodes: {config.nodes}, but this job has {allocated}",
            hint="make --nodes of the batch script and nodes of the configuration agree",
        )


def _take_over(run: RunFolder, cluster: Cluster) -> int:
    with run.lock():
        before = run.owner()
        if before is not None and before.job != cluster.attempt.job and owner_lives(before):
            raise RunBusy(
                f"run {run.path.name} is being trained by job {before.job}",
                hint=f"slurmft stop {run.path.name} ends it after a save",
            )
        generation = 1 if before is None else before.generation + 1
        run.take_over(
            Owner(
                job=cluster.attempt.job,
                restart=cluster.attempt.restart,
                generation=generation,
                cluster=cluster.name,
                host=os.uname().nodename,
                pid=os.getpid(),
                pid_started=psutil.Process().create_time(),
            )
        )
        run.add_job(cluster.attempt.job)
    return generation


def owner_lives(owner: Owner) -> bool:
    """Whether the owner's job has nodes, or its local process runs.

    When Slurm does not answer the owner counts as gone: the fence keeps a living one from doing harm.
    """
    if owner.cluster == "local":
        return owner.host == os.uname().nodename and _process_lives(owner)
    try:
        record = slurm.job(owner.job, patience_s=30.0)
    except SlurmError as error:
        log.warning("cannot tell whether job %s still runs: %s", owner.job, error.what)
        return False
    return record is not None and record.alive and record.state != "COMPLETING"


def _process_lives(owner: Owner) -> bool:
    try:
        return abs(psutil.Process(owner.pid).create_time() - owner.pid_started) < 1.0
    except psutil.Error:
        return False


def _drop_stale_requests(run: RunFolder, journal: Journal) -> None:
    """A SAVE or REQUEUE left for an earlier attempt has been overtaken; a KILL has not: it still means stop."""
    for kind in ("SAVE", "REQUEUE"):
        if (run.path / kind).exists() and (who := run.take_request(kind)) is not None:
            journal.append("dropped a stale request", request=kind, who=who)
