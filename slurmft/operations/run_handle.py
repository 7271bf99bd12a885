"""slurmft from Python: ``slurmft.submit`` and the handle of a run, for notebooks, sweeps and scripts."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle

from slurmft.config.run import RunConfig, from_values, load
from slurmft.errors import LaunchError, RunFailed, StorageError, UsageError
from slurmft.inference import endpoint
from slurmft.operations import control
from slurmft.operations.control import Overview, account_of, exit_code_of, has_ended, logs_of, overviews, story
from slurmft.operations.run_configuration import load_given
from slurmft.operations.submit import Submitted, read_requests, submit_run
from slurmft.policy.serving import changed_keys, refused_keys
from slurmft.scheduler.slurm import known_options
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder, result_of
from slurmft.system.files import LOG_LIMIT_BYTES, read_bytes, read_part
from slurmft.system.processes import who

LOOK_S, ASK_SLURM_S = 0.2, 3.0
"""How often ``wait`` reads the folder, and asks Slurm."""

MAX_RESULT_BYTES = 2 << 30

log = logging.getLogger(__name__)


class RunHandle:
    """One run, whether it waits, runs or has ended; cheap to make, and safe to make again in another process.

    Args:
        folder: the run folder.

    Raises:
        StorageError: it belongs to another user, or is a copy of another run's folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._run = RunFolder(Path(folder).absolute())
        self._run.refuse_foreign()
        self._run.refuse_copy()

    def __repr__(self) -> str:
        return f"RunHandle({str(self._run.path)!r})"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._run.path

    def status(self) -> Overview:
        """The run at this moment: ``state`` is finished, running, waiting, stopped, unknown, damaged or new."""
        return overviews([self._run])[0]

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the run has ended for good, over requeues and restarts; returns its exit code.

        Raises:
            TimeoutError: it has not ended within ``timeout_s``; it goes on.
            StorageError: the run was never submitted, or its journal cannot be read.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        asked_s = -ASK_SLURM_S
        while True:
            if self._run.done() is not None or time.monotonic() - asked_s >= ASK_SLURM_S:
                asked_s = time.monotonic()
                if (code := self.exit_code(self.status())) is not None:
                    return code
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(f"run {self._run.path.name} has not ended within {timeout_s} s")
            time.sleep(LOOK_S)

    def exit_code(self, view: Overview) -> int | None:
        """The exit code of a run that has ended for good; None while something follows.

        Args:
            view: its status.

        Raises:
            StorageError: the run was never submitted, or its journal cannot be read.
        """
        if view.state in ("waiting", "running"):  # no journal of a thousand runs is read for that
            return None
        events = self._since_submission()
        return exit_code_of(view, events) if has_ended(view, events, since=events[0].seconds()) else None

    def result(self, timeout_s: float | None = None, *, rank: int = 0) -> Any:
        """Wait for the run's end; returns what the submitted callable returned, None for other runs.

        Args:
            rank: another one than 0 for runs of ``slurmft.Executor``, which stores the result of each.

        Raises:
            RunFailed: the run has ended otherwise, or was stopped; names the cause and the traceback.
            TimeoutError: it has not ended within ``timeout_s``; it goes on.
            StorageError: the result cannot be read.
        """
        if code := self.wait(timeout_s):
            view, rows = self.status(), account_of(self._since_submission())
            traceback = "\n".join(text for name, text in rows if name == "traceback")
            raise RunFailed(f"run {view.run} has ended with exit code {code}: {view.detail}", run_exit_code=code,
                            traceback=traceback, hint=f"slurmft explain {self._run.path}")  # fmt: skip
        if not self._run.call.exists():
            return None
        return pickled(result_of(self._run.result, rank))

    def stop(self) -> str:
        """Ask the run to save and end; a waiting job is cancelled. Returns what was done, in words.

        Raises:
            SlurmError: Slurm refused or did not answer.
        """
        return control.stop(self._run, who())

    def requeue(self) -> str:
        """Ask the run to save and go through the queue again; returns what was done, in words.

        Raises:
            SlurmError: Slurm refused or did not answer.
            UsageError: the run has no job.
        """
        return control.requeue(self._run, who())

    def logs(self, rank: int = 0, *, lines: int | None = None) -> str:
        """The newest output of a rank, or its last ``lines``; the supervisor's where no worker has written yet.

        Raises:
            UsageError: there is no such rank.
            StorageError: nothing was written yet.
        """
        newest = logs_of(self._run, rank=rank)[-1]
        text = read_part(newest, -LOG_LIMIT_BYTES, LOG_LIMIT_BYTES).decode(errors="replace")
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:] if lines else [])

    def explain(self) -> list[Event]:
        """All events of the run's journal, oldest first: what happened, what was decided, and why.

        Raises:
            StorageError: nothing was submitted, or the journal cannot be read.
        """
        return story(self._run).events

    def _since_submission(self) -> list[Event]:
        events = self.explain()
        begins = [at for at, event in enumerate(events) if event.event == EventName.SUBMITTING]
        if not begins:
            raise StorageError(f"run {self._run.path.name} was not submitted with slurmft",
                               hint="its status tells how it is")  # fmt: skip
        return events[begins[-1] :]


