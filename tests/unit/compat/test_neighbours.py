"""Configurations of other packages become ours: each option is mapped, or named."""

from __future__ import annotations

import signal

import pytest

from slurmft.compat import (
    FaultToleranceConfig,
    FaultTolerancePlugin,
    NVRxStragglerDetectionConfig,
    PreemptionPlugin,
    RerunStateMachineConfig,
    configuration,
)
from slurmft.compat.options import AlwaysOn, To, Without
from slurmft.config.config import load
from slurmft.errors import ConfigError

CLASSES = [FaultToleranceConfig, FaultTolerancePlugin, NVRxStragglerDetectionConfig, PreemptionPlugin]


def test_the_plugins_of_a_recipe_become_a_configuration_that_can_be_submitted(tmp_path):
    config = configuration(
        FaultTolerancePlugin(
            enable_ft_package=True, calc_ft_timeouts=True, num_in_job_restarts=3, num_job_retries_on_failure=2,
            initial_rank_heartbeat_timeout=1800, rank_heartbeat_timeout=300,
        ),
        PreemptionPlugin(preempt_time=60, enable_exit_handler=True, enable_exit_handler_for_data_loader=False),
        NVRxStragglerDetectionConfig(
            enabled=True, report_time_interval=300.0, calc_relative_gpu_perf=True, calc_individual_gpu_perf=True,
            num_gpu_perf_scores_to_print=5, gpu_relative_perf_threshold=0.7, gpu_individual_perf_threshold=0.7,
            stop_if_detected=True, enable_logging=True, profiling_interval=1,
            logger_name="megatron.bridge.NVRxStragglerDetection",
        ),
        RerunStateMachineConfig(check_for_spiky_loss=True),
        command="python train.py", run_folder=str(tmp_path / "run"), nodes=2,
    )  # fmt: skip
    assert (config.fault_tolerance.num_in_job_restarts, config.fault_tolerance.rank_heartbeat_timeout) == (3, 300.0)
    assert config.fault_tolerance.calc_ft_timeouts and config.preemption.signal_lead_s == 60
    assert config.straggler_detection.stop_if_detected and config.rerun.check_for_spiky_loss
    (tmp_path / "run.yaml").write_text(config.as_yaml())
    again = load(tmp_path / "run.yaml")
    assert again.straggler_detection == config.straggler_detection and again.fault_tolerance == config.fault_tolerance


def test_keys_beat_parts_and_later_parts_earlier_ones():
    config = configuration(
        PreemptionPlugin(preempt_time=60), PreemptionPlugin(preempt_time=90),
        FaultToleranceConfig(safety_factor=3.0, rank_heartbeat_timeout=9), fault_tolerance={"safety_factor": 4.0},
        command=["x"], run_folder="r",
    )  # fmt: skip
    assert config.preemption.signal_lead_s == 90
    assert (config.fault_tolerance.safety_factor, config.fault_tolerance.rank_heartbeat_timeout) == (4.0, 9.0)


def test_bridges_and_nvrxs_options_of_one_name_are_one_class():
    bridge = FaultToleranceConfig(
        enable_ft_package=True, calc_ft_timeouts=True, simulate_fault=True, simulated_fault_type="rank_hung",
        simulated_fault_rank=None, simulated_fault_base_delay=5,
    )  # fmt: skip
    assert bridge.remarks == () and bridge.simulated_fault_type == "rank_hung"
    assert bridge.settings()["fault_tolerance"]["simulated_fault_base_delay"] == 5
    nvrx = FaultToleranceConfig(
        workload_check_interval=5.0, initial_rank_heartbeat_timeout=None, rank_heartbeat_timeout=None,
        rank_section_timeouts={"setup": 600, "step": 180, "checkpointing": None}, rank_out_of_section_timeout=300,
        safety_factor=5.0, rank_termination_signal=signal.SIGKILL, max_no_progress_cycles=4, pci_topo_file=None,
        skip_section_response=True, enable_nic_monitor=False,
    )  # fmt: skip
    assert nvrx.remarks == ()
    config = configuration(nvrx, command=["x"], run_folder="r").fault_tolerance
    assert config.rank_section_timeouts["step"] == 180 and not config.rank_section_timeouts["checkpointing"]
    assert not config.rank_heartbeat_timeout and config.max_no_progress_cycles == 4


