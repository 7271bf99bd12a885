"""How many steps each kind of fault between two checkpoints costs, and what the notes after each step cost.

    python bench/just_in_time --output bench/results/just_in_time.md     # some ten minutes

Two agents with two ranks each on this machine stand for two nodes. Each step sleeps, so that other load matters little.
A node is killed with its agent, its keeper and its memory. Every rank keeps a diary of its steps: lost are those that
all ranks had completed and that were done again, and the next step is the first one of a new process of rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import slurmft
from slurmft.checkpoint import just_in_time
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.state import Trainee
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import RunFolder
from slurmft.trainer.savers import SAVERS

TRAINER = Path(slurmft.__file__).parents[1] / "tests" / "slurm" / "trainers" / "running_totals.py"
STEPS, EVERY, AT, STEP_S = 60, 20, range(32, 38), 0.1
RANKS = 4
PATIENCE_S = 120.0
BUFFERS, EXTRA = ("--buffers",), ("--extra", "function")
BOTH = (*BUFFERS, *EXTRA)
HSDP = ("--shards", "2", *BOTH)
ACROSS = (*HSDP, "--across")
FSDP = ("--shards", "4", *BOTH)
COPIES = {"peer_copies": 1}
EACH_STEP = {**COPIES, "peer_interval": 1}


@dataclass(frozen=True)
class Case:
    """One kind of fault."""

    name: str
    ranks: tuple[int, ...]
    options: Sequence[str] = BOTH
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this section, beside the interval."""

    with_agent: bool = False
    silent: bool = False
    """The node falls silent and closes no connection, as without power or network; there is a spare one."""


CASES = (
    Case("DDP: a rank", (3,), ()),
    Case("DDP: a rank; `extra` a function, buffers", (3,)),
    Case("DDP: rank 0; `extra` a function, buffers of BatchNorm", (0,)),
    Case("DDP: rank 0; 5 MiB of buffers, more than are noted", (0,), ("--table", "5")),
    Case("DDP: another rank; 5 MiB of buffers", (3,), ("--table", "5")),
    Case("DDP: a rank; `extra` given as values", (3,), ("--extra", "mapping")),
    Case("DDP: both ranks of a node, whose agent lives", (2, 3)),
    Case("DDP: both ranks of rank 0's node, whose agent lives", (0, 1)),
    Case("DDP: a node with its agent, no copies", (2,), with_agent=True),
    Case("DDP: a node with its agent, `peer_copies: 1`", (2,), checkpoint=COPIES, with_agent=True),
    Case("DDP: rank 0's node with its agent, `peer_copies: 1`", (0,), checkpoint=COPIES, with_agent=True),
    Case("DDP: a node that falls silent, `peer_copies: 1`", (2,), checkpoint=COPIES, with_agent=True, silent=True),
    Case("FSDP: a rank", (3,), FSDP),
    Case("FSDP: a rank, `peer_copies: 1`", (3,), FSDP, COPIES),
    Case("FSDP: a rank, `peer_copies: 1`, `peer_interval: 1`", (3,), FSDP, EACH_STEP),
    Case("FSDP: a node with its agent, the same", (2,), FSDP, EACH_STEP, True),
    Case("HSDP, a replica on each node: a rank", (3,), HSDP),
    Case("HSDP, a replica on each node: rank 0", (0,), HSDP),
    Case("HSDP, a replica on each node: two ranks of different shards", (0, 3), HSDP),
    Case("HSDP, a replica on each node: both ranks of a shard", (1, 3), HSDP),
    Case("HSDP, a replica on each node: a node with its agent, no copies", (2,), HSDP, with_agent=True),
    Case("HSDP, a replica on each node: a node with its agent, `peer_copies: 1`", (2,), HSDP, COPIES, True),
    Case("HSDP, a shard on each node: a rank", (1,), ACROSS),
    Case("HSDP, a shard on each node: a node with its agent, `peer_copies: 1`", (2,), ACROSS, COPIES, True),
    Case("HSDP, a shard on each node: the same, `peer_interval: 1`", (2,), ACROSS, EACH_STEP, True),
)


@dataclass(frozen=True)
class Line:
    """Of a diary: the end of a step."""

    at: float
    pid: int
    step: int


@dataclass(frozen=True)
class Result:
    """Of one fault."""

    lost: int
    seconds: float
    source: str
    is_same: bool


