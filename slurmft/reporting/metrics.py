"""The measured values of a run: counts from its journal, and what its supervisor last wrote of the living run.

    run = RunMetrics(folder)
    text = exposition.text(families([run.look()]))       # reads what is new in the journal

``docs/how-to/monitoring.md`` lists all names. A run has at most ``MAX_SERIES`` series: no label is a step, a rank or a
text, and jobs and nodes are labels of the one ``slurmft_run_info``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import slurmft
from slurmft.errors import StorageError
from slurmft.reporting.counters import ABOUT, NAMES, RunCounts, category_of
from slurmft.scheduler.slurm import configured_cluster
from slurmft.storage.history import live_view
from slurmft.storage.history.journal_tail import JournalTail
from slurmft.storage.history.progress import Progress, progress_of
from slurmft.storage.jobs_file import LOCAL_PREFIX
from slurmft.storage.ownership import user_name
from slurmft.storage.run_folder import RunFolder
from slurmft.system.exposition import COUNTER, GAUGE, Family, Sample

MAX_SERIES = 60
_GAUGES: Mapping[str, str] = {
    "active": "1 from the start of an attempt to its verdict, by the journal.",
    "finished": "1 when the run is complete.",
    "waiting_since_timestamp_seconds": "Since when the run waits for nodes; missing while it does not.",
    "report_timestamp_seconds": "When the supervisor last wrote its progress.",
    "progress_timestamp_seconds": "When the newest step was reached (batch inference: the newest answer).",
    "save_timestamp_seconds": "When the newest save of this attempt was done.",
    "step": "Newest step (batch inference: requests that are answered).",
    "until_step": "Step at which the run is complete (batch inference: all requests).",
    "saved_step": "Newest step in a checkpoint of this attempt.",
    "loss": "The metric that the trainer reports.",
    "ranks": "Ranks of the attempt.",
    "failed_saves": "Saves that failed in a row.",
    "save_interval_steps": "Steps between two saves, where the configuration counts them in steps.",
    "heartbeat_age_seconds": "Age of the oldest sign of life of a rank, at the time of the report.",
    "hang_budget_used_ratio": "The largest part of a time limit that a rank's section has used up; at 1 it hangs.",
    "restarts_left": "Failures of one kind that the run survives yet without further progress; the least of all kinds.",
    "replicas_ready": "Inference: replicas that can answer.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One run at one moment."""

    labels: Mapping[str, str]
    info: Mapping[str, str]
    gauges: Mapping[str, float]
    """By the names of ``_GAUGES``."""

    counts: Mapping[str, float]
    ends: Mapping[str, float]
    span_s: Mapping[str, float]


@dataclass(slots=True)
class _Shown:
    """The greatest values that were shown: a journal that was cut or damaged does not make counts go back."""

    counts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    span_s: dict[str, float] = field(default_factory=dict)