def pickled(path: Path) -> Any:
    """What a callable has returned.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        stored = read_bytes(path, limit_bytes=MAX_RESULT_BYTES, owners={os.geteuid()})
    except OSError as error:
        hint = "a callable that ends its process, as sys.exit does, stores none"
        raise StorageError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    try:
        return pickle.loads(stored)  # noqa: S301 - written by the user's own job, in a private folder
    except (EOFError, pickle.UnpicklingError) as error:
        raise StorageError(f"{path} is damaged: {error}") from error


def submit(
    what: str | os.PathLike[str] | Mapping[str, Any] | Callable[..., Any], /, *, args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, sbatch_options: Sequence[str] = (), cluster: str = "auto",
    strict: bool = False, **overrides: Any,
) -> RunHandle:  # fmt: skip
    """Submit a run, or continue one that has stopped; as ``slurmft submit``, ``infer`` and ``serve`` do.

    Args:
        what: the path of a configuration, its keys and values, or a callable. A callable is pickled into the run folder
            and called in each worker; it needs ``run_folder=`` and may use ``slurmft.start_session`` inside. It is
            called again from its beginning after each restart: what it does not save itself is done again. At a stop,
            its method ``checkpoint`` (if it has one, as submitit's have) is asked on rank 0 for the call to go on with.
        args: for the callable.
        kwargs: for the callable.
        sbatch_options: further options of sbatch, such as ``["--nice=5"]``.
        cluster: ``slurm``, ``local``, or ``auto``: Slurm where its commands are, else this machine.
        strict: refuse when a stop would not have the time for its save.
        **overrides: keys of the configuration; a section as a mapping of those keys that are to change:
            ``nodes=2, slurm={"time": 30}``.

    Raises:
        UsageError: the configuration cannot be used, or the run is busy or finished; nothing was submitted.
        SlurmftError: it was refused; nothing was submitted.
    """
    made = submitted(what, args, kwargs, sbatch_options=sbatch_options, cluster=cluster, strict=strict, keys=overrides)
    return RunHandle(made.run.path)


def submitted(
    what: str | os.PathLike[str] | Mapping[str, Any] | Callable[..., Any], args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, *, sbatch_options: Sequence[str] = (), cluster: str = "auto",
    strict: bool = False, each: bool = False, keys: Mapping[str, Any],
) -> Submitted:  # fmt: skip
    """As ``submit``, with the job's id; with ``each``, every rank of a callable stores what it returns.

    Raises:
        SlurmftError: it was refused; nothing was submitted.
    """
    call = None
    if callable(what):
        call = cloudpickle.dumps((what, tuple(args), dict(kwargs or {})))
        settings = settings_of_callable(keys, each=each)
    elif args or kwargs:
        raise UsageError("args and kwargs are for a callable, and a configuration was given")
    elif isinstance(what, Mapping):
        settings = from_values(_plain(what), list(_as_overrides(keys)), source="slurmft.submit",
                               known_here=known_options)  # fmt: skip
    else:
        settings = load_given(Path(what), list(_as_overrides(keys)))
    if settings.serving is not None:
        prepare_endpoint(settings)
    elif settings.trials is not None:
        raise UsageError("a sweep is submitted by slurmft trials CONFIG")
    elif settings.inference is not None:
        read_requests(settings, lambda _count: None)
    return submit_run(
        settings, tuple(sbatch_options), strict=strict, cluster=cluster, who=who(), command="slurmft.submit",
        tell=log.warning, call=call,
    )  # fmt: skip


def settings_of_callable(overrides: Mapping[str, Any], *, each: bool = False) -> RunConfig:
    """The configuration of a run that calls what is in its run folder.

    Raises:
        UsageError: a key is unknown, or cannot be used.
    """
    for key in ("command", "inference"):
        if key in overrides:
            raise UsageError(f"a callable was given, and {key} as well: one of them is to run")
    given = from_values({**_plain(overrides), "command": ["-"]}, source="slurmft.submit", known_here=known_options)
    run = RunFolder(given.run_folder)
    command = (
        sys.executable, "-m", "slurmft.worker.call", str(run.call), str(run.result), given.preemption.signal,
        *(["--each"] if each else []),
    )  # fmt: skip
    return given.model_copy(update={"command": command})


def settings_of_array(keys: Mapping[str, Any]) -> RunConfig:
    """The configuration of a sweep of which each trial calls what is in its folder (``slurmft.Executor``).

    Raises:
        UsageError: a key is unknown, or cannot be used.
    """
    signal = settings_of_callable({name: value for name, value in keys.items() if name != "trials"}).preemption.signal
    command = [sys.executable, "-m", "slurmft.worker.call", "{trial_folder}/call.pkl", "--trial", signal]
    return from_values({**_plain(keys), "command": command}, source="slurmft.submit", known_here=known_options)


def _as_overrides(values: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _as_overrides(value, f"{inside}{key}.")
        else:
            try:
                yield f"{inside}{key}={json.dumps(_plain(value))}"
            except (TypeError, ValueError) as error:
                raise UsageError(f"{inside}{key}: {error}", hint="give texts, numbers, lists and mappings") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# --- An endpoint from outside of its job: its secrets, which router lives, as a client finds out, and its updates ---

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
    endpoint.prepare(run.path, settings.serving.token_file)
    if settings.serving.tls_own:
        endpoint.prepare_authority(run.path)
    return endpoint.headers_file(run.path)


def living_url(run: RunFolder, *, within_s: float = 0.0) -> str:
    """The address of a router that takes connections.

    Raises:
        LaunchError: there is none within these seconds.
        StorageError: ``endpoints.json`` cannot be read or believed.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        cluster = endpoint.HighAvailabilityCluster.read(run.path)
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
    asked, told = endpoint.ask(run, settings.as_yaml()), ""
    tell(f"update {asked.number} of {run.path.name}: {', '.join(keys)}")
    looked_s = time.monotonic()
    while True:
        time.sleep(LOOK_AT_UPDATE_S)
        seen = endpoint.read_update(run)
        if seen is None or seen.number != asked.number:
            raise StorageError(f"update {asked.number} of {run.path.name} is not recorded any more")
        if seen.state is endpoint.State.DONE:
            return f"update {seen.number} is done: all {seen.total} replicas have the new engine"
        if seen.state is endpoint.State.BACK:
            raise LaunchError(f"update {seen.number} went back to the old engine: {seen.reason}",
                              hint=f"slurmft explain {run.path}")  # fmt: skip
        words = f"{seen.renewed} of {seen.total} replicas have the new engine"
        if seen.state is endpoint.State.ROLLING and words != told:
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
        found = endpoint.read_update(run)
        if found is not None and found.number == number and found.is_open:
            endpoint.write_update(run, replace(found, state=endpoint.State.BACK, reason="the run ended"))
