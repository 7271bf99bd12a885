"""The supervisor's comparison of digests: whom it names, when it ends the attempt, what it marks."""

import asyncio
import random
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from rank_facts import training

from slurmft.ipc.messages import DigestsReport, RankDigests, WorkerFacts
from slurmft.operations.control import overview
from slurmft.policy import life
from slurmft.policy.verdict import Cause
from slurmft.storage.checkpoint_names import read_digests
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.observations import Observations
from slurmft.supervisor.stops import Machine
from slurmft.supervisor.watches import Digests


class World:
    """An attempt of so many ranks, one on each host, from step 0 on; with the digests of one supervisor."""

    def __init__(self, folder: Path, ranks: int, history: list[Event] | None = None) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.accused: list[str] = []
        self.stops: list[Cause] = []
        self.saved: int | None = None
        self.folder = folder

        def append(name: str, **details: Any) -> None:
            self.events.append((str(name), details))

        def submit(work: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work())
            return future

        start = SimpleNamespace(
            journal=SimpleNamespace(append=append), history=history or [], generation=3,
            thread=SimpleNamespace(submit=submit, ask=lambda work: asyncio.wrap_future(submit(work))),
        )  # fmt: skip
        seen = SimpleNamespace(world_size=ranks, reached=lambda: (0, 0), saved=lambda: self.saved)
        machine = Machine(life.Rules(), {life.BeginStop: lambda begin: self.stops.append(begin.stop.cause)})
        self.over = machine.over
        stops = SimpleNamespace(
            planned=None, feed=machine.feed, stop_for=lambda cause, reason: machine.feed(life.Asked(cause, reason))
        )
        sender = SimpleNamespace(add=lambda found: self.accused.extend(one.suspect.node for one in found))
        config: Any = SimpleNamespace(checkpoint_dir=folder)
        rest: list[Any] = [start, seen, stops, sender]
        self.digests = Digests(config, *rest)

    def tell(self, step: int, *values: int, group: int = 1) -> None:
        for rank, value in enumerate(values):
            ranks = (RankDigests(rank=rank, group=group, digests=((step, value),)),)
            self.digests.note(f"n{rank}", DigestsReport(ranks=ranks))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [details for event, details in self.events if event == name]


