"""One real attempt of the supervisor with thousands of simulated agents: a table of what it needs, as JSON.

    python bench/fleet/attempt.py AGENTS RANKS_OF_EACH

The agents of its cluster are one process (``agents.py``); everything on this side of the sockets is what a job has.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.config.run import RunConfig, validate
from slurmft.policy.stop import report_interval_s
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.cluster import LocalCluster, Start
from slurmft.supervisor.crew import Crew
from slurmft.supervisor.placement import EvidenceSender
from slurmft.system.files import read_bytes

SETTLE_S = 5.0
LOOKS = 2
"""Rounds of the slowest watcher, the live view of all ranks, in the time that the idle supervisor is watched."""

GIVEN_UP_S = 120.0
DECISION_S, START_S, IDLE_PERCENT = 1.0, 5.0, 10.0
"""What was asked."""


class SimulatedCluster(LocalCluster):
    """Agents of nodes n0, n1 and so on, all of them in one process."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__({})
        self._run, self.notes = run, run.path / "moments.jsonl"
        self.process: asyncio.subprocess.Process | None = None

    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[asyncio.subprocess.Process]:
        folder, agents = self._run.attempts / str(self.attempt), self.size(config)
        port = str(json.loads((folder / "control.json").read_text())["port"])
        argv = [str(Path(__file__).with_name("agents.py")), port, str(folder / "secret"), str(agents)]
        argv += [str(config.nproc_per_node), str(report_interval_s(agents)), str(self.notes)]
        self.process = await asyncio.create_subprocess_exec(sys.executable, *argv)  # it inherits the limit of files
        return [self.process]

    def moments(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    def when(self, what: str) -> float:
        return next((float(each["at"]) for each in self.moments() if each["what"] == what), 0.0)


async def until(cluster: SimulatedCluster, what: str, every_s: float = 0.2) -> None:
    deadline = time.monotonic() + GIVEN_UP_S
    while not cluster.when(what):
        if time.monotonic() > deadline:
            raise SystemExit(f"no agent has noted {what!r} within {GIVEN_UP_S:.0f} s")
        await asyncio.sleep(every_s)


async def disturb(cluster: SimulatedCluster, agents: int, found: dict[str, float]) -> None:
    """Watch the attempt when nothing happens, then let a rank die."""
    await until(cluster, "last start")
    await asyncio.sleep(SETTLE_S)
    watched_s = LOOKS * max(report_interval_s(agents), 2.0) + 1.0
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(watched_s)
    found["idle_percent"] = 100 * (time.process_time() - used) / (time.monotonic() - began)
    if cluster.process is not None:
        cluster.process.send_signal(signal.SIGUSR1)
    await until(cluster, "death", every_s=0.001)
    used = time.process_time()
    await until(cluster, "last kill", every_s=0.05)
    found["decision_cpu_s"] = time.process_time() - used


async def measure(agents: int, ranks: int, folder: Path) -> dict[str, float]:
    run = RunFolder(folder)
    run.create()
    config = validate({"command": ["train.py"], "run_folder": str(folder), "nodes": agents, "nproc_per_node": ranks},
                      source="bench/fleet")  # fmt: skip
    cluster, thread = SimulatedCluster(run), FolderThread()
    secret = read_bytes(run.new_secret(cluster.attempt))
    start = Start(cluster=cluster, run=run, journal=PatientJournal(folder, thread, attempt=str(cluster.attempt)),
                  thread=thread, generation=1, history=(), secret=secret)  # fmt: skip
    crew, found = Crew(config, start), dict[str, float]()
    began = time.monotonic()
    attempt = AttemptRunner(config, start, EvidenceSender(config, start), crew)
    disturbing = asyncio.create_task(disturb(cluster, agents, found))
    verdict = await attempt.run()
    ended = time.monotonic()
    await disturbing
    death, first, last = (cluster.when(what) for what in ("death", "first ping", "last start"))
    await crew.dismiss(node_lost=False)
    if verdict.rank != (agents - 1) * ranks:
        raise SystemExit(f"another rank is blamed: {verdict}")
    return found | {
        "connected_s": first - began, "start_s": last - first, "decision_s": cluster.when("last kill") - death,
        "verdict_s": ended - death,
    }  # fmt: skip


def rows(found: Mapping[str, float]) -> list[list[str]]:
    """What was measured, in words: what, the figure, what was asked, and whether that was reached."""
    told: list[tuple[str, str, str, float | None]] = [
        ("from the first agent's process to all agents connected", "connected_s", "s", None),
        ("start-up: all agents have the order to start their workers", "start_s", "s", START_S),
        ("from a rank's death to the last agent's order to kill its workers", "decision_s", "s", DECISION_S),
        ("the supervisor's processor time of that", "decision_cpu_s", "s", None),
        ("from a rank's death to the verdict, all ranks' ends seen", "verdict_s", "s", None),
        ("the idle supervisor's share of a core", "idle_percent", "%", IDLE_PERCENT),
    ]  # fmt: skip
    return [
        [what, f"{found[name]:.2f} {unit}", f"{asked:g} {unit}" if asked else "",
         "" if asked is None else "hit" if found[name] <= asked else "**miss**"]
        for what, name, unit, asked in told
    ]  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2]), Path(folder) / "run"))
    print(json.dumps(rows(found)))


if __name__ == "__main__":
    main()
