"""The driver of one replica: starts its engine, asks it what the agent hands over, and writes the answers.

    python -m slurmft.inference.driver      (forked by the agent's zygote)

It speaks with its agent over a Unix socket in a private folder, one JSON object a line. Every answer is in the
segment before the agent hears of it, and on the disk before it is reported as ``answered``. When the engine ends, the
driver ends with its code; when the agent is gone, so is the driver.

In one piece, since engines, tries and the driver share the errors and limits of one request on its way to its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slurmft.config.inference import PORT_WORD, SOCKET_WORD, InferenceConfig, WeightsConfig
from slurmft.config.run import load
from slurmft.errors import LaunchError, SlurmftError, StorageError, UsageError
from slurmft.inference.endpoint import is_config_name, is_local, key_of
from slurmft.inference.gang import Ended, Head, Starts, free_port, join
from slurmft.inference.ledger import NOTE_S, CheckpointFile, Partials, fingerprint, records_in, segments_of
from slurmft.inference.requests import Requests, folder_of, refuse_constant, segment_name
from slurmft.inference.trial_call import function_of
from slurmft.inference.trial_engine import Stopped, TrialEngine, follow
from slurmft.ipc.channel import Fields
from slurmft.ipc.messages import ReplicaPlace
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE
from slurmft.policy import inference
from slurmft.policy.serving import JoinedAnswer, Prefix, continued_forms, continuing, error_in, form_of, streaming
from slurmft.storage.queue import SegmentWriter
from slurmft.storage.shared_weights import stage_in_memory
from slurmft.system.background import run_below_agent
from slurmft.system.files import PrivateFolder, make_private_folder, token_in
from slurmft.system.processes import die_with_parent, owners_of_loopback_port, reap_adopted

if TYPE_CHECKING:
    import aiohttp

# --- What the agent tells a driver ---


class ReplicaSettings(Fields, frozen=True, kw_only=True):
    """Where it is, and what it is to drive."""

    socket: str
    config: str
    """The run's configuration."""

    generation: int
    node: int
    replica: int
    life: int
    """How often this replica was started by this agent; part of its segments' names."""

    device: str
    """For a callable; empty: whatever there is."""

    rank: int = 0
    """In an engine over several nodes, and ..."""

    head: ReplicaPlace | None = None
    """... where its head waits for this member; None: it is no member."""


# --- Tries of one request: exponential backoff with jitter, and what the engine itself asks for ---

Result = TypeVar("Result")
Answer = dict[str, Any]
"""``{"response": {"status_code": ..., "body": ...}}``, or ``{"error": {"code": ..., "message": ...}}``."""

MAX_TOLD = 2000
"""Characters of an error that are kept."""


