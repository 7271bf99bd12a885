"""The lease of a run's supervisor in the run folder, where a standby of the same start of the job watches it.

Two files beside the attempts: one is touched, the other names the standby that may claim the run and where it finds the
supervisor. A claim is made with the run's lock held.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.storage import signs_of_life
from slurmft.storage.patience import writing
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.system.files import replace_atomically
from slurmft.system.opening import open_regular, read_bytes, trusted_owners


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a supervisor tells its standby."""

    hosts: tuple[str, ...]
    port: int
    secret: str = field(repr=False)
    standby: str
    """The token of the one standby that may claim the run."""


class Lease:
    """The lease of one start of a job."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        self._run = run
        name = f"{attempt.job}.{attempt.restart}"
        self._touched = run.attempts / f"{name}.lease"
        self._terms = run.attempts / f"{name}.lease.json"

    def renew(self) -> None:
        """Note that the supervisor lives.

        Raises:
            OSError: the run folder cannot be written.
        """
        descriptor = open_regular(self._touched, os.O_WRONLY | os.O_CREAT)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def age_s(self) -> float | None:
        """Seconds since it was renewed, by the file server's clock; None where that cannot be told."""
        try:
            return signs_of_life.seconds_since(self._run, self._touched)
        except StorageError:
            return None

    def write(self, terms: Terms) -> None:
        """Name the standby, in place of an earlier one.

        Raises:
            StorageError: the run folder cannot be written.
        """
        with writing(self._terms):
            replace_atomically(self._terms, json.dumps(asdict(terms)))

    def read(self) -> Terms | None:
        """The newest terms; None where there are none that can be read."""
        try:
            told = json.loads(read_bytes(self._terms, owners=trusted_owners(self._terms.parent)))
            return _parsed(told)
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None

    @property
    def path(self) -> Path:
        """The file that is touched."""
        return self._touched


def _parsed(told: Mapping[str, object]) -> Terms:
    hosts, port = told["hosts"], told["port"]
    if not isinstance(hosts, list) or type(port) is not int:
        raise TypeError("no address")
    return Terms(hosts=tuple(map(str, hosts)), port=port, secret=str(told["secret"]), standby=str(told["standby"]))
