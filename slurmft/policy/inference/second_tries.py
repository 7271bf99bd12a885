"""Whether a client's request that has failed on one replica is done on another one.

Only while no byte of an answer has gone to the client, and within the request's own deadline. What a lost replica
leaves behind is redone in any case. Retries of failures of living replicas are a tenth of the requests: otherwise an
endpoint whose replicas are all sick would get several times its load (Site Reliability Engineering, chapter 22).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

SHARE = 0.1
"""Of the requests."""

MOST_SAVED = 20.0
"""Retries that quiet times may save up."""


class Failure(StrEnum):
    """How a try ended without an answer for the client."""

    LOST = "lost"
    """Its replica died, hung, or lost its node."""

    SICK = "sick"
    """Its replica lives, and gave no answer or one that asks for another try (429, 5xx)."""


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """Retries that may still be made: a tenth of one for each request, spent as a whole."""

    saved: float = MOST_SAVED / 2

    def came(self) -> RetryBudget:
        """A request has come."""
        return replace(self, saved=min(MOST_SAVED, self.saved + SHARE))

    def spent(self) -> RetryBudget:
        """A retry is made."""
        return replace(self, saved=self.saved - 1.0)

    @property
    def has_one(self) -> bool:
        """Whether a retry may be made."""
        return self.saved >= 1.0


@dataclass(frozen=True, slots=True)
class SecondTry:
    """What follows a failed try."""

    again: bool
    spends: bool = False
    """It counts against the budget."""

    pause_s: float = 0.0


def after_failure(
    failure: Failure, *, failed: int, max_retries: int, sent: bool, left_s: float, budget: RetryBudget,
    base_delay_s: float, max_delay_s: float, others: bool, asked_s: float | None = None,
) -> SecondTry:  # fmt: skip
    """What follows try number ``failed``.

    Args:
        sent: a byte of an answer has gone to the client.
        left_s: seconds until the request's deadline.
        others: another replica can take it, so that it need not wait for this one to recover.
        asked_s: the pause that the replica itself asks for.
    """
    if sent or failed > max_retries or left_s <= 0:
        return SecondTry(again=False)
    if failure is Failure.LOST:
        return SecondTry(again=True)
    if not budget.has_one:
        return SecondTry(again=False)
    grown_s = base_delay_s * 2.0 ** min(failed - 1, 30)
    pause_s = 0.0 if others else min(max_delay_s, grown_s if asked_s is None else asked_s)
    return SecondTry(again=pause_s < left_s, spends=True, pause_s=pause_s)
