"""From what workers and supervisors saw of nodes to the exclusion list, while the run goes on and at its ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection, Sequence

from slurmft.config.config import RunConfig
from slurmft.errors import SlurmError, StorageError
from slurmft.policy.nodes.evidence import Evidence, Kind
from slurmft.policy.nodes.suspicion import observed
from slurmft.policy.verdicts.judge import held_against
from slurmft.policy.verdicts.verdict import Verdict
from slurmft.storage.events import EventName
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.patience import FolderThread
from slurmft.supervisor.evidence import EvidenceReader
from slurmft.supervisor.recovery import avoided_nodes
from slurmft.supervisor.start import Start

EVERY_S = 10.0
LIST_S = 5.0
"""How long the exclusion list's filesystem may delay the end of an attempt."""

ON_PURPOSE = "a fault was injected on purpose; the exclusion list is not told"

log = logging.getLogger(__name__)


class Accuser:
    """Hands a run's evidence in, each piece once. In a thread of its own, so that a list that stalls blocks nothing."""

    def __init__(self, config: RunConfig, start: Start) -> None:
        self._config, self._run, self._journal = config, start.run, start.journal
        self._attempt = start.cluster.attempt
        self._is_local = start.cluster.name == "local"
        self._thread = FolderThread()
        self._list: ExclusionList | None = None
        self._reader = EvidenceReader(start.run.verdicts)
        self._waiting: list[tuple[str, Evidence]] = []
        """Evidence that the list did not take yet."""

        journaled = [event.details for event in start.history if event.event == EventName.EVIDENCE]
        self._told = {(facts.get("file"), facts.get("seen_at")) for facts in journaled}
        self._own: list[Evidence] = []
        """This attempt's."""

    async def watch(self) -> None:
        """Hand in what running workers write; a transient error must not wait for the end of the run."""
        while True:
            await asyncio.wrap_future(self._thread.submit(self._collect))
            await asyncio.sleep(EVERY_S)

    def add(self, evidence: Sequence[Evidence]) -> None:
        """Hand in what the supervisor itself has seen; returns at once."""
        self._thread.submit(lambda: self._hand_in(evidence, str(self._attempt)))

    def finish(self, verdict: Verdict, *, wait: bool = True) -> None:
        """Hand in the rest, and what the verdict itself says of its suspects. Later starts retry what fails."""

        def work() -> None:
            self._collect()
            added = held_against(verdict, self._own, at=time.time())[len(self._own) :]
            self._hand_in(added, str(self._attempt))

        if not wait:
            self._thread.submit(work)
            return
        try:
            self._thread.call(work, timeout_s=LIST_S)
        except StorageError as error:
            log.warning("the exclusion list did not take the evidence in time: %s", error.what)

    def _collect(self) -> None:
        self._waiting += [(name, each) for name, each in self._reader.new() if (name, each.at) not in self._told]
        while self._waiting:
            name, evidence = self._waiting[0]
            attempt = name.partition(".rank-")[0]
            if not self._hand_in([evidence], attempt, file=name):
                return
            del self._waiting[0]

    def _hand_in(self, evidence: Sequence[Evidence], attempt: str, *, file: str = "") -> bool:
        if not evidence:
            return True
        run, job = str(self._run.path), attempt.split(".", maxsplit=1)[0]
        where = str(self._run.verdicts / file) if file else ""
        try:
            on_purpose = self._on_purpose(attempt)
            if not self._is_local:  # a local machine is on no list
                real = [each for each in evidence if each.kind not in on_purpose]
                observations = [observed(each, source=attempt, run=run, job=job, where=where) for each in real]
                self._list = self._list or avoided_nodes.exclusion_list(self._config, os.environ)
                self._list.observe(observations)
        except (StorageError, SlurmError, OSError) as error:
            log.warning("the exclusion list cannot be written: %s", error)
            return False
        for each in evidence:
            if attempt == str(self._attempt):
                self._own.append(each)
            facts = {
                "gpu": each.suspect.gpu,
                "rank": each.suspect.rank,
                "step": each.step,
                "file": file,
                "reason": ON_PURPOSE if each.kind in on_purpose else "",
            }
            self._journal.append(
                EventName.EVIDENCE, kind=each.kind.value, node=each.suspect.node, message=each.message, seen_at=each.at,
                **{key: value for key, value in facts.items() if value not in ("", None)},
            )  # fmt: skip
        return True

    def _on_purpose(self, attempt: str) -> Collection[Kind]:
        """The kinds of its evidence that may come from a fault which ``slurmft inject`` or a simulation has ordered."""
        faults: dict[str, int] = {}
        with contextlib.suppress(OSError):  # of a full disk
            self._journal.flush(1.0)
        for event in self._journal.each(frozenset([EventName.FAULT_NOT_INJECTED.encode()])):
            if event is not None and event.attempt:
                missed = event.event == EventName.FAULT_NOT_INJECTED and {"ranks", "node"} & event.details.keys()
                faults.setdefault(event.attempt, 0)
                faults[event.attempt] += (event.event == EventName.FAULT_INJECTED) - bool(missed)
        before = [count for each, count in faults.items() if each != attempt][-1:]
        if faults.get(attempt):
            return tuple(Kind)
        return (Kind.REPLICA_DIFFERS, Kind.REPEATED_DEATH) if any(before) else ()  # they look back
