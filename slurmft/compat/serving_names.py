"""The classes that a server of one's own keeps its workers and requests alive with, over the policies of this package.

They live in one process and know what they are told. ``slurmft serve`` and ``slurmft infer`` do all of this by
themselves, over nodes. Workers are ids, or objects with an ``id`` or a ``worker_id``.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmft.errors import UsageError
from slurmft.health import checker
from slurmft.policy import serving
from slurmft.policy.inference import TryOutcome, outcome_of_status
from slurmft.policy.symptoms import FailureCategory
from slurmft.worker.failures import categorize_failure

MISSED_BEATS = 3
JITTER = 0.1
"""Of a delay, at most, on top of it."""

_PASSING = frozenset({FailureCategory.TIMEOUT, FailureCategory.COMMUNICATION})
_CALLS = ("process", "process_request", "submit_request", "generate", "infer", "__call__")
"""What a replica may be asked by."""

log = logging.getLogger(__name__)


def _id(thing: Any) -> Any:
    if isinstance(thing, dict):
        return thing.get("id", thing.get("request_id", id(thing)))
    return next((getattr(thing, name) for name in ("id", "worker_id", "request_id") if hasattr(thing, name)), thing)


def _number(name: str, value: Any, least: float = 0, kind: Any = (int, float)) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
        raise UsageError(f"{name} is {value!r:.60}; it is a number from {least:g} on")
    return value


class RequestRedistributor:
    """Whose request is whose: those of a failed worker go to the healthy ones that have the fewest."""

    def __init__(self, workers: Iterable[Any]) -> None:
        self.workers, self.failed_workers = list(workers), set[Any]()
        self.request_assignments: dict[Any, Any] = {}
        """Request id -> worker id; for the server to fill, and to take finished requests out of."""

    def redistribute_on_failure(self, failed_worker_id: Any) -> dict[Any, Any]:
        """Give its requests to others and restart each there; returns them with their new workers.

        Where no worker is healthy they are assigned to None, and to the first one that recovers.
        """
        self.failed_workers.add(failed_worker_id)
        load = dict.fromkeys((each for each in map(_id, self.workers) if each not in self.failed_workers), 0)
        moved: dict[Any, Any] = {}
        for request, worker in list(self.request_assignments.items()):
            if worker in load:
                load[worker] += 1
            elif worker is None or worker in self.failed_workers:
                moved[request] = self.request_assignments[request] = None
        for request in moved if load else ():
            moved[request] = self.request_assignments[request] = worker = min(load, key=load.__getitem__)
            load[worker] += 1
            self.restart_request(request, worker)
        return moved

    def restart_request(self, req_id: Any, worker_id: Any) -> None:
        """Begin the request on this worker: to be overridden, as only the server can."""
        log.warning("request %s goes to worker %s", req_id, worker_id)

    def worker_recovered(self, worker_id: Any) -> None:
        """It takes requests again, at once those that no worker has."""
        if worker_id in self.failed_workers:
            self.failed_workers.discard(worker_id)
            self.redistribute_on_failure(None)


class AutoRestartManager:
    """Starts a worker again up to ``max_restarts`` times."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.max_restarts, self.restart_counts = _number("max_restarts", max_restarts, 0, int), Counter[Any]()

    def attempt_restart(self, worker_id: Any) -> bool:
        """Whether it was restarted: not when it has had its restarts, or when this one raised an error."""
        if self.restart_counts[worker_id] >= self.max_restarts:
            log.error("worker %s stays down after %d restarts", worker_id, self.restart_counts[worker_id])
            return False
        self.restart_counts[worker_id] += 1
        try:
            self.restart_worker(worker_id)
        except Exception:
            log.exception("worker %s could not be restarted", worker_id)
            return False
        return True

    def restart_worker(self, worker_id: Any) -> None:
        """Start it: to be overridden, as only the server can; an error counts as a restart that failed."""
        log.warning("worker %s may be restarted", worker_id)


