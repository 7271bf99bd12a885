"""Output of 22.05.8, 23.11.4, 24.11.5, 25.11.2 and 26.05.5, recorded on clusters of one shape: each says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.policy.job_identity import is_same_job
from slurmft.scheduler.nodes import parse_facts, parse_nodes
from slurmft.scheduler.parsing import (
    JobEnding,
    is_held_by_launch,
    parse_ending,
    parse_identity,
    parse_jobs,
    parse_named,
    why_held,
)

VERSIONS = pytest.mark.parametrize("version", ["22.05", "23.11", "24.11", "25.11", "26.05"])


def recorded(version: str, name: str) -> str:
    return (Path(__file__).parents[2] / "data" / "slurm" / version / f"{name}.txt").read_text()


@VERSIONS
def test_jobs_that_run_wait_and_are_held(version: str) -> None:
    found = {job.job_id: job for job in parse_jobs(recorded(version, "squeue"))}
    running, waiting, held = (found[number] for number in "123")
    assert (running.state, running.nodes, running.batch_host, running.limit_s) == ("RUNNING", "n[1-2]", "n1", 600)
    assert running.identity.name == "a | b", "the user's text"
    assert running.end - running.start == 600
    assert (waiting.state, waiting.reason, waiting.nodes, waiting.batch_host) == ("PENDING", "BeginTime", "", "")
    assert not why_held(waiting.reason)
    assert why_held(held.reason)
    assert not is_held_by_launch(held.reason)
    for job in found.values():
        assert (job.identity.user, job.identity.script) == (1000, "/home/someone/train.sh")
        assert len(job.identity.submitted) == 1


@VERSIONS
@pytest.mark.parametrize(
    ("name", "restart", "ending"),
    [
        ("job-calm", 0, JobEnding.NOT_ENDING),
        ("job-grace", 0, JobEnding.NOT_ENDING),
        ("job-requeued", 0, JobEnding.REQUEUED),
        ("job-later-start", 0, JobEnding.REQUEUED),
        ("job-later-start", 1, JobEnding.NOT_ENDING),
        ("job-cancelled", 1, JobEnding.CANCELLED),
    ],
)
def test_why_a_job_ends(version: str, name: str, restart: int, ending: JobEnding) -> None:
    assert parse_ending(recorded(version, name), restart, grace_s=20) is ending


@VERSIONS
def test_a_job_is_the_same_one_after_a_requeue_and_names_no_nodes(version: str) -> None:
    """26.05 also shows the line with which it was submitted, between the script and the folder."""
    calm, later = (parse_identity(recorded(version, name)) for name in ("job-calm", "job-later-start"))
    assert (calm.user, calm.name, calm.restarts, later.restarts) == (1000, "meas.sh", 0, 1)
    assert calm.script == "/home/someone/meas.sh"
    assert calm.folder == "/home/someone"
    assert later.submitted > calm.submitted, "a requeue counts as a submission"
    assert is_same_job(calm, later) is not False
    assert not parse_named(recorded(version, "job-calm")).excluded


@VERSIONS
def test_nodes_and_why_one_is_drained(version: str) -> None:
    nodes = parse_nodes(recorded(version, "sinfo-nodes"))
    assert {each.partition for each in nodes} == {"low", "nograce", "cancel", "high"}
    assert {each.node for each in nodes if each.usable} == {"n1", "n2"}
    assert {each.partition for each in nodes if each.is_default} == {"low"}
    facts = parse_facts(recorded(version, "sinfo-facts"))
    assert set(facts) == {"n1", "n2", "n3"}
    assert (facts["n3"].state, facts["n3"].reason) == ("DRAINED", "a reason | with a bar")
    assert facts["n3"].since is not None


@VERSIONS
def test_a_job_that_slurm_does_not_know_is_told_in_the_same_words(version: str) -> None:
    assert "Invalid job id specified" in recorded(version, "unknown-job")
