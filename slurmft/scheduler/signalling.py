"""Disturbing an own job on purpose: the signal of a preemption, or a preemption."""

from __future__ import annotations

from pathlib import Path

from slurmft.policy.site.job_identity import OwnJob
from slurmft.scheduler import command
from slurmft.scheduler.own_jobs import cluster_to_ask, show


def signal_argv(job_id: str) -> list[str]:
    """The command that sends SIGTERM to the processes of the job's steps."""
    return ["scancel", "--signal=TERM", job_id]


def signal_job(job: OwnJob) -> None:
    """Send SIGTERM to the processes of the job's steps, as the beginning of a grace does; the job stays.

    Raises:
        SlurmError: Slurm refused or did not answer, or another job has the id.
    """
    show(job)
    command.run(signal_argv(job.job_id), cluster=cluster_to_ask(job))


def preempt_argv(nodes: str, partition: str) -> list[str]:
    """The command that submits a job of one second for just these nodes (a hostlist), exclusively."""
    return ["sbatch", "--parsable", f"--partition={partition}", f"--nodelist={nodes}", "--exclusive", "--time=1",
            "--job-name=slurmft-drill-preemptor", "--output=/dev/null", "--no-requeue", "--wrap=sleep 1"]  # fmt: skip


def preempt(nodes: str, partition: str) -> str:
    """Submit it; returns its id.

    Raises:
        SlurmError: Slurm refused or did not answer.
    """
    return command.run(preempt_argv(nodes, partition), folder=Path("/")).strip().split(";")[0]
