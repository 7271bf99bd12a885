"""Which of a rank's snapshots are copies of steps between saves: the one on its way, and the one that is needed."""

from __future__ import annotations

from dataclasses import dataclass

from slurmft.checkpoint.writer.write_requests import Report
from slurmft.storage.checkpoint_names import Identity


@dataclass(kw_only=True, slots=True)
class StepPlaces:
    """Of one rank. ``ended`` is written by the thread that hears of the writer, everything else by the trainer's."""

    current: Identity | None = None
    """The newest one that was handed to the writer."""

    needed: Identity | None = None
    """The newest one that all ranks have, with their peers: not written over before there is another."""

    ended: Report | None = None
    """Its writer's last word on the current one."""

    problem: str = ""
    """Why there is no place for any."""

    def begin(self, identity: Identity) -> None:
        """It goes to the writer now."""
        self.ended, self.current = None, identity

    def hear(self, report: Report) -> None:
        """Take in a report on the current one."""
        if report.final:
            self.ended = report
