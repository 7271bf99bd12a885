"""The router: takes a client's request, has one replica answer it, and passes the answer on as it comes.

It looks at method, path and headers, and in a body for its size alone. A request whose replica is lost before the first
byte of the answer is done on another one; an answer that has begun is ended in a way that the client notices.

In one piece, since a request passes through all of it: the listener, the choice of a replica, its tries, and its line
in the access log.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import gc
import hashlib
import hmac
import json
import logging
import os
import socket
import ssl
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from yarl import URL

from slurmft.config.inference import InferenceConfig
from slurmft.config.run import load
from slurmft.errors import LaunchError, StorageError, UsageError
from slurmft.inference.batches import PATHS as BATCHES
from slurmft.inference.batches import Batches
from slurmft.inference.endpoint import (
    WEIGHTS_LOOK_S,
    context_for,
    folder_of,
    is_local,
    key_of,
    read_published,
    token_of,
)
from slurmft.inference.replicas import EMPTY_LOOK_S, TURNS, Replica, Replicas
from slurmft.ipc.channel import listening_socket
from slurmft.ipc.messages import ROUTER_VARIABLE, Members, RouterLives, RouterSettings
from slurmft.policy import inference, serving
from slurmft.policy.values import Strangers
from slurmft.system.background import run_below_agent
from slurmft.system.exposition import registry_text
from slurmft.system.files import token_in, write_bytes
from slurmft.system.processes import allow_descriptors

# --- One client's request: the tries until a replica answers it, and the answer on its way to the client ---

MAX_BUFFERED_BYTES = 1 << 20
"""An answer of known length up to here is passed on when it is whole, so that its replica may die in its midst."""

MAX_ERROR_BYTES = 1 << 16
UNTIMED_BYTES = 1 << 15
"""Below the mark at which asyncio makes writers wait (64 KiB): such a write needs no timer."""

WORD_S = 0.25
"""How long a broken connection waits for the word that its replica is gone."""

HTTP_OK, CLIENT_ERROR, UNPROCESSABLE, SERVER_ERROR = 200, 400, 422, 500
WEIGHTS_HEADER = "X-Slurmft-Weights"
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

    priority: serving.Priority = serving.Priority.NORMAL
    replica: str = ""
    """The last one that was asked."""

    tries: int = 0
    held_bytes: int = 0
    """Of its body, in this router's memory."""

    degraded: str = ""
    """What was lowered in it, as the endpoint is degraded."""

    weights: int | None = None
    """Version of the published weights that answer it."""


TRIP = web.RequestKey("trip", Trip)


class _Failed(Exception):
    """A try has failed, and the client has not got a byte."""

    def __init__(
        self, failure: serving.Failure, why: str, answer: web.Response | None = None, after_s: float | None = None
    ) -> None:
        super().__init__(why)
        self.failure, self.answer, self.after_s = failure, answer, after_s


