"""The router: takes a client's request, has one replica answer it, and passes the answer on as it comes.

It looks at method, path and headers, and in a body for its size alone. A request whose replica is lost before the first
byte of the answer is done on another one; an answer that has begun is ended in a way that the client notices.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import HttpVersion11, web

from slurmft.config.inference import InferenceConfig
from slurmft.inference.serving.batches import PATHS as BATCHES
from slurmft.inference.serving.batches import Batches
from slurmft.inference.serving.errand import TRIP, Errand, error_answer
from slurmft.inference.serving.metrics import Metrics
from slurmft.inference.serving.replicas import Replica, Replicas
from slurmft.policy.inference.degradation import GracefulDegradation, cheaper
from slurmft.policy.inference.http_headers import seconds_asked, token_shown
from slurmft.policy.inference.paths import is_open, normal
from slurmft.policy.inference.poison import KILLS
from slurmft.policy.inference.rotation import Entry, Priority, Queue, choose, entry_of
from slurmft.policy.inference.second_tries import RetryBudget

RETRY_AFTER_S = 1
LONG_RETRY_S = 10
MEAN_OVER = 20
"""Requests over which the mean duration is taken, roughly."""

POISON_S, MOST_POISON = 600.0, 1024
"""How long requests that have crashed replicas are refused, and how many are known at most."""

log = logging.getLogger(__name__)


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
        self._degradation = GracefulDegradation(self.serving.degraded_below, config.concurrency)
        self._terms = self._degradation.terms
        self._waiting: Mapping[Priority, deque[asyncio.Future[None]]] = {each: deque() for each in Priority}
        self.budget = RetryBudget()
        """Replaced as requests come and are tried again."""

        self._poison: dict[bytes, float] = {}
        """Digests of requests that have crashed replicas, and until when they are refused."""

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
        return hmac.compare_digest(token_shown(request.headers).encode(errors="surrogateescape"), self._token)

    async def handle(self, request: web.BaseRequest, *, is_known: bool) -> web.StreamResponse:
        """Answer one request; ``is_known``: it shows the token."""
        self.in_flight += 1
        try:
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

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        trip = request[TRIP]
        path = normal(trip.target.partition("?")[0])
        if path is None or "#" in trip.target:
            return self.error(400, "the path can be understood in more than one way", closing=True)
        if "websocket" in request.headers.get("Upgrade", "").lower():
            return self.error(
                501, "websockets do not pass through here; ask for a stream (text/event-stream)", closing=True
            )
        coding = request.headers.get("Transfer-Encoding", "chunked").strip().lower()
        if request.method in ("CONNECT", "TRACE") or coding != "chunked":
            return self.error(501, "only requests and their answers pass through here", closing=True)
        match path:
            case "/status":
                return web.json_response(self.status())
            case "/metrics":
                text, kind = self.metrics.answer(request.headers.get("Accept", ""))
                return web.Response(body=text, headers={"Content-Type": kind})
        is_of_batches = self.batches is not None and BATCHES.fullmatch(path.rstrip("/")) is not None
        if not is_of_batches and not is_open(request.method, path, self._open_paths):
            self.metrics.refused("forbidden")
            return self.error(403, "no path that clients of this engine may use (inference.engine.allow_paths)")
        asked_s = seconds_asked(request.headers.get("X-Request-Timeout"))
        limit_s = min(asked_s or self.config.request_timeout_s * self._terms.timeout_factor, 7 * 86_400.0)
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
        if self._terms.degraded and (self.serving.degraded_max_tokens or self.serving.degraded_model):
            body, trip.degraded = await asyncio.to_thread(
                cheaper, path, body, self.serving.degraded_max_tokens, self.serving.degraded_model
            )
        if self._poison and self.is_poison(request, body):
            self.metrics.refused("poison")
            told = (
                f"a request like this has crashed {KILLS} replicas lately, or held them up (inference.hang_timeout_s)"
            )
            return self.error(422, told)
        return await Errand(self, request, body, deadline_s).run()

    def is_poison(self, request: web.BaseRequest, body: bytes) -> bool:
        """Whether the same request has crashed replicas lately."""
        until_s = self._poison.get(_digest(request, body))
        return until_s is not None and until_s > time.monotonic()

    def remember_poison(self, request: web.BaseRequest, body: bytes) -> None:
        """Refuse this request for a while."""
        if len(self._poison) >= MOST_POISON:
            self._poison.pop(next(iter(self._poison)))
        self._poison[_digest(request, body)] = time.monotonic() + POISON_S
        log.error("a request has crashed %d replicas; it is refused for %.0f s", KILLS, POISON_S)

    def _refusal(self, request: web.BaseRequest, left_s: float) -> web.Response | None:
        priority = request[TRIP].priority
        loads, limit = self.replicas.loads(), priority.share_of(self._terms.concurrency)
        slots, has_room = len(loads) * limit, choose(loads, limit=limit) is not None
        queue = Queue(self._before(priority), self.serving.max_queue, slots, self._mean_s, has_room)
        entry = entry_of(queue, left_s=left_s, priority=priority, degraded=self._terms.degraded,
                         closing=self.replicas.closing)  # fmt: skip
        if entry is Entry.ADMITTED:
            return None
        self.metrics.refused(entry.value)
        if entry is Entry.FULL:
            after_s = max(RETRY_AFTER_S, min(60, round(queue.wait_s)))
            return self.error(429, "too many requests wait already", {"Retry-After": str(after_s)})
        why = "the endpoint is going away" if entry is Entry.CLOSED else "degraded: no requests of low priority"
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
        self, deadline_s: float, without: set[str], *, is_suspect: bool = False, priority: Priority = Priority.NORMAL
    ) -> Replica | None:  # fmt: skip
        """One that has room, with the request begun on it; None where there is none before the deadline."""
        is_woken, line = False, self._waiting[priority]
        while True:
            is_next = is_woken or not self._before(priority)
            limit = priority.share_of(self._terms.concurrency)
            if is_next and (replica := self.replicas.choose(limit, without, is_suspect=is_suspect)) is not None:
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

    def _before(self, priority: Priority) -> int:
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
        self._terms = self._degradation.terms
        if self._degradation.degraded != before:
            log.warning("the endpoint is %s: %d of %d replicas are ready", "degraded" if not before else "well again",
                        self.replicas.ready, self.replicas.expected)  # fmt: skip
        self._wake()

    def _wake(self) -> None:
        first = next((each for each, line in self._waiting.items() if line), None)
        if first is not None and self.replicas.choose(first.share_of(self._terms.concurrency), ()) is not None:
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
    def expected(self) -> int:
        """Replicas that there should be."""
        return self.replicas.expected

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""
        return self._before(Priority.LOW)

    @property
    def load(self) -> int:
        """Requests that wait, or that replicas have from this router."""
        return self.waiting + sum(each.begun - each.done for each in self.replicas.by_name.values())

    @property
    def degraded(self) -> bool:
        """Too few replicas are ready."""
        return self._terms.degraded

    def status(self) -> Mapping[str, Any]:
        """What ``/status`` shows."""
        now_s, state = time.monotonic(), "degraded" if self.degraded else "well"
        return {
            "state": "closing" if self.replicas.closing else state if self.ready else "waiting",
            "router": self._node,
            "replicas": {"ready": self.replicas.ready, "expected": self.replicas.expected},
            "concurrency": self._terms.concurrency,
            "in_flight": self.in_flight - 1,
            "waiting": self.waiting,
            "each": {
                each.name: {"phase": "lost" if each.gone.is_set() else each.phase or "unheard",
                            "in_flight": each.in_flight, "avoided": each.breaker.is_open(now_s)}
                for each in self.replicas.by_name.values()
            },
        }  # fmt: skip

    def took(self, seconds: float) -> None:
        """A request was answered after so long."""
        self.answered += 1
        self._mean_s += (seconds - self._mean_s) / MEAN_OVER if self._mean_s else seconds

    def headers_for(self, request: web.BaseRequest) -> dict[str, str]:
        """What any answer to this request says."""
        found = {"X-Request-ID": request[TRIP].id}
        if self.degraded:
            found["X-Slurmft-State"] = "degraded"
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
