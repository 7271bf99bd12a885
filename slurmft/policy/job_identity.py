"""Which job an id means: ids are reused after a controller has lost its state or when its counter wraps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CLOCKS_S = 600.0
"""How far the clock of a node or login host may be from the controller's."""

MAX_SUBMISSIONS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Distinguishes a job from another one with the same id. None, or empty where None is not possible: not known."""

    user: int | None = None
    """User id."""

    cluster: str = ""
    name: str = ""
    script: str | None = None
    """The batch script and its arguments as Slurm shows them; empty for a job without one (``--wrap``)."""

    folder: str | None = None
    """Its work folder."""

    submitted: tuple[float, ...] = ()
    """Unix times at which it was submitted and requeued, by the controller's clock, the first one first."""

    restarts: int | None = None
    """How often it was requeued, as far as this was seen."""

    begun: float | None = None
    """Unix time, by another clock than the controller's, at which it had been submitted."""

    own_script: bool = False
    """The script lies in the folder of the run alone, so that no job of another run can have it."""

    def as_json(self) -> dict[str, Any]:
        """For a state file: the lasting facts."""
        return {
            "user": self.user, "cluster": self.cluster, "name": self.name, "script": self.script,
            "folder": self.folder, "submitted": list(self.submitted), "own_script": self.own_script,
        }  # fmt: skip


NOTHING_KNOWN = JobIdentity()


@dataclass(frozen=True, slots=True)
class OwnJob:
    """A job of a run: its id, and its recorded identity."""

    job_id: str
    known: JobIdentity = NOTHING_KNOWN

    def __str__(self) -> str:
        return self.job_id


def identity_from(value: Mapping[str, Any]) -> JobIdentity:
    """The identity that ``as_json`` wrote; nothing is known of one that is damaged."""
    import msgspec  # as in ``files.read_as``

    try:
        return msgspec.convert(value, JobIdentity)
    except ValueError:
        return NOTHING_KNOWN


def is_same_job(known: JobIdentity, seen: JobIdentity) -> bool | None:
    """Whether the job that Slurm shows is the one that is known; None where only its restarts would decide.

    A requeue changes a job's time of submission, and its owner may rename it or move its work folder while it waits.
    Its user and its script stay; and a job that was never requeued has the time of its first submission.
    """
    if None not in (known.user, seen.user) and known.user != seen.user:
        return False
    if known.cluster and seen.cluster and known.cluster.lower() != seen.cluster.lower():
        return False
    if known.script is not None and seen.script is not None and not _same_words(known.script, seen.script):
        return False
    if set(known.submitted) & set(seen.submitted):
        return True
    if known.own_script and known.script is not None and seen.script is not None:
        return True
    return _by_time(known, seen)


def _same_words(one: str, other: str) -> bool:
    """Versions and commands of Slurm differ in how many of a script's arguments they show."""
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or (bool(shorter) and longer.startswith(f"{shorter} "))


def _by_time(known: JobIdentity, seen: JobIdentity) -> bool | None:
    if not seen.submitted:
        return True
    first, at = min(known.submitted, default=None), seen.submitted[-1]
    if first is None:
        late = known.begun is not None and at > known.begun + CLOCKS_S
        return True if not late else {None: None, 0: False}.get(seen.restarts, True)
    if at < first:
        return False
    if seen.restarts is None:
        return None
    # requeued since it was last seen
    renamed = bool(known.name and seen.name) and known.name != seen.name
    moved = None not in (known.folder, seen.folder) and known.folder != seen.folder
    return seen.restarts > 0 and not (renamed and moved)


def merged(known: JobIdentity, seen: JobIdentity) -> JobIdentity:
    """The identity of a job after it was seen once more."""
    times = dict.fromkeys([*known.submitted, *seen.submitted])
    return replace(
        seen,
        user=known.user if seen.user is None else seen.user,
        cluster=seen.cluster or known.cluster,
        name=seen.name or known.name,
        script=known.script if seen.script is None else seen.script,
        folder=known.folder if seen.folder is None else seen.folder,
        submitted=tuple([*list(times)[:1], *list(times)[1:][-MAX_SUBMISSIONS:]]),
        own_script=known.own_script or seen.own_script,
        begun=None,
        restarts=None,
    )
