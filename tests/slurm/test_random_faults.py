"""Random faults at random moments, one upon the other, on a cluster with a spare: the weights know nothing of them.

Every choice comes from the seed in the test's name; what was done and when is printed, and is in the message of a test
that fails. ``SLURMFT_FAULT_SEEDS=7,8`` or ``=100-130`` runs those seeds instead of the few of ``make soak``;
``SLURMFT_FAULTS_OUTPUT=FILE`` appends one line of JSON per run that ended.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm.conftest import Run, preempt
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]

MAX_FAULTS = 20
RECOVERY_S = 200.0
"""Until a new step after a fault: a lost batch host costs SlurmdTimeout, a rescue and sometimes Slurm's own 121 s."""

CRON_S = 8.0
"""How often `requeue --rescue` looks at a run that is down, as cron does every few minutes."""

WEIGHTS = {
    "one rank": 6, "all ranks of a node": 3, "rank 0": 2, "all ranks of rank 0's node": 2, "all ranks": 1,
    "one rank stopped": 2, "all ranks of a node stopped": 1, "agent": 2, "zygote": 2, "power": 2,
    "power of the batch host": 1, "preemption": 1, "slurmft requeue": 1, "scontrol requeue": 1,
}  # fmt: skip
SIGNALS = ("KILL", "SEGV", "ABRT")
OURS = re.compile(r"^(slurmft\.[\w.]+|KeyError|AttributeError|TypeError|AssertionError|NameError|IndexError)\b", re.M)
"""How the last line of an exception begins that neither a fault nor a lost peer explains."""


def seeds() -> list[int]:
    chosen = os.environ.get("SLURMFT_FAULT_SEEDS", "1-3")
    parts = [part.partition("-") for part in chosen.split(",")]
    return [seed for first, _, last in parts for seed in range(int(first), int(last or first) + 1)]


@dataclass
class Storm:
    """A run, and the chance that meets it."""

    run: Run
    seed: int
    chance: random.Random
    done: list[str] = field(default_factory=list)
    """Each fault, in words, in order."""

    dark: list[str] = field(default_factory=list)
    """Nodes without power."""

    @property
    def lab(self) -> Lab:
        return self.run.lab

    def story(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.done, self.run.story()])

    def first_steps(self) -> int:
        return len(self.run.events("first step"))

    def is_waited_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition, or the run's end: then False. Cron and a hand at the switch look after it."""
        deadline, next_look = time.monotonic() + RECOVERY_S, time.monotonic() + CRON_S
        while not condition():
            if self.run.folder.done() is not None:
                return False
            if time.monotonic() > deadline:
                pytest.fail(f"not within {RECOVERY_S:.0f} s\n{self.story()}")
            if time.monotonic() > next_look:
                self.run.slurmft("requeue", "--rescue", str(self.run.path), check=False)
                self.give_power_back()
                next_look = time.monotonic() + CRON_S
            time.sleep(0.05)
        return True

    def step(self) -> int:
        return (self.run.folder.progress() or {}).get("step") or 0

    def strike(self) -> bool:
        """One fault of a kind that is possible now; False where its target has just gone."""
        kinds = [kind for kind in WEIGHTS if not (self.dark and (kind.startswith("power") or kind == "preemption"))]
        kind = self.chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if (said := self._do(kind)) is None:
            return False
        self.done.append(f"{time.strftime('%T')} about step {self.step()}: {kind}: {said}")
        print(f"seed {self.seed}: {self.done[-1]}", flush=True)
        return True

    def _do(self, kind: str) -> str | None:
        hosts = self.run.events("agents ready")[-1].details["hosts"]
        batch_host = str(self.run.events("attempt started")[-1].details["host"])
        other = self.chance.choice(hosts)
        signal = self.chance.choice(SIGNALS)
        rank = self.chance.randrange(2)
        others = [host for host in hosts if host != batch_host]
        faults: dict[str, Callable[[], str | None]] = {
            "one rank": lambda: self._signal(signal, other, only=rank),
            "rank 0": lambda: self._signal(signal, hosts[0], only=0),
            "all ranks of a node": lambda: self._signal(signal, other),
            "all ranks of rank 0's node": lambda: self._signal(signal, hosts[0]),
            "all ranks": lambda: "; ".join(said for host in hosts if (said := self._signal(signal, host))) or None,
            "one rank stopped": lambda: self._signal("STOP", other, only=rank),
            "all ranks of a node stopped": lambda: self._signal("STOP", other),
            "agent": lambda: self._kill_oldest(other, f"^[^ ]*python[^ ]* .*slurmft agent {self.run.path}"),
            "zygote": lambda: self._kill_oldest(other, "[s]lurmft.agent.zygote"),
            "power": lambda: self._power_off(others[rank % len(others)]) if others else None,
            "power of the batch host": lambda: self._power_off(batch_host),
            "preemption": lambda: f"by job {preempt(self.lab)}",
            "slurmft requeue": lambda: self.run.slurmft("requeue", str(self.run.path), check=False).strip() or None,
            "scontrol requeue": self._requeue,
        }
        return faults[kind]()

    def _requeue(self) -> str | None:
        job = self.run.folder.jobs()[-1]
        return f"job {job}" if self.lab.run(["scontrol", "requeue", job], check=False).returncode == 0 else None

    def _signal(self, signal: str, host: str, *, only: int | None = None) -> str | None:
        """``only``: the first or second rank of the node."""
        pids = sorted(self.run.pids(host).items())
        chosen = pids if only is None else pids[only : only + 1]
        if not chosen:
            return None
        argv = ["kill", f"-{signal}", *(pid for _, pid in chosen)]
        sent = self.lab.run_on_as_admin(host, argv, check=False)
        return f"{signal} to {[rank for rank, _ in chosen]} on {host}" if sent.returncode == 0 else None

    def _kill_oldest(self, host: str, pattern: str) -> str | None:
        sent = self.lab.run_on_as_admin(host, ["pkill", "-KILL", "-o", "-f", pattern], check=False)
        return f"on {host}" if sent.returncode == 0 else None

    def _power_off(self, host: str) -> str:
        self.dark.append(host)
        self.lab.kill_node(host)
        return host

    def give_power_back(self) -> None:
        """Where Slurm knows of the loss: a node that comes back before loses its jobs in other ways."""
        states = self.lab.node_states()
        for host in [host for host in self.dark if states.get(host, "").startswith("DOWN")]:
            self.lab.start_node(host)
            self.dark.remove(host)

    def end(self) -> None:
        for host in self.dark:
            self.lab.start_node(host)
        self.dark.clear()


