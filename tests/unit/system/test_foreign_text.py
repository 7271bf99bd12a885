"""Text of others in the terminal, in logs and in errors: whatever it holds, it is shown and not obeyed."""

import io
import itertools
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.table import Table

from slurmft.cli import main as cli_main
from slurmft.cli import status
from slurmft.cli.main import main
from slurmft.scheduler import slurm
from slurmft.storage.run_folder import RunFolder
from slurmft.system.foreign_text import RESET, LogFormatter, Terminal, block, one_line

OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal, or the eye, obeys; line feeds and tabs apart."""

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[1A\r\x9b31m\u202egnp.\u2066\u2028\ud800\x7f\x00"
ANY = st.text(st.characters(), max_size=60)


def test_the_hostile_text_holds_all_that_is_forbidden():
    assert len(OBEYED.findall(HOSTILE)) == 12


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("plain, Füße, 文字, 👩\u200d🚀", None, None),
        ("a\u00a0b\u3000c", None, None),  # spaces of other widths
        ("a\nb\tc", r"a\nb\tc", None),
        ("a\r\nb", r"a\r\nb", "a\nb"),
        ("a\rb", r"a\rb", r"a\rb"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m\x85\x7f\x08", r"\x9b31m\x85\x7f\x08", r"\x9b31m\x85\x7f\x08"),
        ("abc\u202egnp.exe\u2066", r"abc\u202egnp.exe\u2066", r"abc\u202egnp.exe\u2066"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("name\udcff", r"name\udcff", r"name\udcff"),
        ("\ufeff\u200b\U000e0041", r"\ufeff\u200b\U000e0041", r"\ufeff\u200b\U000e0041"),
        ("", None, None),
    ],
)
def test_what_is_shown(text, line, lines):
    assert one_line(text) == (text if line is None else line)
    assert block(text) == (text if lines is None else lines)


def test_what_is_long_is_cut_and_says_so():
    assert one_line("x" * 9, limit=5) == "xxxxx... (4 more characters)"
    assert one_line("x" * 5, limit=5) == "xxxxx"


@given(ANY)
@example(HOSTILE)
def test_no_text_is_obeyed(text):
    assert not OBEYED.search(block(text)) and not re.search(r"[\n\t]", one_line(text))
    assert not OBEYED.search(one_line(text))
    if text.isprintable():
        assert one_line(text) == block(text) == text


@given(st.lists(st.one_of(ANY, st.sampled_from(["\x1b[31m", "\x1b", "[1", "m", "\r", "\n", "\x1b[2J", HOSTILE]))))
def test_a_terminal_gets_colours_and_nothing_else_in_whatever_pieces(pieces):
    def seen(shown: str) -> str:
        return re.sub(r"\x1b\[[0-9;:]{0,32}m", "", shown)

    in_pieces, whole = Terminal(), Terminal()
    shown = "".join(in_pieces.feed(piece) for piece in pieces)
    assert not OBEYED.search(seen(shown))
    assert seen(shown) == seen(whole.feed("".join(pieces)))


def test_what_a_terminal_is_shown_of_a_log():
    terminal = Terminal()
    assert terminal.feed("10%\r20%\r\n\x1b[32mok\x1b[2J") == f"10%\n20%\n\x1b[32mok\\x1b[2J{RESET}"
    assert [terminal.feed(piece) for piece in ("a\x1b", "[3", "1mb")] == ["a", "", f"\x1b[31mb{RESET}"]


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ("8", ""), ("1;8", "1"), ("0008", ""), ("31;8;4", "31;4"), ("30;40", ""), ("37", ""), ("97;107", ""), ("7", ""),
        ("5", ""), ("38;5;8", ""), ("38;2;0;0;0;1", "1"), ("48;5;0", ""), ("38:5:8", ""), ("31;48;2;205;0;0;8", "31"),
        ("38", ""), ("38;31", ""), ("", "0"), ("0", "0"), ("1;;31", "1;0;31"), ("32", "32"), ("1;96", "1;96"),
        ("99999999999999999999", ""),
    ],
)  # fmt: skip
def test_no_colour_hides_text(numbers, kept):
    sequence = f"\x1b[{kept}m" if kept else ""
    assert Terminal().feed(f"\x1b[{numbers}mfailed") == f"{sequence}failed{RESET}"


def record(message: str, *arguments: object, error: Exception | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error is not None else None
    return logging.LogRecord("x", logging.INFO, "x.py", 1, message, arguments, info)


def test_a_record_cannot_look_like_two():
    text = LogFormatter("slurmft: %(message)s").format(
        record("worker said %s", HOSTILE + "\nslurmft: all is well", error=ValueError("\x1b[2J\nslurmft: fine"))
    )
    assert not OBEYED.search(text)
    assert [line for line in text.splitlines() if line.startswith("slurmft: ")] == [text.splitlines()[0]]
    assert len(LogFormatter("%(message)s").format(record("x" * 10**6))) < 30_000


@given(ANY)
def test_tables_and_bars_obey_nothing_either(text):
    shown = cli_main.console()
    shown.file = file = io.StringIO()
    table = Table(text.replace("[", ""))
    table.add_row(text.replace("[", ""))
    shown.print(table)
    shown.print(text, markup=False)
    assert not OBEYED.search(file.getvalue())


# ---- verbs -----------------------------------------------------------------------------------------------------------


def hostile_run(root: Path, text: str) -> RunFolder:
    """A run whose every file and name holds ``text``."""
    name = f"r{text.replace('/', '').replace(chr(0), '')}".encode(
        "utf-8", "surrogateescape" if text.isascii() else "replace"
    )
    run = RunFolder(Path(os.fsdecode(os.fsencode(root) + b"/" + name[:200])))
    attempt = f"7.0.{text}"
    folder = run.path / "attempts" / "7.0.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank-0.log").write_text(text, encoding="utf-8", errors="replace")
    run.config.write_text(json.dumps({"command": "x", "run_folder": "r"}))
    facts = {"reason": text, "node": text, "who": text, "error": text, "cause": text, "rank": 0, "traceback": text,
             "suspects": [{"node": text, "gpu": text}], "evidence": [text], text: text, "culprits": [text]}  # fmt: skip
    events = ["submitting", "attempt started", "ranks looked at", "verdict", "decision", text]
    lines = [
        {"format": 1, "at": datetime.now(UTC).isoformat(), "attempt": attempt, "event": event, **facts}
        for event in events
    ]
    (run.path / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run.path / "progress.json").write_text(json.dumps({"format": 1, "state": text, "save_problem": text, text: 1}))
    (run.path / "jobs.json").write_text(json.dumps({"format": 1, "jobs": ["7"]}))
    (run.path / "KILL").write_text(text, errors="replace")
    checkpoint = run.path / "checkpoints" / "step-00000001.g0.c1"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "step": text}))
    return run


VERBS = [
    ["status"], ["status", "RUN"], ["explain", "RUN"], ["stop", "RUN"], ["save", "RUN"], ["requeue", "RUN"],
    ["logs", "RUN", "--attempt", "TEXT"], ["logs", "RUN", "--rank", "TEXT"], ["logs", "RUN", "--rank", "3"],
    ["checkpoint", "list", "RUN"], ["checkpoint", "verify", "RUN"], ["checkpoint", "rm", "RUN", "4"],
    ["checkpoint", "export", "RUN", "TEXT"], ["exclude", "list", "--file", "LIST"], ["exclude", "gc", "--file", "LIST"],
    ["exclude", "add", "n1", "--reason", "TEXT", "--file", "LIST"], ["exclude", "list", "--file", "LIST"],
    ["exclude", "why", "n1", "--file", "LIST"], ["exclude", "why", "TEXT", "--file", "LIST"],
    ["exclude", "add", "TEXT", "--reason", "TEXT", "--file", "LIST"],
    ["exclude", "remove", "TEXT", "--file", "LIST"], ["TEXT"], ["status", "TEXT"], ["submit", "TEXT"],
    ["submit", "CONFIG", "--cluster", "local", "--dry-run", "--set", "run_folder=TEXT"],
    ["submit", "CONFIG", "--cluster", "TEXT"], ["submit", "CONFIG", "--set", "TEXT"], ["advise", "CONFIG"],
    ["inject", "RUN", "TEXT"], ["inject", "RUN", "kill", "--rank", "TEXT"], ["health", "--only", "TEXT"],
    ["sweep", "--limit", "TEXT"], ["join", "TEXT"], ["lab", "TEXT"], ["--TEXT"],
]  # fmt: skip


def typed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """All that ``main()`` prints."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["slurmft", *arguments])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        patch.setattr(logging.getLogger(), "handlers", [])
        with pytest.raises(SystemExit) as ending:
            main()
    assert ending.value.code != 70, arguments
    for stream in streams:
        stream.flush()
    return "".join(stream.buffer.getvalue().decode("utf-8") for stream in streams)


