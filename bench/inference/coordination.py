"""The coordinator with thousands of replicas: what it costs to lease, to hear answers and to commit them.

Agents are simulated in this process and speak with ``Coordinator`` directly, without sockets; their own work is taken
off the processor time.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from running import say, verdict

from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.inference.coordinator import Coordinator
from slurmft.inference.ledger import open_ledger
from slurmft.inference.requests import Batch
from slurmft.storage.patience import FolderThread

ASKED_PERCENT = 50.0
AGENTS, REPLICAS, CONCURRENCY = 1250, 8, 32
PREFETCH = 2 * REPLICAS * CONCURRENCY
TICK_S = 0.02
SECONDS = 20.0
ANSWER_BYTES = 90


class Agents:
    """Each replica answers one request per interval and reports it by itself: commits are more frequent."""

    def __init__(self, coordinator: Coordinator, interval_s: float) -> None:
        self._coordinator, self._interval_s = coordinator, interval_s
        self._queues: list[deque[range]] = [deque() for _ in range(AGENTS)]
        self._short = [PREFETCH] * AGENTS
        self._ends = [[100] * REPLICAS for _ in range(AGENTS)]
        self._epochs: list[int] = []
        self.own_s = 0.0
        """Processor time of the simulation itself."""

        self.answers = self.messages = 0

    def join(self) -> None:
        for node in range(AGENTS):
            self._epochs.append(self._coordinator.join(node, f"n{node}", self._sender(node)))

    def _sender(self, node: int) -> Any:
        def send(message: dict[str, Any]) -> None:
            self._queues[node].extend(range(first, last) for first, last in message["runs"])

        return send

    async def work(self, seconds: float) -> None:
        due = [(random.uniform(0, self._interval_s), node, number) for node in range(AGENTS)
               for number in range(REPLICAS)]  # fmt: skip
        heapq.heapify(due)
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            before = time.thread_time()
            reports = []
            while due[0][0] <= now:
                at, node, number = due[0]
                heapq.heapreplace(due, (at + self._interval_s, node, number))
                reports += self._report(node, number)
            self.own_s += time.thread_time() - before
            for node, message in reports:
                self._coordinator.on_report(node, message)
            self.messages += len(reports)
            await asyncio.sleep(TICK_S)

    def _report(self, node: int, number: int) -> list[tuple[int, dict[str, Any]]]:
        """One answer of a replica, and what its agent asks for."""
        reports: list[tuple[int, dict[str, Any]]] = []
        queue = self._queues[node]
        if queue:
            run = queue[0]
            if len(run) > 1:
                queue[0] = run[1:]
            else:
                queue.popleft()
            self._ends[node][number] += ANSWER_BYTES
            self.answers += 1
            self._short[node] += 1
            segment = f"g000001-n{node}-r{number}-1-{self._epochs[node]}.jsonl"
            reports.append((node, {
                "kind": "answers", "epoch": self._epochs[node], "segment": segment, "end": self._ends[node][number],
                "runs": [[run[0], run[0] + 1]],
            }))  # fmt: skip
        if self._short[node] >= REPLICAS * CONCURRENCY // 2:
            reports.append((node, {"kind": "want", "epoch": self._epochs[node], "count": self._short[node]}))
            self._short[node] = 0
        return reports


async def measure(folder: Path, seconds: float, interval_s: float) -> tuple[float, float, float]:
    """Percent of a core, answers per second that were committed, and messages per second."""
    total = round(2 * AGENTS * (PREFETCH + REPLICAS * seconds / interval_s))
    config = InferenceConfig(input=folder / "none", engine=EngineConfig(url="http://localhost:1"))
    thread = FolderThread()
    ledger = open_ledger(Batch(folder=folder, total=total, bad=(), digest="0" * 64), 1)
    coordinator = Coordinator(config, ledger.batch, ledger, thread.submit, lambda *_, **__: None)
    agents = Agents(coordinator, interval_s)
    agents.join()
    commits = asyncio.create_task(coordinator.commit_regularly())
    tail = asyncio.create_task(coordinator.watch_tail())
    await agents.work(2.0)  # the first leases
    agents.own_s, agents.answers, agents.messages, committed = 0.0, 0, 0, ledger.count
    before, began = time.process_time(), time.monotonic()
    await agents.work(seconds)
    took_s = time.monotonic() - began
    used_s = time.process_time() - before - agents.own_s
    committed = ledger.count - committed
    for task in (commits, tail):
        task.cancel()
    await coordinator.commit_now()
    thread.call(ledger.close, timeout_s=10)
    assert coordinator.requests.done == ledger.count
    return 100 * used_s / took_s, committed / took_s, agents.messages / took_s


def tables(rounds: int) -> list[str]:
    lines = [
        "## The coordinator of 10,000 replicas", "",
        f"{AGENTS:,} simulated agents with {REPLICAS} replicas each, {CONCURRENCY} requests at a time; every replica "
        "reports each answer in a message of its own, as `commit_interval_s` below the time between two answers makes "
        "it. Calls of `Coordinator` and commits to a disk; without sockets and their signatures, and without the "
        f"simulation itself. Asked: {ASKED_PERCENT:.0f} % of a core for one answer per replica and second.", "",
        "| answers of one replica | answers committed/s | messages/s | of a core | |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for interval_s in (1.0, 4.0):
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="inference-") as name:
                found.append(asyncio.run(measure(Path(name), SECONDS, interval_s)))
            percent, answers, messages = found[-1]
            say(f"every {interval_s} s: {percent:.1f} % of a core, {answers:.0f} answers/s, {messages:.0f} messages/s")
        percent, answers, messages = sorted(found)[len(found) // 2]
        asked = verdict(percent <= ASKED_PERCENT) if interval_s == 1.0 else ""
        lines.append(
            f"| one in {interval_s:g} s | {answers:.0f} | {messages:.0f} | {percent:.0f} % "
            f"({min(found)[0]:.0f} - {max(found)[0]:.0f}) | {asked} |"
        )
    return [*lines, ""]
