"""The engines behind a replica's driver: a server of its own, a service elsewhere, or a Python callable."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slurmft.config.inference import PORT_WORD, SOCKET_WORD, InferenceConfig
from slurmft.errors import LaunchError, UsageError
from slurmft.inference.callables import CallableEngine
from slurmft.inference.request_checkpoints import NOTE_S, RequestCheckpointer
from slurmft.inference.retrying import MAX_TOLD, Again, Answer, OutOfMemory
from slurmft.inference.streams import events_of
from slurmft.ipc.stacks import STOP_SIGNAL_VARIABLE
from slurmft.policy.inference.answers import Outcome, is_good, outcome_of_status, retry_after_s
from slurmft.policy.inference.continuation import (
    JoinedAnswer,
    Prefix,
    continued_forms,
    continuing,
    error_in,
    form_of,
    streaming,
)
from slurmft.policy.inference.engines import counter_in, engine_kind, with_another_path
from slurmft.storage.shared_weights import stage_in_memory
from slurmft.system.private_folder import PrivateFolder, make_private_folder
from slurmft.system.processes import die_with_parent, owners_of_loopback_port, reap_adopted
from slurmft.system.token_file import token_in

if TYPE_CHECKING:
    import aiohttp

READY_LOOK_S = 0.1
READY_TRY_S = 5.0
METRICS_S = 5.0
REAP_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
STREAM_COST = 8
"""By so much an answer is longer as a stream, at least."""
ROOT = 0
"""As which a container's runtime may listen for the engine in it."""


class Closed(Again):
    """An engine that was started here takes no connection: it is about to end, of which no request is the cause."""


class Engine(Protocol):
    """The driver's view of what answers requests."""

    request_path: str
    """For requests that name no path."""

    at_once: int
    """Requests in one call of ``answer``: 1, or as many as there are slots for an engine that takes lists."""

    async def start(self) -> None:
        """Return when it can answer.

        Raises:
            SlurmftError: it ended, or cannot be started.
        """

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """The answers to a list of requests (``id``, ``body``, and ``url`` where one is named).

        What a request has so far is noted under its ``key``, or its ``id`` where it has none.

        Raises:
            OutOfMemory: with fewer at a time it may work.
            Closed: the engine takes no more requests.
            Again: the next try may succeed.
        """

    async def tokens(self) -> float:
        """Tokens, or pieces of answers, made so far, as far as that is known."""

    async def ended(self) -> int:
        """Return, with the exit code, when the engine has ended by itself; never for one that is not ours."""

    async def close(self) -> None:
        """Let go of it."""


def engine_of(config: InferenceConfig, replica: int, device: str, partials: RequestCheckpointer) -> Engine:
    """The engine that the configuration names; ``partials`` takes the beginnings of its answers, and has known ones."""
    if config.engine.callable is not None:
        keeps = config.engine.continue_from_prefix != "never"
        device = device or default_device()
        return CallableEngine(config.engine.callable, device, config.concurrency, partials if keeps else None)
    return HttpEngine(config, replica, partials)


