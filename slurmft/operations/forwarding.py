"""One address for an endpoint, on the machine of its clients: each connection goes on to a router that lives.

Bytes pass unread, TLS included. A node that is powered off says nothing on its connections: the kernel asks it, and
ends them after about 4 s. While no router is reached, as between two jobs, connections wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.inference.endpoint import HighAvailabilityCluster, RouterAddress
from slurmft.ipc.channel import keep_alive, listening_socket

CONNECT_S, AGAIN_S = 1.0, 0.2
AVOIDED_S = 5.0
"""How long a router that was not reached is tried after the others."""

WAIT_S = 300.0
"""How long a connection waits for a router."""

LOST_S = 4
MOST = 1024
"""Connections at a time; one more waits until another one has ended."""


class Forwarder:
    """Passes connections at a port of the loopback address on to the routers of the run."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._turn = run_folder, 0
        self._avoided: dict[tuple[str, int], float] = {}
        self._room = asyncio.Semaphore(MOST)

    async def serve(self, port: int, on_ready: Callable[[int], None]) -> None:
        """Listen until cancelled; ``on_ready`` is given the port.

        Raises:
            OSError: the port is taken.
        """
        server = await asyncio.start_server(self._take, sock=listening_socket("127.0.0.1", port))
        async with server:
            on_ready(int(server.sockets[0].getsockname()[1]))
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            async with self._room:
                found = await self._connect(reader)
                ends.append(found[1])
                ways = [asyncio.ensure_future(_pass(*way)) for way in ((reader, found[1]), (found[0], writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:  # no router; TimeoutError as well
            pass
        finally:
            for end in ends:
                end.close()

    async def _connect(self, client: asyncio.StreamReader) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(WAIT_S):
            while not client.at_eof():
                for host, port in self._routers():
                    with contextlib.suppress(OSError):
                        async with asyncio.timeout(CONNECT_S):
                            reader, writer = await asyncio.open_connection(host, port)
                        keep_alive(writer.get_extra_info("socket"), LOST_S)
                        return reader, writer
                    self._avoided[host, port] = time.monotonic() + AVOIDED_S
                await asyncio.sleep(AGAIN_S)
        raise ConnectionResetError("the client is gone")

    def _routers(self) -> list[tuple[str, int]]:
        """By turns; those that were not reached lately come last."""
        routers: tuple[RouterAddress, ...] = ()
        with contextlib.suppress(StorageError, OSError):
            routers = HighAvailabilityCluster.read(self._run_folder).routers
        self._turn += 1
        now_s, found = time.monotonic(), [routers[(self._turn + place) % len(routers)] for place in range(len(routers))]
        places = [(host, each.port) for each in found for host in each.hosts]
        return sorted(places, key=lambda place: self._avoided.get(place, 0.0) > now_s)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
