"""From what workers and supervisors saw of nodes to the exclusion list, while the run goes on and at its ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from slurmft.config import RunConfig
from slurmft.errors import SlurmError, StorageError
from slurmft.launch import avoidance
from slurmft.launch.start import Start
from slurmft.policy.evidence import Evidence, Kind, Suspect
from slurmft.policy.suspicion import observed
from slurmft.policy.verdict import Cause, Verdict
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.patience import FolderThread
from slurmft.storage.verdicts import read_evidence

EVERY_S = 10.0
LIST_S = 5.0
"""How long the exclusion list's filesystem may keep the end of an attempt."""

KIND_OF = {
    Cause.NODE_LOST: Kind.NODE_LOST,
    Cause.SIGNAL_CRASH: Kind.CRASH,
    Cause.HANG: Kind.HANG,
    Cause.HOST_OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Cause.DEVICE_OUT_OF_MEMORY: Kind.OUT_OF_MEMORY,
    Cause.COMMUNICATION_ERROR: Kind.COMMUNICATION,
    Cause.RERUN_ELSEWHERE: Kind.RERUN_UNDECIDED,
    Cause.STRAGGLER: Kind.STRAGGLER,
}
"""What a verdict says of its suspects; other causes say nothing about hardware."""

log = logging.getLogger(__name__)


class Accuser:
    """Hands a run's evidence in, each piece once."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        self._config, self._run, self._journal = config, start.run, start.journal
        self._folder, self._attempt = start.thread, start.cluster.attempt
        self._thread = FolderThread()  # the list may lie on another filesystem than the run folder
        self._list: ExclusionList | None = None
        self._told = {
            (str(event.details.get("file")), event.details.get("line"))
            for event in start.history
            if event.event == "evidence"
        }
        self._seen: set[tuple[Kind, str]] = set()
        """Kinds and nodes of this attempt's own evidence."""

    async def watch(self) -> None:
        """Hand in what workers write while they go on; a transient error must not wait for the end of the run."""
        while True:
            await asyncio.to_thread(self.collect)
            await asyncio.sleep(EVERY_S)

    def collect(self) -> None:
        """Hand in all evidence of the run's workers that was not yet. Blocking; what fails is tried the next time."""
        try:
            found = self._folder.call(self._new_evidence, timeout_s=LIST_S)
        except (StorageError, OSError) as error:
            log.warning("the evidence of the workers cannot be read: %s", error)
            return
        for name, number, evidence in found:
            attempt = name.partition(".rank-")[0]
            if self._hand_in([evidence], attempt, where=str(self._run.verdicts / name), file=name, line=number):
                self._told.add((name, number))

    def convict(self, verdict: Verdict) -> None:
        """Hand in what a verdict says of its suspects, unless their own evidence has said it. Blocking."""
        kind = KIND_OF.get(verdict.cause)
        if kind is None:
            return
        suspects = verdict.suspects
        if not suspects and kind is Kind.CRASH and verdict.node:
            suspects = (Suspect(node=verdict.node, rank=verdict.rank),)
        self._hand_in(
            [
                Evidence(
                    kind=kind, suspect=suspect, message=verdict.reason[:1000], at=time.time(), step=verdict.last_step
                )
                for suspect in suspects
                if (kind, suspect.node) not in self._seen
            ],
            str(self._attempt),
        )

    def _new_evidence(self) -> list[tuple[str, int, Evidence]]:
        found = []
        for path in sorted(self._run.verdicts.glob("*.evidence.jsonl")):
            for number, evidence in enumerate(read_evidence(path)):
                if evidence is not None and (path.name, number) not in self._told:
                    found.append((path.name, number, evidence))
        return found

    def _hand_in(self, evidence: Sequence[Evidence], attempt: str, *, where: str = "", **facts: Any) -> bool:
        if not evidence:
            return True
        run, job = str(self._run.path), attempt.split(".", maxsplit=1)[0]
        observations = [observed(each, source=attempt, run=run, job=job, where=where) for each in evidence]

        def work() -> None:
            self._list = self._list or avoidance.exclusion_list(self._config)
            self._list.observe(observations)

        try:
            self._thread.call(work, timeout_s=LIST_S)
        except (StorageError, SlurmError, OSError) as error:
            log.warning("the exclusion list cannot be written: %s", error)
            return False
        for each in evidence:
            if attempt == str(self._attempt):
                self._seen.add((each.kind, each.suspect.node))
            self._journal.append("evidence", kind=each.kind.value, node=each.suspect.node, gpu=each.suspect.gpu or None,
                                 rank=each.suspect.rank, step=each.step, message=each.message, **facts)  # fmt: skip
        return True
