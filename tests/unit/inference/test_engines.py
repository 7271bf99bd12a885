"""Engines as the driver meets them: a real HTTP server on loopback, and callables."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from aiohttp import web

from slurmft.config.inference import InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference import driver
from slurmft.inference.driver import Again, CallableEngine, Closed, HttpEngine, OutOfMemory
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


@asynccontextmanager
async def engine(handler: Handler, **settings: Any) -> AsyncIterator[HttpEngine]:
    """An engine that is ready."""

    async def healthy(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", healthy), web.route("*", "/{rest:.*}", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    limits = {key: settings.pop(key) for key in ("request_timeout_s",) if key in settings}
    given = {"input": "x.jsonl", "engine": {"url": f"http://127.0.0.1:{port}", **settings}, **limits}
    found = HttpEngine(InferenceConfig.model_validate(given), 0)
    try:
        await found.start()
        yield found
    finally:
        await found.close()
        await runner.cleanup()


def answer_of(handler: Handler, request: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with engine(handler, **settings) as found:
            return (await found.answer([request or {"id": "a", "body": {"prompt": "hi"}}]))[0]

    return asyncio.run(main())


def saying(status: int, text: str, **headers: str) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=text, headers=headers)

    return handle


def test_body_and_path_reach_the_engine_and_its_answer_comes_back_unchanged():
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "body": await request.json()})

    for url, path in ({}, "/v1/chat/completions"), ({"url": "/v1/embeddings"}, "/v1/embeddings"):
        request = {"id": "a", **url, "body": {"x": [1, "ü"]}}
        found = answer_of(echo, request)
        assert found == {"response": {"status_code": 200, "body": {"path": path, "body": {"x": [1, "ü"]}}}}


@pytest.mark.parametrize(
    ("status", "text", "body"),
    [(400, '{"error": "no"}', {"error": "no"}), (404, "nothing", {"text": "nothing"}), (200, "", {"text": ""}),
     (200, "NaN", {"text": "NaN"}), (302, "{}", {})],
)  # fmt: skip
def test_what_is_final_is_an_answer(status, text, body):
    assert answer_of(saying(status, text)) == {"response": {"status_code": status, "body": body}}


@pytest.mark.parametrize(("status", "seconds"), [(429, 7.0), (503, 7.0), (500, 7.0)])
def test_what_may_pass_is_tried_again_when_the_engine_says(status, seconds):
    with pytest.raises(Again) as caught:
        answer_of(saying(status, "busy", **{"Retry-After": "7"}))
    assert caught.value.after_s == seconds and f"HTTP {status}: busy" in str(caught.value)


def test_missing_memory_is_told_apart():
    with pytest.raises(OutOfMemory):
        answer_of(saying(500, "torch.OutOfMemoryError: CUDA out of memory"))


def test_an_engine_that_takes_too_long_or_hangs_up_is_tried_again():
    async def sleeps(_request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def hangs_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(Again, match=r"no answer within 0\.2 s"):
        answer_of(sleeps, request_timeout_s=0.2)
    with pytest.raises(Again, match="no answer: "):
        answer_of(hangs_up)


def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr("slurmft.inference.driver.MAX_ANSWER_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(64):
            await response.write(b"x" * (1 << 16))
        return response

    with pytest.raises(Again, match="an answer of more than 1 MiB"):
        answer_of(endless)


def test_the_token_comes_from_a_file_that_others_cannot_read(tmp_path: Path):
    async def tell(request: web.Request) -> web.Response:
        return web.json_response({"seen": request.headers.get("Authorization")})

    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        answer_of(tell, token_file=str(token))
    token.chmod(0o600)
    assert answer_of(tell, token_file=str(token))["response"]["body"] == {"seen": "Bearer secret"}
    token.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        answer_of(tell, token_file=str(token))


def call(name: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        found = CallableEngine(name, "cpu", 8)
        await found.start()
        return await found.answer([{"id": str(place), "body": body} for place, body in enumerate(bodies)])

    return asyncio.run(main())


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with open(sys.argv[2], "a") as file:
            file.write(self.path)
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


LEAVING = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    other, _ = listener.accept()
    if other.recv(1000):  # else it was only a look whether something listens
        other.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
        break
listener.close()
time.sleep(60)
"""


async def test_an_engine_that_lives_and_takes_no_connection_is_told_apart():
    async def tries(found: HttpEngine) -> None:
        while True:  # until it has closed its port
            try:
                await found.answer([{"id": "a", "body": {}}])
            except Closed:
                return
            except Again:
                await asyncio.sleep(0.05)

    given = {"input": "x.jsonl", "engine": {"command": [sys.executable, "-c", LEAVING, "{port}"]}}
    found = HttpEngine(InferenceConfig.model_validate(given), 0)
    try:
        await found.start()
        await asyncio.wait_for(tries(found), 20)
    finally:
        await found.close()
        await found.ended()


