"""``slurmft status``: what runs are doing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slurmft.cli.arguments import every_run, optional_run_argument, runs_root
from slurmft.cli.main import console, say_json
from slurmft.errors import StorageError
from slurmft.operations.status import Overview, overviews
from slurmft.storage.run_folder import RunFolder
from slurmft.system.foreign_text import one_line

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
