"""The one variable with everything of the configuration that workers need."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.agent.workers import settings_of, worker_environment
from slurmft.config.run import validate
from slurmft.errors import ConfigError
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.reruns import Mode, RerunSettings
from slurmft.policy.worker_settings import WORKER_VARIABLE, CheckpointSettings, WorkerSettings

START = StartWorkers(
    attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1, batch_divisor=4,
    mtbf_s=86400.5,
)  # fmt: skip
PLAIN = {"command": "x", "run_folder": "/r/n", "nodes": 2, "nproc_per_node": 2}


@given(
    st.builds(
        WorkerSettings,
        backend=st.text(), init_timeout_minutes=st.floats(0.1, 1e6), step_timeout_minutes=st.floats(0.1, 1e6),
        batch_divisor=st.integers(1, 8), base_world_size=st.integers(0, 1 << 20), straggler_detection=st.booleans(),
        straggler_profiling_interval=st.integers(1, 100),
        checkpoint=st.builds(
            CheckpointSettings, bandwidth=st.none() | st.integers(1, 1 << 40), mtbf_s=st.none() | st.floats(0, 1e9),
            local_directory=st.none() | st.text(),
        ),
        rerun=st.builds(RerunSettings, mode=st.sampled_from(Mode), error_injection_node=st.none() | st.text()),
    )
)  # fmt: skip
def test_what_the_agent_writes_is_what_a_worker_reads(settings):
    assert WorkerSettings.from_environment({WORKER_VARIABLE: settings.as_text()}) == settings


def test_everything_that_is_configured_reaches_the_worker():
    raw = {
        **PLAIN, "nccl": {"backend": "gloo", "init_timeout_minutes": 7, "step_timeout_minutes": 3},
        "elastic": {"min_nodes": 1, "max_nodes": 2, "batch": "keep_micro_batch"}, "rerun": {"mode": "report_stats"},
        "straggler_detection": {"enabled": False, "profiling_interval": 5}, "checkpoint": {"keep_last_n": 9},
    }  # fmt: skip
    config = validate(raw, source="t")
    found = WorkerSettings.from_environment(worker_environment(config, {}, START, 0, "7.0.0"))
    assert found == settings_of(config, START)
    assert found == WorkerSettings(
        backend="gloo", init_timeout_minutes=7.0, step_timeout_minutes=3.0, batch_divisor=4, base_world_size=4,
        straggler_detection=False, straggler_profiling_interval=5, rerun=RerunSettings(mode=Mode.REPORT_STATS),
        checkpoint=CheckpointSettings(keep_last_n=9, mtbf_s=86400.5),
    )  # fmt: skip


def test_without_an_agent_a_worker_has_the_defaults_of_the_configuration():
    start = StartWorkers(attempt="7.0.0", nodes=2, first_rank=0, master_addr="n1", master_port=1, cycle=0, generation=1)
    assert WorkerSettings.from_environment({}) == settings_of(validate(PLAIN, source="t"), start)


def test_keys_of_another_version_change_nothing():
    text = json.dumps({"new": 1, "checkpoint": {"keep_last_n": 5, "new": 1}, "rerun": {"new": [1]}})
    assert WorkerSettings.from_environment({WORKER_VARIABLE: text}) == WorkerSettings(
        checkpoint=CheckpointSettings(keep_last_n=5)
    )


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "7", '{"init_timeout_minutes": "soon"}', '{"step_timeout_minutes": NaN}', '{"checkpoint": 3}',
     '{"base_world_size": []}', "[" * 100_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_variable_that_was_changed_by_hand_is_refused(text):
    with pytest.raises(ConfigError, match=WORKER_VARIABLE):
        WorkerSettings.from_environment({WORKER_VARIABLE: text})
