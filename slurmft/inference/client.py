"""A client of an endpoint that goes on where one router, or one try, fails.

    client = Client.of_run("runs/serve")
    answer = client.post("/v1/chat/completions", {"model": "m", "messages": [...]}, timeout_s=60)
    answer = await client.post_async(...)
    for part in client.stream("/v1/chat/completions", {..., "stream": True}): ...

A request that breaks off before its answer is there is sent again, to another router where there is one, until its
deadline: it may be computed twice. A stream that has begun and breaks off is an error.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay

from slurmft.errors import SlurmftError, StorageError
from slurmft.inference.serving.endpoint import HighAvailabilityCluster, token_of
from slurmft.inference.serving.endpoint import ca_file as own_ca_file
from slurmft.inference.serving.handshake import notice_lost_peers
from slurmft.policy.inference.answers import retry_after_s

PASSING = frozenset({429, 502, 503, 504})
"""What a router answers when another try, or another router, may do better."""

CONNECT_S = 3.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
LOOK_AGAIN_S = 1.0
AVOIDED_S = 5.0
"""How long a router that was not reached, or broke off, gets nothing while there is another one."""

Value = TypeVar("Value")


class RequestFailed(SlurmftError):
    """A request has no answer: its deadline has passed, or its stream broke off."""


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class _TryAgain(Exception):
    def __init__(self, why: str, answer: EndpointAnswer | None = None, after_s: float | None = None) -> None:
        super().__init__(why)
        self.answer, self.after_s = answer, after_s


class Client:
    """Talks to the routers of one endpoint. May be used from one event loop, and from any number of threads.

    Args:
        urls: of routers, such as ``http://node1:8000``.
        token: what the endpoint asks for.
        run_folder: of the endpoint, where it can be read: its routers are looked up again as they come and go.
        ca_file: certificates to trust, for routers with a certificate of one's own.
    """

    def __init__(
        self, urls: Sequence[str] = (), *, token: str, run_folder: Path | None = None, ca_file: Path | None = None
    ) -> None:
        self._urls, self._token, self._run_folder, self._ca_file = list(urls), token, run_folder, ca_file
        self._turn = random.randrange(1 << 16)  # noqa: S311 - spreads clients over the routers
        self._looked_s, self._renewed_s = -LOOK_AGAIN_S, -AVOIDED_S
        self._avoided: dict[str, float] = {}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()

    @classmethod
    def of_run(cls, run_folder: str | Path, *, ca_file: Path | None = None) -> Self:
        """A client of the endpoint with this run folder, which must be the caller's own; certificates that the run has
        made itself are trusted.

        Raises:
            UsageError: its token cannot be read.
        """
        path = Path(run_folder).absolute()
        if ca_file is None and (own := own_ca_file(path)).exists():
            ca_file = own
        return cls(token=token_of(path), run_folder=path, ca_file=ca_file)

    # One answer

    def post(self, path: str, body: Any, **options: Any) -> EndpointAnswer:
        """POST ``body`` as JSON; as ``request``."""
        return self.request("POST", path, body, **options)

    def get(self, path: str, **options: Any) -> EndpointAnswer:
        """GET; as ``request``."""
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> EndpointAnswer:
        """``request_async``, for code without an event loop."""
        return self._wait_for(self.request_async(method, path, body, **options))

    async def post_async(self, path: str, body: Any, **options: Any) -> EndpointAnswer:
        """POST ``body`` as JSON; as ``request_async``."""
        return await self.request_async("POST", path, body, **options)

    async def request_async(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> EndpointAnswer:  # fmt: skip
        """The endpoint's answer, whatever its status.

        Raises:
            RequestFailed: there is none within ``timeout_s`` seconds; routers refused, broke off, or were not reached.
        """
        deadline_s = time.monotonic() + timeout_s

        async def once(url: str) -> EndpointAnswer:
            async with self._sent(url + path, method, body, headers, deadline_s) as response:
                return EndpointAnswer(response.status, dict(response.headers), await response.read())

        found: EndpointAnswer = await self._retrying(once, deadline_s, timeout_s)
        return found

    # Streams

    def stream(self, path: str, body: Any, **options: Any) -> Iterator[bytes]:
        """``stream_async``, for code without an event loop."""
        parts = self.stream_async(path, body, **options)
        try:
            while True:
                try:
                    yield self._wait_for(anext(parts))
                except StopAsyncIteration:
                    return
        finally:
            self._wait_for(parts.aclose())  # type: ignore[attr-defined]

    async def stream_async(
        self, path: str, body: Any, *, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The parts of the answer to a POST, as they come.

        Raises:
            RequestFailed: the answer has another status than 2xx, has not begun within ``timeout_s`` seconds, or breaks
                off. An error that the endpoint itself writes into a stream is one of its parts.
        """
        deadline_s = time.monotonic() + timeout_s
        begin = partial(self._begin, path, body, headers, deadline_s)
        response, part = await self._retrying(begin, deadline_s, timeout_s)
        try:
            while part:
                yield part
                part = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self._avoided[str(response.url.origin())] = time.monotonic() + AVOIDED_S
            raise RequestFailed(f"the stream broke off: {error or type(error).__name__}") from error
        finally:
            response.close()

    async def _begin(
        self, path: str, body: Any, headers: Mapping[str, str] | None, deadline_s: float, url: str
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """A stream with its first part."""
        response: aiohttp.ClientResponse = await self._sent(url + path, "POST", body, headers, deadline_s)
        try:
            if response.status in PASSING or response.status >= 400:
                answer = EndpointAnswer(response.status, dict(response.headers), await response.read())
                self._refuse_passing(answer)
                raise RequestFailed(f"HTTP {answer.status}: {answer.body[:500].decode(errors='replace')}")
            return response, await response.content.readany()
        except BaseException:
            response.close()
            raise

    # The end

    def close(self) -> None:
        """Let go of all connections."""
        with self._guard:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self.close_async(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    async def close_async(self) -> None:
        """The same, in an event loop."""
        if (session := self._sessions.pop(asyncio.get_running_loop(), None)) is not None:
            await session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close_async()

    # Within

    async def _checked(self, work: Any, deadline_s: float) -> Any:
        """One try; what may go better the next time is raised as ``_TryAgain``."""
        url = ""
        try:
            url = self._next_router()
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                found = await work(url)
        except (aiohttp.ClientError, OSError) as error:
            # its own deadline says nothing about the router; a connection that takes too long is a ClientError as well
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise _TryAgain("no answer in time") from error
            self._avoided[url] = time.monotonic() + AVOIDED_S
            raise _TryAgain(f"{error or type(error).__name__}") from error
        if isinstance(found, EndpointAnswer):
            self._refuse_passing(found)
        return found

    async def _retrying(self, work: Any, deadline_s: float, timeout_s: float) -> Any:
        why = ""

        async def one_try() -> Any:
            nonlocal why
            try:
                return await self._checked(work, deadline_s)
            except _TryAgain as error:
                if why and time.monotonic() >= deadline_s:
                    raise _TryAgain(why) from error  # this one only had no time left
                why = str(error)
                raise

        retrying = AsyncRetrying(
            stop=stop_after_delay(timeout_s), wait=_pause_s, retry=retry_if_exception_type(_TryAgain), reraise=True
        )
        try:
            return await retrying(one_try)
        except _TryAgain as error:
            raise RequestFailed(f"no answer within {timeout_s:g} s; the last try: {error}") from error

    def _sent(self, url: str, method: str, body: Any, headers: Mapping[str, str] | None, deadline_s: float) -> Any:
        left_s = max(0.001, deadline_s - time.monotonic())
        given = {"Authorization": f"Bearer {self._token}", "X-Request-Timeout": f"{left_s:.3f}", **(headers or {})}
        return self._session().request(method, url, json=body, headers=given, allow_redirects=False)

    def _refuse_passing(self, answer: EndpointAnswer) -> None:
        if answer.status == 401 and self._run_folder is not None:
            now_s = time.monotonic()
            with suppress(SlurmftError):  # a moment later perhaps
                if (token := token_of(self._run_folder)) != self._token:
                    self._token, self._renewed_s = token, now_s
            if now_s - self._renewed_s < AVOIDED_S:
                raise _TryAgain("another job serves the endpoint, with a new token", answer)
        if answer.status in PASSING:
            after_s = retry_after_s(answer.headers.get("Retry-After"), longest_s=LONGEST_PAUSE_S)
            raise _TryAgain(f"HTTP {answer.status}: {answer.body[:500].decode(errors='replace')}", answer, after_s)

    def _next_router(self) -> str:
        """In turn, but for those that were not reached lately."""
        if self._run_folder is not None and (not self._urls or time.monotonic() - self._looked_s > LOOK_AGAIN_S):
            self._looked_s = time.monotonic()
            with suppress(StorageError, OSError):  # a moment later perhaps
                ways = [self._way(each.urls) for each in HighAvailabilityCluster.read(self._run_folder).routers]
                self._urls = ways or self._urls
        if not self._urls:
            raise aiohttp.ClientConnectionError("the endpoint has no router at the moment")
        now_s = time.monotonic()
        able = [url for url in self._urls if self._avoided.get(url, 0.0) <= now_s] or self._urls
        self._turn += 1
        return able[self._turn % len(able)].rstrip("/")

    def _way(self, urls: Sequence[str]) -> str:
        """One of the names and addresses of one router: the next one where the best was not reached lately."""
        now_s = time.monotonic()
        return next((url for url in urls if self._avoided.get(url, 0.0) <= now_s), urls[0])

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if (session := self._sessions.get(loop)) is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0, ssl=self._context(), socket_factory=_socket_for)
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return session

    def _context(self) -> Any:
        if self._ca_file is None:
            return True
        import ssl

        return ssl.create_default_context(cafile=str(self._ca_file))

    def _wait_for(self, work: Awaitable[Value]) -> Value:
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="slurmft client", daemon=True).start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(_as_coroutine(work), loop).result()


async def _as_coroutine(work: Awaitable[Value]) -> Value:
    return await work


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _pause_s(state: RetryCallState) -> float:
    """Exponential with full jitter (Brooker, 2015), at least what the router asks for."""
    error: Any = state.outcome.exception() if state.outcome is not None else None
    return (error.after_s or 0.0) + _grown_s(state.attempt_number)


def _grown_s(failed: int) -> float:
    longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failed, 30)) if failed else 0.0
    return random.uniform(0.0, longest_s)  # noqa: S311 - jitter


def _socket_for(address: Any) -> socket.socket:
    """A socket that notices a node that is gone."""
    family, kind, protocol, _, _ = address
    found = socket.socket(family, kind, protocol)
    notice_lost_peers(found)
    return found
