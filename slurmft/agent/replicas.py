"""The agent's side of inference: the pool's replicas are its workers, forked, logged and killed like any other."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from slurmft.agent.environment import common_environment
from slurmft.agent.gpus import VISIBLE_VARIABLE, gpu_uuids
from slurmft.agent.workers import PRELOAD, Worker, Workers
from slurmft.config.config import RunConfig
from slurmft.inference.driver import SETTINGS_VARIABLE, ReplicaSettings
from slurmft.inference.pool import ReplicaPool
from slurmft.ipc.calls import BeginReplicas, Call, Drain, Lease
from slurmft.ipc.reports import Sent
from slurmft.policy.inference.devices import devices_of
from slurmft.storage.run_folder import RunFolder
from slurmft.system.foreign_text import one_line
from slurmft.system.opening import read_part

LOG_BYTES, MAX_WORDS = 4096, 300
COMMAND = (sys.executable, "-m", "slurmft.inference.driver")


def preload_of(config: RunConfig) -> tuple[str, ...]:
    """What the zygote imports before workers are forked: torch only where workers use it."""
    if not config.fault_tolerance.preload:
        return ()
    if config.inference is None:
        return PRELOAD
    driver = ("slurmft.inference.driver", "aiohttp")
    return (*driver, "torch") if config.inference.engine.callable else driver


class Replicas:
    """Connects the pool with the agent's workers. Replica ``n`` of node ``i`` is rank ``i * replicas_per_node + n``."""

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], workers: Workers, *, node: int, host: str,
        report: Callable[[Sent], None],
    ) -> None:  # fmt: skip
        assert config.inference is not None
        self._config, self._section, self._environment = config, config.inference, environment
        self._workers, self._node = workers, node
        self._run, self._attempt = RunFolder(config.run_folder), ""
        self._first = node * config.inference.replicas_per_node
        self._gpus: list[str] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._pool = ReplicaPool(
            config.inference, run_folder=config.run_folder, folder=workers.folder, node=node, host=host,
            start=self._start, kill=lambda number: workers.kill_one(self._first + number),
            last_words=self._last_words, report=report,
        )  # fmt: skip

    async def handle(self, call: Call[Any] | None) -> bool:
        """A call of the supervisor's; whether it was one for the replicas."""
        match call:
            case BeginReplicas():
                self._attempt = call.attempt
                if self._gpus is None:
                    self._gpus = await asyncio.to_thread(self._find_gpus)
                await self._pool.begin(epoch=call.epoch, generation=call.generation)
            case Lease():
                self._pool.lease(call.runs, call.alone, call.epoch)
            case Drain():
                if self._draining is None or self._draining.done():
                    self._draining = asyncio.create_task(self._pool.drain(call.within_s))
            case _:
                return False
        return True

    def on_exit(self, worker: Worker) -> None:
        """The driver of a replica has ended."""
        self._pool.on_exit(worker.rank - self._first, worker.exit_code or 0)

    def note_signal(self) -> None:
        """This node got a signal that asks for a stop."""
        self._pool.note_signal()

    async def close(self) -> None:
        """Stop looking after the replicas; the agent kills them."""
        if self._draining is not None:
            self._draining.cancel()
        await self._pool.close()

    def _last_words(self, number: int) -> str:
        path = self._run.attempts / self._attempt / f"rank-{self._first + number}.log"
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
        settings = ReplicaSettings(
            socket=socket, config=str(self._run.config), generation=self._pool.generation, node=self._node,
            replica=number, life=life, device="cuda" if devices else "",
        )  # fmt: skip
        environment[SETTINGS_VARIABLE] = settings.as_text()
        self._workers.start_one(
            rank, environment, command=COMMAND, folder=self._config.trainer_directory,
            logs=self._run.attempts / self._attempt, verdict=self._run.verdicts / f"{self._attempt}.rank-{rank}.json",
            generation=self._pool.generation,
        )  # fmt: skip