class Run:
    """One run without Slurm."""

    def __init__(
        self, path: Path, options: Sequence[str], checkpoint: Mapping[str, Any], delay_s: float, *,
        spares: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self._config, self._diary = RunFolder(path), path.with_suffix(".yaml"), path.with_suffix(".diary")
        self._diary.mkdir()
        self._frozen: list[psutil.Process] = []
        command = [sys.executable, str(TRAINER), "--steps", str(STEPS), "--step-delay", str(delay_s),
                   "--diary", str(self._diary), *options]  # fmt: skip
        settings = {
            "command": command, "run_folder": str(path), "nodes": 2, "nproc_per_node": 2,
            "spare_nodes": spares,
            "checkpoint": {"interval_steps": EVERY, **checkpoint},
            "fault_tolerance": {"num_in_job_restarts": 3},
        }  # fmt: skip
        self._config.write_text(yaml.safe_dump(settings))

    def submit(self) -> None:
        argv = [sys.executable, "-m", "slurmft", "submit", str(self._config), "--cluster", "local"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """Leave nothing behind of a run that has not ended by itself."""
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.folder.done() is None:
            self.folder.request("KILL", "bench/just_in_time")
            with contextlib.suppress(TimeoutError):
                wait(lambda: not self.workers(), "the end of its workers")

    def diary(self, rank: int) -> list[Line]:
        with contextlib.suppress(FileNotFoundError):
            text = (self._diary / f"rank-{rank}").read_text()
            lines = [line.split() for line in text.splitlines()[: text.count("\n")]]
            return [Line(float(at), int(pid), int(step)) for at, pid, step in lines]
        return []

    def complete(self) -> int:
        """The newest step that all ranks have ended."""
        return min(max((line.step for line in self.diary(rank)), default=0) for rank in range(RANKS))

    def workers(self) -> dict[int, psutil.Process]:
        """Living ranks: each one's output goes to its own log."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
                parent = process.parent()
                is_rank = log.is_relative_to(self.folder.attempts) and log.stem.startswith("rank-")
                if is_rank and parent and "slurmft.agent.zygote" in parent.cmdline():
                    found[int(log.stem.removeprefix("rank-"))] = process
        return found

    def strike(self, case: Case) -> None:
        found = self.workers()
        victims = [found[rank] for rank in case.ranks]
        if case.with_agent:
            agent = victims[0].parents()[1]
            victims = [*agent.children(recursive=True), agent]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # some end with the one before
                process.suspend() if case.silent else process.kill()
        self._frozen = victims if case.silent else []

    def resumption(self) -> tuple[int, str]:
        """Where the restart began, and from what."""
        events = [one for one in self.folder.journal().read() if one.event == EventName.FIRST_STEP]
        details = events[1].details
        return int(details["resumed_from"]), str(details.get("source", "")).split(";")[0].split(":")[0]

    def digest(self) -> str:
        text = "".join(path.read_text() for path in self.folder.attempts.glob("*/rank-0.log"))
        return text.split("final weights sha256: ")[1].split()[0]


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.01)


def trial(path: Path, case: Case, calm: str, chance: random.Random) -> Result:
    run = Run(path, case.options, case.checkpoint, STEP_S, spares=int(case.silent))
    try:
        run.submit()
        at = chance.choice(AT)
        wait(lambda: run.complete() >= at, f"step {at}")
        time.sleep(chance.random() * STEP_S)
        killed = time.time()
        run.strike(case)
        wait(lambda: run.folder.done() is not None, "end")
    finally:
        run.stop()
    complete = min(max(line.step for line in run.diary(rank) if line.at <= killed) for rank in range(RANKS))
    old = {line.pid for line in run.diary(0) if line.at <= killed}
    after = next(line.at for line in run.diary(0) if line.pid not in old)
    resumed, source = run.resumption()
    return Result(max(0, complete - resumed), after - killed, source, run.digest() == calm)


def undisturbed(path: Path, options: Sequence[str]) -> str:
    run = Run(path, options, {}, 0.0)
    try:
        run.submit()
        wait(lambda: run.folder.done() is not None, "end of an undisturbed run")
    finally:
        run.stop()
    return run.digest()


def row(case: Case, results: Sequence[Result]) -> str:
    lost, seconds = [one.lost for one in results], [one.seconds for one in results]
    span = str(lost[0]) if len(set(lost)) == 1 else f"{min(lost)} - {max(lost)}"
    same = sum(one.is_same for one in results)
    return (f"| {case.name} | {span} | {min(seconds):.1f} - {max(seconds):.1f} | {results[0].source} "
            f"| {same} of {len(results)} |")  # fmt: skip


class _Nothing:
    """A session that listens to all, and does nothing."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_values, **_more: None


def norms(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.BatchNorm1d(256) for _ in range(count)), torch.nn.Linear(256, 256))


def layers(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))


