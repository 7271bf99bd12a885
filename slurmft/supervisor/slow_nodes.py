"""Actions when nodes are found to be slow: a report; and, where it pays, a stop that moves the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc.messages import TimingsReport
from slurmft.policy.verdict import Cause, Suspect
from slurmft.storage.journal import EventName
from slurmft.supervisor.cluster import SlurmCluster, Start
from slurmft.supervisor.grace import workload_of
from slurmft.supervisor.observations import Observations
from slurmft.supervisor.placement import Accuser, choose, next_placement
from slurmft.supervisor.stops import Stops

if TYPE_CHECKING:
    from slurmft.policy.stragglers import StragglerVerdict
    from slurmft.supervisor.stragglers import StragglerWatch


log = logging.getLogger(__name__)


class SlowNodes:
    """Collects the times that agents report of their ranks. Costs nothing before the first report."""

    def __init__(self, config: RunConfig, start: Start, seen: Observations, stops: Stops, *, accuser: Accuser) -> None:
        self._config, self._start, self._seen, self._stops = config, start, seen, stops
        self._accuser = accuser
        self._watch: StragglerWatch | None = None
        self.suspects: tuple[Suspect, ...] = ()
        """Nodes that the run is being moved away from."""

    def note(self, host: str, report: TimingsReport) -> None:
        """Take in one agent's report, and act on the verdict that it completes."""
        if self._watch is None:
            from slurmft.supervisor.stragglers import StragglerWatch  # brings numpy, 0.1 s at every start

            nodes = self._seen.world_size // self._config.nproc_per_node  # as many as this attempt has
            self._watch = StragglerWatch(
                self._config.model_copy(update={"nodes": nodes}),
                self._start.run.path,
                self._start.journal,
                workload=workload_of(self._config),
            )
        self._watch.note(host, report)
        if (slow := self._watch.verdict()) is not None:
            self._judge(self._watch, slow)

    def work_s(self) -> Mapping[int, float]:
        """Seconds of each rank's own work in a step, as the newest window had them; empty before the first."""
        return {} if self._watch is None else self._watch.work_s

    def exchange(self) -> None:
        """Read and write the nodes' past. In the run folder's thread.

        Raises:
            OSError: the run folder cannot be written.
        """
        if self._watch is not None:
            self._watch.exchange()

    def _judge(self, watch: StragglerWatch, slow: StragglerVerdict) -> None:
        step = self._seen.reached()[1]
        worth = watch.pays(slow, steps_left=max(0, self._seen.until() - step))
        move = slow.stop and worth.worth
        self._start.journal.append(
            EventName.STRAGGLER_JUDGED, nodes=list(slow.nodes), move=move, gain_s=round(worth.gain_s, 1),
            cost_s=round(worth.cost_s, 1), reason=worth.reason,
        )  # fmt: skip
        self._stops.background.start(self._act(slow, step, worth.reason if move else ""))

    async def _act(self, slow: StragglerVerdict, step: int, reason: str) -> None:
        """Hand the evidence in; with a ``reason``, save and move, unless a stop is under way or there are no others."""
        moves = bool(reason) and self._stops.planned is None and await self._others_exist(slow.nodes)
        if not moves:  # else the verdict says it
            self._accuser.add(slow.evidence(time.time(), step))
        elif self._stops.planned is None:
            log.warning("Detected stragglers. Terminating training... on %s, to go on elsewhere", ", ".join(slow.nodes))
            self.suspects = tuple(Suspect(node=node) for node in slow.nodes)
            self._stops.stop_for(Cause.STRAGGLER, f"{slow.text}; {reason}")

    async def _others_exist(self, nodes: tuple[str, ...]) -> bool:
        cluster = self._start.cluster
        why = "there are no other nodes"
        if isinstance(cluster, SlurmCluster):
            if choose(cluster.present(), frozenset(nodes), self._config.size.minimum) is not None:
                return True
            wanted: dict[str, Any] = {
                "partition": cluster.job.partition, "job": cluster.own, "history": self._start.history,
                "suspects": nodes,
            }  # fmt: skip
            placement = None
            with contextlib.suppress(StorageError):
                placement = await asyncio.to_thread(next_placement, self._config, **wanted)
            why = placement.impossible if placement is not None else "the exclusion list cannot be read"
        if why:
            self._start.journal.append(EventName.STRAGGLER_KEPT, nodes=list(nodes), reason=why)
        return not why