@pytest.mark.parametrize(
    ("made", "remark"),
    [
        (lambda: FaultToleranceConfig(enable_ft_package=False), "enable_ft_package=False is not possible"),
        (lambda: FaultTolerancePlugin(enable_ft_package=False), "enable_ft_package=False is not possible"),
        (lambda: PreemptionPlugin(enable_exit_handler=False), "enable_exit_handler=False is not possible"),
        (lambda: PreemptionPlugin(enable_exit_handler_for_data_loader=True), "always shielded"),
        (lambda: PreemptionPlugin(callbacks=[1]), "callbacks has no counterpart"),
        (lambda: FaultToleranceConfig(max_no_progress_cycles=0), "cannot be switched off"),
        (lambda: FaultToleranceConfig(max_no_progress_restarts=-1), "cannot be switched off"),
        (lambda: FaultToleranceConfig(rank_termination_signal=signal.SIGTERM), "killed with SIGKILL"),
        (lambda: FaultToleranceConfig(segment=4), "segment has no counterpart"),
        (lambda: FaultToleranceConfig(log_level=10), "log_level has no counterpart"),
        (lambda: NVRxStragglerDetectionConfig(enable_ptl_logging=True), "enable_ptl_logging has no counterpart"),
    ],
)
def test_an_option_that_is_not_taken_up_is_named_in_one_line(made, remark, caplog):
    options = made()
    (line,) = options.remarks
    assert remark in line and line in caplog.text and line.startswith(type(options).__name__)


def test_the_first_cycle_is_one_too():
    settings = FaultToleranceConfig(max_no_progress_restarts=3).settings()
    assert settings == {"fault_tolerance": {"max_no_progress_cycles": 4}}


def test_defaults_that_users_rely_on_are_theirs():
    assert NVRxStragglerDetectionConfig().settings() == {"straggler_detection": {"enabled": False}}
    assert PreemptionPlugin().settings() == {"preemption": {"signal_lead_s": 60}}
    assert FaultTolerancePlugin().settings() == {"fault_tolerance": {"calc_ft_timeouts": True}}
    assert FaultToleranceConfig().settings() == {}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: FaultToleranceConfig(rank_heartbeat_timout=3), "did you mean rank_heartbeat_timeout"),
        (lambda: FaultToleranceConfig(rank_heartbeat_timeout=-1), "rank_heartbeat_timeout"),
        (lambda: FaultToleranceConfig(rank_section_timeouts={"step": -1}), "rank_section_timeouts"),
        (lambda: FaultToleranceConfig(rank_section_timeouts=7), "rank_section_timeouts"),
        (lambda: FaultToleranceConfig(safety_factor=None), "safety_factor"),
        (lambda: FaultToleranceConfig(safety_factor="much"), "safety_factor"),
        (lambda: FaultToleranceConfig(enable_ft_package="yes"), "it is True or False"),
        (lambda: FaultToleranceConfig(enable_ft_package=None), "it is True or False"),
        (lambda: FaultToleranceConfig(max_no_progress_cycles="many"), "max_no_progress_cycles"),
        (lambda: FaultToleranceConfig(max_no_progress_restarts=None), "max_no_progress_cycles"),
        (lambda: FaultTolerancePlugin(num_in_job_restarts=-1), "num_in_job_restarts"),
        (lambda: FaultTolerancePlugin(num_in_job_restarts=True), "num_in_job_restarts"),
        (lambda: PreemptionPlugin(preempt_time=0), "signal_lead_s"),
        (lambda: PreemptionPlugin(preempt_time=None), "signal_lead_s"),
        (lambda: PreemptionPlugin(preempt_tim=60), "did you mean preempt_time"),
        (lambda: NVRxStragglerDetectionConfig(report_time_interval=-100.0), "report_time_interval"),
        (lambda: NVRxStragglerDetectionConfig(gpu_relative_perf_threshold=1.5), "gpu_relative_perf_threshold"),
        (lambda: configuration(PreemptionPlugin(), command=["x"]), "run_folder: missing"),
        (lambda: configuration(command=["x"], run_folder="r", preemtion={}), "did you mean preemption"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(made, named):
    with pytest.raises(ConfigError, match=named):
        made()


def test_what_was_not_given_is_no_attribute():
    options = PreemptionPlugin(preempt_time=30)
    assert options.preempt_time == 30 and repr(options) == "PreemptionPlugin(preempt_time=30)"
    with pytest.raises(AttributeError, match="was not given 'callbacks'"):
        _ = options.callbacks


@pytest.mark.parametrize("options", CLASSES)
def test_every_key_that_is_mapped_to_exists(options):
    known = configuration(command=["x"], run_folder="r").model_dump()
    for rule in options.RULES.values():
        assert isinstance(rule, To | AlwaysOn | Without)
        if isinstance(rule, To):
            section, key = rule.key.split(".")
            assert key in known[section]
