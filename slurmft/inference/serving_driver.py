"""The driver of one replica of an endpoint: starts its engine, and lets the routers through to it.

    python -m slurmft.inference.serving_driver      (forked by the agent's zygote)

It speaks with its agent as the driver of a batch does (``inference.driver``), and tells it how many requests the engine
works on, and whether bytes of answers or tokens came: by that the agent judges a hang. When the engine ends, or fails
whatever it is asked, the driver ends with its code; when the agent is gone, so is the driver.
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
from slurmft.errors import StorageError
from slurmft.inference import driver
from slurmft.inference.endpoint import OWN_CONFIG, is_local, key_of
from slurmft.inference.gate import Gate
from slurmft.policy.inference import has_crashed
from slurmft.policy.serving import FAILURES_TO_AVOID
from slurmft.storage.published_weights import WEIGHTS_LOOK_S, read_published
from slurmft.system.processes import allow_descriptors

TELL_S = 0.05
DRAINED_LOOK_S = 0.02
SICK_LOOK_S = 0.25
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

    def __init__(self, settings: driver.ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config = settings, config
        self._run_folder = run_folder
        self._engine = driver.HttpEngine(
            config, settings.replica, head=driver.head_of(settings, config, run_folder, self._send)
        )
        self._gate = Gate(key_of(run_folder), self._connect)
        self._host = "127.0.0.1" if is_local(os.environ) else None
        self._writer: asyncio.StreamWriter | None = None
        self._refuses_since_s = 0.0
        self._shut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._proving: asyncio.Task[None] | None = None
        self._working = self._proved = 0
        """Requests that the agent knows of, and the smallest ones that were asked."""

    async def run(self) -> int:
        """Work until the agent says so or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the engine cannot be started.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._settings.socket, limit=driver.MAX_LINE_BYTES)
        self._send(kind="hello", replica=self._settings.replica, life=self._settings.life)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            await self._engine.start()
            if Path(self._settings.config).name != OWN_CONFIG:
                await self._engine.canary()  # of an update: the old engine is not given up for one that refuses all
            allow_descriptors(DESCRIPTORS)  # not the engine's, which has been started
            if self._config.serving and self._config.serving.weights.update_path:
                self._gate.keep()  # until it has what is published
            port = await self._gate.listen(self._host)
            self._send(kind="ready", slots=self._config.concurrency, port=port)
            return await self._work(hearing)
        finally:
            self._gate.close()
            await self._engine.close()

    async def _work(self, hearing: asyncio.Task[None]) -> int:
        ended = asyncio.create_task(self._engine.ended())
        sick = asyncio.create_task(self._watch_failures())
        outdated = asyncio.create_task(self._keep_weights())
        progress = driver.watch_progress(self._engine, self._config.hang_timeout_s, self._load, self._send)
        tasks = [asyncio.create_task(work) for work in (self._tell_load(), progress)]
        waits: list[asyncio.Future[Any]] = [hearing, ended, sick, outdated, self._shut, *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, sick, outdated):
            if task.done() and (error := task.exception()) is not None:
                raise error
        ended_before = self._gate.ended
        self._gate.say("ended", crashed=ended.done() and has_crashed(ended.result()))
        if sick.done():
            await asyncio.sleep(LAST_WORDS_S)
            sys.stderr.write(f"slurmft: the engine fails every request: {sick.result()}\n")
            return driver.EXIT_SICK
        if ended.done():
            await asyncio.sleep(LAST_WORDS_S)
            # what has come in the last moment counts, and what its end has ended does not
            self._tell(self._gate.in_flight + self._gate.ended - ended_before, 0)
            sys.stderr.write(f"slurmft: the engine has ended with {ended.result()}\n")
            return driver.exit_code_of(ended.result())
        if outdated.done():
            sys.stderr.write(f"slurmft: the engine does not take the published weights: {outdated.result()}\n")
            return driver.EXIT_SICK
        if self._shut.done():
            sys.stderr.write(f"slurmft: the engine lives, and has taken no connection for {SHUT_S:.0f} s\n")
            return driver.EXIT_SICK
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
            kind = json.loads(line)["kind"]
            if kind == "prove":
                self._gate.suspect(is_suspected=True)
                self._proving = asyncio.create_task(self._prove())
            elif kind == "drain":
                self._gate.say("draining")
                while self._gate.in_flight:
                    await asyncio.sleep(DRAINED_LOOK_S)
                return

    async def _tell_load(self) -> None:
        ended = 0
        while True:
            await asyncio.sleep(TELL_S)
            moved, self._gate.moved = self._gate.moved, False
            if moved:
                self._send(kind="progress")
            new, ended = self._gate.ended - ended, self._gate.ended
            self._tell(self._gate.working, new)

    def _tell(self, working: int, completed: int) -> None:
        more, self._working = working - self._working, working
        if more or completed:
            self._send(kind="load", more=more, completed=completed)

    def _load(self) -> driver.Load:
        return driver.Load(self._working, self._gate.ended + self._proved, self._gate.patience)

    async def _prove(self) -> None:
        if await driver.works(self._engine, self._gate.proof(is_answered=False)):
            self._send(kind="progress")
        self._proved += 1

    async def _watch_failures(self) -> str:
        """Return, with the reason, when the engine lives and fails whatever it is asked."""
        good = bad = row = 0
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(SICK_LOOK_S)
            (good_before, bad_before), (good, bad) = (good, bad), self._gate.outcomes
            row += max(0, bad - bad_before)
            if good > good_before or not row:
                row, since_s = 0, time.monotonic()
            if row < FAILURES_TO_AVOID:
                continue
            proof = self._gate.proof(is_answered=True)
            if await driver.works(self._engine, proof):
                row, self._proved = 0, self._proved + 1
            # without a small request to ask it, what fails may all be of one client's making
            elif proof is not None or time.monotonic() - since_s > self._config.hang_timeout_s:
                return f"{row} in a row{', and the smallest one' if proof else ''}"

    async def _keep_weights(self) -> str:
        """Give the engine the newest published weights, again and again; returns why where it hangs over them.

        Routers begin nothing on it from the first look at a publication until the engine has it: after an update that
        failed what it has is unknown.
        """
        assert self._config.serving is not None
        settings, failed, told = self._config.serving.weights, 0, ""
        if settings.update_path is None:
            return await asyncio.Future[str]()
        while True:
            try:
                newest = await asyncio.to_thread(read_published, self._run_folder)
                if newest is not None and newest.served != self._gate.weights:
                    await self._gate.emptied()
                    await self._engine.take_weights(settings, newest.path, newest.version)
                    log.info("the engine has version %d of the weights, from %s", newest.version, newest.path)
                    self._gate.weights = newest.served
                self._gate.resume()
            except TimeoutError:
                return f"no answer to {settings.update_path} within {settings.update_timeout_s:g} s"
            except (driver.Again, StorageError) as error:
                if str(error) != told:
                    log.warning("the engine does not have the published weights, trying again: %s", error)
                told, failed = str(error), failed + 1
                await asyncio.sleep(min(self._config.max_delay_s, self._config.base_delay_s * 2.0 ** min(failed, 30)))
            else:
                failed, told = 0, ""
                await asyncio.sleep(WEIGHTS_LOOK_S)

    def _send(self, **message: Any) -> None:
        if message["kind"] == "progress":
            self._gate.suspect(is_suspected=False)
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
    os._exit(driver.drive(ServingDriver))