class WorkerHealthMonitor:
    """Workers report by ``record_heartbeat``; one is dead after three intervals of ``heartbeat_interval`` s without.

    Its requests are then redistributed, and it is restarted, by the ``redistributor`` and the ``restarts`` given.
    """

    def __init__(
        self,
        workers: Iterable[Any],
        heartbeat_interval: float = 10,
        *,
        redistributor: RequestRedistributor | None = None,
        restarts: AutoRestartManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heartbeat_interval = _number("heartbeat_interval", heartbeat_interval, 1e-3)
        self._redistributor, self._restarts, self._clock = redistributor, restarts, clock
        self.last_heartbeat, self.dead = dict.fromkeys(map(_id, workers), clock()), set[Any]()
        self._stop: threading.Event | None = None

    def start_monitoring(self) -> None:
        """Check all workers once each interval, in a thread, until ``stop_monitoring`` or the end of the process."""
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._watch, args=[self._stop], name="worker health", daemon=True).start()

    def stop_monitoring(self) -> None:
        """Check no more."""
        if self._stop is not None:
            self._stop.set()
        self._stop = None

    def check_workers(self) -> list[Any]:
        """Handle the workers that have died since the last look; returns them."""
        limit_s = self._clock() - MISSED_BEATS * self.heartbeat_interval
        silent = [each for each, at_s in list(self.last_heartbeat.items()) if at_s < limit_s and each not in self.dead]
        if self._redistributor is not None:  # so that none gets requests of another
            self._redistributor.failed_workers.update(silent)
        for worker_id in silent:
            self.handle_worker_failure(worker_id)
        return silent

    def record_heartbeat(self, worker_id: Any) -> None:
        """It lives."""
        self.last_heartbeat[worker_id] = self._clock()
        self.dead.discard(worker_id)
        if self._redistributor is not None:
            self._redistributor.worker_recovered(worker_id)

    def handle_worker_failure(self, worker_id: Any) -> None:
        """It is dead: redistribute its requests and restart it; a restarted one has three intervals again."""
        log.error("worker %s has missed %d heartbeats", worker_id, MISSED_BEATS)
        self.dead.add(worker_id)
        if self._redistributor is not None:
            self._redistributor.redistribute_on_failure(worker_id)
        if self._restarts is not None and self._restarts.attempt_restart(worker_id):
            self.record_heartbeat(worker_id)

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self.heartbeat_interval):
            try:
                self.check_workers()
            except Exception:  # one worker's trouble must not end the watch over the others
                log.exception("a dead worker could not be handled")


class GracefulDegradation:
    """With less than half of the workers: smaller batches, longer time limits, and no requests of low priority.

    ``batch_size``, ``response_timeout`` and ``accepts`` are what holds at the moment.
    """

    def __init__(self, num_workers: int, *, batch_size: int = 32, response_timeout: float = 60.0) -> None:
        self.num_workers = _number("num_workers", num_workers, 1, int)
        self._policy = serving.GracefulDegradation(concurrency=_number("batch_size", batch_size, 1, int))
        self._degraded = replace(self._policy, degraded=True)
        self._normal_timeout = _number("response_timeout", response_timeout)
        self._look(set())

    def handle_worker_failure(self, worker_id: Any) -> None:
        """One worker less."""
        self._look({*self.failed_workers, worker_id})

    def handle_worker_recovery(self, worker_id: Any) -> None:
        """It is back; degradation ends a little above the half, so that one that comes and goes changes nothing."""
        self._look(self.failed_workers - {worker_id})

    def enter_degraded_mode(self) -> None:
        """Take all three measures; once, however often it is called."""
        self.degraded_mode, self._policy = True, self._degraded
        self.reduce_batch_size()
        self.increase_response_timeout()
        self.reject_low_priority_requests()

    def reduce_batch_size(self) -> None:
        """Half of the normal one, at least 1."""
        self.batch_size = self._degraded.slots

    def increase_response_timeout(self) -> None:
        """Twice the normal one."""
        self.response_timeout = self._normal_timeout * self._degraded.timeout_factor

    def reject_low_priority_requests(self) -> None:
        """``accepts("low")`` is False from now on."""
        self.rejects_low_priority = True

    def accepts(self, priority: str = "normal") -> bool:
        """Whether a request of this priority is taken."""
        return not (self.rejects_low_priority and str(priority).lower() == "low")

    def _look(self, failed: set[Any]) -> None:
        self.failed_workers = failed
        self._policy = self._policy.saw(self.num_workers - len(failed), self.num_workers)
        if self._policy.degraded:
            self.enter_degraded_mode()
        else:
            self.degraded_mode = self.rejects_low_priority = False
            self.batch_size, self.response_timeout = self._policy.concurrency, self._normal_timeout


