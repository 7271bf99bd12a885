"""The mean time between failures, and how sure of it one can be after so few of them.

For failures that come independently at a constant rate, their number in a time T has Poisson's distribution. The limits
are the exact ones, half of a quantile of chi-square: F. Garwood, "Fiducial limits for the Poisson distribution",
Biometrika 28 (1936). They are found by bisection of the distribution itself, so that no table of chi-square is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_PRECISION = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtbf:
    """Seconds between two failures, with a confidence interval; None: no failure was seen, there is no upper limit."""

    mean_s: float | None
    low_s: float
    high_s: float | None
    confidence: float


def mtbf_of(failures: int, exposed_s: float, *, confidence: float = 0.95) -> Mtbf | None:
    """From ``failures`` seen in ``exposed_s`` seconds; None where no time was observed.

    Without any failure only the lower limit exists, with the whole doubt on its side.
    """
    if not 0 < exposed_s < math.inf or failures < 0:
        return None
    doubt = (1.0 - confidence) / (2 if failures else 1)
    low_s = exposed_s / _upper_mean(failures, doubt)
    if not failures:
        return Mtbf(mean_s=None, low_s=low_s, high_s=None, confidence=confidence)
    high_s = exposed_s / _lower_mean(failures, doubt)
    return Mtbf(mean_s=exposed_s / failures, low_s=low_s, high_s=high_s, confidence=confidence)


def _upper_mean(number: int, doubt: float) -> float:
    """The mean with which so few events, or fewer, have the probability ``doubt``."""
    return _bisected(lambda mean: mean <= number or _at_most(number, mean) > doubt, number)


def _lower_mean(number: int, doubt: float) -> float:
    """The mean with which so many events, or more, have the probability ``doubt``."""
    return _bisected(lambda mean: mean < number and _at_least(number, mean) < doubt, number)


def _bisected(is_below: Callable[[float], bool], number: int) -> float:
    low, high = 0.0, 20.0 + 4.0 * number
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _at_most(number: int, mean: float) -> float:
    """Probability of ``number`` events or fewer, with more of them expected: terms fall from the first one on."""
    term, total, k = 1.0, 0.0, number
    while k >= 0 and term > _PRECISION * total:
        total += term
        term, k = term * k / mean, k - 1
    return total * _probability(number, mean)


def _at_least(number: int, mean: float) -> float:
    """Probability of ``number`` events or more, with fewer of them expected."""
    term, total, k = 1.0, 0.0, number
    while term > _PRECISION * total:
        total += term
        k += 1
        term *= mean / k
    return total * _probability(number, mean)


def _probability(number: int, mean: float) -> float:
    return math.exp(number * math.log(mean) - mean - math.lgamma(number + 1)) if mean > 0 else float(number == 0)
