"""The classes of a server of one's own: called as the documents call them, and by their meaning there."""

import threading
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

import slurmft
import slurmft.compat
from slurmft.compat import (
    AutoRestartManager,
    GracefulDegradation,
    HighAvailabilityCluster,
    RequestCheckpointer,
    RequestRedistributor,
    RetryManager,
    WorkerHealthMonitor,
)
from slurmft.errors import UsageError

WORKERS = ["w0", "w1", "w2"]


@dataclass
class Worker:
    worker_id: str


@dataclass
class Request:
    request_id: str


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Restarting(AutoRestartManager):
    def __init__(self, *args, fails: bool = False) -> None:
        super().__init__(*args)
        self.restarted, self.fails = [], fails

    def restart_worker(self, worker_id):
        self.restarted.append(worker_id)
        if self.fails:
            raise OSError("no such machine")


class Redistributing(RequestRedistributor):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.begun = []

    def restart_request(self, req_id, worker_id):
        self.begun.append((req_id, worker_id))


@of_each(name=["WorkerHealthMonitor", "GracefulDegradation", "RequestRedistributor", "AutoRestartManager",
     "RequestCheckpointer", "RetryManager", "HighAvailabilityCluster"])  # fmt: skip
def test_each_name_has_one_meaning(name):
    assert getattr(slurmft, name) is getattr(slurmft.compat, name)
    assert getattr(slurmft, name).__module__ == "slurmft.compat.serving_names"


# WorkerHealthMonitor


@pytest.mark.parametrize("workers", [WORKERS, iter(WORKERS), tuple(map(Worker, WORKERS))])
def test_a_worker_is_dead_after_three_heartbeats_without_one(workers):
    clock = Clock()
    restarts, requests = Restarting(1), Redistributing(WORKERS)
    requests.request_assignments = {"a": "w1", "b": "w1", "c": "w0"}
    monitor = WorkerHealthMonitor(
        workers, heartbeat_interval=10, redistributor=requests, restarts=restarts, clock=clock
    )
    clock.now_s += 29.9
    assert monitor.check_workers() == []
    monitor.record_heartbeat("w0")
    monitor.record_heartbeat("w2")
    clock.now_s += 0.2
    assert monitor.check_workers() == ["w1"] and restarts.restarted == ["w1"]
    assert requests.begun == [("a", "w2"), ("b", "w0")] or requests.begun == [("a", "w2"), ("b", "w2")]
    assert monitor.check_workers() == [], "a restarted one has three heartbeats again"
    clock.now_s += 30.1
    monitor.record_heartbeat("w0")
    assert set(monitor.check_workers()) == {"w1", "w2"} and monitor.dead == {"w1"}, "w1 has had its one restart"
    assert monitor.check_workers() == [], "each death is handled once"
    monitor.record_heartbeat("w1")
    assert monitor.dead == set()


def test_all_workers_may_die_at_once():
    clock, requests = Clock(), Redistributing(WORKERS)
    requests.request_assignments = {"a": "w0", "b": "w1"}
    monitor = WorkerHealthMonitor(WORKERS, redistributor=requests, restarts=Restarting(0), clock=clock)
    clock.now_s += 31
    assert monitor.check_workers() == WORKERS and requests.begun == []
    assert requests.request_assignments == {"a": None, "b": None}
    monitor.record_heartbeat("w2")
    assert requests.begun == [("a", "w2"), ("b", "w2")], "requests without a worker are the first one's that is back"


def test_monitoring_goes_on_by_itself_and_survives_an_error():
    seen, looks = threading.Event(), Counter[str]()

    class Monitor(WorkerHealthMonitor):
        def handle_worker_failure(self, worker_id):
            looks[worker_id] += 1
            if looks["w0"] < 2:
                raise OSError("once")
            seen.set()

    monitor = Monitor(["w0"], heartbeat_interval=0.01)
    monitor.start_monitoring()
    monitor.start_monitoring()
    try:
        assert seen.wait(30)
    finally:
        monitor.stop_monitoring()


# GracefulDegradation


def test_below_half_of_the_workers_less_is_done():
    degraded = GracefulDegradation(num_workers=4)
    for worker in ("w0", "w1", "w1"):
        degraded.handle_worker_failure(worker)
    assert not degraded.degraded_mode and degraded.accepts("low") and degraded.failed_workers == {"w0", "w1"}
    assert (degraded.batch_size, degraded.response_timeout) == (32, 60.0)
    degraded.handle_worker_failure("w2")
    degraded.enter_degraded_mode()
    assert degraded.degraded_mode and (degraded.batch_size, degraded.response_timeout) == (16, 120.0)
    assert not degraded.accepts("low") and not degraded.accepts("LOW") and degraded.accepts("high")
    degraded.handle_worker_recovery("w0")
    assert degraded.degraded_mode, "half is where it began: it must be a little more"
    degraded.handle_worker_recovery("w1")
    assert not degraded.degraded_mode and (degraded.batch_size, degraded.response_timeout) == (32, 60.0)
    assert degraded.accepts("low")


def test_measures_may_be_overridden():
    class Mine(GracefulDegradation):
        def reduce_batch_size(self):
            self.batch_size = 3

    mine = Mine(1, batch_size=8)
    mine.handle_worker_failure("w")
    assert (mine.batch_size, mine.response_timeout) == (3, 120.0)


# RequestRedistributor


