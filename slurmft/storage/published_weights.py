"""Which weights the engines of an endpoint are to serve: the newest that a trainer has published.

``weights.json`` in the endpoint's run folder, replaced atomically under a lock. A trainer that begins again from a
checkpoint begins a new branch: its versions may be lower, and weights of the branch before count no more, also with
a higher version.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from slurmft.errors import Fenced, StorageError, UsageError
from slurmft.policy.serving import Served
from slurmft.storage.patience import SoftLock, patiently, translated, write_state
from slurmft.storage.queue import PATIENCE_S, QUEUES_VARIABLE
from slurmft.storage.verdicts import GENERATION_VARIABLE, RUN_FOLDER_VARIABLE
from slurmft.system.files import MOVE_AWAY, read_as, trusted_owners
from slurmft.system.processes import birth_of

WEIGHTS_FILE = "weights.json"
LIMIT_BYTES = 1 << 16
LOCK_S = 30.0
WEIGHTS_LOOK_S = 0.25
"""Between two looks of a router or a replica."""

MOST = 2**53
"""Above it JSON's readers do not agree on a number."""

_ROLE = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One publication."""

    path: str
    version: int
    branch: int
    """Grows with each trainer that begins, or begins again, to publish; versions grow within one."""

    writer: str
    run: str
    """Run folder of the writer, and ..."""

    generation: int
    """... of its attempt there."""

    at: str
    """When, in UTC."""

    @property
    def served(self) -> Served:
        """As an engine that has them says it."""
        return Served(self.branch, self.version)


def read_published(run_folder: Path) -> Published | None:
    """The newest publication for this endpoint; None before the first.

    Raises:
        StorageError: the file cannot be read or believed.
    """
    path = run_folder / WEIGHTS_FILE
    try:
        found = read_as(Published, path, limit_bytes=LIMIT_BYTES, owners=trusted_owners(run_folder))
    except OSError as error:
        raise translated(f"cannot read {path}", error) from error
    if found is not None and not (
        0 <= found.version < MOST and 0 < found.branch < MOST and found.path.startswith("/") and "\0" not in found.path
    ):
        raise StorageError(f"{path} is damaged: no weights are at {found.path!r} with the version {found.version}",
                           hint=MOVE_AWAY)  # fmt: skip
    return found


def publish_weights(path: str | Path, *, version: int, to: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Have the engines of an endpoint take the weights at ``path``, which are whole; returns once that is durable.

    Rank 0 publishes; on other ranks nothing happens. Engines take them soon after, and each that starts later before
    its first request: keep the files until a newer publication was taken. A trainer that has loaded a checkpoint
    publishes what it has loaded: until then engines serve the weights of steps that are not done any more.

    Args:
        path: a file or folder on the shared filesystem.
        version: grows within one trainer's life, as its steps do; from 0 on.
        to: a role of this job that is an endpoint; or the run folder of an endpoint, where it is a ``Path`` or has a
            ``/``.
        patience_s: how long a filesystem that is full or away is waited for, in seconds.

    Raises:
        UsageError: nothing is at ``path``, the version does not grow, or ``to`` is no endpoint's.
        Fenced: a newer attempt of this run has published.
        StorageUnavailable: the filesystem was full or away for longer than ``patience_s``.
        StorageError: what was published before cannot be believed, or the folder cannot be written.
    """
    if type(version) is not int or not 0 <= version < MOST:
        raise UsageError(f"the version of weights is a whole number from 0 on, not {version!r}")
    folder, where = _endpoint(to), Path(path).absolute()
    if os.environ.get("RANK", "0") != "0":
        return
    if not where.exists():
        raise UsageError(f"there are no weights at {where}", hint="write them first, then publish them")
    writer = f"{os.uname().nodename}/{os.getpid()}/{birth_of(os.getpid())}"
    run, generation = os.environ.get(RUN_FOLDER_VARIABLE, ""), int(os.environ.get(GENERATION_VARIABLE) or 0)

    def publish() -> None:
        with SoftLock(folder / f"{WEIGHTS_FILE}.lock").hold(LOCK_S):
            before = read_published(folder)
            if before is not None and before.run == run and before.generation > generation:
                raise Fenced(f"a newer attempt of {run or 'this program'} has published weights to {folder}")
            is_mine = before is not None and before.writer == writer
            branch = 1 if before is None else before.branch + (not is_mine)
            if before is not None and is_mine and before.version >= version:
                if (before.version, before.path) == (version, str(where)):
                    return  # tried again after an error
                raise UsageError(f"version {version} of weights does not follow {before.version}",
                                 hint="versions grow while a trainer lives")  # fmt: skip
            new = Published(path=str(where), version=version, branch=branch, writer=writer, run=run,
                            generation=generation, at=datetime.now(UTC).isoformat())  # fmt: skip
            write_state(folder / WEIGHTS_FILE, asdict(new))

    patiently(publish, patience_s=patience_s)


def _endpoint(to: str | Path) -> Path:
    if isinstance(to, Path) or os.sep in to:
        folder = Path(to).absolute()
    elif not _ROLE.fullmatch(to):
        raise UsageError(f"{to!r} is no name of a role")
    elif not (queues := os.environ.get(QUEUES_VARIABLE)):
        raise UsageError(f"the role {to!r} belongs to a job of roles, and this process to none",
                         hint="give the run folder of the endpoint")  # fmt: skip
    else:
        folder = Path(queues).absolute().parent / "roles" / to
    if not (folder / "config.yaml").exists():
        raise UsageError(f"no endpoint has begun in {folder}", hint="name its role in needs")
    return folder
