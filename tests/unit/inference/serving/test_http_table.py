"""Each row of the table in docs/reference/http.md, over raw sockets."""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from serving_world import TOKEN, World, serving

from slurmft.inference.batches import Batches

TABLE = Path(__file__).parents[4] / "docs" / "reference" / "http.md"
A, H = f"Authorization: Bearer {TOKEN}\r\n", "Host: h.example:1\r\n"
PAGE = "Origin: https://page.example\r\nAccess-Control-Request-Method: POST\r\n"


async def engine(request: web.BaseRequest) -> web.StreamResponse:
    """Tells what has come, or answers as the path says."""
    body = await request.read()
    assert request.transport is not None
    raw = {
        "/v1/responses/early": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "/v1/responses/switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "/v1/responses/trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n"
        b"2\r\nok\r\n0\r\nX-T: secret\r\n\r\n",
        "/v1/responses/less": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
    }.get(request.path)
    if raw is not None:
        request.transport.write(raw)
        await asyncio.sleep(0.02)
        request.transport.close()
        await asyncio.sleep(1)
    match request.path.removeprefix("/v1/responses/"):
        case "redirect":
            return web.Response(status=307, headers={"Location": f"http://{request.headers['Host']}/v1/models?a=b"})
        case "own":
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:7//evil.example/x"})
        case "elsewhere":
            return web.Response(status=307, headers={"Location": "https://elsewhere.example/x"})
        case "packed":
            return web.Response(body=b"\x1f\x8bzz", headers={"Content-Encoding": "gzip"})
        case "long":
            return web.Response(headers={"X-Long": LONG[:30_000]})
        case "304":
            return web.Response(status=304, headers={"ETag": '"e"'})
    told = {"method": request.method, "path": request.raw_path, "body": body.decode(),
            "headers": {name.lower(): value for name, value in request.headers.items()}}  # fmt: skip
    return web.json_response(told, headers={"X-Own": "engine"})