class Errand:
    """One request, from its admission to its answer."""

    def __init__(
        self, router: Router, request: web.BaseRequest, body: bytes, deadline_s: float, deaths: list[inference.Death]
    ) -> None:
        self._router, self._request, self._body, self._deadline_s = router, request, body, deadline_s
        self._config = router.config
        self._trip = trip = request[TRIP]
        self._headers = CIMultiDict(serving.end_to_end(request.headers.items(), to_engine=True))
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
        self.deaths = deaths
        """Replicas that crashed while they worked on it; none once it has an answer."""

        self.sent_s = 0.0
        self.is_work = request.method not in LOOKS
        self.patience = inference.patience_for(body) if self.is_work else 1.0
        model = inference.model_in(body) if request.path in inference.PROVABLE else ""
        self.proof = (request.path, model) if model else None

        self._cut_for, self._last = LOST, b""

    async def run(self) -> web.StreamResponse:
        """The answer, of the first replica that gives one."""
        router, failed, without = self._router, 0, set[str]()
        router.budget = router.budget.came()
        began_s = time.monotonic()
        while True:
            is_alone, replica = await self._place(without)
            if replica is None:
                why = f"{len(self.deaths)} replicas crashed or made no progress while they had this request, and "
                why = f"{why * bool(self.deaths)}no replica had room before the deadline of the request"
                return self._give_up("deadline", 504, why)
            self._trip.replica, self._trip.tries, died = replica.name, self._trip.tries + 1, len(self.deaths)
            self._trip.weights = None if replica.weights is None else replica.weights.version
            tried_s = time.monotonic()
            try:
                answer = await self._try(replica)
            except _Failed as error:
                failure, why = error, str(error)
            else:
                if len(self.deaths) == died:  # and it is whole
                    self.deaths = []
                router.took(time.monotonic() - tried_s)
                router.metrics.answered(answer.status, time.monotonic() - began_s)
                return answer
            finally:
                replica.end()
                if is_alone:
                    seconds = time.monotonic() - tried_s
                    router.one_less_alone(replica, seconds, in_vain=len(self.deaths) > died)
            if inference.is_poison(self.deaths):
                told = (
                    f"this request has crashed {len(self.deaths)} replicas, or they made no progress while they had "
                    f"it (inference.hang_timeout_s): {', '.join(each.replica for each in self.deaths)}"
                )
                return self._give_up("poison", UNPROCESSABLE, told)
            failed += 1
            without.add(replica.name)
            left_s = self._deadline_s - time.monotonic()
            others = any(each.name not in without for each in router.replicas.loads())
            then = serving.after_failure(
                failure.failure, failed=failed, max_retries=self._config.max_retries, left_s=left_s,
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

    async def _place(self, without: set[str]) -> tuple[bool, Replica | None]:
        """Whether it is to be alone, and the replica; None where there is none before the deadline."""
        router, is_sure = self._router, inference.is_suspect(self.deaths)
        if is_sure or any(death.near for death in self.deaths):
            until_s = self._deadline_s if is_sure else min(self._deadline_s, time.monotonic() + inference.SOON_S)
            replica = await router.replica_alone(until_s, without, self.deaths)
            if replica is None and not is_sure and router.is_held_up:  # those in line do stall engines, and would again
                is_sure, replica = True, await router.replica_alone(self._deadline_s, without, self.deaths)
            if replica is not None or is_sure:
                return True, replica
        return False, await router.replica_for(self._deadline_s, without, priority=self._trip.priority)

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
        self._trip.weights = None
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
                raise _Failed(serving.Failure.LOST, LOST) from error
            raise _Failed(serving.Failure.SICK, "no answer in time") from error
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
                if inference.outcome_of_status(response.status) is not inference.TryOutcome.ANSWER:
                    if response.status >= SERVER_ERROR and self.is_work:
                        replica.did(well=False)
                    after_s = inference.retry_after_s(
                        response.headers.get("Retry-After"), longest_s=self._config.max_delay_s
                    )
                    answer = await self._whole(response, MAX_ERROR_BYTES)
                    raise _Failed(serving.Failure.SICK, f"HTTP {response.status}", answer, after_s)
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
                raise _Failed(serving.Failure.SICK, f"no answer: {error or type(error).__name__}") from error
            raise _Failed(serving.Failure.LOST, LOST) from error

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
        headers = CIMultiDict(serving.end_to_end(response.headers.items()))
        headers.popall(WEIGHTS_HEADER, None)  # an engine does not know which publication its weights are
        for name in {"Location", "Content-Location"} & headers.keys():
            headers[name] = serving.within(headers[name], self._trip.host)
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
        if response.content_type != "text/event-stream" or "Content-Encoding" in response.headers:
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


# --- What a router counts, in Prometheus' text format ---

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One router's counters."""

    def __init__(self, router: Router) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._answered = Counter("slurmft_requests_answered", "Answers of engines", ["status"], registry=registry)
        self._failed = Counter("slurmft_requests_failed", "Requests without a whole answer", ["why"], registry=registry)
        self._refused = Counter("slurmft_requests_refused", "Requests refused at once", ["why"], registry=registry)
        self._again = Counter("slurmft_tries_again", "Further tries of requests", ["why"], registry=registry)
        self._seconds = Histogram("slurmft_request_seconds", "From admission to the end of the answer",
                                  buckets=SECONDS, registry=registry)  # fmt: skip
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "slurmft_requests_in_flight": ("Requests that are not answered yet", lambda: router.in_flight),
            "slurmft_requests_waiting": ("Requests that wait for a replica", lambda: router.waiting),
            "slurmft_replicas_ready": ("Replicas in the rotation", lambda: router.ready),
            "slurmft_replicas_expected": ("Replicas that there should be", lambda: router.replicas.expected),
            "slurmft_replicas_wanted": ("Replicas that are to be on for the load", lambda: router.replicas.wanted),
            "slurmft_degraded": ("1 while too few replicas are ready", lambda: float(router.degraded)),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)

    def answered(self, status: int, seconds: float) -> None:
        """An engine's answer has gone to the client."""
        self._answered.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def failed(self, why: str) -> None:
        """A request ended without a whole answer."""
        self._failed.labels(why).inc()

    def refused(self, why: str) -> None:
        """A request was refused at once."""
        self._refused.labels(why).inc()

    def tried_again(self, why: str) -> None:
        """A request is tried again."""
        self._again.labels(why).inc()

    def answer(self, accept: str) -> tuple[bytes, str]:
        """All of them, and the content type: OpenMetrics where ``accept``, the scrape's header, asks for that."""
        return registry_text(self._registry, accept)


# --- The router: takes a client's request, has one replica answer it, and passes the answer on as it comes ---

RETRY_AFTER_S = 1
LONG_RETRY_S = 10
MEAN_OVER = 20
"""Requests over which the mean duration is taken, roughly."""

BLAMED_S, MOST_BLAMED = 600.0, 1024
"""How long it is known of requests that they were on replicas that crashed, and of how many at most."""


