"""The policy of a handover, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurmft.policy.serving import MAX_TRIES, Readiness, Situation, Step, Successor, due_s, lead_s, next_step, waits_for

CALM = Situation(
    now_s=1000, due_s=2000, successor=Successor.NONE, alive_since_s=None, start_limit_s=300, tries=0, again_s=0
)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, Step.WAIT),
        ({"due_s": None}, Step.WAIT),
        ({"now_s": 2000}, Step.SUBMIT),
        ({"now_s": 2000, "again_s": 2030}, Step.WAIT),
        ({"now_s": 2000, "tries": MAX_TRIES}, Step.GIVE_UP),
        ({"now_s": 2000, "successor": Successor.WAITING}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.UNKNOWN}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.ALIVE, "alive_since_s": 1800}, Step.WAIT),
        ({"now_s": 2000, "successor": Successor.ALIVE, "alive_since_s": None}, Step.WAIT),
        ({"now_s": 2101, "successor": Successor.ALIVE, "alive_since_s": 1800}, Step.REPLACE),
        ({"now_s": 2000, "successor": Successor.GONE, "tries": 1}, Step.SUBMIT),
        ({"now_s": 2000, "successor": Successor.GONE, "tries": MAX_TRIES}, Step.GIVE_UP),
    ],
)
def test_the_next_step(changes: dict[str, object], step: Step) -> None:
    assert next_step(replace(CALM, **changes)) is step  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configured", "startup", "lead"), [(100.0, None, 100.0), (100.0, 600.0, 100.0), (None, None, None),
                                        (None, 200.0, 120 + 30 + 300 + 60)]
)  # fmt: skip
def test_the_lead(configured: float | None, startup: float | None, lead: float | None) -> None:
    assert lead_s(configured, startup_s=startup, stop_s=120) == lead


@pytest.mark.parametrize(
    ("lead", "ends", "due"),
    [(None, 1000, None), (100, None, None), (100, 1000, 900), (600, 1000, 500), (5000, 1000, 500)],
)
def test_it_is_not_due_in_the_first_half_of_a_job(lead: float | None, ends: float | None, due: float | None) -> None:
    assert due_s(lead, owned_since_s=0, ends_s=ends) == due


@pytest.mark.parametrize(
    ("successor", "since", "left", "waits"),
    [
        (Successor.ALIVE, 60, 40, True),
        (Successor.ALIVE, 71, 29, False),
        (Successor.WAITING, 5, 95, True),
        (Successor.WAITING, 11, 89, False),
        (Successor.NONE, 5, 95, True),
        (Successor.GONE, 5, 95, False),
    ],
)
def test_a_stop_goes_on_serving_for_a_successor_that_may_come(
    successor: Successor, since: float, left: float, waits: bool
) -> None:
    assert waits_for(successor, since_s=since, left_s=left, whole_s=100) is waits


@pytest.mark.parametrize(
    ("ready", "down", "routers", "suffices"),
    [(4, 0, 2, True), (3, 0, 2, False), (3, 1, 2, True), (4, 0, 1, False), (1, 3, 2, False), (0, 4, 2, False)],
)
def test_a_candidate_takes_over_when_all_that_can_be_is_ready(
    ready: int, down: int, routers: int, suffices: bool
) -> None:
    found = Readiness(ready=ready, down=down, expected=4, routers=routers, routers_wanted=2)
    assert found.suffices(0.5) is suffices