@given(
    assigned=st.dictionaries(st.integers(0, 50), st.sampled_from(WORKERS)),
    failed=st.lists(st.sampled_from(WORKERS), max_size=4),
)
def test_no_request_stays_with_a_failed_worker_and_none_of_a_healthy_one_moves(assigned, failed):
    requests = Redistributing([Worker(each) for each in WORKERS])
    requests.request_assignments = dict(assigned)
    for worker in failed:
        before = dict(requests.request_assignments)
        moved = requests.redistribute_on_failure(worker)
        for each, now in requests.request_assignments.items():
            assert now not in requests.failed_workers and (now is not None or set(failed) == set(WORKERS))
            assert now == before[each] or each in moved
    if len(set(failed)) == 1 and assigned:
        load = Counter({each: 0 for each in WORKERS if each not in failed})
        was = Counter(each for each in assigned.values() if each not in failed)
        load.update(requests.request_assignments.values())
        assert max(load.values()) <= max(min(load.values()) + 1, max(was.values(), default=0))


# AutoRestartManager


def test_a_worker_is_restarted_so_often_and_stays_down():
    manager = AutoRestartManager(max_restarts=3)
    assert [manager.attempt_restart("w0") for _ in range(5)] == [True, True, True, False, False]
    assert manager.restart_counts["w0"] == 3 and manager.attempt_restart("w1")
    failing = Restarting(2, fails=True)
    assert [failing.attempt_restart("w") for _ in range(3)] == [False] * 3 and failing.restarted == ["w", "w"]
    assert not AutoRestartManager(0).attempt_restart("w")


# RequestCheckpointer


def test_a_request_goes_on_from_its_copy_within_an_hour():
    clock = Clock()
    checkpointer = RequestCheckpointer(clock=clock)
    state = {"tokens": [1, 2]}
    checkpointer.checkpoint_request("r", state)
    state["tokens"].append(3)
    assert checkpointer.recover_request("r") == {"tokens": [1, 2]} and checkpointer.recover_request("x") is None
    checkpointer.recover_request("r")["tokens"].clear()
    clock.now_s += 3599
    assert checkpointer.recover_request("r") == {"tokens": [1, 2]}
    clock.now_s += 2
    assert checkpointer.recover_request("r") is None and checkpointer.request_states == {}, "it has expired"
    checkpointer.checkpoint_request("r", state)
    checkpointer.cleanup_completed("r")
    checkpointer.cleanup_completed("r")
    assert checkpointer.recover_request("r") is None


# RetryManager


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        self.status_code = status


class ReadTimeout(Exception):
    """As of another package."""


@of_each(error__passes=[
        (TimeoutError("slow"), True), (ConnectionError("refused"), True), (ConnectionResetError(), True),
        (RuntimeError("request timed out"), True), (HttpError(429), True), (HttpError(503), True),
        (HttpError(408), True),
        (ReadTimeout("x timed out"), True), (HttpError(400), False), (HttpError(422), False),
        (ValueError("bad: timeout must be positive"), False), (TypeError("x"), False), (KeyError("x"), False),
        (RuntimeError("bad request"), False),
    ])  # fmt: skip
def test_what_may_pass_is_tried_again(error, passes):
    assert RetryManager().is_retryable_error(error) is passes
    assert RetryManager().should_retry("r", error) is passes


def test_delays_double_up_to_the_longest_with_a_tenth_of_jitter():
    manager, slept = RetryManager(max_retries=7, base_delay=1.0, max_delay=30.0), []
    manager._sleep = slept.append
    for _ in range(7):
        request = Request("r")
        assert manager.retry_request(request, TimeoutError()) is request
    for waited, base in zip(slept, [1, 2, 4, 8, 16, 30, 30], strict=True):
        assert base <= waited <= 1.1 * base
    assert len({round(manager.get_retry_delay("other"), 6) for _ in range(20)}) > 1, "not all at once"
    assert manager.retry_counts == {"r": 7}
    with pytest.raises(TimeoutError):
        manager.retry_request(Request("r"), TimeoutError())
    with pytest.raises(ValueError, match="bad"):
        manager.retry_request({"id": "new"}, ValueError("bad"))
    assert len(slept) == 7


# HighAvailabilityCluster


class Cluster(HighAvailabilityCluster):
    down = frozenset()

    def create_replica(self, i):
        def answer(request):
            if i in self.down:
                raise ConnectionError(f"replica {i} is down")
            return i, request

        return answer


def test_all_replicas_work_and_one_answers_for_another():
    cluster = Cluster(num_replicas=3)
    assert [cluster.submit_request("q")[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    cluster.down = {0, 1}
    assert [cluster.submit_request("q") for _ in range(3)] == [(2, "q")] * 3
    cluster.down = {0, 1, 2}
    with pytest.raises(RuntimeError, match="All replicas failed") as failed:
        cluster.submit_request("q")
    assert isinstance(failed.value.__cause__, ConnectionError) and len(cluster.replicas) == 3


def test_a_cluster_without_replicas_says_what_to_write(caplog):
    cluster = HighAvailabilityCluster(2)
    assert "override create_replica" in caplog.text
    with pytest.raises(RuntimeError, match="All replicas failed"):
        cluster.submit_request("q")


@of_each(make=[
        lambda: GracefulDegradation(0), lambda: GracefulDegradation(0.5), lambda: GracefulDegradation(4, batch_size=0),
        lambda: HighAvailabilityCluster(0), lambda: HighAvailabilityCluster("2"), lambda: HighAvailabilityCluster(True),
        lambda: AutoRestartManager(-1), lambda: AutoRestartManager(1.5), lambda: RetryManager(-1),
        lambda: RetryManager(base_delay=float("nan")), lambda: RetryManager(max_delay="x"),
        lambda: WorkerHealthMonitor(WORKERS, 0), lambda: RequestCheckpointer(-1),
    ])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(make):
    with pytest.raises(UsageError, match="it is a number from"):
        make()
