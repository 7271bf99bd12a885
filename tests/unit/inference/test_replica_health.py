"""Hangs are found by progress, restarts are bounded, tries are spaced."""

import asyncio

import pytest

from slurmft.config.inference import InferenceConfig
from slurmft.inference.driver import Again, retried
from slurmft.inference.pool import Watched
from slurmft.policy.inference import Restarts

HANG_S, STARTUP_S = 10.0, 100.0


def monitor() -> Watched:
    return Watched(0.0)


def test_a_replica_that_is_not_ready_in_time_is_overdue():
    watch = monitor()
    assert watch.overdue(99.0, HANG_S, STARTUP_S) == ""
    assert "startup_timeout_s" in watch.overdue(101.0, HANG_S, STARTUP_S)


def overdue(watch: Watched, now_s: float) -> str:
    """As the pool looks: whether it hangs, and whether it is to prove that it works."""
    found = watch.overdue(now_s, HANG_S, STARTUP_S)
    watch.is_to_prove(now_s, HANG_S)
    return found


def looked(watch: Watched, first_s: float, last_s: float) -> tuple[float | None, str]:
    """When it was overdue, where it is looked at every second, and why."""
    now_s = first_s
    while now_s <= last_s:
        if found := overdue(watch, now_s):
            return now_s, found
        now_s += 1.0
    return None, ""


def test_only_work_without_progress_is_a_hang():
    watch = monitor()
    watch.ready(50.0)
    assert looked(watch, 50.0, 1000.0) == (None, ""), "idle for long"
    watch.holds(2, 1000.0)
    assert looked(watch, 1000.0, 1009.0) == (None, "")
    watch.progressed(1009.0)
    assert looked(watch, 1009.0, 1018.0) == (None, ""), "a token"
    watch.progressed(1018.0)
    watch.holds(-1, 1018.0)
    assert looked(watch, 1018.0, 1027.0) == (None, ""), "an answer"
    when_s, why = looked(watch, 1028.0, 1100.0)
    assert when_s is not None and when_s <= 1030.0 and "with 1 in flight" in why
    watch.progressed(1029.0)
    watch.holds(-1, 1029.0)
    assert looked(watch, 1029.0, 2000.0) == (None, ""), "nothing is left in flight"


def test_clients_that_give_up_hide_no_hang():
    """Each gives up after three seconds, and the next one comes two seconds later."""
    watch = monitor()
    watch.ready(0.0)
    for now_s in range(0, 200, 5):
        watch.holds(1, now_s)
        if any(overdue(watch, now_s + part) for part in range(3)):
            break
        watch.holds(-1, now_s + 3)
        if any(overdue(watch, now_s + 3 + part) for part in range(2)):
            break
    assert 10 <= now_s <= 20


def test_one_that_answers_the_smallest_request_does_not_hang():
    watch = monitor()
    watch.ready(0.0)
    watch.holds(1, 0.0)
    for now_s in range(100):
        assert watch.overdue(now_s, HANG_S, STARTUP_S) == ""
        if watch.is_to_prove(now_s, HANG_S):
            watch.progressed(now_s + 1.0)
    assert watch.worked


def test_it_is_asked_once_and_dies_also_when_its_clients_have_gone():
    watch = monitor()
    watch.ready(0.0)
    watch.holds(1, 0.0)
    assert [watch.is_to_prove(now_s, HANG_S) for now_s in (4.0, 6.0, 7.0)] == [False, True, False]
    watch.holds(-1, 7.0)
    assert not overdue(watch, 10.0) and overdue(watch, 11.5), "nothing is left in flight, and it is silent"
    assert not watch.worked


def test_a_large_request_has_longer_and_none_is_killed_unasked():
    watch = monitor()
    watch.ready(0.0)
    watch.patience = 3.0
    watch.holds(1, 0.0)
    assert looked(watch, 0.0, 14.0) == (None, "")
    watch.patience = 1.0  # it has gone, another one is there
    when_s, _ = looked(watch, 15.0, 60.0)
    assert when_s is not None and 20.0 <= when_s <= 22.0


def test_a_sleep_of_the_watcher_is_not_a_hang():
    watch = monitor()
    watch.ready(0.0)
    watch.holds(1, 0.0)
    watch.asleep(500.0)
    assert looked(watch, 500.0, 509.0) == (None, "")
    assert looked(watch, 510.0, 515.0)[0]


def test_a_replica_that_is_gone_is_not_watched():
    watch = monitor()
    watch.is_over = True
    watch.holds(1, 0.0)
    assert overdue(watch, 1e6) == "" and watch.in_flight == 0


def test_a_success_gives_a_replica_its_restarts_back():
    restarts = Restarts(2).failed(0.0).failed(0.0)
    assert restarts.failed(0.0).delay_s is None
    assert restarts.succeeded().failures == 0 and restarts.succeeded().failed(0.0).delay_s == 0.0


class Flaky:
    def __init__(self, failures: int, **facts: float) -> None:
        self.failures, self.calls, self.facts = failures, 0, facts

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise Again(f"failure {self.calls}", **self.facts)
        return "answer"


def settings(max_retries: int, base_delay_s: float = 1.0, max_delay_s: float = 30.0) -> InferenceConfig:
    return InferenceConfig.model_validate({
        "input": "in", "engine": {"url": "http://localhost:1"}, "max_retries": max_retries,
        "base_delay_s": base_delay_s, "max_delay_s": max_delay_s,
    })  # fmt: skip


def waits(config: InferenceConfig, work: Flaky, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("slurmft.inference.driver.asyncio.sleep", note)
    assert asyncio.run(retried(work, config)) == "answer"
    return slept


def test_tries_are_spaced_by_a_doubled_pause_with_jitter(monkeypatch):
    slept = waits(settings(5, base_delay_s=1.0, max_delay_s=6.0), Flaky(5), monkeypatch)
    for seconds, base in zip(slept, [1, 2, 4, 6, 6], strict=True):
        assert base <= seconds <= min(6.0, base + 1.0) + 1e-9


def test_the_other_side_may_ask_for_a_pause(monkeypatch):
    assert waits(settings(2), Flaky(2, after_s=7.0), monkeypatch) == [7.0, 7.0]
    assert waits(settings(1, max_delay_s=5.0), Flaky(1, after_s=70.0), monkeypatch) == [5.0]


@pytest.mark.parametrize(("retries", "calls"), [(0, 1), (2, 3)])
def test_the_last_failure_is_raised(retries, calls):
    work = Flaky(99)
    with pytest.raises(Again, match=f"failure {calls}"):
        asyncio.run(retried(work, settings(retries, 0.0, 0.01)))
    assert work.calls == calls


def test_other_errors_are_not_tried_again():
    async def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(retried(broken, settings(3)))
