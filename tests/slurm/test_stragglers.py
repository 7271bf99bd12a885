"""Slow nodes on a real cluster: the slow one is named, the others never are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = pytest.mark.slurm

TRAINER = ["python", str(Path(__file__).parent / "trainers" / "straggler.py")]
DETECTION = {"report_time_interval": 1.0, "windows_needed": 3, "windows_considered": 5}


@pytest.fixture
def trained(new_run: Callable[..., Run]) -> Callable[..., Run]:
    """A run, submitted."""

    def start(*options: str, steps: int, name: str = "", nodes: int = 4, nproc: int = 1, **detection: object) -> Run:
        run = new_run(
            name, command=[*TRAINER, "--steps", str(steps), *options], nodes=nodes, nproc_per_node=nproc,
            checkpoint={"interval_steps": 100000}, straggler_detection=DETECTION | detection,
        )  # fmt: skip
        run.submit()
        return run

    return start


def accused(run: Run) -> set[str]:
    """Nodes that a verdict named. Two windows of a second, for a suspicion, may be noise on a busy machine."""
    return {node for event in run.events("straggler detected") for node in event.details["nodes"]}


def test_a_node_whose_cpu_is_limited_is_found_and_no_other(trained: Callable[..., Run], lab: Lab):
    run = trained("--work", "0.03", "--busy", steps=100_000)
    run.wait_for_step(60)
    assert accused(run) == set(), run.story()
    lab.slow_node("n3", cpus=0.1, for_s=60)
    try:
        found = run.wait_for("straggler detected", within_s=30)
    finally:
        lab.restore_speed("n3")
    assert (found.details["nodes"], found.details["slowdown"] > 1.2) == (["n3"], True)
    assert accused(run) == {"n3"}, run.story()
    run.slurmft("stop", str(run.path), "--timeout", "60")  # the past is written every second, and at the end
    past = json.loads((run.path / "stragglers.json").read_text())
    assert [each["nodes"] for each in past["convictions"]] == [["n3"]]


@pytest.mark.long
def test_a_run_moves_away_from_a_slow_node_and_ends_with_the_same_weights(trained: Callable[..., Run], lab: Lab):
    steps = 250
    undisturbed = trained("--work", "0", steps=steps, nodes=3, name="not-slow")
    undisturbed.wait_until_done()

    run = trained("--work", "0.01", "--busy", steps=steps, nodes=3, stop_if_detected=True, requeue_cost_s=1)
    run.wait_for_step(50)
    slow = run.wait_for("agents ready").details["hosts"][1]
    lab.slow_node(slow, cpus=0.05, for_s=120)
    try:
        run.wait_for("straggler judged", within_s=40)
        run.wait_for("agents ready", 2, within_s=60)
        run.wait_until_done()
    finally:
        lab.restore_speed(slow)
    judged = run.wait_for("straggler judged").details
    assert (judged["nodes"], judged["move"]) == ([slow], True), run.story()
    assert slow not in run.wait_for("agents ready", 2).details["hosts"], run.story()
    assert accused(run) == {slow}, run.story()
    assert run.digest() == undisturbed.digest()


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--slow-stage",), id="no roles", marks=pytest.mark.soak),
        pytest.param(("--slow-stage", "--roles"), id="roles"),
    ],
)
def test_a_slow_stage_accuses_nobody(trained: Callable[..., Run], options: tuple[str, ...]):
    run = trained("--work", "0.02", *options, steps=100, nproc=2)
    run.wait_until_done()
    assert accused(run) == set(), run.story()
    assert "CPU relative performance:" in "".join(path.read_text() for path in run.folder.logs.glob("*.log"))
