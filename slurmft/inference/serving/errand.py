"""One client's request: the tries until a replica answers it, and the answer on its way to the client."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from slurmft.inference.serving.replicas import Replica
from slurmft.policy.inference.answers import Outcome, outcome_of_status, retry_after_s
from slurmft.policy.inference.http_headers import end_to_end
from slurmft.policy.inference.second_tries import Failure, after_failure

if TYPE_CHECKING:
    from slurmft.inference.serving.router import Router

MAX_BUFFERED_BYTES = 1 << 20
"""An answer of known length up to here is passed on when it is whole, so that its replica may die in its midst."""

MAX_ERROR_BYTES = 1 << 16
WORD_S = 0.25
"""How long a broken connection waits for the word that its replica is gone."""

AS_THEY_CAME = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

log = logging.getLogger(__name__)


class _Failed(Exception):
    """A try has failed before the client has got a byte."""

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
        self._headers = CIMultiDict(end_to_end(request.headers.items(), to_engine=True))
        if router.engine_token:
            self._headers["Authorization"] = f"Bearer {router.engine_token}"
        self._url = URL(f"http://replica{request.raw_path}", encoded=True)
        self._limit: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._is_lost = self._sent = False
        self._cut_for = "its replica is gone"

    async def run(self) -> web.StreamResponse:
        """The answer, of the first replica that gives one."""
        router, failed, without = self._router, 0, set[str]()
        router.budget = router.budget.came()
        began_s = time.monotonic()
        while True:
            replica = await router.replica_for(self._deadline_s, without)
            if replica is None:
                router.metrics.failed("deadline")
                return router.error(504, "no replica had room before the deadline of the request")
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
                router.metrics.failed("deadline" if left_s <= 0 else failure.failure.value)
                if left_s <= 0:
                    return router.error(504, f"no answer before the deadline of the request; the last try: {why}")
                return failure.answer or router.error(502, f"{failed} tries have failed, the last: {why}")
            if then.spends:
                router.budget = router.budget.spent()
            router.metrics.tried_again(failure.failure.value)
            if not others:
                without.clear()
            await asyncio.sleep(then.pause_s)

    def lost(self) -> None:
        """The replica that works on it is gone."""
        if self._sent:
            self._cut_off("its replica is gone")
        elif self._limit is not None:
            self._is_lost = True
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _cut_off(self, why: str) -> None:
        self._cut_for = why
        if self._response is not None:
            self._response.close()

    async def _try(self, replica: Replica) -> web.StreamResponse:
        """The answer of one replica.

        Raises:
            _Failed: there is none, and the client has not got a byte.
        """
        loop = asyncio.get_running_loop()
        self._is_lost, gone = False, replica.gone
        replica.errands.add(self)
        try:
            async with asyncio.timeout_at(loop.time() + self._deadline_s - time.monotonic()) as self._limit:
                return await self._ask(replica, gone)
        except TimeoutError as error:
            if self._is_lost:
                raise _Failed(Failure.LOST, "its replica is gone") from error
            raise _Failed(Failure.SICK, "no answer in time") from error
        finally:
            self._limit, self._response = None, None
            replica.errands.discard(self)

    async def _ask(self, replica: Replica, gone: asyncio.Event) -> web.StreamResponse:
        try:
            async with replica.session.request(
                self._request.method, self._url, headers=self._headers, data=self._body or None, allow_redirects=False,
                skip_auto_headers=AS_THEY_CAME,
            ) as response:  # fmt: skip
                if outcome_of_status(response.status) is not Outcome.ANSWER:
                    replica.breaker = replica.breaker.failed(time.monotonic())
                    after_s = retry_after_s(response.headers.get("Retry-After"), longest_s=self._config.max_delay_s)
                    answer = await self._whole(response, MAX_ERROR_BYTES)
                    raise _Failed(Failure.SICK, f"HTTP {response.status}", answer, after_s)
                replica.breaker = replica.breaker.succeeded()
                length = response.content_length
                if length is not None and length <= MAX_BUFFERED_BYTES:
                    return await self._whole(response, MAX_BUFFERED_BYTES)
                first = await response.content.readany()  # until it is there another replica can take over
                self._response = response
                return await self._pass_on(response, first)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            try:
                async with asyncio.timeout(WORD_S):
                    await gone.wait()
            except TimeoutError:
                replica.breaker = replica.breaker.failed(time.monotonic())
                raise _Failed(Failure.SICK, f"no answer: {error or type(error).__name__}") from error
            raise _Failed(Failure.LOST, "its replica is gone") from error

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
        headers.update(self._router.state_header())
        return headers

    async def _pass_on(self, response: aiohttp.ClientResponse, part: bytes) -> web.StreamResponse:
        """Part by part, as it comes, from the first one on.

        Here an answer that breaks off would be continued on another replica, where the engine can begin from a prefix.
        """
        answer = web.StreamResponse(status=response.status, reason=response.reason, headers=self._headers_of(response))
        if response.content_length is not None:
            answer.content_length = response.content_length
        assert self._limit is not None
        self._sent = True
        self._limit.reschedule(None)  # it has no second try any more; its deadline ends it in order
        loop = asyncio.get_running_loop()
        late = loop.call_later(self._deadline_s - time.monotonic(), self._cut_off, "the deadline of the request")
        last = b""
        try:
            if not await self._gives(answer.prepare(self._request)):
                return answer
            while part:
                if not await self._gives(answer.write(part)):
                    return answer
                last = (last + part)[-4:]
                try:
                    part = await response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    log.warning("an answer that had begun has no end: %s (%s)", self._cut_for, error)
                    self._router.metrics.failed("cut")
                    if response.content_type != "text/event-stream":
                        self._abort()
                        return answer
                    part = b"" if last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
                    part += _as_event(error_answer(502, f"the answer has no end: {self._cut_for}"))
                    await self._gives(answer.write(part))
                    break
            await self._gives(answer.write_eof())
        finally:
            late.cancel()
        return answer

    async def _gives(self, work: Any) -> bool:
        """Whether the client takes something; one that does not take it in time is cut off."""
        try:
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


def error_answer(status: int, why: str) -> dict[str, Any]:
    """An error of the router's own, in the form that clients of OpenAI's interface know."""
    return {"error": {"message": why, "type": "slurmft", "code": status}}


def _as_event(value: Any) -> bytes:
    return b"event: error\ndata: " + json.dumps(value).encode() + b"\n\n"
