"""What the package asks of CUDA: each question about a device is asked of that one, whichever is current.

A recorder stands in for ``torch.cuda``. What the answers are, only a device can show (``checkpoint/test_on_gpu.py``).
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from slurmft.trainer import streams


class Recorder:
    """As much of ``torch.cuda`` as the package uses, in one thread. Device 0 is current, as in a new thread."""

    def __init__(self) -> None:
        self.current, self.asked = 0, list[tuple[str, object]]()
        self._streams: dict[int, object] = {}

    def set_device(self, index: int) -> None:
        self.current = index

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, index: int | None = None) -> object:
        at = self.current if index is None else index
        return self._streams.get(at, f"default of {at}")

    def Stream(self, index: int, priority: int) -> object:
        self.asked.append(("stream", (index, priority)))
        return SimpleNamespace(index=index)

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before = dict(self._streams)
        with self.device(stream.index):
            self._streams[stream.index] = stream
            try:
                yield
            finally:
                self._streams = before

    def Event(self, enable_timing: bool) -> object:
        return SimpleNamespace(
            record=lambda stream: self.asked.append(("record", stream)), query=lambda: enable_timing,
            elapsed_time=lambda end: 1.5,
        )  # fmt: skip

    def synchronize(self, index: int | None = None) -> None:
        self.asked.append(("synchronize", self.current if index is None else index))

    def is_current_stream_capturing(self) -> bool:
        self.asked.append(("capturing", self.current))
        return True


@pytest.fixture
def cuda(monkeypatch) -> Iterator[Recorder]:
    recorder = Recorder()
    for name in ("set_device", "device", "current_stream", "Stream", "stream", "Event", "synchronize",
                 "is_current_stream_capturing"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    streams._cuda.cache_clear()
    yield recorder
    streams._cuda.cache_clear()


def on(index: int) -> SimpleNamespace:
    """A tensor of that GPU."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


def device(index: int) -> streams.Device:
    found = streams.device_of(on(index))
    assert found is not None
    return found


def test_an_event_is_recorded_on_its_own_device_whichever_is_current(cuda):
    """A trainer may have put its model on GPU 1 without ``set_device``; a mark on GPU 0 would come by at once."""
    event = device(1).event()
    event.record()
    with device(1).beside():
        event.record()
    default, beside = [stream for what, stream in cuda.asked if what == "record"]
    assert default == "default of 1" and beside.index == 1


def test_what_is_beside_has_a_stream_of_its_own_until_its_end_whatever_that_is(cuda):
    with pytest.raises(KeyError), device(1).beside():
        assert cuda.current == 1 and cuda.current_stream().index == 1
        raise KeyError
    assert cuda.current == 0 and cuda.current_stream(1) == "default of 1"
    with device(1).beside():
        pass
    assert [asked[0] for asked in cuda.asked] == ["stream"], "one for all times"


def test_all_devices_of_the_tensors_are_waited_for_and_no_other(cuda):
    streams.settle([on(2), torch.zeros(1), on(1), on(2)])
    assert cuda.asked == [("synchronize", 2), ("synchronize", 1)]


def test_a_capture_is_looked_for_on_its_own_device(cuda):
    assert device(3).is_capturing()
    assert cuda.asked == [("capturing", 3)] and cuda.current == 0


def test_a_thread_can_make_it_its_own(cuda):
    device(2).use()
    assert cuda.current == 2


@pytest.mark.usefixtures("cuda")
def test_events_measure_time_where_they_are_asked_to():
    begin, end = device(0).event(timed=True), device(0).event(timed=True)
    assert begin.query() and begin.elapsed_time(end) == 1.5
    assert not device(0).event().query()


def test_main_memory_is_no_device():
    assert streams.of(torch.device("cpu")) is None and streams.device_of(torch.zeros(1)) is None
