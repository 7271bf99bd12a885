"""A trainer's own exit codes, mapped to what should follow: ``{COMPLETE: "0", RESCHEDULE: "11-20", FAIL: "17"}``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class ExitAction(StrEnum):
    """The meaning of an exit code; the names are those of workflow schedulers."""

    COMPLETE = "COMPLETE"
    RESCHEDULE = "RESCHEDULE"
    FAIL = "FAIL"


def parse_codes(text: str) -> frozenset[int]:
    """The exit codes in ``"0"``, ``"1,3"`` or ``"11-20,42"``; each from 0 to 255.

    Raises:
        ValueError: names the part that is not a code or a range.
    """
    codes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither an exit code nor a range such as 11-20")
        low, high = int(first), int(last or first)
        if low > high or high > 255:
            raise ValueError(f"{part.strip()!r}: exit codes go from 0 to 255, and a range from low to high")
        codes.update(range(low, high + 1))
    return frozenset(codes)


def lists_as_texts(value: Any) -> Any:
    """``{FAIL: [1, "3-5"]}`` as ``{FAIL: "1,3-5"}``; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {
        action: ",".join(map(str, codes)) if isinstance(codes, (list, tuple)) else codes
        for action, codes in value.items()
    }


def unambiguous(actions: Mapping[ExitAction, str]) -> Mapping[ExitAction, str]:
    """``actions``, when every code can be read and has one meaning.

    Raises:
        ValueError: names the code with two meanings.
    """
    seen: dict[int, ExitAction] = {}
    for action, codes in actions.items():
        for code in parse_codes(codes):
            if seen.setdefault(code, action) is not action:
                raise ValueError(f"exit code {code} is in both {seen[code]} and {action}")
    return actions


def codes_of(action: ExitAction, actions: Mapping[ExitAction, str]) -> frozenset[int]:
    """Every exit code that the configuration gives to ``action``."""
    return parse_codes(actions[action]) if action in actions else frozenset()


def explicit_action(code: int, actions: Mapping[ExitAction, str]) -> ExitAction | None:
    """The configured action for ``code``, or None when the configuration does not name it."""
    return next((action for action, codes in actions.items() if code in parse_codes(codes)), None)
