"""Strangers that hold connections of a router open, and real clients among them.

python serving_strangers.py RUN_FOLDER STRANGERS SECONDS    prints one line of JSON; longer, until all have been there

Each stranger says nothing, half a request or half a TLS hello, and comes again as soon as it is cut off. Each client
shows the token, connects anew for every request, and comes from another address (127.0.0.2): of one address a router
cannot tell them apart before the token is there, and closes the oldest.
"""

import asyncio
import json
import ssl
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from slurmft.inference.endpoint import HighAvailabilityCluster, ca_file, token_of
from slurmft.system.processes import allow_descriptors

CLIENTS, AT_ONCE = 10, 200
"""Clients with one request at a time; connections that are opened at the same time."""

SAID = (b"", b"GET", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ", b"\x16\x03\x01",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{", b"\x16\x03\x01\x02\x00\x01\x00")  # fmt: skip


class Siege:
    """All connections to one router."""

    def __init__(self, run_folder: Path, strangers: int, seconds: float) -> None:
        self._strangers = strangers
        self._url = HighAvailabilityCluster.read(run_folder).routers[0].urls[0]
        own, token = ca_file(run_folder), token_of(run_folder)
        self._trusted = ssl.create_default_context(cafile=str(own)) if own.exists() else True
        self._headers = {"Authorization": f"Bearer {token}", "Connection": "close"}
        self._until_s, self._opening = time.monotonic() + seconds, asyncio.Semaphore(AT_ONCE)
        self.opened = self.refused = self.open = self.most = 0
        self.errors: Counter[str] = Counter()
        self.took_s: list[float] = []

    async def run(self) -> None:
        known = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        others = [asyncio.create_task(self._stranger(SAID[number % len(SAID)])) for number in range(self._strangers)]
        await asyncio.gather(*known)
        for each in others:
            each.cancel()

    async def _stranger(self, said: bytes) -> None:
        place = urlsplit(self._url)
        while True:
            try:
                async with self._opening:
                    reader, writer = await asyncio.open_connection(place.hostname, place.port)
            except OSError:
                self.refused += 1
                await asyncio.sleep(1)
                continue
            self.opened, self.open = self.opened + 1, self.open + 1
            self.most = max(self.most, self.open)
            with suppress(OSError):
                writer.write(said)
                while await reader.read(1 << 12):
                    pass
            self.open -= 1
            writer.transport.abort()

    async def _client(self) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        while (began_s := time.monotonic()) < self._until_s or self.opened < self._strangers:
            try:
                connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
                timeout = aiohttp.ClientTimeout(total=60)
                async with (
                    aiohttp.ClientSession(headers=self._headers, connector=connector, timeout=timeout) as session,
                    session.post(f"{self._url}/v1/chat/completions", json=body, ssl=self._trusted) as answer,
                ):
                    is_right = answer.status == 200 and b'"choices"' in await answer.read()
                    self.errors[f"HTTP {answer.status}"] += not is_right
            except (aiohttp.ClientError, OSError) as error:
                self.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            self.took_s.append(time.monotonic() - began_s)


async def main() -> None:
    siege = Siege(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    await siege.run()
    cuts = statistics.quantiles(siege.took_s, n=100)
    told = {"opened": siege.opened, "at_once": siege.most, "refused": siege.refused, "asked": len(siege.took_s),
            "errors": +siege.errors, "p50_s": round(cuts[49], 3), "p99_s": round(cuts[98], 3)}  # fmt: skip
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    allow_descriptors(1 << 16)
    asyncio.run(main())
