"""Foreign text made safe to show: it cannot move a cursor, colour a terminal, end a line or run from right to
left.

An exception's message, the name of a file or a node, a reason that a user typed: all of them may hold escape sequences.
"""

from __future__ import annotations

import logging
import re
import unicodedata

# --- Foreign text made safe to show: it cannot move a cursor, colour a terminal, end a line or run from right to ---

MAX_TEXT = 20_000
"""Characters of one message that are shown; exceptions may hold whole tensors."""

_KEPT_IN_BLOCKS = frozenset("\n\t")
_JOINERS = frozenset("\u200c\u200d")
"""Invisible, and part of how some scripts and emoji are written; they change no other character."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,32}m")
_UNFINISHED = re.compile(r"(\x1b(\[[0-9;:]{0,32})?|\r)\Z")
RESET = "\x1b[0m"

_SHOWN = frozenset((0, 1, 2, 3, 4, 9, 22, 23, 24, 29, *range(31, 37), 39, *range(91, 97)))
"""Colours and styles in which text is readable with any colours of the terminal. Not: concealed and blinking
text, black, grey and white, and backgrounds, any of which can hide text in its background."""

_EXTENDED = {5: 2, 2: 4}
"""How many more numbers belong to a colour of 256, and to one of all: ``38;5;N`` and ``38;2;R;G;B``."""


def is_safe(character: str) -> bool:
    """Whether it may be shown as it is within a line: printable, or a space of some kind."""
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


def one_line(text: str, limit: int | None = None) -> str:
    """``text`` in one line: unsafe characters are shown as escapes, such as ``\\x1b``; at most ``limit`` characters."""
    return _cut(_escaped(text, frozenset()), limit)


def block(text: str, limit: int | None = None) -> str:
    """As ``one_line``, but line feeds and tabs stay; CR LF is a line feed."""
    return _cut(_escaped(text.replace("\r\n", "\n"), _KEPT_IN_BLOCKS), limit)


def _escaped(text: str, kept: frozenset[str]) -> str:
    if text.isprintable():
        return text
    return "".join(each if each in kept or is_safe(each) else ascii(each)[1:-1] for each in text)


def _cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text) - limit} more characters)"


class Terminal:
    """A worker's own output for a terminal, piece by piece: of all control sequences only plain colours stay.

    Those that could hide text are left out, so that a line which a pipe shows is seen on a terminal as well. Text that
    a carriage return would overwrite is shown in a line of its own.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """The next piece; the beginning of a sequence at its end is held back."""
        text = self._held + text
        match = _UNFINISHED.search(text)
        self._held = match.group() if match else ""
        text = text[: len(text) - len(self._held)].replace("\r\n", "\n").replace("\r", "\n")
        parts, at = [], 0
        for colour in _COLOUR.finditer(text):
            parts += [block(text[at : colour.start()]), _readable(colour.group())]
            at = colour.end()
        return "".join([*parts, block(text[at:]), RESET * bool(parts)])


def _readable(colour: str) -> str:
    """A sequence that chooses colours, without those that could hide text; may be empty."""
    numbers = colour[2:-1].split(";")
    kept, at = [], 0
    while at < len(numbers):
        number = int(numbers[at] or 0) if ":" not in numbers[at] else -1
        if number in (38, 48, 58) and at + 1 < len(numbers):
            kind = numbers[at + 1]
            at += _EXTENDED.get(int(kind), 1) if kind.isdecimal() else 0
        elif number in _SHOWN:
            kept.append(str(number))
        at += 1
    return f"\x1b[{';'.join(kept)}m" if kept else ""


# --- How records are written to logs, in every process: as text that a terminal may show later ---


class LogFormatter(logging.Formatter):
    """Records as safe text.

    Args:
        indent: before the further lines of a record, so that none looks like a record of its own.
    """

    def __init__(self, form: str, datefmt: str | None = None, *, indent: str = "  ") -> None:
        super().__init__(form, datefmt)
        self._indent = indent

    def format(self, record: logging.LogRecord) -> str:
        """One record; that of a logger which is not ours begins with its name."""
        text = super().format(record)
        if not record.name.startswith(("slurmft", "root", "__main__")):
            text = text.replace(record.message, f"{record.name}: {record.message}", 1)
        return block(text, MAX_TEXT).replace("\n", f"\n{self._indent}")


def log_to_stderr(
    form: str, *, level: int = logging.INFO, datefmt: str | None = None, indent: str = "  "
) -> logging.Handler:
    """Send all records to standard error, where the process has no logging of its own yet; returns the handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(form, datefmt, indent=indent))
    logging.basicConfig(level=level, handlers=[handler])
    return handler
