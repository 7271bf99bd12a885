"""The agent's side of inference: the pool's replicas are its workers, forked, logged and killed like any other."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurmft.agent.environment import common_environment
from slurmft.agent.gpus import VISIBLE_VARIABLE, gpu_uuids
from slurmft.agent.router import ROUTER_COMMAND, NodeRouter, hosts_here
from slurmft.agent.workers import Worker, Workers
from slurmft.config.config import RunConfig
from slurmft.inference.driver import SETTINGS_VARIABLE
from slurmft.inference.pool import ReplicaPool
from slurmft.inference.replica import ReplicaSettings
from slurmft.inference.serving.router_settings import SETTINGS_VARIABLE as ROUTER_VARIABLE
from slurmft.inference.serving.router_settings import RouterSettings
from slurmft.inference.serving.updates import OWN_CONFIG, is_config_name
from slurmft.ipc.calls import BeginReplicas, Call, Drain, Lease, Members, RenewReplica
from slurmft.ipc.reports import ReplicaPhase, Sent
from slurmft.ipc.stacks import STOP_SIGNAL_VARIABLE
from slurmft.policy.inference.devices import devices_of
from slurmft.storage.run_folder import RunFolder
from slurmft.system.background import Background
from slurmft.system.foreign_text import one_line
from slurmft.system.opening import read_part, read_text

LOG_BYTES, MAX_WORDS = 4096, 300
COMMAND = (sys.executable, "-m", "slurmft.inference.driver")
SERVING_COMMAND = (sys.executable, "-m", "slurmft.inference.serving.driver")


class Replicas:
    """Connects the pool with the agent's workers.

    Replica ``n`` of node ``i`` is rank ``i * replicas_per_node + n``. On an endpoint each node has one rank more, for
    its router.
    """

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], workers: Workers, *, node: int, host: str,
        report: Callable[[Sent], None],
    ) -> None:  # fmt: skip
        assert config.inference is not None
        self._config, self._section, self._environment = config, config.inference, environment
        self._workers, self._node, self._host = workers, node, host
        self._run, self._attempt = RunFolder(config.run_folder), ""
        self._first = self._first_of(node)
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
                hosts=self._hosts, start=lambda socket, port: self._start_router(self._router_rank, socket, port),
                kill=lambda: workers.kill_one(self._router_rank),
                last_words=lambda: self._last_words(self._router_rank - self._first),
                report=report,
            )  # fmt: skip

    async def handle(self, call: Call[Any] | None) -> bool:
        """A call of the supervisor's; whether it was one for the replicas."""
        match call:
            case BeginReplicas():
                self._attempt = call.attempt
                if not self._logs:  # later the replicas have their names
                    self._first = self._first_of(call.node)
                if self._gpus is None:
                    self._gpus = await asyncio.to_thread(self._find_gpus)
                await self._pool.begin(epoch=call.epoch, generation=call.generation)
                if self._router is not None:
                    self._router.begin(call.epoch)
            case Members() if self._router is not None:
                await self._router.take(call)
                self._pool.want(call.on, call.epoch)
            case Lease():
                self._pool.lease(call.runs, call.alone, call.epoch, call.partials or ())
            case Drain():
                if self._draining is None or self._draining.done():
                    self._draining = asyncio.create_task(self._pool.drain(call.within_s))
            case RenewReplica() if call.replica < len(self._pool.replicas) and is_config_name(call.config):
                self._background.start(self._renew(call))
            case _:
                return False
        return True

    async def _renew(self, call: RenewReplica) -> None:
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

    @property
    def _router_rank(self) -> int:
        return self._first + self._section.replicas_per_node

    def _first_of(self, node: int) -> int:
        """The rank of a node's first replica; a node of an endpoint has one rank more, for its router."""
        return node * (self._section.replicas_per_node + (self._section.serving is not None))

    def on_exit(self, worker: Worker) -> None:
        """The driver of a replica has ended."""
        number = worker.rank - self._first
        if self._router is not None and worker.rank == self._router_rank:
            self._router.on_exit(worker.exit_code or 0)
        else:
            self._pool.on_exit(number, worker.exit_code or 0)

    def note_signal(self) -> None:
        """This node got a signal that asks for a stop."""
        self._pool.note_signal()

    async def close(self) -> None:
        """Stop looking after the replicas; the agent kills them."""
        if self._draining is not None:
            self._draining.cancel()
        await self._background.cancel_all()
        if self._router is not None:
            await self._router.close()
        await self._pool.close()

    def _with_hosts(self, report: Callable[[Sent], None]) -> Callable[[Sent], None]:
        """A replica of an endpoint is reported with the addresses at which routers find it."""

        def told(sent: Sent) -> None:
            is_found = isinstance(sent, ReplicaPhase) and sent.port is not None
            report(replace(sent, hosts=self._hosts) if is_found else sent)

        return told

    def _last_words(self, number: int) -> str:
        path = self._logs[number] / f"rank-{self._first + number}.log"
        with contextlib.suppress(OSError):
            lines = read_part(path, -LOG_BYTES, LOG_BYTES).decode(errors="replace").strip().splitlines()
            return one_line(lines[-1])[:MAX_WORDS] if lines else ""
        return ""

    def _find_gpus(self) -> list[str]:
        words = [word.strip() for word in self._environment.get(VISIBLE_VARIABLE, "").split(",") if word.strip()]
        return words or gpu_uuids(self._environment)

    def _start(self, number: int, socket: str, life: int) -> None:
        rank = self._first + number
        environment = common_environment(self._config, self._environment)
        if devices := devices_of(self._gpus or [], number, self._section.gpus_per_replica):
            environment[VISIBLE_VARIABLE] = ",".join(devices)
        command = COMMAND if self._section.serving is None else SERVING_COMMAND
        settings = ReplicaSettings(
            socket=socket, config=str(self._run.path / self._configs.get(number, OWN_CONFIG)),
            generation=self._pool.generation, node=self._node, replica=number, life=life,
            device="cuda" if devices else "",
        )  # fmt: skip
        environment[SETTINGS_VARIABLE] = settings.as_text()
        environment[STOP_SIGNAL_VARIABLE] = self._config.preemption.signal
        self._start_one(rank, environment, command)

    def _start_router(self, rank: int, socket: str, port: int) -> None:
        settings = RouterSettings(socket=socket, config=str(self._run.config), node=self._host, hosts=self._hosts,
                                  port=port)  # fmt: skip
        environment = common_environment(self._config, self._environment) | {ROUTER_VARIABLE: settings.as_text()}
        self._start_one(rank, environment, ROUTER_COMMAND)

    def _start_one(self, rank: int, environment: dict[str, str], command: Sequence[str]) -> None:
        self._logs[rank - self._first] = self._run.attempts / self._attempt
        self._workers.start_one(
            rank, environment, command=command, folder=self._config.trainer_directory,
            logs=self._logs[rank - self._first],
            verdict=self._run.verdicts / f"{self._attempt}.rank-{rank}.json",
            generation=self._pool.generation,
        )  # fmt: skip
