"""Which headers of HTTP a router passes on, and what some of them mean."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit, urlunsplit

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length",
})  # fmt: skip
"""For one connection alone (RFC 9110, 7.6.1); a length is set anew for each."""

TO_THE_ROUTER = frozenset({
    "authorization", "api-key", "x-api-key", "expect", "x-request-timeout", "x-priority",
})  # fmt: skip
"""Of requests: what clients tell the router, and engines need not know."""

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost", "0.0.0.0"})  # noqa: S104 - names in answers of engines


def end_to_end(headers: Iterable[tuple[str, str]], *, to_engine: bool = False) -> list[tuple[str, str]]:
    """The headers that are passed on, in their order; ``to_engine``: those of a request."""
    given = list(headers)
    named = {
        word.strip().lower() for name, value in given if name.lower() == "connection" for word in value.split(",")
    }  # fmt: skip
    dropped = HOP_BY_HOP | named | (TO_THE_ROUTER if to_engine else frozenset())
    return [(name, value) for name, value in given if name.lower() not in dropped]


def token_shown(headers: Mapping[str, str]) -> str:
    """The token of a request: as a bearer, or as the clients of Anthropic (``x-api-key``) and Azure show it."""
    scheme, _, shown = headers.get("Authorization", "").partition(" ")
    if scheme:
        return shown if scheme.lower() == "bearer" else ""
    return headers.get("x-api-key") or headers.get("api-key") or ""


def request_id(given: str | None) -> str:
    """The id of a request: its client's, where that can stand in a log and in a header; else a new one."""
    return given if given is not None and re.fullmatch(r"[\w.:/+=@-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


def target_of(raw: str) -> tuple[str, str]:
    """Path and query of a request's target, and the host where it is an absolute address (RFC 9112, 3.2.2)."""
    found = re.fullmatch(r"https?://([^/?#@]+)(.*)", raw, re.IGNORECASE)
    if found is None:
        return raw, ""
    return found[2] if found[2].startswith("/") else f"/{found[2]}", found[1]


def within(place: str, host: str) -> str:
    """A ``Location`` of an engine as its clients can follow it: without a host that is theirs or the engine's own."""
    try:
        parts = urlsplit(place)
        is_ours = parts.netloc.lower() == host.lower() or parts.hostname in LOOPBACK
    except ValueError:
        return place
    if not parts.netloc or not is_ours or parts.scheme not in ("", "http", "https"):
        return place
    return urlunsplit(("", "", "/" + parts.path.lstrip("/"), parts.query, parts.fragment))


def seconds_asked(header: str | None) -> float | None:
    """Seconds of ``X-Request-Timeout``; None without a usable one."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
