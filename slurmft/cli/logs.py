"""``slurmft logs``: the output of a worker."""

from __future__ import annotations

import codecs
import os
import sys
import time
from pathlib import Path

import click

from slurmft.cli.arguments import LINES, RANK, run_argument
from slurmft.cli.main import say, say_error, say_raw
from slurmft.operations.status import logs_of
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import open_regular, read_part
from slurmft.system.foreign_text import Terminal

MAX_SHOWN_BYTES = 64 << 20
"""Only the end of a log is shown: more is no use on a terminal, and a sparse file could take hours to print."""


@click.command()
@run_argument
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
