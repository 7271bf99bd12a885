"""Random faults at random moments while a batch is answered: every request is answered exactly once.

As test_random_faults.py: the seed decides; ``SLURMFT_FAULT_SEEDS`` chooses seeds, ``SLURMFT_FAULTS_OUTPUT`` takes a
line of JSON for each run.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import preempt
from slurm.test_inference import BatchRun, new_batch  # noqa: F401 - a fixture
from slurm.test_random_faults import OURS, seeds

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]

MAX_FAULTS = 40
LONGEST_S = 600.0
CRON_S = 8.0
REQUESTS = 3000
WEIGHTS = {
    "engine": 8, "driver": 6, "engine stopped": 3, "driver stopped": 2, "agent": 3, "zygote": 2, "power": 2,
    "power of the batch host": 1, "partition": 1, "supervisor": 2, "preemption": 1, "slurmft requeue": 2,
    "scontrol requeue": 1, "torn segment": 1,
}  # fmt: skip


class Storm:
    """A batch, and the chance that meets it."""

    def __init__(self, run: BatchRun, seed: int) -> None:
        self.run, self.lab, self.seed, self.chance = run, run.lab, seed, random.Random(seed)
        self.done: list[str] = []
        self.dark: list[str] = []
        self.cut: list[str] = []

    def story(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.done, self.run.story()])

    def answered(self) -> int:
        return (self.run.folder.progress() or {}).get("step") or 0

    def look_after(self) -> None:
        """What cron and a hand at the switch do."""
        self.run.slurmft("requeue", "--rescue", str(self.run.path), check=False)
        states = self.lab.node_states()
        for host in [host for host in self.dark if states.get(host, "").startswith("DOWN")]:
            self.lab.start_node(host)
            self.dark.remove(host)
        for host in self.cut:
            self.lab.heal(host)
        self.cut.clear()

    def strike(self) -> None:
        kinds = [kind for kind in WEIGHTS if not (self.dark and (kind.startswith("power") or kind == "preemption"))]
        kind = self.chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if (said := self._do(kind)) is not None:
            self.done.append(f"{time.strftime('%T')} at {self.answered()} answers: {kind}: {said}")
            print(f"seed {self.seed}: {self.done[-1]}", flush=True)

    def _do(self, kind: str) -> str | None:
        started = self.run.events("attempt started")
        nodes = sorted({event.details["node"] for event in self.run.events("node answers")})
        if not started or not nodes:
            return None
        batch_host, host = str(started[-1].details["host"]), self.chance.choice(nodes)
        others = [node for node in nodes if node != batch_host] or nodes
        engine, driver = "^[^ ]*python[^ ]* [^ ]*/engine.py", "[s]lurmft.inference.driver|[s]lurmft.agent.zygote"
        faults: dict[str, Callable[[], str | None]] = {
            "engine": lambda: self._signal(host, engine),
            "driver": lambda: self._driver(host, "KILL"),
            "engine stopped": lambda: self._signal(host, engine, "STOP"),
            "driver stopped": lambda: self._driver(host, "STOP"),
            "agent": lambda: self._signal(host, f"^[^ ]*python[^ ]* .*slurmft agent {self.run.path}"),
            "zygote": lambda: self._signal(host, driver, oldest=True),
            "power": lambda: self._power_off(self.chance.choice(others)),
            "power of the batch host": lambda: self._power_off(batch_host),
            "partition": lambda: self._cut(self.chance.choice(others)),
            "supervisor": lambda: self._signal(batch_host, f"slurmft run {self.run.path}", newest=True),
            "preemption": lambda: f"by job {preempt(self.lab)}",
            "slurmft requeue": lambda: self.run.slurmft("requeue", str(self.run.path), check=False).strip() or None,
            "scontrol requeue": self._requeue,
            "torn segment": self._tear,
        }
        return faults[kind]()

    def _signal(
        self, host: str, pattern: str, signal: str = "KILL", *, oldest: bool = False, newest: bool = False
    ) -> str | None:
        pids = self.lab.run_on_as_admin(host, ["pgrep", "-f", pattern], check=False).stdout.split()
        if not pids:
            return None
        ordered = sorted(pids, key=int)
        pid = ordered[0] if oldest else ordered[-1] if newest else self.chance.choice(ordered)
        sent = self.lab.run_on_as_admin(host, ["kill", f"-{signal}", pid], check=False)
        return f"{signal} on {host}" if sent.returncode == 0 else None

    def _driver(self, host: str, signal: str) -> str | None:
        pids = self.run.pids(host)
        if not pids:
            return None
        rank = self.chance.choice(sorted(pids))
        sent = self.lab.run_on_as_admin(host, ["kill", f"-{signal}", pids[rank]], check=False)
        return f"{signal} to replica {rank} on {host}" if sent.returncode == 0 else None

    def _power_off(self, host: str) -> str:
        self.dark.append(host)
        self.lab.kill_node(host)
        return host

    def _cut(self, host: str) -> str:
        self.cut.append(host)
        self.lab.partition(host)
        return host

    def _requeue(self) -> str | None:
        job = self.run.folder.jobs()[-1]
        return f"job {job}" if self.lab.run(["scontrol", "requeue", job], check=False).returncode == 0 else None

    def _tear(self) -> str | None:
        """What a full disk or a power cut leaves: half a line at the end, of segments that are not written to now."""
        segments = sorted((self.run.path / "inference" / "segments").glob("*.jsonl"))
        old = [path for path in segments if time.time() - path.stat().st_mtime > 5]
        if not old:
            return None
        chosen = self.chance.choice(old)
        with chosen.open("ab") as stream:
            stream.write(b'deadbeef {"index": 1, "resp')
        return chosen.name

    def end(self) -> None:
        for host in self.dark:
            self.lab.start_node(host)
        for host in self.cut:
            self.lab.heal(host)


def unexplained(run: BatchRun) -> list[str]:
    """Exceptions of ours that no fault explains."""
    found = []
    for path in (path for path in run.path.rglob("*") if path.suffix in (".log", ".err", ".out") and path.is_file()):
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(run.path)}: {text[max(0, match.start() - 1500) : match.end() + 300]}"
                  for match in OURS.finditer(text)]  # fmt: skip
    return found


@pytest.mark.parametrize("seed", seeds())
def test_random_inference_faults(new_batch: Callable[..., BatchRun], seed: int) -> None:  # noqa: F811
    began_s = time.monotonic()
    run = new_batch(
        REQUESTS, pause=0.5, nodes=3, inference={"hang_timeout_s": 2, "max_restarts": 50, "concurrency": 4},
        exclusions={"threshold": 1000, "probation": 999},
        fault_tolerance={"num_in_job_restarts": 100, "num_job_retries_on_failure": 100, "max_no_progress_cycles": 100,
                         "retry_delay_s": 0, "max_retry_delay_s": 1, "agent_timeout_s": 3, "supervisor_lease_s": 6},
    )  # fmt: skip
    storm, looked_s, seen = Storm(run, seed), 0.0, 0
    run.submit()
    try:
        while run.folder.done() is None:
            assert time.monotonic() - began_s < LONGEST_S, storm.story()
            time.sleep(storm.chance.uniform(0.1, 1.5))
            if time.monotonic() - looked_s > CRON_S:
                looked_s = time.monotonic()
                storm.look_after()
            # mostly at a run that works; sometimes into the recovery from the last fault
            if len(storm.done) < MAX_FAULTS and (storm.answered() > seen or storm.chance.random() < 0.1):
                storm.strike()
                seen = storm.answered()
    finally:
        storm.end()
    found = unexplained(run)
    if output := os.environ.get("SLURMFT_FAULTS_OUTPUT"):
        kinds = Counter(said.partition(": ")[2].partition(":")[0] for said in storm.done)
        with Path(output).open("a") as file:
            file.write(json.dumps({
                "seed": seed, "faults": len(storm.done), "kinds": kinds, "seconds": round(time.monotonic() - began_s),
                "repeated": run.repeated(), "unexplained": len(found),
                "causes": Counter(event.details["cause"] for event in run.events("verdict")),
                "deaths": len(run.events("replica died")), "lost": len(run.events("agent lost")),
            }) + "\n")  # fmt: skip
    run.assert_exactly_once()
    assert found == [], storm.story()
