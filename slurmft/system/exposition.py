"""Measured values as Prometheus reads them: the one place that knows its formats, for runs, sweeps and routers.

text([Family("slurmft_run_step", "Newest step.", GAUGE, [Sample({"run": "gpt"}, 41.0)])])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

GAUGE, COUNTER = "gauge", "counter"
MAX_LABEL = 200
"""Characters of a label's value; a run's cause or name has fewer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """All values of one name."""

    name: str
    """Without the _total of a counter, which the format adds."""

    about: str
    kind: str
    samples: Sequence[Sample]


def text(families: Iterable[Family]) -> str:
    """The text format that node_exporter's textfile collector reads, without timestamps; no value that is NaN."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(_registry(families)).decode()


def encoded(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """What a scrape gets, and its content type: OpenMetrics where ``accept``, its header, asks for that."""
    return registry_text(_registry(families), accept)


def registry_text(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The same for a registry of prometheus_client."""
    from prometheus_client.exposition import choose_encoder

    encode, kind = choose_encoder(accept)
    return encode(registry), kind


def _registry(families: Iterable[Family]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(lambda: _metrics(families)))
    return registry


class _Collected:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _metrics(families: Iterable[Family]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import Metric

    for family in families:
        metric = Metric(family.name, family.about, family.kind)
        suffix = "_total" if family.kind == COUNTER else ""
        for sample in family.samples:
            if math.isfinite(sample.value):
                metric.add_sample(f"{family.name}{suffix}", _labels(sample.labels), sample.value)
        if metric.samples:
            yield metric


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    # a name that is no UTF-8 has surrogates, which no collector would take
    return {name: value[:MAX_LABEL].encode(errors="replace").decode() for name, value in labels.items()}
