"""A deterministic language model over HTTP, in OpenAI's forms: the next token is a digest of all the text before it.

python word_engine.py PORT PAUSE_SECONDS LOG

Each token takes a pause, and a line in the log: the digest of what it followed, so that one made twice is seen. After
USR1 it fails every request, after USR2 it makes no token and is healthy all the same, after URG its memory grows until
it is killed, as by the kernel; a request with ``stall`` holds up everything for so many seconds.
"""

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

FULL_BYTES = 1 << 27
"""Of memory that grows, at which it is killed."""

TOKEN = re.compile(r"[\sA-Z]?[0-9a-f]+|.", re.DOTALL)


def next_token(context: str) -> str | None:
    """A word, behind a blank, at the beginning of a line, or glued to the one before; None at the end."""
    digest = hashlib.sha256(context.encode()).hexdigest()
    if digest.startswith("ff"):
        return None
    word = digest[: 1 + int(digest[8], 16) % 7]
    if context.endswith("<assistant>"):
        return "A" + word
    return "A" * (digest[9] < "4") + "\n" * (digest[9] == "4") + " " * (digest[9] > "4") + word


def tokens_in(text: str) -> int:
    return len(TOKEN.findall(text))


def prompt_of(path: str, body: dict[str, Any]) -> str:
    """What a tokenizer would see; messages are stripped, as most chat templates do."""
    if path.endswith("/chat/completions"):
        text = "".join(f"<{each['role']}>{each['content'].strip()}<end>" for each in body["messages"])
        if body.get("continue_final_message"):
            assert not body["add_generation_prompt"]
            return text.removesuffix("<end>")
        return text + "<assistant>"
    return str(body["prompt"])


class WordEngine:
    """The model; ``on_token`` hears the digest of what each token follows, and may raise to break off.

    Args:
        events: of a stream, behind which it breaks off.
    """

    def __init__(self, pause_s: float, on_token: Callable[[str], object], *, events: int | None = None) -> None:
        self._pause_s, self._on_token, self._events = pause_s, on_token, events
        self.fails = self.hangs = self.grows = False
        self._grown = bytearray()

    def misbehave_on_signals(self) -> None:
        for number, how in ((signal.SIGUSR1, "fails"), (signal.SIGUSR2, "hangs"), (signal.SIGURG, "grows")):
            signal.signal(number, lambda *_, how=how: setattr(self, how, True))

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.complete)
        app.router.add_get("/health", self._healthy)
        return app

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _tokens(self, context: str, limit: int) -> AsyncIterator[str]:
        for _ in range(limit):
            if (token := next_token(context)) is None:
                return
            await asyncio.sleep(self._pause_s)
            while self.hangs:
                await asyncio.sleep(1)
            if self.grows:
                self._grown += b"x" * (FULL_BYTES >> 8)
                if len(self._grown) >= FULL_BYTES:
                    os.kill(os.getpid(), signal.SIGKILL)
            self._on_token(hashlib.sha256(context.encode()).hexdigest()[:16])
            context += token
            yield token

    async def complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.json()
        if self.fails:
            return web.json_response({"error": {"message": "CUDA error: device-side assert triggered"}}, status=500)
        time.sleep(body.get("stall", 0))  # nothing else goes on meanwhile
        is_chat = request.path.endswith("/chat/completions")
        prompt, limit = prompt_of(request.path, body), body.get("max_tokens") or 256
        head = {"id": "words", "created": 1, "model": "words"}
        usage = {"prompt_tokens": tokens_in(prompt), "completion_tokens": 0, "total_tokens": tokens_in(prompt)}

        def choice(text: str, reason: str | None, *, whole: bool) -> dict[str, Any]:
            said: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
            if not is_chat:
                return {**said, "text": text}
            return {**said, "message" if whole else "delta": {"role": "assistant", "content": text}}

        if not body.get("stream"):
            found = [token async for token in self._tokens(prompt, limit)]
            usage["completion_tokens"] += len(found)
            usage["total_tokens"] += len(found)
            reason = "length" if len(found) == limit else "stop"
            kind = "chat.completion" if is_chat else "text_completion"
            whole = choice("".join(found), reason, whole=True)
            return web.json_response({**head, "object": kind, "choices": [whole], "usage": usage})
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        left = self._events

        async def say(**facts: Any) -> None:
            nonlocal left
            if left == 0:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            left = None if left is None else left - 1
            await response.write(b"data: " + json.dumps({**head, "object": kind, **facts}).encode() + b"\n\n")

        async for token in self._tokens(prompt, limit):
            usage["completion_tokens"] += 1
            usage["total_tokens"] += 1
            await say(choices=[choice(token, None, whole=False)], usage=usage)
        reason = "length" if usage["completion_tokens"] == limit else "stop"
        await say(choices=[choice("", reason, whole=False)], usage=usage)
        if (body.get("stream_options") or {}).get("include_usage"):
            await say(choices=[], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


def main() -> None:
    log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    engine = WordEngine(float(sys.argv[2]), lambda digest: os.write(log, f"{digest}\n".encode()) and None)
    engine.misbehave_on_signals()
    web.run_app(engine.app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
