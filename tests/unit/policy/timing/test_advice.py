"""``slurmft advise``: the lead and the interval, from what was measured."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from slurmft.cli.main import cli
from slurmft.config.run import load
from slurmft.operations import site as operation
from slurmft.policy.checkpoints import DAY_S, FailureHistory, Measured, Setting, advise, in_words, plan
from slurmft.policy.stop import GraceNeed
from slurmft.scheduler.slurm import Site
from slurmft.storage import history
from slurmft.storage.history import Timings, fingerprint
from slurmft.storage.run_folder import Attempt, RunFolder

BY_STEPS = Setting(interval="steps", steps=100, seconds=0.0)
NEED = GraceNeed(longest_step_s=0.8, save_s=2.0, step_s=0.5, interval_steps=100)
SOME = Measured(need=NEED, saves_s=(2.0, 1.0), costs_s=(9.0, 0.1), attempts=2)


def words(measured: Measured, *, lead_s: int = 120, setting: Setting = BY_STEPS, nodes: int = 4) -> dict[str, str]:
    return dict(in_words(advise(measured, nodes=nodes, setting=setting), lead_s=lead_s, setting=setting))


def test_the_interval_is_that_of_the_policy_in_steps_of_this_run():
    found = advise(SOME, nodes=4, setting=BY_STEPS)
    assert found.mtbf_s == 50 * DAY_S / 4
    assert found.plan == plan(0.1, found.mtbf_s, step_s=0.5, durable_s=1.5)
    assert found.steps == round(found.plan.interval_s / 0.5)
    assert found.now is not None
    assert found.now.interval_s == 50
    assert found.lead_s == 20  # 0.8 + 2 + 3 for the requeue + 5 for the signal, in tens


def test_without_a_measured_cost_the_time_until_durable_stands_for_it_and_that_is_said():
    found = words(Measured(need=NEED, saves_s=(2.0,), attempts=1))
    assert "the time until they are durable stands for it" in found["interval"]
    assert "stands for it" not in words(SOME)["interval"]


@pytest.mark.parametrize(
    ("need", "lead_s", "expected"),
    [
        (NEED, 120, "at least 20 (it is 120, which is enough)"),
        (NEED, 10, "at least 20 (it is 10, which is not enough)"),
        (GraceNeed(longest_step_s=1.0, save_s=9.0, cut_off=True), 120, "more than 20 (it is 120, which may not be"),
        (GraceNeed(longest_step_s=1.0, save_s=9.0, cut_off=True), 5, "more than 20 (it is 5, which is not enough)"),
        (GraceNeed(), 120, "is 120; whether that is enough is not known"),
    ],
    ids=["enough", "too short", "cut off", "cut off and short", "unknown"],
)
def test_what_is_said_about_the_lead(need, lead_s, expected):
    assert expected in words(Measured(need=need, attempts=1), lead_s=lead_s)["signal lead"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (BY_STEPS, "now it is 100 steps, every 50 s"),
        (Setting(interval="seconds", steps=100, seconds=600.0), "now it is 10 min, every 10 min"),
        (Setting(interval="auto", steps=100, seconds=0.0), "it is auto now"),
        (Setting(interval="steps", steps=0, seconds=0.0), "now there are none but at stops and at the end"),
    ],
    ids=["steps", "seconds", "auto", "none"],
)
def test_what_is_said_about_the_present_interval(setting, expected):
    assert expected in words(SOME, setting=setting)["interval"]


@given(
    st.none() | st.floats(0, 1e6), st.lists(st.floats(0, 1e6), max_size=3), st.lists(st.floats(0, 1e6), max_size=3),
    st.integers(0, 1000), st.floats(0, 1e12), st.integers(1, 65_536), st.integers(0, 10**15), st.floats(0, 1e8),
    st.sampled_from(["steps", "seconds", "auto"]),
)  # fmt: skip
def test_whatever_was_measured_there_is_an_advice(step_s, saves, costs, failures, node_s, nodes, steps, seconds, kind):
    measured = Measured(
        need=GraceNeed(longest_step_s=step_s, save_s=max(saves, default=None), step_s=step_s), saves_s=tuple(saves),
        costs_s=tuple(costs), history=FailureHistory(failures=failures, node_s=node_s), attempts=1,
    )  # fmt: skip
    found = words(measured, nodes=nodes, setting=Setting(interval=kind, steps=steps, seconds=seconds))
    assert set(found) == {"measured", "failures", "signal lead", "interval"}
    assert not any(word in " ".join(found.values()) for word in ("nan", "inf ", "None"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm here
    path = tmp_path / "config.yaml"
    path.write_text(f"command: x\nrun_folder: {tmp_path}/runs/mine\nnodes: 2\n")
    return path


def ask(*words_: str) -> Result:
    return CliRunner().invoke(cli, ["advise", *words_], standalone_mode=False)


def test_it_says_that_nothing_was_measured_and_creates_nothing(config):
    told = ask(str(config))
    assert told.return_value == 0
    assert "nothing yet: a run of this workload must have saved once" in told.output
    assert not (config.parent / "runs").exists()
    value = json.loads(ask(str(config), "--json").output)
    assert (value["signal_lead_s"]["least"], value["interval"]["recommended"]) == (None, None)


def measured_run(config: Path, name: str) -> RunFolder:
    run = RunFolder(config.parent / "runs" / name)
    run.create()
    facts = Timings(longest_step_s=0.8, step_s=0.5, saves_s=(2.0, 1.0), costs_s=(0.1,))
    history.write(run.path, fingerprint(load(config).workload), "7.0.0", facts)
    journal = run.journal(Attempt(job="7", restart=0))
    journal.append("workers started", world_size=2)
    journal.append("verdict", cause="node lost", first_step=0, last_step=9)
    return run


def test_it_advises_from_the_runs_own_folder(config):
    measured_run(config, "mine")
    told = " ".join(ask(str(config)).output.split())
    assert (
        "1 attempt of this run, a step takes 0.5 s, a save is durable after 1.5 s, it costs the training 0.1 s" in told
    )
    assert "failures 1 in" in told
    value: dict[str, Any] = json.loads(ask(str(config), "--json").output)
    assert value["signal_lead_s"] == {"least": 20, "configured": 120}
    assert value["failures"]["failures"] == 1
    assert value["interval"]["steps"] == round(value["interval"]["recommended"]["interval_s"] / 0.5)
    assert value["interval"]["cost_was_measured"] is True


def test_or_from_a_run_of_the_same_workload_beside_it(config):
    measured_run(config, "other")
    told = " ".join(ask(str(config)).output.split())
    assert "of runs of the same workload beside it" in told
    assert "failures none seen" in told, "another run's failures are not this one's"


def test_a_damaged_folder_is_no_traceback(config):
    run = measured_run(config, "mine")
    run.journal().path.write_bytes(b"\xff\0{]\n" * 9)
    (run.path / history.TIMINGS_FILE).write_text('{"workload": 7')
    assert "nothing yet" in ask(str(config)).output


def test_a_damaged_file_is_told_once(config, monkeypatch, caplog):
    run = measured_run(config, "mine")
    (run.path / history.TIMINGS_FILE).write_text('{"workload": 7')
    monkeypatch.setattr(operation.slurm, "available", lambda: True)
    monkeypatch.setattr(operation.slurm, "site", lambda **_: Site(preempt_type="", kill_wait_s=None, clock=None))
    monkeypatch.setattr(operation.slurm, "partitions", lambda **_: [])
    found = operation.counsel(load(config), os.environ)
    assert found.findings and caplog.text.count("are ignored") == 1
