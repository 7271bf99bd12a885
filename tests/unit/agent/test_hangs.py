"""The agent's side of hang detection: real pages, a clock of the test's own, real processes that are stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from of_each import of_each

from slurmft.agent.hangs import WORKERS_PER_MESSAGE, HangWatch, facts_of, mentions
from slurmft.config.run import RunConfig
from slurmft.ipc.channel import BadMessage, encoded
from slurmft.ipc.messages import AskSections, HangReport, parse_report
from slurmft.ipc.pages import Page, Phase, SectionStack, Slot
from slurmft.policy.hangs import OUT_OF_SECTION
from slurmft.system.processes import is_stopped

LIMITS = {"setup": 100, "step": 10, "load": 1000}


def configured(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"command": "x", "run_folder": "r", "fault_tolerance": settings})


@dataclass
class Worker:
    rank: int
    page: Page
    pid: int = 0
    forked_at: float | None = None
    alive: bool = True


class Clock:
    """Runs ahead of the real one, by as much as the test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Bench:
    watch: HangWatch
    workers: list[Worker]
    stacks: list[SectionStack]
    reports: list[HangReport]
    clock: Clock

    def told(self) -> list[tuple[int, str]]:
        self.watch.look()
        for report in self.reports:
            assert parse_report(encoded(report)) == report
        return [(report.rank, report.section) for report in self.reports]


@pytest.fixture
def made(tmp_path, request) -> Iterator[Bench]:
    settings = {"rank_section_timeouts": LIMITS, "num_warmup_iterations": 0} | getattr(request, "param", {})
    clock, reports = Clock(), []
    watch = HangWatch(configured(**settings), reports.append, clock)
    workers, stacks = [], []
    for rank in range(3):
        path = tmp_path / f"rank-{rank}"
        workers.append(Worker(rank, Page.create(path, rank=rank, generation=1), os.getpid(), clock()))
        stacks.append(SectionStack(Page.attach(path)))
    watch.begin(workers, learned={})
    yield Bench(watch, workers, stacks, reports, clock)
    for worker in workers:
        worker.page.close()


def test_a_worker_over_its_limit_is_reported_once(made: Bench):
    made.stacks[1].phase(Phase.STEP)
    made.stacks[1].start("load")
    made.clock.ahead_s = 9.5
    assert made.told() == []
    made.clock.ahead_s = 10.5
    assert made.told() == made.told() == [(1, "step")]
    (report,) = made.reports
    assert report.limit_s == 10
    assert 10.4 < report.held_s < 12
    assert report.why.startswith("rank 1 has been in section 'step' for 1")


def test_new_workers_are_told_of_anew(made: Bench):
    made.stacks[1].phase(Phase.STEP)
    made.clock.ahead_s = 11
    assert len(made.told()) == 1
    made.watch.begin(made.workers, learned={})
    assert len(made.told()) == 2


def test_the_next_look_is_in_time_for_the_next_limit(made: Bench):
    made.stacks[0].phase(Phase.STEP)
    assert made.watch.look() == 5.0  # workload_check_interval
    made.clock.ahead_s = 7.0
    assert 2.5 < made.watch.look() < 3.01
    made.clock.ahead_s = 10.5
    assert made.watch.look() <= 5.0


def test_the_dead_are_not_looked_at(made: Bench):
    made.stacks[1].phase(Phase.STEP)
    made.workers[1].alive = False
    made.clock.ahead_s = 100
    assert made.told() == []


@pytest.mark.parametrize("made", [{"initial_rank_heartbeat_timeout": 20}], indirect=True)
def test_one_that_never_calls_is_told_of_when_the_user_has_set_a_limit(made: Bench):
    for worker in made.workers:
        worker.page[Slot.PID] = 0
    made.workers[2].forked_at = made.clock() + 15
    made.clock.ahead_s = 21
    assert made.told() == [(0, "start-up"), (1, "start-up")]