class Again(Exception):
    """A try has failed in a way that the next one may not.

    Args:
        after_s: seconds that the other side asks for; None: the schedule's.
    """

    def __init__(self, why: str, *, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


class Unavailable(Again):
    """The engine says that it cannot serve at the moment."""


class OutOfMemory(Again):
    """A try failed for want of memory."""


async def retried(work: Callable[[], Awaitable[Result]], config: InferenceConfig) -> Result:
    """The result of ``work``, which is tried again after ``Again``: up to ``max_retries`` times, after ``base_delay_s``
    doubled each time, at most ``max_delay_s``, with jitter.

    Raises:
        Again: of the last try, when there is none left.
        Exception: any other error of ``work``, at once.
    """
    for failed in itertools.count(1):
        try:
            return await work()
        except Again as error:
            if failed > config.max_retries:
                raise
            pause_s = error.after_s
        if pause_s is None:
            jitter_s = random.uniform(0, config.base_delay_s)  # noqa: S311 - spreads load, keeps no secret
            pause_s = config.base_delay_s * 2.0 ** min(failed - 1, 60) + jitter_s
        await asyncio.sleep(min(pause_s, config.max_delay_s))
    raise AssertionError("the count has no end")


# --- What answers requests ---


class Closed(Again):
    """An engine that was started here takes no connection: it is about to end, of which no request is the cause."""


class Engine(Protocol):
    """The driver's view of what answers requests."""

    request_path: str
    """For requests that name no path."""

    at_once: int
    """Requests in one call of ``answer``: 1, or as many as there are slots for an engine that takes lists."""

    is_here: bool = False
    """It is in this process, and may take that with it."""

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

    def stop(self) -> None:
        """The run stops: what is in flight may be finished."""
        return

    def cut_off(self) -> None:
        """The lease of what is in flight is void: others have it as well. That costs nothing but time, unless both
        write into one folder."""
        return


# --- A Python callable as an engine: a function, a class, or a generator that tells what it has so far ---


class CallableEngine(Engine):
    """A function, or an object of a class, in this process; it runs in a thread of its own, one list at a time.

    A generator yields what is new of each answer, takes what they begin with as ``prefixes``, and returns them whole.
    """

    request_path = ""
    is_here = True

    def __init__(self, name: str, device: str, at_once: int, partials: Partials | None = None) -> None:
        self.at_once = at_once
        self._partials, self._pieces = partials, 0
        self._is_generator = False
        self._name, self._device = name, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._call: Any = None

    async def start(self) -> None:
        """Import it, and build it where it is a class."""
        self._call = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One call."""
        bodies = [request["body"] for request in requests]
        loop = asyncio.get_running_loop()
        try:
            if self._is_generator:
                values = await self._generated([request.get("key", request["id"]) for request in requests], bodies)
            else:
                values = await loop.run_in_executor(self._thread, self._call, bodies)
        except Exception as error:
            kind = type(error).__name__
            text = f"{kind}: {error}"[:MAX_TOLD]
            if isinstance(error, MemoryError) or inference.is_out_of_memory(text):
                raise OutOfMemory(text) from error
            raise Again(text) from error
        return [{"response": {"status_code": 200, "body": value}} for value in self._checked(values, len(bodies))]

    async def _generated(self, keys: Sequence[str], bodies: Sequence[Any]) -> Any:
        loop, partials = asyncio.get_running_loop(), self._partials
        known = [partials.take(key) if partials is not None else None for key in keys]
        prefixes = [prefix.text if prefix is not None else "" for prefix in known]

        def note(texts: Sequence[str]) -> None:
            for key, text in zip(keys, texts, strict=True):
                if partials is not None:
                    partials.note(key, text)

        def run() -> Any:
            made = [[prefix] for prefix in prefixes]
            noted_s, pieces = time.monotonic(), self._call(bodies, prefixes=list(prefixes))
            try:
                while True:
                    new = next(pieces)
                    for parts, piece in zip(made, self._pieces_in(new, len(bodies)), strict=True):
                        parts.append(piece)
                    if time.monotonic() - noted_s > NOTE_S:
                        noted_s = time.monotonic()
                        loop.call_soon_threadsafe(note, ["".join(parts) for parts in made])
            except StopIteration as end:
                return end.value
            except BaseException:
                loop.call_soon_threadsafe(note, ["".join(parts) for parts in made])
                raise

        note(prefixes)
        values = await loop.run_in_executor(self._thread, run)
        for key in keys:
            if partials is not None:
                partials.forget(key)
        return values

    def _pieces_in(self, new: Any, count: int) -> Sequence[str]:
        if not isinstance(new, list) or len(new) != count or not all(isinstance(each, str) for each in new):
            raise TypeError(f"{self._name} must yield lists of {count} texts, what is new of each answer")
        self._pieces += 1
        return new

    def _checked(self, values: Any, count: int) -> list[Any]:
        if not isinstance(values, list) or len(values) != count:
            found = f"a list of {len(values)}" if isinstance(values, list) else f"a {type(values).__name__}"
            raise Again(
                f"{self._name} must return a list of {count} answers, one for each request; it returned {found}"
            )
        try:
            json.dumps(values, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Again(f"an answer of {self._name} cannot be written as JSON: {error}") from error
        return values

    async def tokens(self) -> float:
        """Of a generator, how often it has yielded."""
        return self._pieces

    async def ended(self) -> int:
        """It is this process."""
        await asyncio.Event().wait()
        return 0

    async def close(self) -> None:
        """Nothing: it ends with this process."""

    def _load(self) -> Any:
        if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as python itself would
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        try:
            found = function_of(self._name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"inference.engine.callable: cannot load {self._name}: {error}") from error
        is_class = inspect.isclass(found)
        built: Any = found(self._device) if is_class else found
        if not callable(built):
            raise UsageError(f"inference.engine.callable: {self._name} cannot be called")
        call = built if inspect.isroutine(built) else built.__call__
        self._is_generator = inspect.isgeneratorfunction(call)
        if self._is_generator and "prefixes" not in inspect.signature(call).parameters:
            raise UsageError(
                f"inference.engine.callable: {self._name} is a generator and must take the keyword prefixes",
                hint="a list of what the answers begin with; see docs/how-to/batch-inference.md",
            )
        return built


# --- streams ---
# Server-sent events as OpenAI's engines send them: one JSON object for each ``data:``, and ``[DONE]`` at the end.

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


# --- The engines behind a replica's driver: a server of its own, a service elsewhere, or a Python callable ---

READY_LOOK_S = 0.1
READY_TRY_S = 5.0
METRICS_S = 5.0
REAP_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
STREAM_COST = 8
"""By so much an answer is longer as a stream, at least."""
ROOT = 0
"""As which a container's runtime may listen for the engine in it."""


def head_of(
    settings: ReplicaSettings, config: InferenceConfig, run_folder: Path, tell: Callable[..., None]
) -> Head | None:
    """What gathers an engine over several nodes; None for any other."""
    if config.engine.nodes == 1:
        return None
    name, host = Path(settings.config).relative_to(run_folder), "127.0.0.1" if is_local(os.environ) else None
    return Head(key_of(run_folder), nodes=config.engine.nodes, config=str(name), host=host, tell=tell)


def engine_of(
    config: InferenceConfig, replica: int, device: str, partials: Partials, head: Head | None = None, *,
    run_folder: Path = Path(), owner: str = "",
) -> Engine:  # fmt: skip
    """The engine that the configuration names; ``partials`` takes the beginnings of its answers, and has known ones."""
    if config.engine.callable is not None:
        keeps = config.engine.continue_from_prefix != "never"
        device = device or default_device()
        return CallableEngine(config.engine.callable, device, config.concurrency, partials if keeps else None)
    if config.engine.process is not None:
        return TrialEngine(config, run_folder, owner, head)
    return HttpEngine(config, replica, partials, head)


class HttpEngine(Engine):
    """A server that speaks HTTP: started here (``command``), or one that is there already (``url``)."""

    at_once = 1

    def __init__(
        self, config: InferenceConfig, replica: int, partials: Partials | None = None,
        head: Head | None = None,
    ) -> None:  # fmt: skip
        self._head = head
        engine, kind = config.engine, inference.engine_kind(config.engine.command or ())
        self._config, self._replica = config, replica
        self._partials = Partials() if partials is None else partials
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
        """Start the server, where it has members with them, and wait until it is ready; its limit is the agent's."""
        try:
            import aiohttp
        except ImportError as error:
            raise UsageError("engines that speak HTTP need the package aiohttp",
                             hint="pip install aiohttp zstandard") from error  # fmt: skip
        headers = {}
        if self._config.engine.token_file is not None:
            headers["Authorization"] = f"Bearer {token_in(self._config.engine.token_file, at_least=1)}"
        await self.launch(await self._head.gather() if self._head is not None else {})
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        if self._private is not None:
            connector = aiohttp.UnixConnector(str(self._private.path / "engine.sock"), limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._config.request_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),  # engines set none, and looking for some costs time
            headers=headers,
            trust_env=False,
        )
        ended = asyncio.ensure_future(self.ended())
        while not await self._is_ready() or await self._is_loading():
            if ended.done():
                raise LaunchError(f"the engine: {inference.how_it_ended(ended.result())}, before it was ready")
            await asyncio.sleep(READY_LOOK_S)
        ended.cancel()

    async def launch(self, more: Mapping[str, str]) -> None:
        """Start the command, if there is one, with ``more`` in the place of its words."""
        if (command := self._config.engine.command) is None:
            return
        port = self._port = free_port("127.0.0.1")
        self._base = f"http://127.0.0.1:{port}"
        self.place = port
        words = {PORT_WORD: str(port), "{replica}": str(self._replica), **more}
        if any(SOCKET_WORD in each for each in command):
            self._private = make_private_folder()
            self.place = words[SOCKET_WORD] = str(self._private.path / "engine.sock")
        for path in self._config.engine.stage_in_memory:
            copy = await asyncio.to_thread(stage_in_memory, path)
            command = inference.with_another_path(command, path, str(copy))
        values = {name.strip("{}"): value for name, value in words.items()}
        argv = [inference.filled_with(word, values) for word in command]
        sys.stderr.write(f"slurmft: the engine starts: {argv[0]}\n")  # what it says of its end stands behind it
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, preexec_fn=_begin_engine
            )
        except OSError as error:
            raise UsageError(f"cannot start the engine {argv[0]!r}: {error.strerror or error}") from error

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
            if inference.is_good(answer):
                self._partials.forget(key)
                return answer
        answer = await self._ask(path, streaming(body), key, JoinedAnswer(form, Prefix()))
        self._partials.forget(key)
        return answer if inference.is_good(answer) else await self._ask(path, body)  # it may take no streams

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
                after_s = inference.retry_after_s(
                    response.headers.get("Retry-After"), longest_s=self._config.max_delay_s
                )
        except aiohttp.ClientConnectorError as error:
            raise (Again if self._process is None else Closed)(f"no connection: {error}") from error
        except TimeoutError as error:
            raise Again(f"no answer within {self._config.request_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Again(f"no answer: {error or type(error).__name__}") from error
        text = content.decode(errors="replace")
        match inference.outcome_of_status(status, text):
            case inference.TryOutcome.ANSWER:
                return {"response": {"status_code": status, "body": _body_of(text)}}
            case inference.TryOutcome.SMALLER:
                raise OutOfMemory(f"HTTP {status}: {text[:MAX_TOLD]}")
        kind = Unavailable if inference.is_loading(status, text) else Again
        raise kind(f"HTTP {status}: {text[:MAX_TOLD]}", after_s=after_s)

    async def canary(self) -> None:
        """Ask for one token as routers do, which show the engine its own token and none of the clients'.

        Raises:
            LaunchError: it refuses all that routers pass on, or fails. What it says of the request itself does not
                count: an engine may speak any HTTP.
        """
        try:
            answer = (await smallest_answer(self, await self._first_request()))["response"]
        except Again as error:
            raise LaunchError(f"a first request to {self.request_path}: {error}") from error
        if answer["status_code"] in (401, 403) or answer["status_code"] >= 500:
            raise LaunchError(f"a first request to {self.request_path} gets HTTP {answer['status_code']}: "
                              f"{json.dumps(answer['body'])[:MAX_TOLD]}")  # fmt: skip

    async def _first_request(self) -> dict[str, Any]:
        """One for a token of the first of its models."""
        body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "1"}], "prompt": "1"}
        with contextlib.suppress(ValueError, LookupError, TypeError, Again, TimeoutError):
            models = await self._told("GET", "/v1/models", self._config.request_timeout_s, follows=True)
            body["model"] = json.loads(models)["data"][0]["id"]
        return {"id": "canary", "body": body}

    async def take_weights(self, weights: WeightsConfig, path: str, version: int) -> None:
        """Have it load published weights, and see that it did, where ``version_path`` says so.

        Raises:
            Again: it refuses, or has other ones afterwards.
            TimeoutError: no answer within ``update_timeout_s``.
        """
        assert weights.update_path is not None
        limit_s, at = weights.update_timeout_s, weights.version_path
        await self._told("POST", weights.update_path, limit_s, body=weights.body_for(path, version))
        if at is not None and (found := version_in(await self._told("GET", at, limit_s))) != version:
            raise Again(f"GET {at}: it has version {found} after an update to {version}")

    async def _told(
        self, method: str, at: str, limit_s: float, *, body: str | None = None, follows: bool = False,
        good: Collection[int] = range(200, 300),
    ) -> str:  # fmt: skip
        """What the engine answers to a call that is no request of a client.

        Args:
            follows: where it is sent on.
            good: any other status is a refusal.

        Raises:
            Again: it refuses, or does not answer.
            TimeoutError: no answer within ``limit_s``.
        """
        import aiohttp

        assert self._session is not None
        limit, headers = aiohttp.ClientTimeout(total=limit_s), {"Content-Type": "application/json"} if body else {}
        try:
            async with self._session.request(
                method, f"{self._base}{at}", data=body, headers=headers, timeout=limit, allow_redirects=follows
            ) as response:
                text = (await _content(response)).decode(errors="replace")
                if response.status not in good:
                    raise Again(f"{method} {at}: HTTP {response.status}: {text[:MAX_TOLD]}")
                return text
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise Again(f"no answer: {error or type(error).__name__}") from error

    async def tokens(self) -> float:
        """From the engine's metrics since the first look, and by the pieces of streams."""
        if self._metric and self._metrics_path and self._session is not None:
            with contextlib.suppress(Again, TimeoutError):
                text = await self._told("GET", self._metrics_path, METRICS_S, follows=True)
                if (found := inference.counter_in(text, self._metric)) is not None:
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
        """The server's exit, or that of a member."""
        exits = {asyncio.ensure_future(self._exit()), *([self._head.broken] if self._head is not None else [])}
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def _exit(self) -> int:
        if self._process is None:
            await asyncio.Event().wait()
        assert self._process is not None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REAP_S):
                    return await self._process.wait()
            reap_adopted({self._process.pid})

    async def close(self) -> None:
        """End the server, and with it all members; the zygote ends what else it has started."""
        if self._head is not None:
            self._head.close()
        if self._session is not None:
            await self._session.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._private is not None:
            self._private.close()

    async def _is_ready(self) -> bool:
        if self._process is not None and self._private is None and not await self._is_ours():
            return False
        with contextlib.suppress(Again, TimeoutError):
            await self._told("GET", self._ready_path, READY_TRY_S, follows=True, good=(200,))
            return True
        return False

    async def _is_loading(self) -> bool:
        """Whether a server that was started here says of a first request that it cannot serve yet, as some do while
        ``ready_path`` is answered already: their requests would fail, and it would be killed for that."""
        if self._process is None:
            return False
        try:
            async with asyncio.timeout(READY_TRY_S):
                await smallest_answer(self, await self._first_request())
        except Unavailable:
            return True
        except (Again, TimeoutError):  # what is wrong with it is judged by the requests that it gets
            pass
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


