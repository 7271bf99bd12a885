"""What a session notes of its own speed: how long no stop was possible, and how long saves take."""

import time

import pytest

from slurmft.ipc.pages import Page, Slot
from slurmft.worker.session import Session, start_session

LONG_S, SHORT_S = 0.2, 0.06
INTERVAL_STEPS = 2

pytestmark = pytest.mark.usefixtures("own_environment")


def seconds(page: Page, slot: Slot) -> float:
    return page[slot] / 1e9


def train(session: Session, step_s: dict[int, float], *, save_s: float = 0.0, start: int = 0) -> None:
    for step in session.steps(start=start, until=start + 4, save=lambda _: time.sleep(save_s)):
        time.sleep(step_s.get(step, 0.0))


@pytest.mark.parametrize("start", [0, 7])
def test_the_first_step_of_a_process_is_kept_apart(page, start):
    with start_session() as session:
        train(session, {start: LONG_S, start + 2: SHORT_S}, start=start)
    assert seconds(page, Slot.FIRST_STEP_NS) >= LONG_S
    assert SHORT_S <= seconds(page, Slot.LONGEST_STEP_NS) < LONG_S


def test_a_save_is_no_part_of_a_step(page):
    with start_session() as session:
        train(session, {}, save_s=LONG_S)
    assert page[Slot.SAVES] == 2, "one in between, one at the end"
    assert LONG_S <= seconds(page, Slot.SAVE_NS) < 2 * LONG_S
    assert seconds(page, Slot.LONGEST_STEP_NS) < SHORT_S
    assert page[Slot.SAVE_BEGAN_NS] == 0
    assert 0 <= time.monotonic_ns() - page[Slot.SAVED_AT_NS] < 10e9


def test_an_evaluation_can_be_stopped_between_its_batches(page):
    with start_session() as session:
        for step in session.steps(start=0, until=2, save=lambda _: None):
            if step == 1:
                for _ in session.evaluating(range(4)):
                    time.sleep(SHORT_S)
    assert SHORT_S <= seconds(page, Slot.LONGEST_STEP_NS) < 3 * SHORT_S, "four batches in a row would be longer"


def test_a_save_under_way_tells_since_when(page):
    seen: list[int] = []
    with start_session() as session:
        for _ in session.steps(start=0, until=1, save=lambda _: seen.append(page[Slot.SAVE_BEGAN_NS])):
            pass
    assert 0 < seen[0] <= time.monotonic_ns()


def test_a_save_that_fails_is_not_one_that_was_cut_off(page):
    def fail(_: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), start_session() as session:
        for _ in session.steps(start=0, until=1, save=fail):
            pass
    assert (page[Slot.SAVES], page[Slot.SAVE_BEGAN_NS]) == (0, 0)
