"""The app's side: its jobs are added to the sweep in the run folder, and what has come of them is waited for.

A job is named by its overrides. So an app that is started again finds what it had asked for before, whatever has become
of it meanwhile, and asks for nothing twice.
"""

from __future__ import annotations

import atexit
import base64
import copy
import hashlib
import inspect
import itertools
import logging
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydra_plugins.hydra_slurmft_launcher._job import APP, CALL, CLOSED, FOLDER_VARIABLE, job_id
from slurmft.config.run import RunConfig, from_values
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.inference.requests import folder_of, records_of
from slurmft.inference.trials import NAME, folder_of_trial, rows, trial_of
from slurmft.operations.executor import RunHandle, keys_of
from slurmft.operations.submit import submit_trials
from slurmft.scheduler.slurm import known_options
from slurmft.storage.run_folder import RunFolder
from slurmft.system.files import read_bytes, read_json, replace_atomically, trusted_owners, write_json
from slurmft.system.processes import who

LONGEST_NAME = 200
"""Of a job, in characters; a longer one is cut, and has a digest."""

LEAST_LOOK_S, MOST_LOOK_S = 0.5, 5.0
ALIVE_S = 10.0
"""How often it is looked whether the sweep still has a job, while jobs of it are open."""

TOLD_S = 10.0

OPTIONS = ("partition", "qos", "account", "constraint", "exclude", "gres", "comment")
JOB = "hydra_plugins.hydra_slurmft_launcher._job"

log = logging.getLogger(__name__)


