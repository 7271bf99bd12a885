"""Copies of steps between saves, as the supervisor tells of them: in the journal, in the progress report, in status."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_facts import training

from slurmft.ipc.messages import WorkerFacts
from slurmft.operations.status import overview
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.observations import Observations

ATTEMPT = Attempt(job="7", restart=0)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_each_doubling_is_told_once(run, caplog):
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    seen.note_progress([training(step=5)])
    for step in (10, 11):
        seen.note_progress([training(step=step, copied=9, copy_interval=2, copy_share_ppm=61_230)])
    seen.note_progress([training(step=40, copied=36, copy_interval=8, copy_share_ppm=50_001)])
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
        seen.note_progress([training(step=step, saved=saved, copied=copied)])
        seen.write_progress()
        detail = overview(run, {}).detail
        assert detail == "job 7 running on n1" + (f"; step {shown} is in memory on all nodes" if shown else "")


def test_what_the_page_says_comes_through_a_message():
    told = training(step=9, copied=8, copy_interval=4, copy_share_ppm=70_000)
    assert WorkerFacts.parse(told.as_mapping(), "a report") == told
    plain = training(step=9)
    assert "copied" not in plain.as_mapping()
    odd = {**told.as_mapping(), "copied": "many", "copy_interval": -1}
    assert WorkerFacts.parse(odd, "a report") == training(step=9, copy_share_ppm=70_000)
