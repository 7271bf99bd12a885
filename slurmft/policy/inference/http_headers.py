"""Which headers of HTTP a router passes on, and what some of them mean."""

from __future__ import annotations

import math
from collections.abc import Iterable

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length",
})  # fmt: skip
"""For one connection alone (RFC 9110, 7.6.1); a length is set anew for each."""

TO_THE_ROUTER = frozenset({"authorization", "host", "expect", "x-request-timeout"})
"""Of requests: what clients tell the router, and engines need not know."""


def end_to_end(headers: Iterable[tuple[str, str]], *, to_engine: bool = False) -> list[tuple[str, str]]:
    """The headers that are passed on, in their order; ``to_engine``: those of a request."""
    given = list(headers)
    named = {
        word.strip().lower() for name, value in given if name.lower() == "connection" for word in value.split(",")
    }  # fmt: skip
    dropped = HOP_BY_HOP | named | (TO_THE_ROUTER if to_engine else frozenset())
    return [(name, value) for name, value in given if name.lower() not in dropped]


def seconds_asked(header: str | None) -> float | None:
    """Seconds of ``X-Request-Timeout``; None without a usable one."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
