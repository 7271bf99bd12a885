"""What a run with roles reads of a role's end."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmft.config.run import from_values, roles_of
from slurmft.policy.decide import RoleEnd
from slurmft.policy.verdict import Cause
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import roles
from slurmft.supervisor.cluster import LocalCluster, Start
from slurmft.supervisor.roles import RolesAttempt, _end_of, _last_verdict, _Live


def test_the_verdict_of_an_earlier_attempt_is_not_that_of_this_one(tmp_path: Path) -> None:
    config = from_values({"run_folder": str(tmp_path), "roles": {"trainer": {"command": ["x"]}}}, source="test")
    (role,) = roles_of(config)
    run = RunFolder(tmp_path / "roles/trainer")
    run.create()
    live = _Live(role, run, ("n1",))
    run.journal().append(EventName.VERDICT, cause="preempted", reason="SIGTERM at the supervisor")
    assert _last_verdict(live) == {}, "it has not begun"
    live.began = datetime.now(UTC) + timedelta(seconds=1)
    assert _last_verdict(live) == {}
    live.began = datetime.now(UTC) - timedelta(seconds=60)
    assert _last_verdict(live)["cause"] == "preempted"


def test_a_killed_supervisor_has_decided_nothing_where_an_attempt_had_followed_its_decision(tmp_path: Path) -> None:
    config = from_values({"run_folder": str(tmp_path), "roles": {"trainer": {"command": ["x"]}}}, source="test")
    (role,) = roles_of(config)
    run = RunFolder(tmp_path / "roles/trainer")
    run.create()
    live = _Live(role, run, ("n1",), code=137, began=datetime.now(UTC) - timedelta(seconds=60))
    assert _end_of(live) == RoleEnd(code=137), "it has not begun an attempt"
    journal = run.journal()
    journal.append(EventName.ATTEMPT_STARTED)
    journal.append(EventName.VERDICT, cause="worker_error", reason="exit code 1")
    journal.append(EventName.DECISION, action="restart", reason="exit code 1")
    assert _end_of(live) == RoleEnd(code=137), "killed before the attempt that was to follow"
    journal.append(EventName.ATTEMPT_STARTED)
    assert _end_of(live) == RoleEnd(code=137)
    journal.append(EventName.VERDICT, cause="worker_error", reason="exit code 1")
    journal.append(EventName.DECISION, action="continue", reason="exit code 1", avoid=["n1"])
    assert _end_of(live) == RoleEnd(code=137, cause="worker_error", action="continue", avoid=("n1",))


async def test_roles_that_are_done_are_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of the job was killed, and they had finished before the next one looked."""
    values = {"run_folder": str(tmp_path / "run"), "roles": {"trainer": {"command": ["x"]}, "eval": {"command": ["y"]}}}
    config = from_values(values, source="test")
    run, thread, cluster = RunFolder(config.run_folder), FolderThread(), LocalCluster({})
    run.create()
    run.attempt_folder(cluster.attempt)
    for role in roles_of(config):
        of_role = RunFolder(role.config.run_folder)
        of_role.create()
        of_role.mark_done(step=7, job="1", reason="all ranks finished at step 7")
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    start = Start(cluster=cluster, run=run, journal=journal, thread=thread, generation=2, history=(), secret=b"")
    monkeypatch.setattr(roles, "adopt_orphans", lambda: None)
    attempt = RolesAttempt(config, start, SimpleNamespace(), SimpleNamespace(outlived_roles=()))  # type: ignore[arg-type]
    verdict = await asyncio.wait_for(attempt.run(), 60)
    journal.flush(10.0)
    assert (verdict.cause, verdict.exit_code) == (Cause.FINISHED, 0)
    events = [event.event for event in run.journal().read()]
    assert events.count(EventName.ROLE_ENDED) == 2
    assert EventName.ROLE_STARTED not in events
