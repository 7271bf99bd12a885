"""On a device whose streams compute late and out of step with the host, every byte that is kept is the right one.

``late_device`` does nothing before somebody looks at an event, and then only what that event waits for. The waits that
these tests fail without, each taken out by hand once:

    copy_from_device   ``after`` before the copies; ``done`` behind them; the stream of its own
    capture            ``settle`` before a save
    weights_digest     ``settle``
    Pinned             ``use`` in its thread; ``release`` before a place is mapped anew
    DeviceSpans        ``query`` before a span is read
"""

from __future__ import annotations

import logging
import resource
import threading
from pathlib import Path

import pytest
import torch
from late_device import Hangs, LateDevice

from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.staging import pinning, snapshots
from slurmft.checkpoint.staging.pinning import Budget, Pinned, in_pieces
from slurmft.trainer import streams
from slurmft.worker.checks.digest import weights_digest


@pytest.fixture
def device(monkeypatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(streams, "find", device.find)
    monkeypatch.setattr(streams, "is_on_device", device.is_on_device)
    return device


@pytest.fixture
def going() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def written(device: LateDevice, value: float = 7.0, number: int = 5) -> torch.Tensor:
    """A tensor that the current stream is about to fill."""
    tensor = device.owned(torch.zeros(number))
    device.launch(lambda: tensor.fill_(value))
    return tensor


# the double itself


def test_nothing_is_done_before_somebody_looks_and_then_only_what_is_needed(device):
    first = written(device)
    with device.stream("other"):
        second, event = written(device), device.event()
        event.record()
    assert not event.query() and event.query()
    assert (first[0], second[0]) == (0, 7)


def test_whoever_waits_for_everything_waits_for_a_collective_that_never_ends(device):
    end = device.hang()
    with pytest.raises(Hangs, match="default"):
        device.wait_for_everything()
    end()
    device.wait_for_everything()


def test_a_new_thread_has_no_device(device):
    found: list[str] = []

    def work() -> None:
        try:
            device.event().record()
        except AssertionError as error:
            found.append(str(error))

    thread = threading.Thread(target=work, name="new")
    thread.start()
    thread.join()
    assert found == ["the device is not set in the thread new"]


# copies


def test_a_copy_waits_for_what_has_written_its_source(device):
    with device.stream("optimizer"):
        source, written_at = written(device), device.event()
        written_at.record()
    target = torch.zeros(5)
    snapshots.copy_into([target], [source], after=[written_at])
    assert target.tolist() == [7.0] * 5


def test_a_copy_waits_for_no_other_stream(device):
    source, written_at = written(device), device.event()
    written_at.record()
    device.hang()
    later = written(device)
    target = torch.zeros(5)
    snapshots.copy_into([target], [source], after=[written_at], within_s=5)
    assert target.tolist() == [7.0] * 5 and later[0] == 0


def test_a_device_that_does_not_get_there_is_given_up(device):
    device.hang()
    source, never = written(device), device.event()
    never.record()
    with pytest.raises(TimeoutError, match="the device has not copied it within"):
        snapshots.copy_into([torch.zeros(5)], [source], after=[never], within_s=0.05)


def test_tensors_in_main_memory_beside_those_of_a_device_are_copied_too(device):
    step, source, written_at = torch.tensor(3.0), written(device), device.event()
    written_at.record()
    targets = [torch.zeros(()), torch.zeros(5)]
    snapshots.copy_into(targets, [step, source], after=[written_at])
    assert (targets[0].item(), targets[1].tolist()) == (3.0, [7.0] * 5)


class Late(torch.nn.Module):
    """Weights on the device, changed by kernels on a stream of the optimizer's own."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000))
        device.owned(self.weight)
        self._device = device

    def update(self) -> None:
        with self._device.stream("optimizer"):
            self._device.launch(lambda: self.weight.add_(1.0))


@pytest.mark.usefixtures("own_environment")
def test_a_save_holds_what_the_host_has_asked_for_whichever_stream_computes_it(device, tmp_path):
    model = Late(device)
    optimizer, checkpoints = torch.optim.SGD(model.parameters()), CheckpointManager(tmp_path)
    for step in range(1, 4):
        model.update()
        folder = checkpoints.save(model, optimizer, step=step, async_save=False)
    assert folder is not None
    checkpoints.close()
    other = torch.nn.Module()
    other.weight = torch.nn.Parameter(torch.zeros(1000))
    loaded = CheckpointManager(tmp_path).load_latest(other, torch.optim.SGD(other.parameters()))
    assert loaded.step == 3
    assert other.weight.tolist() == [3.0] * 1000


def test_a_digest_is_of_what_the_host_has_asked_for(device):
    model = Late(device)
    before = weights_digest(model)
    model.update()
    assert weights_digest(model) != before


# pinned memory


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4096)


@pytest.mark.usefixtures("small_pieces")
def test_memory_is_pinned_piece_by_piece_and_let_go(device, going):
    budget = Budget(20_000, "no more")
    pinned = Pinned(device, 1 << 20, 10_000, budget, going)
    pinned.wait()
    assert device.registered == {1 << 20: 4096, (1 << 20) + 4096: 4096, (1 << 20) + 8192: 10_000 - 8192}
    assert budget.take(10_001) == "no more"
    pinned.release()
    assert device.registered == {} and budget.take(20_000) == ""


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("budget_bytes", "driver_bytes"), [(9000, 1 << 60), (1 << 60, 9000)])
def test_what_may_not_be_pinned_is_left(device, going, caplog, budget_bytes, driver_bytes):
    device.refuses_to_register_after = driver_bytes
    budget = Budget(budget_bytes, "the budget is spent")
    with caplog.at_level(logging.INFO):
        pinned = Pinned(device, 1 << 20, 10 << 20, budget, going)
        pinned.wait()
    assert pinned.pinned_bytes == 8192
    (line,) = caplog.messages
    assert line.endswith("the budget is spent" if budget_bytes == 9000 else "cudaHostRegister says 2")
    pinned.release()
    assert budget.take(budget_bytes) == "", "what the driver refused was given back as well"


@pytest.mark.usefixtures("small_pieces")
def test_nothing_is_pinned_while_the_training_waits_for_a_copy(device, going):
    going.clear()
    pinned = Pinned(device, 1 << 20, 1 << 20, Budget(1 << 30, ""), going)
    assert device.registered == {}
    pinned.release()  # and a place that is wanted anew need not wait for all of it
    assert device.registered == {}


@pytest.mark.usefixtures("small_pieces")
def test_nothing_is_pinned_after_it_was_let_go(device, going, monkeypatch):
    """The memory is unmapped next, and the driver would be given an address of something else."""
    register, asked, go_on = device.register, threading.Event(), threading.Event()

    def slowly(address: int, size_bytes: int) -> str:
        asked.set()
        assert go_on.wait(30)
        return register(address, size_bytes)

    monkeypatch.setattr(device, "register", slowly)
    pinned = Pinned(device, 1 << 20, 10_000, Budget(1 << 30, ""), going)
    assert asked.wait(30)
    threading.Timer(0.2, go_on.set).start()
    pinned.release()
    pinned.wait()
    assert device.registered == {}


def test_the_budget_is_the_limit_of_locked_memory_or_a_share_of_the_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert "ulimit -l" in Budget.of_this_rank().take((8 << 20) + 1)
    assert Budget.of_this_rank().take(8 << 20) == ""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "4 ranks" in Budget.of_this_rank().take(1 << 60)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 64, 4032])
def test_no_copy_crosses_the_edge_of_a_piece(dtype, offset):
    memory = torch.zeros(40_000, dtype=torch.uint8)
    base = memory.data_ptr()
    size = torch.empty((), dtype=dtype).element_size()
    target = memory[offset : offset + 3 * 1111 * size].view(dtype).view(3, 1111)
    source = torch.arange(3333, dtype=torch.float64).view(3, 1111).to(dtype)
    for part, values in in_pieces(target, source, base):
        begin = part.data_ptr() - base
        assert begin // 4096 == (begin + part.nbytes - 1) // 4096
        part.copy_(values)
    assert torch.equal(target, source)


@pytest.mark.usefixtures("own_environment", "small_pieces")
def test_the_places_of_a_run_are_pinned_beside_the_training_and_let_go_with_it(device, tmp_path):
    model = Late(device)
    optimizer, checkpoints = torch.optim.SGD(model.parameters()), CheckpointManager(tmp_path)
    checkpoints.save(model, optimizer, step=1, async_save=False)
    place = next(one for one in checkpoints._snapshots.arena.places if one._pinned is not None)
    place._pinned.wait()
    address, size_bytes = place.address, len(place.memory)
    assert sum(each for at, each in device.registered.items() if address <= at < address + size_bytes) == size_bytes
    place.begin(size_bytes + 1)  # it grows, and is mapped anew
    assert not [at for at in device.registered if address <= at < address + size_bytes]
    place.pin(device, Budget(1 << 30, ""))
    place._pinned.wait()
    checkpoints.close()
    assert device.registered == {}


# no other way to a device


def test_streams_and_events_of_a_device_are_spoken_to_in_one_place():
    root = Path(streams.__file__).parents[1]
    words = ("cuda.synchronize", "cuda.Event", "cuda.Stream", "cuda.stream(", "cuda.current_stream", "non_blocking")
    strays = {
        path.name for path in root.rglob("*.py") if any(word in path.read_text(encoding="utf-8") for word in words)
    }
    assert strays == {"streams.py", "gpu_check.py"}, "gpu_check is a program of its own, without other streams"
