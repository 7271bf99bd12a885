"""The agent's side of inference: replicas of the pool as its workers, and the router of an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from slurmft.agent.workers import VISIBLE_VARIABLE, Worker, Workers, common_environment, gpu_uuids
from slurmft.config.inference import ServingConfig
from slurmft.config.run import RunConfig
from slurmft.inference.driver import SETTINGS_VARIABLE, ReplicaSettings
from slurmft.inference.endpoint import MAX_ADDRESSES, OWN_CONFIG, is_config_name, is_local
from slurmft.inference.pool import ReplicaPool, in_its_words
from slurmft.ipc import messages
from slurmft.ipc.channel import BadMessage
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE
from slurmft.policy.inference import Restarts, devices_of
from slurmft.policy.symptoms import words_of_end
from slurmft.storage.run_folder import RunFolder
from slurmft.system.background import Background, heard_awake, overslept_s
from slurmft.system.files import read_part, read_text
from slurmft.system.foreign_text import one_line

# --- router ---
# The agent's side of an endpoint's router: it is started and restarted here, and told which replicas there are.

ROUTER_COMMAND = (sys.executable, "-m", "slurmft.inference.router")
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
        report: Callable[[messages.Sent], None],
    ) -> None:  # fmt: skip
        self._config, self._socket, self._hosts = config, folder / "router.sock", hosts
        self._start, self._kill, self._last_words, self._report = start, kill, last_words, report
        self._epoch = 0
        self._none_failed = self._restarts = Restarts(max_restarts, window_s=config.restart_window_s)
        self._members = b""
        self._wanted = self._runs = self._leaves = False
        self._port, self._answered, self._load = config.port, 0, 0
        """The port stays the same over restarts: clients know it."""

        self._heard_s: float | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._background = Background()

    def begin(self, epoch: int, port: int) -> None:
        """Another attempt or connection begins; a router that lives goes on.

        Args:
            port: where an earlier router of this node listened; 0 for none.
        """
        self._epoch, self._restarts, self._port = epoch, self._none_failed, self._port or port
        if self._heard_s is not None:
            self._tell("ready")

    async def take(self, call: messages.Members) -> None:
        """The replicas as of now."""
        if call.epoch != self._epoch:
            return
        self._members, self._wanted = call.as_line(), call.router
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
        if self._heard_s is None and code > 0:
            self._port = self._config.port  # another process may have the one that this node had before
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
        how = await in_its_words(code, self._last_words)
        if self._leaves and self._wanted:  # it is wanted again
            self._start_now()
            return
        if not self._wanted:
            self._tell("ended")
            return
        self._restarts = self._restarts.failed(time.monotonic())
        delay_s = self._restarts.delay_s
        self._tell("died" if delay_s is not None else "down", how)
        if delay_s is None:
            self._wanted = False
            return
        await asyncio.sleep(delay_s)
        if self._wanted and not self._runs:
            self._start_now()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(BadMessage, ValueError, OSError, asyncio.CancelledError):
            self._writer = writer
            self._pass_on()
            while line := await reader.readline():
                self._hear(messages.RouterLives.parse(line, "what the router says"))
        writer.close()

    def _hear(self, told: messages.RouterLives) -> None:
        is_first, self._heard_s, self._port = self._heard_s is None, time.monotonic(), told.port
        if is_first or (told.answered, told.load) != (self._answered, self._load):
            self._answered, self._load = told.answered, told.load
            self._tell("ready")

    async def _watch(self) -> None:
        while True:
            asleep_s = await overslept_s(LOOK_S)
            if self._heard_s is not None:
                self._heard_s = heard_awake(self._heard_s, asleep_s)
                if time.monotonic() - self._heard_s > SILENT_S:
                    log.error("the router was silent for %.0f s; it is started again", SILENT_S)
                    self._heard_s = None
                    self._kill()

    def _pass_on(self) -> None:
        if self._writer is not None and not self._writer.is_closing() and self._members:
            self._writer.write(self._members)

    def _tell(self, phase: str, why: str = "") -> None:
        self._report(messages.RouterPhase(epoch=self._epoch, phase=phase, hosts=self._hosts, port=self._port,
                                          answered=self._answered, why=why[:2000], load=self._load))  # fmt: skip


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


# --- The agent's side of inference: the pool's replicas are its workers, forked, logged and killed like any other ---

LOG_BYTES, MAX_WORDS = 1 << 16, 600
COMMAND = (sys.executable, "-m", "slurmft.inference.driver")
SERVING_COMMAND = (sys.executable, "-m", "slurmft.inference.gate")


class NodeReplicas:
    """Connects the pool with the agent's workers.

    Replica ``n`` of node ``i`` is rank ``i * replicas_per_node + n``. On an endpoint each node has one rank more, for
    its router.
    """

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], workers: Workers, *, node: int, host: str,
        report: Callable[[messages.Sent], None],
    ) -> None:  # fmt: skip
        assert config.inference is not None
        self._config, self._section, self._environment = config, config.inference, environment
        self._workers, self._node, self._host = workers, node, host
        self._run, self._attempt = RunFolder(config.run_folder), ""
        self._first = self._first_of(node)
        self._behind = config.inference.replicas_per_node
        """The number of the node's router, which follows its replicas."""

        self._logs: dict[int, Path] = {}
        self._hosts = hosts_here(host, environment)
        self._gpus: list[str] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._background = Background()
        self._configs: dict[int, str] = {}
        """Of replicas that an update has changed: the configuration, as a path in the run folder."""

        self._pool = ReplicaPool(
            config.inference, run_folder=config.run_folder, folder=workers.folder, node=node, host=host,
            start=self._start, kill=lambda number: workers.kill_one(self._first + number),
            last_words=self._last_words, report=self._with_hosts(report),
        )  # fmt: skip
        self._router: NodeRouter | None = None
        if config.inference.serving is not None:
            self._router = NodeRouter(
                config.inference.serving, max_restarts=config.inference.max_restarts, folder=workers.folder,
                hosts=self._hosts, start=self._start_router, kill=lambda: workers.kill_one(self._first + self._behind),
                last_words=lambda: self._last_words(self._behind), report=report,
            )  # fmt: skip

    async def handle(self, call: messages.Call[Any] | None) -> bool:
        """A call of the supervisor's; whether it was one for the replicas."""
        match call:
            case messages.BeginReplicas():
                self._attempt = call.attempt
                if not self._logs:  # later the replicas have their names
                    self._first = self._first_of(call.node)
                if self._gpus is None:
                    self._gpus = await asyncio.to_thread(self._find_gpus)
                await self._pool.begin(epoch=call.epoch, generation=call.generation)
                if self._router is not None:
                    self._router.begin(call.epoch, call.router_port or 0)
            case messages.Members() if self._router is not None:
                await self._router.take(call)
                self._pool.want(call.on, call.epoch)
            case messages.JoinGang():
                self._pool.join_gang(call)
            case messages.Lease():
                self._pool.lease(call.runs, call.alone, call.epoch, call.partials or ())
            case messages.Drain():
                if self._draining is not None and not self._pool.is_draining:  # it has begun anew meanwhile
                    self._draining.cancel()
                    self._draining = None
                if self._draining is None or self._draining.done():
                    self._draining = asyncio.create_task(self._pool.drain(call.within_s))
            case messages.RenewReplica() if call.replica < len(self._pool.replicas) and is_config_name(call.config):
                self._background.start(self._renew(call))
            case _:
                return False
        return True

    async def _renew(self, call: messages.RenewReplica) -> None:
        before = self._configs.get(call.replica, OWN_CONFIG)
        # the run's own is that of the last update that was done
        is_same = before == call.config or await asyncio.to_thread(self._are_same, before, call.config)
        self._configs[call.replica] = call.config
        if is_same:
            self._pool.tell_state(self._pool.replicas[call.replica])
        else:
            await self._pool.renew(call.replica, call.within_s)

    def _are_same(self, *names: str) -> bool:
        try:
            return len({read_text(self._run.path / name) for name in names}) == 1
        except (OSError, UnicodeDecodeError):
            return False

    def _first_of(self, node: int) -> int:
        """The rank of a node's first replica; a node of an endpoint has one rank more, for its router."""
        return node * (self._section.replicas_per_node + (self._section.serving is not None))

    def on_exit(self, worker: Worker) -> None:
        """The driver of a replica has ended."""
        number = worker.rank - self._first
        if self._router is not None and number == self._behind:
            self._router.on_exit(worker.exit_code or 0)
        else:
            self._pool.on_exit(number, worker.exit_code or 0)

    def note_signal(self) -> None:
        """This node got a signal that asks for a stop."""
        self._pool.note_signal()

    def end(self) -> None:
        """The agent kills all of them: no request is the reason of those deaths, and nothing is started again."""
        self._pool.is_draining = True

    async def close(self) -> None:
        """Stop looking after the replicas; the agent kills them."""
        if self._draining is not None:
            self._draining.cancel()
        await self._background.cancel_all()
        if self._router is not None:
            await self._router.close()
        await self._pool.close()

    def _with_hosts(self, report: Callable[[messages.Sent], None]) -> Callable[[messages.Sent], None]:
        """A replica of an endpoint is reported with the addresses at which routers find it."""

        def told(sent: messages.Sent) -> None:
            is_found = isinstance(sent, messages.ReplicaPhase) and sent.port is not None
            report(replace(sent, hosts=self._hosts) if is_found else sent)

        return told

    def _last_words(self, number: int) -> str:
        path = self._logs[number] / f"rank-{self._first + number}.log"
        with contextlib.suppress(OSError):
            return one_line(words_of_end(read_part(path, -LOG_BYTES, LOG_BYTES).decode(errors="replace")))[:MAX_WORDS]
        return ""

    def _find_gpus(self) -> list[str]:
        words = [word.strip() for word in self._environment.get(VISIBLE_VARIABLE, "").split(",") if word.strip()]
        return words or gpu_uuids(self._environment)

    def _start(self, number: int, socket: str, life: int) -> None:
        environment = common_environment(self._config, self._environment)
        if devices := devices_of(self._gpus or [], number, self._section.gpus_per_replica):
            environment[VISIBLE_VARIABLE] = ",".join(devices)
        command = COMMAND if self._section.serving is None else SERVING_COMMAND
        part = self._pool.replicas[number].part or messages.JoinGang(epoch=0)
        settings = ReplicaSettings(
            socket=socket, config=str(self._run.path / self._configs.get(number, OWN_CONFIG)),
            generation=self._pool.generation, node=self._node, replica=number, life=life,
            device="cuda" if devices else "", rank=part.rank or 0, head=part.head,
        )  # fmt: skip
        environment[SETTINGS_VARIABLE] = settings.as_text()
        environment[STOP_SIGNAL_VARIABLE] = self._config.preemption.signal
        self._start_one(number, environment, command)

    def _start_router(self, socket: str, port: int) -> None:
        settings = messages.RouterSettings(
            socket=socket, config=str(self._run.config), node=self._host, hosts=self._hosts, port=port
        )
        environment = common_environment(self._config, self._environment)
        self._start_one(self._behind, environment | {messages.ROUTER_VARIABLE: settings.as_text()}, ROUTER_COMMAND)

    def _start_one(self, number: int, environment: dict[str, str], command: Sequence[str]) -> None:
        rank, logs = self._first + number, self._run.attempts / self._attempt
        self._logs[number] = logs
        self._workers.start_one(
            rank, environment, command=command, folder=self._config.trainer_directory, logs=logs,
            verdict=self._run.verdicts / f"{self._attempt}.rank-{rank}.json", generation=self._pool.generation,
        )  # fmt: skip
