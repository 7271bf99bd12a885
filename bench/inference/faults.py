"""A replica is killed or stopped: what is computed again, and how long its requests wait."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from running import Line, LocalBatch, say, verdict, wait

ASKED_S = 0.3
PAUSE_S, CONCURRENCY, REPLICAS = 0.2, 8, 2
HANG_LIMIT_S = 2.0
SECONDS_PER_ROUND = 8.0
BEFORE_S = 1.0
"""Both replicas work for so long before one is hurt."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One replica was killed or stopped."""

    in_flight: int
    again: int
    """Of those, begun again by another engine."""

    first_s: float
    """Until the first of them was answered elsewhere, without its own time and the limit for hangs."""

    last_s: float
    """The same of the last one."""


def hurt(kind: str, rounds: int) -> tuple[list[Fault], int]:
    """The faults, and how often in all a request was begun again."""
    limit_s = HANG_LIMIT_S if kind == "SIGSTOP" else 0.0
    count = round(rounds * (SECONDS_PER_ROUND + limit_s) * REPLICAS * CONCURRENCY / PAUSE_S)
    with tempfile.TemporaryDirectory(prefix="inference-") as name:
        batch = LocalBatch(
            Path(name), count=count, pause_s=PAUSE_S, concurrency=CONCURRENCY, replicas_per_node=REPLICAS,
            hang_timeout_s=HANG_LIMIT_S if limit_s else 600.0, max_restarts=1000,
        )  # fmt: skip
        found = []
        with batch.running() as process:
            for number in range(rounds):
                found.append(_once(batch, kind, number, limit_s))
                say(f"{kind}: {found[-1]}")
            batch.finish(process)
        assert batch.answers() == count
        return found, batch.log.begun_again()


def _working(batch: LocalBatch, since: float) -> set[int]:
    """Engines that have finished a request since then."""
    return {each.pid for each in batch.log.lines() if each.what == "ended" and each.at > since}


def _once(batch: LocalBatch, kind: str, number: int, limit_s: float) -> Fault:
    wait(lambda: len(batch.events("replica ready")) >= REPLICAS + number, "ready replicas")
    began = time.time()
    wait(lambda: len(_working(batch, began)) == REPLICAS, "work of both replicas")
    time.sleep(BEFORE_S)
    engine = max(_working(batch, time.time() - BEFORE_S))
    victim = psutil.Process(engine).ppid() if kind == "kill -9 of the driver" else engine
    wait(lambda: batch.log.in_flight(engine, time.time()), "requests in flight")
    at = time.time()
    os.kill(victim, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)
    time.sleep(0.05)  # what it has written to its log is there
    lost = batch.log.in_flight(engine, at)

    def elsewhere() -> list[Line]:
        lines = [each for each in batch.log.lines() if each.at > at and each.pid != engine and each.number in lost]
        return [each for each in lines if each.what == "ended"]

    wait(lambda: {each.number for each in elsewhere()} == lost, "answers elsewhere", 60.0)
    answered = [each.at for each in elsewhere()]
    again = {each.number for each in batch.log.lines() if each.pid != engine and each.number in lost}
    own_s = PAUSE_S + limit_s
    return Fault(len(lost), len(again), min(answered) - at - own_s, max(answered) - at - own_s)


def tables(rounds: int) -> list[str]:
    lines = [
        "## A replica is killed or stopped", "",
        f"{REPLICAS} replicas with {CONCURRENCY} requests at a time, each of {1000 * PAUSE_S:.0f} ms; the other "
        "replica is as busy as ever. The times end when another engine has answered the first, and the last, of the "
        "requests that were in flight; a request's own time is taken off, and for SIGSTOP the limit for hangs "
        f"({HANG_LIMIT_S:g} s). Asked: {ASKED_S:g} s for the last; no more requests begun again than were in flight.",
        "", "| | in flight, in all | begun again, in all | | first (s) | last (s) | |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in ("kill -9 of the engine", "kill -9 of the driver", "SIGSTOP"):
        faults, again = hurt(kind, rounds)
        in_flight = sum(each.in_flight for each in faults)
        last_s = statistics.median(each.last_s for each in faults)
        lines.append(
            f"| {kind} | {in_flight} | {again} | {verdict(again <= in_flight)} | "
            f"{_spread([each.first_s for each in faults])} | {_spread([each.last_s for each in faults])} | "
            f"{verdict(last_s <= ASKED_S)} |"
        )
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
