"""One client's request: the tries until a replica answers it, and the answer on its way to the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from yarl import URL

from slurmft.inference.serving.replicas import Replica
from slurmft.policy.inference.answers import Outcome, outcome_of_status, retry_after_s
from slurmft.policy.inference.engines import PROVABLE, model_in, patience_for
from slurmft.policy.inference.http_headers import end_to_end, within
from slurmft.policy.inference.rotation import Priority
from slurmft.policy.inference.second_tries import Failure, after_failure

if TYPE_CHECKING:
    from slurmft.inference.serving.router import Router

MAX_BUFFERED_BYTES = 1 << 20
"""An answer of known length up to here is passed on when it is whole, so that its replica may die in its midst."""

MAX_ERROR_BYTES = 1 << 16
UNTIMED_BYTES = 1 << 15
"""Below the mark at which asyncio makes writers wait (64 KiB): such a write needs no timer."""

WORD_S = 0.25
"""How long a broken connection waits for the word that its replica is gone."""

HTTP_OK, CLIENT_ERROR, UNPROCESSABLE, SERVER_ERROR = 200, 400, 422, 500
LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
LOST, LATE = "its replica is gone", "the deadline of the request"
AS_THEY_CAME = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Trip:
    """What is known of a request beside itself, for its answer and the access log."""

    id: str
    target: str
    """Path and query."""

    host: str
    """As its client names this router."""

    client: str
    """Its address."""

    priority: Priority = Priority.NORMAL
    replica: str = ""
    """The last one that was asked."""

    tries: int = 0
    held_bytes: int = 0
    """Of its body, in this router's memory."""

    degraded: str = ""
    """What was lowered in it, as the endpoint is degraded."""


TRIP = web.RequestKey("trip", Trip)


class _Failed(Exception):
    """A try has failed, and the client has not got a byte."""

    def __init__(
        self, failure: Failure, why: str, answer: web.Response | None = None, after_s: float | None = None
    ) -> None:
        super().__init__(why)
        self.failure, self.answer, self.after_s = failure, answer, after_s


