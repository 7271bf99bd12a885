"""The supervisor's side of straggler detection: reports of all nodes in, windows, scores and verdicts out.

watch = StragglerWatch(config, run, journal)
watch.note(link.host, message)          # each TimingsReport
if (found := watch.verdict()) is not None: ...
watch.write()                           # now and then, in the thread that may wait for the run folder
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from slurmft.config.run import RunConfig
from slurmft.ipc.messages import RankTimings, TimingsReport
from slurmft.ipc.pages import CUDA, MAX_SECTIONS, STEP, WORK
from slurmft.policy import stragglers
from slurmft.storage import history as storage
from slurmft.storage.history import KEPT, Best, Conviction, History, NodeHistory
from slurmft.storage.journal import EventName, Journal

# --- The speed of a run's nodes in earlier windows, attempts and jobs ---

FORGOTTEN_AFTER_S = 86_400.0
"""A window older than this says nothing about a node's present."""


class NodePast:
    """Best times and outcomes of the windows, by node and place on it.

    Only ``exchange`` touches the disk, so that a verdict never waits for it.
    """

    def __init__(self, run_folder: Path, workload: str, world: int, nproc: int, considered: int) -> None:
        self._folder, self._workload, self._nproc, self._considered = run_folder, workload, nproc, considered
        self._history = History()
        self._was_read = False
        self._incoming: History | None = None
        self._hosts, self._roles = [""] * world, [""] * world
        self._unsaved: History | None = None

    def place(self, rank: int, host: str, role: str) -> None:
        """``rank`` runs on ``host`` in this role: the records of that place are its past."""
        self._hosts[rank], self._roles[rank] = host, role

    def best_s(self) -> stragglers.Floats:
        """[ranks] The largest of the kept best times of each, so that one lucky window says nothing; NaN where fewer
        windows are known than it takes."""
        known = (self._seconds(rank) for rank in range(len(self._hosts)))
        return np.array([seconds[-1] if len(seconds) == KEPT else np.nan for seconds in known])

    def _seconds(self, rank: int) -> tuple[float, ...]:
        """The best times of the rank's place in its role."""
        node = self._history.nodes.get(self._hosts[rank])
        best = None if node is None else node.best.get(rank % self._nproc)
        return best.seconds if best is not None and best.role == self._roles[rank] else ()

    def measured(self, work_s: stragglers.Floats) -> None:
        """Take in a window's times; NaN where there is none."""
        nodes = self._history.nodes
        for rank, value in enumerate(work_s.tolist()):
            if math.isfinite(value):
                seconds = tuple(sorted((*self._seconds(rank), value))[:KEPT])
                node = nodes.setdefault(self._hosts[rank], NodeHistory())
                node.best[rank % self._nproc] = Best(role=self._roles[rank], seconds=seconds)
        for name in list(nodes)[: -storage.MAX_NODES]:
            del nodes[name]
        # a copy: another thread writes it while the next window changes this one
        copied = {name: NodeHistory(best=dict(node.best), outcomes=list(node.outcomes)) for name, node in nodes.items()}
        self._unsaved = History(nodes=copied, convictions=list(self._history.convictions))

    def add_outcome(self, node: str, *, at: float, slow: bool) -> None:
        """Take in whether a window accused the node."""
        known = self._history.nodes.pop(node, NodeHistory())  # to the end: it was seen last
        known.outcomes = [*known.outcomes, (at, slow)][-self._considered :]
        self._history.nodes[node] = known

    def accused_often(self, nodes: Sequence[str], *, needed: int, now: float) -> list[str]:
        """Those of them that were accused by enough of their newest windows."""
        return [node for node in nodes if self._is_convicted(node, needed=needed, now=now)]

    def is_clean(self, node: str) -> bool:
        """Whether none of as many windows as are considered accused it."""
        outcomes = self._history.nodes[node].outcomes
        return len(outcomes) == self._considered and not any(slow for _, slow in outcomes)

    def _is_convicted(self, node: str, *, needed: int, now: float) -> bool:
        outcomes = [slow for at, slow in self._history.nodes[node].outcomes if abs(now - at) < FORGOTTEN_AFTER_S]
        return stragglers.convicted(outcomes, needed=needed, considered=self._considered)

    def follows(self, ranks: Sequence[int], nodes: Sequence[str]) -> bool:
        """Whether each of these ranks was convicted on another node before: then it is not the nodes."""
        elsewhere = {
            rank for each in self._history.convictions if not set(each.nodes) & set(nodes) for rank in each.ranks
        }
        return bool(ranks) and set(ranks) <= elsewhere

    def convict(self, nodes: Sequence[str], ranks: Sequence[int], at: float) -> None:
        """Remember a verdict; its nodes' windows start anew, since from now on the exclusion list knows of them."""
        for node in nodes:
            self._history.nodes[node].outcomes = []
        self._history.convictions.append(Conviction(nodes=tuple(nodes), ranks=tuple(ranks), at=at))
        del self._history.convictions[: -storage.MAX_CONVICTIONS]

    def exchange(self) -> None:
        """Read the file if that has not been done, else write what is new; may be called in another thread.

        Raises:
            OSError: the file is as it was; the next call tries again.
        """
        if not self._was_read:
            self._incoming = storage.read_stragglers(self._folder, self._workload)
            self._was_read = True
        if self._incoming is not None or (unsaved := self._unsaved) is None:
            return  # the data read are not merged yet
        storage.write_stragglers(self._folder, self._workload, unsaved)
        if self._unsaved is unsaved:
            self._unsaved = None

    def adopt(self) -> None:
        """Take in what ``exchange`` has read, before the next window is judged."""
        if (earlier := self._incoming) is None:
            return
        nodes = earlier.nodes
        for name, node in self._history.nodes.items():
            known = nodes.pop(name, NodeHistory())
            known.outcomes = [*known.outcomes, *node.outcomes][-self._considered :]
            for place, best in node.best.items():
                before = known.best.get(place)
                both = best.seconds + (before.seconds if before is not None and before.role == best.role else ())
                known.best[place] = Best(role=best.role, seconds=tuple(sorted(both)[:KEPT]))
            nodes[name] = known
        self._history = History(nodes=nodes, convictions=[*earlier.convictions, *self._history.convictions])
        self._incoming = None