async def said(world: World, text: str, *, end: bool = False) -> str:
    """All answers, until the connection ends or nothing more comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(text.encode("latin-1"))
    if end:
        writer.write_eof()
    answer = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(0.6):
            while part := await reader.read(1 << 16):
                answer += part
            answer += b"<end>"
    writer.close()
    return answer.decode("latin-1")


def asked(target: str = "/v1/models", *lines: str, method: str = "GET", version: str = "1.1", body: str = "",
          head: str = A + H) -> str:  # fmt: skip
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    more = "".join(f"{each}\r\n" for each in lines)
    return f"{method} {target} HTTP/{version}\r\n{head}{length}{more}\r\n{body}"


def status(*wanted: int) -> Callable[[list[str]], None]:
    def check(answers: list[str]) -> None:
        found = [int(each) for answer in answers for each in re.findall(r"HTTP/1\.[01] (\d+) ", answer)]
        assert found == list(wanted), answers

    return check


def tells(**wanted: object) -> Callable[[list[str]], None]:
    """Of the last answer what the engine has seen; a header that is None must not be there."""

    def check(answers: list[str]) -> None:
        assert answers[-1].startswith(("HTTP/1.1 200", "HTTP/1.0 200")), answers
        seen = json.loads(answers[-1].rpartition("\r\n\r\n")[2].removesuffix("<end>"))
        for name, value in wanted.items():
            key = name.replace("_", "-")
            assert (seen[name] if name in ("method", "path", "body") else seen["headers"].get(key)) == value, seen

    return check


def has(*words: str) -> Callable[[list[str]], None]:
    def check(answers: list[str]) -> None:
        for word in words:
            assert (word[1:] not in answers[-1]) if word.startswith("!") else (word in answers[-1]), (word, answers)

    return check


def chunked(*more: str) -> str:
    return asked("/v1/responses", "Transfer-Encoding: chunked", *more, method="POST") + "2\r\n{}\r\n0\r\n"


LONG = "a" * 40_000
CASES: list[tuple[str, list[str], list[Callable[[list[str]], None]]]] = [
    ("GET, POST, PUT, PATCH, DELETE", [asked("/v1/responses/x?a=%2F", method="DELETE"),
     asked("/v1/responses/x?a=%2F", "X-Thing: 1", method="PUT", body="hi")],
     [status(200, 200), tells(method="PUT", path="/v1/responses/x?a=%2F", body="hi", x_thing="1")]),
    ("HEAD", [asked(method="HEAD") + asked(head=A + H + "Connection: close\r\n")],
     [status(200, 200), has("X-Own: engine")]),
    ("OPTIONS with the token", [asked(method="OPTIONS")], [tells(method="OPTIONS")]),
    ("OPTIONS of a browser (preflight)", [
        asked(method="OPTIONS", head=H + PAGE.replace("page", "other")),
        asked("/v1/models", "Access-Control-Request-Headers: authorization", method="OPTIONS", head=H + PAGE)],
     [status(401, 204), has("Access-Control-Allow-Origin: https://page.example", "Access-Control-Allow-Methods: POST",
                            "Access-Control-Allow-Headers: authorization", "Vary: Origin")]),
    ("CONNECT, TRACE", [asked("a:1", method="CONNECT"), asked("/", method="TRACE")], [status(400, 501)]),
    ("an absolute address as target", [asked("http://x.example:5/v1/models?q")],
     [tells(path="/v1/models?q", host="x.example:5")]),
    ("`*` as target", [asked("*", method="OPTIONS")], [status(400)]),
    ("`%2F` in a path", [asked("/v1/models%2F..%2Freset"), asked("/reset%2Fx"), asked("/v1/models/org%2Fname")],
     [status(400, 403, 200), tells(path="/v1/models/org%2Fname")]),
    ("`%2e%2e`, `//`, `\\`, `;`, `#`, `%25` in a path",
     [asked(each) for each in ("/v1/%2e%2e/reset", "//v1/models", "/v1\\x", "/v1/models;x", "/v1/m#x", "/v1/%252e")],
     [status(*[400] * 6)]),
    ("`/v1/files`, `/v1/batches`, `/status`, `/metrics`",
     [*(asked(each, method="POST", body="{}") for each in ("/status", "/metrics")),
      *(asked(each) for each in ("/v1/files", "/v1/batches?limit=2", "/status", "/metrics"))],
     [status(405, 405, 200, 200, 200, 200), lambda answers: has("Allow: GET, HEAD, OPTIONS\r\n")(answers[:1]),
      has("slurmft_requests_in_flight")]),
    ("a path that is not open", [asked("/reset", method="POST", body="{}"), asked("/load_model")], [status(403, 403)]),
    ("no `Host`, two, or what is no name with a port",
     [asked(head=A), asked(head=A + H + H), *(asked(head=f"{A}Host: {each}\r\n") for each in
                                             ("a b", "a/b", "u@a", "a:b", "[::1]:8000", "a_b.example", "")),
      asked(head=A, version="1.0")],
     [status(*[400] * 6, *[200] * 4)]),
    ("`Host`", [asked(), asked("/v1/responses/redirect"), asked("/v1/responses/own")],
     [lambda answers: tells(host="h.example:1")(answers[:1]),
      lambda answers: has("Location: /v1/models?a=b\r\n")(answers[:2]), has("Location: /evil.example/x\r\n")]),
    ("`X-Forwarded-For`, `-Proto`, `-Host`", [asked("/v1/models"), asked(
        "/v1/models", "X-Forwarded-For: 10.0.0.9", "X-Forwarded-Proto: https", "X-Forwarded-Host: front")],
     [lambda answers: tells(x_forwarded_for="127.0.0.1", x_forwarded_proto="http",
                            x_forwarded_host="h.example:1")(answers[:1]),
      tells(x_forwarded_for="10.0.0.9, 127.0.0.1", x_forwarded_proto="https", x_forwarded_host="front")]),
    ("`X-Request-ID`", [asked("/v1/models", "X-Request-ID: bad id"), asked("/v1/models", "X-Request-ID: mine-7")],
     [lambda answers: has("X-Request-ID: ", "!bad id")(answers[:1]), has("X-Request-ID: mine-7\r\n"),
      tells(x_request_id="mine-7")]),
    ("the token as `Authorization: Bearer`, `x-api-key`, `api-key`",
     [asked(head=H + f"Authorization: bearer   {TOKEN} \r\n"), asked(head=H + f"api-key: {TOKEN}\r\n"),
      asked(head=H + "x-api-key: wrong\r\n"),
      asked(head=H + f"Authorization: Basic {TOKEN}\r\nx-api-key: {TOKEN}\r\n"),
      asked(head=H + f"x-api-key: {TOKEN}\r\n")],
     [status(200, 200, 401, 401, 200), tells(authorization=None, x_api_key=None)]),
    ("headers of one connection, and those that `Connection` names",
     [asked("/v1/models", "Connection: X-Hop, X-Forwarded-For", "X-Hop: 1", "Keep-Alive: 3", "TE: trailers",
            "Proxy-Authorization: x")],
     [tells(x_hop=None, keep_alive=None, te=None, proxy_authorization=None, x_forwarded_for="127.0.0.1")]),
    ("`Expect: 100-continue`", [asked("/v1/responses", "Expect: 100-continue", method="POST", body="{}"),
                                asked("/v1/responses", "Expect: tea", method="POST", body="{}")],
     [status(100, 200, 200), tells(expect=None)]),
    ("a body in chunks", [chunked() + f"X-T: 1\r\n\r\n{asked()}"],
     [status(200), has("<end>"), tells(body="{}", content_length="2", x_t=None)]),
    ("`Transfer-Encoding` other than `chunked`",
     [asked("/v1/responses", "Transfer-Encoding: gzip, chunked", method="POST") + "0\r\n\r\n"], [status(501)]),
    ("`Content-Length` beside `Transfer-Encoding`, or two",
     [chunked("Content-Length: 2"), asked("/v1/responses", "Content-Length: 3", method="POST", body="{}")],
     [status(400, 400)]),
    ("`Content-Encoding`, `Accept-Encoding`",
     [asked("/v1/responses", "Content-Encoding: gzip", "Accept-Encoding: br", method="POST", body="zz")],
     [tells(content_encoding="gzip", accept_encoding="br", body="zz")]),
    ("`Upgrade: websocket`", [asked("/v1/responses", "Connection: Upgrade", "Upgrade: WebSocket")],
     [status(501), has("websockets do not pass", "<end>")]),
    ("another `Upgrade`, such as `h2c`", [asked("/v1/models", "Connection: Upgrade", "Upgrade: h2c") + asked()],
     [status(200), tells(upgrade=None), has("Connection: close", "<end>")]),
    ("HTTP/2 from its first byte, plain HTTP where HTTPS is spoken",  # the latter in test_tls.py
     ["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], [status(400)]),
    ("another version in the request line, such as `HTTP/2.0`",
     [asked(version="0.9"), asked(version="2.0", head=H)],
     [status(505, 505), has("Connection: close", "<end>")]),
    ("HTTP/1.0", [asked(version="1.0")], [has("HTTP/1.0 200", "<end>")]),
    ("requests one behind the other on a connection", [asked("/v1/models/1") + asked("/v1/models/2")],
     [status(200, 200), tells(path="/v1/models/2")]),
    ("a client that ends its side of the connection early", ["end " + asked("/v1/models")], [status()]),
    ("a target that is too long", [asked(f"/v1/{LONG}")], [status(414)]),
    ("a header that is too long, or more than 128",
     [asked("/v1/models", f"X-L: {LONG}"), asked("/v1/models", f"{LONG}: 1"),
      asked("/v1/models", *(f"X-{number}: 1" for number in range(200))),
      asked("/v1/models", *(f"X-{number}: 1" for number in range(100)))],
     [status(431, 431, 431, 200)]),
    ("a redirect", [asked("/v1/responses/elsewhere")], [status(307), has("Location: https://elsewhere.example/x\r\n")]),
    ("100, 103 and others below 200", [asked("/v1/responses/switch"), asked("/v1/responses/early")],
     [status(502, 200), has("\r\n\r\nok")]),
    ("an answer in chunks", [asked("/v1/responses/trailers")], [status(200), has("2\r\nok\r\n0\r\n\r\n", "!secret")]),
    ("a packed answer", [asked("/v1/responses/packed")], [has("Content-Encoding: gzip", "\x1f\x8bzz")]),
    ("headers of up to 32 KiB each", [asked("/v1/responses/long")], [status(200), has(f"X-Long: {LONG[:30_000]}\r\n")]),
    ("204, 304", [asked("/v1/responses/304")], [status(304), has('tag: "e"', "!chunked")]),
    ("more, or less, than it said", [asked("/v1/responses/less")], [status(502)]),
]  # fmt: skip


def test_the_table_and_the_cases_are_the_same() -> None:
    rows = re.findall(r"^\| (.*?) \| ", TABLE.read_text().partition("## Headers of the router")[0], re.MULTILINE)
    assert [row for row in rows if not row.startswith("what ")] == [name for name, _, _ in CASES]


@pytest.mark.parametrize(("asks", "checks"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
async def test_a_row_is_true(asks: list[str], checks: list[Callable[[list[str]], None]], tmp_path: Path) -> None:
    engines = {"command": ["transformers", "serve", "{socket}"]}
    origins = {"allow_origins": ["https://page.example"]}
    async with serving({"a": engine}, origins, engine=engines, max_retries=0) as world:
        world.router.batches = Batches(
            tmp_path, ready=lambda: 1, error=world.router.error, open_paths=(), slots=1, tries=1, token=TOKEN
        )  # fmt: skip
        answers = [await said(world, each.removeprefix("end "), end=each.startswith("end ")) for each in asks]
        for check in checks:
            check(answers)
