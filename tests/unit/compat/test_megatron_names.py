"""Megatron-LM's loop, as its documents show it, with its names."""

import itertools
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slurmft
from slurmft import RerunDiagnostic, RerunErrorInjector, RerunMode, RerunStateMachineConfig, get_rerun_state_machine
from slurmft.compat import RerunDataIterator, destroy_rerun_state_machine, initialize_rerun_state_machine
from slurmft.config.run import validate
from slurmft.errors import UsageError
from slurmft.policy.worker_settings import WORKER_VARIABLE
from slurmft.storage.verdicts import EVIDENCE_VARIABLE, VERDICT_VARIABLE, read_verdict

NAN = float("nan")


@pytest.fixture(autouse=True)
def own_machine(monkeypatch, tmp_path) -> Iterator[None]:
    for name in ("RANK", WORKER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv(EVIDENCE_VARIABLE, str(tmp_path / "evidence"))
    monkeypatch.setenv(VERDICT_VARIABLE, str(tmp_path / "verdict"))
    destroy_rerun_state_machine()
    yield
    destroy_rerun_state_machine()


class Training:
    """A training step as in Megatron-LM's examples."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = RerunDataIterator(torch.full((2, 3), float(number)) for number in itertools.count())
        self.factors: dict[int, list[float]] = {}
        """Step -> what the loss of each of its runs is multiplied with."""
        self.runs = 0
        self.losses: list[float] = []

    def step(self, number: int, data_iterator: Any = "own", **options: Any) -> tuple[bool, bool, int]:
        factors = iter(self.factors.get(number, []))
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(self.data if data_iterator == "own" else data_iterator):
            self.optimizer.zero_grad()
            loss = self.model(next(self.data)).square().mean() * next(factors, 1.0)
            machine.validate_result(
                result=loss, rejection_func=torch.isnan, message="found NaN in local forward loss calculation",
                tolerance=0.0, fatal=True, **options,
            )  # fmt: skip
            loss.backward()
            self.runs += 1
        ending = machine.should_checkpoint_and_exit()
        if not ending[1]:
            self.optimizer.step()
            self.losses.append(loss.item())
        return ending


def test_the_loop_of_the_documents_goes_on_after_a_transient_error(caplog):
    training, clean = Training(), Training()
    training.factors = {2: [NAN]}
    with caplog.at_level(logging.INFO):
        assert [training.step(number) for number in range(4)] == [(False, False, 0)] * 4
    assert training.runs == 5
    destroy_rerun_state_machine()
    for number in range(4):
        clean.step(number)
    assert training.losses == clean.losses
    for line in (
        "on rank 0 at iteration #2 invocation #1 (message='found NaN in local forward loss calculation')",
        "Unexpected result tensor(nan",
        "First rerun: unexpected result is not reproducible within the tolerance",
        "Possible transient error!",
    ):
        assert line in caplog.text


def test_the_same_on_another_node_is_a_correct_result_and_elsewhere_otherwise_a_persistent_error(
    caplog, monkeypatch, tmp_path
):
    for name, factors_there, code, line in (
        ("same", [NAN], 17, "Correct result (but possible Application error)"),
        ("other", [1.0], 0, "Possible persistent error!"),
    ):
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
        first = Training()
        first.factors = {1: [NAN, NAN]}
        assert first.step(0) == (False, False, 0)
        assert first.step(1) == (True, True, 16)
        assert "Need to rerun on a different GPU to verify correctness" in caplog.text
        saved = get_rerun_state_machine().state_dict(data_iterator=first.data, ckpt_format="torch")
        destroy_rerun_state_machine()

        monkeypatch.setenv("SLURMD_NODENAME", "n2")
        second = Training()
        second.model.load_state_dict(first.model.state_dict())
        second.factors = {1: factors_there}
        get_rerun_state_machine().load_state_dict(saved)
        ending = second.step(1)
        assert (ending[1], ending[2]) == (code != 0, code), name
        assert line in caplog.text
        if code:
            verdict = read_verdict(tmp_path / "verdict")
            assert verdict is not None and verdict.rerun == "correct"
        destroy_rerun_state_machine()
        caplog.clear()


def test_own_state_is_put_back_before_each_rerun():
    training = Training()
    training.factors = {1: [NAN]}
    counter = {"seen": 0}
    initialize_rerun_state_machine(
        state_save_func=lambda: dict(counter), state_restore_func=counter.update, mode=RerunMode.VALIDATE_RESULTS
    )
    machine = get_rerun_state_machine()
    for number in range(3):
        factors = iter(training.factors.get(number, []))
        while machine.should_run_forward_backward([training.data, None]):
            counter["seen"] += 1
            loss = training.model(next(training.data)).sum() * next(factors, 1.0)
            machine.validate_result(loss, torch.isnan, "loss is NaN")
            loss.backward()
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
    assert counter == {"seen": 3}


def test_an_evaluation_switches_the_machine_off_and_on_again():
    training = Training()
    training.step(0)
    machine = get_rerun_state_machine()
    mode = machine.get_mode()
    machine.set_mode(RerunMode.DISABLED)
    runs = 0
    while machine.should_run_forward_backward(None):
        runs += 1
        machine.validate_result(torch.tensor(1.0), torch.isnan, "well")
    assert runs == 1
    machine.set_mode(mode)
    training.factors = {1: [NAN]}
    assert training.step(1) == (False, False, 0) and training.runs == 3
    while machine.should_run_forward_backward(training.data):
        with pytest.raises(UsageError, match="left before it was over"):
            machine.set_mode("disabled")
        break


def test_without_reruns_a_rejected_result_raises():
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    training = Training()
    training.factors = {0: [NAN]}
    with pytest.raises(RuntimeError, match=r"Unexpected result nan.*message='found NaN"):
        training.step(0)


def test_errors_are_injected_and_statistics_are_kept(caplog):
    injector = RerunErrorInjector(error_injection_rate=1, error_injection_type=RerunDiagnostic.TRANSIENT_ERROR)
    initialize_rerun_state_machine(error_injector=injector, result_rejected_tracker_filename="rejected.log")
    assert "result_rejected_tracker_filename is not written" in caplog.text
    training = Training()
    training.step(0)
    assert training.runs == 2
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode="report_determinism_stats")
    training = Training()
    with caplog.at_level(logging.INFO):
        training.step(0)
        get_rerun_state_machine().report()
    assert training.runs == 2 and "1/1 identical" in caplog.text


def test_a_spike_is_what_is_far_above_the_first_results():
    machine = get_rerun_state_machine()
    spiky = partial(machine.is_unexpectedly_large, threshold=10, context="loss", num_samples=3)
    assert [spiky(torch.tensor(value)) for value in (1.0, -2.0, 1.0, 19.0, 21.0, float("inf"), NAN)] == [
        False, False, False, False, True, True, False,
    ]  # fmt: skip
    assert machine.is_unexpectedly_large(torch.tensor(21.0), 10, "other", 3) is False
    assert spiky(torch.tensor(30.0), resample=True) is False


def test_the_section_becomes_ours():
    section = RerunStateMachineConfig(
        error_injection_rate=1000, error_injection_type="correct_result", rerun_mode="report_determinism_stats",
        check_for_spiky_loss=True,
    )  # fmt: skip
    config = validate({"command": ["x"], "run_folder": "r", **section.settings()}, source="it")
    assert (config.rerun.mode, config.rerun.error_injection_rate) == ("report_stats", 1000)
    assert config.rerun.check_for_spiky_loss and config.rerun.error_injection_type == "correct_result"
    assert RerunStateMachineConfig().rerun_mode == "validate_results"


def test_the_enumerations_have_megatrons_names_and_values():
    assert {mode.name for mode in RerunMode} == {"DISABLED", "VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS"}
    assert RerunMode("report_determinism_stats") is RerunMode.REPORT_DETERMINISM_STATS is RerunMode("report_stats")
    assert [one.value for one in RerunDiagnostic] == ["correct_result", "transient_error", "persistent_error"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: RerunErrorInjector(error_injection_rate=-1), "error_injection_rate is -1"),
        (lambda: RerunErrorInjector(error_injection_rate=None), "error_injection_rate is None"),
        (lambda: RerunErrorInjector(1, "cosmic ray"), "error_injection_type is 'cosmic ray'"),
        (lambda: RerunStateMachineConfig(rerun_mode="skip"), "never left out"),
        (lambda: RerunStateMachineConfig(rerun_mode=None), "None is no mode"),
        (lambda: RerunStateMachineConfig(check_for_nan_in_loss="perhaps"), "check_for_nan_in_loss"),
        (lambda: initialize_rerun_state_machine(mode="fast"), "'fast' is no mode"),
        (lambda: initialize_rerun_state_machine(state_save_func=dict), "belong together"),
        (lambda: initialize_rerun_state_machine(state_save_func=1, state_restore_func=2), "cannot be called"),
        (lambda: initialize_rerun_state_machine(error_injector=3), "it is a RerunErrorInjector"),
        (lambda: initialize_rerun_state_machine(speed=3), "does not take these arguments"),
        (lambda: (get_rerun_state_machine(), initialize_rerun_state_machine()), "there is a re-run state machine"),
        (lambda: get_rerun_state_machine().should_run_forward_backward(iter([])), "cannot be rewound"),
        (lambda: get_rerun_state_machine().should_run_forward_backward([1]), "cannot be rewound"),
        (lambda: get_rerun_state_machine().set_mode("on"), "'on' is no mode"),
        (lambda: get_rerun_state_machine().validate_result(1.0, torch.isnan, "x", lambda a, b: 0.0), "comparison_func"),
        (lambda: get_rerun_state_machine().validate_result(1.0, None, "x"), "rejection_func is None"),
        (lambda: get_rerun_state_machine().validate_result(1.0, torch.isnan, "x", tolerance=NAN), "tolerance is nan"),
        (lambda: get_rerun_state_machine().validate_result("1", torch.isnan, "x"), "number"),
        (lambda: get_rerun_state_machine().state_dict(ckpt_format="torch_dist"), "ckpt_format is 'torch_dist'"),
        (lambda: get_rerun_state_machine().load_state_dict({"a": 1}), "not a state of the re-run state machine"),
        (lambda: get_rerun_state_machine().load_state_dict(None), "not a state of the re-run state machine"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(call, named):
    with pytest.raises(UsageError, match=named):
        call()


def test_data_that_does_not_fit_its_state_is_refused():
    training = Training()
    machine = get_rerun_state_machine()
    saved = machine.state_dict([training.data, None])
    machine.load_state_dict(saved)
    with pytest.raises(UsageError, match="of 1 data iterators, and there are 2"):
        machine.should_run_forward_backward([training.data, Training().data])


def test_the_values_are_to_be_had_without_torch():
    assert slurmft.RerunMode is RerunMode and slurmft.compat.RerunMode is RerunMode
