"""Just in time on a device that does later what the host has asked for: what is kept is a whole step, or nothing.

``tests/unit/worker/test_waits.py`` takes each wait and check out of the source once, and names the test that fails
then.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from late_device import LateDevice, Stream, install
from listener import Listener

from slurmft.checkpoint import CheckpointManager, just_in_time, snapshots
from slurmft.checkpoint.just_in_time import AHEAD
from slurmft.trainer import streams
from slurmft.trainer.savers import SAVERS
from slurmft.worker.session import Session

SIZE = 2000


class Adding(torch.optim.Optimizer):
    """Adds its rate to the weights: on the device, later. It counts its steps in main memory, at once, as Adam does."""

    def __init__(self, device: LateDevice | None, weight: torch.nn.Parameter) -> None:
        super().__init__([weight], {"lr": 1.0})
        self._device, self.stream, self.kernels = device, "default", 1

    def step(self, closure: object = None) -> None:
        group = self.param_groups[0]
        (weight,) = group["params"]
        state = self.state[weight]
        if not state:
            state["step"], state["sum"] = torch.tensor(0.0), torch.zeros(SIZE)
            if self._device is not None:
                self._device.owned(state["sum"])
        state["step"] += 1
        rate, half = group["lr"], SIZE // 2
        assert self._device is not None
        for part in (slice(0, half), slice(half, SIZE)):  # a step of two kernels: between them it is torn
            self._device.launch(lambda part=part: weight.data[part].add_(rate))
            self._device.launch(lambda part=part: state["sum"][part].add_(rate))


class Halving:
    """A scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.last_epoch = optimizer, 0

    def step(self) -> None:
        self.last_epoch += 1
        self._optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_epoch = state["last_epoch"]


class Run:
    """A loop that never waits for the device, as a plain one does not.

    Args:
        has_buffer: which each forward pass changes, on the device: to the number of the step.
    """

    def __init__(self, folder: Path, device: LateDevice | None, *, has_buffer: bool = False) -> None:
        self.device = device
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(SIZE))
        if device is not None:
            device.owned(self.model.weight)
        if has_buffer:
            self.model.register_buffer("mean", torch.zeros(1))
            if device is not None:
                device.owned(self.model.mean)
        self.optimizer = Adding(device, self.model.weight)
        self.scheduler = Halving(self.optimizer)
        self.checkpoints = CheckpointManager(folder)
        self.done = 0

    def step(self, collective: Callable[[], object] = lambda: None, *, updates: bool = True) -> None:
        self.done += 1
        if hasattr(self.model, "mean") and self.device is not None:
            mean, number = self.model.mean, float(self.done)
            self.device.launch(lambda: mean.fill_(number))
        collective()
        if updates:
            self.optimizer.step()
            self.scheduler.step()
        SAVERS.at_boundary(self.done)

    def save(self) -> None:
        self.checkpoints.save(self.model, self.optimizer, step=self.done, scheduler=self.scheduler, async_save=False)


@pytest.fixture
def device(monkeypatch) -> LateDevice:
    device = LateDevice()
    install(monkeypatch, device)
    return device


@pytest.fixture
def listener(own_environment) -> Listener:
    SAVERS.listener = one = Listener()
    yield one
    SAVERS.listener, SAVERS.is_armed = None, False


@pytest.fixture
def memory(listener, tmp_path, monkeypatch) -> Path:
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(memory))
    return memory


@pytest.fixture
def run(device, memory, tmp_path) -> Iterator[Run]:
    run = begun(Run(tmp_path / "checkpoints", device))
    yield run
    run.checkpoints.close()


def begun(run: Run) -> Run:
    """After one step, which is saved; from here on the device gets on only as a test says."""
    run.step()
    run.save()
    run.device.frozen.add(run.device.default)
    return run


def rescued() -> None:
    """As the agent asks for it: in a thread of its own."""
    thread = threading.Thread(target=SAVERS.rescue, name="slurmft-rescue")
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for the collective"


def get_on(run: Run, stream: Stream | None = None) -> None:
    """The device does all that it can."""
    assert run.device is not None
    run.device.run(stream or run.device.default)


def whole_step(run: Run) -> None:
    run.step()
    get_on(run)


def loaded(run: Run, monkeypatch) -> tuple[int, list[float], float, float, int]:
    """Step, weights, rate, counter, and the scheduler's place, as the next attempt finds them."""
    run.checkpoints.close()
    monkeypatch.setattr(streams, "device_of", lambda _: None)
    SAVERS.listener = None
    other = Run(run.checkpoints.directory, None, has_buffer=hasattr(run.model, "mean"))
    found = other.checkpoints.load_latest(other.model, other.optimizer, scheduler=other.scheduler)
    other.checkpoints.close()
    (state,) = other.optimizer.state.values()
    weights = other.model.weight.tolist()
    assert state["sum"].tolist() == weights
    if hasattr(other.model, "mean"):
        assert other.model.mean.item() == found.step, "the buffers are those of another step"
    return found.step, weights, other.optimizer.param_groups[0]["lr"], float(state["step"]), other.scheduler.last_epoch


