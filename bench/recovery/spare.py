"""A node loses power on a real Slurm cluster: how long until the training goes on with the spare."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from contenders import TRAINER

from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings
from slurmft.storage.run_folder import RunFolder

SLURMD_TIMEOUT_S = 600
STEPS_BEFORE = 25
PATIENCE_S = 90.0


def measure(rounds: int, say: Callable[[str], None]) -> list[float]:
    """Seconds from the node's end to the first new step of the next attempt."""
    folder = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    lab = Lab.up(LabSettings(folder=folder, nodes=3, slurmd_timeout_s=SLURMD_TIMEOUT_S))
    try:
        found = []
        for number in range(rounds):
            found.append(once(lab, f"spare-{number}"))
            say(f"a node lost, on to the spare: {found[-1]:.2f} s")
        return found
    finally:
        cluster.purge(folder)


def once(lab: Lab, name: str) -> float:
    marks = lab.home / f"{name}-marks"
    marks.mkdir()
    os.chown(marks, lab.uid, lab.gid)
    run = RunFolder(lab.home / name)
    config = {
        "command": ["python", str(TRAINER), str(marks), "session"], "run_folder": str(run.path), "nodes": 2,
        "spare_nodes": 1, "nproc_per_node": 1, "checkpoint": {"interval_steps": 20},
    }  # fmt: skip
    path = lab.home / f"{name}.yaml"
    path.write_text(json.dumps(config))
    job = lab.run(["slurmft", "submit", str(path)]).stdout.split(" as job ")[1].split()[0]
    until(lambda: steps(marks) >= STEPS_BEFORE, "training")
    victim = [event for event in run.journal().read() if event.event == "agents ready"][-1].details["hosts"][1]
    at = time.time()
    lab.kill_node(victim)

    def next_step() -> float | None:
        firsts = [event for event in run.journal().read() if event.event == "first step"]
        return firsts[1].seconds() if len(firsts) > 1 else None

    until(lambda: next_step() is not None, "step on the spare")
    diary = [line.split(" ", 2) for line in (marks / "marks-0").read_text().splitlines()]
    pid = diary[-1][1]
    first = next(float(moment) for moment, its, what in diary if its == pid and what.startswith("step "))
    lab.run_as_admin(["scancel", job])
    lab.start_node(victim)
    until(lambda: set(lab.node_states().values()) == {"IDLE"}, "idle nodes")
    return first - at


def steps(marks: Path) -> int:
    try:
        return (marks / "marks-0").read_text().count(" step ")
    except FileNotFoundError:
        return 0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.02)
