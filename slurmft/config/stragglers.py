"""The section ``straggler_detection`` of the configuration."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from slurmft.config.types import Count, Positive, Score, Seconds, Section, Text


class StragglerDetectionConfig(Section):
    """Which ranks are slow: each rank's own work is timed, and compared with its equals and its own past."""

    enabled: bool = True
    """Time the ranks' own work and report slow ranks."""

    report_time_interval: Seconds = Field(default=300.0, ge=0.5)
    """Seconds of one window; there is one report for each."""

    calc_relative_gpu_perf: bool = True
    """Compare each rank with the median of its cohort, the ranks of equal role; where one half of it takes twice as
    long as the other, with the faster half."""

    calc_individual_gpu_perf: bool = True
    """Compare each rank with the best that it ever did on this node."""

    num_gpu_perf_scores_to_print: Count = Field(default=5, ge=0, le=1000)
    """Ranks that a report names: so many of the worst, and so many of the best; 0: only warnings are reported."""

    gpu_relative_perf_threshold: Score = 0.7
    """Relative score below which a rank is slow; 1 is as fast as the median."""

    gpu_individual_perf_threshold: Score = 0.7
    """Individual score below which a rank is slow; 1 is as fast as it ever was."""

    stop_if_detected: bool = False
    """Save, stop, and go on without the slow node where that pays. Off: it is only reported."""

    enable_logging: bool = True
    """Write each report to the supervisor's log."""

    profiling_interval: Positive = 1
    """Time every n-th step, and every n-th entry of a named section."""

    logger_name: Text = "slurmft.stragglers"
    """Logger of the reports; another name than this one stands in front of them in the log."""

    windows_needed: Positive = 3
    """Windows that must accuse a node before there is a verdict, ..."""

    windows_considered: Count = Field(default=5, ge=1, le=1000)
    """... among this many newest ones."""

    min_difference_s: Seconds = Field(default=0.005, ge=0)
    """Seconds a rank must be behind in each step; less is noise, even with a low score."""

    requeue_cost_s: Seconds = Field(default=300.0, ge=0)
    """Seconds of training that a move costs: save, queue, start. The run moves when it gains more than that."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.windows_needed > self.windows_considered:
            raise ValueError(
                f"windows_needed={self.windows_needed} of windows_considered={self.windows_considered} never happens"
            )
        return self