class HttpEngine:
    """A server that speaks HTTP: started here (``command``), or one that is there already (``url``)."""

    at_once = 1

    def __init__(self, config: InferenceConfig, replica: int, partials: RequestCheckpointer | None = None) -> None:
        engine, kind = config.engine, engine_kind(config.engine.command or ())
        self._config, self._replica = config, replica
        self._partials = RequestCheckpointer() if partials is None else partials
        self._forms = continued_forms(engine.continue_from_prefix)
        self._pieces, self._counted = 0, 0.0
        self._first: float | None = None
        self._ready_path = engine.ready_path or kind.ready_path
        self.request_path = engine.request_path or kind.request_path
        self._metrics_path = engine.metrics_path or kind.metrics_path
        self._metric = engine.progress_metric or kind.progress_metric
        self._base = engine.url or ""
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._session: aiohttp.ClientSession | None = None
        self._private: PrivateFolder | None = None
        self.place: int | str = 0
        """Where a server that was started here listens: its port on this node, or the path of its Unix socket."""

    async def start(self) -> None:
        """Start the server and wait until it is ready; its limit is the agent's."""
        try:
            import aiohttp
        except ImportError as error:
            raise UsageError("engines that speak HTTP need the package aiohttp",
                             hint="pip install 'slurmft[inference]'") from error  # fmt: skip
        headers = {}
        if self._config.engine.token_file is not None:
            headers["Authorization"] = f"Bearer {token_in(self._config.engine.token_file, at_least=1)}"
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        if self._config.engine.command is not None and any(SOCKET_WORD in each for each in self._config.engine.command):
            self._private = make_private_folder()
            connector = aiohttp.UnixConnector(str(self._private.path / "engine.sock"), limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._config.request_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and looking for some costs time
            headers=headers,
            trust_env=False,
        )
        if self._config.engine.command is not None:
            port = self._port = _free_port()
            self._base = f"http://127.0.0.1:{port}"
            self.place = port
            words = {PORT_WORD: str(port), "{replica}": str(self._replica)}
            if self._private is not None:
                self.place = words[SOCKET_WORD] = str(self._private.path / "engine.sock")
            command = self._config.engine.command
            for path in self._config.engine.stage_in_memory:
                copy = await asyncio.to_thread(stage_in_memory, path)
                command = with_another_path(command, path, str(copy))
            argv = [_filled(word, words) for word in command]
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv, stdin=asyncio.subprocess.DEVNULL, preexec_fn=_begin_engine
                )
            except OSError as error:
                raise UsageError(f"cannot start the engine {argv[0]!r}: {error.strerror or error}") from error
        while not await self._is_ready():
            if self._process is not None and self._process.returncode is not None:
                raise LaunchError(f"the engine ended with {self._process.returncode} before it was ready")
            await asyncio.sleep(READY_LOOK_S)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One request, by POST."""
        return [await self._post(request) for request in requests]

    async def _post(self, request: Mapping[str, Any]) -> Answer:
        path, body = request.get("url", self.request_path), request["body"]
        form = form_of(path, body) if self._forms else None
        if form not in self._forms:
            return await self._ask(path, body)
        key = request.get("key", request["id"])
        known = self._partials.take(key)
        if known is not None and (rest := continuing(body, form, known)) is not None:
            self._note(key, known)  # this engine may die, too
            answer = await self._ask(path, rest, key, JoinedAnswer(form, known))
            if is_good(answer):
                self._partials.forget(key)
                return answer
        answer = await self._ask(path, streaming(body), key, JoinedAnswer(form, Prefix()))
        self._partials.forget(key)
        return answer if is_good(answer) else await self._ask(path, body)  # it may take no streams

    async def _ask(
        self, path: str, body: Mapping[str, Any], key: str = "", joined: JoinedAnswer | None = None
    ) -> Answer:
        """One try; ``joined`` takes the answer where it comes in pieces."""
        import aiohttp

        assert self._session is not None
        address = self._base + path
        try:
            async with self._session.post(address, json=body, allow_redirects=False) as response:
                if joined is not None and response.status == 200 and response.content_type == "text/event-stream":
                    if (failure := await self._gather(response, key, joined)) is None:
                        return {"response": {"status_code": 200, "body": joined.body()}}
                    status, content = failure[0], failure[1].encode()
                else:
                    status, content = response.status, await _content(response)
                after_s = retry_after_s(response.headers.get("Retry-After"), longest_s=self._config.max_delay_s)
        except aiohttp.ClientConnectorError as error:
            raise (Again if self._process is None else Closed)(f"no connection: {error}") from error
        except TimeoutError as error:
            raise Again(f"no answer within {self._config.request_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Again(f"no answer: {error or type(error).__name__}") from error
        text = content.decode(errors="replace")
        match outcome_of_status(status, text):
            case Outcome.ANSWER:
                return {"response": {"status_code": status, "body": _body_of(text)}}
            case Outcome.SMALLER:
                raise OutOfMemory(f"HTTP {status}: {text[:MAX_TOLD]}")
        raise Again(f"HTTP {status}: {text[:MAX_TOLD]}", after_s=after_s)

    async def canary(self) -> None:
        """Ask for one token as routers do, which show the engine its own token and none of the clients'.

        Raises:
            LaunchError: it refuses all that routers pass on, or fails. What it says of the request itself does not
                count: an engine may speak any HTTP.
        """
        import aiohttp

        assert self._session is not None
        body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "1"}], "prompt": "1"}
        try:
            async with self._session.get(f"{self._base}/v1/models") as response:
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    body["model"] = json.loads(await _content(response))["data"][0]["id"]
            async with self._session.post(self._base + self.request_path, json=body) as response:
                status, text = response.status, (await _content(response)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, Again) as error:
            raise LaunchError(f"a first request has no answer: {error or type(error).__name__}") from error
        if status in (401, 403) or status >= 500:
            raise LaunchError(f"a first request to {self.request_path} gets HTTP {status}: {text[:MAX_TOLD]}")

    async def tokens(self) -> float:
        """From the engine's metrics since the first look, and by the pieces of streams."""
        import aiohttp

        if not self._metric or not self._metrics_path or self._session is None:
            return self._pieces + self._counted
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            limit = aiohttp.ClientTimeout(total=METRICS_S)
            async with self._session.get(self._base + self._metrics_path, timeout=limit) as response:
                found = counter_in((await _content(response)).decode(errors="replace"), self._metric)
            if found is not None:
                self._first = found if self._first is None else self._first
                self._counted = found - self._first
        return self._pieces + self._counted

    async def _gather(self, response: aiohttp.ClientResponse, key: str, joined: JoinedAnswer) -> tuple[int, str] | None:
        """Take all pieces of an answer; the status and text of an error among them."""
        noted_s = time.monotonic()
        try:
            async for event in events_of(response.content.iter_any(), limit_bytes=STREAM_COST * MAX_ANSWER_BYTES):
                if (failure := error_in(event)) is not None:
                    return failure
                joined.add(event)
                self._pieces += 1
                if time.monotonic() - noted_s > NOTE_S:
                    noted_s = time.monotonic()
                    self._note(key, joined.continuable)
        except ValueError as error:
            raise Again(f"a stream that is not understood: {error}") from error
        finally:
            self._note(key, joined.continuable)
        if not joined.is_complete:
            raise Again("the stream ended before the answer did")
        return None

    def _note(self, key: str, prefix: Prefix) -> None:
        self._partials.note(key, prefix.text, tokens=prefix.tokens, prompt_tokens=prefix.prompt_tokens)

    async def ended(self) -> int:
        """The server's exit."""
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    return await self._process.wait()
            reap_adopted({self._process.pid})

    async def close(self) -> None:
        """End the server; the zygote ends what else it has started."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._private is not None:
            self._private.close()

    async def _is_ready(self) -> bool:
        import aiohttp

        assert self._session is not None
        if self._process is not None and self._private is None and not await self._is_ours():
            return False
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            limit = aiohttp.ClientTimeout(total=READY_TRY_S)
            async with self._session.get(self._base + self._ready_path, timeout=limit) as response:
                return response.status == 200
        return False

    async def _is_ours(self) -> bool:
        """Whether something listens at the port. Between its choice and the engine's bind, which may be minutes later,
        everybody on the node can see the number, and be there first: to read the requests and to forge the answers.
        """
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        strangers = await asyncio.to_thread(owners_of_loopback_port, self._port) - {os.geteuid(), ROOT}
        if strangers:
            raise LaunchError(f"user {min(strangers)} listens at port {self._port}, which was the engine's; no request "
                              "was sent there")  # fmt: skip
        return True


def _begin_engine() -> None:
    """In the engine's process: it ends with its driver, and no signal to a whole job step ends it or its children.

    Blocked and not ignored: most servers install a handler of their own.
    """
    die_with_parent()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.Signals[os.environ.get(STOP_SIGNAL_VARIABLE, "SIGTERM")]}
    )


def default_device() -> str:
    """``cuda`` where torch is installed and sees a GPU, else ``cpu``."""
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    return "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"


async def _content(response: aiohttp.ClientResponse) -> bytes:
    is_packed = "Content-Encoding" in response.headers
    if not is_packed and response.content_length is not None and response.content_length <= MAX_ANSWER_BYTES:
        return await response.read()
    parts, room = [], MAX_ANSWER_BYTES
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        room -= len(part)
        if room < 0:
            raise Again(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    return b"".join(parts)


def _body_of(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {"text": text}


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _filled(word: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        word = word.replace(name, value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
