"""Keys that users bring along from other packages, and a launcher that would decide beside the supervisor."""

import pytest

from slurmft.config.run import load, validate
from slurmft.errors import ConfigError

RUN = {"command": ["python", "train.py"], "run_folder": "r"}


def test_osmos_spelling_is_ours():
    config = validate(
        {**RUN, "exitActions": {"COMPLETE": "0,1-10,16,20", "RESCHEDULE": 42}, "ignoreNonleadStatus": True}, source="it"
    )
    same = validate(
        {**RUN, "exit_actions": {"COMPLETE": "0,1-10,16,20", "RESCHEDULE": "42"}, "ignore_nonlead_status": True},
        source="it",
    )
    assert config == same and config.ignore_nonlead_status
    assert "exitActions" not in config.as_yaml()


def test_it_can_be_overridden_at_the_prompt(tmp_path):
    (tmp_path / "run.yaml").write_text("command: [x]\nrun_folder: r\nexitActions: {FAIL: 3}\n")
    config = load(tmp_path / "run.yaml", ["exitActions.COMPLETE=0,9", "ignoreNonleadStatus=true"])
    assert {str(key): value for key, value in config.exit_actions.items()} == {"FAIL": "3", "COMPLETE": "0,9"}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"fault_tolerance": {"enable_ft_package": True}}, "fault_tolerance.enable_ft_package is not needed here"),
        ({"fault_tolerance": {"enable_ft_package": False}}, "enable_ft_package cannot be switched off here: faults"),
        ({"preemption": {"exit_signal_handler": False}}, "preemption.exit_signal_handler cannot be switched off here"),
        ({"exit_signal_handler": True}, "it: exit_signal_handler is not needed here: a stop always saves first"),
        ({"preemption": {"exit_signal_handler_for_dataloader": True}}, "always shielded"),
        ({"preemption": {"enable_exit_handler": None}}, "enable_exit_handler cannot be switched off here"),
    ],
)
def test_a_switch_that_is_always_on_is_accepted_with_one_line(keys, line, caplog):
    assert validate({**RUN, **keys}, source="it") == validate(RUN, source="it")
    (record,) = caplog.records
    assert line in record.getMessage() and "\n" not in record.getMessage()


def test_a_run_of_an_earlier_version_is_read_without_the_keys_that_are_gone(caplog):
    given = {**RUN, "fault_tolerance": {"standby_supervisor": False}}
    assert validate(given, source="it") == validate(RUN, source="it") and not caplog.records
    given["fault_tolerance"] = {"standby_supervisor": True}
    assert validate(given, source="it") == validate(RUN, source="it")
    (record,) = caplog.records
    assert "it: fault_tolerance.standby_supervisor is ignored" in record.getMessage()
    assert "slurmft requeue --rescue" in record.getMessage() and given["fault_tolerance"]


def test_a_value_is_not_changed_by_being_read():
    section = {"enable_ft_package": True, "safety_factor": 3.0}
    assert validate({**RUN, "fault_tolerance": section}, source="it").fault_tolerance.safety_factor == 3.0
    assert section == {"enable_ft_package": True, "safety_factor": 3.0}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"exitActions": {"FAIL": "1"}, "exit_actions": {"FAIL": "1"}}, "are the same key"),
        ({"exitActions": {"GIVE_UP": "1"}}, "exit_actions.GIVE_UP"),
        ({"exitActions": 7}, "exit_actions: "),
        ({"ignoreNonleadStatus": "sometimes"}, "ignore_nonlead_status: "),
        ({"exitaction": {"FAIL": "1"}}, "unknown key exitaction"),
        ({"fault_tolerance": {"enable_ft_package": "yes"}}, "enable_ft_package is 'yes'; it is true or false"),
        ({"preemption": {"exit_signal_handler": 1}}, "exit_signal_handler is 1"),
        ({"preemption": {"enable_ft_package": True}}, "unknown key preemption.enable_ft_package"),
        ({"fault_tolerance": 7}, "fault_tolerance: "),
    ],
)
def test_the_rest_is_refused_as_ever(keys, named):
    with pytest.raises(ConfigError, match=named):
        validate({**RUN, **keys}, source="it")


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes=1:4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 train.py",
        "/opt/venv/bin/torchrun --rdzv-id 7 --nnodes 1:4 train.py",
        "python -m torch.distributed.run --nnodes=1:4 train.py",
        "ft_launcher --max-restarts=3 --nnodes=1:4 train.py",
        ["bash", "-c", "exec torchrun --nnodes=1:4 train.py --lr 1"],
    ],
)
def test_a_launcher_with_a_range_of_nodes_is_refused_with_what_to_write(command):
    with pytest.raises(ConfigError, match=r"nodes: 4 and elastic: \{min_nodes: 1\}.*launcher: torchrun"):
        validate({**RUN, "command": command}, source="it")


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes=2 --node-rank=0 train.py",
        "torchrun --nnodes=2:2 train.py",
        "torchrun --standalone train.py --nnodes=1:4",
        "python train.py --nnodes=1:4",
        ["bash", "-c", "echo 'torchrun"],
        ["torchrun", "--nnodes"],
        ["bash"],
    ],
)
def test_others_are_left_alone(command):
    assert validate({**RUN, "command": command}, source="it").command
