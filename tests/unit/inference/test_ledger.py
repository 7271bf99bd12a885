"""Answers count when the ledger says so, once, whatever was torn, added later or written by a superseded process."""

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference import ledger as module
from slurmft.inference.ledger import AnswersSoFar, Ledger, Output, answered, open_ledger, segments_of, write_output
from slurmft.inference.requests import Batch, answers_in, prepare, runs_of
from slurmft.storage.queue import SegmentWriter, line_of, parse, read

TOTAL = 20


def batch_of(tmp_path: Path, total: int = TOTAL) -> Batch:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"custom_id": f"q{n}", "prompt": str(n)}) + "\n" for n in range(total)))
    config = InferenceConfig.model_validate({"input": str(source), "engine": {"callable": "a:b"}})
    return prepare(config, tmp_path / "inference")


def record(index: int, text: str = "") -> dict:
    return {"index": index, "response": {"status_code": 200, "body": {"text": text or f"answer {index}"}}}


def segment(batch: Batch, name: str, *indexes: int, text: str = "") -> SegmentWriter:
    writer = SegmentWriter(segments_of(batch.folder) / name, {"generation": 1})
    writer.append(record(index, text) for index in indexes)
    return writer


def open_as(batch: Batch, generation: int) -> Ledger:
    return open_ledger(batch, generation)


def texts(folder: Path) -> list[str]:
    return [
        json.loads(line)["response"]["body"]["text"] for line in (folder / "answers.jsonl").read_text().splitlines()
    ]


def test_what_is_committed_counts_and_is_read_back(tmp_path):
    batch = batch_of(tmp_path)
    ledger = open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl", 3, 1, 2)
    assert ledger.commit([(writer.path.name, writer.end, runs_of([3, 1, 2]))]) == 3
    assert ledger.commit([(writer.path.name, writer.end, runs_of([3, 1, 2]))]) == 0, "told twice"
    again = open_as(batch, 2)
    assert again.done.nonzero()[0].tolist() == [1, 2, 3]
    assert answered(batch.folder, TOTAL) == 3


def told(so_far: AnswersSoFar) -> dict[int, str]:
    """The texts of what counts."""
    batch = so_far.look()
    assert batch is not None
    found = enumerate(so_far.answers(range(batch.total)))
    return {number: each["response"]["body"]["text"] for number, each in found if each is not None}


def test_a_look_from_outside_reads_only_what_is_new(tmp_path, monkeypatch):
    batch = batch_of(tmp_path)
    so_far, ledger = AnswersSoFar(batch.folder), open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl")
    seen = []

    def counting(path, start=0, end=None):
        for each in read(path, start, end):
            seen.append(each.start)
            yield each

    for number in range(TOTAL):
        writer.append([record(number)])
        ledger.commit([(writer.path.name, writer.end, [[number, number + 1]])])
        if number == 1:  # the first look reads all
            assert told(so_far) == {0: "answer 0", 1: "answer 1"}
            monkeypatch.setattr(module, "read", counting)
    assert len(told(so_far)) == TOTAL and len(seen) == 2 * (TOTAL - 2), "an entry, and an answer, for each"
    assert told(so_far) == {number: f"answer {number}" for number in range(TOTAL)}
    assert len(seen) == 2 * (TOTAL - 2)


def test_a_look_from_outside_follows_another_supervisor_and_a_commit_that_is_written_over(tmp_path):
    batch = batch_of(tmp_path)
    so_far, first = AnswersSoFar(batch.folder), open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl", 0, 1)
    first.commit([(writer.path.name, writer.end, [[0, 2]])])
    assert set(told(so_far)) == {0, 1}
    path = batch.folder / "ledger-000001.jsonl"
    with path.open("ab") as stream:
        stream.write(b'12345678 {"segment": "half of a commit')
    assert set(told(so_far)) == {0, 1}
    writer.append([record(2)])
    first.commit([(writer.path.name, writer.end, [[2, 3]])])
    assert set(told(so_far)) == {0, 1, 2}
    second = open_as(batch, 2)
    late = segment(batch, "g000001-n1-r0-1-1.jsonl", 3, text="of a supervisor that is superseded")
    first.commit([(late.path.name, late.end, [[3, 4]])])
    assert set(told(so_far)) == {0, 1, 2}
    new = segment(batch, "g000002-n0-r0-1-1.jsonl", 3)
    second.commit([(new.path.name, new.end, [[3, 4]])])
    assert told(so_far)[3] == "answer 3"


