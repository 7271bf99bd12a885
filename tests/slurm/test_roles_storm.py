"""A job of roles in which something is killed again and again: the same weights as without, each item once.

``make soak-roles EVENTS=120 EVERY_S=60`` writes what has come of it into bench/results/roles.md.
"""

import json
import os
import platform
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually, preempt
from slurm.test_roles import role, roles, story
from slurmft.lab.cluster import Lab

EVENTS, EVERY_S, SEED = (int(os.environ.get(f"SLURMFT_SOAK_{name}", default)) for name, default in
                         (("EVENTS", "20"), ("EVERY_S", "30"), ("SEED", "1")))  # fmt: skip
STEP_S = 0.5
STEPS = max(60, int(EVENTS * EVERY_S / STEP_S))
RESULTS = os.environ.get("SLURMFT_SOAK_RESULTS", "")

pytestmark = [pytest.mark.soak, pytest.mark.slurm, pytest.mark.timeout(900 + 4 * EVENTS * EVERY_S)]


class Strikes:
    """What befalls the job, and how often it did."""

    def __init__(self, run: Run) -> None:
        self.run, self.lab, self.chance = run, run.lab, random.Random(SEED)
        self.counts = Counter[str]()
        self.took_s: dict[str, list[float]] = defaultdict(list)
        self.kinds: dict[str, tuple[int, Callable[[], bool]]] = {
            "a rank is killed": (4, self.rank),
            "an engine is killed": (4, lambda: self.process(r"python[^ ]* .*serving_engine\.py")),
            "a router is killed": (3, lambda: self.process("python[^ ]* -m slurmft.inference.router")),
            "the orchestrator is killed": (3, lambda: self.process(r"python[^ ]* .*orchestrates\.py")),
            "an agent is killed": (3, lambda: self.process(f"python[^ ]* .*slurmft agent {run.path}/roles/")),
            "a role's supervisor is killed": (3, lambda: self.process(f"python[^ ]* .*slurmft run {run.path}/roles/")),
            "the job's supervisor is killed": (1, self.supervisor),
            "all are preempted": (1, lambda: bool(preempt(self.lab))),
            "a node loses power": (1, self.node),
        }

    def strike(self) -> str:
        kind = self.chance.choices([*self.kinds], [weight for weight, _ in self.kinds.values()])[0]
        if not self.kinds[kind][1]():
            return ""
        self.counts[kind] += 1
        return kind

    def process(self, pattern: str) -> bool:
        argv = ["pgrep", "-f", f"^[^ ]*{pattern}"]
        for node in self.chance.sample(self.lab.nodes, len(self.lab.nodes)):
            if pids := self.lab.run_on_as_admin(node, argv, check=False).stdout.split():
                self.lab.run_on_as_admin(node, ["kill", "-KILL", self.chance.choice(pids)], check=False)
                return True
        return False

    def rank(self) -> bool:
        trainer = role(self.run, "trainer")
        pids = [(node, pid) for node in self.lab.nodes for pid in trainer.pids(node).values()]
        if pids:
            node, pid = self.chance.choice(pids)
            self.lab.run_on_as_admin(node, ["kill", "-KILL", pid], check=False)
        return bool(pids)

    def supervisor(self) -> bool:
        if (owner := self.run.folder.owner()) is None:
            return False
        self.lab.run_on_as_admin(owner.host, ["kill", "-KILL", str(owner.pid)], check=False)
        return True

    def node(self) -> bool:
        nodes = role(self.run, "trainer").events("attempt started")[-1].details["nodes"]
        argv = ["scontrol", "show", "hostnames", nodes]
        name = self.chance.choice(self.lab.run_as_admin(argv).stdout.split())
        self.lab.kill_node(name)
        time.sleep(self.chance.uniform(3, 10))  # so long it is gone
        self.lab.start_node(name)
        return True


def step_of(run: Run) -> int:
    return (role(run, "trainer").folder.progress() or {}).get("step") or 0


