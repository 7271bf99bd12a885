"""The categories of a run's time, and the sums that a report is made of. Plain values: no files, no clock."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MAX_KEPT = 2000
"""Attempts, ends and marks that are kept one by one; sums are of all."""

MAX_NODES = 10_000
MAX_CAUSES = 200


class Category(StrEnum):
    """Where a second went. Every second between a run's first event and its end is in exactly one."""

    TRAINING = "training"
    SAVES = "saves"
    REDONE = "redone"
    QUEUE = "queue"
    LAUNCH = "launch"
    IMPORT = "import"
    SETUP = "setup"
    LOAD = "load"
    DETECTION = "detection"
    EVIDENCE = "evidence"
    RESTART = "restart"
    SHUTDOWN = "shutdown"
    IDLE = "idle"
    UNKNOWN = "unknown"


MEANING = {
    Category.TRAINING: "new steps, or requests that are answered",
    Category.SAVES: "saves stop the training",
    Category.REDONE: "steps are done again that a failure has undone",
    Category.QUEUE: "the job waits in Slurm's queue",
    Category.LAUNCH: "agents are started on the nodes",
    Category.IMPORT: "workers start and import their modules",
    Category.SETUP: "model, process groups, everything up to the first step",
    Category.LOAD: "the checkpoint is read",
    Category.DETECTION: "from the last step until a failure is noticed",
    Category.EVIDENCE: "all ranks are looked at and ended, and the end is judged",
    Category.RESTART: "new workers are started in the same job",
    Category.SHUTDOWN: "the last save, and the end of the workers",
    Category.IDLE: "the run has stopped, or was suspended",
    Category.UNKNOWN: "the journal does not say",
}

PRODUCTIVE = frozenset({Category.TRAINING})
WITHOUT_NODES = frozenset({Category.QUEUE, Category.IDLE})
"""Categories in which the run holds no nodes."""

ALIASES = {
    Category.LAUNCH: "TPU_INITIALIZATION",
    Category.IMPORT: "PROGRAM_STARTUP",
    Category.SETUP: "TRAINING_PREP",
    Category.SAVES: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Category.LOAD: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Category.REDONE: "WASTED_PROGRESS_FROM_DISRUPTION",
    Category.DETECTION: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.EVIDENCE: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.RESTART: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.SHUTDOWN: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Category.QUEUE: "OTHER",
    Category.IDLE: "OTHER",
    Category.UNKNOWN: "OTHER",
}
"""Names of ``BadputType`` in Google's ml-goodput-measurement (goodput_utils.py) that mean the same, or the nearest."""


class Interval(NamedTuple):
    """A stretch of time; Unix times."""

    begin_s: float
    end_s: float
    category: Category


class Mark(NamedTuple):
    """Something at one moment of the timeline."""

    at_s: float
    kind: str
    """fault, save, save failed, stop or injected."""

    text: str


@dataclass(slots=True)
class End:
    """One end of an attempt, and the time that it cost until the run was as far as before."""

    attempt: str
    at_s: float
    cause: str
    reason: str = ""
    is_failure: bool = False
    """It counts for the mean time between failures."""

    nodes: tuple[str, ...] = ()
    """Nodes that are to blame."""

    ranks: int = 0
    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def cost_s(self) -> float:
        """Seconds of the wall clock."""
        return sum(self.seconds.values())

    @property
    def rank_s(self) -> float:
        """Rank-seconds: what its nodes could have done meanwhile."""
        return self.ranks * sum(s for category, s in self.seconds.items() if category not in WITHOUT_NODES)


@dataclass(slots=True)
class AttemptRow:
    """One attempt, for the table."""

    attempt: str
    began_s: float
    ended_s: float = 0.0
    ranks: int = 0
    first_step: int = 0
    last_step: int = 0
    cause: str = ""
    reason: str = ""


@dataclass(slots=True)
class Loss:
    """What the ends of one cause, or those that one node is blamed for, have cost."""

    ends: int = 0
    seconds: float = 0.0
    rank_s: float = 0.0


@dataclass(slots=True)
class Inference:
    """Facts of a run that answers requests."""

    is_endpoint: bool = False
    total: int = 0
    answered: int = 0
    errors: int = 0
    deaths: int = 0
    down_s: float = 0.0
    """Seconds in which a replica that had died was not ready again, summed over replicas."""

    given_up: int = 0


@dataclass(slots=True)
class Account:
    """Where a run's time went. Sums are of the whole period, lists hold the newest MAX_KEPT entries."""

    begin_s: float = 0.0
    end_s: float = 0.0
    seconds: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    rank_s: defaultdict[Category, float] = field(default_factory=lambda: defaultdict(float))
    by_cause: dict[str, Loss] = field(default_factory=dict)
    by_node: dict[str, Loss] = field(default_factory=dict)
    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=8 * MAX_KEPT))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    ends: deque[End] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    rows: deque[AttemptRow] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    attempts: int = 0
    failures: int = 0
    exposed_s: float = 0.0
    """Seconds in which workers lived, and could fail."""

    jobs: int = 0
    events: int = 0
    unreadable: int = 0
    step: int = 0
    saves: int = 0
    world_size: int = 0
    nodes: int = 0
    is_open: bool = False
    """The run goes on."""

    inference: Inference | None = None

    @property
    def wall_s(self) -> float:
        """From the first event to the end."""
        return max(0.0, self.end_s - self.begin_s)

    @property
    def productive_s(self) -> float:
        """Seconds of new work."""
        return sum(self.seconds[category] for category in PRODUCTIVE)

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: new work of all time, with the queue; None where no time has passed.

        The name and the definition are of "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
        2024. Time in which the run had been stopped by a person does not count.
        """
        return _share(self.productive_s, self.wall_s - self.seconds[Category.IDLE])

    @property
    def goodput(self) -> float | None:
        """New work of the time in which the run had nodes; None where it had none."""
        held_s = self.wall_s - sum(self.seconds[category] for category in WITHOUT_NODES)
        return _share(self.productive_s, held_s)


def _share(part_s: float, whole_s: float) -> float | None:
    return min(1.0, part_s / whole_s) if whole_s > 0 else None
