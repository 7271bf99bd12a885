"""Which runs the user has submitted: links in a private folder of the state folder, the newest one by its time.

A link for each run, named by its path: two processes at once need no lock, and nothing of another user is ever read,
as a link says what is stopped and removed.
What cannot be noted is not found by its name elsewhere; no submission fails for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import replace_link
from slurmft.system.private_folder import is_private

log = logging.getLogger(__name__)

MAX_RUNS = 500
"""More are forgotten, the oldest first."""


def state_folder(environment: Mapping[str, str]) -> Path | None:
    """Where the user's state is: ``XDG_STATE_HOME``, or below the home folder; None where neither is known."""
    state = environment.get("XDG_STATE_HOME", "")
    try:
        return Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:
        return None


def note(run: Path, environment: Mapping[str, str]) -> None:
    """Note that the run was submitted now."""
    if (folder := _folder(environment)) is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            return
        replace_link(folder / _name_of(run), str(run.absolute()))
        for link in _links(folder)[MAX_RUNS:]:
            link.unlink(missing_ok=True)
    except OSError as error:
        log.debug("run %s is not noted in %s: %s", run, folder, error.strerror or error)


def forget(run: Path, environment: Mapping[str, str]) -> None:
    """Forget a run that was removed."""
    folder = _folder(environment)
    if folder is not None and is_private(folder):
        with contextlib.suppress(OSError):  # a link that leads nowhere is passed over
            (folder / _name_of(run)).unlink(missing_ok=True)


def noted_runs(environment: Mapping[str, str]) -> list[RunFolder]:
    """The runs that were submitted and are still there, or may be, where that cannot be seen; the newest first."""
    folder = _folder(environment)
    if folder is None or not is_private(folder):
        return []
    found = []
    try:
        links = _links(folder)[:MAX_RUNS]
    except OSError as error:
        log.warning("%s: %s; runs are found by their paths", folder, error.strerror or error)
        return []
    for link in links:
        with contextlib.suppress(OSError):  # removed meanwhile
            run = RunFolder(Path(os.readlink(link)))  # noqa: PTH115 - as it was noted, and not relative to the link
            if run.path.is_absolute() and run.may_exist():
                found.append(run)
    return found


def _folder(environment: Mapping[str, str]) -> Path | None:
    state = state_folder(environment)
    return None if state is None else state / "slurmft" / "runs"


def _name_of(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:32]


def _links(folder: Path) -> list[Path]:
    """The newest first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, by another submission
                if not entry.is_symlink():
                    continue
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]