class RunMetrics:
    """One run's values, look after look."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._tail = run, JournalTail(run.path, names=NAMES)
        self._counts, self._begun, self._shown = RunCounts(), 0, _Shown()

    def look(self) -> Look:
        """Read what is new. What cannot be read is left out, as if it was not there.

        Raises:
            OSError: the journal cannot be read.
        """
        for entry in self._tail.news():
            if self._tail.begun != self._begun:
                self._counts, self._begun = RunCounts(), self._tail.begun
            self._counts.take((entry,))
        counts = self._counts
        shown = self._shown
        return Look(
            labels=_labels(self._run, counts.attempt),
            info={"job": counts.job, "node": counts.nodes, "attempt": counts.attempt, "version": slurmft.__version__},
            gauges=dict(self._gauges()),
            counts=_grown(shown.counts, {**counts.events, "lost_steps": counts.lost_steps}),
            ends=_grown(shown.ends, counts.ends),
            span_s=_grown(shown.span_s, counts.span_s),
        )

    def _gauges(self) -> Iterator[tuple[str, float]]:
        counts = self._counts
        is_active = counts.span in ("start", "work")
        finished = self._finished()
        yield "active", float(is_active and not finished)
        yield "finished", float(finished)
        if counts.span == "queue" and counts.since is not None and not finished:
            yield "waiting_since_timestamp_seconds", counts.since
        if is_active and counts.ready_replicas:
            yield "replicas_ready", float(len(counts.ready_replicas))
        progress = progress_of(self._run)
        if progress.attempt != counts.attempt and is_active:
            return  # of the attempt before: the new one has reported nothing yet
        yield from _of_progress(progress)
        view = live_view.read(self._run.path)
        if is_active and view.attempt == counts.attempt:
            live = {"heartbeat_age_seconds": view.heartbeat_s, "hang_budget_used_ratio": view.hang_used,
                    "restarts_left": view.restarts_left, "save_interval_steps": view.save_interval_steps}  # fmt: skip
            yield from ((name, float(value)) for name, value in live.items() if value is not None)

    def _finished(self) -> bool:
        try:
            return self._run.done() is not None
        except StorageError:
            return False


def _of_progress(progress: Progress) -> Iterator[tuple[str, float]]:
    found = {
        "report_timestamp_seconds": progress.at, "progress_timestamp_seconds": progress.progressed_at,
        "save_timestamp_seconds": progress.saved_at, "step": progress.step, "until_step": progress.until,
        "saved_step": progress.saved_step, "loss": progress.metric, "ranks": progress.world_size,
    }  # fmt: skip
    if progress.until is None:  # an endpoint, which may have no requests for days
        found["progress_timestamp_seconds"] = None
    yield from ((name, float(value)) for name, value in found.items() if value is not None)
    if progress.at is not None:
        yield "failed_saves", float(progress.failed_saves or 0)


def families(looks: Sequence[Look]) -> list[Family]:
    """The values of these runs."""
    found = [
        Family("slurmft_run_info", "Where the run is: its newest job, nodes and attempt.", GAUGE,
               [Sample({**look.labels, **look.info}, 1.0) for look in looks]),
        *(
            Family(f"slurmft_run_{name}", about, GAUGE,
                   [Sample(look.labels, look.gauges[name]) for look in looks if name in look.gauges])
            for name, about in _GAUGES.items()
        ),
        *(
            Family(f"slurmft_run_{name}", about, COUNTER, [Sample(look.labels, look.counts[name]) for look in looks])
            for name, about in {**ABOUT, "lost_steps": "Steps that were lost and had to be done again."}.items()
        ),
        Family("slurmft_run_ends", "Ends of attempts, by their verdict.", COUNTER, [
            Sample({**look.labels, "cause": cause, "category": category_of(cause)}, count)
            for look in looks for cause, count in sorted(look.ends.items())
        ]),
        Family("slurmft_run_seconds", "Where the time went, in spans that have ended.", COUNTER, [
            Sample({**look.labels, "category": span}, seconds)
            for look in looks for span, seconds in look.span_s.items()
        ]),
    ]  # fmt: skip
    return [family for family in found if family.samples]


def looks_at(runs: Iterable[RunFolder]) -> tuple[list[Look], list[str]]:
    """All of these runs, and in words which of them could not be read. Of two runs with equal labels the first counts:
    a collector would refuse the whole file."""
    looks, problems = dict[tuple[str, ...], Look](), list[str]()
    for run in runs:
        try:
            look = RunMetrics(run).look()
        except (OSError, StorageError) as error:
            problems.append(f"{run.name}: {getattr(error, 'strerror', None) or error}")
            continue
        if looks.setdefault(tuple(look.labels.values()), look) is not look:
            problems.append(f"{run.path}: another run of this user has this name")
    return list(looks.values()), problems


def _labels(run: RunFolder, attempt: str) -> dict[str, str]:
    return {"run": run.path.name, "user": _user_of(run.path), "cluster": _cluster_of(run, attempt)}


def _user_of(path: Path) -> str:
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return user_name(os.getuid())


def _cluster_of(run: RunFolder, attempt: str) -> str:
    if attempt.startswith(LOCAL_PREFIX):
        return "local"
    return configured_cluster(os.environ) or os.environ.get("SLURM_CLUSTER_NAME") or "slurm"


def _grown(shown: dict[str, float], now: Mapping[str, float]) -> dict[str, float]:
    for name, value in now.items():
        if math.isfinite(value):
            shown[name] = max(shown.get(name, 0.0), float(value))
    return dict(shown)