def test_watching_a_run_shows_words_in_one_line(place, monkeypatch, capsys):
    run = hostile_run(place / "runs", HOSTILE)
    (run.path / "done.json").write_text(json.dumps({"format": 1, "reason": HOSTILE}))
    events = [{"format": 1, "at": "2026-11-20T10:00:00+00:00", "attempt": "7.0.0", "event": event, "reason": HOSTILE,
               "rank": 0, "node": HOSTILE, "error": HOSTILE} for event in ("worker failed", "decision")]  # fmt: skip
    (run.path / "journal.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert status.follow(run, told=0, stop_on_interrupt=False) == 0
    said = capsys.readouterr().out
    assert not OBEYED.search(said) and said.count(one_line(HOSTILE)) >= 4


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATH", "/nowhere")
    passing = itertools.count(step=60).__next__  # or each question to a Slurm that is not there would take its 5 s
    monkeypatch.setitem(slurm.run_patiently.__kwdefaults__, "clock", passing)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "c.yaml").write_text("command: x\nrun_folder: runs/new\n")
    return tmp_path


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY)
@example(HOSTILE)
@example("\x1b[31m")
@example("\nslurmft: all is well\n")
def test_no_verb_prints_what_a_terminal_obeys(place, monkeypatch, text):
    run = hostile_run(place / "runs", text)
    plain = text.replace("\0", "").encode("utf-8", "replace").decode()  # an argument of a command
    words = {"RUN": str(run.path), "TEXT": plain, "LIST": str(place / "list.json"), "CONFIG": str(place / "c.yaml")}
    for verb in VERBS:
        arguments = [
            re.sub("TEXT", lambda _: plain, word) if "TEXT" in word else words.get(word, word) for word in verb
        ]
        if arguments[0] in ("", "-h", "--help", "lab") and len(arguments) < 2:
            continue
        said = typed(arguments, monkeypatch)
        assert not OBEYED.search(said), (arguments, said)
        assert not re.search(r"^slurmft: all is well", said, re.M), (arguments, said)


def test_a_pipe_gets_a_workers_words_exactly(capsys):
    words = "a\x1b[2Jb\x1b[31mred\x1b[0m\r\n"
    cli_main.say_raw(words)
    assert capsys.readouterr().out == words
