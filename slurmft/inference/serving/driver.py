"""The driver of one replica of an endpoint: starts its engine, and lets the routers through to it.

    python -m slurmft.inference.serving.driver      (forked by the agent's zygote)

It speaks with its agent as the driver of a batch does (``inference.driver``), and tells it how many requests have begun
and ended, and whether bytes or tokens came: by that the agent judges a hang. When the engine ends, the driver ends with
its code; when the agent is gone, so is the driver.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from slurmft.config.inference import InferenceConfig
from slurmft.inference.driver import (
    EXIT_SICK,
    MAX_LINE_BYTES,
    TOKENS_LOOKS,
    drive,
    exit_code_of,
)
from slurmft.inference.engines import HttpEngine
from slurmft.inference.replica import ReplicaSettings
from slurmft.inference.serving.endpoint import is_local, key_of
from slurmft.inference.serving.gate import Gate
from slurmft.inference.serving.updates import OWN_CONFIG
from slurmft.policy.inference.poison import has_crashed
from slurmft.system.processes import allow_descriptors

TELL_S = 0.05
DRAINED_LOOK_S = 0.02
QUEUED_S, QUEUED_LOOK_S = 10.0, 0.005
"""How long a connection waits for an engine that does not keep up with taking them."""

SHUT_S = 3.0
DESCRIPTORS = 65_536
"""What a gate wants, where the hard limit allows it: two for each request, of all routers."""

LAST_WORDS_S = 0.1
"""Between the last word to the routers and the end, so that they hear it before the connection ends."""

log = logging.getLogger(__name__)


class ServingDriver:
    """One replica, from its engine's start to its end."""

    def __init__(self, settings: ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config = settings, config
        self._engine = HttpEngine(config, settings.replica)
        self._gate = Gate(key_of(run_folder), self._connect)
        self._host = "127.0.0.1" if is_local(os.environ) else None
        self._writer: asyncio.StreamWriter | None = None
        self._refuses_since_s = 0.0
        self._shut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Work until the agent says so or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the engine cannot be started.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._settings.socket, limit=MAX_LINE_BYTES)
        self._send(kind="hello", replica=self._settings.replica, life=self._settings.life)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            await self._engine.start()
            if Path(self._settings.config).name != OWN_CONFIG:
                await self._engine.canary()  # of an update: the old engine is not given up for one that refuses all
            allow_descriptors(DESCRIPTORS)  # not the engine's, which has been started
            port = await self._gate.listen(self._host)
            self._send(kind="ready", slots=self._config.concurrency, port=port)
            return await self._work(hearing)
        finally:
            self._gate.close()
            await self._engine.close()

    async def _work(self, hearing: asyncio.Task[None]) -> int:
        ended = asyncio.create_task(self._engine.ended())
        tasks = [asyncio.create_task(work()) for work in (self._tell_load, self._watch_tokens)]
        waits: list[asyncio.Future[Any]] = [hearing, ended, self._shut, *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        self._gate.say("ended", crashed=ended.done() and has_crashed(ended.result()))
        if ended.done():
            await asyncio.sleep(LAST_WORDS_S)
            sys.stderr.write(f"slurmft: the engine has ended with {ended.result()}\n")
            return exit_code_of(ended.result())
        if self._shut.done():
            sys.stderr.write(f"slurmft: the engine lives, and has taken no connection for {SHUT_S:.0f} s\n")
            return EXIT_SICK
        return 0

    async def _connect(self, protocol: Any) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(self._engine.place, str):
                await loop.create_unix_connection(protocol, sock=await unix_connection(self._engine.place))
            else:
                await loop.create_connection(protocol, "127.0.0.1", self._engine.place)
        except (ConnectionRefusedError, FileNotFoundError):  # one that waits for its own processes at its end
            self._refuses_since_s = self._refuses_since_s or time.monotonic()
            if time.monotonic() - self._refuses_since_s > SHUT_S and not self._shut.done():
                self._shut.set_result(None)
            raise
        self._refuses_since_s = 0.0

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Return when there is nothing more to do: the agent is gone, or all that was in flight is finished."""
        while line := await reader.readline():
            if json.loads(line)["kind"] == "drain":
                self._gate.say("draining")
                while self._gate.in_flight:
                    await asyncio.sleep(DRAINED_LOOK_S)
                return

    async def _tell_load(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            begun, done = self._gate.counted()
            moved, self._gate.moved = self._gate.moved, False
            if begun or done or moved:
                self._send(kind="load", begun=begun, completed=done)

    async def _watch_tokens(self) -> None:
        """An engine may make tokens for a long answer without sending a byte of it."""
        last, pause_s = None, max(0.05, min(5.0, self._config.hang_timeout_s / TOKENS_LOOKS))
        while True:
            await asyncio.sleep(pause_s)
            if self._gate.in_flight and (count := await self._engine.tokens()) is not None:
                if last is not None and count > last:
                    self._send(kind="tokens", count=count)
                last = count

    def _send(self, **message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


async def unix_connection(path: str) -> socket.socket:
    """A connection to a Unix socket, also while more clients come than it takes at once.

    The kernel refuses one that finds the queue full with EAGAIN, which asyncio takes for "will be connected soon".

    Raises:
        OSError: nothing listens there, or the queue stays full.
    """
    until_s = time.monotonic() + QUEUED_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(path)
        except BlockingIOError:
            connection.close()
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(QUEUED_LOOK_S)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


if __name__ == "__main__":
    os._exit(drive(ServingDriver))
