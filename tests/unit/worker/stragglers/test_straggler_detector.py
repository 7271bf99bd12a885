"""The worker's side: sections, own work, and the first collective of real DDP on two processes."""

from __future__ import annotations

import copy
import os
import pickle
import statistics
import sys
import time
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from slurmft.ipc.pages import RING, STEP, WORK, TimingPage
from slurmft.worker.stragglers import AHEAD, WARM_UP_STEPS, DeviceSpans, StragglerDetector, filling


def detector_on(page: TimingPage, **options: Any) -> StragglerDetector:
    return StragglerDetector(page=page, **options)


@pytest.fixture
def page() -> TimingPage:
    return TimingPage.private()


def test_a_section_is_timed_each_time(page):
    detector = detector_on(page)
    for _ in range(RING + 5):
        with detector.section("data"):
            pass
    assert page.counts()["data"] == RING + 5
    assert all(0 < duration < 1e9 for duration in page.newest({}, 1)["data"])


def test_a_section_inside_of_itself_counts_once(page):
    data = detector_on(page).section("data")
    with data, data:
        time.sleep(0.002)
    (duration,) = page.newest({}, 1)["data"]
    assert duration >= 2e6


def test_a_section_that_fails_does_not_count(page):
    data = detector_on(page).section("data")
    with pytest.raises(KeyError), data:
        raise KeyError
    with data:
        pass
    assert page.counts()["data"] == 1


def test_every_third_entry(page):
    data = detector_on(page, profiling_interval=3).section("data")
    for _ in range(10):
        with data, data:
            pass
    assert page.counts()["data"] == 3


@pytest.mark.parametrize("name", [WORK, STEP, f" {STEP} "])
def test_names_of_our_own_are_refused(page, name):
    with pytest.raises(ValueError, match="choose another name"):
        detector_on(page).section(name)


def test_names_that_no_report_can_tell_apart_are_one_section(page):
    detector = detector_on(page)
    assert detector.section("a\n") is detector.section("a\t")


def test_more_sections_than_there_is_room_for_do_no_harm(page):
    detector = detector_on(page)
    for number in range(100):
        with detector.section(str(number)):
            pass
    assert len(page.counts()) == 34


def test_switched_off_it_measures_nothing_and_everything_may_be_called(page):
    detector = detector_on(page, enabled=False)
    detector.begin_step()
    with detector.section("data"):
        detector.first_collective()
    detector.end_step()
    assert (page.counts(), detector.summary()) == ({}, {})


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval):
    with pytest.raises(ValueError, match="profiling_interval"):
        StragglerDetector(profiling_interval=interval)


def test_own_work_ends_at_the_first_collective_and_leaves_out_waiting(page):
    detector = detector_on(page)
    for _ in range(WARM_UP_STEPS + 3):
        detector.begin_step()
        time.sleep(0.002)
        detector.wait_begins()
        time.sleep(0.02)
        detector.wait_ends()
        detector.first_collective()
        time.sleep(0.02)
        detector.first_collective()
        detector.end_step()
    assert page.counts() == {WORK: 3, STEP: 3}
    assert all(2e6 <= duration < 18e6 for duration in page.newest({}, 1)[WORK])
    assert all(duration >= 42e6 for duration in page.newest({}, 1)[STEP])
    summary = detector.summary()
    assert 0.002 <= summary[WORK] < 0.018
    assert summary[STEP] >= 0.042


def test_a_step_without_a_collective_says_nothing_about_own_work(page):
    detector = detector_on(page)
    for _ in range(WARM_UP_STEPS + 2):
        detector.begin_step()
        detector.end_step()
    assert page.counts() == {WORK: 0, STEP: 2}
    detector.first_collective()
    assert page.counts()[WORK] == 0


def test_a_second_detector_of_the_same_page_goes_on(page):
    for _ in range(2):
        with detector_on(page).section("data"):
            pass
    assert page.counts() == {WORK: 0, STEP: 0, "data": 2}


@pytest.mark.parametrize(("limit", "index"), [(1, 0), (40, 0), (41, 1), (80, 1), (10**9, 2)])
def test_the_parameter_that_fills_the_first_bucket(limit, index):
    order = [torch.zeros(10), torch.zeros(10), torch.zeros(10)]
    assert filling(order, limit) is order[index]


