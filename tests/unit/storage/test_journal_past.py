"""A start reads of a journal what it decides on, however much else there is."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from generated_journals import JournalWriter

from slurmft.storage import journal as storage_journal
from slurmft.storage.journal import PASSED_OVER, EventName, Journal


def test_what_no_start_decides_on_is_passed_over_and_all_else_is_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path, attempt="1.0.0")
    for name in EventName:
        journal.append(name, node="n1")
    past = journal.read_past()
    assert [event.event for event in past] == [name for name in EventName if name not in PASSED_OVER]
    assert len(journal.read()) == len(EventName)


def test_a_line_that_only_looks_like_one_is_parsed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(EventName.VERDICT, reason='", "event": "save failed"', event_before="save failed")
    line = '{"at": "2026-01-01T00:00:00+00:00", "format": 1, "attempt": "", "event": "save failed"}\n'
    journal.path.write_text(journal.path.read_text() + line)
    assert [event.event for event in journal.read_past()] == ["verdict", "save failed"]


def test_more_lines_than_may_be_kept_do_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_journal, "MAX_LINES", 100)
    with (tmp_path / "journal.jsonl").open("w") as stream:
        writer = JournalWriter(stream)
        for _ in range(20_000):
            writer.write("save failed", 1.0, step=7, reason="No space left on device")
        writer.write("decision", 1.0, action="continue")
    began_s = time.process_time()
    assert [event.event for event in Journal(tmp_path).read_past()] == ["decision"]
    assert time.process_time() - began_s < 1.0


def long_journal(folder: Path) -> Journal:
    with (folder / "journal.jsonl").open("w") as stream:
        writer = JournalWriter(stream)
        for number in range(3000):
            writer.write("save failed", 1.0, step=number, reason="No space left on device " * 4)
            if number % 1000 == 0:
                writer.write("decision", 1.0, action="continue", number=number)
    return Journal(folder, attempt="1.0.0")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A long journal that a start has read, and a past that is worth its writing."""
    monkeypatch.setattr(storage_journal, "WORTH_BYTES", 1000)
    journal = long_journal(tmp_path)
    assert [event.details["number"] for event in journal.read_past()] == [0, 1000, 2000]
    assert journal.path.with_name("journal.jsonl.past").exists()
    return journal


def bytes_read(monkeypatch: pytest.MonkeyPatch, journal: Journal) -> tuple[list[str], int]:
    """What a start reads: the names of the events, and how many bytes of the journal line by line."""
    counted, real = [0], storage_journal.files.read_lines

    def counting(*arguments: object, **options: object):
        for line in real(*arguments, **options):  # type: ignore[arg-type]
            counted[0] += len(line) + 1
            yield line

    with monkeypatch.context() as patched:
        patched.setattr(storage_journal.files, "read_lines", counting)
        found = [event.event for event in journal.read_past()]
    return found, counted[0]


def test_the_next_start_reads_only_what_was_added(kept: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_read(monkeypatch, kept) == (["decision"] * 3, 0)
    kept.append(EventName.VERDICT, cause="hang")
    kept.append(EventName.SAVE_FAILED, step=1)
    found, read = bytes_read(monkeypatch, kept)
    assert found == ["decision"] * 3 + ["verdict"] and 0 < read < 400


def test_a_torn_line_is_kept_neither_as_a_whole_nor_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_journal, "WORTH_BYTES", 1000)
    journal = long_journal(tmp_path)
    line = Journal.line_of(journal.compose(EventName.VERDICT, {"cause": "hang"}))
    for part in (line[:60], line[60:]):  # a start in the middle of a write; then the whole line without its end
        with journal.path.open("a") as stream:
            stream.write(part)
        expected = journal.read_past()
        journal.path.with_name("journal.jsonl.past").unlink()
        assert [event.event for event in journal.read_past()] == [event.event for event in expected]
    journal.append(EventName.DECISION, action="restart")
    assert [event.event for event in journal.read_past()] == ["decision"] * 3 + ["verdict", "decision"]
    assert [event.event for event in journal.read_past()] == ["decision"] * 3 + ["verdict", "decision"]


def replace_it(journal: Journal) -> None:
    other = journal.path.with_name("other")
    other.write_bytes(journal.path.read_bytes())
    other.replace(journal.path)


def cut_it(journal: Journal) -> None:
    os.truncate(journal.path, journal.path.stat().st_size // 2)


def change_its_end(journal: Journal) -> None:
    text = journal.path.read_text()
    journal.path.write_text(text[:-40] + text[-40:].replace("device", "DEVICE"))


def damage_the_past(journal: Journal) -> None:
    path = journal.path.with_name("journal.jsonl.past")
    path.write_text(path.read_text().replace("continue", "stop____"))


def cut_the_past(journal: Journal) -> None:
    path = journal.path.with_name("journal.jsonl.past")
    os.truncate(path, path.stat().st_size - 7)


def give_it_odd_facts(journal: Journal) -> None:
    path = journal.path.with_name("journal.jsonl.past")
    first, _, body = path.read_text().partition("\n")
    path.write_text(json.dumps({**json.loads(first), "end": True}) + "\n" + body)


@pytest.mark.parametrize("harm", [replace_it, cut_it, change_its_end, damage_the_past, cut_the_past, give_it_odd_facts])
def test_a_past_that_does_not_fit_is_not_used(
    kept: Journal, harm: Callable[[Journal], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(kept)
    found, read = bytes_read(monkeypatch, kept)
    assert read == pytest.approx(kept.path.stat().st_size, abs=1)
    assert found == [event.event for event in kept.read() if event.event == "decision"]
    assert bytes_read(monkeypatch, kept)[1] < 400, "and it was kept anew"


def test_a_journal_that_grows_while_it_is_read_loses_no_event(kept: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage_journal.files.read_lines

    def growing(*arguments: object, **options: object):
        yield from real(*arguments, **options)  # type: ignore[arg-type]
        kept.append(EventName.VERDICT, cause="hang")  # after the end was seen, before the past is kept

    kept.path.with_name("journal.jsonl.past").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(storage_journal.files, "read_lines", growing)
        assert [event.event for event in kept.read_past()] == ["decision"] * 3
    assert bytes_read(monkeypatch, kept)[0] == ["decision"] * 3 + ["verdict"]


def test_a_folder_that_takes_nothing_keeps_no_past_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage_journal, "WORTH_BYTES", 1000)
    monkeypatch.setattr(storage_journal.files, "replace_atomically", full)
    assert len(long_journal(tmp_path).read_past()) == 3