# --- The supervisor's side of straggler detection: reports of all nodes in, windows, scores and verdicts out ---

MAX_JOURNALED = 100
"""Accusations of one attempt that the journal keeps; the log has all of them."""

log = logging.getLogger(__name__)


class StragglerWatch:
    """Judges the windows of one attempt. Its nodes' past is in the run folder (``NodePast``)."""

    def __init__(
        self, config: RunConfig, run_folder: Path, journal: Journal, *, workload: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._settings, self._nodes, self._nproc = config.straggler_detection, config.nodes, config.nproc_per_node
        self._world, self._journal, self._clock = config.world_size, journal, clock
        self._past = NodePast(run_folder, workload, self._world, self._nproc, self._settings.windows_considered)
        self._report_log = logging.getLogger(self._settings.logger_name)
        self._hosts = [""] * self._world
        self._node_of_rank = np.full(self._world, -1, np.int64)
        self._node_numbers: dict[str, int] = {}
        self._cohorts = np.full(self._world, -1, np.int64)
        self._roles: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._window = self._closed = 0
        self._heard = np.zeros(self._world, np.bool_)
        self._medians, self._counts = self._empty()
        self._is_gpu = False
        self._journaled = 0
        self._suspected: list[str] = []
        self._convicted: set[str] = set()
        self._pending: stragglers.StragglerVerdict | None = None
        self.work_s: dict[int, float] = {}
        """Seconds of each rank's own work in a step, in the newest window."""
        self.last_report = ""
        """The newest report; empty before the first."""

    def note(self, host: str, message: TimingsReport) -> None:
        """Take in one agent's numbers; judges the window that they complete.

        The first number of a newer window closes the one before it: ranks without a report are not covered.
        """
        window = message.window
        if window <= self._closed or window < self._window:
            return  # too late
        if window > self._window:
            if self._heard.any():
                self._judge()
            self._window = window
        for facts in message.ranks:
            if 0 <= (rank := facts.rank) < self._world:
                self._take(rank, host, facts)
        if self._heard.all():
            self._judge()

    def verdict(self) -> stragglers.StragglerVerdict | None:
        """The verdict that was reached since the last call, if any.

        A node that stays slow is convicted once in an attempt; one that has recovered in between may be again.
        """
        found, self._pending = self._pending, None
        return found

    def pays(self, verdict: stragglers.StragglerVerdict, *, steps_left: int) -> stragglers.Pays:
        """Whether it pays to move the run away from the convicted nodes; both numbers are in its reason."""
        return stragglers.pays(
            slowdown=verdict.slowdown,
            remaining_s=steps_left * verdict.step_s,
            nodes=self._nodes,
            requeue_cost_s=self._settings.requeue_cost_s,
        )

    def exchange(self) -> None:
        """Read what is known of the nodes, later write what is new; may be called in another thread, and often.

        Raises:
            OSError: the run folder cannot be written.
        """
        self._past.exchange()

    def _empty(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self._world, MAX_SECTIONS)
        return np.full(shape, np.nan), np.zeros(shape, np.int64)

    def _take(self, rank: int, host: str, facts: RankTimings) -> None:
        self._heard[rank] = True
        role = facts.role
        cohort = self._roles.setdefault(role, len(self._roles))
        if self._hosts[rank] != host or self._cohorts[rank] != cohort:
            self._hosts[rank], self._cohorts[rank] = host, cohort
            self._node_of_rank[rank] = self._node_numbers.setdefault(host, len(self._node_numbers))
            self._past.place(rank, host, role)
        self._is_gpu = self._is_gpu or facts.device == CUDA
        for name, median_s, count in facts.sections:
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) == MAX_SECTIONS:
                    continue  # names that differ from rank to rank
                column = self._columns[name] = len(self._columns)
            self._medians[rank, column], self._counts[rank, column] = median_s, count

    def _judge(self) -> None:
        self._closed = self._window
        self._past.adopt()
        began_s = time.perf_counter()
        names, scores = self._scores()
        text = self._report(names, scores)
        took_s = time.perf_counter() - began_s
        if text:
            self.last_report = f"{text}\n Straggler report processing time: {took_s:.3f} sec."
            if self._settings.enable_logging:
                self._report_log.info("%s", self.last_report)
        self._conclude(scores)
        self._past.measured(scores.work_s)
        self.work_s = {rank: each for rank, each in enumerate(scores.work_s.tolist()) if math.isfinite(each)}
        self._heard[:] = False
        self._medians, self._counts = self._empty()

    def _scores(self) -> tuple[list[str], stragglers.Scores]:
        settings = self._settings
        names = [name for name in self._columns if name != STEP]
        columns = [self._columns[name] for name in names]
        medians, counts = self._medians[:, columns], self._counts[:, columns]
        own = names.index(WORK) if WORK in names else None
        limits = stragglers.Limits(
            relative=settings.gpu_relative_perf_threshold if settings.calc_relative_gpu_perf else 0.0,
            individual=settings.gpu_individual_perf_threshold if settings.calc_individual_gpu_perf else 0.0,
            min_difference_s=settings.min_difference_s,
        )
        window = stragglers.Window(
            medians_s=medians, counts=counts, cohorts=np.where(self._heard, self._cohorts, -1),
            best_s=self._past.best_s(),
            judged=() if own is None or not np.isfinite(medians[:, own]).any() else (own,),
        )  # fmt: skip
        return names, stragglers.score(window, limits)

    def _report(self, names: list[str], scores: stragglers.Scores) -> str:
        settings = self._settings
        shape = stragglers.ReportShape(
            relative=settings.calc_relative_gpu_perf, individual=settings.calc_individual_gpu_perf,
            worst=settings.num_gpu_perf_scores_to_print, device="GPU" if self._is_gpu else "CPU",
        )  # fmt: skip
        return stragglers.report(scores, self._hosts, names, shape) if np.isfinite(scores.work_s).any() else ""

    def _conclude(self, scores: stragglers.Scores) -> None:
        numbers, shared = stragglers.accused(scores.slow, self._node_of_rank)
        if shared:
            log.info("so many nodes are slow that none of them is at fault: a slow stage should have a role of its own")
        told = np.unique(self._node_of_rank[scores.covered | np.isfinite(scores.individual)])
        now, needed = self._clock(), self._settings.windows_needed
        names = list(self._node_numbers)
        for number in told[told >= 0].tolist():
            self._past.add_outcome(names[number], at=now, slow=number in numbers)
            if self._past.is_clean(names[number]):
                self._convicted.discard(names[number])
        slow = sorted({names[number] for number in numbers} - self._convicted)
        # one bad window is noise, and readers of the journal remember a node's name
        self._journal_suspects(self._past.accused_often(slow, needed=min(2, needed), now=now), scores)
        if guilty := self._past.accused_often(slow, needed=needed, now=now):
            self._convicted |= set(guilty)
            self._convict(guilty, scores, now)

    def _journal_suspects(self, suspects: list[str], scores: stragglers.Scores) -> None:
        if suspects and suspects != self._suspected and self._journaled < MAX_JOURNALED:
            self._journaled += 1
            ranks = self._slow_ranks(suspects, scores)
            self._journal.append(
                EventName.STRAGGLER_SUSPECTED, nodes=suspects, ranks=ranks, score=_rounded(_worst(scores, ranks))
            )
        self._suspected = suspects

    def _convict(self, guilty: list[str], scores: stragglers.Scores, now: float) -> None:
        ranks = self._slow_ranks(guilty, scores)
        worst_s = max((scores.behind_s[ranks] / scores.work_s[ranks]).tolist())
        ratio = 1 / (1 - worst_s) if 0 < worst_s < 1 else 1 / max(_worst(scores, ranks), 1e-9)
        step_s, slowdown = self._step(ranks, scores, ratio)
        follows = self._past.follows(ranks, guilty)
        verdict = stragglers.StragglerVerdict(
            nodes=tuple(guilty), ranks=tuple(ranks), score=_worst(scores, ranks), work_ratio=ratio, slowdown=slowdown,
            step_s=step_s, follows_rank=follows, stop=self._settings.stop_if_detected and not follows,
            text=self._sentence(guilty, ranks, scores, ratio=ratio, slowdown=slowdown, follows=follows),
        )  # fmt: skip
        self._past.convict(guilty, ranks, now)
        self._pending = verdict
        log.warning("%s", verdict.text)
        self._journal.append(
            EventName.STRAGGLER_DETECTED, nodes=guilty, ranks=ranks, score=_rounded(verdict.score),
            slowdown=_rounded(slowdown), work_ratio=_rounded(ratio), follows_rank=follows,
        )  # fmt: skip

    def _sentence(
        self,
        guilty: list[str],
        ranks: list[int],
        scores: stragglers.Scores,
        *,
        ratio: float,
        slowdown: float,
        follows: bool,
    ) -> str:
        settings = self._settings
        text = (
            f"{', '.join(guilty[:8])}: own work takes {ratio:.2f} times as long as that of its equals (rank "
            f"{', '.join(map(str, ranks[:8]))}; worst score {_worst(scores, ranks):.2f}) in {settings.windows_needed} "
            f"of at most {settings.windows_considered} windows of {settings.report_time_interval:g} s; steps take "
            f"{slowdown:.2f} times as long"
        )
        if follows:
            text += "; but so it was on other nodes: it is the work of that rank, and no node's fault"
        return text

    def _step(self, ranks: list[int], scores: stragglers.Scores, ratio: float) -> tuple[float, float]:
        """Seconds of a step, and how many times longer it is because of these ranks."""
        column = self._columns.get(STEP)
        steps = np.full(0, np.nan) if column is None else self._medians[:, column]
        steps = steps[np.isfinite(steps) & (steps > 0)]
        if not len(steps):
            return math.nan, ratio
        step_s = float(np.median(steps))
        others = np.delete(scores.work_s, ranks)
        others = others[np.isfinite(others)]
        next_s = float(others.max()) if len(others) else 0.0
        worst_s = float(np.nanmax(scores.work_s[ranks]))
        return step_s, stragglers.step_slowdown(step_s=step_s, excess_s=min(worst_s - next_s, step_s * (1 - 1 / ratio)))

    def _slow_ranks(self, nodes: list[str], scores: stragglers.Scores) -> list[int]:
        return [rank for rank in np.flatnonzero(scores.slow).tolist() if self._hosts[rank] in nodes]


def _worst(scores: stragglers.Scores, ranks: list[int]) -> float:
    found = [
        value
        for values, slow in ((scores.relative, scores.slow_relative), (scores.individual, scores.slow_individual))
        for value in values[ranks][slow[ranks]].tolist()
    ]
    return float(min(found, default=math.nan))


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