def rates(steps: int) -> float:
    return sum(0.5**number for number in range(steps))


def expected(step: int) -> tuple[int, list[float], float, float, int]:
    return step, [rates(step)] * SIZE, 0.5**step, float(step), step


@pytest.mark.parametrize("ahead", range(AHEAD - 1))
def test_the_step_that_lies_on_the_device_is_kept_however_far_the_host_is_ahead(run, listener, monkeypatch, ahead):
    run.step()
    run.step()
    run.step(run.device.hang)  # a rank has died: the fourth step is never reduced
    for _ in range(ahead):
        run.step()
    get_on(run)
    rescued()
    assert listener.rescued == [3]
    assert loaded(run, monkeypatch) == expected(3)


def test_where_the_host_waits_in_the_step_that_hangs_the_one_before_is_kept(run, listener, monkeypatch):
    run.step()
    whole_step(run)
    run.device.hang()
    rescued()
    assert listener.rescued == [3]
    assert loaded(run, monkeypatch) == expected(3)


def test_a_device_that_is_too_far_behind_keeps_nothing(run, listener, caplog):
    run.device.hang()
    for _ in range(AHEAD + 1):
        run.step()
    get_on(run)
    with caplog.at_level(logging.WARNING):
        rescued()
    assert listener.rescued == []
    assert f"the device is more than {AHEAD} steps behind the host" in caplog.text


@pytest.mark.parametrize("kernels", [1, 2, 3])
def test_an_update_that_is_half_done_is_not_kept(run, listener, kernels):
    whole_step(run)
    run.step()
    run.device.run(run.device.default, 1 + kernels)  # the mark at its beginning, and some of its kernels
    rescued()
    assert listener.rescued == []


def test_an_update_that_begins_during_the_copy_is_not_kept(run, listener, monkeypatch, caplog):
    whole_step(run)
    end = run.device.hang()
    run.step()
    copy = snapshots.copy_into

    def copy_meanwhile(*arguments: object, **options: object) -> None:
        copy(*arguments, **options)
        end()
        run.device.run(run.device.default, 3)

    monkeypatch.setattr(snapshots, "copy_into", copy_meanwhile)
    with caplog.at_level(logging.WARNING):
        rescued()
    assert listener.rescued == []
    assert "step 2 is not kept just in time" in caplog.text


def test_an_optimizer_with_a_stream_of_its_own_is_waited_for(run, listener, monkeypatch):
    """The default stream is at the end of the step, and the optimizer's own is not."""
    with run.device.stream("optimizer") as own:
        run.device.frozen.add(own)
        run.optimizer.step()
    run.scheduler.step()
    run.done += 1
    SAVERS.at_boundary(run.done)
    get_on(run)
    rescued()
    assert listener.rescued == [], "its weights are those of the step before"
    get_on(run, own)
    rescued()
    assert listener.rescued == [2]
    assert loaded(run, monkeypatch) == expected(2)


def test_the_end_of_a_later_step_on_another_stream_leaves_nothing_to_trust(run, listener):
    """The device is past the end of step 3, which copies buffers, and before its update."""
    whole_step(run)
    with run.device.stream("optimizer") as own:
        run.device.frozen.add(own)
        run.optimizer.step()
    run.scheduler.step()
    run.done += 1
    SAVERS.at_boundary(run.done)
    get_on(run)
    rescued()
    assert listener.rescued == []


@pytest.mark.parametrize("updates", [True, False], ids=["update", "accumulation"])
@pytest.mark.parametrize("things", range(12))
def test_buffers_are_of_the_step_wherever_the_device_stands(
    device, memory, listener, tmp_path, monkeypatch, updates, things
):
    """After so many things of step 2, which ends with a copy of the buffers and a mark behind it."""
    run = begun(Run(tmp_path / "checkpoints", device, has_buffer=True))
    for buffer in run.checkpoints._rescue._buffers.values():
        device.owned(buffer)
    whole_step(run)
    run.step(updates=updates)
    device.run(device.default, things)
    rescued()
    run.checkpoints.close()
    if not device.default.queue:
        assert listener.rescued == [3]
    for step in listener.rescued:
        found = loaded(run, monkeypatch)
        assert found == (expected(step) if updates else (step, *expected(2)[1:]))


def test_the_steps_before_a_load_are_not_those_of_what_was_loaded(run, listener):
    """Step 2 comes twice: the device has done the first one, and the second one is what ranks have noted."""
    whole_step(run)
    found = run.checkpoints.load_latest(run.model, run.optimizer, scheduler=run.scheduler)
    assert found.step == 1
    run.done = 1
    run.step(run.device.hang)
    get_on(run)
    rescued()
    assert listener.rescued == []


def test_the_steps_before_it_was_armed_anew_are_not_kept(run, listener):
    """While it was not, an update was not heard of: the device has the weights of step 3."""
    whole_step(run)
    parts = {"scheduler": run.scheduler, "async_save": True}
    run.checkpoints.save(run.model, run.optimizer, step=2, extra={"only": "here"}, **parts)
    run.step()
    run.checkpoints.save(run.model, run.optimizer, step=3, **parts)
    rescued()
    assert listener.rescued == []


