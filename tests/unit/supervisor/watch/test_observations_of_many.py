"""What the supervisor knows of 16,384 ranks: the same as a look at all of them, at a cost that does not grow."""

from __future__ import annotations

import random

from msgspec.structs import replace

from slurmft.ipc.messages import WorkerFacts
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.observations import Observations

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
