"""Faults between two checkpoints: what each costs, and that the rest of the run is as if there had been none.

Without Slurm: two agents on this machine stand for two nodes. Killing one takes its workers, its keeper and the memory
that they had with it, as a power cut does.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slurm.test_local import LocalRun
from slurmft.storage.events import EventName

pytestmark = pytest.mark.timeout(200)
STEPS = 40
TRAINER = [sys.executable, str(Path(__file__).parent / "trainers" / "running_totals.py")]
FULL = ["--buffers", "--extra", "function"]


def new_run(path: Path, options: Sequence[str] = FULL, *, delay: float = 0.1, copies: int = 0) -> LocalRun:
    return LocalRun(
        path,
        command=[*TRAINER, "--steps", str(STEPS), "--step-delay", str(delay), *options],
        checkpoint={"interval_steps": 10, "peer_copies": copies},
        fault_tolerance={"num_in_job_restarts": 30},
    )


def workers(run: LocalRun) -> dict[int, psutil.Process]:
    """The newest attempt's living workers by rank: each one's output goes to its own log."""
    found = {}
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:
            continue
        if log.is_relative_to(run.folder.attempts) and log.stem.startswith("rank-"):
            parent = process.parent()
            if parent is not None and "slurmft.agent.zygote" in " ".join(parent.cmdline()):
                found[int(log.stem.removeprefix("rank-"))] = process
    return found


def kill_ranks(run: LocalRun, *ranks: int) -> None:
    found = workers(run)
    for rank in ranks:
        found[rank].kill()


def kill_node(run: LocalRun, rank: int) -> None:
    """The agent of that rank's node, and all that is below it."""
    agent = workers(run)[rank].parents()[1]
    assert "agent" in agent.cmdline(), agent.cmdline()
    for process in (*agent.children(recursive=True), agent):
        with contextlib.suppress(psutil.NoSuchProcess):  # some end with the one before
            process.kill()


def between_steps(run: LocalRun, rank: int) -> None:
    """Return while the rank sleeps at the beginning of a step: what it had is noted, and on its way to its peer."""
    process = workers(run)[rank]
    sleeping = {"x86_64": "230", "aarch64": "115"}[os.uname().machine]
    while True:
        try:
            if Path(f"/proc/{process.pid}/syscall").read_text().split()[0] == sleeping:
                break
        except (OSError, IndexError):
            pytest.fail("it is gone")
    time.sleep(0.03)  # a kill a moment after the note may come before it has reached the peer: that is measured apart


def resumed_from(run: LocalRun, number: int) -> int:
    events = [one for one in run.folder.journal().read() if one.event == EventName.FIRST_STEP]
    return int(events[number].details["resumed_from"])


def wait_for_restart(run: LocalRun, number: int) -> None:
    from slurm.conftest import eventually

    def has_begun() -> bool:
        events = [one for one in run.folder.journal().read() if one.event == EventName.FIRST_STEP]
        return len(events) > number

    eventually(has_begun, 60, run.story)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("just-in-time") / "undisturbed", delay=0.0)
    run.submit("--wait")
    return run.digest()


CASES = {
    "rank 0": lambda run: kill_ranks(run, 0),
    "all of rank 0's node": lambda run: kill_ranks(run, 0, 1),
    "rank 3": lambda run: kill_ranks(run, 3),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_with_buffers_and_extra_no_step_is_lost(tmp_path: Path, undisturbed: str, case: str) -> None:
    run = new_run(tmp_path / "run")
    run.submit()
    run.wait_for_step(16)
    between_steps(run, 0)
    CASES[case](run)
    run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    assert run.digest() == undisturbed


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_with_peer_copies_no_step_is_lost_with_a_node(tmp_path: Path, undisturbed: str, rank: int) -> None:
    run = new_run(tmp_path / "run", copies=1)
    run.submit()
    run.wait_for_step(16)
    between_steps(run, rank)
    kill_node(run, rank)
    run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    assert run.digest() == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_faults_at_random_moments_change_nothing(tmp_path: Path, undisturbed: str, seed: int) -> None:
    """Also two ranks at once, and a node after a rank; a fault may cost steps, but never mixes two."""
    chance = random.Random(seed)
    run = new_run(tmp_path / "run", delay=0.05, copies=1)
    run.submit()
    for number in range(1, 5):
        wait_for_restart(run, number - 1)
        run.wait_for_step(8 * number)
        time.sleep(chance.random() * 0.1)
        ranks = chance.sample(range(4), chance.choice([1, 1, 2]))
        try:
            kill_ranks(run, *ranks)
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.1)
                kill_node(run, chance.choice([0, 2]))
        except (KeyError, IndexError, psutil.NoSuchProcess, AssertionError):
            pass  # gone already
    run.wait_until_done()
    assert run.digest() == undisturbed