def launched(sweep: Sweep, overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """What has come of a batch.

    Raises:
        CompactHydraException: as ``Sweep.launch``, in a form that Hydra prints without a traceback.
        SystemExit: the user has interrupted it.
    """
    try:
        return sweep.launch(overrides, first)
    except SlurmftError as error:
        raise CompactHydraException(f"hydra/launcher=slurmft: {error}") from error
    except KeyboardInterrupt:
        log.warning("the sweep goes on without this app: start it again to see the results, or end the sweep with "
                    "slurmft stop %s", sweep.run.path)  # fmt: skip
        raise SystemExit(130) from None


class Sweep:
    """The jobs of one app.

    Args:
        parameters: of the launcher.
    """

    def __init__(
        self, parameters: Mapping[str, Any], context: HydraContext, task: TaskFunction, config: DictConfig
    ) -> None:
        self._parameters, self._context, self._task, self._config = dict(parameters), context, task, config
        self.folder = Path(str(config.hydra.sweep.dir)).absolute()
        self.run = RunFolder(Path(str(self._parameters["run_folder"])).absolute())
        self._named: Counter[str] = Counter()
        self._told: set[str] = set()
        if "${now:" in str(OmegaConf.to_container(config.hydra.sweep, resolve=False)):
            log.warning("a restart of this app begins another sweep, since hydra.sweep.dir has the time in it; "
                        "with hydra.sweep.dir=%s it goes on with this one", self.folder)  # fmt: skip

    def launch(self, overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Have each job run once, and wait until all of them have ended.

        Args:
            first: the number of the first one.

        Raises:
            SlurmftError: the sweep cannot be submitted, or has stopped; its results stay.
        """
        settings = settings_of(self._parameters, self.run.path)
        call = self._call()
        jobs = [_Job(self._name_of(each), list(each), self._composed(each)) for each in overrides]
        self.folder.mkdir(parents=True, exist_ok=True)

        def choose() -> Iterator[dict[str, Any]]:
            self._take_folder(call)
            yield from self._numbered(jobs, first)

        given: dict[str, Any] = {"cluster": self._parameters["cluster"], "who": who(), "tell": self._tell,
                                 "command": " ".join(sys.argv)}  # fmt: skip
        sweep = submit_trials(settings, choose=choose, **given)
        if self._parameters["retry_failed"]:  # behind the others: jobs begin with what choose() leaves
            self._parameters["retry_failed"] = False
            submit_trials(settings, retry=True, **given)
        log.info("%d jobs are added to the sweep, %d were there: slurmft status %s", sweep.added.new,
                 sweep.added.known, self.run.path)  # fmt: skip
        for job in jobs:
            log.info("\t#%d : %s", job.number, " ".join(filter_overrides(job.overrides)))
        atexit.unregister(self._close)
        atexit.register(self._close)
        found = self._wait_for([job.name for job in jobs])
        return [self._as_return(job, found[job.name]) for job in jobs]

    def _tell(self, line: str) -> None:
        if line not in self._told:  # once, and not for each batch
            self._told.add(line)
            log.warning(line)

    def _close(self) -> None:
        """There are no further jobs, so that the sweep need not wait for them."""
        try:
            replace_atomically(self.run.path / CLOSED, b"")
        except OSError as error:
            log.info("the sweep waits %s s for this app: %s", self._parameters["linger_s"], error)

    def _name_of(self, overrides: Sequence[str]) -> str:
        """The overrides; a second job with the same ones has a number behind them."""
        name = ",".join(overrides) or "no overrides"
        if len(name) > LONGEST_NAME:
            name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(repr(list(overrides)).encode()).hexdigest()[:16]}"
        self._named[name] += 1
        return name if self._named[name] == 1 else f"{name}#{self._named[name]}"

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        return self._context.config_loader.load_sweep_config(self._config, list(overrides))

    def _call(self) -> bytes:
        """What the processes of jobs need of this one: where its modules are, and the function with its settings."""
        parts = (self._task, self._config, self._context, Singleton.get_state())
        try:
            return pickle.dumps({"path": sys.path, "folder": str(self.folder), "call": cloudpickle.dumps(parts)})
        except Exception as error:
            raise UsageError(
                f"the function of this app cannot be taken to the nodes: {type(error).__name__}: {error}",
                hint="open files, locks and connections belong into the function, or into a module that it imports",
            ) from error

    def _take_folder(self, call: bytes) -> None:
        """Leave what jobs begin with in the run folder, which no other app has; the run's lock is held."""
        app, run = _app_of(self._task), self.run.path
        for path in {run / APP, *(each / APP for each in self.folder.iterdir())}:
            before = read_json(path, owners=trusted_owners(path.parent)) if path.is_file() else None
            if before is None:
                continue
            if path != run / APP or (before["script"], before["function"]) != (app["script"], app["function"]):
                raise UsageError(
                    f"{self.folder} has the sweep of another app or job name: {before['function']} of "
                    f"{before['script']}, in {path.parents[1]}",
                    hint="choose another hydra.sweep.dir",
                )
            if before["digest"] != app["digest"]:
                log.warning("%s has changed since this sweep began: results that are there are kept, and jobs that "
                            "have not ended run what it is now", app["script"])  # fmt: skip
        try:
            (run / APP).parent.mkdir(mode=0o700, exist_ok=True)
            (run / CLOSED).unlink(missing_ok=True)
            replace_atomically(run / CALL, call)
            write_json(run / APP, {**app, "linger_s": self._parameters["linger_s"]})
        except OSError as error:
            raise StorageError(f"cannot write into {run}: {error.strerror or error}") from error

    def _numbered(self, jobs: Sequence[_Job], first: int) -> Iterator[dict[str, Any]]:
        """The jobs as trials: those that are there with the number that they have, the others with one that is free."""
        known = {trial_of(record): record["body"] for record in records_of(folder_of(self.run.path))}
        used = {body["number"] for body in known.values()}
        for wished, job in enumerate(jobs, first):
            digest = _digest_of(job.config)
            if (body := known.get(job.name)) is None:
                job.number = next(number for number in itertools.count(wished) if number not in used)
                used.add(job.number)
                body = {"overrides": job.overrides, "number": job.number, "config": digest}
            elif body["config"] != digest:
                raise UsageError(
                    f"the job {job.name} is in the sweep {self.run.path} with other settings: the app's configuration "
                    "has changed since",
                    hint="choose another hydra.sweep.dir, or change the setting by an override",
                )
            job.number = body["number"]
            yield {NAME: job.name, **body}

    def _wait_for(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The rows of jobs, when all of them have ended.

        Raises:
            UsageError: the sweep has stopped before.
        """
        newest = {trial_of(record): number for number, record in enumerate(records_of(folder_of(self.run.path)))}
        left, found, began_s = {newest[name] for name in names}, dict[str, dict[str, Any]](), time.monotonic()
        asked_s = told_s = began_s
        told, is_over = 0, False
        while True:
            ended = [row for row in rows(self.run.path, sorted(left)) if row["state"] != "open"]
            found |= {row["trial"]: row for row in ended}
            left -= {newest[row["trial"]] for row in ended}
            now_s = time.monotonic()
            if len(found) > told and (not left or now_s - told_s > TOLD_S):
                failed = sum(row["state"] == "failed" for row in found.values())
                log.info("%d of %d jobs have ended%s", len(found), len(names), f", {failed} failed" if failed else "")
                told, told_s = len(found), now_s
            if not left:
                return found
            if is_over:
                self._say_over(len(left))
            if now_s - asked_s > ALIVE_S:
                asked_s, handle = now_s, RunHandle(self.run.path)
                is_over = handle.exit_code(handle.status()) is not None
                continue
            time.sleep(min(MOST_LOOK_S, max(LEAST_LOOK_S, (now_s - began_s) / 20)))

    def _say_over(self, count: int) -> NoReturn:
        raise UsageError(
            f"the sweep {self.run.path} has stopped with {count} jobs open: {RunHandle(self.run.path).status().detail}",
            hint="start the app again to go on; results that are there stay",
        )

    def _as_return(self, job: _Job, row: Mapping[str, Any]) -> JobReturn:
        """What Hydra's own launcher would have returned."""
        config = job.config
        with read_write(config), open_dict(config):
            config.hydra.job.num, config.hydra.job.id = job.number, job_id(self.run.path, job.number)
            config.hydra.sweep.dir = str(self.folder)
        task_config = copy.deepcopy(config)
        with read_write(task_config), open_dict(task_config):
            del task_config["hydra"]
        result = row["result"] if isinstance(row["result"], dict) else {}
        returned = JobReturn(
            overrides=list(config.hydra.overrides.task), cfg=task_config,
            hydra_cfg=OmegaConf.masked_copy(config, "hydra"), working_dir=result.get("working_dir"),
            task_name=str(config.hydra.job.name), status=JobStatus.COMPLETED,
        )  # fmt: skip
        if row["state"] == "done":
            returned.return_value = _value_in(result)
            return returned
        returned.status = JobStatus.FAILED
        returned.return_value = CompactHydraException(
            f"job {job.number} has failed: {row['error']}\n  its output: {folder_of_trial(self.run.path, job.name)}"
            f"/log.txt\n  hint: hydra.launcher.retry_failed=true at the next start of the app runs it again"
        )
        return returned


class _Job:
    def __init__(self, name: str, overrides: list[str], config: DictConfig) -> None:
        self.name, self.overrides, self.config, self.number = name, overrides, config, -1


def settings_of(parameters: Mapping[str, Any], run_folder: Path) -> RunConfig:
    """The configuration of the sweep.

    Raises:
        UsageError: a value cannot be used; names the key.
    """
    given: dict[str, Any] = {
        name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, value in parameters.items()
    }
    for name in ("per_node", "max_jobs", "array_parallelism", "cpus_per_task", "gpus_per_task"):
        if given[name] is not None and given[name] < 1:
            raise UsageError(f"hydra.launcher.{name} is {given[name]}", hint="a whole number from 1 on")
    per_node, gpus = given["per_node"], given["gpus_per_node"]
    if given["gpus_per_task"] is not None:
        gpus = given["gpus_per_task"] * per_node
    named = {
        "timeout_min": given["timeout_min"], "name": given["name"], "mem_gb": given["mem_gb"], "gpus_per_node": gpus,
        "cpus_per_task": None if given["cpus_per_task"] is None else given["cpus_per_task"] * per_node,
        "slurm_signal_delay_s": given["signal_delay_s"], "slurm_setup": given["setup"],
        "slurm_additional_parameters": given["additional_parameters"],
        **{f"slurm_{name}": given[name] for name in OPTIONS},
    }  # fmt: skip
    trials = {
        "next": f"{JOB}:batches", "callable": f"{JOB}:run", "per_node": per_node, "retries": given["retries"],
        "gpus": given["gpus_per_task"] or (gpus or 0) // per_node,
        "max_jobs": given["max_jobs"] or -(-(given["array_parallelism"] or 1) // per_node),
    }  # fmt: skip
    keys: dict[str, Any] = {
        "run_folder": str(run_folder), "working_directory": os.getcwd(), "trials": trials,  # noqa: PTH109 - as a text
        "environment": {FOLDER_VARIABLE: str(run_folder)},
    }  # fmt: skip
    if not isinstance(given["config"], dict | None):
        raise UsageError(f"hydra.launcher.config is {given['config']!r}", hint="a mapping of sections and keys")
    named = {name: value for name, value in named.items() if value is not None}
    for part in (keys_of(named), given["config"] or {}):
        for name, value in part.items():
            before = keys.get(name)
            keys[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return from_values(keys, source="hydra.launcher", known_here=known_options)


def _app_of(task: TaskFunction) -> dict[str, str]:
    """Which app that is, and a digest of its script."""
    task = inspect.unwrap(task)
    try:
        script = str(Path(inspect.getsourcefile(task) or sys.argv[0]).absolute())
        digest = hashlib.sha256(read_bytes(script)).hexdigest()
    except (TypeError, OSError):  # an object that is called, or a function without a file
        script, digest = str(Path(sys.argv[0]).absolute()), ""
    return {"script": script, "function": getattr(task, "__qualname__", type(task).__qualname__), "digest": digest}


def _digest_of(config: DictConfig) -> str:
    """Of all settings of a job, unresolved, so that the time, the node and the environment change nothing."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return hashlib.sha256(OmegaConf.to_yaml(own, sort_keys=True).encode(errors="surrogatepass")).hexdigest()


def _value_in(result: Mapping[str, Any]) -> Any:
    if "pickle" not in result:
        return result.get("return_value")
    return pickle.loads(base64.b64decode(result["pickle"]))  # noqa: S301 - the user's own, from a private folder
