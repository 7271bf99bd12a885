"""The speed of a run's nodes in earlier windows, attempts and jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slurmft.policy.timing.stragglers import Floats, better, convicted, robust_best
from slurmft.storage.history import straggler_history as storage
from slurmft.storage.history.straggler_history import KEPT, Best, Conviction, History, NodeHistory

FORGOTTEN_AFTER_S = 86_400.0
"""A window older than this says nothing about a node's present."""


class NodePast:
    """Best times and outcomes of the windows, in memory by rank, on disk by node and place on it.

    Only ``exchange`` touches the disk, so that a verdict never waits for it.
    """

    def __init__(self, run_folder: Path, workload: str, world: int, nproc: int, considered: int) -> None:
        self._folder, self._workload, self._nproc, self._considered = run_folder, workload, nproc, considered
        self._history = History()
        self._was_read = False
        self._incoming: History | None = None
        self._best_s: Floats = np.full((world, KEPT), np.nan)
        self._hosts, self._roles = [""] * world, [""] * world
        self._unsaved: History | None = None

    def place(self, rank: int, host: str, role: str) -> None:
        """``rank`` runs on ``host`` in this role: the records of that place are its past."""
        self._hosts[rank], self._roles[rank] = host, role
        self._best_s[rank] = np.nan
        known = self._history.nodes.get(host, NodeHistory()).best.get(rank % self._nproc)
        if known is not None and known.role == role:
            self._best_s[rank, : len(known.seconds)] = known.seconds

    def best_s(self) -> Floats:
        """[ranks] The best robust time of each; NaN where fewer windows are known than it takes."""
        return robust_best(self._best_s)

    def measured(self, work_s: Floats) -> None:
        """Take in a window's times; NaN where there is none."""
        self._best_s = better(self._best_s, work_s)
        self._remember()

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
        return convicted(outcomes, needed=needed, considered=self._considered)

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
            self._incoming = storage.read(self._folder, self._workload)
            self._was_read = True
        if self._incoming is not None or (unsaved := self._unsaved) is None:
            return  # the data read are not merged yet
        storage.write(self._folder, self._workload, unsaved)
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
        for rank, host in enumerate(self._hosts):
            if host:
                self.place(rank, host, self._roles[rank])
        self._incoming = None

    def _remember(self) -> None:
        nodes = self._history.nodes
        for rank, host in enumerate(self._hosts):
            if host in nodes:
                seconds = tuple(value for value in self._best_s[rank].tolist() if math.isfinite(value))
                nodes[host].best[rank % self._nproc] = Best(role=self._roles[rank], seconds=seconds)
        for node in list(nodes)[: -storage.MAX_NODES]:
            del nodes[node]
        # a copy: another thread writes it while the next window changes this one
        copied = {name: NodeHistory(best=dict(node.best), outcomes=list(node.outcomes)) for name, node in nodes.items()}
        self._unsaved = History(nodes=copied, convictions=list(self._history.convictions))
