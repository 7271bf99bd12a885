"""The one variable with everything of the configuration that workers need."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.agent.workers import settings_of, worker_environment
from slurmft.config.run import validate
from slurmft.errors import ConfigError
from slurmft.ipc.messages import StartWorkers
from slurmft.policy.reruns import Mode, RerunSettings
from slurmft.policy.values import Strangers
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
     '{"base_world_size": []}', '{"checkpoint": {"keep_last_n": 0}}',
     '{"checkpoint": {"bandwidth": true}}', '{"checkpoint": {"mtbf_s": Infinity}}', '{"rerun": {"max_attempts": "3"}}',
     '{"rerun": {"mode": "sometimes"}}', '{"rerun": 7}', "[" * 100_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_variable_that_was_changed_by_hand_is_refused(text):
    with pytest.raises(ConfigError, match=WORKER_VARIABLE):
        WorkerSettings.from_environment({WORKER_VARIABLE: text})


# --- Which of the connections that have not proved themselves goes, when there are too many ---


def test_the_oldest_of_its_own_address_goes_first():
    strangers: Strangers[str] = Strangers(10, 2)
    assert strangers.admit("a1", "10.0.0.1") == []
    assert strangers.admit("b1", "10.0.0.2") == []
    assert strangers.admit("a2", "10.0.0.1") == []
    assert strangers.admit("a3", "10.0.0.1") == ["a1"]
    assert len(strangers) == 3


def test_the_one_with_the_most_pays_for_a_new_address():
    strangers: Strangers[str] = Strangers(4, 3)
    for name in ("b1", "a1", "a2", "a3"):
        strangers.admit(name, f"10.0.0.{name[0]}")
    assert strangers.admit("c1", "10.0.0.c") == ["a1"]
    assert strangers.admit("d1", "10.0.0.d") == ["a2"]
    assert strangers.admit("e1", "10.0.0.e") == ["b1"]


def test_one_that_has_proved_itself_is_never_closed():
    strangers: Strangers[int] = Strangers(3, 3)
    strangers.admit(0, "10.0.0.1")
    strangers.forget(0)
    closed = [each for number in range(1, 100) for each in strangers.admit(number, "10.0.0.1")]
    assert 0 not in closed
    assert len(strangers) == 3


@of_each(
    one__other__are_same=[
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ]
)
def test_what_counts_as_one_address(one, other, are_same):
    strangers: Strangers[int] = Strangers(10, 1)
    strangers.admit(1, one)
    assert strangers.admit(2, other) == ([1] if are_same else [])


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans())), st.integers(1, 6), st.integers(1, 4))
def test_the_quotas_hold_and_no_address_is_pushed_out_by_one_that_has_more(arrivals, at_most, per_address):
    strangers: Strangers[int] = Strangers(at_most, per_address)
    waiting: dict[int, str] = {}
    for number, (address, proves_itself) in enumerate(arrivals):
        waiting[number] = address
        for closed in strangers.admit(number, address):
            counts = Counter(waiting.values())
            its_address = waiting.pop(closed)
            assert closed != number
            assert its_address == address or counts[its_address] == max(counts.values())
        assert len(strangers) == len(waiting) <= at_most
        assert max(Counter(waiting.values()).values()) <= per_address
        if proves_itself:
            strangers.forget(number)
            del waiting[number]
