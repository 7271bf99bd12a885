"""Saving every 1, 5 and 10 epochs: what it costs, and what is lost when a rank is killed; on Slurm or here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from epochs import EPOCHS, STEPS_PER_EPOCH
from table import middle, spread

from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings
from slurmft.storage.run_folder import RunFolder

TRAINER = Path(__file__).with_name("epochs.py")
INTERVALS = (1, 5, 10)
KILL_AFTER = 175
PATIENCE_S = 120.0
RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to save: keys of the configuration's section ``checkpoint``."""

    name: str
    options: dict[str, bool]


WAYS = (
    Way(name="asynchronous, just in time as well", options={"async_save": True, "just_in_time": True}),
    Way(name="asynchronous", options={"async_save": True, "just_in_time": False}),
    Way(name="synchronous", options={"async_save": False, "just_in_time": False}),
)


class Place(Protocol):
    """Where the runs go."""

    folder: Path

    def start(self, config: Path) -> None: ...

    def kill(self, run: RunFolder, rank: int, pid: int) -> None: ...


@dataclass
class Here:
    """Two ranks on this machine, without Slurm."""

    folder: Path
    running: subprocess.Popen[bytes] | None = None

    def start(self, config: Path) -> None:
        with config.with_suffix(".log").open("ab") as output:
            self.running = subprocess.Popen(
                [sys.executable, "-P", "-m", "slurmft", "run", str(config)], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def kill(self, run: RunFolder, rank: int, pid: int) -> None:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)

    def stop(self) -> None:
        """What is left of the newest run, where the bench ends early."""
        if self.running and self.running.poll() is None:
            RunFolder(Path(self.running.args[-1]).with_suffix("")).request("KILL", "bench/checkpoint")
            self.running.wait(60)


@dataclass
class OnLab:
    """Two nodes of a cluster, one rank on each."""

    lab: Lab

    @property
    def folder(self) -> Path:
        return self.lab.home

    def start(self, config: Path) -> None:
        self.lab.run(["slurmft", "submit", str(config)])

    def kill(self, run: RunFolder, rank: int, pid: int) -> None:
        ready = [event for event in run.journal().read() if event.event == "agents ready"]
        self.lab.run_on_as_admin(ready[-1].details["hosts"][rank], ["kill", "-KILL", str(pid)])


@contextmanager
def place(*, on_lab: bool) -> Iterator[Place]:
    if not on_lab:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
            here = Here(Path(name))
            try:
                yield here
            finally:
                here.stop()
        return
    folder = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    lab = Lab.up(LabSettings(folder=folder, nodes=RANKS))
    try:
        yield OnLab(lab)
    finally:
        cluster.purge(folder)


class Once:
    """One run."""

    def __init__(self, place: Place, name: str, options: dict[str, bool], interval_steps: int) -> None:
        self.place = place
        self.marks = place.folder / f"{name}-marks"
        self.marks.mkdir()
        self.run = RunFolder(place.folder / name)
        on_lab = isinstance(place, OnLab)
        if on_lab:
            os.chown(self.marks, place.lab.uid, place.lab.gid)
        config = {
            "command": ["python", str(TRAINER), str(self.marks)], "run_folder": str(self.run.path),
            "nodes": RANKS if on_lab else 1, "nproc_per_node": 1 if on_lab else RANKS,
            "environment": {"OMP_NUM_THREADS": 1}, "checkpoint": {"interval_steps": interval_steps, **options},
        }  # fmt: skip
        path = place.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        place.start(path)

    def diary(self, rank: int = 0) -> list[tuple[float, int, str, list[str]]]:
        try:
            lines = (self.marks / f"marks-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines if line.count(" ") >= 2]
        return [(float(at), int(pid), what, rest) for at, pid, what, *rest in words]

    def last_step(self, rank: int = 0) -> int:
        return max((int(rest[0]) for _, _, what, rest in self.diary(rank) if what == "step"), default=0)

    def finish(self) -> None:
        until(lambda: self.run.done() is not None, "end of the run")
        if isinstance(self.place, Here) and self.place.running:
            self.place.running.wait(60)
        elif isinstance(self.place, OnLab):
            lab = self.place.lab
            until(lambda: not lab.run(["squeue", "-h"], check=False).stdout.strip(), "empty queue")

    def training_s(self) -> float:
        """From the first load to the end of the last step or save."""
        diary = self.diary()
        return diary[-1][0] - diary[0][0]

    def saves_s(self) -> list[float]:
        """The calls, but the one at the end, which always waits."""
        calls = [(int(rest[0]), float(rest[1])) for _, _, what, rest in self.diary() if what == "saved"]
        return [seconds for step, seconds in calls if step < EPOCHS * STEPS_PER_EPOCH]

    def kill_and_recover(self) -> tuple[int, float, float]:
        """Steps that were lost; seconds to the next step of all, and until the lost ones were done again."""
        until(lambda: self.last_step() >= KILL_AFTER, "training")
        pid = self.diary(1)[-1][1]
        at = time.time()
        self.place.kill(self.run, 1, pid)
        self.finish()
        diary = self.diary()
        old = next(pid for moment, pid, _, _ in reversed(diary) if moment < at)
        done = max(int(rest[0]) for _, pid, what, rest in diary if pid == old and what == "step")
        new = [(moment, what, int(rest[0])) for moment, pid, what, rest in diary if pid != old and rest]
        resumed = next(step for _, what, step in new if what == "loaded")
        steps = [(moment, step) for moment, what, step in new if what == "step"]
        return done - resumed, steps[0][0] - at, next(moment for moment, step in steps if step > done) - at


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.02)


def measure(rounds: int, say: Callable[[str], None], *, on_lab: bool) -> list[str]:
    """The table in Markdown."""
    number = itertools.count()
    with place(on_lab=on_lab) as where:

        def once(options: dict[str, bool], epochs: int) -> Once:
            return Once(where, f"run-{next(number)}", options, epochs * STEPS_PER_EPOCH)

        def whole(options: dict[str, bool], epochs: int) -> Once:
            run = once(options, epochs)
            run.finish()
            return run

        bare = middle([whole(WAYS[1].options, 0).training_s() for _ in range(rounds)])
        say(f"without periodic saves: {bare:.2f} s")
        lines = [
            "| saved every | how | training without fault, s | overhead | of it stalls | a save stalls, ms "
            "| steps lost | to the next step, s | until the lost steps are done again, s |",
            "|---|---|---|---|---|---|---|---|---|",
            f"| only at the end | | {bare:.2f} | - | - | - | all | | |",
        ]
        for way, epochs in itertools.product(WAYS, INTERVALS):
            runs = [whole(way.options, epochs) for _ in range(rounds)]
            seconds = middle([run.training_s() for run in runs])
            stalls = [1000 * each for run in runs for each in run.saves_s()]
            share = sum(stalls) / 10 / len(runs) / bare
            lost, first, again = once(way.options, epochs).kill_and_recover()
            every = f"{epochs} epoch{'s' * (epochs > 1)}"
            lines.append(
                f"| {every} | {way.name} | {seconds:.2f} | {100 * (seconds / bare - 1):.1f} % "
                f"| {share:.1f} % | {spread(stalls, 1)} | {lost} | {first:.2f} | {again:.2f} |"
            )
            say(lines[-1])
    return [*lines, ""]