class RequestCheckpointer:
    """Copies of the states of requests in flight, in memory, for ``expire_after_s``: one hour."""

    def __init__(self, expire_after_s: float = 3600.0, *, clock: Callable[[], float] = time.time) -> None:
        self._expire_after_s, self._clock = _number("expire_after_s", expire_after_s), clock
        self.request_states: dict[Any, dict[str, Any]] = {}

    def checkpoint_request(self, request_id: Any, state: Any) -> None:
        """Keep a copy of its state, in place of an earlier one."""
        self._forget_expired()
        self.request_states[request_id] = {"state": copy.deepcopy(state), "timestamp": self._clock()}

    def recover_request(self, request_id: Any) -> Any:
        """A copy of the newest state; None where there is none, or it has expired."""
        self._forget_expired()
        kept = self.request_states.get(request_id)
        return None if kept is None else copy.deepcopy(kept["state"])

    def cleanup_completed(self, request_id: Any) -> None:
        """It has its answer."""
        self.request_states.pop(request_id, None)

    def _forget_expired(self) -> None:
        until = self._clock() - self._expire_after_s
        for request_id in [each for each, kept in self.request_states.items() if kept["timestamp"] < until]:
            del self.request_states[request_id]


class RetryManager:
    """Whether and when a failed request is tried again: ``base_delay`` doubled each time, at most ``max_delay`` s."""

    def __init__(
        self,
        max_retries: int = 3,
        base_delay: float = 1.0,
        max_delay: float = 30.0,
        *,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        self.max_retries = _number("max_retries", max_retries, 0, int)
        self.base_delay, self.max_delay = _number("base_delay", base_delay), _number("max_delay", max_delay)
        self._sleep, self.retry_counts = sleep, Counter[Any]()

    def should_retry(self, request_id: Any, error: BaseException) -> bool:
        """Whether the error may pass and the request has retries left."""
        return self.is_retryable_error(error) and self.retry_counts[request_id] < self.max_retries

    def is_retryable_error(self, error: BaseException) -> bool:
        """Timeouts, lost connections, answers such as 429 and 503; not what the request itself is to blame for."""
        each = (error, getattr(error, "response", None))
        codes = [getattr(one, name, None) for one in each for name in ("status", "status_code", "code")]
        if (status := next((code for code in codes if isinstance(code, int)), None)) is not None:
            return outcome_of_status(status) is not TryOutcome.ANSWER
        return not isinstance(error, ValueError | TypeError | LookupError) and categorize_failure(error) in _PASSING

    def get_retry_delay(self, request_id: Any) -> float:
        """Seconds until its next try, with up to a tenth on top, so that not all come back at once."""
        delay_s = min(self.base_delay * 2.0 ** min(self.retry_counts[request_id], 60), self.max_delay)
        return float(delay_s * (1.0 + JITTER * random.random()))  # noqa: S311 - spreads load, keeps no secret

    def retry_request(self, request: Any, error: BaseException) -> Any:
        """Wait and count, and return the request, which is to be sent again.

        Raises:
            BaseException: ``error`` itself, when it is not retried.
        """
        if not self.should_retry(_id(request), error):
            raise error
        self._sleep(self.get_retry_delay(_id(request)))
        self.retry_counts[_id(request)] += 1
        return request


class HighAvailabilityCluster:
    """``num_replicas`` that all work: requests take turns, and go to the next replica where one fails.

    ``create_replica`` is overridden: it makes functions of a request, or objects with ``process`` or ``generate``.
    """

    def __init__(self, num_replicas: int = 2) -> None:
        self._turn, places = -1, range(_number("num_replicas", num_replicas, 1, int))
        self.replicas = [self.create_replica(i) for i in places]

    def create_replica(self, i: int) -> Any:
        """The replica number ``i``; to be overridden, as only the server can make one."""
        log.warning("there is nothing that replica %d could answer with: override create_replica", i)

    def submit_request(self, request: Any) -> Any:
        """The answer of the first replica that gives one.

        Raises:
            RuntimeError: all replicas failed; the last one's error is its cause.
        """
        self._turn, last = (self._turn + 1) % len(self.replicas), None
        for replica in (*self.replicas[self._turn :], *self.replicas[: self._turn]):
            try:
                return next(getattr(replica, name) for name in _CALLS if hasattr(replica, name))(request)
            except Exception as error:  # noqa: BLE001 - of any kind; StopIteration: it cannot be asked
                log.warning("a replica has failed: %s: %s", type(error).__name__, error)
                last = error
        raise RuntimeError("All replicas failed") from last


# --- ``HealthChecker(worker_id)`` with one method for each kind of check, over the probes of ``slurmft health`` ---

PROBES: Mapping[str, tuple[str, ...]] = {
    "gpu": ("gpu-count", "gpu-ecc", "gpu-clocks", "gpu-pcie", "gpu-nvlink", "gpu-processes", "xid"),
    "memory": ("memory", "edac", "shared-memory"),
    "network": ("links", "infiniband", "names"),
    "disk": ("disk-space", "read-only", "disk-write", "filesystems"),
}
"""Kind of check -> the probes that answer for it."""

Check = Mapping[str, Any]


class HealthChecker:
    """Health of the node that this worker runs on, by kind of check. Needs no torch, no GPU and no process group.

    A check is True when a probe of its kind could look and none is CRITICAL, False when one is, and None when there is
    nothing of that kind, such as no GPU, or no probe could look. Subclasses may override the checks. The probes run in
    a process of their own, so a look takes about a second, and a GPU that hangs does not hang the caller.

    Args:
        worker_id: a number or name, which the answers repeat.
        config: the file of the probes' limits; by default as for ``slurmft health``.

    Raises:
        ConfigError: the configuration cannot be used.
        UsageError: ``worker_id`` is neither a number nor a name.
    """

    def __init__(self, worker_id: int | str, *, config: Path | None = None) -> None:
        if isinstance(worker_id, bool) or not isinstance(worker_id, int | str):
            raise UsageError(f"worker_id is {worker_id!r:.60}; it is a number or a name")
        self.worker_id = worker_id
        self._config = config
        self._all: Sequence[Check] | None = None
        """The results of all kinds, within ``check_health``."""

        checker.HealthChecker(config)

    def check_health(self) -> dict[str, Any]:
        """All checks: ``{"healthy": True, "checks": {"gpu": None, "memory": True, ...}, "timestamp": ...}``.

        healthy: no check is False, and one at least is True. ``problems`` names what is not as it should be, and
        ``worker_id`` whose answer it is. timestamp: seconds since 1970.
        """
        self._all = self._look([name for names in PROBES.values() for name in names])
        try:
            checks = {
                "gpu": self.check_gpu(), "memory": self.check_memory(), "network": self.check_network(),
                "disk": self.check_disk(),
            }  # fmt: skip
            problems = [f"{one['name']}: {one['detail']}" for one in self._all if one["status"] != "OK"]
        finally:
            self._all = None
        healthy = any(checks.values()) and all(check is None or bool(check) for check in checks.values())
        return {
            "healthy": healthy, "checks": checks, "timestamp": time.time(), "worker_id": self.worker_id,
            "problems": problems,
        }  # fmt: skip

    def check_gpu(self) -> bool | None:
        """Count, memory errors, clocks, PCIe, NVLink and Xid messages of the node's GPUs; None where there are none."""
        return self._check("gpu")

    def check_memory(self) -> bool | None:
        """Free memory of the node and of the job, memory errors, left-over shared memory."""
        return self._check("memory")

    def check_network(self) -> bool | None:
        """Links, InfiniBand ports and name resolution; ``detect_network_failure`` tries the process group."""
        return self._check("network")

    def check_disk(self) -> bool | None:
        """Space, writing, and filesystems that do not answer."""
        return self._check("disk")

    def _check(self, kind: str) -> bool | None:
        names = PROBES[kind]
        found = self._all if self._all is not None else self._look(names)
        seen = {one["status"] for one in found if one["name"] in names} - {"UNKNOWN"}
        return None if not seen else "CRITICAL" not in seen

    def _look(self, names: Sequence[str]) -> Sequence[Check]:
        checks: Sequence[Check] = checker.HealthChecker(self._config, only=names).check_health()["checks"]
        return checks
