"""One supervisor's control channel and thousands of simulated agents on loopback: how fast, and at what cost.

python bench/fleet --output bench/results/fleet.md     # a minute; nothing else should run meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import slurmft
from slurmft.ipc.calls import Kill, Ping, StartWorkers
from slurmft.ipc.reports import ProgressReport
from slurmft.policy.timing.fleet import ping_interval_s, report_interval_s
from slurmft.supervisor.fleet.agents import AgentPool
from slurmft.supervisor.fleet.crew import allow_connections

AGENTS = 2048
RANKS = 8
ROUNDS = 5
IDLE_S = 20.0
ASKED_S, ASKED_START_S, ASKED_CPU = 1.0, 5.0, 10.0


async def idle_cpu(pool: AgentPool, seconds: float, agents: int) -> float:
    """Percent of a core while agents report and are pinged, and nothing else happens."""
    handled = asyncio.create_task(take_reports(pool))
    pings = asyncio.create_task(ping(pool, agents))
    before, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    used = 100 * (time.process_time() - before) / (time.monotonic() - began)
    handled.cancel()
    pings.cancel()
    return used


async def take_reports(pool: AgentPool) -> None:
    newest: dict[int, object] = {}
    while True:
        _, report = await pool.events.get()
        if isinstance(report, ProgressReport):
            newest.update({facts.rank: facts for facts in report.ranks})


async def ping(pool: AgentPool, agents: int) -> None:
    while True:
        await asyncio.sleep(ping_interval_s(agents, lease_s=60.0))
        pool.ping(Ping())


async def start_all(pool: AgentPool) -> float:
    """Seconds until every agent has its order to start workers, each with ranks of its own, as an attempt sends it."""
    links = [pool.links[node] for node in sorted(pool.links)]
    order = StartWorkers(attempt="1-0", cycle=0, first_rank=0, nodes=len(links), generation=1, master_addr="127.0.0.1",
                         master_port=29500, limits={f"section-{number}": 60.0 for number in range(8)})  # fmt: skip
    began = time.monotonic()
    orders = [replace(order, first_rank=place * RANKS) for place in range(len(links))]
    await asyncio.gather(*(link.call(one) for link, one in zip(links, orders, strict=True)))
    return time.monotonic() - began


async def measure(agents: int) -> tuple[float, float, list[float], float]:
    """Seconds until all have connected, the order to start, and a decision; percent of a core when idle."""
    secret = secrets.token_hex(32).encode()
    allow_connections(agents)
    pool = AgentPool(secret, agents)
    port = await pool.listen("127.0.0.1")
    with tempfile.NamedTemporaryFile() as file:
        file.write(secret)
        file.flush()
        script = Path(__file__).with_name("agents.py")
        argv = [sys.executable, script, str(port), file.name, str(agents), str(RANKS), str(report_interval_s(agents))]
        began = time.monotonic()
        with subprocess.Popen(argv) as process:  # it inherits the limit
            try:
                await asyncio.wait_for(pool.complete.wait(), 120)
                connected_s = time.monotonic() - began
                start_s, took = await start_all(pool), []
                for _ in range(ROUNDS):
                    began = time.monotonic()
                    await pool.call_all(Kill())
                    took.append(time.monotonic() - began)
                return connected_s, start_s, took, await idle_cpu(pool, IDLE_S, agents)
            finally:
                process.kill()
                await pool.close()


def verdict(hit: bool) -> str:
    return "hit" if hit else "**miss**"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/fleet", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    connected_s, start_s, took, cpu = asyncio.run(measure(args.agents))
    decision_s, every_s = statistics.median(took), report_interval_s(args.agents)
    versions = f"{platform.system()}, Python {platform.python_version()}, slurmft {slurmft.__version__}"
    lines = [
        "# The control channel of a large job", "",
        f"`python bench/fleet` on {os.cpu_count()} cores, {versions}: {args.agents} simulated agents with {RANKS} ranks"
        " each, on loopback, which share the machine with the supervisor.", "",
        "| | | asked | |", "|---|---|---|---|",
        f"| all agents have connected | {connected_s:.1f} s | | |",
        "| all have the order to start their workers, and have said so |"
        f" {start_s:.2f} s | {ASKED_START_S} s | {verdict(start_s < ASKED_START_S)} |",
        "| a decision has reached all, and all have said so |"
        f" {decision_s:.2f} s ({min(took):.2f} - {max(took):.2f}) | {ASKED_S} s | {verdict(decision_s < ASKED_S)} |",
        f"| CPU of the idle supervisor, every agent reporting each {every_s:.1f} s |"
        f" {cpu:.1f} % of a core | {ASKED_CPU} % | {verdict(cpu < ASKED_CPU)} |", "",
    ]  # fmt: skip
    text = "\n".join(lines)
    if args.output:
        args.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