def version_in(text: str) -> int | None:
    """The version of weights in an engine's answer; None where there is none."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            value = value.get("version", value.get("weight_version"))
        return int(value) if isinstance(value, (int, str)) else None
    return None


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
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return {"text": text}


# --- The driver of one replica: starts its engine, asks it what the agent hands over, and writes the answers ---

SETTINGS_VARIABLE = "SLURMFT_REPLICA"
MAX_LINE_BYTES = 4 << 20
COMMIT_AFTER = 512
"""Answers after which a commit does not wait for its interval."""

TOGETHER_S = 0.003
"""What begins and ends within this time is told together: each message costs as much as half a request."""

LAST_WRITE_S = 1.0
STORAGE_PAUSE_S = 1.0
TOKENS_LOOKS = 8
"""How often the engine's counter is read within the time that counts as a hang."""

LIVE = 2
"""Looks in a row at which a counter has grown although no request has ended: it does so while answers are made."""

PROOF = "proof"
"""Under which text of the smallest answer is noted: under a request's key, that would go on from it."""

EXIT_SICK = 70
"""EX_SOFTWARE of sysexits.h: the engine lives, and fails every request."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A request that the agent has handed over."""

    index: int
    request: dict[str, Any]
    patience: float
    epoch: int


@dataclass(frozen=True, slots=True)
class InHand:
    """What an engine has to do."""

    in_flight: int
    ended: int
    """Requests in this life, however they ended."""

    patience: float
    """As ``patience_for``, of the largest request in flight."""


