"""Limits learned from how long sections took: a decaying high quantile times a factor, between a floor and a ceiling.

An outlier counts with a small part of itself, and fades; long durations that recur count like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slurmft.policy.timing.hangs import SETUP

FLOOR_S = 10.0
"""No limit is shorter, however fast the steps: a page cache, a garbage collection, a neighbour's burst take seconds."""

CEILING_S = 6 * 3600.0

MIN_SAMPLES = 10
"""Fewer samples are not enough."""

MAX_SAMPLES = 200
HALF_LIFE = 50
"""Samples after which an older one counts half."""

QUANTILE = 0.95
OUTLIER_FACTOR = 1.5
"""The longest that was seen must fit this often into the limit, while it is new: it was not a hang."""


def learned_s(samples_s: Sequence[float], factor: float) -> float | None:
    """The limit that the samples, oldest first, suggest; None where they are too few."""
    usable = [each for each in samples_s if math.isfinite(each) and each >= 0][-MAX_SAMPLES:]
    if len(usable) < MIN_SAMPLES:
        return None
    weights = [2.0 ** (-age / HALF_LIFE) for age in range(len(usable) - 1, -1, -1)]
    typical_s = _quantile(usable, weights, QUANTILE)
    faded_s = max(each * weight for each, weight in zip(usable, weights, strict=True))
    limit_s: float = min(CEILING_S, max(FLOOR_S, factor * typical_s, OUTLIER_FACTOR * faded_s))
    return limit_s


def merged(
    configured: Mapping[str, float], given: frozenset[str], samples_s: Mapping[str, Sequence[float]], factor: float
) -> dict[str, float]:
    """Limits by name: the learned ones, and below those that were ``given`` by the user never; 0 stays 0.

    ``configured`` holds defaults as well; they hold where nothing is learned yet. That of the setup, which first steps
    have too, is only ever raised: they are rare, and one without a warm cache takes much longer than all before.
    """
    limits = dict(configured)
    for name, samples in samples_s.items():
        was_s = configured.get(name)
        if was_s == 0 or (found_s := learned_s(samples, factor)) is None:
            continue
        limits[name] = max(found_s, was_s or 0.0) if name in given or name == SETUP else found_s
    return limits


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value at or below which at least ``share`` of the weight is."""
    needed, seen = share * sum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        seen += weight
        if seen >= needed:
            return value
    return max(values)
