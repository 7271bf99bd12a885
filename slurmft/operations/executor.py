"""slurmft from Python: ``slurmft.submit``, the handle of a run, and ``slurmft.Executor``, which is submitit's
interface.

A program of submitit's changes one import; its jobs then survive what runs survive. submitit's own class is the base,
so that ``submit``, ``map_array``, ``submit_array``, ``batch`` and the jobs' ``result``, ``results``, ``exception``,
``wait`` and ``awaitable`` are its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
from submitit.core import core
from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError

from slurmft.config.inference import MAX_JOBS
from slurmft.config.run import RunConfig, from_values
from slurmft.errors import RunFailed, SlurmftError, SlurmUnavailable, StorageError, UsageError
from slurmft.operations import control
from slurmft.operations.control import Overview
from slurmft.operations.run_configuration import load_given
from slurmft.operations.submit import Submitted, read_requests, submit_run, submit_trials
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import known_options
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder, result_of
from slurmft.system.files import LOG_LIMIT_BYTES, read_bytes, read_part, replace_atomically
from slurmft.system.processes import who

if TYPE_CHECKING:
    from slurmft.inference.trials import Outcomes

# --- ``slurmft.submit`` and the handle of a run, for notebooks, sweeps and scripts ---

LOOK_S, ASK_SLURM_S = 0.2, 3.0
"""How often ``wait`` reads the folder, and asks Slurm."""

MAX_RESULT_BYTES = 2 << 30


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
        return control.overviews([self._run])[0]

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
        return (
            control.exit_code_of(view, events) if control.has_ended(view, events, since=events[0].seconds()) else None
        )

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
            view, rows = self.status(), control.account_of(self._since_submission())
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
        newest = control.logs_of(self._run, rank=rank)[-1]
        text = read_part(newest, -LOG_LIMIT_BYTES, LOG_LIMIT_BYTES).decode(errors="replace")
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:] if lines else [])

    def explain(self) -> list[Event]:
        """All events of the run's journal, oldest first: what happened, what was decided, and why.

        Raises:
            StorageError: nothing was submitted, or the journal cannot be read.
        """
        return control.story(self._run).events

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
        from slurmft.operations.endpoints import prepare_endpoint  # of no use to other runs

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


# --- ``slurmft.Executor``: submitit's interface, where each submission is a run, and an array a sweep ---

SHORTEST_S, LONGEST_S = 2.0, 30.0
"""Between two questions to Slurm about all jobs of a process; longer from look to look, as submitit's."""

LONGEST_NAME = 60
"""Of a run folder, in characters, before its number: a name of 255 bytes is the most that file systems take."""

ARRAY_PARALLELISM = 256
"""Calls of an array at a time, as submitit has it."""

NEED_RUNS = frozenset({
    "checkpoint", "digests", "elastic", "launcher", "rerun", "spare_nodes", "spares", "straggler_detection", "sync",
})  # fmt: skip
"""Keys that mean something to a run with workers, which each call of an array is then."""

TRACEBACK = "Traceback (most recent call last):\n"

STATES = {"finished": "COMPLETED", "running": "RUNNING", "waiting": "PENDING", "damaged": "FAILED"}

SHARED = {
    "name": "job_name",
    "timeout_min": "time",
    "gpus_per_node": "gpus_per_node",
    "cpus_per_task": "cpus_per_task",
    "nodes": "nodes",
    "tasks_per_node": "ntasks_per_node",
}
"""Parameters of all of submitit's executors, and its name for each where the executor is Slurm's."""

OTHERS = ("local_", "debug_", "slurm_array_parallelism")
"""Of other executors, or for a whole array."""

WITHOUT_EFFECT = {
    "max_num_timeout": "a time limit costs no retry",
    "max_pickle_size_gb": "the limit is 2 GiB",
    "stderr_to_stdout": "both are one log in any case",
    "use_srun": "the agents start the tasks",
    "wckey": "it says that submitit submitted the job",
}
REFUSED = {
    "setup": "load modules before you submit: the environment comes along",
    "teardown": "do it behind result()",
    "python": "the tasks run in the Python that submits",
    "run_folder": "each submission has one of its own, in the executor's folder",
}