class Router:
    """One of the routers of an endpoint.

    Args:
        token: what clients must show.
        engine_token: what the engines want to be shown; empty: nothing.
    """

    def __init__(self, config: InferenceConfig, *, node: str, token: str, engine_token: str, key: bytes) -> None:
        assert config.serving is not None
        self.config, self.serving, self._node = config, config.serving, node
        self._token = token.encode()
        self.engine_token = engine_token
        self._open_paths = config.engine.open_paths
        self.replicas = Replicas(key, self._on_change, self._wake)
        self.replicas.max_lag = self.serving.weights.max_version_lag
        self._degradation = serving.GracefulDegradation(self.serving.degraded_below, config.concurrency)
        self._waiting: Mapping[serving.Priority, deque[asyncio.Future[None]]] = {
            each: deque() for each in serving.Priority
        }
        self.budget = serving.RetryBudget()
        """Replaced as requests come and are tried again."""

        self._blamed: dict[bytes, tuple[float, tuple[inference.Death, ...]]] = {}
        """Digests of requests that were on replicas that crashed, and until when that counts for others like them."""

        self.suspects = 0
        """Requests that may have crashed replicas, and are alone on one or wait for that."""

        self._line: dict[inference.Turn, asyncio.Future[None]] = {}
        """Those that wait; the one that looks for a replica has its turn."""

        self._looks = False
        self._alone_s = [0.0, 0.0]
        """Seconds of those that were alone and were answered, and of those that were so in vain."""

        self.held_bytes = 0
        """Of the bodies of all requests."""

        self._mean_s = 0.0
        self.batches: Batches | None = None
        """Set where there is a folder for them."""

        self.metrics = Metrics(self)
        self.in_flight = 0
        """Requests that have come and are not answered."""

        self.answered = 0
        """Requests in this life."""

    # What may come in

    def knows(self, request: web.BaseRequest) -> bool:
        """Whether a request shows the token."""
        return hmac.compare_digest(serving.token_shown(request.headers).encode(errors="surrogateescape"), self._token)

    async def handle(self, request: web.BaseRequest, *, is_known: bool) -> web.StreamResponse:
        """Answer one request; ``is_known``: it shows the token."""
        self.in_flight += 1
        try:
            if request[UNSPOKEN]:
                return self.error(505, UNREAD[505], closing=True)
            if (preflight := self._preflight(request)) is not None:
                return preflight
            if not is_known:
                self.metrics.refused("unauthorized")
                return self.error(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
            return await self._handle(request)
        finally:
            self.in_flight -= 1
            self.held_bytes -= request[TRIP].held_bytes

    def _preflight(self, request: web.BaseRequest) -> web.Response | None:
        """What a browser asks, without a token, before its page sends a request here."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not self._is_of_page(request):
            return None
        wants = request.headers.get("Access-Control-Request-Headers", "")
        names = {"Methods": asked, "Headers": wants, "Max-Age": "600"}
        return web.Response(status=204, headers={f"Access-Control-{'Allow-' * (name != 'Max-Age')}{name}": value
                                                 for name, value in names.items() if value})  # fmt: skip

    def _is_of_page(self, request: web.BaseRequest) -> bool:
        allowed = self.serving.allow_origins
        return "Origin" in request.headers and ("*" in allowed or request.headers["Origin"] in allowed)

    def _not_passed(self, request: web.BaseRequest) -> web.Response | None:
        """The refusal of a request that does not pass through here, wherever it goes."""
        if serving.HOST.fullmatch(request[TRIP].host) is None:
            return self.error(400, "the Host is no name with a port", closing=True)
        if "websocket" in request.headers.get("Upgrade", "").lower():
            return self.error(
                501, "websockets do not pass through here; ask for a stream (text/event-stream)", closing=True
            )
        coding = request.headers.get("Transfer-Encoding", "chunked").strip().lower()
        if request.method in ("CONNECT", "TRACE") or coding != "chunked":
            return self.error(501, "only requests and their answers pass through here", closing=True)
        return None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        trip = request[TRIP]
        path = inference.normal(trip.target.partition("?")[0])
        if path is None or "#" in trip.target:
            return self.error(400, "the path can be understood in more than one way", closing=True)
        if (refusal := self._not_passed(request)) is not None:
            return refusal
        if path in ("/status", "/metrics") and request.method not in LOOKS:
            return self.error(405, f"{path} is there to be read", {"Allow": ", ".join(sorted(LOOKS))})
        match path:
            case "/status":
                return web.json_response(self.status())
            case "/metrics":
                text, kind = self.metrics.answer(request.headers.get("Accept", ""))
                return web.Response(body=text, headers={"Content-Type": kind})
        is_of_batches = self.batches is not None and BATCHES.fullmatch(path.rstrip("/")) is not None
        if not is_of_batches and not inference.is_open(request.method, path, self._open_paths):
            self.metrics.refused("forbidden")
            return self.error(403, "no path that clients of this engine may use (inference.engine.allow_paths)")
        asked_s = serving.seconds_asked(request.headers.get("X-Request-Timeout"))
        limit_s = min(asked_s or self.config.request_timeout_s * self._degradation.timeout_factor, 7 * 86_400.0)
        deadline_s = time.monotonic() + limit_s
        if (refusal := self._refusal(request, limit_s)) is not None:
            return refusal
        try:
            async with asyncio.timeout(self.serving.client_timeout_s):
                found = await self._body(request)
        except TimeoutError:
            return self.error(408, "the body did not come in time (inference.serving.client_timeout_s)", closing=True)
        if isinstance(found, web.Response):
            return found
        body = found
        if is_of_batches and self.batches is not None:
            return await self.batches.answer(request, path, body)
        if self._degradation.degraded and (self.serving.degraded_max_tokens or self.serving.degraded_model):
            body, trip.degraded = await asyncio.to_thread(
                serving.cheaper, path, body, self.serving.degraded_max_tokens, self.serving.degraded_model
            )
        return await self._answered(request, body, deadline_s)

    async def _answered(self, request: web.BaseRequest, body: bytes, deadline_s: float) -> web.StreamResponse:
        """The answer of a replica, unless the same request has crashed some lately."""
        until_s, known = self._blamed.get(_digest(request, body), (0.0, ())) if self._blamed else (0.0, ())
        deaths = list(known) if until_s > time.monotonic() else []
        if inference.is_poison(deaths):
            self.metrics.refused("poison")
            told = f"a request like this has crashed {inference.KILLS} replicas lately, or held them up"
            return self.error(422, f"{told} (inference.hang_timeout_s)")
        errand = Errand(self, request, body, deadline_s, deaths)
        try:
            return await errand.run()
        finally:
            self._remember(request, body, errand.deaths)

    def _remember(self, request: web.BaseRequest, body: bytes, deaths: Sequence[inference.Death]) -> None:
        if deaths or self._blamed:
            self._blamed.pop(_digest(request, body), None)
        if deaths:
            if len(self._blamed) >= MOST_BLAMED:
                self._blamed.pop(next(iter(self._blamed)))
            self._blamed[_digest(request, body)] = time.monotonic() + BLAMED_S, tuple(deaths)
        if inference.is_poison(deaths):
            log.error("a request has crashed %d replicas; it is refused for %.0f s", inference.KILLS, BLAMED_S)

    def _refusal(self, request: web.BaseRequest, left_s: float) -> web.Response | None:
        priority = request[TRIP].priority
        loads, limit = self.replicas.loads(), priority.share_of(self._degradation.slots)
        slots, has_room = len(loads) * limit, serving.choose_replica(loads, limit=limit) is not None
        queue = serving.Queue(self._before(priority), self.serving.max_queue, slots, self._mean_s, has_room)
        entry = serving.entry_of(queue, left_s=left_s, priority=priority, degraded=self._degradation.degraded,
                                 closing=self.replicas.closing)  # fmt: skip
        if entry is serving.Entry.ADMITTED:
            return None
        self.metrics.refused(entry.value)
        if entry is serving.Entry.FULL:
            after_s = max(RETRY_AFTER_S, min(60, round(queue.wait_s)))
            return self.error(429, "too many requests wait already", {"Retry-After": str(after_s)})
        why = "the endpoint is going away" if entry is serving.Entry.CLOSED else "degraded: no requests of low priority"
        return self.error(503, why, {"Retry-After": str(LONG_RETRY_S)})

    async def _body(self, request: web.BaseRequest) -> bytes | web.Response:
        """The whole body, as it must be there for another try; a refusal where there is no room for it."""
        if (refusal := self._hold(request, request.content_length or 0)) is not None:
            return refusal
        expects = request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue"
        if expects and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not request.can_read_body:
            return b""
        parts, size = [], 0
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if (refusal := self._hold(request, size)) is not None:
                return refusal
        return b"".join(parts)

    def _hold(self, request: web.BaseRequest, size: int) -> web.Response | None:
        """Make room for so many bytes of a body, before they are read."""
        if size > self.serving.max_body_bytes:
            return self.error(413, "the body is too long (inference.serving.max_body_bytes)", closing=True)
        more = max(0, size - request[TRIP].held_bytes)
        if self.held_bytes and more and self.held_bytes + more > self.serving.max_held_bytes:
            self.metrics.refused("memory")
            told = {"Retry-After": str(RETRY_AFTER_S)}
            return self.error(
                503, "too many bodies wait already (inference.serving.max_held_bytes)", told, closing=True
            )
        self.held_bytes += more
        request[TRIP].held_bytes += more
        return None

    # The replicas

    async def replica_for(
        self, deadline_s: float, without: set[str], *, priority: serving.Priority = serving.Priority.NORMAL
    ) -> Replica | None:  # fmt: skip
        """One that has room, with the request begun on it; None where there is none before the deadline."""
        is_woken, line = False, self._waiting[priority]
        while True:
            is_next = is_woken or not self._before(priority)
            limit = priority.share_of(self._degradation.slots)
            if is_next and (replica := self.replicas.choose(limit, without)) is not None:
                replica.begin()
                if is_woken:
                    self._wake()  # there may be room for more
                return replica
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if is_woken:  # another one was faster: this one is still the first of those that wait
                line.appendleft(waiting)
            else:
                line.append(waiting)
            is_woken = await self._woken(line, waiting, left_s)
            if not is_woken:
                return None

    @property
    def is_held_up(self) -> bool:
        """A suspect that was alone on a replica has crashed it, or held it up, since there are suspects."""
        return self._alone_s[True] > 0

    async def replica_alone(
        self, until_s: float, without: set[str], deaths: Sequence[inference.Death]
    ) -> Replica | None:
        """One with nothing else to do, with a suspect begun on it; None where there is none in time.

        ``one_less_alone`` follows. Suspects of this router wait here for each other, and those of others at the gate.
        """
        self.suspects, is_empty, replica = self.suspects + 1, False, None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_s - time.monotonic()), self._turn(inference.suspicion(deaths)):
                    while not is_empty:
                        replica = self.replicas.place_alone(without)
                        is_empty = await (asyncio.sleep(EMPTY_LOOK_S, False) if replica is None else replica.emptied())
        finally:
            if not is_empty:
                self.one_less_alone(replica)
        return replica if is_empty else None

    @contextlib.asynccontextmanager
    async def _turn(self, suspected: tuple[int, int]) -> AsyncIterator[None]:
        """One suspect at a time looks for a replica."""
        mine, called = (suspected, -next(TURNS)), asyncio.get_running_loop().create_future()
        self._line[mine] = called
        self._call_next()
        try:
            await called
            yield
        finally:
            if self._line.pop(mine, None) is None:  # it had its turn
                self._looks = False
            self._call_next()

    def _call_next(self) -> None:
        line = [turn for turn, called in self._line.items() if not called.done()]
        if line and not self._looks:
            self._looks, (well_s, in_vain_s) = True, self._alone_s
            self._line.pop(inference.next_alone(line, well_s=well_s, in_vain_s=in_vain_s)).set_result(None)

    def one_less_alone(self, replica: Replica | None, seconds: float = 0.0, *, in_vain: bool = False) -> None:
        """A suspect has ended, however, or waits no more; the next one follows on the same replica.

        Args:
            seconds: for which it was alone.
        """
        self.suspects -= 1
        self._alone_s[in_vain] += seconds
        if replica is not None:
            replica.is_taken = False
            replica.keep(is_wanted=self.suspects > 0)
        if not self.suspects:
            self._alone_s = [0.0, 0.0]
            self.replicas.place_alone(None)

    def _before(self, priority: serving.Priority) -> int:
        """How many wait that have their turn before one more of this priority."""
        return sum(len(line) for each, line in self._waiting.items() if each <= priority)

    async def _woken(self, line: deque[asyncio.Future[None]], waiting: asyncio.Future[None], left_s: float) -> bool:
        """Wait for room; False where the time is up."""
        is_woken = False
        try:
            async with asyncio.timeout(left_s):
                await waiting
                is_woken = True
        except TimeoutError:
            pass
        finally:
            if not is_woken:
                if waiting in line:
                    line.remove(waiting)
                else:
                    self._wake()  # it was woken, and will not take the room
        return is_woken

    def _on_change(self) -> None:
        """A replica may have room, or there is one more or less."""
        before = self._degradation.degraded
        self._degradation = self._degradation.saw(self.replicas.ready, self.replicas.expected)
        if self._degradation.degraded != before:
            log.warning("the endpoint is %s: %d of %d replicas are ready", "degraded" if not before else "well again",
                        self.replicas.ready, self.replicas.expected)  # fmt: skip
        if self._looks and self.ready > 1 and (replica := self.replicas.place_alone(())) is not None:
            replica.keep_empty()  # before all that waits is on it
        self._wake()

    def _wake(self) -> None:
        first = next((each for each, line in self._waiting.items() if line), None)
        if first is not None and self.replicas.choose(first.share_of(self._degradation.slots), ()) is not None:
            waiting = self._waiting[first].popleft()
            if not waiting.done():
                waiting.set_result(None)
            else:
                self._wake()

    # What is known

    @property
    def ready(self) -> int:
        """Replicas in the rotation."""
        return self.replicas.ready

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""
        return self._before(serving.Priority.LOW)

    @property
    def load(self) -> int:
        """Requests that wait, or that replicas have from this router."""
        return self.waiting + sum(each.begun - each.done for each in self.replicas.by_name.values())

    @property
    def degraded(self) -> bool:
        """Too few replicas are ready."""
        return self._degradation.degraded

    def status(self) -> Mapping[str, Any]:
        """What ``/status`` shows."""
        now_s, state = time.monotonic(), "degraded" if self.degraded else "well"
        return {
            "state": "closing" if self.replicas.closing else state if self.ready else "waiting",
            "router": self._node,
            "replicas": {"ready": self.replicas.ready, "expected": self.replicas.expected},
            "concurrency": self._degradation.slots,
            "in_flight": self.in_flight - 1,
            "waiting": self.waiting,
            "weights": self.replicas.newest and self.replicas.newest.version,
            "each": {
                each.name: {"phase": "lost" if each.gone.is_set() else each.phase or "unheard",
                            "in_flight": each.in_flight, "avoided": each.breaker.is_open(now_s),
                            "weights": each.weights and each.weights.version}
                for each in self.replicas.by_name.values()
            },
        }  # fmt: skip

    async def look_for_weights(self, run_folder: Path) -> None:
        """Know the newest weights that are published for this endpoint; what is known stays where that is not read."""
        with contextlib.suppress(StorageError):  # the replicas tell it in their logs
            if (newest := await asyncio.to_thread(read_published, run_folder)) is not None:
                self.replicas.newest = newest.served

    def took(self, seconds: float) -> None:
        """A request was answered after so long."""
        self.answered += 1
        self._mean_s += (seconds - self._mean_s) / MEAN_OVER if self._mean_s else seconds

    def headers_for(self, request: web.BaseRequest) -> dict[str, str]:
        """What any answer to this request says."""
        found = {"X-Request-ID": request[TRIP].id}
        if self.degraded:
            found["X-Slurmft-State"] = "degraded"
        if request[TRIP].weights is not None:
            found[WEIGHTS_HEADER] = str(request[TRIP].weights)
        if request[TRIP].degraded:
            found["X-Slurmft-Degraded"] = request[TRIP].degraded
        if self._is_of_page(request):
            found |= {"Access-Control-Allow-Origin": request.headers["Origin"], "Vary": "Origin",
                      "Access-Control-Expose-Headers": "*"}  # fmt: skip
        return found

    def error(
        self, status: int, why: str, headers: Mapping[str, str] | None = None, *, closing: bool = False
    ) -> web.Response:
        """An error of the router's own."""
        answer = web.json_response(error_answer(status, why), status=status, headers=headers)
        if closing:
            answer.force_close()
        return answer

    async def close(self) -> None:
        """Let go of the replicas."""
        if self.batches is not None:
            await self.batches.close()
        await self.replicas.close()


def _digest(request: web.BaseRequest, body: bytes) -> bytes:
    return hashlib.sha256(b"\0".join([request.method.encode(), request[TRIP].target.encode(), body])).digest()


# --- A router's access log: a line of JSON for each request, on a shared disk that may be slow, full or silent ---

EVERY_S = 0.5
MOST_LINES = 20_000
"""That wait for the disk; further ones are lost."""

MOST_BYTES = 64 << 20
CLIENT_GONE = 499
"""As nginx has it: the client has not waited for its answer."""


class AccessLog:
    """Lines, written by a thread a moment later.

    Args:
        path: None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lines, self._lost = path, list[str](), 0
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Write from now on."""
        if self._path is not None:
            self._writing = asyncio.create_task(self._write_regularly())

    async def close(self) -> None:
        """Write what is there, where the disk takes it at once."""
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._write(), EVERY_S)

    def note(self, request: web.BaseRequest, answer: web.StreamResponse | None, seconds: float) -> None:
        """A request has its answer, or has lost its client. The query is left out: it may hold what is secret."""
        if self._path is None or len(self._lines) >= MOST_LINES:
            self._lost += self._path is not None
            return
        trip, body = request[TRIP], getattr(answer, "body", None)
        self._lines.append(json.dumps({
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"), "id": trip.id,
            "client": trip.client, "method": request.method, "path": trip.target.partition("?")[0][:2000],
            "status": CLIENT_GONE if answer is None else answer.status,
            "bytes": len(body) if isinstance(body, bytes) else 0 if answer is None else answer.body_length,
            "seconds": round(seconds, 4), "replica": trip.replica, "tries": trip.tries,
        }) + "\n")  # fmt: skip

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self._write()

    async def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._path is None or not lines:
            return
        try:
            await asyncio.to_thread(_append, self._path, "".join(lines).encode())
        except OSError as error:
            self._lost += len(lines)
            log.warning("the access log has lost %d lines so far: %s", self._lost, error)


