"""One engine over several nodes: who has it together, what each node is told, and how its processes end together."""

import asyncio
import functools
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until_async

from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.errors import LaunchError
from slurmft.inference.gang import Ended, Head, Starts, join
from slurmft.inference.pool import ReplicaPool
from slurmft.ipc.messages import JoinGang, ReplicaDied, ReplicaPhase, ReplicaPlace, Sent
from slurmft.policy.inference import gangs_of
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.inference import Gangs, gangs_in

KEY = b"k" * 64
COMMAND = ("engine", "{port}", "{node_rank}")


@pytest.mark.parametrize(
    ("gangs", "nodes", "found"),
    [
        ([], [], []),
        ([], [3], []),
        ([], [1, 0, 2], [(0, 1)]),
        ([], [4, 2, 0, 1, 3], [(0, 1), (2, 3)]),
        ([(0, 1), (2, 3)], [0, 1, 2, 4], [(0, 1), (2, 4)]),
        ([(0, 1), (2, 3)], [1, 2, 3], [(2, 3)]),
        ([(4, 1)], [0, 1, 2, 4], [(4, 1), (0, 2)]),
    ],
)
def test_gangs_stay_as_they_are_and_new_ones_are_of_nodes_in_none(gangs, nodes, found):
    assert gangs_of(gangs, nodes, size=2, most=2, jobs={}) == found


def test_no_gang_has_nodes_of_two_jobs() -> None:
    jobs = {0: "", 1: "7", 2: "", 3: "8", 4: "7"}
    assert gangs_of([], [0, 1, 3], size=2, most=3, jobs=jobs) == []
    assert gangs_of([], [0, 1, 2, 3, 4], size=2, most=3, jobs=jobs) == [(0, 2), (1, 4)]


class Supervisor:
    """The gangs of a supervisor, and what agents were told last."""

    def __init__(self, folder: Path, *, nodes: int, outlived: bool = False) -> None:
        self.run, self.attempt = RunFolder(folder), Attempt(job="7", restart=0)
        self.run.create()
        journal = self.run.journal(self.attempt)
        section = InferenceConfig(input=folder, engine=EngineConfig(command=COMMAND, nodes=2))
        times = SimpleNamespace(launch_timeout_s=600.0, supervisor_lease_s=1.0)
        config: Any = SimpleNamespace(inference=section, nodes=nodes, trials=None, fault_tolerance=times)
        start: Any = SimpleNamespace(
            journal=journal, history=journal.read_past(), cluster=SimpleNamespace(attempt=self.attempt)
        )
        self.links: dict[int, Any] = {}
        self.told: dict[int, list[JoinGang]] = {}
        self.gangs = Gangs(config, start, self.links, outlived=outlived)

    def joins(self, *nodes: int) -> None:
        for node in nodes:
            tell = functools.partial(self._hear, node)
            self.links[node] = SimpleNamespace(node=node, host=f"n{node}", channel=object(), tell=tell)
            self.gangs.took_in(self.links[node], 1)

    def loses(self, node: int) -> None:
        self.gangs.lost(self.links.pop(node))

    def gathers(self, node: int, port: int) -> None:
        report = ReplicaPhase(epoch=1, replica=0, phase="starting", life=1, hosts=(f"n{node}",), port=port)
        self.gangs.gathers(self.links[node], report)

    def _hear(self, node: int, call: JoinGang) -> None:
        self.told.setdefault(node, []).append(call)

    def parts(self) -> dict[int, tuple[int | None, int | None]]:
        """Rank and the head's port that each node was told last."""
        return {node: (calls[-1].rank, calls[-1].head and calls[-1].head.port) for node, calls in self.told.items()}

    def events(self, name: EventName) -> list[list[int]]:
        return [event.details["numbers"] for event in self.run.journal().read() if event.event == name]