@pytest.mark.parametrize(("known", "attached", "told"), [(False, False, 0), (True, False, 3), (False, True, 2)])
def test_a_script_that_calls_nothing_is_not_hung(made: Bench, tmp_path, known: bool, attached: bool, told: int):
    for worker in made.workers:
        worker.page[Slot.PID] = 0
    if attached:  # so the script does call it, and others should have, too
        made.workers[0].page[Slot.PID] = 1
        made.stacks[0].phase(Phase.NONE)
    made.watch._command, made.watch._folder = ("python", "train.py"), tmp_path
    (tmp_path / "train.py").write_text("start_session()" if known else "import torch")
    made.watch._read_script()
    made.clock.ahead_s = 2000
    assert len(made.told()) == told


def test_a_worker_whose_zygote_still_imports_has_the_time_of_the_launch(made: Bench):
    made.watch.look()  # the others have called: the script does
    made.workers[0].forked_at, made.workers[0].page[Slot.PID] = None, 0
    made.clock.ahead_s = 1801
    assert made.told() == []
    made.clock.ahead_s = 1800 + 300 + 1
    assert made.told() == [(0, "start-up")]


def test_the_time_of_a_suspension_counts_for_nobody(made: Bench):
    made.stacks[0].phase(Phase.STEP)
    before_s = made.clock()
    made.clock.ahead_s = 3600.0
    made.watch.was_suspended(before_s + 1, made.clock())
    assert made.told() == []
    made.clock.ahead_s = 3608.0
    assert made.told() == []
    made.clock.ahead_s = 3610.0
    assert made.told() == [(0, "step")]


@pytest.mark.parametrize("made", [{"rank_out_of_section_timeout": 20}], indirect=True)
def test_another_threads_sections_hide_no_hang_of_the_one_that_trains(made: Bench):
    stack, page = made.stacks[0], made.workers[0].page
    for other in made.stacks[1:]:
        other.phase(Phase.STEP)
    with stack.section("step"):
        pass
    for slot in (Slot.CLOSED_AT_NS, Slot.ATTACHED_AT_NS):
        page[slot] -= 25 * 10**9

    def fetch() -> None:
        stack.start("fetch")
        stack.end("fetch")
        stack.start("fetch")

    other_thread = threading.Thread(target=fetch)
    other_thread.start()
    other_thread.join()
    assert made.told() == [(0, "out of section")]


