"""``slurmft serve --update``: asks a running endpoint for another engine, and waits for what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmft.config.config import RunConfig, load
from slurmft.errors import LaunchError, StorageError, UsageError
from slurmft.inference.serving.updates import State, ask, read_update, write_update
from slurmft.operations import control
from slurmft.policy.inference.update import changed_keys, refused_keys
from slurmft.storage.run_folder import RunFolder

LOOK_S, ALIVE_S = 0.5, 10.0


def engine_keys(settings: RunConfig) -> list[str]:
    """The settings that an update to ``settings`` changes.

    Raises:
        UsageError: none, or one that only another submission can change.
        StorageError: there is no such run.
    """
    run = RunFolder(settings.run_folder)
    if not run.config.is_file():
        raise UsageError(f"{run.path} is no endpoint yet", hint="slurmft serve without --update starts it")
    run.refuse_foreign()
    changed = changed_keys(load(run.config).model_dump(mode="json"), settings.model_dump(mode="json"))
    if refused := refused_keys(changed):
        raise UsageError(
            f"an update changes the engine alone, but these differ as well: {', '.join(refused)}",
            hint=f"slurmft stop {run.path}, and serve again",
        )
    if not changed:
        raise UsageError(f"{run.path.name} has this engine already")
    return changed


def update_engine(settings: RunConfig, tell: Callable[[str], None]) -> str:
    """Have the endpoint's replicas replaced; what has become of it, in words.

    Raises:
        UsageError: that cannot be updated, or an update is under way.
        LaunchError: it went back to the old engine, or the run ended first.
        StorageError: the run folder cannot be read or written.
    """
    keys, run = engine_keys(settings), RunFolder(settings.run_folder)
    if not control.is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint="slurmft serve without --update starts it")
    asked, told = ask(run, settings.as_yaml()), ""
    tell(f"update {asked.number} of {run.path.name}: {', '.join(keys)}")
    looked_s = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        seen = read_update(run)
        if seen is None or seen.number != asked.number:
            raise StorageError(f"update {asked.number} of {run.path.name} is not recorded any more")
        if seen.state is State.DONE:
            return f"update {seen.number} is done: all {seen.total} replicas have the new engine"
        if seen.state is State.BACK:
            raise LaunchError(f"update {seen.number} went back to the old engine: {seen.reason}",
                              hint=f"slurmft explain {run.path}")  # fmt: skip
        words = f"{seen.renewed} of {seen.total} replicas have the new engine"
        if seen.state is State.ROLLING and words != told:
            told = words
            tell(words)
        if time.monotonic() - looked_s > ALIVE_S:
            looked_s = time.monotonic()
            if not control.is_alive(run):
                _undo(run, asked.number)
                raise LaunchError(f"run {run.path.name} ended before update {asked.number} was done; "
                                  "its next start has the old engine")  # fmt: skip


def _undo(run: RunFolder, number: int) -> None:
    with run.lock():
        found = read_update(run)
        if found is not None and found.number == number and found.is_open:
            write_update(run, type(found)(number=number, state=State.BACK, reason="the run ended"))
