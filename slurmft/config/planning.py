"""The file of ``slurmft plan``: a cluster, its failures, and how long things take there."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from slurmft.config.base import Positive, Section
from slurmft.policy import plain_values as plain
from slurmft.policy.verdict import Cause, by_cause

MOST = 1e9
Number = Annotated[float, Field(ge=0), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MOST))]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(plain.no_bool)]

DEFAULT_RATES = {
    Cause.NODE_LOST: 0.8, Cause.SIGNAL_CRASH: 1.5, Cause.HANG: 0.8, Cause.COMMUNICATION_ERROR: 0.7,
}  # fmt: skip
"""3.8 in 1,000 node-days together: 419 interruptions in 54 days on 2,048 nodes ("The Llama 3 Herd of Models", 2024,
table 5). How they divide among the causes is our assumption."""


class LemonConfig(Section):
    """Nodes that fail more often than the others."""

    share: Share = 0.01
    """Share of the cluster's nodes."""

    factor: Number = 10.0
    """How many times as often they fail."""


class ClusterConfig(Section):
    """The nodes that a job may run on."""

    nodes: Positive | None = None
    """All of them, those in repair included; empty: as many as the run asks for, and one in fifty more."""

    lemons: LemonConfig = Field(default_factory=LemonConfig)
    repair_hours: Number = 24.0
    """Mean time until a node that was lost is back."""


def _rates(value: Any) -> Any:
    return by_cause(value) if isinstance(value, dict) else value


class FailureConfig(Section):
    """How often, and what is seen of it."""

    per_1000_node_days: Annotated[dict[Cause, Number], BeforeValidator(_rates)] = Field(
        default_factory=lambda: {**DEFAULT_RATES}
    )
    """Failures of 1,000 nodes in a day, by the cause that a verdict would name. A lost node needs a repair; all others
    leave the node in the job."""

    named_right: Share = 0.9
    """How often the verdict names the node that failed; otherwise it names none."""

    seen_by_checks: Share = 0.2
    """How often a health check finds the fault as well, which is stronger evidence than a crash."""


class QueueConfig(Section):
    """What happens around the run."""

    wait_minutes: Number = 10.0
    """Mean time in the queue, at the first submission and after each requeue."""

    preemptions_per_day: Number = 0.0
    time_limit_hours: Number = 0.0
    """0: none."""

    person_hours: Number = 4.0
    """Until a person submits a run again that slurmft has given up."""


class DurationConfig(Section):
    """How long things take; empty: as ``slurmft advise`` has measured for the run, or else a typical value."""

    start_s: Number = 120.0
    """From a granted allocation to the first new step: launch, imports, setup, load."""

    restart_s: Number = 5.0
    """The same for a restart within the job."""

    save_cost_s: Number | None = None
    """What a save costs the training."""

    durable_s: Number | None = None
    """From the beginning of a save until it survives the loss of its node."""

    hang_s: Number = 180.0
    """Until a hang is noticed."""


class PlanConfig(Section):
    """All of it."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    failures: FailureConfig = Field(default_factory=FailureConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    durations: DurationConfig = Field(default_factory=DurationConfig)
    work_days: Annotated[float, Field(gt=0, le=3660), BeforeValidator(plain.no_bool)] = 30.0
    """Days of training on all nodes without any fault."""

    seeds: Annotated[int, Field(ge=2, le=1000), BeforeValidator(plain.no_bool)] = 10
    """Simulated lives of the run; more make the intervals narrower."""

    alternatives: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name -> keys that differ, of this file or of the run: ``{two spares: {spare_nodes: 2}}``."""
