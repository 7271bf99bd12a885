"""Every error slurmft raises on purpose, and the exit code each one stands for.

SlurmftError (1)
+-- UsageError (2)                 bad configuration, bad arguments, unusable input; nothing was started
|   +-- ConfigError (2)
|   +-- DataError (2)              a trainer's input is missing, empty or unreadable
|   +-- RunBusy (2)                another live job owns the run
|   +-- DirectoryInUse (2)         another checkpoint manager of the process saves there
+-- LabError (1)                   the lab cluster could not do what was asked
|   +-- LabUnavailable (69)        no root, or Slurm's packages are missing
+-- SlurmError (1)                 Slurm answered no
|   +-- SlurmUnavailable (75)      Slurm did not answer: nothing is known, nothing was changed
+-- StorageError (1)               a shared file cannot be read, written or believed
|   +-- StorageUnavailable (75)    no space, read-only, or it does not answer: may pass by itself
|   +-- NewerFormat (1)            written by a newer slurmft
|   +-- Fenced (75)                this attempt is no longer the newest one of its run
+-- CheckpointError (1)            no checkpoint can be used although some exist
+-- LaunchError (75)               agents or workers could not be started
+-- RunFailed (1)                  a run that was waited for has ended without a result
"""

from __future__ import annotations

from typing import ClassVar


class SlurmftError(Exception):
    """Base of all; ``exit_code`` is part of the command line's contract."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what if not hint else f"{what}\n  hint: {hint}")
        self.what = what
        self.hint = hint


class UsageError(SlurmftError):
    """Bad configuration, bad arguments, or input that cannot be used; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration cannot be used; names every wrong key at once."""


class DataError(UsageError):
    """A trainer's input is missing, empty or unreadable."""


class RunBusy(UsageError):
    """Another live job owns the run; starting a second one would corrupt it."""


class DirectoryInUse(UsageError):
    """Another checkpoint manager of this process saves in the same directory; two would remove each other's saves."""


class LabError(SlurmftError):
    """The lab cluster could not do what was asked."""


class LabUnavailable(LabError):
    """The lab cannot exist here: no root, or Slurm's packages are missing."""

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h


class SlurmError(SlurmftError):
    """Slurm answered, and the answer was no."""


class SlurmUnavailable(SlurmError):
    """Slurm did not answer; nothing is known and nothing was changed. Safe to retry."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: cron and wrappers may try again


class StorageError(SlurmftError):
    """A shared file cannot be read, written or believed."""


class StorageUnavailable(StorageError):
    """The filesystem has no space, is read-only, or does not answer; files on it are unchanged."""

    exit_code = 75


class NewerFormat(StorageError):
    """The file was written by a newer slurmft; refusing beats misreading."""


class Fenced(StorageError):
    """A newer attempt owns the run; anything that this one still wrote would be stale."""

    exit_code = 75


class CheckpointError(SlurmftError):
    """Checkpoints exist but none can be used, or one cannot be written."""

    errno: int = 0
    """Why it cannot be written, where the operating system said so; the same on all ranks."""


class LaunchError(SlurmftError):
    """Agents or workers could not be started; another placement may work."""

    exit_code = 75


class RunFailed(SlurmftError):
    """A run has ended without the result that was waited for.

    Attributes:
        run_exit_code: the exit code of the run, as ``slurmft submit --wait`` has it.
        traceback: the end of the failed worker's traceback; empty where there is none.
    """

    def __init__(self, what: str, *, run_exit_code: int, traceback: str = "", hint: str = "") -> None:
        super().__init__(what + (f"\n{traceback}" if traceback else ""), hint=hint)
        self.run_exit_code = run_exit_code
        self.traceback = traceback
