"""An endpoint from outside of its job: its secrets, which router lives, as a client finds out, its updates, and one
address for it on the machine of its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slurmft.errors import LaunchError, StorageError, UsageError
from slurmft.inference.endpoint import (
    HighAvailabilityCluster,
    RouterAddress,
    State,
    ask,
    headers_file,
    prepare,
    prepare_authority,
    read_update,
    write_update,
)
from slurmft.ipc.channel import keep_alive, listening_socket
from slurmft.operations.control import is_alive
from slurmft.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig

TRY_S = 2.0
LOOK_AT_UPDATE_S = 0.2
ALIVE_S = 10.0
"""How often an update that waits for its end looks whether the run has one."""


def prepare_endpoint(settings: RunConfig) -> Path:
    """Make the run folder and the secrets of the endpoint; returns the file with the header that has the token.

    Raises:
        UsageError: the user's token cannot be used, or no certificate be made.
        StorageError: the run folder cannot be written.
    """
    if settings.serving is None:
        raise TypeError("this configuration has no section inference.serving")
    run = RunFolder(settings.run_folder)
    run.create()
    prepare(run.path, settings.serving.token_file)
    if settings.serving.tls_own:
        prepare_authority(run.path)
    return headers_file(run.path)


def living_url(run: RunFolder, *, within_s: float = 0.0) -> str:
    """The address of a router that takes connections.

    Raises:
        LaunchError: there is none within these seconds.
        StorageError: ``endpoints.json`` cannot be read or believed.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        cluster = HighAvailabilityCluster.read(run.path)
        for url in [url for router in cluster.routers for url in router.urls]:
            if _answers(url):
                return url
        if time.monotonic() >= deadline_s:
            names = ", ".join(each.node for each in cluster.routers)
            what = f"none of its routers answers ({names})" if names else "it has no router at the moment"
            raise LaunchError(f"the endpoint {run.path.name} cannot be reached: {what}",
                              hint=f"slurmft status {run.path}; slurmft explain {run.path}")  # fmt: skip
        time.sleep(LOOK_AT_UPDATE_S)


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=TRY_S).close()
    except OSError:
        return False
    return True


def engine_keys(settings: RunConfig) -> list[str]:
    """The settings that an update to ``settings`` changes.

    Raises:
        UsageError: none, or one that only another submission can change.
        StorageError: there is no such run.
    """
    run = RunFolder(settings.run_folder)
    if not run.config.is_file():
        raise UsageError(f"{run.path} is no endpoint yet", hint="slurmft serve without --update starts it")
    run.refuse_foreign()
    from slurmft.config.run import load  # more than other verbs need
    from slurmft.policy.serving import changed_keys, refused_keys

    changed = changed_keys(load(run.config).model_dump(mode="json"), settings.model_dump(mode="json"))
    if refused := refused_keys(changed):
        raise UsageError(
            f"an update changes the engine alone, but these differ as well: {', '.join(refused)}",
            hint=f"slurmft stop {run.path}, and serve again",
        )
    if not changed:
        raise UsageError(f"{run.path.name} has this engine already")
    return changed


def update_engine(settings: RunConfig, tell: Callable[[str], None]) -> str:
    """Have the endpoint's replicas replaced; what has become of it, in words.

    Raises:
        UsageError: that cannot be updated, or an update is under way.
        LaunchError: it went back to the old engine, or the run ended first.
        StorageError: the run folder cannot be read or written.
    """
    keys, run = engine_keys(settings), RunFolder(settings.run_folder)
    if not is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint="slurmft serve without --update starts it")
    asked, told = ask(run, settings.as_yaml()), ""
    tell(f"update {asked.number} of {run.path.name}: {', '.join(keys)}")
    looked_s = time.monotonic()
    while True:
        time.sleep(LOOK_AT_UPDATE_S)
        seen = read_update(run)
        if seen is None or seen.number != asked.number:
            raise StorageError(f"update {asked.number} of {run.path.name} is not recorded any more")
        if seen.state is State.DONE:
            return f"update {seen.number} is done: all {seen.total} replicas have the new engine"
        if seen.state is State.BACK:
            raise LaunchError(f"update {seen.number} went back to the old engine: {seen.reason}",
                              hint=f"slurmft explain {run.path}")  # fmt: skip
        words = f"{seen.renewed} of {seen.total} replicas have the new engine"
        if seen.state is State.ROLLING and words != told:
            told = words
            tell(words)
        if time.monotonic() - looked_s > ALIVE_S:
            looked_s = time.monotonic()
            if not is_alive(run):
                _undo(run, asked.number)
                raise LaunchError(f"run {run.path.name} ended before update {asked.number} was done; "
                                  "its next start has the old engine")  # fmt: skip


def _undo(run: RunFolder, number: int) -> None:
    with run.lock():
        found = read_update(run)
        if found is not None and found.number == number and found.is_open:
            write_update(run, replace(found, state=State.BACK, reason="the run ended"))


# --- One address for an endpoint, on the machine of its clients: each connection goes on to a router that lives ---
# Bytes pass unread, TLS included. A node that is powered off says nothing on its connections: the kernel asks it, and
# ends them after about 4 s. While no router is reached, as between two jobs, connections wait.

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
