"""The open sections on a heartbeat page: what the worker opens is what the agent reads, at any moment."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.ipc.pages import (
    DEPTH,
    ELSEWHERE,
    MAX_NAME_BYTES,
    MAX_NAMES,
    OTHERS,
    Page,
    Phase,
    SectionStack,
    Slot,
    open_sections,
    plain_stack_name,
)


@pytest.fixture
def page(tmp_path):
    made = Page.create(tmp_path / "rank-0", rank=0, generation=1)
    yield made
    made.close()


@pytest.fixture
def stack(page):
    return SectionStack(page)


def names(page: Page) -> list[str]:
    return [section.name for section in open_sections(page)[0]]


def elsewhere(page: Page) -> list[str]:
    return [section.name for section in open_sections(page)[1]]


def test_sections_nest_and_end(page, stack):
    assert open_sections(page) == ([], [])
    before = time.monotonic_ns()
    with stack.section("outer"):
        with stack.section("inner"), stack.section("inner"):
            assert names(page) == ["outer", "inner", "inner"]
        assert names(page) == ["outer"]
        (outer,) = open_sections(page)[0]
        assert before - 256 <= outer.began_ns <= time.monotonic_ns()
        assert page[Slot.CLOSED_AT_NS] >= before
    assert names(page) == []


def test_the_sessions_own_phase_comes_first_and_is_replaced(page, stack):
    stack.phase(Phase.SETUP)
    with stack.section("mine"):
        assert names(page) == ["setup", "mine"]
        stack.phase(Phase.EVALUATION)
        assert names(page) == ["evaluation", "mine"]
    stack.phase(Phase.NONE)
    assert names(page) == []


@pytest.mark.parametrize("opened", ["setup", "step", "checkpointing", "evaluation"])
def test_whoever_opens_such_a_section_himself_ends_the_setup(page, stack, opened):
    stack.phase(Phase.SETUP)
    with stack.section("mine"):
        assert names(page) == ["setup", "mine"]
    with stack.section(opened):
        assert names(page) == [opened]
    assert names(page) == []


def test_a_heartbeat_ends_the_setup_and_no_other_phase(page, stack):
    stack.phase(Phase.SETUP)
    stack.beat()
    assert (names(page), page[Slot.BEAT_AT_NS] > 0) == ([], True)
    stack.phase(Phase.STEP)
    stack.beat()
    assert names(page) == ["step"]


def test_sections_may_end_out_of_order(page, stack):
    for name in ("a", "b", "c", "b"):
        stack.start(name)
    stack.end("b")
    assert names(page) == ["a", "b", "c"]
    stack.end("a")
    assert names(page) == ["b", "c"]
    stack.end_all()
    assert names(page) == []


def test_the_end_of_what_is_not_open_is_told_once_and_changes_nothing(page, stack, caplog):
    stack.start("a")
    for _ in range(3):
        stack.end("never begun")
    assert names(page) == ["a"]
    assert caplog.text.count("never begun") == 1


def test_a_section_that_is_too_deep_is_counted_and_the_others_stay(page, stack):
    for level in range(DEPTH + 3):
        stack.start(f"level {level}")
    assert names(page) == [f"level {level}" for level in range(DEPTH)]
    assert page[Slot.SECTIONS_LOST] == 3
    stack.end("level 0")
    assert names(page) == [f"level {level}" for level in range(1, DEPTH)]
    for level in range(DEPTH + 2, 0, -1):
        stack.end(f"level {level}")
    assert names(page) == []
    with stack.section("again"):
        assert names(page) == ["again"]


def test_more_names_than_there_is_room_for_share_one(page, stack, caplog):
    for number in range(3 * MAX_NAMES):
        with stack.section(f"name {number}"):
            assert names(page) == [f"name {number}" if number < MAX_NAMES - 5 else OTHERS]
    assert page[Slot.SECTION_NAMES] == MAX_NAMES
    assert caplog.text.count("share one") == 1


def test_names_that_are_made_up_anew_each_time_do_not_fill_the_memory(page, stack):
    for number in range(150 * MAX_NAMES):
        stack.section(f"step {number}")
    assert len(stack._sections) <= 100 * MAX_NAMES


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("load data", "load data"),
        ("", "?"),
        ("  ", "?"),
        ("two\nlines\0and\x1bmore", "two?lines?and?more"),
        ("'quotes\" $HOME `x`", "'quotes\" $HOME `x`"),
        ("\u00fcber" * 20, ("\u00fcber" * 20).encode()[:MAX_NAME_BYTES].decode(errors="ignore")),
        ("\ud800", "?"),
        ("x" * 1000, "x" * MAX_NAME_BYTES),
    ],
)
def test_any_name_has_a_printable_form_that_fits(page, stack, name, shown):
    with stack.section(name):
        assert names(page) == [shown]
    assert plain_stack_name(plain_stack_name(name)) == plain_stack_name(name)


@given(name=st.text(max_size=100))
@settings(deadline=None)
def test_a_plain_name_fits_and_is_printable(name):
    plain = plain_stack_name(name)
    assert plain.isprintable()
    assert 0 < len(plain.encode()) <= MAX_NAME_BYTES


def test_an_exception_ends_its_section(page, stack):
    with pytest.raises(ValueError, match="x"), stack.section("a"):
        raise ValueError("x")
    assert names(page) == []


def test_sections_of_other_threads_are_kept_apart(page, stack):
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        with stack.section("upload"), stack.section("compress"):
            done.set()
            go.wait(10)

    thread = threading.Thread(target=work)
    with stack.section("step"):
        thread.start()
        assert done.wait(10)
        assert (names(page), elsewhere(page)) == (["step"], ["upload", "compress"])
    assert (names(page), elsewhere(page)) == ([], ["upload", "compress"])
    closed = page[Slot.CLOSED_AT_NS]
    go.set()
    thread.join()
    assert elsewhere(page) == []
    assert page[Slot.CLOSED_AT_NS] == closed, "the thread that trains has given no sign"


def test_too_many_sections_of_other_threads_are_counted(page, stack):
    def work() -> None:
        for number in range(ELSEWHERE + 2):
            stack.start(f"a {number}")
        assert len(elsewhere(page)) == ELSEWHERE
        stack.end_all()

    thread = threading.Thread(target=work)
    with stack.section("mine"):
        thread.start()
        thread.join()
        assert (names(page), elsewhere(page), page[Slot.SECTIONS_LOST]) == (["mine"], [], 2)


def test_what_a_forked_child_does_is_not_what_the_worker_does(page, stack):
    section = stack.section("load")
    with stack.section("step"):
        child = os.fork()
        if child == 0:
            with section, stack.section("new"):
                stack.phase(Phase.SETUP)
            stack.end_all()
            os._exit(0)
        os.waitpid(child, 0)
        assert names(page) == ["step"]
        with section:
            assert names(page) == ["step", "load"]


operations = st.lists(st.tuples(st.sampled_from(["start", "end"]), st.sampled_from("abcde")), max_size=60)


@given(operations=operations)
@settings(deadline=None, max_examples=60)
def test_the_page_shows_what_a_list_would(operations):
    page = Page.private()
    stack, model = SectionStack(page), []
    for action, name in operations:
        if action == "start":
            stack.start(name)
            model.append(name)
        else:
            stack.end(name)
            if name in model:
                del model[len(model) - 1 - model[::-1].index(name)]
        if len(model) <= DEPTH and not page[Slot.SECTIONS_LOST]:
            assert names(page) == model
    stack.end_all()
    assert names(page) == []
    page.close()


WRITER = """
import sys
from pathlib import Path
from slurmft.ipc.pages import Page
from slurmft.ipc.pages import SectionStack
stack = SectionStack(Page.attach(Path(sys.argv[1])))
sections = [stack.section(f"{letter}{level}") for letter in "ab" for level in range(4)]
print("ready", flush=True)
while True:
    for first in (0, 4):
        a, b, c, d = sections[first:first + 4]
        with a, b:
            with c, d:
                pass
            with c:
                pass