log = logging.getLogger(__name__)


class _Watch:
    """What is known of the runs of this process's jobs, from one question to Slurm for all of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # again by the same thread: a job's deletion may fall into a question
        self._waiting: dict[Path, Overview | None] = {}
        self._ended: dict[Path, Overview] = {}
        self._outcomes: dict[Path, Outcomes] = {}
        self._began_s = self._asked_s = -LONGEST_S

    def register(self, folder: Path) -> None:
        """Ask for it with the others from the next question on."""
        with self._lock:
            if folder not in self._ended and folder not in self._waiting:
                self._waiting[folder], self._began_s, self._asked_s = None, time.monotonic(), -LONGEST_S

    def look(self, folder: Path, *, force: bool = False) -> tuple[Overview, bool]:
        """The run as last seen, and whether it has ended for good.

        Raises:
            StorageError: its folder is missing, damaged or foreign; the other runs are told as before.
        """
        with self._lock:
            self.register(folder)
            if folder not in self._ended:
                pause_s = min(LONGEST_S, max(SHORTEST_S, (time.monotonic() - self._began_s) / 2))
                if force or time.monotonic() - self._asked_s > pause_s:
                    self._asked_s = time.monotonic()
                    self._refresh(list(self._waiting), folder)
                elif RunFolder(folder).done() is not None or self._waiting[folder] is None:
                    self._refresh([folder], folder)
            seen = self._ended.get(folder) or self._waiting[folder]
            assert seen is not None
            return seen, folder in self._ended

    def outcomes(self, folder: Path) -> Outcomes:
        """What is known of the calls of the sweep in this run folder."""
        from slurmft.inference.trials import Outcomes  # it needs numpy, as no other job does

        with self._lock:
            if folder not in self._outcomes:
                self._outcomes[folder] = Outcomes(folder)
            return self._outcomes[folder]

    def _refresh(self, folders: Sequence[Path], wanted: Path) -> None:
        problem: StorageError | None = None
        for folder, view in zip(folders, control.overviews([RunFolder(each) for each in folders]), strict=True):
            try:
                ended = RunHandle(folder).exit_code(view) is not None
            except StorageError as error:
                problem = error if folder == wanted else problem
                continue
            self._waiting[folder] = view
            if ended:
                self._ended[folder] = view
                del self._waiting[folder]
        if problem is not None:
            raise problem


class _Paths(JobPaths):
    """Where a run has what submitit's jobs have in files of their own."""

    def __init__(self, folder: Path, job_id: str, task_id: int | None) -> None:
        super().__init__(folder, job_id=job_id, task_id=task_id)
        self._run = RunFolder(folder)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._run.path

    @property
    def submission_file(self) -> Path:
        """The configuration that the job runs with."""
        return self._run.config

    @property
    def submitted_pickle(self) -> Path:
        """The call: function, args and kwargs."""
        return self._run.call

    @property
    def result_pickle(self) -> Path:
        """What the task returned."""
        return result_of(self._run.result, self.task_id)

    @property
    def stdout(self) -> Path:
        """The newest log of the task: both of its streams."""
        logs = control.oldest_first(self._run.attempts.glob(f"*/rank-{self.task_id}.log"))
        return logs[-1] if logs else self._run.attempts / f"rank-{self.task_id}.log"

    stderr = stdout


class _CallPaths(_Paths):
    """The same for a call of an array, which has a folder of its own in that of the run."""

    def __init__(self, folder: Path, job_id: str, task_id: int | None) -> None:
        super().__init__(folder, job_id, task_id)
        self._trial, self._run = folder, RunFolder(folder.parent.parent)

    @property
    def folder(self) -> Path:
        """The call's own folder."""
        return self._trial

    @property
    def submitted_pickle(self) -> Path:
        """The call: function, args and kwargs."""
        return self._trial / "call.pkl"

    @property
    def result_pickle(self) -> Path:
        """What the newest try returned."""
        return next(reversed(control.oldest_first(self._trial.glob(".result-*.pkl"))), self._trial / "result.pkl")

    @property
    def stdout(self) -> Path:
        """Both streams of all tries."""
        return self._trial / "log.txt"

    stderr = stdout