FAMILY = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
async def test_a_signal_to_the_whole_step_does_not_end_an_engine(monkeypatch, name: str):
    """Not even one whose default action is to end; KILL ends it as ever."""
    monkeypatch.setenv(STOP_SIGNAL_VARIABLE, name)
    given = {"input": "x.jsonl", "engine": {"command": [sys.executable, "-c", FAMILY, "{port}"]}}
    found = HttpEngine(InferenceConfig.model_validate(given), 0)
    try:
        await found.start()
        answer = urlopen(f"http://127.0.0.1:{found.place}/")
        pid = int(answer.read())
        for number in (signal.SIGTERM, signal.Signals[name]):
            os.kill(pid, number)
        assert urlopen(f"http://127.0.0.1:{found.place}/").status == 200
    finally:
        await found.close()
    assert await asyncio.wait_for(found.ended(), 10) == -signal.SIGKILL


@pytest.mark.parametrize(("status", "is_good"), [(200, True), (404, True), (422, True), (401, False), (403, False),
                                                 (500, False), (503, False)])  # fmt: skip
def test_a_canary_is_a_client_s_first_request_and_judges_the_engine_alone(status: int, is_good: bool):
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "small"}]})
        asked.append((request.path, await request.json()))
        return web.Response(status=status)

    async def main() -> None:
        async with engine(handle) as found:
            await found.canary()

    if is_good:
        asyncio.run(main())
    else:
        with pytest.raises(LaunchError, match=str(status)):
            asyncio.run(main())
    [(path, body)] = asked
    assert path == "/v1/chat/completions"
    assert body == {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "as any proof"


async def started_and_ended(given: dict[str, Any]) -> None:
    found = HttpEngine(InferenceConfig.model_validate(given), 0)
    try:
        await found.start()
    finally:
        await found.close()
        await found.ended()


LATE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Late(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        said.append(sys.argv[4] if len(said) < 3 else sys.argv[2])
        open(sys.argv[3], "w").write(" ".join(said))
        self.send_response(int(said[-1]))
        self.end_headers()
        self.wfile.write(b"the model is still loading" if len(said) < 4 else b"what is that?")
said = []
HTTPServer(("127.0.0.1", int(sys.argv[1])), Late).serve_forever()
"""


@pytest.mark.parametrize(("first", "then"), [("503", "200"), ("503", "500"), ("500", "200"), ("500", "500")])
def test_an_engine_that_says_so_to_a_first_request_is_not_ready_yet(tmp_path: Path, first: str, then: str):
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, str(tmp_path / "late.py"), "{port}", then, str(tmp_path / "said"), first]
    asyncio.run(started_and_ended({"input": "in", "engine": {"command": command}}))
    assert (tmp_path / "said").read_text() == f"{first} {first} {first} {then}"


@pytest.mark.parametrize("owner", [None, 4242])
def test_another_users_server_at_the_engines_port_is_asked_nothing(tmp_path: Path, monkeypatch, owner: int | None):
    command = [sys.executable, "-c", SERVER, "{port}", str(tmp_path / "asked")]
    given = {"input": "x.jsonl", "engine": {"command": command}}
    if owner is None:
        asyncio.run(started_and_ended(given))
        assert (tmp_path / "asked").read_text().startswith("/health")
        return
    monkeypatch.setattr(driver, "owners_of_loopback_port", lambda port: {owner})
    with pytest.raises(LaunchError, match=r"user 4242 listens at port [0-9]+, which was the engine's"):
        asyncio.run(started_and_ended(given))
    assert not (tmp_path / "asked").exists()


def test_an_engine_gets_the_copy_of_its_model_in_memory_at_each_start(tmp_path: Path, monkeypatch) -> None:
    (memory := tmp_path / "memory").mkdir(mode=0o700)
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(memory))
    (model := tmp_path / "a model").mkdir()
    (model / "weights").write_text("w")
    shell = 'echo "$1" >> "$2"; exec "$0" -c "$3" "$4" /dev/null'
    command = ["sh", "-c", shell, sys.executable, f"{model}/weights", str(tmp_path / "told"), SERVER, "{port}"]
    given = {"input": "x.jsonl", "engine": {"command": command, "stage_in_memory": [str(model)]}}

    asyncio.run(started_and_ended(given))
    asyncio.run(started_and_ended(given))
    first, second = map(Path, (tmp_path / "told").read_text().splitlines())
    assert first == second and first.is_relative_to(memory) and first.read_text() == "w"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = """
def doubled(bodies): return [{"n": 2 * body["n"]} for body in bodies]
def short(bodies): return []
def odd(bodies): return [{1, 2} for body in bodies]
def greedy(bodies): raise MemoryError("no room")
def broken(bodies): raise KeyError("n")
class Model:
    def __init__(self, device): self.device = device
    def __call__(self, bodies): return [{"device": self.device} for body in bodies]
number = 3
"""
    (tmp_path / "callables_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return "callables_of_a_test"


def test_a_callable_answers_a_list(module):
    found = call(f"{module}:doubled", [{"n": 1}, {"n": 2}])
    assert [each["response"]["body"] for each in found] == [{"n": 2}, {"n": 4}]
    assert call(f"{module}:Model", [{}])[0]["response"]["body"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("short", Again, "must return a list of 1 answers"), ("odd", Again, "cannot be written as JSON"),
     ("greedy", OutOfMemory, "no room"), ("broken", Again, "KeyError"), ("number", UsageError, "cannot be called"),
     ("missing", UsageError, "cannot load")],
)  # fmt: skip
def test_a_callable_that_will_not_do_says_why(module, name, error, words):
    with pytest.raises(error, match=words):
        call(f"{module}:{name}", [{"n": 1}])
