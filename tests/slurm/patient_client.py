"""A client of an endpoint that asks again, another router where there is one, until its deadline, as docs say."""

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import Container
from pathlib import Path
from typing import Any, Self

import aiohttp

from slurmft.errors import SlurmftError
from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, token_of

PASSING = (429, 502, 503, 504)
LONGEST_PAUSE_S = 2.0
LOOK_S = 1.0


class NoAnswer(Exception):
    """There was none before the deadline."""


class PatientClient:
    """For one event loop."""

    def __init__(self, run_folder: Path, passing: Container[int] = PASSING) -> None:
        self._run_folder, self._passing = run_folder, passing

    async def __aenter__(self) -> Self:
        own = ca_file(self._run_folder)
        trusted = ssl.create_default_context(cafile=str(own)) if own.exists() else True
        connector = aiohttp.TCPConnector(limit=0, ssl=trusted)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _urls(self) -> list[str]:
        return [url for router in HighAvailabilityCluster.read(self._run_folder).routers for url in router.urls]

    async def _once(self, url: str, path: str, body: Any, headers: dict[str, str], left_s: float) -> tuple[int, bytes]:
        async with asyncio.timeout(left_s), self._session.post(url + path, json=body, headers=headers) as found:
            return found.status, await found.read()

    async def post(self, path: str, body: Any, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Status and content; a stream that breaks off is asked for again from its beginning."""
        until_s, why, pause_s = time.monotonic() + timeout_s, "", 0.05
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                routers = HighAvailabilityCluster.read(self._run_folder).routers
                url = random.choice(random.choice(routers).urls) if routers else "http://no.router.invalid"
                headers = {"Authorization": f"Bearer {token_of(self._run_folder)}", "X-Request-Timeout": str(left_s)}
                asked = asyncio.ensure_future(self._once(url, path, body, headers, left_s))
                while not asked.done():
                    await asyncio.wait({asked}, timeout=LOOK_S)
                    if not asked.done() and url not in self._urls():
                        asked.cancel()  # its node is gone, which no packet says
                        raise OSError("its router is no more")
                status, content = asked.result()
                is_cut = b"event: error\ndata: " in content and b'"slurmft"' in content
                if status not in self._passing and status != 401 and not is_cut:
                    return status, content
                why = f"HTTP {status}: {content[-300:]!r}"
            except (aiohttp.ClientError, OSError, SlurmftError) as error:
                why = why if isinstance(error, TimeoutError) and why else f"{type(error).__name__}: {error}"
            await asyncio.sleep(random.uniform(0, pause_s))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        raise NoAnswer(f"none within {timeout_s:g} s; the last try: {why}")


def post_once(run_folder: Path, path: str, body: Any, *, timeout_s: float = 60.0) -> tuple[int, bytes]:
    """For code without an event loop."""

    async def work() -> tuple[int, bytes]:
        async with PatientClient(run_folder) as client:
            return await client.post(path, body, timeout_s=timeout_s)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(work())