def spread_layers(count: int) -> torch.nn.Module:
    """On a mesh of two replicas by four shards."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("replicate", "shard"))
    return fully_shard(layers(count), mesh=mesh)


def cost_of_notes(model: torch.nn.Module, extra: Callable[[], Mapping[str, Any]] | None) -> float:
    """Microseconds of processor time for one boundary, on rank 0."""
    SAVERS.listener = _Nothing()
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        one = JustInTime(Path(folder), lambda *_: None)
        one.arm(Trainee(model, optimizer), step=0, extra=extra)
        just_in_time.MAX_SHARE = float("inf")  # these steps are nothing but notes
        began, count = time.process_time(), 1000
        for step in range(1, count + 1):
            torch.rand(1)
            one.at_boundary(step)
        if one.reason:
            raise RuntimeError(one.reason)
        return (time.process_time() - began) / count * 1e6


def costs() -> list[str]:
    os.environ |= {"WORLD_SIZE": "8", "RANK": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    totals = {"seen": 0, "sum": 0.0}
    measured = {
        "generators alone, a model of 2 weights": cost_of_notes(norms(0), None),
        "with `extra` of two numbers": cost_of_notes(norms(0), lambda: totals),
        "with the buffers of 50 BatchNorm layers of 256 as well": cost_of_notes(norms(50), lambda: totals),
        "a model of 400 weights": cost_of_notes(layers(200), None),
        "the same, spread over ranks (HSDP)": cost_of_notes(spread_layers(200), None),
    }
    dist.destroy_process_group()
    del os.environ["WORLD_SIZE"], os.environ["RANK"]  # the runs that follow have their own
    return [f"| {name} | {microseconds:.0f} |" for name, microseconds in measured.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases with these words in their names")
    args = parser.parse_args()
    chance, numbers = random.Random(1), itertools.count()
    cases = [case for case in CASES if args.only in case.name]
    results: dict[str, list[Result]] = {case.name: [] for case in cases}
    load_before, notes = os.getloadavg()[0], costs()
    with tempfile.TemporaryDirectory(prefix="just-in-time-") as root:
        calm = {options: undisturbed(Path(root, f"run-{next(numbers)}"), options)
                for options in dict.fromkeys(tuple(case.options) for case in cases)}  # fmt: skip
        for _ in range(args.rounds):
            for case in cases:
                path = Path(root, f"run-{next(numbers)}")
                try:
                    results[case.name].append(trial(path, case, calm[tuple(case.options)], chance))
                    print(case.name, results[case.name][-1], file=sys.stderr, flush=True)
                except (TimeoutError, KeyError, StopIteration, IndexError, psutil.Error) as error:
                    print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            text = page([(case, results[case.name]) for case in cases if results[case.name]], notes, load_before)
            if args.output:
                args.output.write_text(text)
    print(text)


def page(results: Sequence[tuple[Case, Sequence[Result]]], notes: Sequence[str], load_before: float) -> str:
    counts = {len(each) for _, each in results}
    times = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    lines = [
        "# What a fault between two checkpoints costs", "",
        f"`make bench NAME=just_in_time`, slurmft {slurmft.__version__}, torch {torch.__version__}", "",
        f"One machine with {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; two agents "
        f"with two ranks each, without Slurm; steps of {STEP_S} s and more, a checkpoint every {EVERY} steps, the "
        f"fault after step {AT.start} to {AT.stop - 1}. {times} times each; load before: "
        f"{load_before:.1f}, after: {os.getloadavg()[0]:.1f}: the seconds are those of a busy machine where it is more "
        "than a few.", "",
        "A step that was complete on all ranks at the moment of the fault, and is done again, is lost. An end "
        "as without a fault: the same weights, buffers and `extra`, bit for bit.", "",
        "The fault comes at any moment of a step. A rank that dies after its last collective of a step, while the "
        "others go on to the end of it, takes its own state at that end with it: then the steps since the checkpoint "
        "are lost in every case.", "",
        "| what dies | steps lost | s to the next step | read from | end as without a fault |",
        "|---|---|---|---|---|", *(row(case, each) for case, each in results), "",
        "Processor time of the notes after one step, on rank 0:", "",
        "| | microseconds |", "|---|---|", *notes, "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
