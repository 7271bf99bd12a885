"""The section ``fault_tolerance:``: limits for failures, restarts, hangs and silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from slurmft.config.faults import SimulatedFaults
from slurmft.config.hangs import HangSettings
from slurmft.config.poison import PoisonSettings
from slurmft.config.types import Count, ModuleName, Seconds
from slurmft.policy.verdicts.verdict import Cause, by_cause

if TYPE_CHECKING:
    from slurmft.config.inference import InferenceConfig

PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.optim", "numpy",
    "slurmft.worker.session", "slurmft.checkpoint.manager", "slurmft.checkpoint.warm_up",
)  # fmt: skip
"""torch.optim pulls torch._dynamo in when the first optimizer is built: 1.1 s that every worker would pay."""


class FaultToleranceConfig(HangSettings, PoisonSettings, SimulatedFaults):
    """Limits for failures, restarts, hangs and silence."""

    num_in_job_restarts: Count = Field(default=3, ge=0)
    """Restarts within one start of the job, on the nodes that it has, before it goes back into the queue; counted anew
    whenever the run has made progress in between."""

    num_job_retries_on_failure: Count = Field(default=2, ge=0)
    """Restarts of the job after failures of one cause, counted anew whenever the run has made progress in between."""

    retry_delay_s: Seconds = Field(default=1.0, ge=0)
    """Seconds before the second retry in a row without progress; they double with each further one, with jitter. The
    first one is immediate. 0 switches the delay off."""

    max_retry_delay_s: Seconds = Field(default=300.0, ge=0)
    """The longest delay; a restart in the allocation waits no longer than 10 s."""

    retries: Annotated[dict[Cause, Annotated[Count, Field(ge=0)]], BeforeValidator(by_cause)] = Field(
        default_factory=dict
    )
    """Other numbers of restarts for single causes: ``{node lost: 5, worker error: 1}``."""

    max_no_progress_cycles: Count = Field(default=3, ge=1)
    """Attempts in a row that end, for any cause, without a newly saved step, before the run is given up with exit code
    93. Preemptions, requeues and stops by signal are not counted."""

    launch_timeout_s: Seconds = Field(default=300.0, gt=0)
    """Seconds until every agent must have reported."""

    supervisor_lease_s: Seconds = Field(default=60.0, gt=0)
    """Seconds an agent keeps its workers running without hearing from the supervisor (fencing)."""

    agent_timeout_s: Seconds = Field(default=3.0, ge=1)
    """Seconds without a message from a node's agent, which reports every 0.5 s, until the node counts as lost and
    another one takes its place; four times as long where there is none, since a requeue costs more than the wait."""

    preload: bool | tuple[ModuleName, ...] = True
    """Fork workers from a process that has torch imported already. A list names modules of installed packages that it
    imports as well, before the script sets any variable. For each worker it keeps one process more, for a faster
    restart (some 15 MB of their own). Off: every worker starts its own interpreter."""

    standby_supervisor: bool = False
    """Keep a second supervisor ready on another node of the job. It takes over within seconds when the batch host dies,
    which costs a requeue otherwise. Needs Slurm's commands on the nodes, and an allocation that outlives a node: spare
    nodes, ``elastic``, or ``slurm.no_kill``."""

    @property
    def ping_lease_s(self) -> float:
        """What the supervisor's pings to its agents are made for: a fourth of it lies between two of them."""
        return min(self.supervisor_lease_s, 4.0) if self.standby_supervisor else self.supervisor_lease_s

    def standby_problem(self, *, nodes: int, survives: bool, inference: bool) -> str:
        """Why there can be no standby supervisor; empty where none is asked for, or it can be.

        Args:
            nodes: of the job, spares included.
            survives: the allocation outlives one of its nodes.
            inference: the run answers requests.
        """
        if not self.standby_supervisor:
            return ""
        if inference:
            return ("fault_tolerance.standby_supervisor: for trainers only, and this run has an inference section; "
                    "when its batch host dies, `slurmft requeue --rescue` brings it back")  # fmt: skip
        if nodes < 2 or not survives:
            return ("fault_tolerance.standby_supervisor: for trainers on at least two nodes, with spare_nodes, elastic "
                    "or slurm.no_kill")  # fmt: skip
        return ""

    def preloaded(self, launcher: str, inference: InferenceConfig | None) -> tuple[str, ...]:
        """What a node's zygote imports before workers are forked: torch only where workers use it."""
        if self.preload is False or launcher == "ray":  # whose workers are no forks of the zygote
            return ()
        asked_for = () if self.preload is True else self.preload
        if inference is None:
            return (*PRELOAD, *asked_for)
        if inference.serving is not None:
            return ("slurmft.inference.driver", "slurmft.inference.serving.gate", "slurmft.inference.serving.router")
        driver = ("slurmft.inference.driver", "aiohttp", *asked_for)
        return (*driver, "torch") if inference.engine.callable else driver
