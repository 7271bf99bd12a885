"""Saving by seconds and by itself: in time, before the same step on all ranks, with few words between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.policy.checkpoints import FailureHistory, mtbf_s, plan
from slurmft.policy.worker_settings import CheckpointSettings
from slurmft.worker.saves import SavePace

S = 1_000_000_000


@dataclass
class Ranks:
    """Ranks with clocks of their own that train in step; the collective is a list that rank 0 fills first."""

    given: CheckpointSettings
    start: int = 0
    step_ns: Callable[[int], int] = lambda step: S // 10
    save_ns: Callable[[int], int] = lambda number: S // 100
    fails: frozenset[int] = frozenset()
    """Numbers of the tries that fail."""

    ranks: int = 3
    writes_ns: int = 0
    on_cost: Callable[[float], None] = lambda _: None
    now_ns: int = 0
    words: int = 0
    tried: list[tuple[int, int]] = field(default_factory=list)
    """Step, and when."""

    def __post_init__(self) -> None:
        self._row: list[int] = []
        self._written_at_ns = 0
        self.paces = [
            SavePace(
                self.given, self.start, is_lead=rank == 0, tell=self._lead_says if rank == 0 else self._heard,
                now_ns=lambda rank=rank: self.now_ns + rank * 77 * S,
                is_writing=lambda: self.now_ns < self._written_at_ns,
                on_cost=self.on_cost,
            ) for rank in range(self.ranks)
        ]  # fmt: skip

    def _lead_says(self, row):
        self._row, self.words = list(row), self.words + 1
        return row

    def _heard(self, row):
        return self._row

    def train(self, steps: int) -> Ranks:
        for step in range(self.start, self.start + steps):
            due = [pace.is_due(step) for pace in self.paces]
            assert len(set(due)) == 1, f"ranks disagree at {step}: {due}"
            if due[0]:
                self.save(step)
            self.now_ns += self.step_ns(step)
        return self

    def save(self, step: int) -> None:
        began_ns, number = self.now_ns, len(self.tried)
        self.tried.append((step, began_ns))
        self.now_ns += self.save_ns(number)
        self._written_at_ns = self.now_ns + self.writes_ns
        for rank, pace in enumerate(self.paces):
            pace.done(step, began_ns=began_ns + rank * 77 * S, worked=number not in self.fails)

    def gaps_s(self) -> list[float]:
        times = [0, *(at for _, at in self.tried)]
        return [(later - earlier) / S for earlier, later in itertools.pairwise(times)]


def seconds(interval_s: float) -> CheckpointSettings:
    return CheckpointSettings(interval="seconds", interval_seconds=interval_s)


def test_by_steps_nobody_says_anything():
    ranks = Ranks(CheckpointSettings(interval_steps=10)).train(35)
    assert [step for step, _ in ranks.tried] == [10, 20, 30]
    assert ranks.words == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.floats(0.1, 3), st.integers(0, 10**9))
def test_saves_come_in_time_however_long_the_steps_are(step_ms, interval_s, start):
    ranks = Ranks(seconds(interval_s), start=start, step_ns=lambda step: step_ms * S // 1000).train(400)
    step_s = step_ms / 1000
    assert all(
        interval_s - 1e-6 <= gap <= interval_s + step_s + 0.011 or gap <= step_s + 0.011 for gap in ranks.gaps_s()
    )
    assert len(ranks.tried) >= int(400 * step_s / (interval_s + step_s + 0.02)) - 1


def test_an_interval_costs_a_handful_of_words_however_long_it_is():
    ranks = Ranks(seconds(3600), step_ns=lambda step: S // 20).train(20 * 3600 * 3 + 100)
    assert len(ranks.tried) == 3
    assert ranks.words <= 17 + 3 * 13


@pytest.mark.parametrize(
    "step_ns",
    [
        lambda step: 30 * S if step == 0 else S // 10,
        lambda step: S // 10 if step < 1200 else S,
        lambda step: S if step < 200 else S // 10,
        lambda step: random.Random(step).randrange(S // 100, S),
        lambda step: 5 * S if step % 50 == 0 else S // 10,
    ],
    ids=["compiles first", "ten times slower", "ten times faster", "uneven", "evaluates now and then"],
)
def test_a_save_is_in_time_although_steps_change(step_ns):
    ranks = Ranks(seconds(60), step_ns=step_ns).train(6000)
    assert len(ranks.tried) > 8
    gaps = ranks.gaps_s()
    assert all(60 * (1 - 1 / 16) <= gap <= 60 * (1 + 10 / 8) for gap in gaps)
    assert sum(gap > 66 for gap in gaps) <= 1


def test_a_failed_save_is_tried_again_sooner_and_then_less_often():
    ranks = Ranks(seconds(80), fails=frozenset({0, 1, 2, 3, 4}), step_ns=lambda step: S).train(400)
    assert [round(gap) for gap in ranks.gaps_s()] == [80, 10, 20, 40, 80, 80, 80]


def test_a_save_that_somebody_asked_for_counts():
    ranks = Ranks(seconds(60), step_ns=lambda step: S).train(50)
    ranks.save(50)
    ranks.start = 50
    ranks.train(100)
    assert [step for step, _ in ranks.tried] == [50, 110]


def test_by_itself_it_saves_after_a_minute_and_then_as_often_as_it_pays():
    given_settings = CheckpointSettings(interval="auto", mtbf_s=86_400.0)
    ranks = Ranks(given_settings, save_ns=lambda number: 9 * S if number == 0 else S // 2).train(30_000)
    wanted_s = plan(0.5, 86_400.0).interval_s
    gaps = ranks.gaps_s()
    assert gaps[0] == pytest.approx(60, abs=1)
    assert gaps[1] == pytest.approx(90 + 9, abs=1)  # ten times what the first one cost
    assert all(gap == pytest.approx(wanted_s, rel=0.01) for gap in gaps[2:])
    assert len(gaps) > 5


def test_steps_that_are_slower_while_a_save_is_written_are_part_of_its_cost():
    ranks = Ranks(CheckpointSettings(interval="auto", mtbf_s=86_400.0), writes_ns=2 * S)
    ranks.step_ns = lambda step: S // 5 if ranks.now_ns < ranks._written_at_ns else S // 10
    ranks.train(20_000)
    wanted_s = plan(0.01 + 1.0, 86_400.0).interval_s  # ten steps took 0.1 s longer each
    assert ranks.gaps_s()[-1] == pytest.approx(wanted_s, rel=0.1)


def test_what_a_save_costs_is_told_by_steps_too():
    told: list[float] = []
    ranks = Ranks(CheckpointSettings(interval_steps=10), writes_ns=S, on_cost=told.append)
    ranks.step_ns = lambda step: S // 5 if ranks.now_ns < ranks._written_at_ns else S // 10
    ranks.train(38)
    assert told == pytest.approx([0.01 + 5 * 0.1] * 3)


def test_by_itself_it_goes_by_the_prior_where_no_supervisor_says_how_often_it_fails():
    longest = CheckpointSettings(interval="auto", interval_seconds=100)
    assert max(Ranks(longest).train(9000).gaps_s()) <= 101
    ranks = Ranks(CheckpointSettings(interval="auto")).train(60_000)
    wanted_s = plan(0.01, mtbf_s(FailureHistory(), 1)).interval_s
    assert ranks.gaps_s()[-1] == pytest.approx(wanted_s, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sets(st.integers(0, 30)), st.sampled_from(["auto", "seconds"]))
def test_ranks_never_disagree_and_never_stop_saving(seed, fails, interval):
    chance = random.Random(seed)
    given_settings = CheckpointSettings(interval=interval, interval_seconds=20, mtbf_s=3600)
    ranks = Ranks(
        given_settings, fails=frozenset(fails), writes_ns=chance.randrange(0, 5 * S),
        step_ns=lambda step: chance.choice([0, 1, S // 100, S, 7 * S]),
        save_ns=lambda number: chance.randrange(0, 9 * S),
    ).train(600)  # fmt: skip
    assert max(ranks.gaps_s(), default=0) <= 20 + 9 * 7 + 9
    assert ranks.now_ns - ranks.tried[-1][1] <= (20 + 9 * 7 + 9) * S


@pytest.mark.parametrize("interval", ["steps", "seconds", "auto"])
def test_with_copies_of_steps_a_run_that_begins_anew_saves_after_its_first_step(interval):
    """Copies know from a save what belongs to the state; one that goes on had it."""
    given = CheckpointSettings(interval=interval, interval_steps=0, interval_seconds=1e6, peer_interval=1)
    anew = Ranks(given).train(30)
    assert [step for step, _ in anew.tried][:1] == [1]
    assert all(step != 6 for step, _ in Ranks(given, start=5).train(3).tried)
    without = Ranks(CheckpointSettings(interval=interval, interval_steps=0, interval_seconds=1e6)).train(3)
    assert [step for step, _ in without.tried] == []


@pytest.mark.parametrize("interval", ["steps", "seconds"])
def test_where_steps_can_be_kept_a_run_that_begins_anew_saves_after_its_first_step(interval):
    given = CheckpointSettings(interval=interval, interval_steps=0, interval_seconds=1e6)
    anew, resumed = (SavePace(given, start, keeps_steps=True) for start in (0, 5))
    assert [step for step in range(4) if anew.is_due(step)] == [1]
    assert not any(resumed.is_due(step) for step in range(5, 9))
    assert not any(SavePace(given, 0).is_due(step) for step in range(4))
