"""The simulated life of a run against exact models, and its accounts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.planning import simulation
from slurmft.planning.simulation import (
    CATEGORIES,
    DAY_S,
    Part,
    Scenario,
    as_one,
    estimate,
    expected_ettr,
    live,
    simulate,
    t_quantile,
)
from slurmft.policy import suspicion
from slurmft.policy.decide import Size
from slurmft.policy.verdict import Cause

MINUTE_S = 60.0


def plain(nodes: int, *, rate: float, save_s: float, restart_s: float, every_s: float, days: float) -> Scenario:
    """A run whose failures leave their node in the job, and whose restarts have no limit."""
    return Scenario(
        size=Size(nodes=nodes, minimum=nodes, maximum=nodes),
        cluster=nodes,
        rates_s={Cause.SIGNAL_CRASH: rate / 1000 / DAY_S},
        start_s=restart_s,
        restart_s=restart_s,
        save_cost_s=save_s,
        interval_s=every_s,
        work_s=days * DAY_S,
        restarts=10**9,
        max_no_progress_cycles=10**9,
        excludes=False,
    )


def renewal_ettr(scenario: Scenario) -> float:
    """Exact, for segments of training and a save, Poisson failures at any time, and restarts that may fail as well."""
    rate_s = math.fsum(scenario.rates_s.values()) * scenario.size.nodes
    segment_s = scenario.interval_s + scenario.save_cost_s
    needed_s = math.expm1(rate_s * segment_s) / rate_s * math.exp(rate_s * scenario.restart_s)
    return scenario.interval_s / needed_s


def young(nodes: int, rate: float, save_s: float) -> float:
    return math.sqrt(2 * save_s / (nodes * rate / 1000 / DAY_S))


def ladder(nodes: int) -> list[Scenario]:
    """Hourly saves; Young's interval; asynchronous saves; a restart in the job; without lemons."""
    slow, fast, cheap = 5 * MINUTE_S, 20 * MINUTE_S, 10.0
    return [
        plain(
            nodes,
            rate=rate,
            save_s=save_s,
            restart_s=restart_s,
            days=40,
            every_s=3600.0 if index == 0 else young(nodes, rate, save_s),
        )
        for index, (rate, save_s, restart_s) in enumerate(
            [
                (6.5, slow, fast),
                (6.5, slow, fast),
                (6.5, cheap, fast),
                (6.5, cheap, 3 * MINUTE_S),
                (1.67, cheap, 3 * MINUTE_S),
            ]
        )
    ]


@pytest.mark.parametrize(
    ("nodes", "known"), [(2000, (0.567, 0.608, 0.790, 0.921, 0.966)), (250, (0.870, 0.877, 0.959, 0.977, 0.989))]
)
def test_the_exact_renewal_model_is_met_within_a_hundredth(nodes: int, known: tuple[float, ...]):
    for scenario, ettr in zip(ladder(nodes), known, strict=True):
        assert renewal_ettr(scenario) == pytest.approx(ettr, abs=0.0006)
        found = simulate("", scenario, 8).ettr
        assert found.mean == pytest.approx(ettr, abs=0.01)


def test_without_failures_only_the_start_and_the_saves_cost():
    calm = plain(4, rate=0, save_s=10, restart_s=60, every_s=1000, days=1)
    life = live(calm, 1)
    assert life.spent_s["saving"] == pytest.approx(10 * math.ceil(DAY_S / 1000))
    assert life.wall_s == pytest.approx(DAY_S + 60 + life.spent_s["saving"])
    assert (life.finished, life.work_s, sum(life.failures.values())) == (True, DAY_S, 0)


RATES = {Cause.NODE_LOST: 30 / 1000 / DAY_S, Cause.SIGNAL_CRASH: 40 / 1000 / DAY_S, Cause.HANG: 30 / 1000 / DAY_S}
BUSY = Scenario(
    size=Size(nodes=32, minimum=32, maximum=32),
    cluster=40,
    rates_s=RATES,
    repair_s=DAY_S,
    named_right=0.9,
    seen_by_checks=0.3,
    wait_s=600,
    preemptions_s=0.5 / DAY_S,
    time_limit_s=DAY_S,
    person_s=4 * 3600,
    start_s=120,
    restart_s=5,
    save_cost_s=5,
    durable_s=30,
    hang_s=180,
    interval_s=0,
    work_s=10 * DAY_S,
)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 40),
    spares=st.integers(0, 4),
    fewest=st.integers(0, 5),
    factor=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    lemons=st.integers(0, 5),
    limit_s=st.sampled_from([0.0, 50.0, 3600.0]),
    restarts=st.integers(0, 3),
    every_s=st.sampled_from([0.0, 60.0, 7200.0]),
    copied=st.booleans(),
    others=st.integers(0, 3),
)
def test_the_accounts_add_up_and_work_is_never_invented(
    seed: int,
    nodes: int,
    spares: int,
    fewest: int,
    factor: float,
    lemons: int,
    limit_s: float,
    restarts: int,
    every_s: float,
    copied: bool,
    others: int,
):
    scenario = replace(
        BUSY,
        size=Size(nodes=nodes, minimum=max(1, nodes - fewest), maximum=nodes),
        spares=spares,
        cluster=nodes + spares + 2,
        rates_s={cause: rate * factor for cause, rate in RATES.items()},
        lemons=lemons,
        lemon_factor=20,
        time_limit_s=limit_s,
        restarts=restarts,
        interval_s=every_s,
        is_copied=copied,
        work_s=0.2 * DAY_S,
        parts=tuple(
            Part(name=f"p{at}", first=2 * at, nodes=2, restart_s=30.0 * at, share=1 / (1 + at)) for at in range(others)
        ),
        trainer="trainer",
    )
    life = live(scenario, seed)
    lost_s = life.wall_s - life.spent_s["training"] - life.spent_s["saving"]
    assert all(0 <= seconds <= lost_s + 1e-6 for seconds in life.of_roles_s.values()), life
    assert math.fsum(life.of_roles_s.values()) <= lost_s + 1e-6
    assert math.fsum(life.spent_s.values()) == pytest.approx(life.wall_s, rel=1e-9, abs=1e-3)
    assert all(seconds >= -1e-6 for seconds in life.spent_s.values()), life.spent_s
    assert 0 <= life.work_s <= scenario.work_s + 1e-6
    assert 0 <= life.ettr <= life.goodput <= 1 + 1e-9
    assert life.finished == (life.work_s >= scenario.work_s - 1e-6)
    assert live(scenario, seed) == life


