"""Simulated agents, many in one process: ``agents.py PORT SECRET_FILE COUNT RANKS INTERVAL_S``. They report."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from slurmft.ipc.channel import BadMessage, Channel, connect
from slurmft.ipc.replies import Done, as_reply
from slurmft.ipc.reports import Hello, ProgressReport
from slurmft.ipc.worker_facts import WorkerFacts

CONNECTING_AT_ONCE = 32


def facts(rank: int, step: int) -> WorkerFacts:
    return WorkerFacts(
        rank=rank, state=2, attached=True, step=step, until=10**6, saved=0, durable=0, resumed=0, first_step_at=1.0,
        answered=-1, metric=2.5, first_step_s=1.0, longest_step_s=0.1, saves=3, save_failures=0, save_errno=0,
        save_s=0.5, save_cost_s=0.1, saving_s=0.0, since_saved_s=12.0,
    )  # fmt: skip


async def report(channel: Channel, node: int, ranks: int, interval_s: float) -> None:
    step = 0
    await asyncio.sleep(random.uniform(0, interval_s))
    while True:
        step += 1
        told = tuple(facts(node * ranks + local, step) for local in range(ranks))
        channel.send(ProgressReport(ranks=told, ready=True, generation=1).as_mapping())
        await asyncio.sleep(interval_s)


async def agent(node: int, port: int, secret: bytes, ranks: int, interval_s: float, few: asyncio.Semaphore) -> None:
    async with few:
        while True:
            try:
                channel = await connect("127.0.0.1", port, secret)
                break
            except (OSError, BadMessage):
                await asyncio.sleep(0.2)
        channel.send(Hello(node=node, host=f"n{node}", pid=1).as_mapping())
    reports = asyncio.create_task(report(channel, node, ranks, interval_s))
    while (message := await channel.receive()) is not None:
        channel.send(as_reply(message["id"], Done()))
    reports.cancel()


async def main(port: int, secret: bytes, count: int, ranks: int, interval_s: float) -> None:
    few = asyncio.Semaphore(CONNECTING_AT_ONCE)
    await asyncio.gather(*(agent(node, port, secret, ranks, interval_s, few) for node in range(count)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), *map(int, sys.argv[3:5]), float(sys.argv[5])))
