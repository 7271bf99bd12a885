"""A trainer that learns from a queue: ranks, supervisor and writer begin again, and it changes nothing."""

import random
import sys
from pathlib import Path

import pytest

from slurm.test_just_in_time import kill_ranks
from slurm.test_local import LocalRun
from slurmft.storage.queue import Queue

pytestmark = pytest.mark.timeout(400)
STEPS, RANKS = 60, 2
TRAINER = Path(__file__).with_name("trainers") / "from_queue.py"


def begun(path: Path) -> LocalRun:
    run = LocalRun(
        path, command=[sys.executable, str(TRAINER), str(STEPS)], nodes=RANKS, nproc_per_node=1,
        checkpoint={"interval_steps": 10},
    )  # fmt: skip
    run.submit()
    return run


def put(run: LocalRun, first: int, last: int) -> None:
    """What these steps need, by a writer of its own, which ends without a word."""
    queue = Queue(run.folder.path / "queues/rollouts")
    for step in range(first, last):
        for rank in range(RANKS):
            dice = random.Random(f"{step} {rank}")
            queue.put(f"{step}-{rank}", [dice.random() for _ in range(8)])


@pytest.mark.long
def test_weights_are_those_of_an_undisturbed_run_whoever_is_killed(tmp_path: Path) -> None:
    calm = begun(tmp_path / "calm")
    put(calm, 0, STEPS)
    calm.wait_until_done()

    run = begun(tmp_path / "disturbed")
    put(run, 0, 16)
    run.wait_for_step(15)  # the trainer waits for the next items
    kill_ranks(run, 1)
    put(run, 0, 32)
    run.wait_for_step(31)
    run.supervisor.terminate()
    put(run, 30, STEPS)
    run.wait_until_done()
    assert len(run.events("attempt started")) >= 3, run.story()
    assert run.digest() == calm.digest()
