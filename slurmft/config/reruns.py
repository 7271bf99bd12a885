"""The section ``rerun:`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from slurmft.config.types import Count, Section, Text
from slurmft.policy import plain_values as plain


class RerunConfig(Section):
    """Checks of a trainer with ``session.rerun_machine``, and their consequences."""

    mode: Literal["validate_results", "report_stats", "disabled"] = "validate_results"
    """validate_results: a step with a rejected result is run again. report_stats: every step is run twice, to see how
    much results differ by themselves. disabled: nothing is looked at."""

    check_for_nan_in_loss: bool = True
    """Reject a loss that is NaN or infinite."""

    check_for_spiky_loss: bool = False
    """Reject a loss far above the recent ones."""

    spiky_loss_factor: Annotated[float, BeforeValidator(plain.no_bool)] = Field(default=10.0, gt=0, le=1e9)
    """How far: robust standard deviations (median absolute deviation) above their median."""

    spiky_loss_window: Count = Field(default=100, ge=20, le=10_000)
    """How many losses are recent; they are saved with the checkpoint."""

    max_attempts: Count = Field(default=3, ge=1, le=1000)
    """Placements on other nodes that are asked for before a result counts as inconclusive."""

    wait_for_others: bool = True
    """Wait in the queue when all other nodes are busy. false: a result that cannot be computed again on different nodes
    at once is inconclusive, and the run ends with 17."""

    exit_on_persistent: bool = False
    """Stop with exit code 17 when the first node is found faulty; otherwise training goes on with the good result."""

    report_interval_steps: Count = Field(default=100, ge=0)
    """Steps between two reports in the mode report_stats; 0: only at the end."""

    error_injection_rate: Count = Field(default=0, ge=0)
    """For tests: about one in so many results is taken for wrong; 0: none."""

    error_injection_type: Literal["transient_error", "persistent_error", "correct_result"] = "transient_error"
    """For tests: wrong once, wrong on one node, or unusual and right."""

    error_injection_step: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the step with the wrong result; by chance, as the rate says, when empty."""

    error_injection_rank: Annotated[Count, Field(ge=0)] | None = None
    """For tests: the rank with the wrong result; all when empty."""

    error_injection_node: Text | None = None
    """For tests: the node that computes wrongly."""

    error_injection_seed: Count = Field(default=0, ge=0)
    """For tests: another choice of wrong results at the same rate."""
