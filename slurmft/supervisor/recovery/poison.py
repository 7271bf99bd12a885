"""Checkpoints from which runs die: their record in the journal, and the mark that quarantines them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.config.config import RunConfig
from slurmft.policy.checkpoints.poison import COUNTING, Hopeless, NodeSuspected, Poisoned, Trial, examine
from slurmft.policy.nodes.evidence import Evidence, Kind, Suspect
from slurmft.policy.verdicts.decide import HOPELESS
from slurmft.policy.verdicts.verdict import Verdict
from slurmft.storage.attempt_facts import noted_resuming
from slurmft.storage.checkpoint_names import Identity, Quarantine, usable, write_quarantine
from slurmft.storage.events import EventName
from slurmft.storage.journal import Event
from slurmft.supervisor.recovery.exclusions import Accuser
from slurmft.supervisor.recovery.requeue import in_folder
from slurmft.supervisor.start import Start


class Poisoning:
    """Looks at how an attempt ended that had begun with a checkpoint."""

    def __init__(self, config: RunConfig, start: Start, accuser: Accuser) -> None:
        self._config, self._start, self._accuser = config, start, accuser
        self._folder = start.run.attempts / str(start.cluster.attempt)

    def look_at(self, verdict: Verdict) -> Poisoned | NodeSuspected | Hopeless | None:
        """What ``verdict`` says of the checkpoint, as far as it has been acted on: a checkpoint is marked when this
        returns Poisoned, and the exclusion list knows of a node that is suspected. None: nothing follows."""
        counts = verdict.cause in COUNTING and verdict.exit_code not in HOPELESS
        name = in_folder(self._start, lambda: noted_resuming(self._folder)) if counts or verdict.progressed else None
        if (identity := Identity.parse(name or "")) is None:
            return None
        newest = Trial(
            checkpoint=identity.folder_name, step=identity.step, cause=verdict.cause.value,
            nodes=frozenset([verdict.node] if verdict.node else verdict.suspect_nodes), committed=verdict.progressed,
        )  # fmt: skip
        attempt = str(self._start.cluster.attempt)
        earlier = [event for event in self._start.history if event.attempt != attempt]
        trials = [*trials_of(earlier), newest]
        if newest.committed and all(trial.checkpoint != newest.checkpoint for trial in trials[:-1]):
            return None  # as expected, and not new
        self._start.journal.append(
            EventName.CHECKPOINT_TRIED, checkpoint=newest.checkpoint, cause=newest.cause, nodes=sorted(newest.nodes),
            committed=newest.committed,
        )  # fmt: skip
        section = self._config.fault_tolerance
        found = examine(
            trials,
            poison_after=section.poison_after,
            quarantined=quarantined_in(earlier),
            max_quarantines=section.max_no_progress_cycles,
            alone=self._start.cluster.name == "local",
        )
        if isinstance(found, Poisoned):
            return self._quarantine(newest, found)
        if isinstance(found, NodeSuspected):
            suspect = Suspect(node=found.node)
            self._accuser.add(
                [Evidence(kind=Kind.REPEATED_DEATH, suspect=suspect, message=found.reason, at=time.time())]
            )
        return found

    def _quarantine(self, trial: Trial, found: Poisoned) -> Poisoned | Hopeless | None:
        directory = self._config.checkpoint_dir
        from_scratch = self._config.fault_tolerance.poison_from_scratch
        names = in_folder(self._start, lambda: usable(directory))
        if names is None:
            return None  # the folder cannot be read; the next failure asks again
        left = [name for name in names if name != trial.checkpoint]
        if not left and not from_scratch:
            why = "there is no other checkpoint, and fault_tolerance.poison_from_scratch is false"
            return Hopeless(reason=f"{found.reason}; {why}")
        mark = Quarantine(reason=found.reason, from_scratch=from_scratch)
        if not in_folder(self._start, lambda: _written(directory / trial.checkpoint, mark)):
            return None
        then = f"next from {left[0]}" if left else "next from the beginning"
        self._start.journal.append(
            EventName.CHECKPOINT_QUARANTINED, checkpoint=trial.checkpoint, step=trial.step, reason=found.reason
        )
        return Poisoned(reason=f"{found.reason}; it is quarantined, {then}")


def _written(checkpoint: Path, mark: Quarantine) -> bool:
    write_quarantine(checkpoint, mark)
    return True


def trials_of(history: Sequence[Event]) -> list[Trial]:
    """Trials in the journal, oldest first; damaged entries are left out."""
    found = []
    for event in history:
        facts = event.details
        if (
            event.event == EventName.CHECKPOINT_TRIED
            and (identity := Identity.parse(str(facts.get("checkpoint")))) is not None
        ):
            nodes = facts.get("nodes")
            found.append(
                Trial(
                    checkpoint=identity.folder_name,
                    step=identity.step,
                    cause=str(facts.get("cause")),
                    nodes=frozenset(map(str, nodes if isinstance(nodes, list) else [])),
                    committed=facts.get("committed") is True,
                )
            )
    return found


def quarantined_in(history: Sequence[Event]) -> list[int]:
    """Steps of checkpoints that were quarantined since the run last saved a step beyond them all."""
    steps: list[int] = []
    for event in history:
        step, saved = event.details.get("step"), event.details.get("saved_step")
        if event.event == EventName.CHECKPOINT_QUARANTINED and type(step) is int:
            steps.append(step)
        elif event.event == EventName.VERDICT and type(saved) is int and saved > max(steps, default=saved):
            steps = []
    return steps