def unexplained(run: Run) -> list[str]:
    """What no fault explains: exceptions of ours in any log, and verdicts that blame the trainer's code."""
    blamed = [f"{e.attempt}: {e.details}" for e in run.events("verdict") if e.details["cause"] == "worker error"]
    logs = [path for path in run.path.rglob("*") if path.suffix in (".log", ".err", ".out") and path.is_file()]
    found = []
    for path in logs:
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(run.path)}: {text[max(0, m.start() - 800) : m.end() + 200]}"
                  for m in OURS.finditer(text)]  # fmt: skip
        if "Traceback" in text and not path.name.startswith("rank-"):
            found.append(f"{path.relative_to(run.path)}: {text[text.index('Traceback') :][:1500]}")
    return blamed + found


def record(storm: Storm, **result: float) -> None:
    events = Counter(event.event for event in storm.run.events())
    kinds = Counter(said.partition(": ")[2].partition(":")[0] for said in storm.done)
    line = {"seed": storm.seed, "faults": len(storm.done), "kinds": kinds, **result,
            "causes": Counter(event.details["cause"] for event in storm.run.events("verdict")),
            "events": {name: events[name] for name in ("attempt started", "first step", "state kept just in time",
                       "requeued", "rescuing", "checkpoint quarantined", "worker failed", "worker hung")}}  # fmt: skip
    if output := os.environ.get("SLURMFT_FAULTS_OUTPUT"):
        with Path(output).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("seed", seeds())
def test_random_faults(new_run: Callable[..., Run], undisturbed: str, seed: int) -> None:
    began = time.monotonic()
    run = new_run(
        f"faults-{seed}", delay=0.3, spare_nodes=1, checkpoint={"interval_steps": 5, "peer_copies": 1},
        fault_tolerance={
            "num_in_job_restarts": 100, "num_job_retries_on_failure": 100, "max_no_progress_cycles": 100,
            "rank_section_timeouts": {"step": 10, "checkpointing": 20, "setup": 150}, "num_warmup_iterations": 1,
            "initial_rank_heartbeat_timeout": 150, "max_retry_delay_s": 1, "retry_delay_s": 0,
        },
    )  # fmt: skip
    # what chance puts on one node is no evidence against it
    run.configure(exclusions={"threshold": 1000, "probation": 999})
    storm = Storm(run, seed, random.Random(seed))
    run.submit()
    try:
        begun = 1
        while len(storm.done) < MAX_FAULTS and storm.is_waited_for(lambda n=begun: storm.first_steps() >= n):
            target = storm.step() + storm.chance.choice([0, 0, 1, 2, 3])
            if not storm.is_waited_for(lambda n=target: storm.step() >= n):
                break
            storm.give_power_back()
            begun = storm.first_steps()
            if storm.strike():
                begun += 1
                while len(storm.done) < MAX_FAULTS and storm.chance.random() < 0.2:
                    time.sleep(storm.chance.uniform(0.0, 1.5))  # into the recovery from it, wherever that is
                    storm.strike()
        storm.is_waited_for(lambda: False)
    finally:
        storm.end()
    # twice where a fault came after it was printed
    digests = {line.split()[-1] for line in run.output().splitlines() if line.startswith("final weights sha256: ")}
    found = unexplained(run)
    record(storm, seconds=time.monotonic() - began, same_weights=digests == {undisturbed}, unexplained=len(found))
    assert digests == {undisturbed}, storm.story()
    assert found == [], storm.story()