class Job(core.Job[Any]):
    """One run, with the interface of submitit's jobs; a pickled one is the same job in another process."""

    watch = _Watch()
    """All jobs of this process share it."""

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = _Paths(Path(folder), job_id, self.task_id)

    def _register_in_watcher(self) -> None:
        self.watch.register(self._run_folder)

    @property
    def _run_folder(self) -> Path:
        return self.paths.folder

    @property
    def run(self) -> RunHandle:
        """The run, with what submitit's jobs do not have: ``explain``, ``requeue``, ``status``."""
        return RunHandle(self._run_folder)

    @property
    def state(self) -> str:
        """COMPLETED, RUNNING, PENDING, REQUEUED (between two jobs of its run), FAILED or UNKNOWN."""
        view, over = self.watch.look(self._run_folder)
        return STATES.get(view.state, ("FAILED" if over else "REQUEUED") if view.state == "stopped" else "UNKNOWN")

    def done(self, force_check: bool = False) -> bool:
        """Whether the run has ended for good, over requeues and restarts."""
        return self.watch.look(self._run_folder, force=force_check)[1]

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Slurm's newest job of the run, and its state."""
        view, _ = self.watch.look(self._run_folder, force=mode == "force")
        return {"JobID": view.job or self.job_id, "State": self.state, "Reason": view.detail}

    def cancel(self, check: bool = True) -> None:
        """End the run; a running one saves first (``checkpoint`` is called, where the callable has it).

        Raises:
            SlurmError: Slurm refused or did not answer, unless ``check`` is False.
        """
        try:
            self.run.stop()
        except SlurmftError:
            if check:
                raise

    def submission(self) -> DelayedSubmission:
        """The call: as submitted, or as ``checkpoint`` has left it."""
        data = read_bytes(self.paths.submitted_pickle, limit_bytes=MAX_RESULT_BYTES, owners={os.geteuid()})
        function, args, kwargs = pickle.loads(data)  # noqa: S301 - the user's own, in a private folder
        return DelayedSubmission(function, *args, **kwargs)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        try:
            return "success", self.run.result(rank=self.task_id or 0)
        except RunFailed as error:
            if not error.traceback:
                raise UncompletedJobError(str(error)) from error
            return "error", error.traceback
        except StorageError as error:  # it has ended well, and left no result
            raise UncompletedJobError(str(error)) from error

    def __del__(self) -> None:
        if getattr(self, "_cancel_at_deletion", False):
            with contextlib.suppress(SlurmftError):  # of a folder that is gone
                if not self.done():
                    self.cancel(check=False)


