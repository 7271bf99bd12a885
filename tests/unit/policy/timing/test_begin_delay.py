"""How much later a requeued job begins, from what was enough before."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.stop import LONGEST_S, delay_that_holds
from slurmft.storage.journal import Event
from slurmft.supervisor.act import past_requeues

BEGAN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@of_each(
    past__delay_s=[
        ([], 2),
        ([(2, 2.4)], 2),
        ([(2, 144.0)], 4),  # as it was seen: the disk was slow, and the begin time over
        ([(2, 122.0), (4, 4.3)], 4),
        ([(2, 122.0), (4, 131.0)], 8),
        ([(2, 122.0), (4, 131.0), (8, 8.5)], 8),
        ([(3, 125.0)], 4),  # Slurm was slow, so a second more had been asked for
        ([(4, 125.0)], 2),  # of an end of another kind
        ([(26, 150.0)], 2),
        ([(d, 125.0 + d) for d in (2, 4, 8, 16, 32)], LONGEST_S),
        ([(d, 125.0 + d) for d in (2, 4, 8, 16, 32, LONGEST_S)], 2),  # the nodes have to be switched on, each time
        ([(306, 430.0)], 2),
        ([(2, 60.0)], 2),  # the queue was long
        ([(2, 4000.0)], 2),
        ([(300, 302.0)], 2),
        ([(120, 122.0)], 2),
    ]
)
def test_a_delay_that_was_too_short_is_doubled_and_stays(past, delay_s):
    assert delay_that_holds(2, past) == delay_s


@given(st.integers(0, 600), st.lists(st.tuples(st.integers(0, 600), st.floats(0, 1e6))))
def test_a_delay_is_never_shortened_and_grows_to_a_minute_at_most(asked_s, past):
    assert asked_s <= delay_that_holds(asked_s, past) <= max(asked_s, LONGEST_S)


def event(second: float, name: str, attempt: str, **details: object) -> Event:
    return Event(at=BEGAN + timedelta(seconds=second), event=name, attempt=attempt, details=details)


def test_requeues_of_this_job_are_paired_with_the_starts_that_followed():
    history = [
        event(0, "attempt started", "7.0.0"),
        event(10, "requeued", "7.0.0", delay_s=2),
        event(132, "attempt started", "7.1.0"),
        event(140, "attempt started", "7.1.1"),  # in place, without a requeue
        event(150, "placed", "7.1.1", delay_s=6, excluded="n1"),
        event(156, "attempt started", "7.2.0"),
        event(160, "requeued", "7.2.0", delay_s="Slurm's own, about 121"),
        event(282, "attempt started", "7.3.0"),
        event(290, "requeued", "", who="somebody", delay_s=2),
        event(300, "attempt started", "8.0.0"),
        event(310, "requeued", "7.3.0", delay_s=2),
        event(440, "attempt started", "7.5.0"),  # the start in between left no word
        event(450, "requeued", "of another version", delay_s=2),
    ]
    assert past_requeues(history, "7") == [(2, 122.0), (6, 6.0)]
    assert past_requeues(history, "9") == []
