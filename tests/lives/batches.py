"""Lives of batches: the real supervisor, coordinator, ledger, agents, pools and drivers; engines that are simulated.

Each request is answered once, whatever happens. A node that loses power loses all that was not made durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lives import faults
from lives.life import PATIENT, Drawn, slurm_of
from lives.nodes import HEARD_S, Agent, Training, Worker, Workers
from lives.timeline import PROCESS, Process
from lives.world import OLD_S, SAYS_WHY, World
from slurmft.agent import inference as agent_side
from slurmft.errors import SlurmftError
from slurmft.inference import driver as driver_module
from slurmft.inference.coordinator import Coordinator
from slurmft.inference.driver import PROOF, SETTINGS_VARIABLE, Again, Driver, Engine, OutOfMemory, ReplicaSettings
from slurmft.inference.ledger import Ledger, Partials
from slurmft.inference.pool import PREFETCH, ReplicaPool
from slurmft.inference.requests import folder_of, prepare
from slurmft.policy.inference import KILLS
from slurmft.storage.journal import EventName
from slurmft.supervisor import inference as attempt_module
from slurmft.supervisor.guardian import MAX_LOSSES

ANSWERS_S = (0.3, 1.0, 2.0, 4.0)
"""An engine takes at most so long for a request, and ..."""

LATE_S = (0.0, 10.0)
"""... now and then so much longer."""

FLAKY = 0.02
"""Share of tries that fail."""

HANG_S = 150.0
"""Of an engine: longer than any fault stops a driver."""

NEVER_S = 1e6
BATCH: dict[str, Any] = {"fault_tolerance": PATIENT, "inference": {"concurrency": 2}}
"""Settings of a life of which only the faults matter."""

SAVED_S = 1.0
FOUND_S = 3.0
"""What a lost agent or engine had is handed over at once; by then it is known which of it was answered."""

BATCH_S = 3000.0
"""Every life of a batch is over by then."""


def answer_to(number: int) -> str:
    """What each engine says."""
    return f"{number} times {number} is {number * number}"


class SimulatedEngine(Engine):
    """Answers a request word by word, and goes on from the words that it is given; as its worker it may hang."""

    request_path = ""
    at_once = 1

    def __init__(self, world: BatchWorld, worker: Worker, name: str, partials: Partials) -> None:
        self._world, self._worker, self._name, self._partials = world, worker, name, partials
        self._chance = random.Random(f"{world.seed} {name}")
        self._words = 0

    async def start(self) -> None:
        """It loads its weights."""
        await asyncio.sleep(self._chance.uniform(0.1, 3.0))

    async def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Of one request."""
        [request], worker = requests, self._worker
        number, key = request["body"]["number"], request["key"]
        known = self._partials.take(key)
        text = "" if known is None else known.text
        if text:
            self._world.continued += 1
        if key != PROOF:
            self._world.note_asked(number, self._name)
        self._world.in_hand[id(worker)].append(number)
        late_s = self._chance.choice(LATE_S) if self._chance.random() < FLAKY else 0.0
        word_s = (self._chance.uniform(0.05, self._world.answer_s) + late_s) / 5
        try:
            # where it goes on is found by the words alone: those of another request would be in the answer
            for word in answer_to(number).split()[len(text.split()) :]:
                await asyncio.sleep(word_s)
                while worker.hung:
                    await asyncio.sleep(1.0)
                if worker.starved:
                    worker.starved = False
                    raise OutOfMemory("out of memory")
                if self._world.is_sick(worker) or self._chance.random() < FLAKY / 5:
                    raise Again("try again")
                text = f"{text} {word}".strip()
                self._partials.note(key, text)
                self._words += 1
        finally:
            self._world.in_hand[id(worker)].remove(number)
        self._partials.forget(key)
        self._world.computed[number] += key != PROOF
        return [{"response": {"status_code": 200, "body": {"answer": text}}}]

    async def tokens(self) -> float:
        """Words."""
        return self._words

    async def ended(self) -> int:
        """It ends with its driver."""
        await asyncio.Event().wait()
        return 0

    async def close(self) -> None:
        """Nothing."""