class ArrayJob(Job):
    """One call of an array, which is a trial of a sweep: several jobs of Slurm work on all of them (see
    docs/coming-from/submitit.md). ``run`` is the sweep.

    Args:
        folder: of the trial.
        job_id: the first job of the sweep, and the call's number behind ``_``.
    """

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = _CallPaths(Path(folder), job_id, self.task_id)

    @property
    def _run_folder(self) -> Path:
        return self.paths.folder.parent.parent

    def _answer(self, *, force: bool = False) -> Mapping[str, Any] | None:
        return self.watch.outcomes(self._run_folder).of(self.paths.folder.name, force=force)

    @property
    def state(self) -> str:
        """As of a job; PENDING until the call begins, CANCELLED where it was, FAILED where it raised."""
        if (answer := self._answer()) is not None:
            code = answer.get("error", {}).get("code", "")
            return {"": "COMPLETED", "cancelled": "CANCELLED"}.get(code, "FAILED")
        state = super().state
        if state == "RUNNING" and not self._has_begun:
            return "PENDING"
        return "CANCELLED" if state == "FAILED" and self._is_cancelled else state

    def done(self, force_check: bool = False) -> bool:
        """Whether the call has ended for good, over requeues and restarts."""
        if self._answer(force=force_check) is not None or (self._is_cancelled and not self._has_begun):
            return True
        return super().done(force_check)

    def cancel(self, check: bool = True) -> None:
        """End the call, or have it not begin; a running one saves first (``checkpoint`` is called, where the callable
        has it). The array ends with the last of its calls.

        Raises:
            SlurmError: Slurm refused or did not answer, unless ``check`` is False.
            StorageError: it cannot be noted, unless ``check`` is False.
        """
        from slurmft.inference.trials import cancel

        try:
            cancel(self._run_folder, self.paths.folder.name)
            # one that runs has nothing to do then, and ends
            if self.watch.outcomes(self._run_folder).are_over and self.run.status().state == "waiting":
                self.run.stop()
        except SlurmftError:
            if check:
                raise

    @property
    def _has_begun(self) -> bool:
        return (self.paths.folder / "parameters.json").exists()

    @property
    def _is_cancelled(self) -> bool:
        return (self.paths.folder / "cancel").exists()

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        _, found, trace = (self.stdout() or "").rpartition(TRACEBACK)
        match self._answer(force=True):
            case {"response": {"body": {"result": {"pickle": str() as name}}}}:
                try:
                    return "success", pickled(self.paths.folder / Path(name).name)
                except StorageError as error:
                    why = str(error)
            case {"error": {"code": "cancelled"}}:
                why = "it was cancelled"
            case {"error": _} if found:
                return "error", found + trace
            case {"error": {"message": message}}:
                why = message
            case None:
                view, _ = self.watch.look(self._run_folder)
                why = "it was cancelled" if self._is_cancelled else f"its sweep has ended: {view.detail}"
            case _:
                why = "a callable that ends its process, as sys.exit does, stores none"
        raise UncompletedJobError(f"Job {self.job_id} has no result: {why}")


class _Delayed(core.DelayedJob[Any], Job):
    """A job of a batch that is not submitted yet: the first use of it submits the batch, where that is allowed."""


