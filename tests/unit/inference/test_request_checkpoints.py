"""Checkpoints of requests: noted, taken, bounded, and found again in the run folder, however a file of them ends."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.config.inference import EngineConfig
from slurmft.inference import ledger
from slurmft.inference.ledger import (
    CheckpointFile,
    Partials,
    fingerprint,
    forget_all,
    left_behind,
    partials_of,
    records_in,
)
from slurmft.inference.requests import segment_name
from slurmft.policy.serving import Prefix

OWNER = {"generation": 3, "node": 0, "replica": 1, "life": 2}
NAME = segment_name(**OWNER, epoch=5)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_was_noted_last_is_taken_once():
    checkpointer = Partials()
    checkpointer.note("a", "one", tokens=1, prompt_tokens=7)
    checkpointer.note("a", "one two", tokens=2, prompt_tokens=7)
    assert checkpointer.take("a") == Prefix("one two", 2, 7)
    assert checkpointer.take("a") is None
    checkpointer.note("b", "x")
    checkpointer.forget("b")
    assert checkpointer.take("b") is None and len(checkpointer) == 0


def test_an_entry_expires():
    clock = Clock()
    checkpointer = Partials(expire_after_s=60, now=clock)
    checkpointer.note("a", "x")
    checkpointer.note("b", "x")
    clock.now_s += 59
    assert checkpointer.take("a") == Prefix("x")
    clock.now_s += 2
    assert checkpointer.take("b") is None


def test_there_are_never_too_many_nor_too_large_ones():
    checkpointer = Partials(max_entries=3, max_bytes=100_000)
    for name in "abcd":
        checkpointer.note(name, "x")
    assert checkpointer.take("a") is None and len(checkpointer) == 3
    checkpointer.note("b", "y" * 60_000)
    checkpointer.note("e", "y" * 60_000)
    assert checkpointer.take("b") is None, "the one that was noted longest ago went first"
    assert checkpointer.take("e") == Prefix("y" * 60_000)
    checkpointer.note("f", "y" * 200_000)
    assert len(checkpointer) == 0, "one that is too large alone is not kept"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=5), st.sampled_from(["longer", "other", "save"]))))
def test_another_one_that_gets_all_changes_knows_the_same(steps):
    mine, other = Partials(), Partials()
    now: dict[str, str] = {}
    records = []
    for name, text, what in steps:
        if what == "save":
            records += mine.changes()
            continue
        now[name] = now.get(name, "") + text if what == "longer" else text
        mine.note(name, now[name], tokens=len(now[name]))
    records += mine.changes()
    other.adopt(records)
    for name, text in now.items():
        assert mine.take(name) == (Prefix(text, len(text)) if text else None)
        found = other.take(name)
        assert found == Prefix(text, len(text)) if text else True


def test_of_two_texts_the_longer_one_is_kept_and_a_hole_is_none():
    records = {"request": "a", "from": 0, "text": "one two", "tokens": 2, "prompt_tokens": None, "at": 1e12}
    checkpointer = Partials()
    checkpointer.note("a", "one")
    checkpointer.adopt([records])
    assert checkpointer.take("a") == Prefix("one two", 2)
    checkpointer.adopt([{**records, "from": 3}])
    assert checkpointer.take("a") is None
    checkpointer.adopt([records, {**records, "from": 9, "text": "x"}])
    assert checkpointer.take("a") is None
    with pytest.raises(TypeError):
        checkpointer.adopt([{**records, "tokens": -1}])


def keep(folder: Path, checkpointer: Partials, engine: str = "e") -> CheckpointFile:
    file = CheckpointFile(folder, OWNER, engine, checkpointer)
    file.epoch = 5
    asyncio.run(file.save())
    return file


def test_a_file_holds_what_is_new_and_survives_a_torn_end(tmp_path):
    mine, other = Partials(), Partials()
    mine.note("7", "one", tokens=1)
    file = keep(tmp_path, mine)
    mine.note("7", "one two", tokens=2)
    mine.note("8", "x", tokens=1)
    asyncio.run(file.save())
    path = partials_of(tmp_path) / NAME
    before = path.stat().st_size
    asyncio.run(file.save())
    assert path.stat().st_size == before, "nothing new, nothing written"
    assert left_behind(tmp_path, "e", expire_after_s=60) == {7: (NAME,), 8: (NAME,)}
    other.adopt(records_in(tmp_path, NAME, "e"))
    assert (other.take("7"), other.take("8")) == (Prefix("one two", 2), Prefix("x", 1))
    os.truncate(path, before - 3)
    other.adopt(records_in(tmp_path, NAME, "e"))
    assert (other.take("7"), other.take("8")) == (Prefix("one two", 2), None)


def test_text_of_another_engine_or_generation_is_not_used(tmp_path):
    mine = Partials()
    mine.note("7", "one")
    keep(tmp_path, mine)
    assert list(records_in(tmp_path, NAME, "another")) == []
    assert left_behind(tmp_path, "another", expire_after_s=60) == {}
    forged = segment_name(**{**OWNER, "generation": 4}, epoch=5)
    (partials_of(tmp_path) / NAME).rename(partials_of(tmp_path) / forged)
    assert list(records_in(tmp_path, forged, "e")) == []
    assert list(records_in(tmp_path, "../x", "e")) == []
    assert list(records_in(tmp_path, NAME, "e")) == []


def test_a_changed_engine_has_another_fingerprint():
    engine = EngineConfig(callable="a:b")
    assert fingerprint(engine) == fingerprint(EngineConfig(callable="a:b", continue_from_prefix="always"))
    assert fingerprint(engine) != fingerprint(EngineConfig(callable="a:c"))


def test_expired_files_are_deleted_and_a_finished_batch_leaves_none(tmp_path):
    mine = Partials()
    mine.note("7", "one")
    keep(tmp_path, mine)
    old = partials_of(tmp_path) / segment_name(**{**OWNER, "life": 1}, epoch=5)
    old.write_bytes((partials_of(tmp_path) / NAME).read_bytes())
    os.utime(old, (1, 1))
    assert left_behind(tmp_path, "e", expire_after_s=60) == {7: (NAME,)}
    assert not old.exists()
    forget_all(tmp_path)
    assert not partials_of(tmp_path).exists()
    forget_all(tmp_path)
    assert left_behind(tmp_path, "e", expire_after_s=60) == {}


def test_a_file_that_has_grown_is_written_anew_with_what_is_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_FILE_BYTES", 2000)
    mine = Partials()
    mine.note("1", "x" * 3000)
    file = keep(tmp_path, mine)
    mine.forget("1")
    mine.note("2", "y", tokens=1)
    asyncio.run(file.save())
    mine.note("2", "y z", tokens=2)
    asyncio.run(file.save())
    path = partials_of(tmp_path) / NAME
    assert path.stat().st_size < 1000
    other = Partials()
    other.adopt(records_in(tmp_path, NAME, "e"))
    assert len(other) == 1 and other.take("2") == Prefix("y z", 2)


def test_another_epoch_has_a_file_of_its_own(tmp_path):
    mine = Partials()
    mine.note("1", "x")
    file = keep(tmp_path, mine)
    file.epoch = 6
    mine.note("1", "x y")
    asyncio.run(file.save())
    second = segment_name(**OWNER, epoch=6)
    assert [each["text"] for each in records_in(tmp_path, second, "e")] == ["x y"]


def test_a_disk_that_fails_costs_no_more_than_the_file(tmp_path, monkeypatch):
    mine = Partials()
    mine.note("1", "x")
    file = keep(tmp_path, mine)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slurmft.inference.requests.os.write", full)
        mine.note("1", "x y")
        asyncio.run(file.save())
    mine.note("1", "x y z", tokens=3)
    asyncio.run(file.save())
    other = Partials()
    other.adopt(records_in(tmp_path, NAME, "e"))
    assert other.take("1") == Prefix("x y z", 3), "all of it is written again"
