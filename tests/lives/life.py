"""One seed, one life: what is drawn for it, how it is lived, and what is said of it when something did not hold."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lives.faults import Fault, drawn
from lives.timeline import Stuck
from lives.world import World, simulated
from slurmft.storage.journal import EventName

PATIENT = {"num_in_job_restarts": 200, "num_job_retries_on_failure": 200, "max_no_progress_cycles": 200}
"""Budgets that no life spends: whatever befalls it, the run has to end well."""


Scheduled = Sequence[tuple[float, Fault]]
"""Faults, each with the seconds from the beginning of the life at which it comes."""


def live(seed: int, *, most: int = 6) -> World:
    """Live the life of this seed. What did not hold is in its ``violations``."""
    chance = random.Random(seed)
    settings = {
        "nodes": (nodes := chance.choice((1, 2, 2, 3))), "nproc_per_node": chance.choice((1, 2)),
        "spare_nodes": chance.choice((0, 0, 1)),
        "elastic": {"min_nodes": chance.choice((1, nodes, None))},
        "checkpoint": {"interval_steps": 10, "just_in_time": chance.random() < 0.7},
        "fault_tolerance": {**PATIENT, "agent_timeout_s": chance.choice((5.0, 10.0)),
                            "supervisor_lease_s": chance.choice((30.0, 60.0))},
    }  # fmt: skip
    return lived(drawn(chance, most=most), until=chance.choice((20, 60, 150)), seed=seed, **settings)


def lived(faults: Scheduled, *, until: int = 150, seed: int = 0, peers_fail: bool = True, **settings: Any) -> World:
    """Live the life in which these faults come.

    Args:
        peers_fail: ranks that wait for one that is gone may fail of it by themselves, and keep nothing then.
        until: steps of the run, of 0.2 s each; every tenth is saved.
        seed: decides what is left to chance.
        settings: of the run's configuration.
    """
    in_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="life-", dir=in_memory if in_memory.is_dir() else None))
    try:
        world = World(folder, random.Random(seed), **settings)
        world.until, world.save_every = until, 10
        if not peers_fail:
            world.peers_fail_s = (1e9,)
        with pytest.MonkeyPatch.context() as patch, simulated(world, patch):
            for at_s, fault in faults:
                world.timeline.call_later(at_s, fault, world)
            try:
                code = world.live()
            except Stuck as error:
                world.violate("every life ends", str(error))
            else:
                _judge(world, code)
                world.outlive()
        world.journal = [f"{event.at:%H:%M:%S.%f} {event.attempt} {event.event} {event.details}" for event in
                         world.events()]  # fmt: skip
        return world
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(world: World, code: int) -> None:
    """What must hold at the end of a life."""
    events = world.events()
    if code != 0 and not world.stop_asked_s:
        decided = [event.details.get("reason") for event in events if event.event == EventName.DECISION][-1:]
        world.violate("the run goes on", f"it ends with {code}: {decided}")
    elif code == 0 and world.saved != world.until:
        world.violate("the run ends complete", f"it ends well at {world.saved} of {world.until}")
    for event in events:
        facts = event.details
        if event.event == EventName.EVIDENCE and (facts.get("kind"), facts.get("node")) not in world.accusable:
            world.violate("no evidence without a cause", str(facts))
    decided: dict[str, set[str]] = {}
    for event in events:
        if event.event == EventName.DECISION:
            decided.setdefault(event.attempt, set()).add(str(event.details.get("action")))
    for attempt, actions in decided.items():
        if len(actions) > 1:
            world.violate("one decision", f"attempt {attempt} has {sorted(actions)}")


def story(world: World) -> str:
    """All that happened, for the person who mends it."""
    return "\n".join([*world.story, *world.violations, *world.journal])
