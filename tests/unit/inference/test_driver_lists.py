"""A driver hands lists to a callable, one after the other; the agent here is only a socket."""

import asyncio
import json
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
        while line := await reader.readline():
            told.append(json.loads(line))
            if told[-1]["kind"] == "ready":
                writer.write(json.dumps({"kind": "do", "indexes": [*range(count)], "epoch": 1}).encode() + b"\n")
            elif sum(len(each["indexes"]) for each in told if each["kind"] == "completed") == count:
                writer.write(b'{"kind": "drain"}\n')
        writer.close()

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
        server.close()
        await asyncio.sleep(0)
    return told


def test_a_callable_gets_lists_and_what_fails_in_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_lists.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"body": {"number": each}}) for each in range(12)))
    given = {"input": str(tmp_path / "in.jsonl"), "engine": {"callable": "engine_of_lists:answer"}, "concurrency": 4}
    config = InferenceConfig.model_validate(given)
    (tmp_path / "run").mkdir()
    prepare(config, folder_of(tmp_path / "run"))
    segments_of(folder_of(tmp_path / "run")).mkdir()
    told = asyncio.run(answered(tmp_path / "run", config, 12))
    lists = __import__("engine_of_lists").lists
    assert lists == [[0, 1, 2, 3], [4, 5, 6, 7], [4], [5], [6], [7], [8, 9, 10, 11], [8, 9], [10, 11]]
    assert [each["now"] for each in told if each["kind"] == "slots"] == [2]
    begun = [each["indexes"] for each in told if each["kind"] == "begun"]
    assert begun == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [8, 9], [10, 11]]
    [segment] = segments_of(folder_of(tmp_path / "run")).iterdir()
    records = [record.value for record in read(segment) if record.start]
    found = {each["index"]: each["response"]["body"]["twice"] for each in records}
    assert found == {number: 2 * number for number in range(12)} and len(records) == 12