def in_steps_of(new_run: Callable[..., Run], name: str, step_s: float) -> Run:
    run = roles(new_run, name, steps=STEPS)
    config: dict[str, Any] = yaml.safe_load(run.config.read_text())
    config["environment"] = {"STEP_S": str(step_s)}
    # else every fourth failure of a role takes the whole job through the queue
    config["fault_tolerance"] = {**config.get("fault_tolerance", {}), "num_in_job_restarts": 1000}
    config["roles"]["trainer"]["checkpoint"]["interval_steps"] = 10
    config["slurm"]["time"] = "10:00:00"
    run.config.write_text(yaml.safe_dump(config))
    return run


def used(run: Run) -> dict[int, set[str]]:
    """Step -> the items that it was done with, in any attempt."""
    found: dict[int, set[str]] = {}
    for path in role(run, "trainer").folder.attempts.glob("*/rank-*.log"):
        for step, item in re.findall(r"^used \S+ (\d+) (\S+)$", path.read_text(errors="replace"), re.M):
            found.setdefault(int(step), set()).add(item)
    return found


def test_a_storm_on_roles_leaves_the_weights_of_a_calm_run(lab: Lab, new_run: Callable[..., Run]) -> None:
    calm = in_steps_of(new_run, "roles-still", 0.0)
    calm.submit()
    eventually(lambda: calm.folder.done() is not None, PATIENCE_S + STEPS, lambda: story(calm))

    run = in_steps_of(new_run, "roles-storm", STEP_S)
    run.submit()
    strikes, began_s = Strikes(run), time.monotonic()
    eventually(lambda: step_of(run) >= 2, PATIENCE_S, lambda: story(run))
    while run.folder.done() is None and sum(strikes.counts.values()) < EVENTS:
        before, at_s = step_of(run), time.monotonic()
        kind = eventually(strikes.strike, PATIENCE_S, lambda: story(run))
        eventually(lambda before=before: step_of(run) > before + 1 or run.folder.done() is not None, 2 * PATIENCE_S,
                   lambda: f"stuck after {strikes.counts}\n{story(run)}")  # fmt: skip
        strikes.took_s[kind].append(time.monotonic() - at_s)
        while time.monotonic() < at_s + EVERY_S and run.folder.done() is None:
            time.sleep(0.2)
    eventually(lambda: run.folder.done() is not None, PATIENCE_S + 2 * STEPS * STEP_S, lambda: story(run))
    seconds = time.monotonic() - began_s

    assert role(run, "trainer").digest() == role(calm, "trainer").digest(), story(run)
    items = used(run)
    assert [*sorted(items)] == [*range(STEPS)]
    assert all(items[step] <= {f"{step}-0", f"{step}-1"} for step in items)
    told = json.loads(run.slurmft("report", str(run.path / "roles" / "trainer"), "--json"))
    told = told["runs"][0] if "runs" in told else told
    rows = [
        f"{STEPS:,} steps of {STEP_S} s, {sum(strikes.counts.values())} events, seed {SEED}, {seconds:.0f} s, "
        f"{os.cpu_count()} cores, {platform.system()}.", "",
        "| event | times | until two new steps: median, longest |", "|---|---|---|",
        *(f"| {kind} | {len(took_s)} | {median(took_s):.1f} s, {max(took_s):.1f} s |"
          for kind, took_s in sorted(strikes.took_s.items())), "",
        "| result | |", "|---|---|",
        "| final weights | those of the calm run, bit for bit |",
        f"| items, each used by its step alone | {2 * STEPS:,} |",
        f"| attempts of the job; of its trainer | {len(run.events('attempt started'))}; "
        f"{len(role(run, 'trainer').events('attempt started'))} |",
        f"| goodput of the trainer, by `slurmft report` | {told['goodput']} |",
    ]  # fmt: skip
    print("\n".join(rows))
    if RESULTS:
        command = f"make soak-roles EVENTS={EVENTS} EVERY_S={EVERY_S}"
        Path(RESULTS).write_text("\n".join(["# Roles", "", "## A storm", "", f"`{command}`", "", *rows, ""]))
