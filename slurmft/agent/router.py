"""The agent's side of an endpoint's router: it is started and restarted here, and told which replicas there are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from slurmft.config.serving import ServingConfig
from slurmft.inference.replica import EXIT_CODE, how_it_ended
from slurmft.inference.replica_health import AutoRestartManager
from slurmft.inference.serving.endpoint import MAX_ADDRESSES, is_local
from slurmft.ipc.calls import Members
from slurmft.ipc.reports import RouterPhase, Sent
from slurmft.system.background import Background
from slurmft.system.sleeping import overslept_s

ROUTER_COMMAND = (sys.executable, "-m", "slurmft.inference.serving.entry")
SILENT_S = 10.0
"""A router that does not say for so long that it lives is killed: it says so every second."""

LOOK_S = 0.5
LEAVE_S = 600.0
"""How long a router that is not wanted any more has for what it has in flight, while its agent lives."""

MAX_LINE_BYTES = 4096

log = logging.getLogger(__name__)


class NodeRouter:
    """The router of this node, where it is to have one.

    Args:
        start: starts its process, with the path of our socket and a port, which is 0 for a free one.
        kill: kills its process.
        last_words: the last line of its log.
        report: sends a report to the supervisor.
    """

    def __init__(
        self, config: ServingConfig, *, max_restarts: int, folder: Path, hosts: tuple[str, ...],
        start: Callable[[str, int], None], kill: Callable[[], None], last_words: Callable[[], str],
        report: Callable[[Sent], None],
    ) -> None:  # fmt: skip
        self._config, self._max_restarts, self._socket, self._hosts = (
            config,
            max_restarts,
            folder / "router.sock",
            hosts,
        )
        self._start, self._kill, self._last_words, self._report = start, kill, last_words, report
        self._epoch = 0
        self._manager = self._new_manager()
        self._members = b""
        self._wanted = self._runs = self._leaves = False
        self._port, self._answered, self._load = config.port, 0, 0
        """The port stays the same over restarts: clients know it."""

        self._heard_s: float | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._background = Background()

    def begin(self, epoch: int) -> None:
        """Another attempt or connection begins; a router that lives goes on."""
        self._epoch, self._manager = epoch, self._new_manager()
        if self._heard_s is not None:
            self._tell("ready")

    async def take(self, call: Members) -> None:
        """The replicas as of now."""
        if call.epoch != self._epoch:
            return
        told = {"expected": call.expected, "replicas": [each.as_mapping() for each in call.replicas],
                "leave": not call.router, "closing": bool(call.closing)}  # fmt: skip
        self._members, self._wanted = json.dumps(told).encode() + b"\n", call.router
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, self._socket, limit=MAX_LINE_BYTES)
            self._background.start(self._watch())
        self._pass_on()
        if self._wanted and not self._runs:
            self._start_now()
        elif not self._wanted and self._runs and not self._leaves:
            self._leaves = True
            self._background.start(self._kill_in(LEAVE_S))

    def on_exit(self, code: int) -> None:
        """Its process has ended."""
        self._runs, self._heard_s, self._writer = False, None, None
        self._background.start(self._bury(code))

    async def close(self) -> None:
        """Stop looking after it; the agent kills it."""
        await self._background.cancel_all()
        if self._server is not None:
            self._server.close()

    def _start_now(self) -> None:
        self._runs, self._leaves, self._heard_s = True, False, None
        try:
            self._start(str(self._socket), self._port)
        except (OSError, ValueError) as error:
            self._runs = False
            self._tell("down", str(error))

    async def _kill_in(self, seconds: float) -> None:
        """A router that is not wanted any more leaves by itself; one that does not is killed."""
        until_s = time.monotonic() + seconds
        while self._runs and not self._wanted:
            if time.monotonic() > until_s:
                self._kill()
                return
            await asyncio.sleep(LOOK_S)

    async def _bury(self, code: int) -> None:
        how = how_it_ended(code)
        if how.startswith(EXIT_CODE) and (words := await asyncio.to_thread(self._last_words)):
            how += f"; its last words: {words}"
        if self._leaves and self._wanted:  # it is wanted again
            self._start_now()
            return
        if not self._wanted:
            self._tell("ended")
            return
        delay_s = self._manager.failed(0)
        self._tell("died" if delay_s is not None else "down", how)
        if delay_s is None:
            self._wanted = False
            return
        await asyncio.sleep(delay_s)
        if self._wanted and not self._runs:
            self._start_now()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError, asyncio.CancelledError):
            self._writer = writer
            self._pass_on()
            while line := await reader.readline():
                self._hear(json.loads(line))
        writer.close()

    def _hear(self, message: Mapping[str, Any]) -> None:
        is_first, self._heard_s = self._heard_s is None, time.monotonic()
        if message["kind"] == "ready":
            self._port = int(message["port"])
        now = answered, load = int(message.get("answered", 0)), int(message.get("load", 0))
        if is_first or now != (self._answered, self._load):
            self._answered, self._load = answered, load
            self._tell("ready")

    async def _watch(self) -> None:
        while True:
            asleep_s = await overslept_s(LOOK_S)
            if self._heard_s is not None:
                self._heard_s += asleep_s
                if time.monotonic() - self._heard_s > SILENT_S:
                    log.error("the router was silent for %.0f s; it is started again", SILENT_S)
                    self._heard_s = None
                    self._kill()

    def _pass_on(self) -> None:
        if self._writer is not None and not self._writer.is_closing() and self._members:
            self._writer.write(self._members)

    def _tell(self, phase: str, why: str = "") -> None:
        self._report(RouterPhase(epoch=self._epoch, phase=phase, hosts=self._hosts, port=self._port,
                                 answered=self._answered, why=why[:2000], load=self._load))  # fmt: skip

    def _new_manager(self) -> AutoRestartManager:
        return AutoRestartManager(self._max_restarts, window_s=self._config.restart_window_s)


def hosts_here(host: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names and addresses by which others find this node, best first; without Slurm only this machine itself does."""
    if is_local(environment):
        return ("127.0.0.1",)
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return tuple(dict.fromkeys([host, *addresses]))[:MAX_ADDRESSES]
