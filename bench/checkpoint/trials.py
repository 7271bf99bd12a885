"""Runs each trial in a process of its own, one after the other, and watches its memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory import Watch, busy_elsewhere
from methods import FLOORS

TRIAL = Path(__file__).with_name("trial.py")
ON_DISK = ("cold, restart", "cached, restart", "cached, in place")
IN_MEMORY = ("memory, restart", "memory, in place")


@dataclass
class Result:
    """Of one method with one size; everything in seconds and bytes."""

    name: str
    rounds: list[dict[str, Any]]
    normal: list[float]
    lost: list[float]
    extra_bytes: int
    bytes: int
    loads: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    compared: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the trials write; both are empty for each method."""

    disk: Path
    memory: Path
    packages: Path | None
    elsewhere: list[float] = field(default_factory=list)
    """How many processors other processes kept busy, before each trial."""

    @contextmanager
    def fresh(self) -> Iterator[tuple[Path, Path]]:
        disk, memory = (
            Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=each)) for each in (self.disk, self.memory)
        )
        try:
            yield disk, memory
        finally:
            shutil.rmtree(disk)
            shutil.rmtree(memory)
            os.sync()

    def environment(self, memory: Path) -> dict[str, str]:
        found = {**os.environ, "SLURMFT_MEMORY_DIR": str(memory)}
        if self.packages:
            found["PYTHONPATH"] = str(self.packages)
        return found


def measure(
    name: str, size: str, place: Place, *, saves: int, limit_s: float, rounds: int, timed_loads: bool
) -> Result:
    with place.fresh() as (disk, memory):
        order = {"method": name, "size": size, "folder": str(disk), "memory": str(memory)}
        answer, extra = run({**order, "task": "saves", "saves": saves, "limit_s": limit_s}, place)
        result = Result(name, answer["rounds"], answer["normal"], answer["lost"], extra, answer["bytes"])
        if name in FLOORS:
            return result
        compare = {**order, "task": "loads", "digests": answer["digests"], "rounds": rounds + 1}
        if any(memory.iterdir()):  # the snapshot outlived its process
            _load(result, {**compare, "circumstances": IN_MEMORY}, place)
        shutil.rmtree(memory)
        memory.mkdir()
        circumstances = ON_DISK if timed_loads else ON_DISK[1:2]
        _load(result, {**compare, "circumstances": circumstances, "rounds": rounds if timed_loads else 1}, place)
        return result


def _load(result: Result, order: dict[str, Any], place: Place) -> None:
    answer, _ = run(order, place)
    result.loads |= answer["loads"]
    result.wrong = max(result.wrong, answer["wrong"])
    result.compared = answer["compared"]


def floors(size: str, place: Place, rounds: int) -> dict[str, list[float]]:
    with place.fresh() as (disk, memory):
        order = {"task": "floors", "size": size, "folder": str(disk), "memory": str(memory), "rounds": rounds}
        answer, _ = run(order, place)
        found: dict[str, list[float]] = answer["floors"]
        return found


def many(name: str, place: Place, *, earlier: list[int], rounds: int) -> dict[int, list[tuple[float, float]]]:
    with place.fresh() as (disk, memory):
        order = {"task": "many", "method": name, "folder": str(disk), "memory": str(memory)}
        answer, _ = run({**order, "earlier": earlier, "rounds": rounds}, place)
        return {int(number): found for number, found in answer["many"].items()}


def run(order: dict[str, Any], place: Place) -> tuple[dict[str, Any], int]:
    """The answer, and the most bytes beyond those that the process had before its first save."""
    folder, memory = Path(order["folder"]), Path(order["memory"])
    # The order goes by a file: thousands of digests are more than an argument may be long.
    file = folder.with_name(f"{folder.name}.order")
    file.write_text(json.dumps(order))
    place.elsewhere.append(busy_elsewhere())
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(TRIAL), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env=place.environment(memory),
        )  # fmt: skip
        watch = Watch(process.pid, folder, memory)
        try:
            answer, before = _listen(process, watch)
        except BaseException:
            process.kill()
            raise
        finally:
            watch.stop()
            file.unlink()
        if process.wait() or answer is None:
            errors.seek(0)
            raise RuntimeError(f"{order['task']}: exit code {process.returncode}: {errors.read()[-2000:]}")
    return answer, watch.most_bytes - before


def _listen(process: subprocess.Popen[str], watch: Watch) -> tuple[dict[str, Any] | None, int]:
    """What the trial answered, and its memory before the first save."""
    before, answer = 0, None
    assert process.stdout is not None
    assert process.stdin is not None
    for line in process.stdout:
        said = json.loads(line) if line.startswith("{") else {}
        answer = said.get("result", answer)
        if said.get("at") == "before":
            before = watch.now_bytes()
        elif said.get("at") == "watched":
            watch.start()
        elif said.get("at") == "over":
            watch.stop()
        if "at" in said:
            process.stdin.write("\n")
            process.stdin.flush()
    return answer, before