"""


@pytest.fixture
def writer(page, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "rank-0")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_no_read_is_torn_however_fast_the_page_changes(page, writer):
    """What is read was open together: of one letter, at the levels 0, 1, ..., each begun after the one outside."""
    seen = set()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        found = open_sections(page)[0]
        shown = [section.name for section in found]
        assert len({name[0] for name in shown}) <= 1, shown
        assert [name[1:] for name in shown] == [str(level) for level in range(len(shown))], shown
        starts = [section.began_ns for section in found]
        assert starts == sorted(starts)
        seen.add(tuple(shown))
    assert len(seen) > 4


def test_a_worker_that_is_stopped_or_dead_can_be_read(page, writer):
    for _ in range(50):
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WEXITED)
        first = open_sections(page)
        assert open_sections(page) == first
        shown = [section.name for section in first[0]]
        assert len({name[0] for name in shown}) <= 1
        assert [name[1:] for name in shown] == [str(level) for level in range(len(shown))]
        writer.send_signal(signal.SIGCONT)
    writer.kill()
    writer.wait()
    assert open_sections(page) == open_sections(page)


def test_whatever_is_on_a_page_can_be_read(page):
    for number, word in enumerate([-1, 255, 0x1234_5678_9ABC_DEFF, 2**63 - 1, -(2**63), 127]):
        page.view(64 + number, 1)[0] = word
        page.view(80 + number, 1)[0] = word
    page[Slot.PHASE] = -5
    for section in [*open_sections(page)[0], *open_sections(page)[1]]:
        assert section.name.isprintable()


def test_a_section_costs_no_more_than_a_microsecond_or_two(stack):
    section = stack.section("load")
    rounds, best = 5_000, float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(rounds):
            with section:
                pass
        best = min(best, (time.process_time() - began) / rounds)
    assert best < 1e-5  # a tenth of this on an idle machine


def test_a_page_can_be_closed_with_its_stack(tmp_path):
    page = Page.create(Path(tmp_path) / "page", rank=0, generation=1)
    stack = SectionStack(page)
    stack.start("a")
    page.close()


def test_what_changed_between_two_reads_is_read_again(page, stack, monkeypatch):
    stack.start("outer")
    stack.start("inner")
    consistent, copies = page.copy(0, 1024), []

    def copy(first: int, last: int) -> bytes:
        whole = bytearray(consistent)
        if last - first > 6 and len(copies) < 3:  # the innermost is of another moment, each time
            whole[65 * 8 : 66 * 8] = (len(copies) << 20 | 4).to_bytes(8, sys.byteorder)
        copies.append(first)
        return bytes(whole[first * 8 : last * 8])

    monkeypatch.setattr(page, "copy", copy)
    assert names(page) == ["outer", "inner"]
    assert len([first for first in copies if first == Slot.PHASE]) == 5