def _append(path: Path, content: bytes) -> None:
    write_bytes(path, content, append=True, follow=False)
    if path.stat().st_size > MOST_BYTES:
        path.replace(path.with_suffix(".log.1"))


# --- Where a router listens for clients: who may stay, how long, and what answers a request that cannot be read ---

LEAVE_LOOK_S = 0.05
SWEEP_S = 1.0
PORT_S = 5.0
"""How long a port is waited for that another process has."""

KEPT_S = 75.0
"""How long a client's connection is kept for its next request."""

BACKLOG = 4096
DESCRIPTORS = 65_536
"""What a router wants, where the hard limit allows it: two for each request, one for each client that is idle."""

STRANGERS_SHARE = 8
"""One of so many descriptors may belong to connections that have not shown the token yet."""

HANDSHAKE_S = 10.0
"""For TLS, at most."""

TLS_STRANGERS = 1024
"""At most so many: each costs 256 KiB from its first byte on, in buffers of asyncio."""

ACCEPTED_AT_ONCE = 64
"""More could use up the descriptors before those of strangers are given back."""

MOST_HEADERS, TOO_MANY = 128, "Too many headers received"
"""Of one request, and what aiohttp (3.14) says of more."""

UNREAD = {
    400: "this is no request that can be read",
    414: "the request's target is too long (inference.serving.max_header_bytes)",
    431: f"a header is too long (inference.serving.max_header_bytes), or there are more than {MOST_HEADERS}",
    505: "HTTP/1.1 and HTTP/1.0 are spoken here",
}
UNSPOKEN = web.RequestKey("unspoken", bool)
"""It came in another version of HTTP."""