class Executor(core.Executor):
    """Takes the place of ``submitit.AutoExecutor``.

    Args:
        folder: for the runs, one folder in it for each submission. Parts with ``%j``, which submitit has for the job,
            are left out.
        cluster: ``slurm``, ``local``, or None: Slurm where its commands are, else this machine.
        **options: submitit's, which have no effect here.

    Raises:
        UsageError: no such cluster or option.
    """

    job_class = Job

    def __init__(self, folder: str | os.PathLike[str], cluster: str | None = None, **options: Any) -> None:
        super().__init__(JobPaths.get_first_id_independent_folder(Path(folder)))
        if cluster not in (None, "auto", "slurm", "local"):
            raise UsageError(f"no cluster {cluster!r}", hint="slurm, local, or None for either")
        self.cluster = cluster if cluster in ("slurm", "local") else "slurm" if slurm.available() else "local"
        self._keys: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self.update_parameters(**options)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        """Submit a call; within ``batch()`` at its end.

        Raises:
            SlurmftError: it was refused; nothing was submitted.
        """
        job = super().submit(fn, *args, **kwargs)
        if type(job) is core.DelayedJob:
            job.__class__ = _Delayed  # with the methods of our jobs, not of a Slurm job
        return cast("Job", job)

    def map_array(self, fn: Callable[..., Any], *iterable: Iterable[Any]) -> list[Job]:  # type: ignore[override] # a narrower list
        """Submit a call for each element, as ``map`` would call it.

        Calls of one task each are trials of one sweep, which at most ``slurm_array_parallelism`` jobs (256) work on.

        Raises:
            SlurmftError: one was refused; what had been submitted is cancelled.
        """
        return cast("list[Job]", super().map_array(fn, *iterable))

    def _internal_update_parameters(self, **given: Any) -> None:
        """Take submitit's parameters, sbatch's options as ``slurm_...``, and the keys of a configuration.

        Raises:
            UsageError: one of them is unknown, or its value cannot be used.
        """
        parameters = {**self.parameters, **{name: value for name, value in given.items() if value is not None}}
        keys = keys_of(parameters)
        settings_of_callable({**keys, "run_folder": str(self.folder / "run")})
        self.parameters, self._keys = parameters, keys

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> list[core.Job[Any]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(delayed_submissions) > 1 and self._fits_pilots:
            return [*self._submit_array(delayed_submissions)]
        jobs: list[core.Job[Any]] = []
        try:
            for at, delayed in enumerate(delayed_submissions):
                jobs.append(self._submit_one(delayed, at, len(delayed_submissions)))
        except BaseException:  # an array is submitted whole, or not at all
            for job in jobs:
                job.cancel(check=False)
            if jobs:
                log.warning("%d of %d were submitted, and are cancelled", len(jobs), len(delayed_submissions))
            raise
        return jobs

    @property
    def _fits_pilots(self) -> bool:
        single = all(self._keys.get(name, 1) == 1 for name in ("nodes", "nproc_per_node"))
        return single and not NEED_RUNS & self._keys.keys()

    def _submit_array(self, calls: Sequence[DelayedSubmission]) -> list[ArrayJob]:
        """One sweep, of which each call is a trial: at most as many jobs as may run at a time work on all of them."""
        from slurmft.inference.trials import folder_of_trial

        folder = self._new_folder(self._name_of(calls[0]))
        trials = [folder_of_trial(folder, str(number)) for number in range(len(calls))]
        at_once = min(len(calls), self.parameters.get("slurm_array_parallelism", ARRAY_PARALLELISM), MAX_JOBS)
        here = {"per_node": min(at_once, len(os.sched_getaffinity(0)))}
        names = folder / "calls.jsonl"
        section = {"file": str(names), **({"max_jobs": at_once} if self.cluster == "slurm" else here)}
        try:
            for call, trial in zip(calls, trials, strict=True):
                trial.mkdir(mode=0o700, parents=True)
                data = cloudpickle.dumps((call.function, tuple(call.args), dict(call.kwargs)))
                replace_atomically(trial / "call.pkl", data, durable=False)
            replace_atomically(names, "".join(json.dumps({"custom_id": trial.name}) + "\n" for trial in trials))
            settings = settings_of_array({**self._keys, "run_folder": str(folder), "trials": section})
            sweep = submit_trials(
                settings, cluster=self.cluster, who=who(), command="slurmft.Executor", tell=log.warning
            )
        except BaseException as error:  # also an argument that cannot be pickled
            is_refused = isinstance(error, SlurmftError) and not isinstance(error, SlurmUnavailable)
            if is_refused or not names.exists():  # else a job may have arrived
                shutil.rmtree(folder, ignore_errors=True)
            raise
        assert sweep.made is not None
        job = sweep.made.job if sweep.made.where == "slurm" else folder.name
        return [ArrayJob(trial, f"{job}_{trial.name}") for trial in trials]

    def _name_of(self, call: DelayedSubmission) -> str:
        function = call.function
        given = self._keys.get("slurm", {}).get("job_name")
        return str(given or getattr(function, "__name__", type(function).__name__))

    def _submit_one(self, delayed: DelayedSubmission, at: int, count: int) -> Job:
        keys = {**self._keys, "slurm": {**self._keys.get("slurm", {})}}
        name = self._name_of(delayed)
        at_once = self.parameters.get("slurm_array_parallelism", count)
        if at_once < count:  # of one user's jobs with one name, one runs at a time
            others = keys["slurm"].get("dependency")
            keys["slurm"] |= {
                "job_name": f"{name}-{at % at_once}",
                "dependency": f"{others},singleton" if others else "singleton",
            }
        folder = self._new_folder(name)
        keys["run_folder"] = str(folder)
        try:
            made = submitted(delayed.function, delayed.args, delayed.kwargs, cluster=self.cluster, each=True, keys=keys)
        except BaseException:  # also an argument that cannot be pickled
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        settings = made.settings
        job_id = made.job if made.where == "slurm" else made.run.path.name
        return Job(made.run.path, job_id, tuple(range(settings.nodes * settings.nproc_per_node)))

    def _new_folder(self, name: str) -> Path:
        """A folder that no other submission has, whichever process makes it."""
        stem = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:LONGEST_NAME] or "job"
        while True:
            self._numbers[stem] = self._numbers.get(stem, 0) + 1
            folder = self.folder / f"{stem}-{self._numbers[stem]}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return folder


