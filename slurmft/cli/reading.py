"""The verbs that read: ``status``, ``logs``, ``explain``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slurmft.cli.names import every_run, optional_run_argument, run_argument, runs_root
from slurmft.errors import StorageError, UsageError
from slurmft.launch.evidence_told import EVENT, look_told
from slurmft.launch.overview import Overview, account_of, overviews, story
from slurmft.launch.save_watch import saves_told
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

WATCH_INTERVAL_S = 2.0
_IN_FULL = {
    "verdict": frozenset({"rank", "node", "suspects", "rerun", "traceback", "evidence"}),
    EVENT: frozenset({"culprits", "victims", "ranks", "folder"}),
}
"""What the newest one of these events tells below the story, and not in its line."""

_COLOURS = {"finished": "green", "running": "cyan", "waiting": "yellow", "stopped": "red", "unknown": "magenta"}


@click.command()
@optional_run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
def status(*, run: RunFolder | None, as_json: bool, watch: bool) -> int:
    """Show what runs are doing: RUN, or all below SLURMFT_RUNS (default: runs)."""

    def look() -> list[Overview]:
        return overviews([run] if run is not None else every_run())

    console, entries = Console(), look()
    if as_json:
        for entry in entries:
            click.echo(json.dumps(entry.as_json()))
    elif not watch:
        console.print(_table(entries))
    if as_json or not watch:
        return StorageError.exit_code if run is not None and entries[0].state == "damaged" else 0
    with Live(_table(entries), console=console, auto_refresh=False) as live:
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
            Text(printable(entry.run)),
            Text(entry.state, style=_COLOURS.get(entry.state, "")),
            "-" if entry.step is None else f"{entry.step}/{entry.until or '?'}",
            "-" if entry.saved is None else str(entry.saved),
            "-" if entry.metric is None else f"{entry.metric:.4f}",
            Text(printable(" > ".join(entry.jobs[-3:]) or "-")),
            str(entry.attempts),
            Text(printable(entry.detail)),
        )
    return table


@click.command()
@run_argument
@click.option("--rank", default=0, type=click.IntRange(min=0), show_default=True, help="Which worker's output.")
@click.option("--attempt", help="JOB.RESTART.CYCLE; the newest when empty.")
@click.option("--all-attempts", is_flag=True, help="Every attempt's, oldest first.")
@click.option("-n", "--lines", default=0, type=click.IntRange(min=0), help="Only the last lines of each.")
@click.option("-f", "--follow", is_flag=True, help="Go on printing as it grows.")
def logs(*, run: RunFolder, rank: int, attempt: str | None, all_attempts: bool, lines: int, follow: bool) -> int:
    """Print a worker's output, and the supervisor's when there is none."""
    folders = sorted((f for f in run.attempts.glob("*") if f.is_dir()), key=lambda f: f.stat().st_ctime)
    if attempt is not None:
        known = ", ".join(folder.name for folder in folders[-5:]) or "none yet"
        folders = [folder for folder in folders if folder.name == attempt]
        if not folders:
            raise UsageError(f"run {run.path.name} has no attempt {attempt!r}", hint=f"its newest attempts: {known}")
    files = [path for folder in folders if (path := folder / f"rank-{rank}.log").is_file()]
    if not files and any(any(folder.glob("rank-*.log")) for folder in folders):
        raise UsageError(f"run {run.path.name} has no rank {rank}", hint=f"ls {run.attempts}")
    if not files:
        files = sorted([*run.logs.glob("*.log"), *run.submissions.glob("*_log.out")], key=lambda f: f.stat().st_mtime)
    if not files:
        raise StorageError(f"run {run.path.name} has no output of rank {rank} yet", hint=f"slurmft status {run.path}")
    for path in files if all_attempts else files[-1:]:
        if all_attempts:
            click.echo(f"==> {path.parent.name}/{path.name} <==")
        text = path.read_text(encoding="utf-8", errors="replace")
        click.echo("\n".join(text.splitlines()[-lines:]) if lines else text, nl=bool(lines))
    return _follow(files[-1]) if follow else 0


def _follow(path: Path) -> int:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            stream.seek(0, os.SEEK_END)
            while True:
                if text := stream.read():
                    click.echo(text, nl=False)
                else:
                    time.sleep(0.3)
    except KeyboardInterrupt:
        return 0


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def explain(*, run: RunFolder, as_json: bool) -> int:
    """Tell the run's story: each event, each decision and its reason, from the journal.

    Below it: what the newest look at all ranks before a kill has found (the culprit with its section and stack, its
    victims, and where the files lie), and whom the newest verdict blames, with suspects, evidence and the end of the
    traceback. Saves that keep failing (``checkpoint.max_failed_saves``) are named at the end.
    """
    told = story(run)
    if as_json:
        for event in told.events:
            line = {"at": event.at.isoformat(), "attempt": event.attempt, "event": event.event, **event.details}
            click.echo(json.dumps({"format": 1, **line}))
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
            click.secho(f"\njob {printable(job)}, restart {printable(restart)}", bold=True)
        click.echo(_line(event))


def _tell_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        click.secho(f"\n{title}, on attempt {printable(rows[0][1])}", bold=True)
    before = ""
    for name, text in rows[1:]:
        click.echo(f"  {'' if name == before else name:<10} {printable(text)}".rstrip())
        before = name


def _tell_damage(run: RunFolder, unreadable: int, events: int) -> int:
    path = run.journal().path
    if not unreadable and not events:
        raise StorageError(f"{path} is empty", hint=f"the supervisor's own words may be in {run.logs}")
    if not events:
        raise StorageError(
            f"{path} is damaged: none of its {unreadable} lines can be read",
            hint=f"move it away, and the next submission begins a new one; see also {run.logs}",
        )
    if unreadable:
        why = "torn by a writer that died, or damaged"
        click.echo(f"slurmft: {unreadable} lines of {path} cannot be read and are left out ({why})", err=True)
    return 0


def _line(event: Event) -> str:
    at = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    details = dict(event.details)
    reason = str(details.pop("reason", ""))
    if hidden := _IN_FULL.get(event.event):
        details = {key: value for key, value in details.items() if key not in hidden}
    facts = "  ".join(f"{key}={_shown(value)}" for key, value in details.items() if value not in ("", None, []))
    return printable(f"  {at}  {event.event:<20} {reason}{'  ' * bool(reason and facts)}{facts}".rstrip())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(str(value).split()) if not isinstance(value, list) else ",".join(map(str, value))


def printable(text: str) -> str:
    """Names of files and words of others as one line that cannot move the cursor, or fail to be written."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
