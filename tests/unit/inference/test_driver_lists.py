"""A driver hands lists to a callable, one after the other; the agent here is only a socket."""

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.inference import InferenceConfig
from slurmft.inference.driver import Driver, ReplicaSettings
from slurmft.inference.ledger import segments_of
from slurmft.inference.requests import folder_of, prepare
from slurmft.storage.queue import read

ENGINE = """
lists = []

def answer(bodies):
    numbers = [body["number"] for body in bodies]
    lists.append(numbers)
    if len(bodies) > 2 and 9 in numbers:
        raise MemoryError("out of memory")
    if len(bodies) > 1 and 5 in numbers:
        raise ValueError("not in a list")
    return [{"twice": 2 * number} for number in numbers]
"""


async def answered(folder: Path, config: InferenceConfig, count: int) -> list[dict[str, Any]]:
    """What the agent is told until all requests are answered and the driver has ended."""
    told: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_over = False
        while line := await reader.readline():
            told.append(json.loads(line))
            if told[-1]["kind"] == "ready":
                writer.write(json.dumps({"kind": "do", "indexes": [*range(count)], "epoch": 1}).encode() + b"\n")
            elif not is_over and sum(len(each["indexes"]) for each in told if each["kind"] == "completed") == count:
                is_over = True
                writer.write(b'{"kind": "drain"}\n')
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        over.set()

    over = asyncio.Event()
    with tempfile.TemporaryDirectory() as name:  # the path of a socket must be short
        server = await asyncio.start_unix_server(serve, f"{name}/s")
        settings = ReplicaSettings(
            socket=f"{name}/s", config="", generation=1, node=0, replica=0, life=1, device="cpu"
        )  # fmt: skip
        driver = Driver(settings, config, folder)
        async with asyncio.timeout(30):
            assert await driver.run() == 0
        assert driver._writer is not None and driver._segment is not None
        driver._writer.close()  # what else its process does by its end
        driver._segment.close()
        driver._requests.close()
        await asyncio.wait_for(over.wait(), 10)
        server.close()
    return told


def of_lists(folder: Path, monkeypatch: pytest.MonkeyPatch, concurrency: int) -> InferenceConfig:
    """A batch of twelve in the folder ``run``."""
    (folder / "engine_of_lists.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "engine_of_lists", raising=False)
    (folder / "in.jsonl").write_text("\n".join(json.dumps({"body": {"number": each}}) for each in range(12)))
    given = {"input": str(folder / "in.jsonl"), "engine": {"callable": "engine_of_lists:answer"}}
    config = InferenceConfig.model_validate({**given, "concurrency": concurrency})
    (folder / "run").mkdir()
    prepare(config, folder_of(folder / "run"))
    segments_of(folder_of(folder / "run")).mkdir()
    return config


def begun_in(told: list[dict[str, Any]]) -> list[list[int]]:
    return [each["indexes"] for each in told if each["kind"] == "begun"]


def test_a_callable_gets_lists_and_what_fails_in_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.run(answered(tmp_path / "run", of_lists(tmp_path, monkeypatch, 4), 12))
    assert sys.modules["engine_of_lists"].lists == [
        [0, 1, 2, 3], [4, 5, 6, 7], [4], [5], [6], [7], [8, 9, 10, 11], [8, 9], [10, 11]
    ]  # fmt: skip
    assert [each["now"] for each in told if each["kind"] == "slots"] == [2]
    assert begun_in(told) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [8, 9], [10, 11]]
    [segment] = segments_of(folder_of(tmp_path / "run")).iterdir()
    records = [record.value for record in read(segment) if record.start]
    found = {each["index"]: each["response"]["body"]["twice"] for each in records}
    assert found == {number: 2 * number for number in range(12)} and len(records) == 12


def test_what_a_callable_may_die_of_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its driver with it, which tells nothing any more."""
    monkeypatch.setattr("slurmft.inference.driver.TOGETHER_S", 0.5)
    told = asyncio.run(answered(tmp_path / "run", of_lists(tmp_path, monkeypatch, 1), 12))
    assert begun_in(told) == [[number] for number in range(12)]
