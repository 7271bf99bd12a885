"""Faults of ours, each in one place: what is planted is found, and where nothing is planted nothing is."""

import pytest

from lives.life import story
from lives.planted import PLANTED as IN_RUNS
from lives.planted import lives_to_find
from lives.planted_batches import PLANTED as IN_BATCHES
from lives.planted_turns import PLANTED as IN_TURNS

PLANTED = IN_RUNS | IN_BATCHES | IN_TURNS
SHOWN = (
    "nodes are asked for their state once", "every report counts as told before",
    "no pings are sent between two attempts", "no agent is taken in between two attempts",
    "a requeue comes before its decision", "events that meet a full disk are lost", "a budget is not spent",
    "a claim is refused to nobody", "a supervisor that lives is replaced", "cron releases what a user holds",
    "Slurm may undo a stop", "a submission without an answer is made again", "an exclusion is forgotten",
    "what a lost agent had is nobody's", "what a dead engine has written is not looked at", "nothing is made durable",
    "one death makes a request a poisoned one", "an answer that was not written is told",
    "the output is written before the last answer", "an answer goes on from another request's text",
    "a stop is not heeded", "a stop is taken away when it is seen", "a requeue keeps off its suspects alone",
    "an agent has a lease of five seconds", "events that waited for the disk are written last first",
)  # fmt: skip
"""Some of each kind; the others take longer, all together."""


@pytest.mark.parametrize("name", SHOWN)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lives_to_find(PLANTED[name], monkeypatch) is not None


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in SHOWN])
def test_every_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lives_to_find(PLANTED[name], monkeypatch) is not None


def test_nothing_is_found_where_nothing_is_planted() -> None:
    for scene in {id(each.scene): each.scene for each in PLANTED.values()}.values():
        world = scene(0)
        assert not world.violations, story(world)


def test_each_fault_has_a_name_of_its_own() -> None:
    assert len(PLANTED) == len(IN_RUNS) + len(IN_BATCHES) + len(IN_TURNS)
