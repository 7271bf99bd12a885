"""The agent waits until each part of the state that its workers have is kept by one of them."""

import asyncio
from pathlib import Path

import pytest

from slurmft.agent import agent
from slurmft.agent.agent import rescue_on_node
from slurmft.agent.workers import Worker
from slurmft.ipc.pages import NOTHING, Page, Slot

STEP = 6


def worker_of(rank: int, part: int, *, exit_code: int | None = None) -> Worker:
    page = Page.private()
    page[Slot.RESCUABLE], page[Slot.RESCUE_PART] = STEP, part
    return Worker(rank=rank, page=page, stacks=Path(f"/nowhere/rank-{rank}.stacks"), exit_code=exit_code)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that were asked; in this order they keep their state, one in each look at the pages."""
    ranks: list[int] = []
    monkeypatch.setattr(agent, "_wake", lambda pipe: ranks.append(int(pipe.stem.removeprefix("rank-"))))
    return ranks


def rescue(workers: list[Worker], asked: list[int], keeping: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    pause = asyncio.sleep

    async def keep_one(_seconds: float) -> None:
        await pause(0)
        if keeping and keeping[0] in asked:
            page = workers[keeping.pop(0)].page
            page[Slot.RESCUED], page[Slot.RESCUABLE] = STEP, NOTHING

    monkeypatch.setattr(agent.asyncio, "sleep", keep_one)
    return asyncio.run(rescue_on_node(workers))


def test_a_state_that_all_have_is_kept_once_one_has_kept_it(asked, monkeypatch):
    keeping = [0, 1]
    assert rescue([worker_of(0, 0), worker_of(1, 0)], asked, keeping, monkeypatch) == STEP
    assert asked == [0, 1] and keeping == [1]


@pytest.mark.parametrize("parts", [[0, 1, 0, 1], [0, 1, 1, 0]])
def test_each_part_is_waited_for_and_no_second_rank_that_has_it(asked, monkeypatch, parts):
    workers, keeping = [worker_of(rank, part) for rank, part in enumerate(parts)], [0, 1, 2, 3]
    assert rescue(workers, asked, keeping, monkeypatch) == STEP
    assert keeping == [2, 3]


def test_a_part_whose_only_rank_has_ended_is_not_waited_for(asked, monkeypatch):
    keeping = [0]
    assert rescue([worker_of(0, 0), worker_of(1, 1, exit_code=-9)], asked, keeping, monkeypatch) == STEP
    assert asked == [0] and keeping == []


def test_a_part_that_cannot_be_kept_is_given_up(asked, monkeypatch):
    monkeypatch.setattr(agent, "BEGIN_S", 0.05)
    assert rescue([worker_of(0, 0), worker_of(1, 1)], asked, [0], monkeypatch) == STEP
