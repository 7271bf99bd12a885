"""Everything that the command line prints: the one place where text of others becomes safe for a terminal.

`tests/architecture/test_architecture.py` holds the other modules of this package to it.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from slurmft.system.foreign_text import MAX_TEXT, block, one_line

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str, *, err: bool = False, bold: bool = False) -> None:
    """Print ``text`` as one line, line breaks and control characters replaced."""
    click.secho(one_line(text), err=err, bold=bold or None)


def say_block(text: str, *, err: bool = False) -> None:
    """Print ``text`` with its line feeds and tabs, and nothing else that a terminal obeys."""
    click.echo(block(text), err=err)


def say_error(text: str, *, prefix: str = "slurmft: ") -> None:
    """Print ``text`` on standard error; its further lines are indented, so that none looks like one of ours."""
    click.echo(prefix + re.sub(r"\n(?![ \t])", "\n  ", block(text, MAX_TEXT)), err=True)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print ``value`` exactly; JSON escapes what a terminal would obey."""
    import json

    click.echo(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def say_raw(text: str) -> None:
    """Print a worker's own output: as it is, or as ``foreign_text.Terminal`` has made it."""
    click.echo(text, nl=False, color=True)  # otherwise click takes colours out of what goes into a pipe


def console() -> Console:
    """A console for tables and bars; rich is imported here, since hooks and ``--json`` do without it."""
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
    from rich.control import Control
    from rich.segment import Segment

    class Safe:
        def __init__(self, inner: ConsoleRenderable) -> None:
            self._inner = inner

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for segment in console.render(self._inner, options):
                yield segment if segment.control else Segment(block(segment.text), segment.style)

    class Hook:
        @staticmethod
        def process_renderables(renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [each if isinstance(each, Control) else Safe(each) for each in renderables]

    made = Console()
    made.push_render_hook(Hook())  # type: ignore[arg-type]
    return made


def never_fail_to_encode() -> None:
    """Show characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
