"""The words of the journal: part of its format, so that older journals and other programs go on being understood."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import slurmft
from slurmft.storage.journal import EventName, Journal

ROOT = Path(slurmft.__file__).parent
READ_BY_OTHERS = {
    "submitted", "attempt started", "workers started", "first step", "stop requested", "stop saved", "verdict",
    "decision", "requeueing", "requeued", "resubmitted", "not continued", "evidence", "avoiding", "agent lost",
    "worker failed", "worker hung", "exclusion_escaped", "avoiding_gpus", "checkpoint quarantined", "rescuing",
}  # fmt: skip
"""A run that goes on with another version finds these in its journal."""


def test_words_that_older_journals_have_stay():
    assert {name.value for name in EventName} >= READ_BY_OTHERS


def test_each_word_is_used_somewhere_and_none_is_written_out():
    sources = {path: path.read_text() for path in ROOT.rglob("*.py") if path.name != "events.py"}
    unused = [name for name in EventName if not any(f"EventName.{name.name}" in text for text in sources.values())]
    assert unused == []
    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in sources.items() for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "event"
        and any(isinstance(each, ast.Constant) for side in node.comparators for each in ast.walk(side))
    ]  # fmt: skip
    assert compared == []


def test_an_event_is_written_as_its_word_and_read_back_as_one(tmp_path):
    journal = Journal(tmp_path)
    journal.append(EventName.FIRST_STEP, resumed_from=3)
    assert json.loads(journal.path.read_text())["event"] == "first step"
    (event,) = journal.read()
    assert event.event == EventName.FIRST_STEP and f"{event.event:<12}|" == "first step  |"