async def watch_progress(
    engine: Engine, hang_timeout_s: float, load: Callable[[], InHand], tell: Callable[..., None]
) -> None:
    """Tell the agent of tokens, as an engine may be long over an answer without sending a byte of it; and how long it
    may be silent, as long as its counter was not seen to grow but at the end of requests."""
    count, ended, grown, times = 0.0, 0, 0, 1.0
    while True:
        await asyncio.sleep(max(0.05, min(5.0, hang_timeout_s / TOKENS_LOOKS)))
        now = load()
        if now.in_flight:
            before, count = count, await engine.tokens()
            has_ended, ended = load().ended != ended, now.ended
            if count > before:
                tell(kind="progress")
                grown = grown if grown >= LIVE else 0 if has_ended else grown + 1
        if times != (times := 1.0 if grown >= LIVE else now.patience):
            tell(kind="patience", times=times)


async def works(engine: Engine, proof: Mapping[str, Any] | None) -> bool:
    """Whether an engine answers the smallest request of a kind that it has answered before.

    It decides wherever an engine is only suspected: it has made no progress for long, or fails what it is asked.
    """
    with contextlib.suppress(Again):
        return proof is not None and inference.is_good(await smallest_answer(engine, proof))
    return False


async def smallest_answer(engine: Engine, proof: Mapping[str, Any]) -> Answer:
    """To the smallest request of the kind of another one, or to that where none is known. Raises as ``answer`` does."""
    path = str(proof.get("url", engine.request_path))
    body = inference.smallest(path, proof["body"]) or proof["body"]
    return (await engine.answer([{**proof, "body": body, "key": PROOF}]))[0]