def test_a_lost_node_breaks_its_gang_and_one_in_reserve_takes_its_place(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path / "run", nodes=2)
    supervisor.joins(0)
    assert supervisor.parts() == {0: (None, None)}
    supervisor.joins(1, 2)
    supervisor.gathers(0, 4000)
    assert supervisor.parts() == {0: (0, None), 1: (1, 4000), 2: (None, None)}
    assert list(supervisor.gangs.heads) == [0]
    assert supervisor.gangs.host_of(supervisor.links[0], 1) == "n1", "what ends there is held against that node"
    supervisor.told.clear()
    supervisor.loses(1)
    assert [call.rank for call in supervisor.told[0]] == [None, 0], "what is left of its engine ends at once"
    supervisor.gathers(0, 4001)
    assert supervisor.parts() == {0: (0, None), 2: (1, 4001)}
    assert supervisor.events(EventName.GANG_FORMED) == [[0, 1], [0, 2]]
    assert supervisor.events(EventName.GANG_BROKEN) == [[0, 1]]
    assert not supervisor.gangs.too_few(1e9)
    supervisor.loses(0)
    assert "an engine needs 2 nodes" in supervisor.gangs.too_few(2e9)


def test_the_next_supervisor_leaves_gangs_as_they_are_until_an_agent_does_not_report(tmp_path: Path) -> None:
    before = Supervisor(tmp_path / "run", nodes=2)
    before.joins(0, 1, 2)
    before.loses(0)
    after = Supervisor(tmp_path / "run", nodes=2, outlived=True)
    after.joins(0, 2)
    assert after.parts() == {0: (None, None)}, "an engine that goes on is told nothing"
    after.joins(1)
    after.gathers(1, 4000)
    assert after.parts() == {0: (None, None), 1: (0, None), 2: (1, 4000)}
    alone = Supervisor(tmp_path / "run", nodes=2, outlived=True)
    alone.joins(0, 1)
    assert alone.parts() == {0: (None, None), 1: (0, None)}
    alone.gangs.too_few(1e9)
    assert alone.parts() == {0: (0, None), 1: (None, None)} or list(alone.gangs.heads) == [0]
    assert alone.events(EventName.GANG_FORMED)[-1] == [0, 1]


def test_the_journal_tells_which_gangs_there_are(tmp_path: Path) -> None:
    run, mine = RunFolder(tmp_path / "run"), Attempt(job="7", restart=1, cycle=2)
    run.create()
    run.journal(Attempt(job="7", restart=0)).append(EventName.GANG_FORMED, numbers=[6, 7])
    for name, numbers in (("formed", [0, 1]), ("formed", [2, 3]), ("broken", [2, 3]), ("formed", [1, 2])):
        run.journal(Attempt(job="7", restart=1)).append(EventName(f"gang {name}"), numbers=numbers)
    run.journal(mine).append(EventName.GANG_FORMED, numbers=[4, 5])
    assert gangs_in(run.journal().read_past(), mine) == [(1, 2), (4, 5)]


async def gathering_head(told: list[dict[str, Any]]) -> tuple[Head, asyncio.Task[Mapping[str, str]], ReplicaPlace]:
    """A head of three nodes that waits for its members, and where; what it says goes to ``told``."""
    head = Head(KEY, nodes=3, config="config.yaml", host="127.0.0.1", tell=lambda **each: told.append(each))
    gathering = asyncio.create_task(head.gather())
    await until_async(lambda: bool(told))
    return head, gathering, ReplicaPlace(name="n0#1", hosts=("127.0.0.1",), port=told[0]["port"])


@pytest.mark.parametrize("end", ["crash", "gone"])
async def test_the_end_of_a_member_is_that_of_the_head(end: str) -> None:
    told, tasks = list[dict[str, Any]](), len(asyncio.all_tasks())
    head, gathering, place = await gathering_head(told)
    stranger = await join(place, 1, b"x" * 64)
    assert await stranger.receive() is None, "it does not hold the run's key"
    stranger.close()
    members = [await join(place, rank, KEY) for rank in (2, 1)]
    words = await gathering
    found = [Starts.parse(await each.receive() or {}, "the head") for each in members]
    assert words["{node_rank}"] == "0" and words["{nodes}"] == "3" and words["{head}"] == "127.0.0.1"
    assert found[0] == found[1] and found[0].words(2)["{head_port}"] == words["{head_port}"]
    assert not head.broken.done()
    if end == "crash":
        members[0].send(Ended(code=-signal.SIGSEGV))
    members[0].close()
    assert await head.broken == (-signal.SIGSEGV if end == "crash" else -signal.SIGKILL)
    assert (told[-1]["kind"], told[-1]["rank"]) == ("broken", 2)
    count = len(told)
    head.close()
    assert await members[1].receive() is None, "the others hear of it"
    members[1].close()
    assert len(told) == count, "its own end is not put down to them"
    await until_async(lambda: len(asyncio.all_tasks()) == tasks)


