"""The coordinator believes agents as far as their leases go, and loses nothing when one of them is lost."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageUnavailable
from slurmft.inference.coordinator import Coordinator
from slurmft.inference.ledger import open_ledger, segments_of
from slurmft.inference.requests import prepare, runs_of
from slurmft.ipc.channel import kind_of
from slurmft.ipc.messages import Lease, ReplicaDied, ReplicaPhase, RequestsAnswered, RequestsReturned, RequestsWanted
from slurmft.storage.journal import EventName
from slurmft.storage.queue import SegmentWriter

TOTAL = 20
REPORTS = {
    kind_of(each): each for each in (RequestsWanted, RequestsAnswered, RequestsReturned, ReplicaPhase, ReplicaDied)
}


class World:
    """A coordinator with agents that are lists of what they were sent."""

    def __init__(self, folder: Path, **changes: object) -> None:
        source = folder / "in.jsonl"
        source.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(TOTAL)))
        self.config = InferenceConfig.model_validate(
            {"input": str(source), "engine": {"callable": "a:b"}, "replicas_per_node": 1, **changes}
        )
        batch = prepare(self.config, folder / "inference")
        self.thread, self.events = ThreadPoolExecutor(1), []
        self.ledger = open_ledger(batch, 1)
        self.coordinator = Coordinator(
            self.config,
            batch,
            self.ledger,
            self.thread.submit,
            lambda event, **facts: self.events.append((event, facts)),
        )
        self.sent: dict[int, list[Lease]] = {}
        self.epochs: dict[int, int] = {}

    def join(self, node: int) -> None:
        self.sent[node] = []
        self.epochs[node] = self.coordinator.join(node, f"n{node}", self.sent[node].append)

    def report(self, node: int, kind: str, **facts: Any) -> bool:
        return self.coordinator.on_report(node, REPORTS[kind](epoch=self.epochs[node], **facts))

    def leased(self, node: int) -> list[int]:
        return [number for lease in self.sent[node] for first, last in lease.runs
                for number in range(first, last)]  # fmt: skip

    def write(self, node: int, *indexes: int, replica: int = 0, life: int = 1) -> tuple[str, int]:
        name = f"g000001-n{node}-r{replica}-{life}-{self.epochs[node]}.jsonl"
        writer = SegmentWriter(segments_of(self.ledger.batch.folder) / name, {"generation": 1})
        writer.append({"index": index, "response": {"status_code": 200, "body": {}}} for index in indexes)
        return name, writer.end

    def answer(self, node: int, *indexes: int, **place: int) -> None:
        segment, end = self.write(node, *indexes, **place)
        self.report(node, "answers", segment=segment, end=end, runs=runs_of(indexes))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_requests_are_leased_committed_and_finished(world):
    world.join(0)
    world.report(0, "want", count=15)
    assert world.leased(0) == list(range(15))
    world.answer(0, *range(15))
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 15 and world.ledger.count == 15
    world.report(0, "want", count=15)
    world.answer(0, *range(15, 20), life=2)
    await world.coordinator.commit_now()
    assert world.coordinator.requests.finished and world.coordinator.answered_here == TOTAL


async def test_an_agent_that_was_lost_says_nothing_that_counts(world):
    world.join(0)
    world.join(1)
    world.report(0, "want", count=TOTAL)
    segment, end = world.write(0, 1, 2)
    epoch = world.epochs[0]
    world.report(1, "want", count=4)
    assert world.leased(1) == []
    assert world.coordinator.lose(0) == TOTAL
    assert world.leased(1) == [0, 1, 2, 3], "what was free goes to the one that waits"
    late = RequestsAnswered(epoch=epoch, segment=segment, end=end, runs=((5, 6),))
    assert world.coordinator.on_report(0, late) is False
    world.join(0)
    assert world.coordinator.on_report(0, late) is False, "it is back, and the message is an old one"
    world.thread.shutdown(wait=True)
    assert sorted(world.ledger.done.nonzero()[0]) == [1, 2], "what it had written before is not lost"
    world.coordinator.adopt_salvaged()
    assert world.coordinator.requests.done == 2


@pytest.mark.parametrize(
    "segment",
    ["g000001-n0-r0-1-1.jsonl", "g000001-n0-r0-1-1000002.jsonl", "g000001-n0-r0-1-10000010.jsonl",
     "x/g000001-n0-r0-1-1000001.jsonl", "../../x", "ledger-000001.jsonl"],
)  # fmt: skip
async def test_answers_in_segments_of_others_do_not_count(world, segment):
    world.join(0)
    world.report(0, "answers", segment=segment, end=99, runs=((0, 5),))
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 0


async def test_a_lent_node_has_the_number_of_its_own_job(world):
    world.join(0)
    world.join(1)
    world.report(1, "want", count=5)
    world.epochs[0], own = world.epochs[1], world.epochs[0]
    segment, end = world.write(0, 0, 1)  # it calls itself node 0, as the first node of the run does
    world.epochs[0] = own
    world.report(1, "answers", segment=segment, end=end, runs=((0, 2),))
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 2


@pytest.mark.parametrize("runs", [((0, 21),), ((0, 5), (20, 30))])
async def test_requests_that_do_not_exist_do_not_count(world, runs):
    world.join(0)
    segment, end = world.write(0, 0)
    world.report(0, "answers", segment=segment, end=end, runs=runs)
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 0


async def test_a_request_that_kills_two_replicas_alone_is_answered_with_an_error(world):
    world.join(0)
    world.report(0, "want", count=TOTAL)
    facts = {
        "replica": 0,
        "how": "ended by SIGSEGV",
        "code": -11,
        "was_ready": True,
        "answered": 1,
        "failures": 1,
        "load": 0,
    }
    for life in (1, 2):
        world.report(0, "replica_died", name=f"n0/0#{life}", in_flight=(3, 4), **facts)
        world.report(0, "want", count=2)
    for life in (3, 4):
        world.report(0, "want", count=2)
        assert 3 in [index for lease in world.sent[0] for index in lease.alone]
        world.report(0, "replica_died", name=f"n0/0#{life}", in_flight=(3,), **facts)
    ((event, told),) = world.events
    assert event == EventName.REQUEST_GIVEN_UP and told["request"] == 3
    async with asyncio.timeout(5):
        while not world.ledger.done[3]:
            await world.coordinator.commit_now()
            await asyncio.sleep(0.01)


async def test_the_next_one_is_told_where_text_of_a_request_lies(world):
    """Of a dead replica, of a lost agent and of one that gives back; but not where a request is tried alone."""
    for node in (0, 1, 2):
        world.join(node)
    for replica, life in ((0, 1), (1, 4)):
        world.report(0, "replica", replica=replica, phase="starting", life=life)
    world.report(1, "replica", replica=0, phase="ready", life=1)
    first, second = (f"g000001-n0-r{each}-{world.epochs[0]}.jsonl" for each in ("0-1", "1-4"))
    world.report(0, "want", count=8)
    facts = {"how": "ended by SIGKILL", "code": -9, "was_ready": True, "answered": 1, "failures": 1, "load": 0}
    world.report(0, "replica_died", replica=1, name="n0/1#4", in_flight=(3, 4), **facts)
    (lease,) = world.sent[1]
    assert (lease.runs, lease.partials) == (((3, 4), (4, 5)), (second,))
    world.report(1, "returned", runs=((3, 4),))
    world.coordinator.lose(0)
    world.report(2, "want", count=3)
    (lease,) = world.sent[2]
    assert lease.runs == ((0, 3),) and lease.partials == (first, second)
    world.report(2, "want", count=1)
    other = f"g000001-n1-r0-1-{world.epochs[1]}.jsonl"
    assert world.sent[2][1].runs == ((3, 4),) and world.sent[2][1].partials == (second, other)
    world.answer(2, 0, 1, 2, 3)
    await world.coordinator.commit_now()
    assert set(world.coordinator.partials) == {4, 5, 6, 7}
    world.report(1, "replica_died", replica=0, name="n1/0#1", in_flight=(4,), **facts)
    world.report(2, "want", count=1)
    assert world.sent[2][2].alone == (4,) and not world.sent[2][2].partials


async def test_nothing_is_told_where_nothing_is_continued(tmp_path):
    engine = {"callable": "a:b", "continue_from_prefix": "never"}
    world = World(tmp_path, engine=engine)
    world.join(0)
    world.join(1)
    world.report(0, "replica", replica=0, phase="ready", life=1)
    world.report(0, "want", count=4)
    world.coordinator.lose(0)
    world.report(1, "want", count=4)
    assert [lease.partials for lease in world.sent[1]] == [None]


async def test_a_full_disk_holds_commits_up_and_loses_none(world, monkeypatch):
    world.join(0)
    world.report(0, "want", count=5)
    commit, failures = world.ledger.commit, [StorageUnavailable("full"), StorageUnavailable("full")]

    def fail_first(parts: Any) -> int:
        if failures:
            raise failures.pop()
        return commit(parts)

    monkeypatch.setattr(world.ledger, "commit", fail_first)
    monkeypatch.setattr("slurmft.inference.coordinator.STORAGE_PAUSE_S", 0.0)
    world.answer(0, 0, 1)
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 2 and not failures


async def test_a_commit_that_is_given_up_is_done_by_the_next_one(world, monkeypatch):
    """As for a lent node that goes while the disk takes nothing: what others have reported must not be forgotten."""
    world.join(0)
    world.report(0, "want", count=5)
    commit, is_full = world.ledger.commit, [True]

    def fail_while_full(parts: Any) -> int:
        if is_full:
            raise StorageUnavailable("full")
        return commit(parts)

    monkeypatch.setattr(world.ledger, "commit", fail_while_full)
    world.answer(0, 0, 1)
    await world.coordinator.commit_now(0.1)
    assert world.coordinator.requests.done == 0
    is_full.clear()
    await world.coordinator.commit_now()
    assert world.coordinator.requests.done == 2


async def test_no_epoch_comes_again_under_the_next_supervisor(world):
    """Its agents and engines may live on, and say what they had to say to the one before."""
    world.join(0)
    later = open_ledger(world.ledger.batch, 2)
    following = Coordinator(world.config, later.batch, later, world.thread.submit, lambda *_, **__: None)
    assert following.join(0, "n0", lambda _: None) > max(world.epochs.values())
    following.on_report(0, RequestsWanted(epoch=following.agents[0].epoch, count=4))
    segment, end = world.write(0, 0, 1)
    said = RequestsAnswered(epoch=world.epochs[0], segment=segment, end=end, runs=((0, 2),))
    assert not following.on_report(0, said)
    # the name begins with the generation in which the replica was started, and counts by its epoch
    world.epochs[0] = following.agents[0].epoch
    segment, end = world.write(0, 2, 3)
    assert segment.startswith("g000001-")
    assert following.on_report(0, RequestsAnswered(epoch=world.epochs[0], segment=segment, end=end, runs=((2, 4),)))
    await following.commit_now()
    assert later.done.nonzero()[0].tolist() == [2, 3]


async def test_nothing_is_leased_while_the_run_stops(world):
    world.join(0)
    world.coordinator.stop()
    world.report(0, "want", count=5)
    assert world.leased(0) == []


@pytest.mark.parametrize(("phases", "down"), [(["down", "down"], True), (["down", "ready"], False), (["down"], False)])
async def test_the_batch_is_given_up_when_every_replica_is_down(world, phases, down):
    world.join(0)
    world.join(1)
    for node, phase in enumerate(phases):
        world.report(node, "replica", replica=0, phase=phase, life=1)
    assert world.coordinator.all_down is down
