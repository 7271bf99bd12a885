"""Copies of every step in other nodes' memory: what a lost node costs a run whose weights nobody else has.

Without Slurm: two agents on this machine stand for two nodes. Killing one takes its workers, its keeper and the memory
that they had with it, as a power cut does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import eventually
from slurm.test_just_in_time import between_steps, kill_node, resumed_from
from slurm.test_local import LocalRun

pytestmark = pytest.mark.timeout(200)
STEPS = 40
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


def copied(run: LocalRun) -> int:
    """The newest step that all nodes have in memory, as the run reports it."""
    return int((run.folder.progress() or {}).get("copied") or 0)


def step_of(run: LocalRun) -> int:
    return int((run.folder.progress() or {}).get("step") or 0)


def wait_for_copy(run: LocalRun, step: int) -> None:
    eventually(lambda: copied(run) >= step, 60, lambda: f"a copy of step {step}\n{run.story()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("step-copies") / "undisturbed", delay=0.0, peer_interval=0)
    run.submit("--wait")
    return run.digest()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_node_costs_a_sharded_run_one_step(tmp_path: Path, undisturbed: str, rank: int) -> None:
    run = new_run(tmp_path / "run")
    run.submit()
    wait_for_copy(run, 12)
    between_steps(run, rank)
    before = step_of(run)
    kill_node(run, rank)
    run.wait_until_done()
    assert resumed_from(run, 1) >= before - 1, run.story()
    assert run.digest() == undisturbed
