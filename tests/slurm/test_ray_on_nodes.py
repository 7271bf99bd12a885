"""The exercise of an elastic trainer: four nodes, one dies, two are lent; Ray Train goes on inside of one attempt."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [needs("ray"), pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(3600)]

RAY_S = 900.0
"""A group of workers on a busy machine with two cores: each of them imports Ray and torch first."""

SMALL = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000",
         "OMP_NUM_THREADS": "1"}  # fmt: skip


def steps(storage: Path) -> list[dict[str, Any]]:
    """What the trainer's first worker has noted, in the order in which it was done."""
    try:
        return [json.loads(line) for line in (storage / "steps.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def wait_for_workers(run: Run, storage: Path, count: int, more: int = 25) -> None:
    """Wait until so many workers train, and have done a few more steps than it takes to save."""

    def train() -> bool:
        return len([each for each in steps(storage)[-more:] if each["workers"] == count]) == more

    eventually(train, RAY_S, lambda: f"{count} workers; last steps {steps(storage)[-2:]}\n{run.story()}")


def left_behind(lab: Lab, nodes: list[str]) -> str:
    """Processes of Ray on these nodes."""
    look = ["bash", "-c", "ps -eo args | grep -E '[r]aylet|[g]cs_server|[r]ay::|[s]lurmft.agent.ray' || true"]
    return "".join(lab.run_on_as_admin(node, look, check=False).stdout for node in nodes)


def resizes(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each change of the number of workers: seconds without a step, and steps that were done twice."""
    found = []
    for before, after in pairwise(done):
        if after["workers"] != before["workers"] or after["step"] != before["step"] + 1:
            found.append({"from": before["workers"], "to": after["workers"], "step": before["step"],
                          "lost": before["step"] + 1 - after["step"], "seconds": after["at"] - before["at"],
                          "last_step_at": before["at"]})  # fmt: skip
    return found


def test_four_then_three_then_five(lab: Lab, new_run: Callable[..., Run]) -> None:
    storage = lab.home / "runs" / "ray-storage"
    command = ["python", "-m", "slurmft.examples.ray_regression", "--storage", str(storage), "--steps", "100000",
               "--step-delay", "0.1"]  # fmt: skip
    run = new_run(
        command=command, nodes=4, nproc_per_node=1, launcher="ray", environment=SMALL,
        elastic={"min_nodes": 1, "max_nodes": 5}, slurm={"cpus-per-task": 1, "time": "40"},
    )  # fmt: skip
    job = run.submit()
    wait_for_workers(run, storage, 4)
    began = run.events("agents ready")[0].details["hosts"]
    lost, killed_at = began[3], time.time()
    lab.kill_node(lost)
    try:
        wait_for_workers(run, storage, 3)
        detected = run.wait_for("agent lost").at.timestamp() - killed_at
        run.wait_for("node given back", within_s=60)
    finally:
        lab.start_node(lost)
    lender = run.slurmft("join", str(run.path), "--nodes", "2", "--", "--time=30").split("job ")[1].split(",")[0]
    joined_at = time.time()
    wait_for_workers(run, storage, 5)
    took_in = [event.at.timestamp() - joined_at for event in run.events("ray node joined")]
    stopped_at = time.time()
    run.slurmft("stop", str(run.path), "--timeout", "60")
    ended_s = run.events("verdict")[-1].at.timestamp() - stopped_at

    done = steps(storage)
    rows = resizes(done)
    told = {"detected_s": detected, "taken_in_s": took_in, "resizes": rows, "stop_s": ended_s, "last": done[-1]}
    (lab.home / "ray-exercise.json").write_text(json.dumps(told, indent=2, default=str))
    print(json.dumps(told, indent=2, default=str))
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0"], run.story()
    sizes = [row["to"] for row in rows]
    assert 3 in sizes and sizes[-1] == 5, rows
    by_step: dict[int, float] = {}
    for each in done:  # what was done again, on another number of workers, comes out the same
        assert abs(by_step.setdefault(each["step"], each["loss"]) - each["loss"]) <= 1e-4 * max(1.0, each["loss"])
    assert sorted(by_step) == list(range(1, done[-1]["step"] + 1)), "a step is missing"
    assert left_behind(lab, [f"n{number}" for number in range(1, 5)]) == ""
    lab.run(["scancel", lender])  # the run could be submitted again, so it would wait
    eventually(lambda: not lab.run(["squeue", "-h", "-j", lender], check=False).stdout, 60, "the lender has ended")


def test_a_term_saves_and_slurm_starts_it_again(lab: Lab, new_run: Callable[..., Run]) -> None:
    """Two runs on the same two nodes; one gets what Slurm sends at a preemption, the other one does not notice."""
    runs, storages = [], []
    for name in ("ray-term", "ray-beside"):
        storage = lab.home / "runs" / f"{name}-storage"
        command = ["python", "-m", "slurmft.examples.ray_regression", "--storage", str(storage), "--steps", "100000",
                   "--save-every", "100000", "--step-delay", "0.1", "--workers", "2", "2"]  # fmt: skip
        run = new_run(
            name, command=command, nodes=2, nproc_per_node=1, launcher="ray", environment=SMALL,
            slurm={"cpus-per-task": 1, "time": "40", "nodelist": "n1,n2"},
        )  # fmt: skip
        run.submit()
        runs.append(run)
        storages.append(storage)
    for run, storage in zip(runs, storages, strict=True):
        wait_for_workers(run, storage, 2)
    run, beside = runs
    (job,) = run.folder.jobs()
    lab.run(["scancel", "--batch", "--signal=TERM", job])
    run.wait_for("requeued", within_s=RAY_S)
    stopped = steps(storages[0])[-1]["step"]
    eventually(lambda: steps(storages[0])[-1]["step"] >= stopped + 25, RAY_S, run.story)
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.1.0"], run.story()
    done = [each["step"] for each in steps(storages[0])]
    assert done == list(range(1, len(done) + 1)), f"a step is missing or done twice around {stopped}\n{run.story()}"

    (other,) = beside.folder.jobs()
    assert [event.attempt for event in beside.events("attempt started")] == [f"{other}.0.0"], beside.story()
    done = [each["step"] for each in steps(storages[1])]
    assert done == list(range(1, len(done) + 1)), beside.story()
    for each in runs:
        each.slurmft("stop", str(each.path), "--timeout", "60")
    for each, number in ((run, job), (beside, other)):
        each.wait_until_out_of_queue(number)
    assert left_behind(lab, ["n1", "n2"]) == ""
