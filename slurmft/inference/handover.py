"""Handovers and updates of an endpoint, in its run folder."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from slurmft.errors import UsageError
from slurmft.storage.patience import write_state, writing
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import read_as, replace_atomically

# --- ``handover.json`` of a run folder: the job to which the owner wants to hand an endpoint over ---
# While it names a predecessor that owns the run, the successor is a candidate: it may start agents and replicas beside
# the owner, and becomes the owner by a newer generation alone. Removing the file calls the handover off. It is read and
# changed with the run's lock held.

HANDOVER_FILE = "handover.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """One handover."""

    predecessor: str
    """Job that owns the run."""

    successor: str = ""
    """Job that is to take it over; empty while sbatch has not answered, and no job has presented itself."""

    reason: str = ""
    tries: int = 1
    waits: str = ""
    """Why the successor has no nodes yet, in words; empty once it has."""


def read_handover(run_folder: Path) -> Handover | None:
    """The handover that is under way, or was the last one; None where there is none.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    return read_as(Handover, run_folder / HANDOVER_FILE)


def write_handover(run_folder: Path, handover: Handover) -> None:
    """Begin one, or note what has become of it.

    Raises:
        StorageError: the run folder cannot be written.
    """
    write_state(run_folder / HANDOVER_FILE, asdict(handover))


def call_off(run_folder: Path) -> None:
    """A candidate may not take the run over any more.

    Raises:
        StorageError: the run folder cannot be written.
    """
    path = run_folder / HANDOVER_FILE
    with writing(path):
        path.unlink(missing_ok=True)


# --- ``updates/`` of a run folder: the rolling update that is asked for, under way, or was the last one ---
# state.json       its number and what has become of it
# update-3.yaml    the whole configuration of update 3; never changed once it is there
#
# ``config.yaml`` of the run is replaced by it when the last replica is ready, and only then: it decides what the next
# start uses. State and configuration are changed with the run's lock held.

OWN_CONFIG = "config.yaml"
"""The run's configuration, as a path in its folder."""


class State(StrEnum):
    """What has become of an update."""

    ASKED = "asked for"
    ROLLING = "rolling"
    DONE = "done"
    BACK = "went back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update."""

    number: int
    state: State
    reason: str = ""
    """Why it went back."""

    renewed: int = 0
    total: int = 0
    """Replicas with the new engine, and all."""

    @property
    def is_open(self) -> bool:
        """Whether it is neither done nor undone."""
        return self.state in (State.ASKED, State.ROLLING)


def read_update(run: RunFolder) -> Update | None:
    """The newest update; None before the first.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    return read_as(Update, _folder(run) / "state.json")


def write_update(run: RunFolder, update: Update) -> None:
    """Note what has become of it. Call with the lock held.

    Raises:
        StorageError: the run folder cannot be written.
    """
    write_state(_folder(run) / "state.json", asdict(update))


def ask(run: RunFolder, text: str) -> Update:
    """Ask the run for an update to the configuration ``text``.

    Raises:
        UsageError: there is one already.
        StorageError: the run folder cannot be read or written.
    """
    with run.lock():
        before = read_update(run)
        if before is not None and before.is_open:
            raise UsageError(f"update {before.number} of {run.path.name} is {before.state.value}",
                             hint=f"slurmft status {run.path}")  # fmt: skip
        update = Update(number=before.number + 1 if before else 1, state=State.ASKED)
        with writing(_folder(run)):
            _folder(run).mkdir(mode=0o700, exist_ok=True)
            replace_atomically(run.path / config_name(update.number), text)
        write_update(run, update)
        return update


def config_name(number: int) -> str:
    """The configuration of an update, as a path in the run folder."""
    return f"updates/update-{number}.yaml"


def is_config_name(name: str) -> bool:
    """Whether it is one, or the run's own."""
    return name == OWN_CONFIG or re.fullmatch(r"updates/update-[0-9]{1,9}\.yaml", name, re.ASCII) is not None


def _folder(run: RunFolder) -> Path:
    return run.path / "updates"