def test_a_minority_is_named_once_all_have_reported_and_later_states_are_in_doubt(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    world.tell(10, 7, 7, 7)
    world.saved = 10
    world.tell(20, 8, 9)
    assert not world.over.is_set(), "rank 2 has not said anything yet"
    world.tell(20, 8, 9, 8)
    assert world.over.is_set()
    found = world.digests.found
    assert found is not None
    assert ([one.node for one in found.suspects], found.trusted_step) == (["n1"], 10)
    world.saved = 20
    assert world.digests.trusted(20) == 10
    asyncio.run(world.digests.close())
    record = read_digests(tmp_path)
    assert record.doubt(20, 3) is not None
    assert record.doubt(10, 3) is None
    assert record.doubt(20, 4) is None, "a later attempt has computed it again"
    assert record.is_verified(10, 3)


def test_two_replicas_name_neither_and_the_repetition_tells_which_was_wrong(tmp_path: Path) -> None:
    first = World(tmp_path, 2)
    first.tell(20, 8, -9)
    assert first.digests.found is not None
    assert first.digests.found.suspects == ()
    (facts,) = first.named("replicas differ")
    now = datetime.now(UTC)
    history = [Event(at=now, event="replicas differ", attempt="1.0.0", details=facts)]
    second = World(tmp_path, 2, history)
    second.tell(10, 1, 1)
    assert (second.accused, second.stops) == ([], [])
    second.tell(20, 8, 8)
    assert (second.accused, second.stops) == (["n1"], [Cause.REPLICAS_DIFFER])
    assert [one.node for one in second.digests.convicted] == ["n1"]
    history.append(Event(at=now, event="replica convicted", attempt="1.0.1", details={"step": 20}))
    third = World(tmp_path, 2, history)
    third.tell(20, 8, 8)
    assert third.accused == [], "it counts once"


def test_two_replicas_on_one_node_name_the_node(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    for rank, value in enumerate((1, 2)):
        ranks = (RankDigests(rank=rank, group=1, digests=((5, value),)),)
        world.digests.note("n7", DigestsReport(ranks=ranks))
    assert world.digests.found is not None
    assert {one.node for one in world.digests.found.suspects} == {"n7"}


def test_ranks_that_are_no_replicas_end_the_comparison_and_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path, 3)
    world.tell(5, 1, 2, 3)
    world.tell(10, 4, 4, 5)
    assert not world.over.is_set()
    assert len(world.named("replicas unlike")) == 1
    assert world.named("replicas differ") == []


@pytest.mark.parametrize("details", [{}, {"step": 5, "digests": {"n1": [1]}}, {"step": "x", "digests": {"n1": [1, 2]}}])
def test_a_damaged_journal_convicts_no_node(tmp_path: Path, details: dict[str, Any]) -> None:
    event = Event(at=datetime.now(UTC), event="replicas differ", attempt="1.0.0", details=details)
    world = World(tmp_path, 2, [event])
    world.tell(5, 1, 1)
    assert world.accused == []


# --- What the supervisor knows of 16,384 ranks: the same as a look at all of them, at a cost that does not grow ---


RANK = WorkerFacts(
    rank=0, state=2, attached=True, step=0, until=100, saved=-1, durable=-1, resumed=0, first_step_at=0.0, answered=-1,
    metric=2.5, first_step_s=0.0, longest_step_s=0.0, saves=0, save_failures=0, save_errno=0, save_s=0.0,
    save_cost_s=0.0, saving_s=0.0, since_saved_s=0.0,
)  # fmt: skip


def observations(tmp_path, world: int, done_before: int = 0) -> Observations:
    run = RunFolder(tmp_path)
    return Observations(
        run, run.journal(), Attempt(job="1", restart=0), world, workload="", history=(), done_before=done_before
    )


def test_the_newest_saved_step_is_that_of_a_look_at_all_ranks(tmp_path) -> None:
    dice, world = random.Random(7), 6
    seen = observations(tmp_path, world)
    for _ in range(400):
        rank = dice.randrange(world)
        facts = replace(RANK, rank=rank, attached=dice.random() < 0.9, saved=dice.randrange(-1, 5),
                        durable=dice.choice([-1, -1, -1, 2, 3]))  # fmt: skip
        seen.note_progress([facts])
        ranks = [each for each in seen.ranks().values() if each.attached]
        by_all = min(each.saved for each in ranks) if len(ranks) == world else -1
        newest = max([by_all, *(each.durable for each in ranks)])
        assert seen.saved() == (newest if newest >= 0 else None)


def test_first_step_and_catching_up_are_noted_once_when_the_last_rank_is_there(tmp_path) -> None:
    world = 4
    seen = observations(tmp_path, world, done_before=3)
    events = lambda: [event.event for event in RunFolder(tmp_path).journal().read()]  # noqa: E731
    for step in (1, 2, 3):
        for rank in range(world):
            at_all = rank == world - 1 and step
            before = events()
            seen.note_progress([replace(RANK, rank=rank, step=step, first_step_at=5.0)])
            new = events()[len(before) :]
            assert new == (["first step"] if at_all == 1 else ["caught up"] if at_all == 3 else [])


# --- Copies of steps between saves, as the supervisor tells of them: in the journal, in the progress report, in status


ATTEMPT = Attempt(job="7", restart=0)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_each_doubling_is_told_once(run, caplog):
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    seen.note_progress([training(step=5)])
    for step in (10, 11):
        seen.note_progress([training(step=step, copied=9, copy_interval=2, copy_share_ppm=61_230)])
    seen.note_progress([training(step=40, copied=36, copy_interval=8, copy_share_ppm=50_001)])
    told = [(event.event, event.details) for event in run.journal().read()]
    assert told == [
        ("step copies spaced out", {"step": 10, "interval": 2, "share": 0.0612}),
        ("step copies spaced out", {"step": 40, "interval": 8, "share": 0.05}),
    ]
    assert "steps are copied every 2 steps now: it took 6.1 % of their time" in caplog.text


def test_status_names_the_newest_step_in_memory_where_no_checkpoint_has_it(run, monkeypatch):
    monkeypatch.setattr("slurmft.operations.control._state", lambda *_: ("running", "job 7 running on n1"))
    seen = Observations(run, run.journal(ATTEMPT), ATTEMPT, world_size=1, workload="", history=[])
    for step, saved, copied, shown in ((5, -1, None, ""), (9, 1, 8, "8"), (10, 1, None, "8"), (12, 12, 11, "")):
        seen.note_progress([training(step=step, saved=saved, copied=copied)])
        seen.write_progress()
        detail = overview(run, {}).detail
        assert detail == "job 7 running on n1" + (f"; step {shown} is in memory on all nodes" if shown else "")


def test_what_the_page_says_comes_through_a_message():
    told = training(step=9, copied=8, copy_interval=4, copy_share_ppm=70_000)
    assert WorkerFacts.parse(told.as_mapping(), "a report") == told
    plain = training(step=9)
    assert "copied" not in plain.as_mapping()
    odd = {**told.as_mapping(), "copied": "many", "copy_interval": -1}
    assert WorkerFacts.parse(odd, "a report") == training(step=9, copy_share_ppm=70_000)