class Driver:
    """One replica, from its engine's start to its end."""

    def __init__(self, settings: ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config = settings, config
        self._folder = folder_of(run_folder)
        self._requests = Requests(self._folder)
        self._partials = Partials(expire_after_s=config.partial_expires_after_s)
        owner = {name: getattr(settings, name) for name in ("generation", "node", "replica", "life")}
        self._fingerprint = fingerprint(config.engine)
        self._partials_file = CheckpointFile(self._folder, owner, self._fingerprint, self._partials)
        head = head_of(settings, config, run_folder, self._send)
        self._engine: Engine = engine_of(config, settings.replica, settings.device, self._partials, head,
                                         run_folder=run_folder, owner="-".join(map(str, owner.values())))  # fmt: skip
        self._slots = inference.Slots.full(config.concurrency)
        self._waiting: deque[_Taken] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._calls = 0
        """Of the engine, that are under way."""

        self._in_hand: dict[int, tuple[_Taken, float, asyncio.Timeout]] = {}
        """What the engine works on: since when, and how to end that."""

        self._begun: list[int] = []
        """Those of them that the agent does not know of yet."""

        self._completed: dict[int, list[int]] = {}
        """Answers that are written, by their epochs, of which it does not know either."""

        self._segment: SegmentWriter | None = None
        self._epoch = -1
        self._uncommitted: list[int] = []
        self._commit_now = asyncio.Event()
        self._draining = False
        self._good = self._ended = 0
        """Answers of the engine in this life, and all requests that have ended."""

        self._proof: dict[str, Any] | None = None
        """A request that the engine has answered in this life."""

        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when all that was in flight at a stop is answered."""

        self._finishing: asyncio.Task[None] | None = None
        self._sick: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> int:
        """Work until the agent says so or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the engine cannot be started.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._settings.socket, limit=MAX_LINE_BYTES)
        self._send(kind="hello", replica=self._settings.replica, life=self._settings.life)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            await self._engine.start()
            self._send(kind="ready", slots=self._slots.now)
            return await self._work(hearing)
        finally:
            await self._engine.close()

    async def _work(self, hearing: asyncio.Task[None]) -> int:
        ended = asyncio.create_task(self._engine.ended())
        regular = (
            self._commit_regularly(), self._partials_file.save_regularly(),
            watch_progress(self._engine, self._config.hang_timeout_s, self._load, self._send),
        )  # fmt: skip
        tasks = [asyncio.create_task(work) for work in regular]
        waits: list[asyncio.Future[Any]] = [hearing, ended, self._sick, self._finished, *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._send()
        for task in self._running:
            task.cancel()  # each notes what it has so far
        if self._running:
            await asyncio.wait(set(self._running), timeout=LAST_WRITE_S)
        with contextlib.suppress(TimeoutError):  # a disk that hangs must not hold up the end of an engine
            await asyncio.wait_for(self._partials_file.save(), LAST_WRITE_S)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if ended.done():
            sys.stderr.write(f"slurmft: the engine has ended with {ended.result()}\n")
            return exit_code_of(ended.result())
        if self._sick.done():
            sys.stderr.write(f"slurmft: the engine fails every request: {self._sick.result()}\n")
            return EXIT_SICK
        await self._commit()
        return 0

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Return when the agent is gone, or gives back what is in flight."""
        while line := await reader.readline():
            message = json.loads(line)
            if message["kind"] == "do" and not self._draining:
                self._run(self._take(message["indexes"], message["epoch"], message.get("partials", ())))
            elif message["kind"] == "revoke":  # what the engine has is finished; the rest goes elsewhere
                self._send(kind="dropped", count=len(self._waiting))
                self._waiting.clear()
                self._engine.cut_off()
            elif message["kind"] == "prove":
                self._run(self._prove())
            elif message["kind"] == "give back":  # the time of a stop is up: others go on from what there is
                return
            elif message["kind"] == "drain":
                self._draining = True
                self._engine.stop()
                self._finishing = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        while self._waiting or self._running:
            await asyncio.wait(self._running or {asyncio.create_task(asyncio.sleep(0.01))})
        if not self._finished.done():
            self._finished.set_result(None)

    async def _take(self, indexes: Sequence[int], epoch: int, partials: Sequence[str]) -> None:
        """Read requests before their turn comes: an engine must not wait for the run folder."""

        def read() -> list[tuple[dict[str, Any], float]]:
            found = [{**self._requests.get(index), "key": str(index)} for index in indexes]
            return [(each, inference.patience_for(json.dumps(each["body"]).encode())) for each in found]

        requests = await asyncio.to_thread(read)
        wanted = {str(index) for index in indexes}
        for name in partials:  # one after the other: text of a request begins in each of them
            records = records_in(self._folder, name, self._fingerprint)
            mine = await asyncio.to_thread(list, (each for each in records if each["request"] in wanted))
            self._partials.adopt(mine)
        self._partials_file.epoch = max(epoch, self._partials_file.epoch)
        taken = [_Taken(index, *each, epoch) for index, each in zip(indexes, requests, strict=True)]
        if self._waiting and indexes[-1] < self._waiting[0].index:  # left by a dead replica
            self._waiting.extendleft(reversed(taken))
        else:
            self._waiting.extend(taken)
        self._fill()

    def _fill(self) -> None:
        """Keep the engine as busy as it may be: with one request in each call, or with one list after the other."""
        takes_lists = self._engine.at_once > 1
        size, most = (self._slots.now, 1) if takes_lists else (1, self._slots.now)
        while self._waiting and self._calls < most:
            taken = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            self._tell_soon()
            self._begun += [each.index for each in taken]
            if self._engine.is_here:
                self._send()  # before anything else happens: else no request would be the reason of its end
            self._calls += 1
            self._run(self._answer(taken))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._one_is_over)

    def _one_is_over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._sick.done():
            self._sick.set_exception(error)

    async def _answer(self, taken: Sequence[_Taken]) -> None:
        """What is in one call; where a list fails, each of its requests alone."""
        if len(taken) > 1:
            try:
                answers = await self._engine.answer([each.request for each in taken])
            except OutOfMemory as error:
                self._shrink(str(error))
                self._waiting.extendleft(reversed(taken))
                self._end_call()
                return
            except Again as error:
                log.info("a list of %d requests failed, each is tried alone: %s", len(taken), error)
            else:
                self._proof = taken[-1].request
                self._end_call()
                pairs = zip(taken, answers, strict=True)
                await self._keep([(each.index, each.epoch, answer) for each, answer in pairs])
                return
        for each in taken:
            found = await self._answer_of(each)
            if each is taken[-1]:
                self._end_call()
            if found is not None:
                await self._keep([(each.index, each.epoch, found[0])], by_engine=found[1])

    def _end_call(self) -> None:
        self._calls -= 1
        self._fill()  # before the answers are written: meanwhile the engine has its next requests

    async def _answer_of(self, taken: _Taken) -> tuple[Answer, bool] | None:
        """The answer, and whether the engine gave it; None when the engine gives none at all."""
        good_before = self._good

        async def attempt() -> Answer:
            nonlocal good_before
            good_before = self._good
            try:
                async with asyncio.timeout(None) as limit:
                    self._in_hand[taken.index] = taken, time.monotonic(), limit
                    return (await self._engine.answer([taken.request]))[0]
            except OutOfMemory as error:
                self._shrink(str(error))
                raise
            except TimeoutError as error:
                told = "the engine answers others, and not this one (inference.hang_timeout_s)"
                raise Again(told) from error
            finally:
                self._in_hand.pop(taken.index, None)

        try:
            answer = await retried(attempt, self._config)
        except Stopped:
            if not self._draining:  # its lease is void, and a slot is free again
                self._send(kind="dropped", count=1)
            return None
        except Closed:  # others may still be finished; then the engine ends, or it counts as hung
            await asyncio.Event().wait()
            return None
        except Again as error:
            if self._good == good_before and not await works(self._engine, self._proof):
                if not self._sick.done():
                    self._sick.set_result(str(error))
                return None
            tries = self._config.max_retries + 1
            return {"error": {"code": "no_answer", "message": f"{tries} tries failed, the last: {error}"}}, False
        if inference.is_good(answer):
            self._proof = taken.request
        return answer, True

    def _load(self) -> InHand:
        return InHand(
            len(self._running), self._ended, max((taken.patience for taken, *_ in self._in_hand.values()), default=1.0)
        )

    async def _prove(self) -> None:
        # a function in this process answers one list after the other, and could not show that it lives
        proof = self._proof or next((taken.request for taken, *_ in self._in_hand.values()), None)
        if self._engine.at_once == 1 and await works(self._engine, proof):
            self._send(kind="progress")
            now_s, loop = time.monotonic(), asyncio.get_running_loop()
            for taken, since_s, limit in self._in_hand.values():
                if now_s - since_s > self._config.hang_timeout_s * taken.patience:
                    limit.reschedule(loop.time())
        self._ended += 1

    def _shrink(self, why: str) -> None:
        smaller = self._slots.out_of_memory()
        if smaller.now < self._slots.now:
            self._send(kind="slots", now=smaller.now, why=why[:500])
        self._slots = smaller

    async def _keep(self, answers: Sequence[tuple[int, int, Answer]], *, by_engine: bool = True) -> None:
        """Write answers (number, epoch, answer), then say that they are there.

        A disk that is full holds everything up, and loses nothing.
        """
        for epoch in dict.fromkeys(epoch for _, epoch, _ in answers):
            records = [{"index": index, **answer} for index, at, answer in answers if at == epoch]
            indexes = [record["index"] for record in records]
            # else its lease was revoked, perhaps while the disk was full, and another agent has the request
            while epoch >= self._epoch:
                if self._write(records, epoch):
                    self._uncommitted += indexes
                    break
                await asyncio.sleep(STORAGE_PAUSE_S)
            self._tell_soon()
            self._completed.setdefault(epoch, []).extend(indexes)
        self._good += len(answers) * by_engine
        self._ended += len(answers)
        raised = self._slots.ended_well(len(answers))
        if raised.now > self._slots.now:
            self._send(kind="slots", now=raised.now, why="")
        self._slots = raised
        if len(self._uncommitted) >= COMMIT_AFTER:
            self._commit_now.set()

    def _write(self, records: Sequence[Mapping[str, Any]], epoch: int) -> bool:
        try:
            self._segment_of(epoch).append(records)
        except (OSError, StorageError) as error:
            log.warning("%d answers cannot be written, trying again: %s", len(records), error)
            self._send(kind="held", why=str(error))
            return False
        return True

    def _segment_of(self, epoch: int) -> SegmentWriter:
        """Each lease epoch has a segment of its own: what belongs to a lost one never counts."""
        if self._segment is None or epoch != self._epoch:
            mine = self._settings
            header = {"generation": mine.generation, "node": mine.node, "replica": mine.replica, "life": mine.life,
                      "epoch": epoch}  # fmt: skip
            segment = SegmentWriter(segments_of(self._folder) / segment_name(**header), header)
            self._segment, self._epoch, self._uncommitted = segment, epoch, []
        return self._segment

    async def _commit_regularly(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._commit_now.wait(), self._config.commit_interval_s)
            self._commit_now.clear()
            await self._commit()

    async def _commit(self) -> None:
        segment, indexes, epoch = self._segment, self._uncommitted, self._epoch
        if segment is None or not indexes:
            return
        end, self._uncommitted = segment.end, []
        while True:
            try:
                await asyncio.to_thread(segment.sync)
                break
            except OSError as error:
                log.warning("answers cannot be made durable, trying again: %s", error)
                self._send(kind="held", why=str(error))
                await asyncio.sleep(STORAGE_PAUSE_S)
        self._send(kind="answered", segment=segment.path.name, end=end, indexes=indexes, epoch=epoch)

    def _tell_soon(self) -> None:
        if not self._begun and not self._completed:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._send)

    def _send(self, **message: Any) -> None:
        """Tell the agent, and before it which requests have begun and ended: each write wakes it up."""
        messages: list[Mapping[str, Any]] = [{"kind": "begun", "indexes": self._begun}] if self._begun else []
        messages += [{"kind": "completed", "indexes": each, "epoch": epoch} for epoch, each in self._completed.items()]
        messages += [message] if message else []
        self._begun, self._completed = [], {}
        if messages and self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in messages))


class Member:
    """The part of an engine that another node's driver answers for, until the engine or that driver ends."""

    def __init__(self, settings: ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config, self._run_folder = settings, config, run_folder

    async def run(self) -> int:
        """Work until the agent or the head is gone, or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the head is not to be found, or the engine cannot be started.
        """
        mine = self._settings
        assert mine.head is not None
        reader, writer = await asyncio.open_unix_connection(mine.socket)
        hello = {"kind": "hello", "replica": mine.replica, "life": mine.life}
        writer.write(json.dumps(hello).encode() + b"\n")
        hearing = asyncio.create_task(reader.read())
        channel, code, engine = await join(mine.head, mine.rank, key_of(self._run_folder)), 0, None
        try:
            waiting = asyncio.create_task(channel.receive())
            await asyncio.wait({hearing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() or (told := waiting.result()) is None:
                return 0
            starts = Starts.parse(told, "what the head says")
            if (
                not is_config_name(starts.config)
                or (config := load(self._run_folder / starts.config).inference) is None
            ):
                raise LaunchError(f"{starts.config} is no configuration of this run")
            if config.engine.process is not None:
                following = asyncio.create_task(follow(channel, starts, mine.rank, config, self._run_folder))
                await asyncio.wait({hearing, following}, return_when=asyncio.FIRST_COMPLETED)
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following
                return 0
            engine = HttpEngine(config, mine.replica)
            await engine.launch(starts.words(mine.rank))
            ended, over = asyncio.create_task(engine.ended()), asyncio.create_task(channel.receive())
            await asyncio.wait({hearing, ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                code = ended.result()
                sys.stderr.write(f"slurmft: this part of the engine has ended with {code}\n")
                return exit_code_of(code)
            return 0
        except SlurmftError as error:
            code = error.exit_code
            raise
        finally:
            channel.send(Ended(code=code))
            await channel.drain()
            channel.close()
            if engine is not None:
                await engine.close()


def exit_code_of(code: int) -> int:
    """As a shell has it: 128 and the signal; an engine that ends without being asked to never ends well."""
    return 128 - code if code < 0 else code or 1


def drive(kind: Callable[[ReplicaSettings, InferenceConfig, Path], Any]) -> int:
    """Run a driver of this kind as the environment describes it; returns the exit code."""

    async def run() -> int:
        settings = ReplicaSettings.parse(os.environ.pop(SETTINGS_VARIABLE).encode(), SETTINGS_VARIABLE)
        config = load(Path(settings.config))
        assert config.inference is not None
        chosen = kind if settings.head is None else Member
        return await chosen(settings, config.inference, config.run_folder).run()

    return run_below_agent(run)


if __name__ == "__main__":
    os._exit(drive(Driver))  # threads of an engine that does not answer must not hold the end up
