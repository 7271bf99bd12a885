"""The inference side of a life: agents with replicas, whose drivers are the product's own, and engines that are not.

Requests are numbers, and an answer is twice its number. The run folder has the batch, what drivers have written, and
what counts of it, as any run's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lives import faults
from lives.faults import Fault
from lives.nodes import Worker
from lives.timeline import PROCESS, inside
from slurmft.agent import inference as agent_inference
from slurmft.inference import driver as driver_module
from slurmft.inference.driver import SETTINGS_VARIABLE, Driver, Engine, ReplicaSettings
from slurmft.inference.ledger import answered
from slurmft.inference.requests import folder_of
from slurmft.supervisor.guardian import MAX_LOSSES

if TYPE_CHECKING:
    from lives.nodes import Agent
    from lives.world import World

LOAD_S = (0.3, 1.5)
"""How long an engine takes to be ready."""

ANSWER_S = 1.0
SLOTS = 3
"""Requests at a time for each replica."""

Drawn = tuple[list[tuple[float, Fault]], int, dict[str, Any]]

SETTINGS: Mapping[str, Any] = {
    "engine": {"callable": "lives.batches:none", "continue_from_prefix": "never"}, "gpus_per_replica": 0,
    "concurrency": SLOTS, "hang_timeout_s": 20.0, "startup_timeout_s": 30.0, "max_restarts": 50, "part_requests": 0,
}  # fmt: skip
"""Of the section ``inference``."""


def batch_of(chance: random.Random, others: Sequence[tuple[float, Fault]]) -> Drawn:
    """The faults of a life with requests, how many there are, and its settings: its supervisor is killed, and others
    come together with that.
    """
    at_s, befalls = 0.0, list(others)
    for _ in range(chance.randrange(1, 4)):
        at_s += chance.uniform(0.3, 8.0)
        befalls.append((at_s, chance.choice(KILLS)))
        if chance.random() < 0.7:
            befalls.append((at_s + chance.choice((-0.5, -0.01, 0.0, 0.3, 1.5, 5.0)) * chance.random(),
                            chance.choice(BESIDES)))  # fmt: skip
    settings = {**SETTINGS, "replicas_per_node": chance.choice((1, 1, 2))}
    return sorted(((max(0.0, when), fault) for when, fault in befalls), key=lambda each: each[0]), chance.choice(
        (20, 60, 150)), settings  # fmt: skip


def write_input(path: Path, count: int) -> None:
    """A batch of so many requests."""
    rows = ({"custom_id": f"r{number}", "body": {"number": number}} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Doubling(Engine):
    """An engine of one replica."""

    at_once, request_path = 1, ""

    def __init__(self, world: World, worker: Worker) -> None:
        self._world, self._worker, self._made = world, worker, 0.0

    async def start(self) -> None:
        """Load."""
        await asyncio.sleep(self._world.chance.uniform(*LOAD_S))

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One answer after its time; none while it hangs."""
        await asyncio.sleep(ANSWER_S * self._world.chance.uniform(0.5, 1.5))
        while self._worker.hung:
            await asyncio.sleep(3600.0)
        self._made += 1
        self._world.answers += len(requests)
        bodies = [{"double": 2 * request["body"]["number"]} for request in requests]
        return [{"response": {"status_code": 200, "body": body}} for body in bodies]

    async def tokens(self) -> float:
        """One for each answer."""
        return self._made

    async def ended(self) -> int:
        """Never by itself: its process ends."""
        await asyncio.Event().wait()
        return 0

    async def close(self) -> None:
        """Nothing."""


def start_driver(agent: Agent, rank: int, environment: dict[str, str]) -> None:
    """Start the driver of a replica, a child of its agent.

    Raises:
        RuntimeError: the one before it lives.
    """
    world, before = agent.world, agent.workers.get(rank)
    if before is not None and before.alive:
        raise RuntimeError(f"rank {rank} is alive")
    process = world.process(f"driver {rank} of {agent.process.name}", agent.host)
    agent.workers[rank] = Worker(rank, world.until, process=process)
    world.engines += 1
    settings = ReplicaSettings.parse(environment[SETTINGS_VARIABLE].encode(), SETTINGS_VARIABLE)

    async def drive() -> None:
        assert world.config.inference is not None
        code = 1
        try:
            code = await Driver(settings, world.config.inference, world.run.path).run()
        finally:
            with inside(None):
                world.timeline.call_soon(agent.end_worker, rank, code)

    with inside(process):
        world.timeline.create_task(drive())


