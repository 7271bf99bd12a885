"""From what workers and supervisors saw of nodes to the exclusion list, while the run goes on and at its ends."""

from __future__ import annotations

import asyncio
import logging
import os
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
    """Hands a run's evidence in, each piece once. In a thread of its own: nobody waits for a list that stalls."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        self._config, self._run, self._journal = config, start.run, start.journal
        self._attempt = start.cluster.attempt
        self._thread = FolderThread()
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
            await asyncio.wrap_future(self._thread.submit(self._collect))
            await asyncio.sleep(EVERY_S)

    def add(self, evidence: Sequence[Evidence]) -> None:
        """Hand in what the supervisor itself has seen; returns at once."""
        self._thread.submit(lambda: self._hand_in(evidence, str(self._attempt)))

    def finish(self, verdict: Verdict) -> None:
        """Hand in the rest, and what the verdict itself says of its suspects. What cannot be, later starts try."""

        def work() -> None:
            self._collect()
            self._convict(verdict)

        try:
            self._thread.call(work, timeout_s=LIST_S)
        except StorageError as error:
            log.warning("the exclusion list did not take the evidence in time: %s", error.what)

    def _collect(self) -> None:
        try:
            found = self._new_evidence()
        except OSError as error:
            log.warning("the evidence of the workers cannot be read: %s", error)
            return
        for name, number, evidence in found:
            attempt = name.partition(".rank-")[0]
            if self._hand_in([evidence], attempt, where=str(self._run.verdicts / name), file=name, line=number):
                self._told.add((name, number))

    def _convict(self, verdict: Verdict) -> None:
        kind = KIND_OF.get(verdict.cause)
        if kind is None:
            return
        suspects = verdict.suspects
        if not suspects and kind is Kind.CRASH and verdict.node:
            suspects = (Suspect(node=verdict.node, rank=verdict.rank),)
        accused = [suspect for suspect in suspects if (kind, suspect.node) not in self._seen]
        message, now, step = verdict.reason[:1000], time.time(), verdict.last_step
        evidence = [Evidence(kind=kind, suspect=each, message=message, at=now, step=step) for each in accused]
        self._hand_in(evidence, str(self._attempt))

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
        try:
            self._list = self._list or avoidance.exclusion_list(self._config, os.environ)
            self._list.observe(observations)
        except (StorageError, SlurmError, OSError) as error:
            log.warning("the exclusion list cannot be written: %s", error)
            return False
        for each in evidence:
            if attempt == str(self._attempt):
                self._seen.add((each.kind, each.suspect.node))
            self._journal.append("evidence", kind=each.kind.value, node=each.suspect.node, gpu=each.suspect.gpu or None,
                                 rank=each.suspect.rank, step=each.step, message=each.message, **facts)  # fmt: skip
        return True
