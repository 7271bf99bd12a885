"""What a run with roles reads of a role's end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurmft.config.run import from_values, roles_of
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.roles import _last_verdict, _Live


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
