"""Configurations of other packages become ours: each option is mapped, or named."""

import copy
import signal

import pytest
from hypothesis import given, strategies
from of_each import of_each

from slurmft.compat import (
    FaultToleranceConfig,
    FaultTolerancePlugin,
    NVRxStragglerDetectionConfig,
    NVRxStragglerDetectionManager,
    PreemptionPlugin,
    RerunStateMachineConfig,
    TrainingConfig,
    configuration,
)
from slurmft.compat.neighbours import AlwaysOn, To, Without
from slurmft.config.run import load
from slurmft.errors import ConfigError, UsageError

CLASSES = [FaultToleranceConfig, FaultTolerancePlugin, NVRxStragglerDetectionConfig, PreemptionPlugin, TrainingConfig,
           RerunStateMachineConfig]  # fmt: skip


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


@of_each(
    made__named=[
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
    ]
)
def test_what_makes_no_sense_is_refused_where_it_is_written(made, named):
    with pytest.raises(ConfigError, match=named):
        made()


def test_what_was_not_given_is_read_as_its_default():
    options = PreemptionPlugin(preempt_time=30)
    assert options.preempt_time == 30 and repr(options) == "PreemptionPlugin(preempt_time=30)"
    assert (options.enable_exit_handler, options.enable_exit_handler_for_data_loader, options.callbacks) == (
        True, False, None,
    )  # fmt: skip
    plugin, straggler = FaultTolerancePlugin(), NVRxStragglerDetectionConfig()
    assert (plugin.num_in_job_restarts, plugin.num_job_retries_on_failure) == (3, 2)
    assert (plugin.initial_rank_heartbeat_timeout, plugin.rank_heartbeat_timeout) == (1800.0, 0.0)
    assert (straggler.enabled, straggler.report_time_interval, straggler.num_gpu_perf_scores_to_print) == (
        False,
        300,
        5,
    )
    assert TrainingConfig().exit_signal is signal.SIGTERM and TrainingConfig().train_iters is None
    config = FaultToleranceConfig()
    assert config.max_no_progress_restarts == config.max_no_progress_cycles - 1
    with pytest.raises(TypeError):  # it would change nothing
        config.rank_section_timeouts["step"] = 5


@of_each(options=CLASSES)
def test_every_option_can_be_read_and_a_misspelt_one_is_named(options):
    for name in options.RULES:
        getattr(options(), name)
    with pytest.raises(AttributeError, match=f"{options.__name__} has no option nonsense"):
        _ = options().nonsense
    name = next(iter(options.RULES))
    with pytest.raises(AttributeError, match=f"did you mean {name}"):
        getattr(options(), name + "x")


@given(data=strategies.data())
def test_an_assignment_is_as_good_as_an_argument(data):
    """Whatever is assigned, in any order: the same settings, remarks and refusals as of a new object."""
    values = {
        "calc_ft_timeouts": strategies.booleans(), "safety_factor": strategies.sampled_from([2.0, -1, "much"]),
        "enable_ft_package": strategies.sampled_from([True, False, "yes"]), "segment": strategies.sampled_from([4]),
        "rank_heartbeat_timeout": strategies.sampled_from([None, 5, "?"]),
        "simulate_fualt": strategies.booleans(),
    }  # fmt: skip
    config, told = FaultToleranceConfig(), {}
    for name in data.draw(strategies.lists(strategies.sampled_from(sorted(values)), max_size=8)):
        value = data.draw(values[name])
        try:
            fresh = FaultToleranceConfig(**{**told, name: value})
        except ConfigError as refused:
            with pytest.raises(ConfigError) as again:
                setattr(config, name, value)
            assert str(again.value) == str(refused)
        else:
            setattr(config, name, value)
            told[name] = value
            assert getattr(config, name) == value and sorted(config.remarks) == sorted(fresh.remarks)
        assert config.settings() == FaultToleranceConfig(**told).settings()


