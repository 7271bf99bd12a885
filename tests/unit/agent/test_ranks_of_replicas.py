"""Which rank each replica and each router of a node has, and whose end is told to whom."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.agent.inference import NodeReplicas
from slurmft.config.run import validate
from slurmft.ipc.messages import BeginReplicas

PER_NODE = 2


@pytest.mark.parametrize(("serving", "stride"), [(None, PER_NODE), ({"routers": 2}, PER_NODE + 1)])
@pytest.mark.parametrize("node", [0, 1, 5])
async def test_no_two_processes_of_a_run_have_the_same_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: dict[str, int] | None, stride: int, node: int
) -> None:
    given: dict[str, Any] = {"engine": {"command": ["engine", "{socket}"]}, "replicas_per_node": PER_NODE}
    given |= {"serving": serving} if serving else {"input": "requests.jsonl"}
    config = validate({"run_folder": str(tmp_path / "run"), "nodes": 6, "inference": given}, source="it")
    workers: Any = SimpleNamespace(folder=tmp_path, kill_one=lambda rank: None)
    replicas = NodeReplicas(config, {}, workers, node=0, host="n", report=lambda _sent: None)
    heard: list[tuple[str, int]] = []

    async def begun(**_facts: int) -> None: ...

    monkeypatch.setattr(replicas._pool, "begin", begun)
    monkeypatch.setattr(replicas._pool, "on_exit", lambda number, code: heard.append(("replica", number)))
    if replicas._router is not None:
        monkeypatch.setattr(replicas._router, "on_exit", lambda code: heard.append(("router", 0)))
    # the number of a node that another job lends is known only now
    begin = BeginReplicas(attempt="1.0.0", epoch=1, generation=1, node=node)
    assert await replicas.handle(begin)
    for rank in range(node * stride, (node + 1) * stride):
        replicas.on_exit(SimpleNamespace(rank=rank, exit_code=1))  # type: ignore[arg-type]
    assert heard == [*(("replica", each) for each in range(PER_NODE)), *([("router", 0)] if serving else [])]
