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
from slurmft.inference.serving.errand import Errand, error_answer
from slurmft.inference.serving.metrics import Metrics
from slurmft.inference.serving.replicas import Replica, Replicas
from slurmft.policy.inference.degradation import GracefulDegradation, cheaper
from slurmft.policy.inference.http_headers import seconds_asked
from slurmft.policy.inference.paths import is_open, normal
from slurmft.policy.inference.poison import KILLS
from slurmft.policy.inference.rotation import Entry, Queue, choose, entry_of
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
        self.replicas = Replicas(key, self._on_change, self._wake)
        self._degradation = GracefulDegradation(self.serving.degraded_below, config.concurrency)
        self._terms = self._degradation.terms
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.budget = RetryBudget()
        """Replaced as requests come and are tried again."""

        self._poison: dict[bytes, float] = {}
        """Digests of requests that have crashed replicas, and until when they are refused."""

        self._mean_s = 0.0
        self.metrics = Metrics(self)
        self.in_flight = 0
        """Requests that have come and are not answered."""

        self.answered = 0
        """Requests in this life."""

    # What may come in

    def knows(self, request: web.BaseRequest) -> bool:
        """Whether a request shows the token."""
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        # all of it is compared, whatever the scheme
        is_right = hmac.compare_digest(shown.encode(errors="surrogateescape"), self._token)
        return is_right and scheme.lower() == "bearer"

    async def handle(self, request: web.BaseRequest, *, is_known: bool) -> web.StreamResponse:
        """Answer one request; ``is_known``: it shows the token."""
        self.in_flight += 1
        try:
            if not is_known:
                self.metrics.refused("unauthorized")
                return self.error(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
            return await self._handle(request)
        finally:
            self.in_flight -= 1

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = normal(request.raw_path.partition("?")[0])
        if path is None or "#" in request.raw_path:
            return self.error(400, "the path can be understood in more than one way", closing=True)
        coding = request.headers.get("Transfer-Encoding", "chunked").strip().lower()
        if "Upgrade" in request.headers or request.method in ("CONNECT", "TRACE") or coding != "chunked":
            return self.error(501, "only requests and their answers pass through here", closing=True)
        match path:
            case "/status":
                return web.json_response(self.status(), headers=self.state_header())
            case "/metrics":
                text, kind = self.metrics.answer(request.headers.get("Accept", ""))
                return web.Response(body=text, headers={"Content-Type": kind})
        if not is_open(path, self.serving.allow_paths):
            self.metrics.refused("forbidden")
            return self.error(403, "this path administers the engine (inference.serving.allow_paths)")
        asked_s = seconds_asked(request.headers.get("X-Request-Timeout"))
        limit_s = min(asked_s or self.config.request_timeout_s * self._terms.timeout_factor, 7 * 86_400.0)
        deadline_s = time.monotonic() + limit_s
        if (refusal := self._refusal(request, limit_s)) is not None:
            return refusal
        try:
            async with asyncio.timeout(self.serving.client_timeout_s):
                body = await self._body(request)
        except TimeoutError:
            return self.error(408, "the body did not come in time (inference.serving.client_timeout_s)", closing=True)
        if body is None:
            return self.error(413, "the body is too long (inference.serving.max_body_bytes)", closing=True)
        if self._terms.degraded and (self.serving.degraded_max_tokens or self.serving.degraded_model):
            body = await asyncio.to_thread(
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
        loads, limit = self.replicas.loads(), self._terms.concurrency
        slots, has_room = len(loads) * limit, choose(loads, limit=limit) is not None
        queue = Queue(len(self._waiting), self.serving.max_queue, slots, self._mean_s, has_room)
        is_low = request.headers.get("X-Priority", "").strip().lower() == "low"
        entry = entry_of(queue, left_s=left_s, is_low=is_low, degraded=self._terms.degraded, closing=self._is_closing())
        if entry is Entry.ADMITTED:
            return None
        self.metrics.refused(entry.value)
        if entry is Entry.FULL:
            after_s = max(RETRY_AFTER_S, min(60, round(queue.wait_s)))
            return self.error(429, "too many requests wait already", {"Retry-After": str(after_s)})
        why = "the endpoint is going away" if entry is Entry.CLOSED else "degraded: no requests of low priority"
        return self.error(503, why, {"Retry-After": str(LONG_RETRY_S)})

    async def _body(self, request: web.BaseRequest) -> bytes | None:
        """The whole body, as it must be there for another try; None where it is too long."""
        limit = self.serving.max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            return None
        expects = request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue"
        if expects and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not request.can_read_body:
            return b""
        parts, room = [], limit
        async for part in request.content.iter_any():
            parts.append(part)
            room -= len(part)
            if room < 0:
                return None
        return b"".join(parts)

    # The replicas

    async def replica_for(
        self, deadline_s: float, without: set[str], *, is_suspect: bool = False
    ) -> Replica | None:  # fmt: skip
        """One that has room, with the request begun on it; None where there is none before the deadline."""
        is_woken = False
        while True:
            is_next = is_woken or not self._waiting
            limit = self._terms.concurrency
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
                self._waiting.appendleft(waiting)
            else:
                self._waiting.append(waiting)
            is_woken = await self._woken(waiting, left_s)
            if not is_woken:
                return None

    async def _woken(self, waiting: asyncio.Future[None], left_s: float) -> bool:
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
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
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
        if self._waiting and self.replicas.choose(self._terms.concurrency, ()) is not None:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
            else:
                self._wake()

    def _is_closing(self) -> bool:
        """All that is left of the endpoint drains."""
        phases = {each.phase for each in self.replicas.by_name.values()}
        return bool(phases) and phases <= {"draining", "ended"}

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
        return len(self._waiting)

    @property
    def degraded(self) -> bool:
        """Too few replicas are ready."""
        return self._terms.degraded

    def status(self) -> Mapping[str, Any]:
        """What ``/status`` shows."""
        now_s = time.monotonic()
        return {
            "state": "closing" if self._is_closing() else "degraded" if self.degraded else "well",
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

    def state_header(self) -> dict[str, str]:
        """What an answer says about the endpoint."""
        return {"X-Slurmft-State": "degraded"} if self.degraded else {}

    def error(
        self, status: int, why: str, headers: Mapping[str, str] | None = None, *, closing: bool = False
    ) -> web.Response:
        """An error of the router's own."""
        answer = web.json_response(
            error_answer(status, why), status=status, headers={**self.state_header(), **(headers or {})}
        )
        if closing:
            answer.force_close()
        return answer

    async def close(self) -> None:
        """Let go of the replicas."""
        await self.replicas.close()


def _digest(request: web.BaseRequest, body: bytes) -> bytes:
    return hashlib.sha256(b"\0".join([request.method.encode(), request.raw_path.encode(), body])).digest()