# what befalls the record by which a supervisor finds agents that have outlived the one before it


def _record(world: World) -> Path | None:
    """The folder in which the newest agents find their supervisor; it is spoiled from now on."""
    world.is_record_spoiled = True
    folders = [agent.folder for agent in world.agents[-1:]]
    return folders[0] if folders and folders[0].is_dir() else None


def tear_record(world: World) -> None:
    """The address is cut off in the middle, as by a crash of the file server."""
    if (folder := _record(world)) is not None:
        world.note("the supervisor's address is torn")
        path = folder / "control.json"
        path.write_bytes(path.read_bytes()[:-9])


def leave_old_record(world: World) -> None:
    """The address is that of long ago, where nobody looks any more."""
    if (folder := _record(world)) is not None:
        world.note("the supervisor's address is an old one")
        path = folder / "control.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"port": 7}))


def take_port(world: World) -> None:
    """Another program listens at the port as soon as the supervisor does not."""
    if world.agents:
        port = world.agents[-1].port
        world.note(f"another program waits for port {port}")
        world.guarding.taken.add(port)
        world.is_record_spoiled = True


def lose_secret(world: World) -> None:
    """The file with the secret is gone."""
    if (folder := _record(world)) is not None:
        world.note("the secret is gone")
        (folder / "secret").unlink(missing_ok=True)


KILLS: Sequence[Fault] = (faults.kill_supervisor, faults.kill_supervisor, faults.kill_supervisor_in_its_work)
BESIDES: Sequence[Fault] = (
    faults.kill_supervisor, faults.kill_supervisor_in_its_work, faults.kill_rank, faults.kill_rank, faults.hang_rank,
    faults.kill_agent, faults.kill_agent, faults.stop_agent, faults.stop_agent, faults.cut_off, faults.cut_off,
    faults.reset, faults.slow_node, faults.stall_disk, faults.signal_supervisor, faults.ask_for_stop,
    faults.fill_disk, tear_record, leave_old_record, take_port, lose_secret,
)  # fmt: skip


def check_spared(world: World, agents: Sequence[Agent]) -> None:
    """What has started these agents is ended by the guardian, or by what follows it: nothing of theirs is needed."""
    losses = world.guarding.losses + (PROCESS.get() is not world.supervisor)  # the guardian counts this one afterwards
    if losses >= MAX_LOSSES or not world.agents_are_safe:
        return
    if living := [each for each in agents if each.is_there and not world.network.is_cut(each.host)]:
        world.violate("agents outlive", f"{living[0].process.name} is ended, although the run goes on")


def judge(world: World, code: int) -> None:
    """What must hold at the end: each request has one answer, and the right one."""
    world.saved = answered(folder_of(world.run.path), world.until)
    path = world.run.path / "output" / "answers.jsonl"
    if code != 0 or world.run.done() is None or not path.exists():
        return
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["custom_id"], row["response"]["body"]["double"]) for row in rows]
    if found != [(f"r{number}", 2 * number) for number in range(world.until)]:
        world.violate("each request once", f"{len(found)} answers to {world.until} requests: {found[:3]}")


def simulate_inference(world: World, patch: pytest.MonkeyPatch) -> None:
    """In the place of sockets in folders, and of what a driver drives, is what a life has of them."""
    network = world.network

    def engine_of(*_: Any, **__: Any) -> Engine:
        process = PROCESS.get()
        workers = (worker for agent in world.agents for worker in agent.workers.values())
        return Doubling(world, next(worker for worker in workers if worker.process is process))

    async def listen(serve: Callable[[Any, Any], Coroutine[Any, Any, None]], path: Path, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        network.sockets[str(path)] = process, serve
        return SimpleNamespace(close=lambda: network.sockets.pop(str(path), None))

    async def connect(path: Path, **_: Any) -> Any:
        return await network.dial_here(str(path))

    patch.setattr(driver_module, "engine_of", engine_of)
    patch.setattr(agent_inference, "hosts_here", lambda host, _: (host,))
    patch.setattr(agent_inference, "gpu_uuids", lambda _: [])
    patch.setattr(asyncio, "start_unix_server", listen)
    patch.setattr(asyncio, "open_unix_connection", connect)
