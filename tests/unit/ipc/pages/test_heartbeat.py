"""The heartbeat page: two processes, one memory, no system call."""

import math
import os
import stat
import subprocess
import sys
import time

import pytest

from slurmft.ipc.pages import HEARTBEAT_SIZE_BYTES, MAGIC_V2, NOTHING, Page, Slot, State
from slurmft.policy.stop import END, NEVER, NOT_STARTED


@pytest.fixture
def page(tmp_path):
    made = Page.create(tmp_path / "rank-3", rank=3, generation=7)
    yield made
    made.close()


def test_a_new_page_says_that_nothing_happened_yet(page):
    assert (page[Slot.RANK], page[Slot.GENERATION], page[Slot.MAGIC]) == (3, 7, MAGIC_V2)
    assert (page[Slot.PID], page[Slot.STATE], page[Slot.STEP]) == (0, State.ABSENT, 0)
    assert (page[Slot.TICK], page[Slot.PROPOSED]) == (NOT_STARTED, NEVER)
    for slot in (Slot.SAVED, Slot.RESUMED, Slot.COMMITTED, Slot.ANSWERED, Slot.HOLDING):
        assert page[slot] == NOTHING
    assert math.isnan(page.metric())


def test_every_field_has_a_place_of_its_own_on_the_page():
    assert len({int(slot) for slot in Slot}) == len(Slot.__members__), "two names of one slot would be one field"
    assert max(Slot) < HEARTBEAT_SIZE_BYTES // 8


def test_a_page_is_for_the_user_alone(page, tmp_path):
    path = tmp_path / "rank-3"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == HEARTBEAT_SIZE_BYTES


def test_both_sides_see_each_others_stores(page, tmp_path):
    worker = Page.attach(tmp_path / "rank-3")
    assert page[Slot.PID] == os.getpid()
    for slot in Slot:
        worker[slot] = -int(slot) - 5
        assert page[slot] == -int(slot) - 5
    page[Slot.PROPOSED] = NEVER
    assert worker[Slot.PROPOSED] == NEVER
    worker.close()


def test_another_process_sees_them_too(page, tmp_path):
    code = (
        "import sys; from pathlib import Path; from slurmft.ipc.pages import Page, Slot\n"
        "page = Page.attach(Path(sys.argv[1])); page[Slot.STEP] = page[Slot.RANK] * 10; print(page[Slot.PID])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rank-3")], capture_output=True, text=True, timeout=30, check=True
    )
    assert page[Slot.STEP] == 30
    assert page[Slot.PID] == int(result.stdout)


def test_a_page_outlives_the_file_of_its_name(page, tmp_path):
    worker = Page.attach(tmp_path / "rank-3")
    (tmp_path / "rank-3").unlink()
    worker[Slot.STEP] = 5
    assert page[Slot.STEP] == 5
    worker.close()


@pytest.mark.parametrize("value", [0, -1, END, NEVER, 2**63 - 1, -(2**63)])
def test_every_64_bit_value_fits(page, value):
    page[Slot.STEP] = value
    assert page[Slot.STEP] == value


def test_a_larger_value_is_an_error(page):
    with pytest.raises(ValueError, match="memoryview"):
        page[Slot.STEP] = 2**63


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, 1e-300, math.inf, -math.inf])
def test_a_metric_keeps_its_bits(page, value):
    page.set_metric(value)
    assert math.copysign(1, page.metric()) == math.copysign(1, value)
    assert page.metric() == value


def test_a_time_is_in_nanoseconds(page):
    before = time.time_ns()
    page.touch(Slot.PROGRESS_AT)
    assert before <= page[Slot.PROGRESS_AT] <= time.time_ns()


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 8, b"\0" * HEARTBEAT_SIZE_BYTES, b"x" * HEARTBEAT_SIZE_BYTES],
    ids=["empty", "short", "zeros", "other"],
)
def test_what_is_no_page_is_refused(tmp_path, content):
    (tmp_path / "page").write_bytes(content)
    with pytest.raises(ValueError, match=r"heartbeat page|mmap"):
        Page.attach(tmp_path / "page")


def test_what_is_no_page_is_not_written_to(tmp_path):
    (tmp_path / "page").write_bytes(b"x" * HEARTBEAT_SIZE_BYTES)
    with pytest.raises(ValueError, match="heartbeat page"):
        Page.attach(tmp_path / "page")
    assert (tmp_path / "page").read_bytes() == b"x" * HEARTBEAT_SIZE_BYTES


def test_no_page_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        Page.attach(tmp_path / "nowhere")


def test_a_worker_without_an_agent_has_a_page_of_its_own():
    page = Page.private()
    page[Slot.STEP] = 3
    assert (page[Slot.STEP], page[Slot.PROPOSED], page[Slot.SAVED]) == (3, NEVER, NOTHING)
    page.close()


def test_the_page_of_the_attempt_before_is_not_believed(tmp_path):
    old = Page.create(tmp_path / "rank-0", rank=0, generation=1)
    old[Slot.STEP], old[Slot.STATE] = 99, State.FINISHED
    new = Page.create(tmp_path / "rank-0", rank=0, generation=2)
    assert (new[Slot.STEP], new[Slot.STATE], new[Slot.GENERATION]) == (0, State.ABSENT, 2)
    old.close()
    new.close()


def test_a_step_costs_no_more_than_a_microsecond_or_two(page):
    rounds = 20_000
    began = time.process_time()
    for number in range(rounds):
        page[Slot.TICK] = number
        _ = page[Slot.PROPOSED]
    assert (time.process_time() - began) / rounds < 2e-5  # a tenth of this on an idle machine


def test_a_new_page_says_of_no_step_that_it_is_saved_or_kept(tmp_path):
    for page in (Page.create(tmp_path / "page", rank=0, generation=1), Page.private()):
        empty = (Slot.SAVED, Slot.DURABLE, Slot.RESUMED, Slot.RESCUABLE, Slot.RESCUED, Slot.ANSWERED)
        assert {page[slot] for slot in empty} == {NOTHING}
