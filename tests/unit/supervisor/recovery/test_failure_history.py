"""How often a run failed, from its journal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from slurmft.agent.workers import worker_environment
from slurmft.config.run import validate
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.interval import FailureHistory, mtbf_s
from slurmft.policy.worker_settings import WorkerSettings
from slurmft.storage.journal import Event
from slurmft.supervisor.act import facts_for_workers, history_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1)


def event(at_s: float, name: str, attempt: str = "7.0.0", **details: Any) -> Event:
    return Event(at=NOON + timedelta(seconds=at_s), event=name, attempt=attempt, details=details)


def attempt(at_s: float, seconds: float, name: str, cause: str, ranks: int = 8, steps: int = 100) -> list[Event]:
    return [
        event(at_s, "attempt started", name),
        event(at_s + 10, "workers started", name, world_size=ranks),
        event(at_s + 10 + seconds, "verdict", name, cause=cause, first_step=5, last_step=5 + steps),
        event(at_s + 10 + seconds, "decision", name, action="restart"),
    ]


@pytest.mark.parametrize(
    ("events", "failures", "node_s"),
    [
        ([], 0, 0.0),
        (attempt(0, 100, "7.0.0", "node lost"), 1, 200.0),
        (attempt(0, 100, "7.0.0", "node lost") + attempt(200, 50, "7.0.1", "hang", ranks=4), 2, 250.0),
        (attempt(0, 100, "7.0.0", "preempted") + attempt(200, 50, "7.1.0", "finished"), 0, 300.0),
        (attempt(0, 100, "7.0.0", "worker error", steps=0), 0, 200.0),
        ([*attempt(0, 100, "7.0.0", "preempted"), event(111, "stop without a save")], 1, 202.0),
        ([event(0, "workers started", world_size=4), event(60, "save failed")], 0, 60.0),
        ([event(0, "workers started", world_size="many"), event(-60, "verdict", cause=["?"])], 0, 0.0),
        ([event(0, "workers started", world_size=1 << 60), event(60, "verdict", last_step="x", cause="hang")], 0, 60.0),
    ],
    ids=["nothing", "one failure", "two sizes", "planned", "before any step", "stop that came to nothing", "under way",
         "damaged", "damaged more"],
)  # fmt: skip
def test_what_the_journal_tells(events, failures, node_s):
    assert history_of(events, 4) == FailureHistory(failures=failures, node_s=node_s)


def test_workers_learn_how_often_the_run_fails():
    config = validate({"command": "x", "run_folder": "/r/n", "nodes": 2, "nproc_per_node": 4}, source="t")
    history = attempt(0, 86_400, "7.0.0", "node lost")
    told = facts_for_workers(history, config, nodes=2)
    expected = mtbf_s(FailureHistory(failures=1, node_s=2 * 86_400), 2)
    assert told == {"batch_divisor": 1, "mtbf_s": pytest.approx(expected, abs=0.1)}
    environment = worker_environment(config, {}, replace(START, **told), 0, "7.0.1")
    assert WorkerSettings.from_environment(environment).checkpoint.mtbf_s == told["mtbf_s"]
