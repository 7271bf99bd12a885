"""Every step twice: how much results differ when nothing is wrong (``rerun.mode: report_stats``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slurmft.policy.nodes.reruns import Variability, largest_difference, variability

log = logging.getLogger(__name__)

MAX_DIFFERENCES = 100_000


class StepTwice:
    """Collects the results of the first run of a step and compares those of the second."""

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._first: list[tuple[str, Sequence[float]]] = []
        self._differences: dict[str, list[float]] = {}
        self._steps = 0
        self._is_second = False

    def note(self, invocation: int, message: str, values: Sequence[float]) -> None:
        """One result of the run under way."""
        if not self._is_second:
            self._first.append((message, values))
            return
        first = self._first[invocation][1] if invocation < len(self._first) else ()
        found = self._differences.setdefault(message, [])
        found.append(largest_difference(first, values))
        del found[:-MAX_DIFFERENCES]

    def wants_second_run(self) -> bool:
        """After a run: whether the step is to be run once more. Reports now and then."""
        if not self._is_second:
            self._is_second = True
            return True
        self._is_second, self._first = False, []
        self._steps += 1
        if self._interval_steps and self._steps % self._interval_steps == 0:
            self.report()
        return False

    def report(self) -> None:
        """One log line for each kind of result."""
        for message, found in self.variabilities().items():
            log.info("rerun statistics after %d steps: %s: %s", self._steps, message, found)

    def variabilities(self) -> dict[str, Variability]:
        """By the message that each result was validated with."""
        return {message: variability(found) for message, found in self._differences.items()}
