"""When to save, and when to try again."""

from hypothesis import given
from hypothesis import strategies as st

from slurmft.worker.saves import SaveSchedule


def saves(interval: int, start: int, until: int, fails: set[int] | None = None) -> list[int]:
    schedule, done = SaveSchedule(interval, start), []
    for step in range(start, until):
        if schedule.is_due(step):
            done.append(step)
            schedule.done(step, worked=step not in (fails or set()))
    return done


def test_every_interval_but_not_where_it_began():
    assert saves(10, 0, 35) == [10, 20, 30]
    assert saves(10, 10, 35) == [20, 30]
    assert saves(10, 13, 35) == [20, 30]


def test_never_without_an_interval():
    assert saves(0, 0, 100) == []


def test_a_failed_save_is_tried_again_sooner_and_then_less_often():
    assert saves(80, 0, 400, fails=set(range(400))) == [80, 90, 110, 150, 160, 240, 320]
    assert saves(80, 0, 400, fails={80, 90}) == [80, 90, 110, 160, 240, 320]
    assert saves(2, 0, 9, fails={2, 3}) == [2, 3, 4, 6, 8]


@given(st.integers(1, 50), st.integers(0, 100), st.sets(st.integers(0, 300)))
def test_no_interval_passes_without_a_try_and_a_retry_is_never_later_than_the_next_one(interval, start, fails):
    done = saves(interval, start, 300, fails)
    assert {step for step in range(start + 1, 300) if step % interval == 0} <= set(done)
    for step in fails & set(done):
        assert step + interval >= 300 or any(step < later <= step + interval for later in done)