def test_an_answer_that_was_counted_too_soon_is_taken_back(tmp_path):
    """The newest ledger that was seen belonged to a supervisor that another one had fenced already."""
    batch = batch_of(tmp_path)
    so_far, first = AnswersSoFar(batch.folder), open_as(batch, 1)
    second = open_as(batch, 2)
    late = segment(batch, "g000001-n1-r0-1-1.jsonl", 3, text="too late")
    hidden = batch.folder / "hidden"
    (batch.folder / "ledger-000002.jsonl").rename(hidden)  # as on a file system that shows it later
    first.commit([(late.path.name, late.end, [[3, 4]])])
    assert told(so_far) == {3: "too late"}
    hidden.rename(batch.folder / "ledger-000002.jsonl")
    assert told(so_far) == {}
    new = segment(batch, "g000002-n0-r0-1-1.jsonl", 3)
    second.commit([(new.path.name, new.end, [[3, 4]])])
    assert told(so_far) == {3: "answer 3"}


def test_what_was_written_but_not_reported_is_found_at_the_next_start_without_a_torn_end(tmp_path):
    batch = batch_of(tmp_path)
    open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl", 5, 6)
    with writer.path.open("ab") as stream:
        stream.write(line_of(record(7))[:-9])
    assert open_as(batch, 2).done.nonzero()[0].tolist() == [5, 6]


def test_what_a_fenced_replica_adds_later_never_counts(tmp_path):
    batch = batch_of(tmp_path, 3)
    open_as(batch, 1)
    late = segment(batch, "g000001-n0-r0-1-1.jsonl", 0)
    second = open_as(batch, 2)
    late.append([record(1, "from the fenced one"), record(2, "from the fenced one")])
    new = segment(batch, "g000002-n0-r0-1-1.jsonl", 1, 2)
    second.commit([(new.path.name, new.end, [[1, 3]])])
    assert isinstance(write_output(batch, second, tmp_path / "out"), Output)
    assert texts(tmp_path / "out") == ["answer 0", "answer 1", "answer 2"]


def test_what_a_superseded_supervisor_commits_later_never_counts(tmp_path):
    batch = batch_of(tmp_path, 2)
    old = open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl", 0)
    old.commit([(writer.path.name, writer.end, [[0, 1]])])
    new = open_as(batch, 2)
    end = writer.append([record(1, "too late")])
    old.commit([(writer.path.name, end, [[1, 2]])])
    assert open_as(batch, 3).done.tolist() == [True, True], "the segment itself is whole, and is salvaged"
    mine = segment(batch, "g000002-n0-r0-1-1.jsonl", 1)
    new.commit([(mine.path.name, mine.end, [[1, 2]])])
    ledger_lines = (batch.folder / "ledger-000003.jsonl").read_text()
    assert "too late" not in ledger_lines


def test_the_first_commit_of_a_request_is_its_answer(tmp_path):
    batch = batch_of(tmp_path, 1)
    ledger = open_as(batch, 1)
    first = segment(batch, "g000001-n0-r0-1-1.jsonl", 0, text="first")
    second = segment(batch, "g000001-n1-r0-1-2.jsonl", 0, text="second")
    ledger.commit([(second.path.name, second.end, [[0, 1]])])
    assert ledger.commit([(first.path.name, first.end, [[0, 1]])]) == 0
    write_output(batch, ledger, tmp_path / "out")
    assert texts(tmp_path / "out") == ["second"]


