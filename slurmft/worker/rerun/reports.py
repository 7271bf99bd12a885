"""The output of a rerun's outcome: log lines, evidence against hardware, and the verdict file of an exit."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.nodes.reruns import Outcome, Seen
from slurmft.policy.verdicts.verdict import EXIT_RERUN_ELSEWHERE, Cause
from slurmft.storage.verdicts import EVIDENCE_VARIABLE, VERDICT_VARIABLE, WorkerVerdict, add_evidence, write_verdict
from slurmft.worker.rerun.record import Rejection

log = logging.getLogger(__name__)

KINDS = {
    Outcome.TRANSIENT: Kind.RERUN_TRANSIENT,
    Outcome.UNDECIDED: Kind.RERUN_UNDECIDED,
    Outcome.PERSISTENT: Kind.RERUN_PERSISTENT,
    Outcome.CORRECT: Kind.RERUN_ACQUITTED,
}

LINES = {
    Outcome.TRANSIENT: (
        "First rerun: unexpected result is not reproducible within the tolerance",
        "Possible transient error!",
    ),
    Outcome.UNDECIDED: (
        "First rerun: unexpected result is reproducible within the tolerance",
        "Need to rerun on a different GPU to verify correctness",
    ),
    Outcome.PERSISTENT: (
        "Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect",
        "Possible persistent error!",
    ),
    Outcome.CORRECT: (
        "Second rerun: unexpected result is reproducible on a different GPU, therefore it was likely correct",
        "Correct result (but possible Application error)",
    ),
}

REJECTED_AGAIN = "First rerun: unexpected result is not reproducible within the tolerance, and was rejected again"
"""Instead of the first line where the rerun gave another result that is as unexpected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """The end of this worker: its exit code and verdict, the same on all ranks."""

    exit_code: int
    should_checkpoint: bool
    outcome: Outcome
    message: str
    suspects: tuple[Suspect, ...] = ()
    has_say: bool = True
    """Whether this rank writes the verdict: rank 0 and those that have rejected a result do."""

    def write_verdict(self) -> None:
        """Into the file that the agent has named, if any. Call it after the checkpoint, before the exit."""
        if not self.has_say or not (path := os.environ.get(VERDICT_VARIABLE)):
            return
        elsewhere = self.exit_code == EXIT_RERUN_ELSEWHERE
        verdict = WorkerVerdict(
            cause=Cause.RERUN_ELSEWHERE if elsewhere else Cause.VALIDATION_FAILED, message=self.message,
            suspects=self.suspects, rerun=self.outcome,
        )  # fmt: skip
        try:
            write_verdict(Path(path), verdict)
        except OSError as error:
            log.error("the verdict %r cannot be written to %s: %s", self.message, path, error)


def describe(rejections: Sequence[Rejection], iteration: int) -> str:
    """One line for people: the rejected results, and their ranks."""
    parts = []
    for one in rejections[:4]:
        value = one.values[0] if len(one.values) == 1 else f"{len(one.values)} values"
        where = ", ".join(suspect.node + (f" {suspect.gpu}" if suspect.gpu else "") for suspect in one.suspects[:4])
        parts.append(f"{one.message}: {value} on rank {one.rank}" + (f" ({where})" if where else ""))
    more = f" and on {len(rejections) - 4} more ranks" if len(rejections) > 4 else ""
    return f"{'; '.join(parts)}{more} at step {iteration}"


def report(outcome: Outcome, rejection: Rejection, iteration: int, seen: Seen) -> None:
    """The log lines, and one piece of evidence for each suspect. A full disk costs the evidence, not the training."""
    first, second = LINES[outcome]
    log.warning("%s", REJECTED_AGAIN if outcome is Outcome.UNDECIDED and seen is Seen.DIFFERENT_REJECTED else first)
    log.warning("%s", second)
    path = os.environ.get(EVIDENCE_VARIABLE)
    for suspect in rejection.suspects:
        message = f"{describe([rejection], iteration)}: {outcome}"
        log.warning("evidence: %s, %s: %s", KINDS[outcome], suspect.node, message)
        if path:
            evidence = Evidence(
                kind=KINDS[outcome], suspect=suspect, message=message, at=time.time(), step=iteration
            )  # fmt: skip
            try:
                add_evidence(Path(path), evidence)
            except OSError as error:
                log.error("it cannot be written to %s: %s", path, error)
