"""How many steps each kind of fault costs between two checkpoints, and what the notes after each step cost.

    python bench/just_in_time --output bench/results/just_in_time.md     # some four minutes

Two agents with two ranks each on this machine stand for two nodes; a checkpoint every 20 steps, a fault some 13 steps
after one. A node is killed with its agent, its keeper and its memory. Steps are counted, so other load does not matter;
the cost of the notes is processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import yaml

import slurmft
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.state import Trainee
from slurmft.storage.events import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.trainer.savers import SAVERS

TRAINER = Path(slurmft.__file__).parents[1] / "tests" / "slurm" / "trainers" / "running_totals.py"
STEPS, EVERY, AT = 40, 20, 33
BOTH = ("--buffers", "--extra", "function")


@dataclass(frozen=True)
class Case:
    """One kind of fault."""

    name: str
    ranks: tuple[int, ...]
    options: Sequence[str] = BOTH
    copies: int = 0
    with_agent: bool = False


CASES = (
    Case("a rank; `extra` given as a function, buffers", (3,)),
    Case("rank 0; `extra` as a function, buffers", (0,)),
    Case("all ranks of rank 0's node, whose agent lives", (0, 1)),
    Case("all ranks of the other node, whose agent lives", (2, 3)),
    Case("a rank; `extra` given as a dict", (3,), ("--extra", "mapping")),
    Case("a node with its agent, `peer_copies: 1`", (2,), copies=1, with_agent=True),
    Case("rank 0's node with its agent, `peer_copies: 1`", (0,), copies=1, with_agent=True),
    Case("a node with its agent, no copies", (2,), with_agent=True),
)


class Run:
    """One run without Slurm."""

    def __init__(self, path: Path, options: Sequence[str], *, copies: int = 0, delay: float = 0.1) -> None:
        self.folder, self._config = RunFolder(path), path.with_suffix(".yaml")
        command = [sys.executable, str(TRAINER), "--steps", str(STEPS), "--step-delay", str(delay), *options]
        settings = {
            "command": command, "run_folder": str(path), "nodes": 2, "nproc_per_node": 2,
            "checkpoint": {"interval_steps": EVERY, "peer_copies": copies},
            "fault_tolerance": {"num_in_job_restarts": 3},
        }  # fmt: skip
        self._config.write_text(yaml.safe_dump(settings))

    def submit(self) -> None:
        argv = [sys.executable, "-m", "slurmft", "submit", str(self._config), "--cluster", "local"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)

    @property
    def step(self) -> int:
        return int((self.folder.progress() or {}).get("step") or 0)

    def workers(self) -> dict[int, psutil.Process]:
        """Living ranks: each one's output goes to its own log."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
                parent = process.parent()
                if log.is_relative_to(self.folder.attempts) and parent and "slurmft.agent.zygote" in parent.cmdline():
                    found[int(log.stem.removeprefix("rank-"))] = process
        return found

    def strike(self, case: Case) -> int:
        """Kill; returns the step that was complete."""
        found = self.workers()
        victims = [found[rank] for rank in case.ranks]
        if case.with_agent:
            agent = victims[0].parents()[1]
            victims = [*agent.children(recursive=True), agent]
        step = self.step
        for process in victims:
            process.kill()
        return step

    def resumed_from(self) -> int:
        events = [one for one in self.folder.journal().read() if one.event == EventName.FIRST_STEP]
        return int(events[1].details["resumed_from"])

    def digest(self) -> str:
        text = "".join(path.read_text() for path in self.folder.attempts.glob("*/rank-0.log"))
        return text.split("final weights sha256: ")[1].split()[0]


def wait(condition, what: str, within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def trial(root: Path, number: int, case: Case) -> tuple[int, int, str]:
    """The complete step, the step that the restart began with, and the digest at the end."""
    run = Run(root / f"case-{number}", case.options, copies=case.copies)
    run.submit()
    wait(lambda: run.step >= AT, f"{case.name}: step {AT}")
    step = run.strike(case)
    wait(lambda: run.folder.done() is not None, f"{case.name}: the end")
    return step, run.resumed_from(), run.digest()


def undisturbed(root: Path, options: Sequence[str]) -> str:
    run = Run(root / "-".join(["undisturbed", *options]).replace("--", ""), options, delay=0.0)
    run.submit()
    wait(lambda: run.folder.done() is not None, "the end of an undisturbed run")
    return run.digest()


class _Nothing:
    def __getattr__(self, _name: str):
        return lambda *_values, **_more: None


def cost_of_notes(extra, buffers: int) -> float:
    """Microseconds of processor time for one boundary, on rank 0."""
    SAVERS.listener = _Nothing()
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(256) for _ in range(buffers)), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        one = JustInTime(Path(folder), lambda *_: None)
        one.arm(Trainee(model, optimizer), step=0, extra=extra)
        began, count = time.process_time(), 1000
        for step in range(1, count + 1):
            torch.rand(1)
            one.at_boundary(step)
        return (time.process_time() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        calm = {options: undisturbed(Path(root), options) for options in {case.options for case in CASES}}
        for number, case in enumerate(CASES):
            step, resumed, digest = trial(Path(root), number, case)
            same = "yes" if digest == calm[case.options] else "NO"
            rows.append(f"| {case.name} | {step} | {resumed} | {max(0, step - resumed)} | {same} |")
            print(rows[-1], flush=True)
    totals = {"seen": 0, "sum": 0.0}
    costs = [("generators and loader alone", None, 0), ("with `extra` of two numbers", lambda: totals, 0),
             ("with the buffers of 50 BatchNorm layers of 256 as well", lambda: totals, 50)]  # fmt: skip
    lines = [
        "# What a fault between two checkpoints costs", "",
        f"`python bench/just_in_time --output bench/results/just_in_time.md`, slurmft {slurmft.__version__}", "",
        f"One machine with {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; two agents "
        f"with two ranks each, without Slurm; a checkpoint every {EVERY} steps. Once each; load when it ended: "
        f"{os.getloadavg()[0]:.1f}.", "",
        "| what dies | complete step | resumed from | steps lost | final weights, buffers and `extra` as without it |",
        "|---|---|---|---|---|", *rows, "",
        "Processor time of the notes after one step, on rank 0:", "",
        "| | microseconds |", "|---|---|",
        *(f"| {name} | {cost_of_notes(extra, buffers):.0f} |" for name, extra, buffers in costs), "",
    ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
