"""Server-sent events as OpenAI's engines send them: one JSON object for each ``data:``, and ``[DONE]`` at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

END = b"[DONE]"


async def events_of(parts: AsyncIterable[bytes], *, limit_bytes: int) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream, until its end or ``[DONE]``; comments and other fields are passed over.

    Raises:
        ValueError: something in it is no JSON object, or it is longer than ``limit_bytes``.
    """
    rest, room = b"", limit_bytes
    async for part in parts:
        room -= len(part)
        if room < 0:
            raise ValueError(f"a stream of more than {limit_bytes >> 20} MiB")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[len(b"data:") :].strip()
            if data == END:
                return
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError("an event that is no object")
            yield value