def keys_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that submitit's parameters ask for."""
    keys: dict[str, Any] = {}
    named = dict(_named_for_slurm(parameters))
    tasks = _whole("tasks_per_node", parameters.get("nproc_per_node", named.get("ntasks_per_node", 1)))
    _whole("slurm_array_parallelism", parameters.get("slurm_array_parallelism", 1))
    for name in named.keys() & REFUSED.keys():
        raise UsageError(f"{name} is not possible here", hint=REFUSED[name])
    for name in named.keys() & WITHOUT_EFFECT.keys():
        log.info("%s has no effect: %s", name, WITHOUT_EFFECT[name])
    of_runs = {name: value for name, value in parameters.items() if name in RunConfig.model_fields}
    parts = [_in_configuration(name, value, tasks) for name, value in named.items() if name not in WITHOUT_EFFECT]
    for part in (*parts, of_runs):
        for name, value in part.items():
            keys[name] = {**keys.get(name, {}), **value} if isinstance(value, Mapping) else value
    return keys


def _in_configuration(name: str, value: Any, tasks: int) -> dict[str, Any]:
    """Where a parameter of submitit's Slurm executor stands in a configuration.

    Slurm has one task for each node, the agent, which starts the workers: it gets what ``tasks`` of them need.
    """
    match name:
        case "nodes":
            return {"nodes": value}
        case "ntasks_per_node":
            return {"nproc_per_node": value}
        case "signal_delay_s":
            return {"preemption": {"signal_lead_s": value}}
        case "additional_parameters":
            if not isinstance(value, Mapping):
                raise UsageError(f"slurm_additional_parameters is {value!r}", hint="a mapping of options of sbatch")
            return {"slurm": {key.replace("-", "_"): each for key, each in value.items()}}
        case "cpus_per_task":
            return {"slurm": {"cpus_per_task": _whole(name, value) * tasks}}
        case "gpus_per_task":
            return {"slurm": {"gpus_per_node": _whole(name, value, least=0) * tasks}}
        case "num_gpus":
            return {"slurm": {"gpus_per_node": value}}
        case _:
            return {"slurm": {name: value}}


def _whole(name: str, value: Any, *, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}", hint=f"a whole number from {least} on")
    return value


def _named_for_slurm(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each parameter by the name that submitit's Slurm executor has for it; those of other executors are left out.

    What is named for Slurm comes last: it beats what all executors share, as in submitit.
    """
    for name, value in sorted(parameters.items(), key=lambda item: item[0].startswith("slurm_")):
        shared = name.removeprefix("slurm_")
        if shared in SHARED:
            yield SHARED[shared], value
        elif shared == "mem_gb":
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise UsageError(f"mem_gb is {value!r}", hint="a number of GiB")
            yield "mem", f"{round(value * 1024)}M"
        elif name in WITHOUT_EFFECT or name in REFUSED:
            yield name, value
        elif name.startswith("slurm_") and name != "slurm_array_parallelism":
            yield name.removeprefix("slurm_"), value
        elif name not in RunConfig.model_fields and not name.startswith(OTHERS):
            hint = "submitit's, slurm_ before an option of sbatch, or a key of a configuration"
            raise UsageError(f"unknown parameter {name}", hint=hint)
