"""The section ``checkpoint``: what is refused, and that workers get what was configured."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from slurmft.agent.workers import worker_environment
from slurmft.config.run import RunConfig, validate
from slurmft.config.sections import CheckpointConfig
from slurmft.errors import ConfigError
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.worker_settings import WORKER_VARIABLE, CheckpointSettings, WorkerSettings

START = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1)


def run_with(**section: Any) -> RunConfig:
    return validate({"command": "x", "run_folder": "/r/n", "nodes": 2, "checkpoint": section}, source="t")


def of_a_worker(config: RunConfig) -> CheckpointSettings:
    return WorkerSettings.from_environment(worker_environment(config, {}, START, 0, "7.0.0")).checkpoint


def test_a_worker_has_the_defaults_of_the_configuration_without_any_variable():
    alone = WorkerSettings.from_environment({}).checkpoint
    assert alone == of_a_worker(run_with())
    ours = {field.name for field in fields(CheckpointSettings)} - {"mtbf_s"}
    assert ours == set(CheckpointConfig.model_fields) - {"directory"}


def test_every_key_reaches_the_worker():
    given = {
        "interval": "seconds", "interval_steps": 7, "interval_seconds": 1.5, "keep_last_n": 4, "keep_every": 1000,
        "save_best": False, "best_metric": "val acc 'x'", "best_mode": "max", "async_save": False, "when_busy": "wait",
        "max_failed_saves": 9, "bandwidth": 12345, "peer_copies": 1, "peer_interval": 2,
        "local_directory": "/nvme/o'dd name", "just_in_time": False, "stall_timeout_s": 5.0,
    }  # fmt: skip
    assert set(given) == set(CheckpointConfig.model_fields) - {"directory"}
    got = of_a_worker(run_with(**given))
    assert {name: getattr(got, name) for name in given} == given


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1), ("500", 500), ("500M", 500 << 20), ("1.5G", 3 << 29), ("1.5 GiB/s", 3 << 29), ("2kB", 2048),
        ("1t", 1 << 40), (None, None),
    ],
    ids=["number", "digits", "M", "G", "GiB/s", "kB", "t", "none"],
)  # fmt: skip
def test_a_bandwidth_may_be_written_as_people_write_it(text, expected):
    assert run_with(bandwidth=text).checkpoint.bandwidth == expected


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"interval": "hourly"}, "checkpoint.interval: "),
        ({"interval": "seconds"}, "needs interval_seconds above 0"),
        ({"interval_seconds": 60}, "does nothing with interval: steps; say interval: seconds"),
        ({"interval_seconds": float("nan")}, "checkpoint.interval_seconds: "),
        ({"interval_seconds": -1}, "checkpoint.interval_seconds: "),
        ({"keep_last_n": 0}, "checkpoint.keep_last_n: "),
        ({"best_metric": " "}, "is not the name of a metric"),
        ({"best_mode": "lowest"}, "checkpoint.best_mode: "),
        ({"bandwidth": "fast"}, "checkpoint.bandwidth: 'fast' is not a number of bytes per second, such as 500M"),
        ({"bandwidth": "0"}, "checkpoint.bandwidth: "),
        ({"bandwidth": True}, "checkpoint.bandwidth: "),
        ({"bandwidth": "9" * 400}, "checkpoint.bandwidth: "),
        ({"bandwidth": "999999999999999T"}, "checkpoint.bandwidth: "),
        ({"peer_copies": 2}, "checkpoint.peer_copies=2 needs more than 2 nodes; nodes=2"),
        ({"directory": "/a", "local_directory": "/a"}, "local_directory is the shared directory"),
        ({"local_directory": "/a\nb"}, "holds a line break or control character"),
        ({"stall_timeout_s": 0}, "checkpoint.stall_timeout_s: "),
        ({"max_failed_saves": 0}, "checkpoint.max_failed_saves: "),
        ({"keep_last": 3}, "unknown key checkpoint.keep_last; did you mean keep_last_n?"),
    ],
    ids=["interval", "no seconds", "seconds unused", "nan", "negative", "keep none", "metric", "mode", "rate",
         "rate 0", "rate true", "rate of 400 digits", "rate too much", "peers", "same folder", "control", "stall",
         "failures", "unknown"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(section, named):
    with pytest.raises(ConfigError) as caught:
        run_with(**section)
    assert named in caught.value.what


@pytest.mark.parametrize(
    ("name", "value"),
    [("interval", "x"), ("keep_last_n", 0), ("keep_every", 1e3), ("async_save", "true"), ("mtbf_s", math.nan),
     ("mtbf_s", math.inf), ("bandwidth", 1 << 70), ("interval_seconds", -1)],
    ids=["interval", "keep", "every", "flag", "nan", "inf", "digits", "seconds"],
)  # fmt: skip
def test_a_setting_that_was_changed_by_hand_is_named(name, value):
    with pytest.raises(ConfigError, match=f"{WORKER_VARIABLE} does not hold .*: {name} is"):
        WorkerSettings.from_environment({WORKER_VARIABLE: json.dumps({"checkpoint": {name: value}})})


def test_how_often_it_fails_comes_from_the_supervisor():
    assert CheckpointConfig().settings(86400.5).mtbf_s == 86400.5


@pytest.mark.parametrize(
    ("section", "expected"),
    [({}, True), ({"interval_steps": 0}, False), ({"interval": "auto", "interval_steps": 0}, True)],
    ids=["steps", "none", "auto"],
)
def test_whether_anything_is_saved_before_the_end(section, expected):
    assert run_with(**section).checkpoint.is_periodic is expected
