"""The work of Slurm's hooks on a node, and the lines of slurm.conf that call them.

Slurm drains a node whose prolog or epilog fails, so the scripts in ``bin/`` end with 0 on any error of ours; the one
exit code that they pass on is REFUSED, of a prolog that is allowed to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import slurmft.errors
from slurmft.health import requeued
from slurmft.health.checker import keep, load_config, look, scene_here
from slurmft.health.cleaning import clean
from slurmft.policy.nodes.node_health import Checkup, Status, drain_reason

REFUSED = 40
"""Exit code of a prolog that refuses the node; not one of ours, of the shell, or of Python."""

SCRIPTS = ("slurmft-healthcheck", "slurmft-prolog", "slurmft-epilog", "slurmft-epilog-slurmctld")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a hook."""

    words: str
    exit_code: int = 0


def prolog(environment: Mapping[str, str]) -> Outcome:
    """The fast probes before a job; they refuse the node only where the configuration lets them.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    found, problems, refuses = _checked(environment, "prolog")
    failed = [result for result in found.results if result.status is Status.CRITICAL]
    if failed and refuses:
        reason = drain_reason(failed[0].problem, failed[0].name, failed[0].detail)
        return Outcome(words=reason, exit_code=REFUSED)
    return Outcome(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def healthcheck(environment: Mapping[str, str]) -> Outcome:
    """The fast probes, patiently, for the sweep; nothing is drained here.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    found, problems, _ = _checked(environment, "healthcheck")
    return Outcome(words="; ".join([f"{found.node} is {found.status.name}", *problems]))


def epilog(environment: Mapping[str, str]) -> Outcome:
    """Clean up after the job that has ended.

    Raises:
        SlurmftError: the configuration cannot be used.
    """
    config = load_config(None, environment)
    if not config.hooks.clean:
        return Outcome(words="hooks.clean is off")
    job, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    scene = scene_here(config, environment, context="epilog", level=1)
    return Outcome(words=str(clean(scene, job, int(uid) if uid.isdecimal() else -1)))


def epilog_slurmctld(environment: Mapping[str, str]) -> Outcome:
    """See whether the job goes back into the queue, and let it begin at once; returns before that."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return Outcome(words="there is no SLURM_JOB_ID: nothing to do")
    if environment.get("SLURM_JOB_RESTART_COUNT") == "0":  # a requeue has counted already when we are called
        return Outcome(words=f"job {job} has never been requeued")
    requeued.follow_in_background(job)
    return Outcome(words=f"following job {job}")


HOOKS: Mapping[str, Callable[[Mapping[str, str]], Outcome]] = {
    "prolog": prolog, "epilog": epilog, "healthcheck": healthcheck, "epilog-slurmctld": epilog_slurmctld,
}  # fmt: skip


def slurm_conf_lines(scripts: Path) -> str:
    """The lines for slurm.conf, with what each one does.

    Raises:
        UsageError: the scripts are not there.
    """
    missing = [name for name in SCRIPTS if not (scripts / name).is_file()]
    if missing:
        raise slurmft.errors.UsageError(
            f"there is no {scripts / missing[0]}",
            hint="the hooks are in bin/ of slurmft's repository; install from a clone of it",
        )
    return f"""\
# slurmft's hooks; each line may be left out. They end with 0 on any fault of their own, and run no Slurm command but
# the last. Settings: /etc/slurmft/health.yaml (configs/health.yaml shows all of them).

# Probes every five minutes, on all nodes; results go to results_folder, where slurmft sweep reads them.
HealthCheckProgram={scripts}/slurmft-healthcheck
HealthCheckInterval=300
HealthCheckNodeState=ANY,CYCLE

# Probes before each job, under two seconds; refuses nothing unless hooks.prolog_refuses is on.
Prolog={scripts}/slurmft-prolog

# Ends what the job has left: its processes, and its shared memory.
Epilog={scripts}/slurmft-epilog
PrologEpilogTimeout=60

# On the controller, optional: requeued jobs begin at once instead of after 121 s. One squeue per job that ends, a few
# where it is requeued. A slurmctld that had no EpilogSlurmctld must be restarted to take it; reconfigure is not enough.
EpilogSlurmctld={scripts}/slurmft-epilog-slurmctld
"""


def _checked(environment: Mapping[str, str], context: str) -> tuple[Checkup, list[str], bool]:
    scene = scene_here(load_config(None, environment), environment, context=context, level=1)
    found, problems = keep(look(scene), scene.config)
    return found, problems, scene.config.hooks.prolog_refuses