def test_of_two_names_of_one_key_the_one_that_was_assigned_last_counts():
    config = FaultToleranceConfig(max_no_progress_restarts=3, max_no_progress_cycles=9)
    config.max_no_progress_restarts = 5
    assert config.settings() == {"fault_tolerance": {"max_no_progress_cycles": 6}}
    assert (config.max_no_progress_cycles, config.max_no_progress_restarts) == (6, 5)


def test_configurations_that_are_assigned_to_reach_the_run():
    """As users of Megatron Bridge write it: ``cfg.ft.calc_ft_timeouts = True``."""
    ft, stragglers, rerun, train = (
        FaultToleranceConfig(), NVRxStragglerDetectionConfig(), RerunStateMachineConfig(), TrainingConfig(),
    )  # fmt: skip
    ft.calc_ft_timeouts = stragglers.enabled = stragglers.stop_if_detected = True
    rerun.rerun_mode, train.exit_signal, train.exit_signal_handler = "report_stats", signal.SIGUSR1, True
    config = configuration(copy.deepcopy(ft), stragglers, rerun, train, command=["x"], run_folder="r")
    assert config.fault_tolerance.calc_ft_timeouts and config.straggler_detection.stop_if_detected
    assert (config.rerun.mode, config.preemption.signal) == ("report_stats", "SIGUSR1")
    with pytest.raises(UsageError, match="no mode"):
        rerun.rerun_mode = "nonsense"
    assert rerun.settings() == {"rerun": {"mode": "report_stats"}}


def test_what_a_training_configuration_says_beside_signals_stays_in_the_script():
    (remark,) = TrainingConfig(train_iters=500, exit_signal=15).remarks
    assert "train_iters has no counterpart: it is for the training script" in remark
    with pytest.raises(ConfigError, match="did you mean exit_signal"):
        TrainingConfig(exit_signl=15)
    with pytest.raises(ConfigError, match="signal"):
        TrainingConfig(exit_signal=signal.SIGKILL)


def test_the_straggler_manager_says_what_to_write():
    with pytest.raises(UsageError, match="nothing is wrapped"):
        NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig(enabled=True))


@of_each(keys__signal_=[
        ({"exit_signal": signal.SIGINT}, "SIGINT"), ({"exit_signal": "SIGUSR2"}, "SIGUSR2"),
        ({"preemption": {"exit_signal": 10}}, "SIGUSR1"), ({"preemption": {"signal": "INT"}}, "SIGINT"),
        ({"exit_signal": 2, "preemption": {"signal_lead_s": 60}, "exit_signal_handler": True}, "SIGINT"),
        ({"exit_signal": None}, "SIGTERM"),
    ])  # fmt: skip
def test_a_signal_may_be_called_as_megatron_does(keys, signal_):
    assert configuration(command=["x"], run_folder="r", **keys).preemption.signal == signal_


@of_each(keys__named=[
        ({"exit_signal": 2, "preemption": {"signal": "SIGTERM"}}, "are the same key"),
        ({"exit_signal": "SIGKILL"}, "SIGTERM.*SIGINT"), ({"preemption": {"signal": [1]}}, "SIGTERM.*SIGINT"),
        ({"preemption": {"signal": True}}, "SIGTERM.*SIGINT"), ({"exit_signal": 2, "preemption": 7}, "preemption"),
        ({"groups": []}, "a run is one task.*sync"), ({"tasks": [{}]}, "a run is one task"),
        ({"workflow": {}}, "a run is one task"), ({"inputs": [{"url": "s3://a"}]}, "write sync:"),
        ({"checkpoint": [{"path": "/a", "url": "s3://b", "frequency": "5m"}]}, "write it as sync:"),
    ])  # fmt: skip
def test_keys_of_others_that_cannot_be_taken_say_what_to_write(keys, named):
    with pytest.raises(ConfigError, match=named):
        configuration(command=["x"], run_folder="r", **keys)


@of_each(options=CLASSES)
def test_every_key_that_is_mapped_to_exists(options):
    known = configuration(command=["x"], run_folder="r").model_dump()
    for rule in options.RULES.values():
        assert isinstance(rule, To | AlwaysOn | Without)
        if isinstance(rule, To):
            section, key = rule.key.split(".")
            assert key in known[section]