class Errand:
    """One request, from its admission to its answer."""

    def __init__(self, router: Router, request: web.BaseRequest, body: bytes, deadline_s: float) -> None:
        self._router, self._request, self._body, self._deadline_s = router, request, body, deadline_s
        self._config = router.config
        self._trip = trip = request[TRIP]
        self._headers = CIMultiDict(end_to_end(request.headers.items(), to_engine=True))
        before = [*request.headers.getall("X-Forwarded-For", ()), trip.client]
        scheme, host = (request.headers.get(f"X-Forwarded-{name}") for name in ("Proto", "Host"))
        self._headers.update({
            "Host": trip.host, "X-Request-ID": trip.id, "X-Forwarded-For": ", ".join(before),
            "X-Forwarded-Proto": scheme or request.scheme, "X-Forwarded-Host": host or trip.host,
        })  # fmt: skip
        if router.engine_token:
            self._headers["Authorization"] = f"Bearer {router.engine_token}"
        self._url = URL(f"http://replica{trip.target}", encoded=True)
        self._limit: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._is_lost = self._is_passing = self._is_late = False
        self.crashed: set[str] = set()
        """Replicas that crashed while they worked on it."""

        self.is_poison = False
        """It has crashed them."""

        self.is_work = request.method not in LOOKS
        self.patience = patience_for(body) if self.is_work else 1.0
        model = model_in(body) if request.path in PROVABLE else ""
        self.proof = (request.path, model) if model else None

        self._cut_for, self._last = LOST, b""

    async def run(self) -> web.StreamResponse:
        """The answer, of the first replica that gives one."""
        router, failed, without = self._router, 0, set[str]()
        router.budget = router.budget.came()
        began_s = time.monotonic()
        while True:
            replica = await router.replica_for(
                self._deadline_s, without, is_suspect=bool(self.crashed), priority=self._trip.priority
            )
            if replica is None:
                return self._give_up("deadline", 504, "no replica had room before the deadline of the request")
            self._trip.replica, self._trip.tries = replica.name, self._trip.tries + 1
            try:
                answer = await self._try(replica)
            except _Failed as error:
                failure, why = error, str(error)
            else:
                router.took(time.monotonic() - began_s)
                router.metrics.answered(answer.status, time.monotonic() - began_s)
                return answer
            finally:
                replica.end()
            if self.is_poison:
                router.remember_poison(self._request, self._body)
                told = (
                    f"this request has crashed {len(self.crashed)} replicas, or they made no progress while they had "
                    f"it (inference.hang_timeout_s): {', '.join(sorted(self.crashed))}"
                )
                return self._give_up("poison", UNPROCESSABLE, told)
            failed += 1
            without.add(replica.name)
            left_s = self._deadline_s - time.monotonic()
            others = any(each.name not in without for each in router.replicas.loads())
            then = after_failure(
                failure.failure, failed=failed, max_retries=self._config.max_retries, sent=False, left_s=left_s,
                budget=router.budget, base_delay_s=self._config.base_delay_s, max_delay_s=self._config.max_delay_s,
                others=others, asked_s=failure.after_s,
            )  # fmt: skip
            if not then.again:
                if left_s <= 0:
                    why = f"no answer before the deadline of the request; the last try: {why}"
                    return self._give_up("deadline", 504, why)
                return self._give_up(
                    failure.failure.value, 502, f"{failed} tries have failed, the last: {why}", failure.answer
                )
            if then.spends:
                router.budget = router.budget.spent()
            router.metrics.tried_again(failure.failure.value)
            if not others:
                without.clear()
            await asyncio.sleep(then.pause_s)

    def lost(self) -> None:
        """The replica that works on it is gone."""
        if self._is_passing:
            self._cut_off()
        elif self._limit is not None:
            self._is_lost = True
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _cut_off(self, why: str = LOST) -> None:
        self._cut_for, self._is_late = why, why != LOST
        if self._response is not None:
            self._response.close()

    def _give_up(self, kind: str, status: int, why: str, answer: web.Response | None = None) -> web.Response:
        """The error for the client."""
        self._router.metrics.failed(kind)
        return answer or self._router.error(status, why)

    async def _try(self, replica: Replica) -> web.StreamResponse:
        """The answer of one replica.

        Raises:
            _Failed: there is none, and the client has not got a byte.
        """
        loop = asyncio.get_running_loop()
        self._is_lost, self._is_passing, gone = False, False, replica.gone
        replica.takes(self)
        try:
            async with asyncio.timeout_at(loop.time() + self._deadline_s - time.monotonic()) as self._limit:
                return await self._ask(replica, gone)
        except TimeoutError as error:
            if self._is_lost:
                raise _Failed(Failure.LOST, LOST) from error
            raise _Failed(Failure.SICK, "no answer in time") from error
        finally:
            self._limit, self._response = None, None
            replica.leaves(self)

    async def _ask(self, replica: Replica, gone: asyncio.Event) -> web.StreamResponse:
        try:
            async with replica.session.request(
                self._request.method, self._url, headers=self._headers, data=self._body or None, allow_redirects=False,
                skip_auto_headers=AS_THEY_CAME,
            ) as response:  # fmt: skip
                if response.status < HTTP_OK:
                    raise ValueError(f"HTTP {response.status}, which was not asked for")
                if outcome_of_status(response.status) is not Outcome.ANSWER:
                    if response.status >= SERVER_ERROR and self.is_work:
                        replica.did(well=False)
                    after_s = retry_after_s(response.headers.get("Retry-After"), longest_s=self._config.max_delay_s)
                    answer = await self._whole(response, MAX_ERROR_BYTES)
                    raise _Failed(Failure.SICK, f"HTTP {response.status}", answer, after_s)
                if response.status < CLIENT_ERROR and self.is_work:
                    replica.did(well=True)
                    replica.proof = (*self.proof, True) if self.proof else replica.proof
                if self._request.method == "HEAD":
                    return self._without_body(response)
                length = response.content_length
                if length is not None and length <= MAX_BUFFERED_BYTES:
                    return await self._whole(response, MAX_BUFFERED_BYTES)
                first = await response.content.readany()  # until it is there another replica can take over
                self._response = response
                return await self._pass_on(response, first, gone)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if not await _is_set(gone):
                replica.did(well=False)
                raise _Failed(Failure.SICK, f"no answer: {error or type(error).__name__}") from error
            raise _Failed(Failure.LOST, LOST) from error

    def _without_body(self, response: aiohttp.ClientResponse) -> web.Response:
        """The answer to HEAD; its connection is not used again, as some engines send a body all the same."""
        headers = self._headers_of(response)
        if response.content_length is not None:
            headers["Content-Length"] = str(response.content_length)
        response.close()
        return web.Response(status=response.status, reason=response.reason, headers=headers)

    async def _whole(self, response: aiohttp.ClientResponse, limit: int) -> web.Response:
        parts, room = [], limit
        async for part in response.content.iter_any():
            parts.append(part)
            room -= len(part)
            if room < 0:
                raise aiohttp.ClientPayloadError("an answer that is longer than it may be")
        headers = self._headers_of(response)
        return web.Response(status=response.status, reason=response.reason, headers=headers, body=b"".join(parts))

    def _headers_of(self, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        headers = CIMultiDict(end_to_end(response.headers.items()))
        for name in {"Location", "Content-Location"} & headers.keys():
            headers[name] = within(headers[name], self._trip.host)
        headers.update(self._router.headers_for(self._request))
        return headers

    async def _pass_on(self, response: aiohttp.ClientResponse, part: bytes, gone: asyncio.Event) -> web.StreamResponse:
        """Part by part, as it comes, from the first one on."""
        answer = web.StreamResponse(status=response.status, reason=response.reason, headers=self._headers_of(response))
        if response.content_length is not None:
            answer.content_length = response.content_length
        elif self._request.version < HttpVersion11:
            answer.force_close()  # its end is that of the connection, whatever the client has asked for
        if is_last(self._request):
            answer.force_close()
        with self._is_passed():
            if await self._gives(answer.prepare(self._request)):
                await self._parts(answer, response, part, gone)
            return answer

    @contextlib.contextmanager
    def _is_passed(self) -> Iterator[None]:
        """From now on the deadline and the replica's end are noticed where the answer is read."""
        assert self._limit is not None
        self._is_passing = True
        self._limit.reschedule(None)
        late = asyncio.get_running_loop().call_later(self._deadline_s - time.monotonic(), self._cut_off, LATE)
        try:
            yield
        finally:
            late.cancel()

    async def _parts(
        self, answer: web.StreamResponse, response: aiohttp.ClientResponse, part: bytes, gone: asyncio.Event
    ) -> None:
        try:
            while part := part or await response.content.readany():
                if not await self._gives(answer.write(part), len(part)):
                    return
                self._last, part = (self._last + part)[-4:], b""
        except (aiohttp.ClientError, OSError) as error:
            await _is_set(gone)
            await self._break_off(answer, response, error)
            return
        await self._gives(answer.write_eof())

    async def _break_off(self, answer: web.StreamResponse, response: aiohttp.ClientResponse, error: Exception) -> None:
        """An answer that has begun has no end: what follows on another engine need not be what this one had said."""
        log.warning("request %s: an answer that had begun has no end: %s (%s)", self._trip.id, self._cut_for, error)
        self._router.metrics.failed("cut")
        if not _is_of_events(response):
            self._abort()
            return
        why = f"{self._cut_for} ({error})" if self._cut_for != LOST else LOST
        told = error_answer(504 if self._is_late else 502, f"the answer has no end: {why}")
        part = b"" if self._last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
        if await self._gives(answer.write(part + b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n")):
            await self._gives(answer.write_eof())

    async def _gives(self, work: Any, size: int | None = None) -> bool:
        """Whether the client takes something; one that does not take it in time is cut off.

        Args:
            size: bytes of it, where that is known.
        """
        transport = self._request.transport
        try:
            if size is not None and transport is not None and transport.get_write_buffer_size() + size < UNTIMED_BYTES:
                await work
                return True
            async with asyncio.timeout(self._router.serving.client_timeout_s):
                await work
        except TimeoutError:
            self._router.metrics.failed("slow client")
            self._abort()
            return False
        except (aiohttp.ClientError, OSError):
            self._router.metrics.failed("client gone")
            self._abort()
            return False
        return True

    def _abort(self) -> None:
        """End the connection in the midst: a client must not take this for the answer's end."""
        if self._request.transport is not None:
            self._request.transport.abort()


def is_last(request: web.BaseRequest) -> bool:
    """Whether a connection ends with this request: aiohttp (3.14) takes trailers behind a chunked body for headers of
    the request that follows, which may be another client's where a proxy collects them; and it does not read on behind
    an ``Upgrade`` that is not taken."""
    return "Transfer-Encoding" in request.headers or "Upgrade" in request.headers


def error_answer(status: int, why: str) -> dict[str, Any]:
    """An error of the router's own, in the form that clients of OpenAI's interface know."""
    return {"error": {"message": why, "type": "slurmft", "code": status}}


async def _is_set(gone: asyncio.Event) -> bool:
    """Whether the word comes that a replica is gone, whose connection has broken."""
    try:
        async with asyncio.timeout(WORD_S):
            await gone.wait()
    except TimeoutError:
        return False
    return True


def _is_of_events(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream" and "Content-Encoding" not in response.headers
