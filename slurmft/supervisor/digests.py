"""Digests of replicas, compared by the supervisor: a rank that differs ends the attempt before its state spreads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.config.run import RunConfig
from slurmft.errors import StorageError
from slurmft.ipc.messages import DigestsReport
from slurmft.policy.digests import Comparison, Digest, compare, convicted, words, words_of_split
from slurmft.policy.judge import Corruption
from slurmft.policy.verdict import Cause, Evidence, Kind, Suspect
from slurmft.storage.checkpoint_names import Doubt, note_doubt, note_verified
from slurmft.storage.journal import Event, EventName
from slurmft.supervisor.cluster import Start
from slurmft.supervisor.observations import Observations
from slurmft.supervisor.placement import Accuser
from slurmft.supervisor.stops import Stops

KEPT_STEPS = 256
"""Steps of which digests are kept: of those that not all ranks have reported, and of those on which all agreed."""

WRITE_S = 20.0

log = logging.getLogger(__name__)


class Digests:
    """The digests of one attempt."""

    def __init__(
        self, config: RunConfig, start: Start, seen: Observations, stops: Stops,
        accuser: Accuser, *, over: asyncio.Event,
    ) -> None:  # fmt: skip
        self._config, self._start, self._seen, self._stops = config, start, seen, stops
        self._accuser, self._over = accuser, over
        self._steps: dict[int, dict[int, Digest]] = {}
        self._nodes: dict[int, str] = {}
        self._agreed: dict[int, tuple[Digest, ...]] = {}
        self._newest_agreed = -1
        self._verified: int | None = None
        self._is_off = False
        self._doubted: Mapping[int, Mapping[str, Digest]] | None = None
        self.found: Corruption | None = None
        self.convicted: tuple[Suspect, ...] = ()
        """Nodes that were wrong when replicas differed before, as the repetition has shown."""

    def note(self, host: str, report: DigestsReport) -> None:
        """Take in one agent's report, and compare the steps that it completes."""
        if self.found is not None or self._is_off:
            return
        for each in report.ranks:
            self._nodes[each.rank] = host
            for step, value in each.digests:
                self._steps.setdefault(step, {})[each.rank] = Digest(group=each.group, value=value)
        for step in sorted(step for step, digests in self._steps.items() if len(digests) >= self._seen.world_size):
            self._judge(step, self._steps.pop(step))
            if self.found is not None or self._is_off:
                return
        for step in sorted(self._steps)[:-KEPT_STEPS]:
            del self._steps[step]
        self._verify()

    def trusted(self, saved: int | None) -> int | None:
        """The newest saved step that the next attempt may use; of a spoilt attempt, one on which replicas agreed."""
        if self.found is None or saved is None or saved <= self.found.trusted_step:
            return saved
        return self._verified

    async def close(self) -> None:
        """The workers have ended: note which of their checkpoints are not to be used, before anything follows."""
        if self.found is None:
            self._verify()
            return
        doubt = Doubt(
            generation=self._start.generation, after_step=self.found.trusted_step, reason=self.found.reason[:1000]
        )
        folder = self._config.checkpoint_dir
        try:
            await asyncio.wait_for(
                asyncio.wrap_future(self._start.thread.submit(lambda: note_doubt(folder, doubt))), WRITE_S
            )
        except (OSError, StorageError) as error:  # OSError covers TimeoutError
            log.error("checkpoints after step %d are not marked: %s", self.found.trusted_step, error)

    def _judge(self, step: int, digests: Mapping[int, Digest]) -> None:
        result = compare(digests)
        if result.unlike:
            self._is_off = True
            reason = "no two ranks are equal: they are no replicas, and are not compared any more"
            self._start.journal.append(EventName.REPLICAS_UNLIKE, step=step, reason=reason)
            log.warning("digests: after step %d, %s", step, reason)
        elif result.differs:
            self._accuse(step, digests, result)
        elif result.agrees:
            self._newest_agreed = max(self._newest_agreed, step)
            self._agreed[step] = tuple(dict.fromkeys(digests.values()))
            for old in sorted(self._agreed)[:-KEPT_STEPS]:
                del self._agreed[old]
            self._settle(step)

    def _accuse(self, step: int, digests: Mapping[int, Digest], result: Comparison) -> None:
        ranks = result.wrong or result.split
        nodes = {rank: self._nodes[rank] for rank in ranks}
        is_known = bool(result.wrong) or len({*nodes.values()}) == 1
        reason = words(nodes, result.compared, step) if result.wrong else words_of_split(nodes, step)
        suspects = tuple(Suspect(node=node, rank=rank) for rank, node in sorted(nodes.items())) if is_known else ()
        trusted = max(self._newest_agreed, self._seen.reached()[0])
        values = {} if is_known else {node: [digests[rank].group, digests[rank].value] for rank, node in nodes.items()}
        self.found = Corruption(reason=reason, step=step, trusted_step=trusted, suspects=suspects)
        self._start.journal.append(
            EventName.REPLICAS_DIFFER, step=step, ranks=list(ranks), nodes=sorted({*nodes.values()}),
            known=is_known, trusted_step=trusted, reason=reason, **({"digests": values} if values else {}),
        )  # fmt: skip
        log.error("SILENT DATA CORRUPTION: %s; on from step %d or before", reason, trusted)
        self._over.set()  # at once: whatever the ranks would still save, or keep just in time, may be spoilt

    def _verify(self) -> None:
        """Note that the newest saved state is one on which all replicas agreed."""
        saved = self._seen.saved()
        if saved is None or saved == self._verified or saved not in self._agreed:
            return
        self._verified = saved
        folder, generation = self._config.checkpoint_dir, self._start.generation
        self._start.journal.append(EventName.CHECKPOINT_VERIFIED, step=saved)
        self._start.thread.submit(lambda: _noted(folder, saved, generation))

    def _settle(self, step: int) -> None:
        """Where replicas differed without a majority before, this step's repetition tells which was wrong."""
        if self._doubted is None:
            self._doubted = doubted_in(self._start.history)
        nodes = convicted(self._doubted.get(step, {}), self._agreed[step])
        if not nodes:
            return
        reason = f"the repetition of step {step} shows that {', '.join(nodes)} had computed it wrongly"
        self._start.journal.append(EventName.REPLICA_CONVICTED, step=step, nodes=list(nodes), reason=reason)
        kind, now = Kind.REPLICA_DIFFERS, time.time()
        self._accuser.add(
            [Evidence(kind=kind, suspect=Suspect(node=node), message=reason, at=now, step=step) for node in nodes]
        )
        if self._stops.planned is None and {*nodes} & {*self._nodes.values()}:
            self.convicted = tuple(Suspect(node=node) for node in nodes)
            self._stops.stop_for(Cause.REPLICAS_DIFFER, reason)


def doubted_in(history: Sequence[Event]) -> dict[int, dict[str, Digest]]:
    """Steps after which replicas differed without a majority, and the digest of each node then; damage is left out."""
    found: dict[int, dict[str, Digest]] = {}
    settled: set[Any] = set()
    for event in history:
        facts = event.details
        if event.event == EventName.REPLICA_CONVICTED:
            settled.add(facts.get("step"))
        elif event.event == EventName.REPLICAS_DIFFER and isinstance(given := facts.get("digests"), dict):
            step = facts.get("step")
            if type(step) is int:
                found[step] = {
                    str(node): Digest(group=int(pair[0]), value=int(pair[1]))
                    for node, pair in given.items()
                    if isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)
                }
    return {step: digests for step, digests in found.items() if step not in settled}


def _noted(folder: Any, step: int, generation: int) -> None:
    try:
        note_verified(folder, step, generation)
    except (OSError, StorageError) as error:
        log.warning("step %d is not noted as verified: %s", step, error)
