"""A bit that flips silently on a real cluster: found in time, its node excluded, and no trace left in the weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

INTERVAL = 5
SETTINGS: dict[str, Any] = {
    "delay": 0.25,
    "digests": {"interval_steps": INTERVAL},
    "checkpoint": {"interval_steps": 10},
}
FAULTS = ("bit-flip", "bit-flip-moment", "bit-flip-gradient")


def flip(run: Run, fault: str, rank: int, at: int) -> None:
    run.reach(at)
    run.slurmft("inject", str(run.path), fault, "--rank", str(rank))
    run.wait_until_done()


def check(run: Run, rank: int, undisturbed: str) -> None:
    """Found in the first comparison after it, on the right node, which takes no part any more; weights as ever."""
    (found,) = run.events("replicas differ")
    hosts = [event.details["hosts"] for event in run.events("agents ready")]
    node = hosts[0][rank // 2]
    assert (found.details["ranks"], found.details["nodes"]) == ([rank], [node]), run.story()
    assert found.details["step"] - found.details["trusted_step"] <= INTERVAL, run.story()
    assert node not in hosts[-1], run.story()
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_flipped_bit_is_found_its_node_left_and_the_weights_are_as_ever(
    new_run: Callable[..., Run], undisturbed: str
) -> None:
    run = new_run(**SETTINGS)
    flip(run, "bit-flip", 1, 6)
    check(run, 1, undisturbed)
    told = run.slurmft("explain", str(run.path))
    assert "silent data corruption" in told


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_every_flipped_bit_is_found(new_run: Callable[..., Run], undisturbed: str) -> None:
    """Goes on where it ended: the file has a line for each run, those that failed included."""
    book = Path(os.environ.get("SLURMFT_SOAK_BOOK", "build/soak-digests.tsv"))
    book.parent.mkdir(exist_ok=True)
    lines = book.read_text().splitlines() if book.exists() else []
    for number in range(len(lines), int(os.environ.get("SLURMFT_DIGEST_FLIPS", "50"))):
        fault, rank, at = FAULTS[number % 3], number % 4, 5 + 7 * number % 40
        run = new_run(f"flip-{number}", **SETTINGS)
        words = "failed"
        try:
            flip(run, fault, rank, at)
            check(run, rank, undisturbed)
            (found,) = run.events("replicas differ")
            words = f"found\t{found.details['step'] - found.details['trusted_step']}"
        finally:
            with book.open("a") as file:
                file.write(f"{number}\t{fault}\t{rank}\t{at}\t{words}\n")
    assert not [line for line in book.read_text().splitlines() if line.endswith("failed")]
