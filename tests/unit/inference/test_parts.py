"""Parts of the output: there as soon as a range is answered as a whole, the same rows as at the end, gone after it."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from slurmft.config.inference import InferenceConfig
from slurmft.errors import UsageError
from slurmft.inference.ledger import (
    Ledger,
    Output,
    OutputParts,
    open_ledger,
    refuse_foreign_output,
    segments_of,
    write_output,
)
from slurmft.inference.requests import Batch, prepare, runs_of
from slurmft.storage.queue import SegmentWriter

TOTAL, SIZE = 25, 10
Answer = Callable[..., None]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(TOTAL)))
    section = {"input": str(source), "engine": {"callable": "a:b"}}
    return prepare(InferenceConfig.model_validate(section), tmp_path / "inference")


class World:
    """A batch in whose ledger answers are committed; each fourth request ends with an error."""

    def __init__(self, batch: Batch, folder: Path, format: str = "jsonl", generation: int = 1) -> None:
        self.batch, self.folder, self.format = batch, folder, format
        self.ledger: Ledger = open_ledger(batch, generation)
        name = f"g{generation:06d}-n0-r0-1-1.jsonl"
        self._segment = SegmentWriter(segments_of(batch.folder) / name, {"generation": generation})
        self.parts = OutputParts(batch, self.ledger, folder, size=SIZE, format=format)

    def answer(self, *indexes: int, text: str = "right") -> None:
        end = self._segment.append(
            {"index": index, "error": {"code": "no_answer", "message": text}} if index % 4 == 0
            else {"index": index, "response": {"status_code": 200, "body": text}} for index in indexes
        )  # fmt: skip
        self.ledger.commit([(self._segment.path.name, end, runs_of(indexes))])

    def names(self) -> list[str]:
        folder = self.folder / "parts"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


def test_a_part_is_there_when_its_range_is_answered_and_its_rows_are_those_of_the_end(batch, tmp_path):
    world = World(batch, tmp_path / "out")
    world.answer(*range(9), 11)
    assert world.parts.write() == 0 and not world.folder.exists(), "request 9 is open"
    world.answer(*range(20, 25))
    assert world.parts.write() == 1
    last = ["answers-000000000020-000000000024.jsonl", "errors-000000000020-000000000024.jsonl"]
    assert world.names() == last
    world.answer(9, 10, *range(12, 20))
    world.answer(3, text="of another replica, too late")
    assert world.parts.write() == 2 and world.parts.write() == 0
    parts = {kind: [line for name in world.names() if name.startswith(kind) for line in world.lines(f"parts/{name}")]
             for kind in ("answers", "errors")}  # fmt: skip
    assert write_output(batch, world.ledger, world.folder) == Output(answers=18, errors=7)
    assert {kind: world.lines(f"{kind}.jsonl") for kind in parts} == parts
    world.parts.remove()
    assert sorted(path.name for path in world.folder.iterdir()) == ["answers.jsonl", "errors.jsonl", "source.json"]


def test_the_next_start_goes_on_with_what_is_there(batch, tmp_path):
    first = World(batch, tmp_path / "out", "parquet")
    first.answer(*range(10))
    assert first.parts.write() == 1
    (before,) = [path for path in (first.folder / "parts").iterdir() if path.name.startswith("answers")]
    changed = before.stat().st_mtime_ns
    second = World(batch, tmp_path / "out", "parquet", generation=2)
    second.answer(*range(10, 20))
    assert second.parts.write() == 1
    assert before.stat().st_mtime_ns == changed, "what is there is not written again"
    assert pyarrow.parquet.read_table(before).num_rows == 7
    assert len(second.names()) == 4
    (second.folder / "parts" / "notes.txt").write_text("a user's own")
    second.parts.remove()
    assert second.names() == ["notes.txt"], "what others have put there stays"


def test_an_answer_that_cannot_be_read_holds_up_its_part_alone(batch, tmp_path):
    world = World(batch, tmp_path / "out")
    world.answer(*range(10))
    for path in segments_of(batch.folder).iterdir():
        path.write_bytes(b"damaged")
    assert world.parts.write() == 0 and world.names() == []


@pytest.mark.parametrize("size", [0, TOTAL, 100])
def test_a_small_batch_has_no_parts(batch, tmp_path, size):
    world = World(batch, tmp_path / "out")
    parts = OutputParts(batch, world.ledger, world.folder, size=size, format="jsonl")
    world.answer(*range(TOTAL))
    assert parts.write() == 0 and not world.folder.exists()


def test_parts_of_another_input_are_refused(batch, tmp_path):
    world = World(batch, tmp_path / "out")
    world.answer(*range(10))
    world.parts.write()
    refuse_foreign_output(world.folder, batch.digest)
    with pytest.raises(UsageError, match="answers to another input"):
        refuse_foreign_output(world.folder, "another")
    (world.folder / "source.json").unlink()
    with pytest.raises(UsageError, match="parts is there already"):
        refuse_foreign_output(world.folder, batch.digest)
