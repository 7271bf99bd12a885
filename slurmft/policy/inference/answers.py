"""What follows the end of one try of a request: it is an answer, it is tried again, or its replica is to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

RETRIED_STATUS = frozenset({408, 409, 425, 429})
"""Client errors of HTTP that a later try may not meet: time-out, conflict, too early, too many requests."""

NOT_IMPLEMENTED = 501
"""Whichever replica is asked, and however often."""

OUT_OF_MEMORY = ("out of memory", "outofmemoryerror", "cuda oom", "kv cache is full", "cannot allocate memory")
"""Words of engines and frameworks, in lower case."""


class Outcome(StrEnum):
    """The meaning of one try."""

    ANSWER = "answer"
    """Final, be it a result or an error of the request's own."""

    RETRY = "retry"
    """The next try may succeed."""

    SMALLER = "smaller"
    """The replica was out of memory: fewer requests at a time, and again."""


def outcome_of_status(status: int, text: str = "") -> Outcome:
    """The meaning of an HTTP answer with this status; ``text`` is the body of an error.

    A client error (4xx) is final and says nothing about the replica. Where it or a server error names missing memory,
    the replica had too much to do.
    """
    if 200 <= status < 300:
        return Outcome.ANSWER
    if status >= 500 and is_out_of_memory(text):
        return Outcome.SMALLER
    is_passing = status in RETRIED_STATUS or (status >= 500 and status != NOT_IMPLEMENTED)
    return Outcome.RETRY if is_passing else Outcome.ANSWER


def is_good(answer: Mapping[str, Any]) -> bool:
    """Whether it is an engine's answer, and none that refuses the request."""
    return 200 <= int(answer.get("response", {}).get("status_code", 0)) < 300


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text names missing memory, of the device or the host."""
    lower = text.lower()
    return any(words in lower for words in OUT_OF_MEMORY)


def retry_after_s(header: str | None, *, longest_s: float) -> float | None:
    """Seconds of a ``Retry-After`` header (RFC 9110, 10.2.3), at most ``longest_s``; None without a usable one.

    A date is not taken: the clocks of an engine and of its client need not agree.
    """
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return min(seconds, longest_s) if math.isfinite(seconds) and seconds >= 0 else None
