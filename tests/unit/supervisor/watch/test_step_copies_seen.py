"""Copies of steps between saves, as the supervisor tells of them: in the journal, in the progress report, in status."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.worker_facts import WorkerFacts
from slurmft.operations.status import overview
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.watch.observations import Observations

ATTEMPT = Attempt(job="7", restart=0)


def facts(*, step: int, saved: int = -1, **copies: int | None) -> WorkerFacts:
    return WorkerFacts(
        rank=0, state=int(State.TRAINING), attached=True, step=step, until=90, saved=saved, durable=-1, resumed=0,
        first_step_at=0.0, answered=-1, metric=0.5, first_step_s=0.0, longest_step_s=0.0, saves=0, save_s=0.0,
        saving_s=0.0, since_saved_s=0.0, save_failures=0, save_errno=0, save_cost_s=0.0, **copies,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_each_doubling_is_told_once(run, caplog):
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    seen.note_progress([facts(step=5)])
    for step in (10, 11):
        seen.note_progress([facts(step=step, copied=9, copy_interval=2, copy_share_ppm=61_230)])
    seen.note_progress([facts(step=40, copied=36, copy_interval=8, copy_share_ppm=50_001)])
    told = [(event.event, event.details) for event in run.journal().read()]
    assert told == [
        ("step copies spaced out", {"step": 10, "interval": 2, "share": 0.0612}),
        ("step copies spaced out", {"step": 40, "interval": 8, "share": 0.05}),
    ]
    assert "steps are copied every 2 steps now: it took 6.1 % of their time" in caplog.text


def test_status_names_the_newest_step_in_memory_where_no_checkpoint_has_it(run, monkeypatch):
    monkeypatch.setattr("slurmft.operations.status._state", lambda *_: ("running", "job 7 running on n1"))
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    for step, saved, copied, shown in ((5, -1, None, ""), (9, 1, 8, "8"), (10, 1, None, "8"), (12, 12, 11, "")):
        seen.note_progress([facts(step=step, saved=saved, copied=copied)])
        seen.write_progress()
        detail = overview(run, {}).detail
        assert detail == "job 7 running on n1" + (f"; step {shown} is in memory on all nodes" if shown else "")


def test_what_the_page_says_comes_through_a_message():
    told = facts(step=9, copied=8, copy_interval=4, copy_share_ppm=70_000)
    assert WorkerFacts.parse(told.as_mapping(), "a report") == told
    plain = facts(step=9)
    assert "copied" not in plain.as_mapping()
    odd = {**told.as_mapping(), "copied": "many", "copy_interval": -1}
    assert WorkerFacts.parse(odd, "a report") == facts(step=9, copy_share_ppm=70_000)
