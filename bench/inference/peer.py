"""Ray Data and slurmft with the same engine and the same kill."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from running import EngineLog, LocalBatch, say, wait, write_prompts

COUNT, PAUSE_S, CONCURRENCY, REPLICAS = 640, 0.2, 8, 2
ROWS_PER_BLOCK = 32
"""Ray tries whole blocks again."""

BEFORE_KILL = 100
PATIENCE_S = 110.0


@dataclass(frozen=True, slots=True)
class Found:
    """One batch in which one engine was killed."""

    missing: int
    again: int
    in_flight: int
    elsewhere_s: float
    """From the kill until the last request that was in flight was answered by another engine."""

    whole_s: float
    """From the first request to the last answer."""


def kill_one(log: EngineLog) -> tuple[int, set[int], float]:
    """The killed engine, what was in flight on it, and when."""
    wait(lambda: log.ended() >= BEFORE_KILL, "answers", PATIENCE_S)
    engine = log.lines()[-1].pid
    wait(lambda: log.in_flight(engine, time.time()), "requests in flight")
    at = time.time()
    os.kill(engine, signal.SIGKILL)
    return engine, log.in_flight(engine, at), at


def found(log: EngineLog, killed: tuple[int, set[int], float], answers: int) -> Found:
    engine, lost, at = killed
    elsewhere = [each.at for each in log.lines()
                 if each.what == "ended" and each.pid != engine and each.number in lost]  # fmt: skip
    return Found(COUNT - answers, log.begun_again(), len(lost), max(elsewhere) - at, log.seconds())


def ours() -> Found:
    with tempfile.TemporaryDirectory(prefix="inference-") as name:
        batch = LocalBatch(
            Path(name), count=COUNT, pause_s=PAUSE_S, concurrency=CONCURRENCY, replicas_per_node=REPLICAS
        )
        with batch.running() as process:
            killed = kill_one(batch.log)
            batch.finish(process)
        return found(batch.log, killed, batch.answers())


def rays(python: Path) -> Found:
    with tempfile.TemporaryDirectory(prefix="inference-") as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", COUNT)
        argv = [
            python,
            Path(__file__).with_name("ray_batch.py"),
            folder,
            PAUSE_S,
            CONCURRENCY,
            REPLICAS,
            ROWS_PER_BLOCK,
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(list(map(str, argv)), stdout=output, stderr=output, start_new_session=True)
        log = EngineLog(folder / "engine.log")
        try:
            killed = kill_one(log)
            if process.wait(PATIENCE_S) != 0:
                raise RuntimeError((folder / "output").read_text()[-2000:])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        files = (folder / "answers").glob("*.json")
        return found(log, killed, len({line for path in files for line in path.read_text().splitlines()}))


def tables(rounds: int, python: Path) -> list[str]:
    version = subprocess.run([python, "-c", "import ray; print(ray.__version__)"], capture_output=True, text=True,
                             check=True).stdout.strip()  # fmt: skip
    lines = [
        "## Beside Ray Data", "",
        f"{COUNT} requests, {REPLICAS} replicas with {CONCURRENCY} at a time, each of {1000 * PAUSE_S:.0f} ms; kill -9 "
        f"of one engine after {BEFORE_KILL} answers. Ray's actors end themselves when their engine is gone, and are "
        f"restarted (`max_restarts`, `max_task_retries`); its blocks have {ROWS_PER_BLOCK} requests, and it asks its "
        "engines in batches. The whole is from the first request to the last answer.", "",
        "| | requests without an answer | in flight | begun again | answered elsewhere after (s) | the whole (s) |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    contenders: dict[str, Callable[[], Found]] = {"slurmft": ours, f"Ray Data {version}": lambda: rays(python)}
    for name, run in contenders.items():
        results = []
        for _ in range(rounds):
            results.append(run())
            say(f"{name}: {results[-1]}")
        middle = {each: statistics.median(getattr(one, each) for one in results) for each in Found.__slots__}
        lines.append(
            f"| {name} | {middle['missing']:g} | {middle['in_flight']:g} | {middle['again']:g} | "
            f"{middle['elsewhere_s']:.2f} | {middle['whole_s']:.1f} |"
        )
    return [*lines, ""]
