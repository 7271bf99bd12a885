"""Copies of every step in other nodes' memory: what a lost node costs a run whose weights nobody else has.

Without Slurm: two agents on this machine stand for two nodes. Killing one takes its workers, its keeper and the memory
that they had with it, as a power cut does.
"""

import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm.conftest import eventually
from slurm.test_just_in_time import copied, kill_node, kill_ranks, resumed_from, wait_for_restart, workers
from slurm.test_local import LocalRun

pytestmark = pytest.mark.timeout(200)
STEPS = 40
WIDE = ["--width", "256"]
"""0.8 MB for each rank."""

TRAINER = [sys.executable, str(Path(__file__).parent / "trainers" / "sharded.py")]


def new_run(path: Path, *options: str, delay: float = 0.2, copies: int = 1, **checkpoint: Any) -> LocalRun:
    """Saves go to disk after the first step and at the end: what else is found was in memory."""
    return LocalRun(
        path,
        command=[*TRAINER, "--steps", str(STEPS), "--step-delay", str(delay), *options],
        nproc_per_node=1,
        checkpoint={"interval_steps": 1000, "peer_copies": copies, "peer_interval": 1, **checkpoint},
        fault_tolerance={"num_in_job_restarts": 30},
    )


def step_of(run: LocalRun) -> int:
    return int((run.folder.progress() or {}).get("step") or 0)


def wait_for_copy(run: LocalRun, step: int) -> None:
    eventually(lambda: copied(run) >= step, 60, lambda: f"a copy of step {step}\n{run.story()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("step-copies") / "undisturbed", delay=0.0, peer_interval=0)
    run.submit("--wait")
    return run.digest()


@pytest.fixture(scope="module")
def undisturbed_wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("step-copies") / "wide", *WIDE, delay=0.0, peer_interval=0)
    run.submit("--wait")
    return run.digest()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_lost_node_costs_a_sharded_run_one_step(tmp_path: Path, undisturbed: str, rank: int) -> None:
    run = new_run(tmp_path / "run")
    run.submit()
    wait_for_copy(run, 12)
    before = step_of(run)
    kill_node(run, rank, at_rest=rank)
    run.wait_until_done()
    assert resumed_from(run, 1) >= before - 1, run.story()
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_node_that_dies_in_the_middle_of_a_copy_costs_that_copy_alone(tmp_path: Path, undisturbed_wide: str) -> None:
    """Each copy takes many steps, which go on meanwhile: the one before it stays until it is whole."""
    run = new_run(tmp_path / "run", *WIDE, delay=0.15, bandwidth="300K")
    run.submit()
    wait_for_copy(run, 2)
    run.wait_for_step(copied(run) + 4)  # the next one is on its way
    known = copied(run)
    kill_node(run, 1)
    run.wait_until_done()
    assert known <= resumed_from(run, 1) < STEPS, run.story()
    assert run.digest() == undisturbed_wide


@pytest.mark.long
def test_a_writer_that_is_stopped_is_replaced_and_copies_go_on(tmp_path: Path, undisturbed: str) -> None:
    run = new_run(tmp_path / "run", stall_timeout_s=2)
    run.submit()
    wait_for_copy(run, 4)
    (writer,) = [
        process for process in workers(run)[1].children() if "slurmft.checkpoint.writer" in " ".join(process.cmdline())
    ]
    writer.suspend()
    stopped_at = step_of(run)
    wait_for_copy(run, stopped_at + 3)
    run.wait_until_done()
    assert not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_stop_during_a_copy_saves_as_ever(tmp_path: Path, undisturbed_wide: str) -> None:
    run = new_run(tmp_path / "run", *WIDE, delay=0.15, bandwidth="300K")
    run.submit()
    wait_for_copy(run, 2)
    run.wait_for_step(copied(run) + 3)
    run.slurmft("stop", str(run.folder.path), "--timeout", "30")
    progress = run.folder.progress() or {}
    assert progress["saved"] == progress["step"] < STEPS
    run.submit("--wait")
    assert run.digest() == undisturbed_wide


@pytest.mark.long
def test_two_nodes_lost_one_after_the_other(tmp_path: Path, undisturbed: str) -> None:
    """The second goes as soon as the first one's successor trains: its new copies may not be whole yet."""
    run = new_run(tmp_path / "run")
    run.submit()
    wait_for_copy(run, 10)
    kill_node(run, 1)
    wait_for_restart(run, 1)
    first = resumed_from(run, 1)
    kill_node(run, 0)
    run.wait_until_done()
    assert 10 <= first <= resumed_from(run, 2), run.story()
    assert run.digest() == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_faults_at_random_moments_change_nothing(tmp_path: Path, undisturbed: str, seed: int) -> None:
    """Ranks, writers, keepers and nodes, also two at once; a fault may cost steps, but never mixes two."""
    chance = random.Random(seed)
    run = new_run(tmp_path / "run", delay=0.05)
    run.submit()
    for number in range(1, 5):
        wait_for_restart(run, number - 1)
        run.wait_for_step(8 * number)
        time.sleep(chance.random() * 0.1)
        with contextlib.suppress(KeyError, IndexError, psutil.NoSuchProcess, AssertionError):  # gone already
            rank = chance.randrange(2)
            match chance.choice(["rank", "node", "writer and node", "both nodes' ranks"]):
                case "rank":
                    kill_ranks(run, rank)
                case "node":
                    kill_node(run, rank)
                case "writer and node":
                    for process in workers(run)[rank].children():
                        process.kill()
                    time.sleep(chance.random() * 0.1)
                    kill_node(run, 1 - rank)
                case _:
                    kill_ranks(run, 0, 1)
    run.wait_until_done()
    assert run.digest() == undisturbed
