"""A batch on this machine, and the engines' log of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.storage.run_folder import RunFolder

ENGINE = Path(__file__).with_name("engine.py")
PATIENCE_S = 100.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def verdict(hit: bool) -> str:
    return "hit" if hit else "**miss**"


def wait(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {patience_s:.0f} s")
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the engines' log."""

    what: str
    pid: int
    number: int
    at: float


class EngineLog:
    """What all engines of a measurement have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[Line]:
        """In the order in which they were written."""
        if not self.path.exists():
            return []
        words = [line.split() for line in self.path.read_text().splitlines()]
        return [Line(each[0], int(each[1]), int(each[2]), float(each[3])) for each in words if len(each) == 4]

    def seconds(self) -> float:
        """From the first request to the last answer."""
        lines = self.lines()
        return max(each.at for each in lines if each.what == "ended") - min(each.at for each in lines)

    def ended(self) -> int:
        """Requests that some engine has finished."""
        return len({each.number for each in self.lines() if each.what == "ended"})

    def in_flight(self, pid: int, at: float) -> set[int]:
        """Requests that this engine had begun and not finished at that time."""
        mine = [each for each in self.lines() if each.pid == pid and each.at <= at]
        return {each.number for each in mine if each.what == "began"} - {
            each.number for each in mine if each.what == "ended"
        }

    def begun_again(self) -> int:
        """How often an engine began a request that one had begun before."""
        counts = Counter(each.number for each in self.lines() if each.what == "began")
        return sum(count - 1 for count in counts.values())


def write_prompts(path: Path, count: int) -> None:
    """One request a line, with a number."""
    lines = (json.dumps({"custom_id": f"q{number}", "prompt": f"prompt {number}"}) for number in range(count))
    path.write_text("".join(f"{line}\n" for line in lines))


class LocalBatch:
    """``slurmft infer --cluster local`` in a folder of its own."""

    def __init__(self, folder: Path, *, count: int, pause_s: float, **section: Any) -> None:
        self.folder, self.log = folder, EngineLog(folder / "engine.log")
        self.run = RunFolder(folder / "run")
        write_prompts(folder / "prompts.jsonl", count)
        command = [sys.executable, str(ENGINE), "{port}", str(pause_s), str(self.log.path)]
        config = {
            "run_folder": str(self.run.path), "nodes": 1,
            "inference": {"input": str(folder / "prompts.jsonl"), "engine": {"command": command}, **section},
        }  # fmt: skip
        (folder / "config.yaml").write_text(json.dumps(config))

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The batch, from its submission; ended where it has not finished."""
        argv = [sys.executable, "-P", "-m", "slurmft", "infer", str(self.folder / "config.yaml"), "--cluster", "local",
                "--wait"]  # fmt: skip
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                self.run.request("KILL", "bench/inference")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Return when every request is answered.

        Raises:
            RuntimeError: the batch ended in another way.
        """
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise RuntimeError(f"the batch failed:\n{(self.folder / 'output').read_text()}")

    def events(self, name: str) -> list[Any]:
        return [event for event in self.run.journal().read() if event.event == name]

    def answers(self) -> int:
        """Lines of the output."""
        return len((self.run.path / "output" / "answers.jsonl").read_text().splitlines())
