"""The keys of hydra.launcher as a configuration, and values that a job takes to its app."""

import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from slurmft.errors import UsageError

pytestmark = needs("hydra")
PLUGIN = "hydra_plugins.hydra_slurmft_launcher"


def settings(folder: Path, **given: Any) -> Any:
    keys = dataclasses.asdict(importlib.import_module(PLUGIN).SlurmftLauncherConf())
    assert given.keys() <= keys.keys()
    return importlib.import_module(f"{PLUGIN}._sweep").settings_of({**keys, "name": "app", **given}, folder / "sweep")


def test_the_keys_of_the_submitit_launcher_say_what_they_said(tmp_path: Path) -> None:
    found = settings(tmp_path, timeout_min=90, cpus_per_task=2, per_node=4, mem_gb=1.5, partition="gpu", retries=1,
                     gpus_per_task=2, array_parallelism=10, signal_delay_s=30, additional_parameters={"nice": 5},
                     config={"slurm": {"licenses": "x"}, "trials": {"log_bytes": 4096}})  # fmt: skip
    slurm = found.slurm.model_dump()
    asked = {name: str(slurm[name]) for name in ("time", "cpus_per_task", "gpus_per_node", "mem", "nice")}
    assert asked == {"time": "90", "cpus_per_task": "8", "gpus_per_node": "8", "mem": "1536M", "nice": "5"}
    assert (slurm["partition"], slurm["licenses"], slurm["job_name"]) == ("gpu", "x", "app")
    trials = found.trials
    assert (trials.per_node, trials.gpus, trials.max_jobs, trials.retries) == (4, 2, 3, 1)
    assert trials.log_bytes == 4096 and found.preemption.signal_lead_s == 30
    assert settings(tmp_path, gpus_per_node=8, per_node=2, max_jobs=5).trials.gpus == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [({"per_node": 0}, "per_node is 0"), ({"setup": ["module load x"]}, "load modules before"),
     ({"config": [1]}, "a mapping of sections"), ({"additional_parameters": {"nope": 1}}, "nope is not an option"),
     ({"config": {"trials": {"grid": {"x": [1]}}}}, "give one of")],
    ids=["number", "setup", "config", "option", "trials"],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_name(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(tmp_path, **given)


@pytest.mark.parametrize("value", [1.5, None, True, "text", {"a": [1, 2]}, (1, 2), math.inf, {1: 2}, Path("/x")])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    job, sweep = importlib.import_module(f"{PLUGIN}._job"), importlib.import_module(f"{PLUGIN}._sweep")
    told = json.loads(json.dumps(job._packed(value), allow_nan=False))
    found = sweep._value_in(told)
    assert found == value and type(found) is type(value)