SPOKEN_PLAINLY = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n"
SPOKEN_PLAINLY += json.dumps(error_answer(400, "this port speaks HTTPS; the address begins with https://")).encode()

LINGER_S = 1.0
"""For a client to read that, and to close its side."""


_Stranger: TypeAlias = "_Arrival | _Connection"


class RouterServer:
    """Listens for clients, and keeps slow and silent ones from holding connections."""

    def __init__(self, router: Router, config: InferenceConfig, access_log: Path | None = None) -> None:
        assert config.serving is not None
        self.access = AccessLog(access_log)
        self._router, self._serving = router, config.serving
        most = allow_descriptors(DESCRIPTORS) // STRANGERS_SHARE
        most = max(2, min(most, TLS_STRANGERS) if self._serving.is_https else most)
        self.strangers: Strangers[_Stranger] = Strangers(most, most // 2)
        """Connections that have not shown the token yet, from the moment when they are accepted."""

        self._arriving: set[asyncio.Task[None]] = set()
        self._server = web.Server(self._handle, handler_cancellation=True, request_factory=_spoken)
        self._is_leaving = False
        self._listener: socket.socket | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def listen(self, host: str | None, port: int, context: ssl.SSLContext | None = None) -> int:
        """Begin; returns the port.

        Args:
            port: waited for where another process has it: a router of before, whose agent has just ended.
            context: for HTTPS with a certificate that the configuration does not name.

        Raises:
            SlurmftError: certificate and key cannot be used, or the port stays taken.
        """
        if self._serving.tls_certificate is not None and self._serving.tls_key is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                if self._serving.tls_key.stat().st_mode & 0o077:
                    raise UsageError(f"inference.serving.tls_key: others may read {self._serving.tls_key}",
                                     hint=f"chmod 600 {self._serving.tls_key}")  # fmt: skip
                context.load_cert_chain(self._serving.tls_certificate, self._serving.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(f"inference.serving.tls_certificate and tls_key cannot be used: {error}") from error
        deadline_s = time.monotonic() + PORT_S
        while True:
            try:
                listening = listening_socket(host, port)
                listening.setblocking(False)
                listening.listen(BACKLOG)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                    raise LaunchError(f"cannot listen on port {port}: {error.strerror or error}") from error
                await asyncio.sleep(LEAVE_LOOK_S)
        self._listener = listening
        asyncio.get_running_loop().add_reader(listening, self._accept, listening, context)
        self._sweeping = asyncio.create_task(self._sweep())
        self.access.begin()
        return int(listening.getsockname()[1])

    async def leave(self) -> None:
        """Take no more connections; returns when those that are there have got the answer they wait for."""
        self._is_leaving = True
        self._stop_listening()
        while self._arriving or self._server.connections:
            for connection in self._connections:
                connection.close()  # once its request is answered ...
                if not connection.is_busy and connection.transport is not None:
                    connection.transport.close()  # ... which aiohttp does not do where there is none
            await asyncio.sleep(LEAVE_LOOK_S)

    async def close(self) -> None:
        """Take no more clients, and end those that are there."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._stop_listening()
        for arriving in self._arriving:
            arriving.cancel()
        await self._server.shutdown(0.1)
        await self.access.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    for oldest in self.strangers.drop_oldest():
                        oldest.hang_up()
                return
            connection.setblocking(False)
            arrival = _Arrival(connection)
            self.admit(arrival, str(address[0]))
            arriving = asyncio.create_task(self._begin(arrival, context, str(address[0])))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)

    async def _begin(self, arrival: _Arrival, context: ssl.SSLContext | None, address: str) -> None:
        limit_s = min(self._serving.client_timeout_s, HANDSHAKE_S) if context is not None else None
        try:
            if context is not None and (await arrival.first_byte(limit_s)).isalpha():
                await arrival.end_with(SPOKEN_PLAINLY, LINGER_S)
                return
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection(arrival, address), arrival.socket, ssl=context, ssl_handshake_timeout=limit_s
            )
        except OSError as error:  # what is no TLS as well
            log.debug("a connection from %s ended before it began: %s", address, error)
            traceback.clear_frames(error.__traceback__)  # asyncio's hold the error, and so the buffers, in a circle
        finally:
            self.strangers.forget(arrival)

    def admit(self, connection: _Stranger, address: str) -> None:
        """A connection is there. Those of strangers must not use up descriptors and memory; the oldest is the least
        likely to be a client's, which shows the token at once."""
        for oldest in self.strangers.admit(connection, address):
            oldest.hang_up()

    def _connection(self, arrival: _Arrival, address: str) -> _Connection:
        longest = self._serving.max_header_bytes
        return _Connection(
            self, self._server, arrival, address, loop=asyncio.get_running_loop(), keepalive_timeout=KEPT_S,
            access_log=None, auto_decompress=False, max_line_size=longest, max_field_size=longest + 1,
            max_headers=MOST_HEADERS, lingering_time=1.0, logger=log,
        )  # fmt: skip

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.is_busy = True
        began_s, answer = time.monotonic(), None
        target, host = serving.target_of(request.raw_path)
        request[TRIP] = Trip(
            id=serving.request_id(request.headers.get("X-Request-ID")), target=target, client=connection.address,
            priority=serving.Priority.of(request.headers.get("X-Priority")),
            host=host or request.headers.get("Host") or connection.own_address,
        )  # fmt: skip
        try:
            is_known = self._router.knows(request)
            if is_known:
                self.strangers.forget(connection)
            answer = await self._router.handle(request, is_known=is_known)
            if not answer.prepared:
                answer.headers.update(self._router.headers_for(request))
                answer.headers.setdefault("Server", "slurmft")
                if self._is_leaving or is_last(request):
                    answer.force_close()  # a client that is not told sends its next request into the closed connection
            return answer
        finally:
            self.access.note(request, answer, time.monotonic() - began_s)
            connection.is_busy, connection.is_known, connection.idle_since_s = False, True, time.monotonic()

    async def _sweep(self) -> None:
        """Cut off clients that take too long for a request line and its headers."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for connection in self._connections:
                limit_s = self._serving.client_timeout_s + KEPT_S * connection.is_known
                if not connection.is_busy and now_s - connection.idle_since_s > limit_s:
                    connection.hang_up()

    @property
    def _connections(self) -> list[_Connection]:
        return [each for each in self._server.connections if isinstance(each, _Connection)]


class _Arrival:
    """A connection before its first request can be read: with TLS, during the handshake."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    async def first_byte(self, limit_s: float | None) -> bytes:
        """Wait for it, or close the socket and raise ``OSError``: a silent one costs a socket, and no buffers."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.socket, ready.set)
        try:
            async with asyncio.timeout(limit_s):
                await ready.wait()
            if not (first := self.socket.recv(1, socket.MSG_PEEK)):
                raise ConnectionError("closed without a word")
        except BaseException:
            loop.remove_reader(self.socket)
            self.socket.close()
            raise
        loop.remove_reader(self.socket)
        return first

    async def end_with(self, answer: bytes, within_s: float) -> None:
        """Answer without a look at the request, and close the socket once its client has closed its side: one that is
        closed with something unread takes the answer back."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(self.socket, answer)
                self.socket.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(self.socket, 1 << 16):
                    pass
        finally:
            self.socket.close()

    def hang_up(self) -> None:
        """End it; its task notices."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Connection(web.RequestHandler):
    """A client's connection."""

    __slots__ = ("_arrival", "_server", "address", "idle_since_s", "is_busy", "is_known")

    def __init__(
        self, server: RouterServer, manager: web.Server, arrival: _Arrival, address: str, **settings: Any
    ) -> None:
        super().__init__(manager, **settings)
        self._server, self._arrival, self.address = server, arrival, address
        self.is_busy = self.is_known = False
        """It waits for an answer, and it has had one before."""

        self.idle_since_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.strangers.forget(self._arrival)
        self._server.admit(self, self.address)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.strangers.forget(self)
        super().connection_lost(exc)

    @property
    def own_address(self) -> str:
        """Where the client has found this router."""
        name = self.transport.get_extra_info("sockname") if self.transport is not None else None
        return f"{name[0]}:{name[1]}" if name else "replica"

    def hang_up(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """As the router's own errors, and no word of the request in log or answer, as aiohttp has it: a token may be
        in it, and answers of errors are what people log and send on."""
        if isinstance(exc, LineTooLong):  # the limits of a target and of a header differ, so that this tells them apart
            status = 431 if exc.args[1] > self.max_line_size else 414
        elif isinstance(exc, HttpProcessingError):
            status = 431 if exc.message == TOO_MANY else status
        else:
            log.error("a request has failed in the router", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        told = error_answer(status, UNREAD.get(status, "an error in the router"))
        answer = web.json_response(told, status=status, headers={"Server": "slurmft"})
        answer.force_close()
        return answer


def _spoken(
    message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]
) -> web.BaseRequest:  # fmt: skip
    """A request as aiohttp makes it, but that its answer never has a version of HTTP that is not spoken here."""
    is_spoken = message.version in (HttpVersion10, HttpVersion11)
    message = message if is_spoken else message._replace(version=HttpVersion11, should_close=True)
    request = web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
    request[UNSPOKEN] = not is_spoken
    return request


# --- The process of one router, which its agent starts and starts again ---
#     python -m slurmft.inference.router      (forked by the agent's zygote)
#
# Over a Unix socket in the agent's private folder it hears which replicas there are, one JSON object a line, and says
# where it listens, then every second that it lives. When the agent is gone, so is the router.

ALIVE_S = 1.0
MAX_LINE_BYTES = 16 << 20


async def serve(settings: RouterSettings) -> int:
    """Route until the agent is gone; returns the exit code.

    Raises:
        SlurmftError: it cannot begin.
    """
    config = load(Path(settings.config))
    section = config.inference
    assert section is not None and section.serving is not None
    engine_token = token_in(section.engine.token_file) if section.engine.token_file is not None else ""
    router = Router(section, node=settings.node, token=token_of(config.run_folder), engine_token=engine_token,
                    key=key_of(config.run_folder))  # fmt: skip
    access = folder_of(config.run_folder) / f"access-{settings.node}.log" if section.serving.access_log else None
    server = RouterServer(router, section, access)
    reader, writer = await asyncio.open_unix_connection(settings.socket, limit=MAX_LINE_BYTES)

    async def say_alive() -> None:
        while True:
            writer.write(RouterLives(port=port, answered=router.answered, load=router.load).as_line())
            await asyncio.sleep(ALIVE_S)

    async def follow_weights() -> None:
        while True:
            await asyncio.sleep(WEIGHTS_LOOK_S)
            await router.look_for_weights(config.run_folder)

    host, context = "127.0.0.1" if is_local(os.environ) else None, None
    if section.serving.tls_own:
        context = await asyncio.to_thread(context_for, config.run_folder, settings.hosts)
    port = await server.listen(host, settings.port, context)
    router.batches = Batches(
        folder_of(config.run_folder) / "batches", ready=lambda: router.ready, error=router.error,
        open_paths=section.engine.open_paths, slots=section.concurrency, tries=section.max_retries + 1,
        token=token_of(config.run_folder),
    )  # fmt: skip
    router.batches.begin(f"{'https' if section.serving.is_https else 'http'}://127.0.0.1:{port}")
    gc.collect()
    gc.freeze()  # what is there now stays: a full collection would hold requests up
    tasks = [asyncio.create_task(say_alive())]
    if section.serving.weights.update_path is not None:
        await router.look_for_weights(config.run_folder)  # before a replica can get a request
        tasks.append(asyncio.create_task(follow_weights()))

    async def obey() -> None:
        leaving: asyncio.Task[None] | None = None
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                told = Members.parse(line, "what the agent says")
                router.replicas.take(told)
                if not told.router and leaving is None:
                    leaving = asyncio.create_task(server.leave())
                    leaving.add_done_callback(lambda _task: obeying.cancel())

    obeying = asyncio.create_task(obey())
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await obeying
    finally:
        for task in tasks:
            task.cancel()
        await server.close()
        await router.close()
        writer.close()
    return 0


def main() -> int:
    """Run the router that the environment describes."""
    return run_below_agent(
        lambda: serve(RouterSettings.parse(os.environ.pop(ROUTER_VARIABLE).encode(), ROUTER_VARIABLE))
    )


if __name__ == "__main__":
    os._exit(main())
