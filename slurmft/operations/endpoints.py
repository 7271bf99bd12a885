"""An endpoint from outside of its job: its secrets, which router lives, as a client finds out, and its updates."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slurmft.errors import LaunchError, StorageError, UsageError
from slurmft.inference.endpoint import (
    HighAvailabilityCluster,
    State,
    ask,
    headers_file,
    prepare,
    prepare_authority,
    read_update,
    write_update,
)
from slurmft.operations.control import is_alive
from slurmft.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig

TRY_S = 2.0
LOOK_AT_UPDATE_S = 0.2
ALIVE_S = 10.0
"""How often an update that waits for its end looks whether the run has one."""


def prepare_endpoint(settings: RunConfig) -> Path:
    """Make the run folder and the secrets of the endpoint; returns the file with the header that has the token.

    Raises:
        UsageError: the user's token cannot be used, or no certificate be made.
        StorageError: the run folder cannot be written.
    """
    if settings.serving is None:
        raise TypeError("this configuration has no section inference.serving")
    run = RunFolder(settings.run_folder)
    run.create()
    prepare(run.path, settings.serving.token_file)
    if settings.serving.tls_own:
        prepare_authority(run.path)
    return headers_file(run.path)


def living_url(run: RunFolder, *, within_s: float = 0.0) -> str:
    """The address of a router that takes connections.

    Raises:
        LaunchError: there is none within these seconds.
        StorageError: ``endpoints.json`` cannot be read or believed.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        cluster = HighAvailabilityCluster.read(run.path)
        for url in [url for router in cluster.routers for url in router.urls]:
            if _answers(url):
                return url
        if time.monotonic() >= deadline_s:
            names = ", ".join(each.node for each in cluster.routers)
            what = f"none of its routers answers ({names})" if names else "it has no router at the moment"
            raise LaunchError(f"the endpoint {run.path.name} cannot be reached: {what}",
                              hint=f"slurmft status {run.path}; slurmft explain {run.path}")  # fmt: skip
        time.sleep(LOOK_AT_UPDATE_S)


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=TRY_S).close()
    except OSError:
        return False
    return True


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
    from slurmft.config.run import load  # more than other verbs need
    from slurmft.policy.serving import changed_keys, refused_keys

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
    if not is_alive(run):
        raise UsageError(f"run {run.path.name} is not running", hint="slurmft serve without --update starts it")
    asked, told = ask(run, settings.as_yaml()), ""
    tell(f"update {asked.number} of {run.path.name}: {', '.join(keys)}")
    looked_s = time.monotonic()
    while True:
        time.sleep(LOOK_AT_UPDATE_S)
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
            if not is_alive(run):
                _undo(run, asked.number)
                raise LaunchError(f"run {run.path.name} ended before update {asked.number} was done; "
                                  "its next start has the old engine")  # fmt: skip


def _undo(run: RunFolder, number: int) -> None:
    with run.lock():
        found = read_update(run)
        if found is not None and found.number == number and found.is_open:
            write_update(run, replace(found, state=State.BACK, reason="the run ended"))
