"""What a run with roles reads of a role's end."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurmft.config.run import from_values, roles_of
from slurmft.policy.decide import RoleEnd
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.roles import _end_of, _last_verdict, _Live


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
