"""The timing page and the agent's reports of it; writer and reader are two processes where that matters."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from of_each import of_each

from slurmft.agent.agent import MIN_SAMPLES, TimingReports
from slurmft.ipc.channel import MAX_LINE_BYTES, BadMessage, encoded
from slurmft.ipc.messages import RankTimings, TimingsReport, parse_report
from slurmft.ipc.pages import (
    CPU,
    MAX_NAME,
    MAX_SECTIONS,
    RING,
    TIMING_PAGE_SIZE_BYTES,
    TIMING_PAGE_VARIABLE,
    TimingPage,
    plain_timing_name,
)


@pytest.fixture
def page(tmp_path):
    page = TimingPage.create(tmp_path / "page", rank=3, generation=1)
    yield page
    page.close()


def put(page: TimingPage, name: str, *durations: int) -> None:
    block = page.add_section(name)
    assert block is not None
    for duration in durations:
        count = block[RING]
        block[count % RING] = duration
        block[RING] = count + 1


def test_what_one_side_writes_the_other_reads(page, tmp_path):
    other = TimingPage.attach(tmp_path / "page")
    other.describe(role="stage 1", device=CPU)
    put(other, "data", 5, 7)
    put(other, "data", 9)
    assert (page.role, page.device) == ("stage 1", CPU)
    assert page.counts() == {"data": 3}
    assert page.newest({}, 1) == {"data": [5, 7, 9]}
    assert page.newest({"data": 2}, 1) == {"data": [9]}
    assert page.newest({"data": 2}, 2) == {"data": [7, 9]}
    assert page.newest({"data": 3}, 2) == {}
    other.close()


def test_only_the_newest_of_many_are_kept(page):
    put(page, "data", *range(1, RING + 11))
    assert page.newest({}, 1) == {"data": list(range(11, RING + 11))}


def test_durations_that_are_none_are_left_out(page):
    put(page, "data", 0, -5, 3)
    assert page.newest({}, 1) == {"data": [3]}


def test_there_is_room_for_so_many_sections(page):
    for number in range(MAX_SECTIONS):
        assert page.add_section(f"section {number}") is not None
    assert page.add_section("one more") is None
    assert page.add_section("section 0") is not None
    assert len(page.counts()) == MAX_SECTIONS


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("data", "data"),
        ("a\nb", "a?b"),
        ('say "x"', "say ?x?"),
        ("\u00fc\0", "??"),
        ("", "?"),
        ("x" * 99, "x" * MAX_NAME),
    ],
)
def test_names_are_made_plain(page, name, plain):
    assert plain_timing_name(name) == plain
    put(page, name, 1)
    assert page.newest({}, 1) == {plain: [1]}


@pytest.mark.parametrize(
    "content", [b"", b"x", bytes(TIMING_PAGE_SIZE_BYTES), b"\xff" * TIMING_PAGE_SIZE_BYTES], ids=len
)
def test_a_file_that_is_no_page_is_refused(tmp_path, content):
    (tmp_path / "page").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        TimingPage.attach(tmp_path / "page")


def test_a_page_full_of_nonsense_harms_no_reader(page, tmp_path):
    raw = bytearray((tmp_path / "page").read_bytes())
    raw[24:] = b"\xff\xfe\x7f\x00\x80" * (len(raw) // 5)
    (tmp_path / "page").write_bytes(raw[:TIMING_PAGE_SIZE_BYTES])
    other = TimingPage.attach(tmp_path / "page")
    other.counts()
    assert all(duration > 0 for durations in other.newest({}, 3).values() for duration in durations)
    assert plain_timing_name(other.role) == other.role or other.role == ""
    other.close()


# reports


@dataclass
class Worker:
    rank: int
    timings: TimingPage | None


def test_a_window_is_reported_once_it_is_over(page):
    reports = TimingReports(10.0, began_s=100.0)
    workers = [Worker(3, page), Worker(4, None)]
    put(page, "data", *[2_000_000] * 4, 9_000_000)
    assert list(reports.due(workers, 109.9)) == []
    (message,) = reports.due(workers, 110.0)
    facts = RankTimings(rank=3, role="", device=0, sections=(("data", 0.002, 5),))
    assert message == TimingsReport(window=1, ranks=(facts,))
    assert parse_report(encoded(message)) == message
    assert list(reports.due(workers, 119.0)) == []
    put(page, "data", 4_000_000)
    (message,) = reports.due(workers, 145.0)
    assert message.window == 4
    assert message.ranks[0].sections == (("data", 0.004, MIN_SAMPLES),)  # with two older ones: 2, 9, 4
    (message,) = reports.due(workers, 150.0)
    assert message.ranks[0].sections == ()


def test_a_report_fits_into_the_control_channel(tmp_path):
    pages = [TimingPage.create(tmp_path / str(rank), rank=rank, generation=1) for rank in range(70)]
    for page in pages:
        for number in range(MAX_SECTIONS):
            put(page, f"{number:02}" + "\\" * MAX_NAME, 123_456_789_123, 2, 3)
        page.describe(role="\\" * 99, device=CPU)
    messages = list(TimingReports(1.0, 0.0).due([Worker(rank, page) for rank, page in enumerate(pages)], 1.5))
    assert [len(message.ranks) for message in messages] == [32, 32, 6]
    for message in messages:
        assert parse_report(encoded(message)) == message
        assert len(encoded(message)) < MAX_LINE_BYTES - 100
    for page in pages:
        page.close()


GOOD = {"rank": 0, "role": "", "device": 1, "sections": [["own work", 0.1, 5]]}


@of_each(ranks=[
        "none", [1], [{}], [GOOD | {"rank": -1}], [GOOD | {"role": 5}], [GOOD | {"role": "x" * 100}],
        [GOOD | {"device": 9}], [GOOD | {"sections": {}}], [GOOD | {"sections": [["a", 1.0]]}],
        [GOOD | {"sections": [["a", float("nan"), 3]]}], [GOOD | {"sections": [["a", "1", 3]]}],
        [GOOD | {"sections": [["a\n", 1.0, 3]]}], [GOOD | {"sections": [["a", 1.0, 0]]}],
        [GOOD | {"sections": [["a", 1.0, 3]] * (MAX_SECTIONS + 1)}], [GOOD | {"sections": [["a", True, 3]]}],
        [GOOD | {"sections": [["a", float("inf"), 3]]}],
    ])  # fmt: skip
def test_a_report_of_another_shape_closes_its_connection(ranks):
    with pytest.raises(BadMessage):
        parse_report(encoded({"kind": "timings", "window": 1, "ranks": ranks}))
    parse_report(encoded({"kind": "timings", "window": 1, "ranks": [GOOD]}))


WORKER = """
import os, sys, time
from slurmft.worker.stragglers import StragglerDetector
detector = StragglerDetector.from_environment()
detector.set_role("stage 0")
data = detector.section("data")
for step in range(12):
    detector.begin_step()
    with data:
        time.sleep(0.002)
    with detector.section("never ends well") if step == 3 else data:
        time.sleep(0.002)
    detector.first_collective()
    time.sleep(0.004)
    detector.end_step()
print("done", flush=True)
sys.stdin.read()
"""


def test_a_worker_of_another_process_is_reported(page, tmp_path):
    environment = {TIMING_PAGE_VARIABLE: str(tmp_path / "page"), "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-c", WORKER]
    with subprocess.Popen(
        argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "done\n"
        (message,) = TimingReports(1.0, 0.0).due([Worker(3, page)], 1.0)  # while it lives
        worker.kill()
    (facts,) = message.ranks
    assert (facts.rank, facts.role, facts.device) == (3, "stage 0", CPU)
    sections = {name: (median_s, count) for name, median_s, count in facts.sections}
    assert {name: count for name, (_, count) in sections.items()} == {
        "own work": 10, "step": 10, "data": 23, "never ends well": 1,
    }  # fmt: skip
    assert 0.002 <= sections["data"][0] <= sections["own work"][0] < sections["step"][0]
    assert sections["step"][0] - sections["own work"][0] >= 0.0035
