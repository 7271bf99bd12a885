"""A start reads of a journal what it decides on, however much else there is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from generated_journals import JournalWriter

from slurmft.storage import journal as module
from slurmft.storage.events import EventName
from slurmft.storage.journal import PASSED_OVER, Journal


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
    monkeypatch.setattr(module, "MAX_LINES", 100)
    with (tmp_path / "journal.jsonl").open("w") as stream:
        writer = JournalWriter(stream)
        for _ in range(20_000):
            writer.write("save failed", 1.0, step=7, reason="No space left on device")
        writer.write("decision", 1.0, action="continue")
    began_s = time.process_time()
    assert [event.event for event in Journal(tmp_path).read_past()] == ["decision"]
    assert time.process_time() - began_s < 1.0
