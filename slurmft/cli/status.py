"""``slurmft status``, ``explain`` and ``logs``: what runs are doing, their history, and the output of a worker."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slurmft.cli.arguments import LINES, RANK, every_run, newest_run_argument, optional_run_argument, runs_root
from slurmft.cli.main import console, say, say_error, say_json, say_raw
from slurmft.errors import StorageError
from slurmft.operations.status import Overview, account_of, logs_of, overviews, story
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import open_regular, read_part
from slurmft.system.foreign_text import Terminal, one_line

# --- ``slurmft status``: what runs are doing ---

WATCH_INTERVAL_S = 2.0


_COLOURS = {"finished": "green", "running": "cyan", "waiting": "yellow", "stopped": "red", "unknown": "magenta"}


@click.command()
@optional_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
def status(*, run: RunFolder | None, as_json: bool, watch: bool) -> int:
    """Show what runs are doing: RUN, or all below SLURMFT_RUNS (default: runs)."""

    def look() -> list[Overview]:
        return overviews([run] if run is not None else every_run())

    shown, entries = console(), look()
    if as_json:
        for entry in entries:
            say_json(entry.as_json())
    elif not watch:
        shown.print(_table(entries))
    if as_json or not watch:
        return StorageError.exit_code if run is not None and entries[0].state == "damaged" else 0
    with Live(_table(entries), console=shown, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(WATCH_INTERVAL_S)
                live.update(_table(look()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _table(entries: Sequence[Overview]) -> RenderableType:
    if not entries:
        return Text(f"no runs in {runs_root().absolute()} (SLURMFT_RUNS names another folder)")
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "step", "saved", "loss", "jobs", "starts", "detail"):
        table.add_column(title, overflow="fold", no_wrap=title not in ("run", "detail"))
    for entry in entries:
        table.add_row(
            Text(one_line(entry.run)),
            Text(entry.state, style=_COLOURS.get(entry.state, "")),
            "-" if entry.step is None else f"{entry.step}/{entry.until or '?'}",
            "-" if entry.saved is None else str(entry.saved),
            "-" if entry.metric is None else f"{entry.metric:.4f}",
            Text(one_line(" > ".join(entry.jobs[-3:]) or "-")),
            str(entry.attempts),
            Text(one_line(entry.detail)),
        )
    return table


# --- ``slurmft explain``: the history of a run ---

_IN_FULL: dict[str, frozenset[str]] = {
    EventName.VERDICT: frozenset({"rank", "node", "suspects", "rerun", "traceback", "evidence"}),
    EventName.LAST_LOOK: frozenset({"culprits", "victims", "ranks", "folder"}),
}
"""Details of the newest of these events that are shown below the history, and not in its line."""


@click.command()
@newest_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def explain(*, run: RunFolder, as_json: bool) -> int:
    """Show the run's history: each event, each decision and its reason, from the journal.

    Below it: the evidence from the newest look at all ranks before a kill (the culprit with its section and stack, its
    victims, and where the files lie), and the rank that the newest verdict blames, with suspects, evidence and the end
    of the traceback. Saves that keep failing (``checkpoint.max_failed_saves``) are named at the end.
    """
    from slurmft.supervisor.live import look_told  # status needs neither
    from slurmft.supervisor.observations import saves_told

    told = story(run)
    if as_json:
        for event in told.events:
            line = {"at": event.at.isoformat(), "attempt": event.attempt, "event": event.event, **event.details}
            say_json({"format": 1, **line})
    else:
        _tell(told.events)
        _tell_rows("the newest look at the ranks", look_told(told.events))
        _tell_rows("the newest verdict", account_of(told.events))
        _tell_rows("SAVES KEEP FAILING", saves_told(told.events))
    return _tell_damage(run, told.unreadable, len(told.events))


def _tell(events: Sequence[Event]) -> None:
    attempt = None
    for event in events:
        if event.attempt and event.attempt != attempt:
            attempt = event.attempt
            job, restart, *_ = [*attempt.rsplit(".", 2), "?"]
            say("")
            say(f"job {job}, restart {restart}", bold=True)
        say(_line(event))


def _tell_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        say("")
        say(f"{title}, on attempt {rows[0][1]}", bold=True)
    before = ""
    for name, text in rows[1:]:
        say(f"  {'' if name == before else name:<10} {one_line(text)}".rstrip())
        before = name


def _tell_damage(run: RunFolder, unreadable: int, events: int) -> int:
    path = run.journal().path
    if not unreadable and not events:
        raise StorageError(f"{path} is empty", hint=f"the supervisor's own messages may be in {run.logs}")
    if not events:
        raise StorageError(
            f"{path} is damaged: none of its {unreadable} lines can be read",
            hint=f"move it away, and the next submission begins a new one; see also {run.logs}",
        )
    if unreadable:
        why = "torn by a writer that died, or damaged"
        say_error(f"{unreadable} lines of {path} cannot be read and are left out ({why})")
    return 0


def _line(event: Event) -> str:
    at = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    details = dict(event.details)
    reason = str(details.pop("reason", ""))
    if hidden := _IN_FULL.get(event.event):
        details = {key: value for key, value in details.items() if key not in hidden}
    facts = "  ".join(f"{key}={_shown(value)}" for key, value in details.items() if value not in ("", None, []))
    return f"  {at}  {event.event:<20} {reason}{'  ' * bool(reason and facts)}{facts}".rstrip()


def _shown(value: object) -> str:
    if isinstance(value, float) and _EPOCHS[0] < value < _EPOCHS[1]:
        return datetime.fromtimestamp(value).astimezone().strftime("%H:%M:%S")
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(str(value).split()) if not isinstance(value, list) else ",".join(map(str, value))


_EPOCHS = (1.5e9, 4e9)
"""Seconds since 1970 that are a moment of a run, and no measured value."""


# --- ``slurmft logs``: the output of a worker ---

MAX_SHOWN_BYTES = 64 << 20
"""Only the end of a log is shown: more is no use on a terminal, and a sparse file could take hours to print."""


@click.command()
@newest_run_argument
@click.option("--rank", default=0, type=RANK, show_default=True, help="Which worker's output.")
@click.option("--attempt", help="JOB.RESTART.CYCLE; the newest when empty.")
@click.option("--all-attempts", is_flag=True, help="Every attempt's, oldest first.")
@click.option("-n", "--lines", default=0, type=LINES, help="Only the last lines of each.")
@click.option("-f", "--follow", is_flag=True, help="Go on printing as it grows.")
def logs(*, run: RunFolder, rank: int, attempt: str | None, all_attempts: bool, lines: int, follow: bool) -> int:
    """Print a worker's output, and the supervisor's when there is none."""
    files = logs_of(run, rank=rank, attempt=attempt)
    for path in files if all_attempts else files[-1:]:
        if all_attempts:
            say(f"==> {path.parent.name}/{path.name} <==")
        text = read_part(path, -MAX_SHOWN_BYTES, MAX_SHOWN_BYTES).decode(errors="replace")
        _show("\n".join(text.removesuffix("\n").split("\n")[-lines:]) + "\n" if lines else text, Terminal())
        if not lines and (size := path.stat().st_size) > MAX_SHOWN_BYTES:
            say_error(f"these are the last {MAX_SHOWN_BYTES} of {size} bytes of {path}")
    return _follow(files[-1]) if follow else 0


def _show(text: str, terminal: Terminal) -> None:
    """A worker's own words: exactly for files and pipes, and without anything but colours for a terminal."""
    say_raw(terminal.feed(text) if sys.stdout.isatty() else text)


def _follow(path: Path) -> int:
    descriptor = open_regular(path)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    terminal = Terminal()
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        while True:
            if part := os.read(descriptor, 1 << 16):
                _show(decoder.decode(part), terminal)
            else:
                time.sleep(0.3)
    except KeyboardInterrupt:
        return 0
    finally:
        os.close(descriptor)
