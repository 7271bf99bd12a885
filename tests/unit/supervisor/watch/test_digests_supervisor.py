"""The supervisor's comparison of digests: whom it names, when it ends the attempt, what it marks."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.ipc.messages import DigestsReport, RankDigests
from slurmft.policy.verdict import Cause
from slurmft.storage.checkpoint_names import read_digests
from slurmft.storage.journal import Event
from slurmft.supervisor.stops import Digests


class World:
    """An attempt of so many ranks, one on each host, from step 0 on; with the digests of one supervisor."""

    def __init__(self, folder: Path, ranks: int, history: list[Event] | None = None) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.accused: list[str] = []
        self.stops: list[Cause] = []
        self.saved: int | None = None
        self.over = asyncio.Event()
        self.folder = folder

        def append(name: str, **details: Any) -> None:
            self.events.append((str(name), details))

        def submit(work: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work())
            return future

        start = SimpleNamespace(
            journal=SimpleNamespace(append=append), history=history or [], generation=3,
            thread=SimpleNamespace(submit=submit),
        )  # fmt: skip
        seen = SimpleNamespace(world_size=ranks, reached=lambda: (0, 0), saved=lambda: self.saved)
        stops = SimpleNamespace(planned=None, stop_for=lambda cause, reason: self.stops.append(cause))
        accuser = SimpleNamespace(add=lambda found: self.accused.extend(one.suspect.node for one in found))
        config: Any = SimpleNamespace(checkpoint_dir=folder)
        rest: list[Any] = [start, seen, stops, accuser]
        self.digests = Digests(config, *rest, over=self.over)

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
