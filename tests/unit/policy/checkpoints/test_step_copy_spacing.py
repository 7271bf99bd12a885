"""How often steps are copied to memory: the cost in, the interval out, alike on all ranks."""

from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.checkpoints import MAX_SHARE, NEW_PLACES, SAMPLES, CopyInterval, Costs

MS = 1_000_000


def run(spacing: CopyInterval, copies: int, *, copy: int, step: int, agreeing: int = 0) -> list[float]:
    """So many copies of so many nanoseconds each, with steps of ``step`` nanoseconds; the shares that were too much."""
    shares = []
    for _ in range(copies):
        share = spacing.note(copy=copy, agreeing=agreeing, training=step * spacing.interval)
        shares += [] if share is None else [share]
    return shares


@of_each(
    interval__copy_ms__step_ms__lands_at=[
        (1, 1, 100, 1),  # 1 %
        (1, 5, 100, 1),  # 5 % is not more than 5 %
        (1, 6, 100, 2),
        (1, 100, 100, 32),  # 100 %, 50, 25, 12.5, 6.25, 3.1
        (10, 1, 1, 20),
        (10, 100, 10, 320),
        (3, 4, 10, 12),
    ]
)
def test_where_the_interval_lands(interval, copy_ms, step_ms, lands_at):
    spacing = CopyInterval(interval)
    shares = run(spacing, NEW_PLACES + 20 * SAMPLES, copy=copy_ms * MS, step=step_ms * MS)
    assert spacing.interval == lands_at
    assert interval << len(shares) == lands_at


def test_the_agreement_counts_as_well():
    spacing = CopyInterval(1)
    run(spacing, NEW_PLACES + SAMPLES, copy=1 * MS, agreeing=5 * MS, step=100 * MS)
    assert spacing.interval == 2


def test_copies_into_new_memory_do_not_count():
    spacing = CopyInterval(1)
    run(spacing, NEW_PLACES, copy=1000 * MS, step=100 * MS)
    run(spacing, 3 * SAMPLES, copy=1 * MS, step=100 * MS)
    assert spacing.interval == 1


def test_one_that_met_a_busy_moment_does_not_space_out_the_others():
    spacing = CopyInterval(1)
    for number in range(NEW_PLACES + 4 * SAMPLES):
        copy = 5000 * MS if number % SAMPLES == 3 else 1 * MS
        assert spacing.note(copy=copy, agreeing=0, training=100 * MS) is None
    assert spacing.interval == 1


def test_boundaries_without_a_copy_spread_its_cost():
    """A slow peer takes four steps for each copy, which hold up the training for 16 % of one of them."""
    spacing = CopyInterval(1)
    for number in range(20 * SAMPLES):
        spacing.note(copy=16 * MS if number % 4 == 0 else 0, agreeing=0, training=100 * MS)
    assert spacing.interval == 1


def test_nothing_is_known_without_copies():
    assert Costs().share == 0.0
    spacing = CopyInterval(1)
    run(spacing, 100, copy=0, agreeing=50 * MS, step=1 * MS)
    assert spacing.interval == 1


times = st.integers(min_value=1, max_value=10**12)


@given(interval=st.integers(1, 1000), copy=times, step=times)
def test_it_is_never_spaced_out_further_than_needed(interval, copy, step):
    spacing = CopyInterval(interval)
    run(spacing, NEW_PLACES + 60 * SAMPLES, copy=copy, step=step)
    assert copy <= MAX_SHARE * step * spacing.interval * (1 + 1e-9)
    if spacing.interval > interval:
        assert copy > MAX_SHARE * step * spacing.interval / 2 * (1 - 1e-9)


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**10)), max_size=200))
def test_all_ranks_come_to_the_same_from_any_numbers(rows):
    ranks = [CopyInterval(2), CopyInterval(2)]
    for copy, agreeing, training in rows:
        before = ranks[0].interval
        told = {rank.note(copy=copy, agreeing=agreeing, training=training) for rank in ranks}
        assert len(told) == 1
        assert ranks[0].interval == ranks[1].interval == before * (1 if told == {None} else 2)
        assert told == {None} or min(told) > MAX_SHARE