async def test_a_member_that_is_lost_before_all_are_there_ends_the_wait() -> None:
    told, tasks = list[dict[str, Any]](), len(asyncio.all_tasks())
    head, gathering, place = await gathering_head(told)
    (await join(place, 1, KEY)).close()
    with pytest.raises(LaunchError, match="was lost before all were there"):
        await gathering
    head.close()
    await until_async(lambda: len(asyncio.all_tasks()) == tasks)


class Node:
    """The pool of a node, whose drivers are only noted."""

    def __init__(self, folder: Path) -> None:
        self.started: list[tuple[int | None, int | None]] = []
        self.killed = 0
        self.reports: list[Sent] = []
        config = InferenceConfig(input=folder / "none", engine=EngineConfig(command=COMMAND, nodes=2))
        self.pool = ReplicaPool(
            config, run_folder=folder, folder=folder, node=0, host="n0", start=self._start, kill=self._kill,
            last_words=lambda number: "", report=self.reports.append,
        )  # fmt: skip

    def _start(self, number: int, socket: str, life: int) -> None:
        part = self.pool.replicas[number].part
        assert part is not None
        self.started.append((part.rank, part.head and part.head.port))

    def _kill(self, number: int) -> None:
        self.killed += 1

    def is_told(self, rank: int | None, port: int | None = None) -> None:
        head = None if port is None else ReplicaPlace(name="head", hosts=("n1",), port=port)
        self.pool.join_gang(JoinGang(epoch=1, rank=rank, head=head))

    @property
    def phase(self) -> str:
        return next(each.phase for each in reversed(self.reports) if isinstance(each, ReplicaPhase))


def test_a_node_has_the_part_that_it_was_told_last_once_the_one_before_has_ended() -> None:
    async def work(folder: Path) -> None:
        node = Node(folder)
        pool, replica = node.pool, node.pool.replicas[0]
        await pool.begin(epoch=1, generation=1)
        assert node.started == [] and node.phase == "member", "it waits for its part"
        node.is_told(1, 4000)
        node.is_told(1, 4000)
        assert node.started == [(1, 4000)] and node.killed == 0
        pool.on_exit(0, 0)
        await until_async(lambda: replica.runs is None)
        assert len(node.started) == 1, "the head says where it begins another life"
        node.is_told(1, 4001)
        node.is_told(0)
        assert node.started[1:] == [(1, 4001)] and node.killed == 1, "not before the one before has ended"
        pool.on_exit(0, -9)
        await until_async(lambda: len(node.started) == 3)
        assert node.started[2] == (0, None) and node.phase == "starting"
        node.is_told(0)
        assert node.killed == 1
        node.is_told(None)
        node.is_told(0)
        assert node.killed == 2
        pool.on_exit(0, -9)
        await until_async(lambda: len(node.started) == 4)
        node.is_told(None)
        pool.on_exit(0, -9)
        await until_async(lambda: node.phase == "member")
        assert len(node.started) == 4 and not any(isinstance(each, ReplicaDied) for each in node.reports)
        await pool.close()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(asyncio.wait_for(work(Path(name)), 30))


@pytest.mark.parametrize(
    ("engine", "more", "what"),
    [
        ({"command": ["e", "{port}"]}, {}, "needs a command with some of"),
        ({"callable": "a:b"}, {}, "needs a command with some of"),
        ({"command": list(COMMAND)}, {"replicas_per_node": 2}, "one engine on a node"),
        ({"command": list(COMMAND)}, {"serving": {"replicas": {"min": 0}}}, "none follows the load"),
    ],
)
def test_what_an_engine_over_several_nodes_cannot_have(engine, more, what):
    given = {"input": "requests.jsonl", **more}
    if "serving" in more:
        del given["input"]
    with pytest.raises(ValueError, match=what):
        InferenceConfig.model_validate({"engine": {**engine, "nodes": 2}, **given})