class Replicas(Workers):
    """In the place of ``agent.workers.Workers``: the drivers of an agent, each a process of its own."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.folder = Path(f"/nowhere/{agent.pid}")
        self._processes: dict[int, Process] = {}

    def start_one(self, rank: int, environment: Mapping[str, str], **_: Any) -> None:
        """Fork a driver."""
        world, agent = self._agent.world, self._agent
        if (earlier := self.by_rank.get(rank)) is not None and earlier.alive:
            raise RuntimeError(f"rank {rank} is alive")
        worker = self.by_rank[rank] = Worker(rank, 0)
        settings = ReplicaSettings.parse(environment[SETTINGS_VARIABLE].encode(), SETTINGS_VARIABLE)
        process = self._processes[rank] = world.process(f"rank {rank} of {agent.process.name}", agent.host)
        world.drivers.append(process)
        world.engines += 1
        with faults.inside(process):
            world.timeline.create_task(self._drive(worker, settings))

    async def _drive(self, worker: Worker, settings: ReplicaSettings) -> None:
        world = self._agent.world
        assert isinstance(world, BatchWorld) and world.config.inference is not None
        await asyncio.sleep(max(0.05, world.silent_until_s - world.timeline.now_s))
        world.present, world.in_hand[id(worker)] = worker, []
        try:
            code = await Driver(settings, world.config.inference, world.run.path).run()
        except (SlurmftError, OSError) as error:
            world.note(f"a driver on {self._agent.host}: {error}")
            code = 1
        except Exception as error:  # noqa: BLE001 - no driver ends by one
            world.violate("no internal error", f"a driver on {self._agent.host}: {error!r}")
            code = 1
        with world.outside():
            world.timeline.call_soon(self._agent.end_worker, worker.rank, code)

    def kill_one(self, rank: int) -> None:
        """SIGKILL."""
        if (worker := self.by_rank.get(rank)) is not None and worker.alive:
            self._agent.end_worker(rank, -9, killed=True)

    def ended(self, worker: Worker) -> None:
        """So has its engine, with what it had in hand."""
        world = self._agent.world
        assert isinstance(world, BatchWorld)
        world.note_death(worker)
        self._processes[worker.rank].end()


class BatchWorld(World):
    """One life of a batch. ``until`` is how many requests there are."""

    workers = Replicas

    def __init__(self, folder: Path, chance: random.Random, **settings: Any) -> None:
        self.drivers: list[Process] = []
        self._silent_until_s = 0.0
        self.answer_s = settings.pop("answer_s", 1.0)
        section = {"input": str(folder / "requests.jsonl"), "engine": {"callable": "engine:answer"}}
        section |= {"hang_timeout_s": HANG_S, "max_restarts": 200, "base_delay_s": 0.1, "part_requests": 7}
        settings["inference"] = {**section, "tail_after_s": NEVER_S, **settings.get("inference", {})}
        super().__init__(folder, chance, command=(), **settings)
        self.seed = chance.random()
        self.present: Worker
        """Whose driver is made."""

        self._patch = pytest.MonkeyPatch()
        self._writers: dict[str, str] = {}
        """Files of answers, and ledgers, with the node of the process that writes them."""

        self._durable: dict[str, int] = {}
        self.committed: dict[int, float] = {}
        """Requests whose answers count, and since when."""

        self.computed: Counter[int] = Counter()
        """How often engines have answered it."""

        self.in_hand: dict[int, list[int]] = {}
        """What the engine of a worker works on."""

        self.died_with: Counter[int] = Counter()
        """How many engines have ended with a request in hand."""

        self.lost_s = 0.0
        """When an engine has ended the last time; what it had may be handed over while its answer is found."""

        self.sick: list[Worker] = []
        self.epochs = self.deaths = self.continued = 0
        """How often an agent has begun with requests, an engine has ended, and an answer was gone on with."""

        self.untold = 0
        """Answers of lost agents that had not been reported, beyond what one has at hand."""

    @property  # type: ignore[override]
    def silent_until_s(self) -> float:
        """The run folder answers nothing before; drivers wait for it."""
        return self._silent_until_s

    @silent_until_s.setter
    def silent_until_s(self, until_s: float) -> None:
        self._silent_until_s = until_s
        for driver in [driver for driver in self.drivers if driver.alive and not driver.stopped]:
            driver.stop()
            with self.outside():
                self.timeline.call_at(until_s, driver.go_on)

    # its life

    def live(self) -> int:
        """As of any run."""
        self._prepare()
        return self._looked_at(super().live())

    def live_in_slurm(self) -> int:
        """As of any run."""
        self._prepare()
        return self._looked_at(super().live_in_slurm())

    def end(self) -> None:
        """Close all files, too: nobody does it for a process that was killed."""
        super().end()
        self._patch.undo()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith(str(self.run.path)):
                    os.close(int(number))

    def _prepare(self) -> None:
        section = self.config.inference
        assert section is not None and section.input is not None
        lines = [json.dumps({"custom_id": f"request {number}", "body": {"number": number}}) for number in
                 range(self.until)]  # fmt: skip
        section.input.write_text("\n".join(lines))
        folder_of(self.run.path).parent.mkdir(parents=True, exist_ok=True)
        prepare(section, folder_of(self.run.path))
        _simulate_replicas(self, self._patch)

    def _looked_at(self, code: int) -> int:
        """The steps of a batch are the requests that its output answers."""
        right: Counter[str] = Counter()
        path = self.run.path / "output" / "answers.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            number = int(row["custom_id"].split()[1])
            if row["response"]["body"] == {"answer": answer_to(number)}:
                right[row["custom_id"]] += 1
        if wrongly := [name for name, times in right.items() if times > 1]:
            self.violate("answered once", f"{wrongly} are in the output more than once")
        self.saved = len(right)
        events = self.run.journal().read()
        # the second engine of a request ends of it, for all that can be known
        given_up = {event.details["request"] for event in events if event.event == EventName.REQUEST_GIVEN_UP}
        # one that is answered, and waits for the disk, is in its driver's hands
        least = 0 if self.full_until_s else KILLS
        if wrongly := [number for number in given_up if self.died_with[number] < least]:
            self.violate("no request is given up without a cause", str(wrongly))
        if (self.run.done() is not None or path.exists()) and len(right) + len(given_up) != self.until:
            self.violate("every request is answered", f"{len(right)} of {self.until} are, {given_up} are given up")
        self.saved += len(given_up)
        if lost := [event.details for event in events if event.event == EventName.ANSWERS_UNREADABLE]:
            self.violate("what counts can be read", str(lost))
        self._judge_again()
        if self.timeline.now_s - 1000.0 > BATCH_S:
            self.violate("in time", f"the batch takes {self.timeline.now_s - 1000.0:.0f} s")
        return code

    @property
    def at_hand(self) -> int:
        """Requests that one node has."""
        assert self.config.inference is not None
        return PREFETCH * self.config.inference.replicas_per_node * self.config.inference.concurrency

    def _judge_again(self) -> None:
        """A loss explains as many answers that are computed again as one node has at hand, or has not reported yet."""
        section = self.config.inference
        assert section is not None
        again = sum(self.computed.values()) - len(self.computed)
        nodes = self.config.nodes + self.config.spare_nodes
        supervisors = sum(event.event == EventName.SUPERVISOR_LOST for event in self.run.journal().read())
        lost = max(0, self.epochs - nodes) + self.deaths + supervisors * nodes
        self.note(f"{again} answers were computed again; {lost} losses, {self.continued} were gone on with")
        most = lost * self.at_hand + self.untold
        is_held = self.full_until_s or self.silent_until_s  # what a lost node has written may not be found then
        if again > most and section.tail_after_s == NEVER_S and not is_held:
            self.violate("computed once", f"{again} were computed again, and {lost} losses explain {most}")

    # what is seen of it

    def is_sick(self, worker: Worker) -> bool:
        """Whether its engine fails every request."""
        return any(each is worker for each in self.sick)

    def note_death(self, worker: Worker) -> None:
        """An engine has ended, for whichever reason."""
        self.lost_s = self.timeline.now_s
        self.deaths += len(self.committed) < self.until
        self.died_with.update(self.in_hand.get(id(worker), ()))

    def note_begun(self, agent: Agent, generation: int) -> None:
        """An agent begins with requests of this generation."""
        self.epochs += 1
        if generation not in self._trainings:
            order: Any = SimpleNamespace(generation=generation, nodes=1, nodelist=agent.host)
            training = self.training_of(order)
            training.began_s = self.timeline.now_s
        elif agent.host in self.excluded and not any(event.event in SAYS_WHY for event in self.events()):
            if self.slurm is None or self.slurm.mood_lasts <= 0:
                self.violate("excluded nodes", f"{agent.process.name} begins generation {generation}")
        elif generation < self.newest and self.timeline.now_s - self.disturbed_s > HEARD_S:
            self.violate("one continuation", f"{agent.process.name} begins {generation} after {self.newest}")

    def note_asked(self, number: int, name: str) -> None:
        """An engine is asked a request."""
        assert self.config.inference is not None
        since_s = self.committed.get(number, self.timeline.now_s)
        is_doubled = self.config.inference.tail_after_s < NEVER_S or since_s < self.lost_s + FOUND_S
        is_well = self.network.is_whole and self.has_been_well(since_s - FOUND_S)
        is_well = is_well and not any(agent.process.stopped for agent in self.agents if agent.is_there)
        if number in self.committed and is_well and not is_doubled:
            self.violate("computed once", f"{name} is asked request {number}, which counts")
        self.check_going(self._trainings[self.newest])

    def note_committed(self, parts: Sequence[tuple[str, int, Any]]) -> None:
        """Answers count from now on."""
        for first, last in (run for *_, runs in parts for run in runs):
            for number in range(first, last):
                self.committed.setdefault(number, self.timeline.now_s)

    def check_opened(self, ledger: Ledger) -> None:
        """A start knows all that counted before it."""
        if forgotten := [number for number in self.committed if not ledger.done[number]]:
            self.violate("what counts is kept", f"generation {ledger.generation} does not know of {forgotten}")

    def check_going(self, training: Training) -> None:
        """Of a save that is asked for, only the journal tells."""
        at_s = self.asked.get("SAVE", self.timeline.now_s)
        if self.timeline.now_s - at_s > SAVED_S and any(
            event.event == EventName.SAVE_REQUESTED for event in self.run.journal().read()
        ):
            del self.asked["SAVE"]
        super().check_going(training)

    def check_workers(self, agent: Agent) -> None:
        """An agent that has been connected for a while works for the newest generation."""
        replicas = agent._own._replicas
        is_old = replicas is not None and replicas._pool.generation < self.newest
        is_old = is_old and agent.host not in self.excluded | self.excluded_next  # it is kept off
        if is_old and self.network.is_whole and self.has_been_well(self.timeline.now_s - OLD_S):
            self.violate("nothing of an older generation", f"{agent.process.name} still works for one")

    def on_kill(self, agent: Agent) -> None:
        """A driver has nothing to keep."""

    # files

    def note_written(self, path: str) -> None:
        """By the process around."""
        process = PROCESS.get()
        if process is not None and path.endswith(".jsonl"):
            self._writers[path] = process.host or self.host

    def note_durable(self, path: str) -> None:
        """A power cut keeps what is in it now."""
        if path in self._writers:
            self._durable[path] = Path(path).stat().st_size

    def lose_unwritten(self, host: str) -> None:
        """The node has lost its power."""
        for path in sorted(path for path, at in self._writers.items() if at == host):
            size, durable = Path(path).stat().st_size, self._durable.get(path, 0)
            if durable < size:
                kept = self.chance.randint(durable, size)
                self.note(f"{size - kept} bytes of {Path(path).name} are lost")
                self.deaths += Path(path).read_bytes()[kept:].count(b"\n")
                os.truncate(path, kept)


def _simulate_replicas(world: BatchWorld, patch: pytest.MonkeyPatch) -> None:
    """In the place of Unix sockets and engines are those of a life; what becomes durable is seen."""
    write, sync = os.write, os.fsync
    begin, commit, opened = ReplicaPool.begin, Ledger.commit, attempt_module.open_ledger
    lose = Coordinator.lose

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def noted_write(descriptor: int, content: Any) -> int:
        count = write(descriptor, content)
        world.note_written(path_of(descriptor))
        return count

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        world.note_durable(path_of(descriptor))

    async def noted_begin(pool: ReplicaPool, *, epoch: int, generation: int) -> None:
        agent = next(agent for agent in world.agents if agent.process is PROCESS.get())
        world.note_begun(agent, generation)
        await begin(pool, epoch=epoch, generation=generation)

    def noted_commit(ledger: Ledger, parts: Any) -> int:
        count = commit(ledger, parts)
        world.note_committed(parts)
        return count

    def noted_loss(coordinator: Coordinator, node: int) -> int:
        if node in coordinator.agents:
            world.deaths, world.lost_s = world.deaths + 1, world.timeline.now_s
            held = [number for run in coordinator.requests.held(node) for number in range(*run)]
            world.untold += max(0, sum(world.computed[number] > 0 for number in held) - world.at_hand)
            world.asked.pop("SIGTERM", None)  # it may be the one that got it
        return lose(coordinator, node)

    def checked_ledger(*args: Any) -> Ledger:
        ledger = opened(*args)
        world.check_opened(ledger)
        return ledger

    def engine_of(_config: Any, _replica: int, _device: str, partials: Any, *_: Any, owner: str, **__: Any) -> Engine:
        return SimulatedEngine(world, world.present, owner, partials)

    patch.setattr(os, "write", noted_write)
    patch.setattr(os, "fsync", noted_sync)
    patch.setattr(ReplicaPool, "begin", noted_begin)
    patch.setattr(Ledger, "commit", noted_commit)
    patch.setattr(Coordinator, "lose", noted_loss)
    patch.setattr(attempt_module, "open_ledger", checked_ledger)
    patch.setattr(driver_module, "engine_of", engine_of)
    patch.setattr(agent_side, "gpu_uuids", lambda _: [])
    patch.setattr(agent_side, "hosts_here", lambda *_: ())

    async def listen(serve: Any, path: Any, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        world.network.sockets[str(path)] = process, serve
        return SimpleNamespace(close=lambda: world.network.sockets.pop(str(path), None))

    async def connect(path: str, **_: Any) -> Any:
        return await world.network.dial_here(str(path))

    patch.setattr(asyncio, "start_unix_server", listen)
    patch.setattr(asyncio, "open_unix_connection", connect)


# what is drawn


def lose_power(world: World) -> None:
    """A node is gone, with all that was not on the disk yet."""
    before = {*world.off}
    faults.power_off(world)
    for host in world.off - before:
        assert isinstance(world, BatchWorld)
        world.lose_unwritten(host)


def lose_power_of_supervisor(world: World) -> None:
    """The node of the batch script is gone, for half a minute."""
    job = world.job
    if job is not None and world.slurm is not None and isinstance(world, BatchWorld):
        host = job.batch_host
        world.note(f"{host} loses power")
        world.accusable |= {("node lost", host), ("crash", host)}
        world.network.cut(host)
        world.off.add(host)
        world.kill_supervisor(quietly=True)
        world.slurm.lose(host)
        for agent in world.agents:
            if agent.host == host and agent.is_there:
                agent.lose_power()
        world.lose_unwritten(host)


def hang_all(world: World) -> None:
    """All engines hang."""
    for agent in world.agents:
        for worker in agent.workers.values():
            worker.hung = True


def _worker(world: World) -> Worker | None:
    agent = faults._agent(world, may_be="crash")
    living = [worker for worker in agent.workers.values() if worker.alive] if agent is not None else []
    return world.chance.choice(living) if living else None


def sicken(world: World) -> None:
    """An engine fails every request until it is started again."""
    if (worker := _worker(world)) is not None and isinstance(world, BatchWorld):
        world.note(f"the engine of rank {worker.rank} fails every request")
        world.sick.append(worker)


def starve(world: World) -> None:
    """An engine runs out of memory."""
    if (worker := _worker(world)) is not None:
        world.note(f"the engine of rank {worker.rank} runs out of memory")
        worker.starved = True


IN_PLACE = {faults.power_off: lose_power, faults.kill_rank_and_connection: sicken, faults.say_twice: starve}
"""What is another fault in a batch."""


def life_of(seed: int, *, most: int = 6) -> Drawn:
    """What is drawn for this seed."""
    chance = random.Random(f"batch {seed}")
    settings: dict[str, Any] = {
        "nodes": chance.choice((1, 2, 2, 3)), "spare_nodes": chance.choice((0, 0, 1)),
        "answer_s": chance.choice(ANSWERS_S),
        "inference": {
            "replicas_per_node": chance.choice((1, 2)), "concurrency": chance.choice((1, 2, 4)),
            "tail_after_s": chance.choice((2.0, NEVER_S)), "commit_interval_s": chance.choice((0.25, 1.0)),
        },
        "fault_tolerance": {**PATIENT, "agent_timeout_s": chance.choice((5.0, 10.0)),
                            "supervisor_lease_s": chance.choice((30.0, 60.0))},
    }  # fmt: skip
    in_slurm = slurm_of(chance, settings)
    befalls = faults.drawn(chance, most=most, in_slurm=in_slurm is not None)
    if chance.random() < OUTLIVES:
        befalls += _losses(chance)
    befalls = [(at_s, IN_PLACE.get(fault, fault)) for at_s, fault in sorted(befalls, key=lambda each: each[0])]
    return Drawn(befalls, chance.randrange(20, 61), in_slurm, settings, kind=BatchWorld)


def _losses(chance: random.Random) -> list[tuple[float, faults.Fault]]:
    """Its supervisor is killed, and others come together with that."""
    at_s, befalls = 0.0, list[tuple[float, faults.Fault]]()
    for _ in range(chance.randrange(1, 4)):
        at_s += chance.uniform(0.3, 8.0)
        befalls.append((at_s, chance.choice(LOSSES)))
        if chance.random() < 0.7:
            beside_s = at_s + chance.choice((-0.5, -0.01, 0.0, 0.3, 1.5, 5.0)) * chance.random()
            befalls.append((max(0.0, beside_s), chance.choice(BESIDES)))
    return befalls


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


OUTLIVES = 0.5
"""Share of lives in which agents are to outlive their supervisor."""

LOSSES: Sequence[faults.Fault] = (faults.kill_supervisor, faults.kill_supervisor, faults.kill_supervisor_in_its_work)
BESIDES: Sequence[faults.Fault] = (
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
