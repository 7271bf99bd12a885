"""A node's next workers begin when those before them have ended, and have let go of the GPUs' memory."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from slurmft.agent import agent
from slurmft.ipc.messages import StartWorkers


@pytest.mark.parametrize("held", [set(), {41}])
def test_workers_begin_when_the_memory_of_those_before_is_free(tmp_path, monkeypatch, caplog, held):
    happened: list[str] = []

    async def end_earlier() -> None:
        happened.append("ended")

    def wait_until_free(pids: set[int], _: object) -> set[int]:
        happened.append(f"free of {sorted(pids)}")
        return held

    workers = SimpleNamespace(
        end_earlier=end_earlier, earlier_pids=lambda: {41, 42}, by_rank={},
        start=lambda *_, **__: happened.append("begun"),
    )  # fmt: skip
    node = SimpleNamespace(
        _config=SimpleNamespace(
            nproc_per_node=2, launcher="agent", trainer_directory=tmp_path,
            straggler_detection=SimpleNamespace(enabled=False, report_time_interval=1.0),
        ),
        _environment={}, _workers=workers, _generation=0, _begin_keeping=lambda *_: None,
        _hangs=SimpleNamespace(begin=lambda *_, **__: None),
        _rehearsal=SimpleNamespace(stop=AsyncMock()),
        _run=SimpleNamespace(attempts=tmp_path, verdicts=Path(tmp_path)),
    )  # fmt: skip
    monkeypatch.setattr(agent, "wait_until_free", wait_until_free)
    monkeypatch.setattr(agent, "worker_environment", lambda *_: {})
    monkeypatch.setattr(agent, "worker_command", lambda _: [])
    call = StartWorkers(
        attempt="7.0.0", cycle=0, generation=1, first_rank=0, nodes=1, master_addr="n1", master_port=1, limits={}
    )
    with caplog.at_level(logging.ERROR):
        asyncio.run(agent.Agent._start(node, call))
    assert happened == ["ended", "free of [41, 42]", "begun"]
    assert ("41" in caplog.text) == bool(held)
