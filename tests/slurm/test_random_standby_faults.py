"""The storm of ``test_random_faults`` with a standby supervisor, and more faults of those that it is for.

Besides the weights it is checked that one supervisor acts at a time: nothing is decided about a run by a process that
another one has replaced, and nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from slurm.cluster_faults import BACK, CLUSTER_KINDS, cut_off, kill_one, power_off
from slurm.conftest import Run
from slurm.small_disk import SmallDisk
from slurm.storm import Kind, seeds
from slurm.test_random_faults import TrainingStorm, calm, disk, weather
from slurmft.storage.journal import Event, EventName

__all__ = ["calm", "disk"]

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(1800)]

ACTS = frozenset({
    EventName.VERDICT, EventName.DECISION, EventName.REQUEUEING, EventName.REQUEUED, EventName.RESUBMITTING,
    EventName.RESUBMITTED, EventName.WORKERS_STARTED, EventName.STANDBY_ENDS_JOB,
})  # fmt: skip
"""What a supervisor writes that acts for the run."""


def acting_twice(events: Sequence[Event]) -> list[str]:
    """What two supervisors have done at once, in words; all hosts of a lab have one clock."""
    found, newest = [], ""
    taken: dict[str, Event] = {}
    decided: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event.at):
        if event.event == EventName.ATTEMPT_STARTED:
            if newest and _order(event.attempt) <= _order(newest):
                found.append(f"{event.attempt} began after {newest}")
            newest = event.attempt
        elif event.event == EventName.STANDBY_TOOK_OVER:
            if event.attempt in taken:
                found.append(f"{event.attempt} was taken over twice")
            taken[event.attempt] = event
        elif event.event in ACTS and event.attempt and newest:
            if _order(event.attempt) < _order(newest):
                found.append(f"{event.event} of {event.attempt} after the start of {newest}: {event.details}")
            decided[event.attempt] += event.event == EventName.DECISION and event.attempt in taken
    return [*found, *(f"{count} decisions on {attempt} after its takeover"
                      for attempt, count in decided.items() if count > 1)]  # fmt: skip


def _order(attempt: str) -> tuple[int, ...]:
    return tuple(int(part) for part in attempt.split("."))


class StandbyStorm(TrainingStorm):
    name = "standby"

    def more_failures(self) -> list[str]:
        return [f"two supervisors: {found}" for found in acting_twice(self.run.events())]

    def standby_host(self) -> str:
        ready = self.last("standby ready")
        return "" if ready is None else str(ready.details["node"])

    def power_off_standby(self) -> str | None:
        return power_off(self, self.standby_host())

    def cut_between(self) -> str | None:
        """The supervisor and its standby do not hear each other; all others hear both."""
        one, other = self.batch_host(), self.standby_host()
        if not one or not other or one == other:
            return None
        for_s = self.chance.uniform(2.0, 15.0)
        routes = [(one, self.lab.settings.address(other)), (other, self.lab.settings.address(one))]

        def undo() -> bool:
            for node, address in routes:
                self.lab.run_on_as_admin(node, ["ip", "route", "del", "blackhole", f"{address}/32"], check=False)
            return True

        for node, address in routes:
            self.lab.run_on_as_admin(node, ["ip", "route", "replace", "blackhole", f"{address}/32"])
        self.hold("cut between supervisor and standby", undo, for_s=for_s)
        return f"{one} and {other} for {for_s:.1f} s"

    def freeze_supervisor(self) -> str | None:
        """It wakes up after its standby may have taken over."""
        owner = self.run.folder.owner()
        if owner is None:
            return None
        for_s = self.chance.uniform(1.0, 12.0)
        node, pid = owner.host, str(owner.pid)

        def undo() -> bool:
            self.lab.run_on_as_admin(node, ["kill", "-CONT", pid], check=False)
            return True

        if self.lab.run_on_as_admin(node, ["kill", "-STOP", pid], check=False).returncode != 0:
            return None
        self.hold("frozen supervisor", undo, for_s=for_s)
        return f"on {node} for {for_s:.1f} s"

    def kill_standby(self) -> str | None:
        host = self.standby_host()
        return kill_one(self, host, f"[s]lurmft standby {self.run.path}", oldest=True) if host else None

    kinds: ClassVar = {
        **{name: Kind(max(1, kind.weight // 4), kind.strike, kind.takes_s, kind.ends, kind.clear, kind.undone)
           for name, kind in TrainingStorm.kinds.items() if name not in CLUSTER_KINDS},
        **CLUSTER_KINDS,
        "power of the batch host": Kind(
            10, lambda storm: power_off(storm, storm.batch_host()), 30, clear=True, undone=BACK
        ),
        "power of the batch host, upon another fault": Kind(
            6, lambda storm: power_off(storm, storm.batch_host()), 45, undone=BACK
        ),
        "power of the standby": Kind(5, power_off_standby, 25, clear=True, undone=BACK),
        "partition of the batch host": Kind(
            20, lambda storm: cut_off(storm, storm.batch_host()), 30, clear=True, undone="healed after 0.5 to 12 s"
        ),
        "cut between supervisor and standby": Kind(20, cut_between, 30, clear=True, undone="healed after 2 to 15 s"),
        "supervisor frozen": Kind(20, freeze_supervisor, 25, clear=True, undone="goes on after 1 to 12 s"),
        "standby": Kind(4, kill_standby),
    }  # fmt: skip


@pytest.mark.parametrize("seed", seeds())
def test_random_faults_with_a_standby(new_run: Callable[..., Run], calm: str, disk: SmallDisk, seed: int) -> None:
    weather(StandbyStorm, new_run, calm, disk, seed, {"fault_tolerance.standby_supervisor": True})