def test_a_segment_that_is_gone_or_damaged_makes_its_requests_open_again(tmp_path):
    batch = batch_of(tmp_path, 4)
    ledger = open_as(batch, 1)
    gone = segment(batch, "g000001-n0-r0-1-1.jsonl", 0, 1)
    hurt = segment(batch, "g000001-n0-r1-1-1.jsonl", 2, 3)
    for each, runs in ((gone, [[0, 2]]), (hurt, [[2, 4]])):
        ledger.commit([(each.path.name, each.end, runs)])
    gone.path.unlink()
    content = bytearray(hurt.path.read_bytes())
    content[-5] ^= 1
    hurt.path.write_bytes(content)
    missing = write_output(batch, ledger, tmp_path / "out")
    assert missing == [0, 1, 3]
    ledger.forget(missing)
    assert ledger.count == 1
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    batch = batch_of(tmp_path)
    ledger = open_as(batch, 1)
    writer = segment(batch, "g000001-n0-r0-1-1.jsonl", 1, 2)
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StorageError, match="No space left"):
        ledger.commit([(writer.path.name, writer.end, [[1, 3]])])
    monkeypatch.undo()
    assert ledger.count == 0
    assert ledger.commit([(writer.path.name, writer.end, [[1, 3]])]) == 2
    assert open_as(batch, 2).count == 2


@pytest.mark.parametrize("name", ["../../etc/passwd", "x.jsonl", "g1-n0-r0-1-1.jsonl", ""])
def test_a_ledger_that_names_other_files_is_damaged(tmp_path, name):
    batch = batch_of(tmp_path)
    open_as(batch, 1)
    with (batch.folder / "ledger-000001.jsonl").open("ab") as stream:
        stream.write(line_of({"segment": name, "start": 0, "end": 5, "runs": [0, 1]}))
    with pytest.raises(StorageError, match="damaged"):
        open_as(batch, 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, TOTAL - 1), max_size=6), st.booleans(),
                          st.integers(0, 30)), max_size=12))  # fmt: skip
def test_nothing_that_was_committed_is_ever_lost(tmp_path_factory, story):
    """Generations come and go, some replicas die with a torn end: what counted once counts for ever."""
    batch = batch_of(tmp_path_factory.mktemp("batch"))
    generation, must = 1, set()
    ledger = open_as(batch, generation)
    for number, (what, indexes, report, torn) in enumerate(story):
        if what == 0:
            generation += 1
            ledger = open_as(batch, generation)
        else:
            writer = segment(batch, f"g{generation:06d}-n0-r{number}-1-1.jsonl", *indexes)
            if report and indexes:
                ledger.commit([(writer.path.name, writer.end, runs_of(indexes))])
            if torn:
                with writer.path.open("ab") as stream:
                    stream.write(line_of(record(1))[: min(torn, 20)])
            must |= set(indexes)
        assert must >= set(ledger.done.nonzero()[0].tolist())
    last = open_as(batch, generation + 1)
    assert set(last.done.nonzero()[0].tolist()) == must


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_a_line_is_read_back_or_known_to_be_torn(value):
    line = line_of({"index": 1, "value": value})
    assert parse(line[:-1]) == {"index": 1, "value": value}
    for cut in range(0, len(line) - 1, 7):
        assert parse(line[:cut]) is None


def test_reading_ends_before_the_first_damage(tmp_path):
    path = tmp_path / "g000001-n0-r0-1-1.jsonl"
    writer = SegmentWriter(path, {"generation": 1})
    ends = [writer.append([record(index)]) for index in range(4)]
    content = bytearray(path.read_bytes())
    content[ends[1] + 12] ^= 1
    path.write_bytes(content)
    assert answers_in(path, 0, TOTAL) == ([0, 1], ends[1])
    assert [each.value.get("index") for each in read(path, ends[0])] == [1]
    assert answers_in(path, 0, 1) == ([0], ends[0]), "a number beyond the batch is not believed"


@given(st.lists(st.integers(0, 300), max_size=100))
def test_runs_hold_each_number_once(indexes):
    runs = runs_of(indexes)
    assert [number for first, last in runs for number in range(first, last)] == sorted(set(indexes))
    assert all(first < last for first, last in runs)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(runs))
