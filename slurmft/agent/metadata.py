"""One question to a metadata service: plain HTTP, bounded in time and size, without redirects and proxies."""

from __future__ import annotations

import asyncio
import http.client
import io
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_S = 2.0
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 256 * 1024


class NoAnswer(Exception):
    """The service is not there, too slow, or does not answer in HTTP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""

    text: str


async def ask(
    endpoint: str, path: str, *, headers: Mapping[str, str], method: str = "GET", timeout_s: float = TIMEOUT_S
) -> Answer:
    """The answer, with any status; ``timeout_s`` is for all of it.

    Raises:
        NoAnswer: there was none.
    """
    host, port, base = _taken_apart(endpoint)
    lines = [f"{method} {base}{path} HTTP/1.1", f"Host: {host}", "Connection: close", "Content-Length: 0",
             *(f"{name}: {value}" for name, value in headers.items())]  # fmt: skip
    if any(sign in line for line in lines for sign in "\r\n"):  # a token that holds a line break
        raise NoAnswer("a header holds a line break")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD_BYTES)
            writer.write("\r\n".join([*lines, "", ""]).encode())
            return await _read(reader)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException) as error:
        raise NoAnswer(f"{endpoint}: {error!r}") from error  # OSError: TimeoutError as well
    finally:
        if writer is not None:
            writer.transport.abort()


def _taken_apart(endpoint: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise NoAnswer(f"{endpoint!r} is not an address") from error
    if parts.scheme != "http" or not host:
        raise NoAnswer(f"{endpoint!r} does not begin with http://")
    return host, port, parts.path.rstrip("/")


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    first, _, rest = head.partition(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError(f"{first[:40]!r} is not an HTTP answer")
    message = http.client.parse_headers(io.BytesIO(rest))
    headers = {name.lower(): value for name, value in message.items()}
    length = headers.get("content-length", "")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader)
    elif length:
        if int(length) > MAX_BODY_BYTES:
            raise ValueError(f"an answer of {length} bytes is too long")
        body = await reader.readexactly(int(length))
    else:
        body = await _until_end(reader)
    return Answer(status=int(words[1]), headers=headers, text=body.decode("utf-8", "replace"))


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while piece := await reader.read(65_536):
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ValueError("the answer is too long")
    return body


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if size < 0 or len(body) + size > MAX_BODY_BYTES:
            raise ValueError("the answer is too long")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return body
