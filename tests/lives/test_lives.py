"""Simulated lives of runs: whatever befalls one, what must hold does; and a fault that is planted in us is found.

``make lives SEEDS=0-99999`` lives more of them, with more faults each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lives.faults import kill_agent, kill_rank_and_connection, power_off
from lives.life import PATIENT, Scheduled, live, lived, story
from slurmft.ipc.messages import RescueState
from slurmft.policy.verdict import Action
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import attempt as attempt_module
from slurmft.supervisor.act import AttemptEnd
from slurmft.supervisor.agents import AgentLink, AgentPool, ask_each
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.crew import Crew
from slurmft.supervisor.hangs import Hangs

BLOCKS, EACH = 10, 20
KEEPING = {"checkpoint": {"interval_steps": 10, "just_in_time": True}, "fault_tolerance": PATIENT}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_whatever_befalls_a_run_it_ends_well(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        world = live(seed)
        assert not world.violations, f"seed {seed}\n{story(world)}"


def test_a_seed_is_one_life() -> None:
    assert live(221).story == live(221).story


def resumed(faults: Scheduled, **settings: Any) -> list[tuple[int, int]]:
    """Of each restart: the last step before it, and the one that it went on from."""
    world = lived(faults, peers_fail=False, **{**KEEPING, **settings})
    assert not world.violations, story(world)
    return [(before.step, after.began_at) for before, after in zip(world.trainings, world.trainings[1:], strict=False)]


@pytest.mark.parametrize("seed", range(25))
def test_a_connection_that_breaks_at_the_worst_moment_costs_no_step(seed: int) -> None:
    """The survivors were killed without having been asked for their state: their connection was away for 0.2 s."""
    [(before, after)] = resumed([(9.0, kill_rank_and_connection)], seed=seed, nodes=1, nproc_per_node=2)
    assert after == before


@pytest.mark.parametrize("fault", [power_off, kill_agent])
def test_a_lost_node_costs_no_step(fault: Callable[..., None]) -> None:
    (before, after), *_ = resumed([(9.0, fault)], nodes=2, nproc_per_node=1, elastic={"min_nodes": 1})
    assert after == before


# Faults of ours, each in one place, and what shows them

Plant = Callable[[pytest.MonkeyPatch], None]


async def _nothing(*_: Any, **__: Any) -> None:
    pass


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Plant:
    """Have ``around`` called in the place of a method, with the method first."""
    real = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


async def _ask_once(_pool: AgentPool, links: Any, _journal: Any) -> None:
    await ask_each(links, RescueState(), timeout_s=17.0)


PLANTED: dict[str, tuple[Plant, str]] = {
    "nodes are asked for their state once": (
        lambda patch: patch.setattr(attempt_module, "rescue", _ask_once), "state is kept"),
    "nodes are not asked for their state": (
        lambda patch: patch.setattr(attempt_module, "rescue", _nothing), "state is kept"),
    "ends of workers are not taken in": (
        lambda patch: patch.setattr(AttemptRunner, "_on_exit", lambda *_: None), "every life ends"),
    "every report counts as told before": (
        lambda patch: patch.setattr(AgentLink, "has_told", lambda *_: True), "every life ends"),
    "hangs are not looked into": (lambda patch: patch.setattr(Hangs, "investigate", _nothing), "every life ends"),
    "no decision is carried out": (lambda patch: patch.setattr(AttemptEnd, "_carry_out", lambda *_: 0), "the run ends"),
    "a connection that broke is a lost node at once": (
        lambda patch: patch.setattr(Crew, "reconnected", _nothing), "no evidence"),
    "an attempt is taken for finished when it was stopped": (
        _wrap(AttemptEnd, "follow", lambda real, self, verdict, decision, **rest: real(
            self, verdict, replace(decision, action=Action.FINISH), **rest)), "the run ends complete"),
    "a request for a stop is not seen": (
        lambda patch: patch.setattr(RunFolder, "see_request", lambda *_: None), "stop means stop"),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, invariant = PLANTED[name]
    plant(monkeypatch)
    lives = [lived([(9.0 + late_s / 100, kill_rank_and_connection)], nodes=1, **KEEPING) for late_s in range(25)]
    found = [each for world in lives for each in world.violations]
    for seed in range(400):
        if any(each.startswith(invariant) for each in found):
            return
        found = live(seed).violations
    pytest.fail("400 lives have not found it")