def test_nothing_is_copied_where_the_device_has_gone_on_before(run, listener, monkeypatch, caplog):
    """The place would be lost, and what lies in it."""
    whole_step(run)
    run.step()
    alone, copies = just_in_time.alone_on_this_node, len(run.device.copies)

    @contextlib.contextmanager
    def wait_for_another_rank(folder: Path, step: int, part: int) -> Iterator[int]:
        with alone(folder, step, part) as mark:
            run.device.run(run.device.default, 3)
            yield mark

    monkeypatch.setattr(just_in_time, "alone_on_this_node", wait_for_another_rank)
    with caplog.at_level(logging.WARNING):
        rescued()
    assert listener.rescued == [] and len(run.device.copies) == copies
    assert "step 2 is not kept just in time" in caplog.text


def test_a_device_that_has_failed_keeps_nothing_and_says_so(run, listener, monkeypatch, caplog):
    """As CUDA does at every question after an illegal access; what has failed must reach the agent nevertheless."""
    whole_step(run)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run.device, "use", fail)
    with caplog.at_level(logging.WARNING):
        SAVERS.rescue()
    assert listener.rescued == []
    assert "no step is kept just in time: CUDA error" in caplog.text


def test_nothing_is_kept_of_a_model_on_two_devices(memory, listener, tmp_path, monkeypatch):
    first, second = LateDevice(), LateDevice()
    install(monkeypatch, first, second)
    run = Run(tmp_path / "checkpoints", first)
    run.model.other = torch.nn.Parameter(second.owned(torch.zeros(1)))
    begun(run)
    whole_step(run)
    rescued()
    assert listener.rescued == []
    assert "2 devices" in run.checkpoints._rescue.reason
    run.checkpoints.close()


class Scale:
    """A gradient scaler: its scale is a number on the device, and ``state_dict`` reads it."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._value = device, device.owned(torch.tensor([8.0]))

    def state_dict(self) -> dict[str, float]:
        here, done = torch.zeros(1), self._device.event()
        self._device.copy(here, self._value)
        done.record()
        streams.wait_for(done, 1.0)
        return {"scale": here.item()}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


def test_what_reads_a_number_from_the_device_does_not_wait_for_the_collective(run, listener):
    run.device.frozen.clear()
    scale = Scale(run.device)
    run.checkpoints.save(run.model, run.optimizer, step=1, scaler=scale, async_save=False)
    whole_step(run)
    run.device.hang()
    rescued()
    assert listener.rescued == [2]


def test_a_copy_that_does_not_end_is_given_up(run, listener, monkeypatch, caplog):
    monkeypatch.setattr(snapshots, "DEVICE_S", 0.05)
    whole_step(run)
    with run.device.beside():
        end = run.device.hang()
    try:
        with caplog.at_level(logging.WARNING):
            rescued()
    finally:
        end()
    assert listener.rescued == []
    assert "the device has not copied it within" in caplog.text


def test_a_save_that_hangs_on_the_device_does_not_keep_a_rescue_waiting(run, listener, monkeypatch):
    """Its wait comes before the lock."""
    whole_step(run)
    wait, hung, go_on = run.device.wait_for_everything, threading.Event(), threading.Event()

    def hang() -> None:
        hung.set()
        go_on.wait(30)
        wait()

    monkeypatch.setattr(run.device, "wait_for_everything", hang)

    def save() -> None:
        run.device.use()
        run.save()

    saving = threading.Thread(target=save)
    saving.start()
    hung.wait(30)
    rescued()
    assert listener.rescued == [2]
    run.device.frozen.clear()
    go_on.set()
    saving.join()


@pytest.mark.parametrize("handling", ["1", "2"])
def test_nothing_is_kept_where_an_error_lets_the_device_go_on(run, listener, monkeypatch, handling):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    run.device.frozen.clear()
    run.save()
    whole_step(run)
    rescued()
    assert listener.rescued == []
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] in run.checkpoints._rescue.reason


def test_nothing_is_kept_where_updates_are_replayed_from_a_graph(run, listener):
    run.device.captures = True
    run.step()
    run.device.captures = False
    get_on(run)
    rescued()
    assert listener.rescued == []
    assert "CUDA graph" in run.checkpoints._rescue.reason


@pytest.mark.parametrize(("error", "what_happens"), [(ValueError("x"), ["kept", "aborted"]), (None, ["left in order"])])
def test_communicators_are_aborted_only_after_the_step_was_kept(monkeypatch, error, what_happens):
    """An abort lets the device go on behind the collective that has failed."""
    happened: list[str] = []
    monkeypatch.setattr(SAVERS, "rescue", lambda: happened.append("kept"))
    groups = SimpleNamespace(close=lambda *, orderly: happened.append("left in order" if orderly else "aborted"))
    metrics = SimpleNamespace(close=lambda: None)
    leaving = SimpleNamespace(
        _page={}, _reruns=None, _unfinished=None, _close=lambda **_: None, _groups=groups, _metrics=metrics
    )
    Session.__exit__(leaving, type(error) if error else None, error, None)
    assert happened == what_happens
