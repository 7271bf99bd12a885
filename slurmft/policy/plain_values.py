"""Limits for the values of all settings: values that can be written down, given to a process, and counted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MAX_VALUES, MAX_DEPTH = 10_000, 20
"""A short file can expand to billions of values, by aliases of aliases."""

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, line separators, and what turns the direction of text."""

MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Of a path, and of each of its parts, as Linux has them."""

_FREE_TEXT = frozenset({"command", "environment", "srun_args", "remedy"})
"""Keys whose texts may have several lines: they are given to a program, or to a person."""

MAX_PROBLEMS, MAX_PROBLEM_LENGTH = 20, 300
_NAME_A_FOLDER = "name a folder of this run's own; its last part is the run's name"


def no_bool(value: Any) -> Any:
    """``value``, unless it is true or false, which Python would take for 1 and 0.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def at_most(limit: float) -> Callable[[Any], Any]:
    """A check that returns its argument, or raises ValueError when that is above ``limit``."""

    def check(value: Any) -> Any:
        if value > limit:
            # a whole number may be beyond any float
            told = f"{value:g}" if value < 1e300 else "a number of more than 300 digits"
            raise ValueError(f"{told} is too much; at most {limit:g}")
        return value

    return check


def shown(key: Any) -> str:
    """A key as one short printable line."""
    text = str(key) if isinstance(key, (str, bool, float)) or key is None else repr(key)[:80]
    return (text if text.isprintable() else repr(text))[:80]


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """The end of a sentence: the nearest known key, or nothing when none is near."""
    import difflib  # only mistakes pay for it

    begins = [name for name in known if len(key) >= 3 and name.startswith(key)]  # env for environment
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7) or (begins if len(begins) == 1 else [])
    return f"; did you mean {near[0]}?" if near else ""


def as_text(problems: Sequence[str]) -> str:
    """The problems, one per line, up to a readable number."""
    lines = [f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {problem[:MAX_PROBLEM_LENGTH]}" for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)


def unusable(raw: Mapping[str, Any]) -> Iterator[str]:
    """Values that no setting can have: not text, not storable, or endless.

    Raises:
        ValueError: there are too many values to look at.
    """
    waiting: list[tuple[str, Any, int]] = [("", raw, 0)]
    for count, (where, value, depth) in enumerate(waiting):
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError("too many values, or nested too deeply")
        if isinstance(value, Mapping):
            waiting += ((where, key, depth + 1) for key in value)
            waiting += ((f"{where}.{shown(key)}".lstrip("."), each, depth + 1) for key, each in value.items())
        elif isinstance(value, (list, tuple)):
            waiting += ((where, each, depth + 1) for each in value)
        elif isinstance(value, str):
            if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
                yield f"{where or 'a key'}: {value[:40]!r} holds a character that is not text"
            elif CONTROL.search(value) and not _FREE_TEXT & set(where.split(".")):
                yield f"{where or 'a key'}: {value[:40]!r} holds a line break or control character"
        elif not isinstance(value, (bool, int, float, type(None))) and not hasattr(value, "__fspath__"):
            yield f"{where or 'a key'}: a {type(value).__name__} is not a setting; put it in quotes"


def usable_path(value: Any) -> Any:
    """``value``, unless it cannot be the path of a file.

    Raises:
        ValueError: says why.
    """
    text = str(value)
    if not text.strip():
        raise ValueError("the path is empty")  # an empty path would be the current folder
    if CONTROL.search(text):
        raise ValueError(f"{text[:80]!r} holds a line break or control character")
    if len(os_bytes := text.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
        raise ValueError(f"a path of {len(os_bytes)} bytes; at most {MAX_PATH_BYTES}")
    if any(len(part) > MAX_NAME_BYTES for part in os_bytes.split(b"/")):
        raise ValueError(f"{text[:40]!r}... has a part of more than {MAX_NAME_BYTES} bytes")
    return value


def usable_run_folder(value: Any) -> Any:
    """``value``, unless it cannot be the path of a run folder.

    Raises:
        ValueError: says why.
    """
    text = str(value)
    if not text.strip().strip("/"):
        raise ValueError(_NAME_A_FOLDER)  # an empty path would be the current folder
    usable_path(value)
    if text.rstrip("/").rpartition("/")[2] == "..":
        raise ValueError(f"{text!r} ends in .., which cannot be the name of a run; {_NAME_A_FOLDER}")
    if pattern := re.search(r"%[jtAa]", text):
        raise ValueError(f"{text!r} holds {pattern.group()}, which stands for a job's number")
    return value
