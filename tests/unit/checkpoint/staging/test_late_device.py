"""On a device whose streams compute late and out of step with the host, every byte that is kept is the right one.

``late_device`` does nothing before a test looks at an event, and then only what that event waits for.
``tests/unit/worker/test_waits.py`` takes each wait out of the source once, and names the test that fails then.
"""

import logging
import resource
import threading
from pathlib import Path

import pytest
import torch
from late_device import Hangs, LateDevice, install

from slurmft.checkpoint import CheckpointManager, snapshots
from slurmft.checkpoint.snapshots import Budget, Pinned, in_pieces
from slurmft.trainer import streams
from slurmft.worker.digests import weights_digest


@pytest.fixture
def device(monkeypatch) -> LateDevice:
    device = LateDevice()
    install(monkeypatch, device)
    return device


@pytest.fixture
def going() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 4096)


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


def there(device: LateDevice, value: float = 7.0, number: int = 5) -> torch.Tensor:
    """A tensor that the device has filled."""
    source = written(device, value, number)
    streams.settle([source])
    return source


def test_a_copy_is_there_when_it_is_said_to_be(device):
    targets = [torch.zeros(5), torch.zeros(5)]
    snapshots.copy_into(targets, [there(device, 7.0), there(device, 8.0)])
    assert [target.tolist() for target in targets] == [[7.0] * 5, [8.0] * 5]


def test_a_copy_waits_for_no_other_stream(device):
    source = there(device)
    device.hang()
    later = written(device)
    target = torch.zeros(5)
    snapshots.copy_into([target], [source], within_s=5)
    assert target.tolist() == [7.0] * 5 and later[0] == 0


def test_a_device_that_does_not_get_there_is_given_up(device):
    source = there(device)
    with device.beside():
        device.hang()
    with pytest.raises(TimeoutError, match="the device has not copied it within"):
        snapshots.copy_into([torch.zeros(5)], [source], within_s=0.05)


def test_tensors_in_main_memory_beside_those_of_a_device_are_copied_too(device):
    targets = [torch.zeros(()), torch.zeros(5)]
    snapshots.copy_into(targets, [torch.tensor(3.0), there(device)])
    assert (targets[0].item(), targets[1].tolist()) == (3.0, [7.0] * 5)


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_values_are_put_in_order_before_they_are_copied(device, small_pieces, layout):
    """By a kernel, which runs on the stream of the copies: they wait for no other one."""
    rows = torch.arange(6000.0).view(10, 6, 10, 10)
    source = rows.transpose(0, 1) if layout == "transposed" else rows.to(memory_format=torch.channels_last)
    device.owned(source)
    target = torch.zeros(source.shape)
    snapshots.copy_into([target], [source], target.data_ptr())
    assert torch.equal(target, source)


def test_copies_before_one_that_fails_are_waited_for(device, monkeypatch):
    """They write into a place of the snapshots, which the next one may be given."""
    copy, targets = device.copy, [torch.zeros(5), torch.zeros(5)]

    def run_out_of_memory(target: torch.Tensor, source: torch.Tensor) -> None:
        if target is targets[1]:
            raise torch.OutOfMemoryError("for the values in order")
        copy(target, source)

    monkeypatch.setattr(device, "copy", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        snapshots.copy_into(targets, [there(device), there(device)])
    assert targets[0].tolist() == [7.0] * 5
    assert not any(one.queue for one in device.streams)


def test_a_model_on_two_devices_is_waited_for_and_copied_on_both(monkeypatch):
    devices = [LateDevice(), LateDevice()]
    install(monkeypatch, *devices)
    sources = [written(devices[0], 7.0), written(devices[1], 8.0), torch.ones(5)]
    streams.settle(sources)
    for device in devices:
        device.hang()
    targets = [torch.zeros(5) for _ in sources]
    assert snapshots.copy_into(targets, sources, within_s=5) is devices[0]
    assert [target.tolist() for target in targets] == [[7.0] * 5, [8.0] * 5, [1.0] * 5]
    assert [len(device.copies) for device in devices] == [1, 1]


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


@pytest.mark.usefixtures("own_environment")
def test_an_update_that_was_asked_for_before_a_load_does_not_change_what_is_loaded(device, tmp_path):
    model = Late(device)
    optimizer, checkpoints = torch.optim.SGD(model.parameters()), CheckpointManager(tmp_path)
    model.update()
    checkpoints.save(model, optimizer, step=1, async_save=False)
    model.update()
    assert checkpoints.load_latest(model, optimizer).step == 1
    streams.settle(model.parameters())
    checkpoints.close()
    assert model.weight.tolist() == [1.0] * 1000


def test_a_digest_is_of_what_the_host_has_asked_for(device):
    model = Late(device)
    before = weights_digest(model)
    model.update()
    assert weights_digest(model) != before


# pinned memory


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
    pinned.release()
    assert device.registered == {}


@pytest.mark.usefixtures("small_pieces")
def test_a_place_that_is_wanted_anew_is_not_pinned_first(device, going, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(device, "register", lambda address, _: asked.append(address) or "")
    going.clear()
    Pinned(device, 1 << 20, 1 << 20, Budget(1 << 30, ""), going).release()
    assert asked == []


@pytest.mark.usefixtures("own_environment")
def test_the_copy_of_a_save_keeps_the_pinning_waiting(device, tmp_path, monkeypatch):
    model, checkpoints = Late(device), CheckpointManager(tmp_path)
    copy, may_pin = snapshots.copy_into, list[bool]()

    def look(*arguments: object, **options: object) -> object:
        may_pin.append(checkpoints._snapshots.arena._may_warm.is_set())
        return copy(*arguments, **options)

    monkeypatch.setattr(snapshots, "copy_into", look)
    checkpoints.save(model, torch.optim.SGD(model.parameters()), step=1, async_save=False)
    assert may_pin == [False] and checkpoints._snapshots.arena._may_warm.is_set()
    checkpoints.close()


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
