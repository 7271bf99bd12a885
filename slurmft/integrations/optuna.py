"""Optuna: a study whose trials are those of one sweep, which lives in Slurm.

    search = Search(objective, journal="tune.journal", n_trials=200, direction="minimize")

With ``next: tune:search.ask`` and ``callable: tune:search.run`` in the section ``trials``, where ``tune.py`` has these
lines. The study is in a file that all nodes share, without a database. Whatever dies on the way, each number of a trial
runs under one name, and none is left RUNNING at the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState

from slurmft.errors import UsageError
from slurmft.system.files import open_regular

NUMBER = "optuna_trial"
"""The parameter that has a trial's number."""

_TAIL_BYTES = 1 << 20


class Search:
    """A study, as the process that asks for trials, the processes of trials, and any other one see it.

    Args:
        objective: as for ``study.optimize``: gets an ``optuna.Trial``, returns a number, or one for each direction.
            None where the section ``trials`` has a ``command``, which needs a ``space``.
        journal: the study's file, on a filesystem that all nodes share; a relative path is below the folder that the
            sweep is submitted from. Only this sweep may ask for trials of its study.
        n_trials: how many trials there are to be, whatever becomes of them.
        space: gets each new ``optuna.Trial``, returns the parameters of the trial.
        **study: for ``optuna.create_study``: ``study_name``, ``direction`` or ``directions``, ``sampler``, ``pruner``.
            Each process makes its sampler anew, with another seed.
    """

    def __init__(
        self, objective: Callable[[optuna.Trial], Any] | None = None, *, journal: str | os.PathLike[str], n_trials: int,
        space: Callable[[optuna.Trial], Mapping[str, Any]] | None = None, **study: Any,
    ) -> None:  # fmt: skip
        self._objective, self._space, self._n_trials = objective, space, n_trials
        self._journal, self._given = Path(journal), {"study_name": "study", **study}
        self._study: optuna.Study | None = None
        self._has_asked = False

    @property
    def study(self) -> optuna.Study:
        """The study; made where it is not there yet."""
        if self._study is None:
            path = self._journal.absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            backend = JournalFileBackend(str(path), lock_obj=_Lock(str(path)))
            storage = optuna.storages.JournalStorage(backend)
            self._study = optuna.create_study(storage=storage, load_if_exists=True, **self._given)
            self._study.sampler.reseed_rng()  # else all processes would try the same
        return self._study

    def ask(self, ended: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """For ``trials.next``: tell the study what has ended, and name the next trial.

        Raises:
            UsageError: the study does not know a trial that has ended: its file is another one.
        """
        for row in ended:
            self._tell(row)
        trials = self.study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if not self._has_asked:  # those that another process has asked for may not have come into the sweep
            self._has_asked = True
            if running:
                return [self._named(self.trial(trial.number)) for trial in running]
        if sum(trial.state != TrialState.WAITING for trial in trials) < self._n_trials:
            return [self._named(self.study.ask())]
        return [] if running else None

    def run(self, **parameters: Any) -> dict[str, Any]:
        """For ``trials.callable``: call the objective for one trial.

        Raises:
            ValueError: it returned no number, or NaN: the trial has failed.
            UsageError: there is no objective, or the study has given up this trial.
        """
        if self._objective is None:
            raise UsageError("this Search has no objective", hint="Search(objective, ...), or another trials.callable")
        trial = self.trial(parameters[NUMBER])
        try:
            value = self._objective(trial)
        except optuna.TrialPruned:
            return {"pruned": True}
        values = [float(each) for each in (value if isinstance(value, Sequence) else [value])]
        if any(map(math.isnan, values)):
            raise ValueError(f"the objective returned {value}: a trial without a value raises an error, or TrialPruned")
        return {"values": [each if math.isfinite(each) else str(each) for each in values]}  # JSON has no infinity

    def trial(self, number: int) -> optuna.Trial:
        """The trial of this number, for its own process: ``report``, ``should_prune``, and the parameters that it has.

        Raises:
            UsageError: it has ended.
        """
        trial = self._of_number(number)
        if trial.state.is_finished():
            raise UsageError(f"trial {number} has ended as {trial.state.name} in the study {self._journal}",
                             hint="study.enqueue_trial tries its parameters again, as another trial")  # fmt: skip
        return optuna.Trial(self.study, trial._trial_id)

    def _named(self, trial: optuna.Trial) -> dict[str, Any]:
        given = {} if self._space is None else dict(self._space(trial))
        return {**given, NUMBER: trial.number, "custom_id": f"trial-{trial.number}"}

    def _of_number(self, number: int) -> optuna.trial.FrozenTrial:
        trials = self.study.get_trials(deepcopy=False)
        if not 0 <= number < len(trials):
            raise UsageError(f"there is no trial {number} in the study {self._journal.absolute()}",
                             hint="another sweep needs another run_folder and journal")  # fmt: skip
        return trials[number]

    def _tell(self, row: Mapping[str, Any]) -> None:
        number = row["parameters"][NUMBER]
        if self._of_number(number).state.is_finished():  # told before, by a process that has died
            return
        result, values, error = row["result"], list[float](), row["error"]
        if isinstance(result, Mapping) and result.get("pruned") is True:
            self.study.tell(number, state=TrialState.PRUNED)
            return
        if row["state"] != "failed":
            values = _values_in(result)
            if len(values) != len(self.study.directions) or any(map(math.isnan, values)):
                error = f"its result is not {len(self.study.directions)} numbers: {str(result)[:200]}"
        if error is not None:
            self.trial(number).set_user_attr("error", error)
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, values)


def _values_in(result: Any) -> list[float]:
    if isinstance(result, Mapping):
        result = result.get("values", result.get("value"))
    try:
        return [float(each) for each in (result if isinstance(result, list) else [result])]
    except (TypeError, ValueError):
        return []


class _Lock(JournalFileSymlinkLock):
    """Optuna's lock for all kinds of NFS; behind it the file has no torn end, which a process that was killed in the
    middle of a line leaves, and with which nobody could read what follows.
    """

    def acquire(self) -> bool:
        super().acquire()
        try:
            _cut_torn_end(Path(self._lock_target_file))
        except BaseException:
            self.release()
            raise
        return True


def _cut_torn_end(path: Path) -> None:
    descriptor = open_regular(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)
    finally:
        os.close(descriptor)