def test_a_suspended_agent_notices_it():
    """A process that is stopped for two seconds, with a limit of one and a half."""
    code = """
import asyncio, sys, tempfile
from pathlib import Path
from slurmft.config.run import RunConfig
from slurmft.agent.hangs import HangWatch
from slurmft.ipc.pages import Page
from slurmft.ipc.pages import Phase, SectionStack
class Worker:
    rank, pid, forked_at, alive = 0, 0, None, True
async def main():
    path = Path(tempfile.mkdtemp()) / "page"
    worker = Worker(); worker.page = Page.create(path, rank=0, generation=1)
    SectionStack(Page.attach(path)).phase(Phase.STEP)
    settings = {"rank_section_timeouts": "step:1.5", "num_warmup_iterations": 0}
    config = RunConfig.model_validate({"command": "x", "run_folder": "r", "fault_tolerance": settings})
    told = asyncio.Event()
    watch = HangWatch(config, lambda report: (print(report.held_s, flush=True), told.set()))
    watch.begin([worker], learned={})
    task = asyncio.create_task(watch.run())
    print("ready", flush=True)
    await told.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(6.0)  # what is tested is that this time does not count
        process.send_signal(signal.SIGCONT)
        held_s = float(process.stdout.readline())
    assert 1.5 <= held_s < 5.5


def test_a_stopped_process_is_seen_as_such(made: Bench):
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            made.workers[2].pid = process.pid
            made.stacks[2].phase(Phase.STEP)
            made.clock.ahead_s = 11
            assert made.told() == [(2, "step")]
            assert "stopped" in made.reports[0].why
            assert [each.stopped for each in made.watch.facts(0).workers] == [False, False, True]
        finally:
            process.kill()
    assert not is_stopped(process.pid)


async def test_a_hang_is_reported_within_a_tenth_of_a_second_of_its_limit(tmp_path):
    page = Page.create(tmp_path / "page", rank=0, generation=1)
    stack = SectionStack(Page.attach(tmp_path / "page"))
    told = asyncio.Event()
    config = configured(rank_section_timeouts="load:0.6", workload_check_interval=3600)
    reports: list[HangReport] = []
    watch = HangWatch(config, lambda report: (reports.append(report), told.set()))
    watch.begin([Worker(0, page)], learned={"load": 0.6})
    page[Slot.RESUMED], page[Slot.STEP] = 0, 5
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.3)
    stack.start("load")
    async with asyncio.timeout(10):
        await told.wait()
    task.cancel()
    page.close()
    assert 0.6 < reports[0].held_s < 0.7


def test_learned_limits_replace_the_others_and_may_change(made: Bench):
    made.stacks[0].phase(Phase.STEP)
    made.watch.learn({"step": 50.0, "mine": 3.0})
    made.clock.ahead_s = 20
    made.stacks[1].start("mine")
    assert made.told() == [(1, "mine")]
    made.watch.learn({})
    assert made.told() == [(1, "mine"), (0, "step")]


@pytest.mark.parametrize("made", [{"calc_ft_timeouts": True}], indirect=True)
def test_durations_are_seen_from_outside(made: Bench):
    stack = made.stacks[0]
    stack.phase(Phase.STEP)
    with stack.section("load"):
        made.clock.ahead_s = 3.0
        assert made.watch.look() <= 0.25
        assert made.watch.durations() is None  # nothing has ended yet
    stack.phase(Phase.STEP)
    made.watch.look()
    assert made.watch.durations() is None  # not so soon after the last
    made.clock.ahead_s = 8.1
    message = made.watch.durations()
    assert message is not None
    assert parse_report(encoded(message)) == message
    assert {name: round(seconds) for name, seconds in message.sections} == {"step": 3, "load": 3}
    assert made.watch.durations() is None


@pytest.mark.parametrize("made", [{"calc_ft_timeouts": True, "num_warmup_iterations": 5}], indirect=True)
def test_first_steps_teach_nothing_about_steps(made: Bench):
    stack = made.stacks[0]
    stack.phase(Phase.SETUP)
    made.watch.look()
    stack.phase(Phase.STEP)
    made.clock.ahead_s = 50.0
    made.watch.look()
    stack.phase(Phase.CHECKPOINTING)
    made.watch.look()
    stack.phase(Phase.STEP)
    made.watch.look()
    message = made.watch.durations()
    assert message is not None
    assert {name for name, _ in message.sections} == {"setup", "checkpointing"}


@pytest.mark.parametrize("made", [{"num_warmup_iterations": 2}], indirect=True)
def test_the_first_steps_may_take_as_long_as_the_setup(made: Bench):
    stack, page = made.stacks[0], made.workers[0].page
    for step in range(3):  # a loop of the user's own
        stack.start("step")
        made.clock.ahead_s += 20
        assert made.told() == ([] if step < 2 else [(0, "step")])
        stack.end("step")
    page[Slot.OWN_STEPS], page[Slot.RESUMED], page[Slot.STEP] = 0, 100, 101
    made.watch.begin(made.workers, learned={})
    stack.phase(Phase.STEP)
    made.clock.ahead_s += 20
    assert len(made.told()) == 1
    page[Slot.STEP] = 102
    assert len(made.told()) == 2


@pytest.mark.parametrize("made", [{"rank_section_timeouts": {}}], indirect=True)
@pytest.mark.parametrize(
    ("script", "phase", "told"),
    [
        ("train(start_session())", Phase.SETUP, None), ("train(start_session())", Phase.NONE, None),
        ("for step in session.steps(", Phase.SETUP, "setup"),
        ("for step in session.steps(", Phase.NONE, OUT_OF_SECTION),
    ],
)  # fmt: skip
def test_a_loop_that_says_nothing_of_its_steps_has_no_limit_by_default(
    made: Bench, tmp_path, script: str, phase: Phase, told: str | None
):
    made.watch._command, made.watch._folder = ("python", "train.py"), tmp_path
    (tmp_path / "train.py").write_text(script)
    made.watch._read_script()
    for stack in made.stacks:
        stack.phase(phase)
    made.clock.ahead_s = 3700
    assert made.told() == ([(rank, told) for rank in range(3)] if told else [])
    if not told:  # one of them tells: the others are held to it as well
        made.stacks[2].start("step")
        made.stacks[2].end("step")
        assert [rank for rank, _ in made.told()] == [0, 1, 2] if phase else [0, 1]


@pytest.mark.parametrize("made", [{"num_warmup_iterations": 5}], indirect=True)
def test_where_no_step_is_counted_own_limits_hold_when_a_setup_would_be_over(made: Bench):
    made.watch._own = made.watch._limits = replace(made.watch._own, sections={"setup": 100, "batch": 10})
    made.stacks[0].phase(Phase.NONE)
    made.stacks[0].start("batch")
    made.clock.ahead_s = 90
    assert made.told() == []
    made.stacks[0].end("batch")
    made.stacks[0].start("batch")
    made.clock.ahead_s = 101
    assert (0, "batch") in made.told()


def test_what_is_told_the_supervisor_arrives_as_it_was(made: Bench):
    made.stacks[0].phase(Phase.STEP)
    made.stacks[0].start("load")
    made.stacks[0].beat()
    for look in made.watch.looks():
        again = facts_of(look).as_look("n1")
        assert (again.rank, again.attached, again.node) == (look.rank, look.attached, "n1")
        assert [name for name, _ in again.sections] == [name for name, _ in look.sections]
        assert again.quiet_s == pytest.approx(look.quiet_s, abs=0.001)
        assert (again.heartbeat_s is None) == (look.heartbeat_s is None)
    told = made.watch.facts(0)
    assert AskSections().reply_of(encoded(told)) == told


def test_many_workers_are_told_of_in_several_messages(made: Bench):
    many = [Worker(rank, made.workers[0].page) for rank in range(2 * WORKERS_PER_MESSAGE + 1)]
    made.watch.begin(many, learned={})
    told, more = [], True
    while more:
        answer = made.watch.facts(len(told))
        told += [facts.rank for facts in answer.workers]
        more = answer.more
    assert told == list(range(len(many)))


def test_any_page_gives_a_message_that_is_taken(made: Bench):
    page = made.workers[0].page
    for slot in Slot:
        if slot not in (Slot.MAGIC, Slot.RANK):
            page[slot] = -(2**63) if slot % 2 else 2**63 - 1
    page.view(64, 24)[:] = memoryview(bytes(range(192))).cast("q")
    made.clock.ahead_s = 1e6
    made.told()
    told = made.watch.facts(0)
    assert AskSections().reply_of(encoded(told)) == told


@of_each(
    message=[
        {"kind": "hung"},
        {"kind": "hung", "rank": -1, "section": "a", "held_s": 1, "limit_s": 1, "why": "x"},
        {"kind": "hung", "rank": 1, "section": "a\n", "held_s": 1, "limit_s": 1, "why": "x"},
        {"kind": "hung", "rank": 1, "section": "a", "held_s": float("nan"), "limit_s": 1, "why": "x"},
        {"kind": "hung", "rank": 1, "section": "a", "held_s": 1, "limit_s": "1", "why": "x"},
        {"kind": "hung", "rank": 1, "section": "a", "held_s": 1, "limit_s": 1, "why": 7},
        {"kind": "durations", "sections": {"a": 1}},
        {"kind": "durations", "sections": [["a", float("inf")]]},
        {"kind": "durations", "sections": [["a", 1.0]] * 1000},
    ]
)
def test_a_report_of_another_shape_is_refused(message: dict[str, Any]):
    with pytest.raises(BadMessage):
        parse_report(encoded(message))


@of_each(command__known=[
        (["python", "with.py"], True), (["python", "-u", "with.py"], True), (["python", "without.py"], False),
        (["python", "missing.py"], False), (["python", "-m", "with"], False), (["./run.sh"], False),
    ])  # fmt: skip
def test_a_script_that_names_start_session_calls_slurmft(tmp_path, command: list[str], known: bool):
    (tmp_path / "with.py").write_text("from slurmft import start_session\n")
    (tmp_path / "without.py").write_text("import torch\n")
    assert mentions(b"start_session", command, tmp_path) is known