class Event:
    """A device's event as torch has them: in the past once the device is there."""

    now = 0.0
    done = True

    def __init__(self) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_spans_on_a_device_are_read_when_it_is_done(monkeypatch):
    monkeypatch.setattr(Event, "done", False)
    spans = DeviceSpans(types.SimpleNamespace(event=lambda timed: Event(), is_capturing=lambda: False))
    for number in range(AHEAD + 4):  # the last four find no free events
        Event.now = 100.0 * number
        spans.begin()
        if number == 1:
            spans.wait_begins()
            Event.now += 2
            spans.wait_ends()
            spans.wait_begins()
            spans.wait_ends()
        Event.now += 10
        spans.end()
        assert list(spans.finished()) == []
    monkeypatch.setattr(Event, "done", True)
    assert list(spans.finished()) == [10_000_000] * AHEAD
    spans.begin()
    spans.begin()  # one that was never closed is given up
    Event.now += 5
    spans.end()
    assert list(spans.finished()) == [5_000_000]
    assert len(spans._free) == AHEAD


def test_no_event_of_a_span_becomes_part_of_a_graph():
    """It would not be recorded then, and torch refuses to measure between such events: in the training's own step."""
    recorded: list[int] = []
    device = types.SimpleNamespace(captures=False, is_capturing=lambda: device.captures)

    def event(timed: bool) -> Event:
        made = Event()
        made.record = lambda: recorded.append(id(made)) or Event.record(made)
        return made

    device.event = event
    spans = DeviceSpans(device)
    Event.now = 0.0
    spans.begin()
    device.captures = True
    spans.wait_begins()
    spans.wait_ends()
    device.captures = False
    Event.now = 10.0
    spans.end()
    assert len(recorded) == 2, "the beginning and the end"
    assert list(spans.finished()) == [10_000_000]


# two processes


class Network(nn.Module):
    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64) if buffers else nn.Tanh(), nn.Linear(64, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


VARIANTS = {"plain": (False, 1), "buffers": (True, 1), "accumulation": (False, 2)}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(2)
    for _ in range(3):
        model(torch.rand(4, 8)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, (buffers, micro_batches) in VARIANTS.items():
        torch.manual_seed(1)
        model = nn.parallel.DistributedDataParallel(Network(buffers=buffers))
        detector = StragglerDetector(page=TimingPage.attach(folder / f"{name}-{rank}"))
        detector.attach(model)
        for _ in range(WARM_UP_STEPS + 5):
            detector.begin_step()
            time.sleep(0.06 if rank == 1 else 0.005)  # its data are late
            for micro_batch in range(micro_batches):
                with nullcontext() if micro_batch == micro_batches - 1 else model.no_sync():
                    model(torch.rand(4, 8)).sum().backward()
                    time.sleep(0.01)
            detector.end_step()
        torch.manual_seed(1)
        plain = nn.parallel.DistributedDataParallel(Network(buffers=buffers))
        torch.manual_seed(1)
        timed = nn.parallel.DistributedDataParallel(Network(buffers=buffers))
        detector.attach(timed)
        both = zip(gradients(plain), gradients(timed), strict=True)
        assert all(torch.equal(one, other) for one, other in both), "hooks change no number"
        copy.deepcopy(timed.module)
        pickle.dumps(timed.module)
    dist.barrier()
    dist.destroy_process_group()


TRAIN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_straggler_detector import train
train(int(sys.argv[2]), Path(sys.argv[1]))
"""


def test_own_work_is_told_apart_although_steps_are_equally_long(tmp_path):
    pages = {
        (name, rank): TimingPage.create(tmp_path / f"{name}-{rank}", rank=rank, generation=1)
        for name in VARIANTS
        for rank in range(2)
    }
    run_ranks(TRAIN, tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    for name, (_, micro_batches) in VARIANTS.items():
        quick, slow = (pages[name, rank].newest({}, 1) for rank in range(2))
        assert len(quick[WORK]) == len(slow[WORK]) == 5, name
        extra_ms = 10 * (micro_batches - 1)
        assert 5 + extra_ms <= statistics.median(quick[WORK]) / 1e6 < 50, f"{name}: without the wait for the other"
        assert statistics.median(slow[WORK]) / 1e6 >= 60 + extra_ms, name
        assert min(quick[STEP]) / 1e6 > 55, f"{name}: its steps have it"
    for page in pages.values():
        page.close()