def test_what_fails_in_a_role_beside_the_trainer_costs_its_share_and_not_the_steps():
    """Engines on half of the nodes; what is expected is the rate of their failures by what each costs."""
    calm = plain(64, rate=100, save_s=0, restart_s=0, every_s=1e9, days=5)
    engines = Part(name="engines", first=0, nodes=64, restart_s=600, share=1 / 16)
    alone = simulate("", replace(calm, parts=(engines,), trainer="trainer"), 6)
    failures_s = 64 * 100 / 1000 / DAY_S
    assert alone.ettr.mean == pytest.approx(1 / (1 + failures_s * 600 / 16), abs=0.0005)
    assert alone.share("lost work") == 0
    hours = alone.of_roles["engines"].mean
    assert hours * 3600 == pytest.approx(alone.days.mean * DAY_S * (1 - alone.ettr.mean), rel=1e-3)
    half = replace(BUSY, parts=(replace(engines, nodes=16),), trainer="trainer", work_s=5 * DAY_S)
    assert simulate("", half, 6).ettr.mean > simulate("", as_one(half), 6).ettr.mean


def test_spares_replace_requeues_and_the_list_finds_lemons():
    few = replace(BUSY, preemptions_s=0, time_limit_s=0, work_s=20 * DAY_S)
    without, with_spares = simulate("", few, 6), simulate("", replace(few, spares=2, cluster=42), 6)
    assert with_spares.requeues.mean < without.requeues.mean / 2
    assert with_spares.ettr.mean > without.ettr.mean
    sour = replace(few, lemons=2, lemon_factor=60, cluster=44)
    found = simulate("", sour, 6)
    blind = simulate("", replace(sour, excludes=False), 6)
    assert sum(life.excluded_lemons for life in found.lives) >= 6
    assert found.failures.mean < blind.failures.mean


def test_the_list_is_asked_once_for_each_way_through_the_queue(monkeypatch: pytest.MonkeyPatch):
    """Once for each node instead, and 11 months of 2,000 nodes take hours."""
    asked: list[int] = []
    monkeypatch.setattr(
        simulation,
        "choose_exclusions",
        lambda *args, **more: asked.append(1) or suspicion.choose_exclusions(*args, **more),
    )
    life = live(replace(BUSY, lemons=2, lemon_factor=60, cluster=44), 1)
    assert life.excluded
    assert 0 < len(asked) <= 1 + life.requeues + life.given_up


def test_a_run_that_cannot_work_ends_all_the_same():
    hopeless = replace(BUSY, time_limit_s=60, preemptions_s=0, work_s=3600)
    life = live(hopeless, 3)
    assert (life.finished, life.given_up > 0) == (False, True)
    assert life.wall_s < 100 * 3600


def test_as_many_workers_as_there_are_give_the_same():
    assert simulate("", BUSY, 3, workers=2).lives == simulate("", BUSY, 3).lives


def test_estimates():
    assert [round(t_quantile(degrees), 2) for degrees in (1, 4, 5, 9, 30, 1000)] == [
        12.71,
        2.78,
        2.57,
        2.26,
        2.04,
        1.96,
    ]
    assert (estimate([2.0, 2.0, 2.0]).half_width, estimate([2.0]).mean) == (0.0, 2.0)
    assert estimate([1.0, 2.0, 3.0]).half_width == pytest.approx(4.303 / math.sqrt(3))


def test_the_first_order_formula():
    hourly = ladder(2000)[0]
    assert expected_ettr(hourly) == pytest.approx((1 - 13 / 1440 * 50) / (1 + 5 / 60))
    assert set(CATEGORIES) == set(live(hourly, 0).spent_s)
