"""A study that is asked and told for a sweep, and what a process that dies at any moment leaves of it."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from slurmft.errors import UsageError

pytestmark = needs("optuna")
NUMBER = "optuna_trial"


def parabola(trial: Any) -> float:
    return (trial.suggest_float("x", -10, 10) - 2) ** 2


def made(folder: Path, objective: Any = parabola, **given: Any) -> Any:
    """Another process's view of the same study."""
    search = importlib.import_module("slurmft.integrations.optuna").Search
    return search(objective, journal=folder / "study.journal", **{"n_trials": 3, **given})


def row(parameters: dict[str, Any], result: Any, error: str | None = None) -> dict[str, Any]:
    """As a sweep tells it."""
    own = {key: value for key, value in parameters.items() if key != "custom_id"}
    state = "done" if error is None else "failed"
    return {"trial": parameters["custom_id"], "parameters": own, "state": state, "result": result, "error": error}


def ran(search: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    return row(parameters, json.loads(json.dumps(search.run(**{NUMBER: parameters[NUMBER]}), allow_nan=False)))


def states(search: Any) -> list[str]:
    return [trial.state.name for trial in search.study.trials]


def test_trials_are_asked_for_and_told_until_there_are_enough(tmp_path: Path) -> None:
    search, ended = made(tmp_path), list[dict[str, Any]]()
    while (asked := search.ask(ended)) is not None:
        ended = [ran(made(tmp_path), each) for each in asked]
    assert states(made(tmp_path)) == ["COMPLETE"] * 3
    assert len({trial.params["x"] for trial in search.study.trials}) == 3
    assert made(tmp_path).ask([]) is None
    assert made(tmp_path, n_trials=4).ask([]) == [{NUMBER: 3, "custom_id": "trial-3"}]


def test_a_restart_names_again_what_runs_and_tells_nothing_twice(tmp_path: Path) -> None:
    first = made(tmp_path)
    (one,) = first.ask([])
    (two,) = first.ask([])
    ended = ran(first, one)
    assert first.ask([ended]) is not None  # and dies before its answer is taken
    again = made(tmp_path)
    assert again.ask([ended]) == [two, {NUMBER: 2, "custom_id": "trial-2"}]
    assert again.ask([]) == []
    assert again.ask([ran(made(tmp_path), two), ran(made(tmp_path), {NUMBER: 2, "custom_id": "trial-2"})]) is None
    assert states(again) == ["COMPLETE"] * 3


def test_a_trial_that_begins_again_has_the_same_parameters(tmp_path: Path) -> None:
    (asked,) = made(tmp_path).ask([])
    values = {made(tmp_path).run(**{NUMBER: asked[NUMBER]})["values"][0] for _ in range(3)}
    assert len(values) == 1


def test_ends_of_every_kind(tmp_path: Path) -> None:
    optuna = importlib.import_module("optuna")

    def objective(trial: Any) -> Any:
        trial.report(7.0, 0)
        if trial.number == 0:
            raise optuna.TrialPruned
        return [math.inf, math.nan, "text", [1, 2]][trial.number - 1]

    search = made(tmp_path, objective, n_trials=5)
    asked = [search.ask([])[0] for _ in range(5)]
    search.ask([ran(search, asked[0]), ran(search, asked[1])])
    with pytest.raises(ValueError, match="returned nan"):
        search.run(**{NUMBER: 2})
    with pytest.raises(ValueError, match="could not convert"):
        search.run(**{NUMBER: 3})
    failed = row(asked[2], None, error="trial_failed: exit code 1")
    search.ask([failed, row(asked[3], {"loss": 1}), ran(search, asked[4])])
    assert states(search) == ["PRUNED", "COMPLETE", "FAIL", "FAIL", "FAIL"]
    assert search.study.trials[0].value == 7.0 and search.study.trials[1].value == math.inf
    errors = [trial.user_attrs["error"] for trial in search.study.trials[2:]]
    assert errors[0] == "trial_failed: exit code 1"
    assert errors[1:] == [
        "its result is not 1 numbers: {'loss': 1}",
        "its result is not 1 numbers: {'values': [1.0, 2.0]}",
    ]
    with pytest.raises(UsageError, match="has ended as FAIL"):
        search.run(**{NUMBER: 2})


def test_parameters_of_a_command_are_there_from_the_beginning(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True), "kind": trial.suggest_categorical("kind", "ab")}

    given = {"space": space, "directions": ["minimize", "maximize"]}
    search = made(tmp_path, None, **given)
    (asked,) = search.ask([])
    assert made(tmp_path, None, **given).ask([]) == [asked] and asked["kind"] in "ab"
    with pytest.raises(UsageError, match="no objective"):
        search.run(**asked)
    search.ask([row(asked, [0.5, 2])])
    assert search.study.trials[0].values == [0.5, 2.0]


def test_half_a_line_is_cut_off_and_the_file_of_another_study_is_refused(tmp_path: Path) -> None:
    (asked,) = made(tmp_path).ask([])
    with (tmp_path / "study.journal").open("a") as stream:
        stream.write('{"op_code": 6, "wor')
    search = made(tmp_path)
    search.ask([ran(search, asked)])
    assert states(made(tmp_path)) == ["COMPLETE", "RUNNING"]
    with pytest.raises(UsageError, match="no trial 7"):
        search.ask([row({NUMBER: 7, "custom_id": "trial-7"}, 1.0)])
