"""The session inside a worker: the test is the agent and writes into the page."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from of_each import of_each
from worker_variable import set_settings

from slurmft.checkpoint import Catalog, CheckpointManager
from slurmft.errors import UsageError
from slurmft.ipc.pages import NOTHING, Page, Slot, State, StopAction
from slurmft.policy.stop import END, NEVER, NOT_STARTED, base_of, tick_of
from slurmft.trainer.savers import SAVERS, OpenGradients
from slurmft.worker.session import PlannedStop, Session, checkpoint_dir_of, start_session

WAIT_S = 10.0
INTERVAL_STEPS = 5

pytestmark = pytest.mark.usefixtures("own_environment")


def ask(page: Page, tick: int, action: StopAction = StopAction.SAVE_AND_STOP) -> None:
    """Propose and commit at once, as when nobody has passed the tick."""
    page[Slot.ACTION] = action
    page[Slot.COMMITTED] = NOTHING
    page[Slot.PROPOSED] = tick
    page[Slot.COMMITTED] = tick


class Training:
    """A loop that does nothing but count; ``during`` maps a step to what happens in it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.done: list[int] = []
        self.saves: list[int] = []

    def run(self, until: int, start: int = 0, during: Mapping[int, Callable[[], object]] | None = None) -> Training:
        for step in self.session.steps(start=start, until=until, save=self.saves.append):
            self.done.append(step)
            if during and step in during:
                during[step]()
        return self


# saves


@pytest.mark.parametrize(
    ("interval", "start", "until", "saves"),
    [
        pytest.param(5, 0, 12, [5, 10, 12], id="every fifth and the last"),
        pytest.param(5, 0, 10, [5, 10], id="the last is a fifth"),
        pytest.param(5, 5, 12, [10, 12], id="resumed on a fifth, which is on disk"),
        pytest.param(5, 7, 12, [10, 12], id="resumed in between"),
        pytest.param(0, 0, 12, [12], id="only at the end"),
        pytest.param(1, 0, 3, [1, 2, 3], id="every step"),
        pytest.param(5, 12, 12, [], id="nothing left to do"),
        pytest.param(5, 13, 12, [], id="further than asked for"),
        pytest.param(100, 0, 3, [3], id="shorter than the interval"),
    ],
)
def test_when_it_saves(page, monkeypatch, interval, start, until, saves):
    set_settings(monkeypatch, checkpoint={"interval_steps": interval})
    with start_session() as session:
        training = Training(session).run(until, start)
    assert training.saves == saves
    assert training.done == list(range(start, until))
    assert page[Slot.SAVED] == (saves[-1] if saves else NOTHING)


def test_what_the_page_says_from_the_start_to_the_end(page):
    assert (page[Slot.TICK], page[Slot.STATE]) == (NOT_STARTED, State.ABSENT)
    seen: list[tuple[int, ...]] = []
    saving: list[int] = []

    with start_session() as session:
        assert page[Slot.PID] == os.getpid()
        assert page[Slot.STATE] == State.SETUP
        assert page[Slot.TICK] == NOT_STARTED
        for step in session.steps(start=3, until=6, save=lambda _: saving.append(page[Slot.STATE])):
            session.report(loss=step / 2, other=9.0)
            facts = (Slot.TICK, Slot.STEP, Slot.UNTIL, Slot.RESUMED, Slot.STATE)
            seen.append(tuple(page[slot] for slot in facts))
    assert seen == [(tick_of(step), step, 6, 3, State.TRAINING) for step in (3, 4, 5)]
    assert saving == [State.SAVING] * 2
    assert (page[Slot.TICK], page[Slot.STEP], page[Slot.STATE]) == (END, 6, State.FINISHED)
    assert page.metric() == 2.5
    assert 0 < page[Slot.FIRST_STEP_AT] <= page[Slot.PROGRESS_AT] <= time.time_ns()


def test_a_loop_that_ends_early_says_so(page):
    """As an early stop does: its last state is saved, and the agent waits for no further step."""
    saves: list[int] = []
    with start_session() as session:
        steps = session.steps(start=0, until=1_000, save=saves.append)
        assert [next(steps), next(steps)] == [0, 1]
        with pytest.raises(StopIteration):
            steps.send(True)
    assert saves == [2]
    facts = (Slot.TICK, Slot.STEP, Slot.UNTIL, Slot.SAVED, Slot.STATE)
    assert tuple(page[slot] for slot in facts) == (END, 2, 2, 2, State.FINISHED)


def test_an_error_is_seen_in_the_page(page):
    with pytest.raises(ZeroDivisionError), start_session() as session:
        Training(session).run(9, during={2: lambda: 1 // 0})
    assert (page[Slot.STATE], page[Slot.STEP]) == (State.FAILED, 2)


def test_a_save_that_fails_is_an_error_and_not_a_checkpoint(page):
    def refuse(_step: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), start_session() as session:
        for _ in session.steps(start=0, until=9, save=refuse):
            pass
    assert (page[Slot.STATE], page[Slot.SAVED]) == (State.FAILED, NOTHING)


def test_a_start_below_zero_is_refused(page):
    with start_session() as session, pytest.raises(ValueError, match="start=-1"):
        next(session.steps(start=-1, until=3, save=print))


# stops


def test_a_stop_saves_and_ends_at_the_agreed_tick(page):
    with pytest.raises(PlannedStop) as stop, start_session() as session:
        training = Training(session)
        training.run(20, during={2: lambda: ask(page, tick_of(4))})
    assert (stop.value.code, stop.value.step) == (75, 4)
    assert training.done == [0, 1, 2, 3]
    assert training.saves == [4]
    assert page[Slot.STATE] == State.STOPPED
    assert (page[Slot.SAVED], page[Slot.STEP], page[Slot.ANSWERED]) == (4, 4, tick_of(4))


def test_no_except_of_the_trainer_swallows_a_stop():
    assert not issubclass(PlannedStop, Exception)


@pytest.mark.parametrize(
    "tick", [tick_of(5), tick_of(4, 0, 1), tick_of(4, 3, 99)], ids=["its tick", "before it", "just before"]
)
def test_a_stop_right_after_a_periodic_save_saves_once(page, tick):
    with pytest.raises(PlannedStop), start_session() as session:
        training = Training(session)
        training.run(20, during={3: lambda: ask(page, tick)})
    assert training.saves == [5]
    assert page[Slot.SAVED] == 5
    assert page[Slot.STATE] == State.STOPPED


def test_a_stop_where_the_attempt_began_has_its_checkpoint_already(page):
    ask(page, tick_of(7))
    with pytest.raises(PlannedStop), start_session() as session:
        training = Training(session)
        training.run(20, start=7)
    assert (training.saves, training.done) == ([], [])
    assert page[Slot.SAVED] == 7


def test_a_stop_at_the_very_first_boundary_saves_step_0(page):
    ask(page, tick_of(0))
    with pytest.raises(PlannedStop), start_session() as session:
        training = Training(session)
        training.run(20)
    assert training.saves == [0]
    assert page[Slot.SAVED] == 0


def test_a_save_on_request_goes_on(page):
    with start_session() as session:
        training = Training(session).run(9, during={1: lambda: ask(page, tick_of(2), StopAction.SAVE)})
    assert training.saves == [2, 5, 9]
    assert training.done == list(range(9))
    assert page[Slot.ANSWERED] == tick_of(2)
    assert page[Slot.STATE] == State.FINISHED


def test_a_stop_after_a_save_on_request(page):
    def withdraw_and_stop() -> None:
        page[Slot.PROPOSED] = NEVER
        ask(page, tick_of(4))

    with pytest.raises(PlannedStop) as stop, start_session() as session:
        training = Training(session)
        training.run(9, during={1: lambda: ask(page, tick_of(2), StopAction.SAVE), 3: withdraw_and_stop})
    assert stop.value.step == 4
    assert training.saves == [2, 4]


@pytest.mark.parametrize("then", ["committed", "moved", "withdrawn"])
def test_a_worker_holds_at_a_proposal_until_it_is(page, then):
    def agent() -> None:
        deadline = time.monotonic() + WAIT_S
        while page[Slot.HOLDING] != tick_of(2) and time.monotonic() < deadline:
            time.sleep(0.001)
        held.append((page[Slot.TICK], page[Slot.HOLDING]))
        if then == "committed":
            page[Slot.COMMITTED] = tick_of(2)
        elif then == "moved":
            ask(page, tick_of(6))
        else:
            page[Slot.PROPOSED] = NEVER

    held: list[tuple[int, int]] = []
    page[Slot.ACTION], page[Slot.PROPOSED] = StopAction.SAVE_AND_STOP, tick_of(2)
    thread = threading.Thread(target=agent)
    thread.start()
    stopped = None
    with start_session() as session:
        training = Training(session)
        try:
            training.run(8)
        except PlannedStop as stop:
            stopped = stop.step
    thread.join()
    assert held == [(tick_of(2), tick_of(2))]
    assert stopped == {"committed": 2, "moved": 6, "withdrawn": None}[then]


def test_a_stop_for_a_tick_that_never_comes_lets_the_run_finish(page):
    with start_session() as session:
        training = Training(session).run(6, during={2: lambda: ask(page, tick_of(6))})
    assert training.saves == [5, 6]
    assert page[Slot.STATE] == State.FINISHED


# evaluations


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_an_evaluation_leaves_the_random_numbers_untouched(page):
    with start_session(seed=3) as session:
        plain = [draws() for _ in session.steps(start=0, until=3, save=lambda _: None)]
    page[Slot.TICK] = NOT_STARTED
    np_state = np.random.get_state()
    with start_session(seed=3) as session:
        mixed = []
        for _ in session.steps(start=0, until=3, save=lambda _: None):
            assert page[Slot.STATE] == State.TRAINING
            for _ in session.evaluating(range(4)):
                draws()
                assert page[Slot.STATE] == State.EVALUATING
            mixed.append(draws())
    assert [row[::2] for row in mixed] == [row[::2] for row in plain]  # numpy is the trainer's own to seed
    np.random.set_state(np_state)


def test_an_evaluation_that_is_left_early_or_fails_leaves_them_untouched_too(page):
    with start_session(seed=3) as session:
        for step in session.steps(start=0, until=2, save=lambda _: None):
            before = torch.get_rng_state()
            if step == 0:
                for _ in session.evaluating(range(4)):
                    draws()
                    break
            else:
                with pytest.raises(KeyError):
                    for _ in session.evaluating(range(4)):
                        draws()
                        raise KeyError
            assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_that_nobody_closes_does_not_reach_into_later_steps(page):
    """Its iterator is kept, and collected whenever: the random numbers of the training must not jump back then."""
    with start_session(seed=3) as session:
        for step in session.steps(start=0, until=4, save=lambda _: None):
            assert page[Slot.STATE] == State.TRAINING
            if step < 2:
                kept = session.evaluating(range(4))
                next(kept)
            draws()
            if step == 2:
                before, tick = torch.get_rng_state(), page[Slot.TICK]
                del kept
                assert torch.equal(torch.get_rng_state(), before)
                assert page[Slot.TICK] == tick


def evaluate_with_a_stop_inside(page: Page, action: StopAction) -> tuple[list[int], list[bool], torch.Tensor, int]:
    """Saved steps, whether the random state at each save is the one before the evaluation, and batches seen."""
    saves: list[int] = []
    same: list[bool] = []
    batches = 0
    before = torch.Tensor()

    def save(step: int) -> None:
        saves.append(step)
        same.append(torch.equal(torch.get_rng_state(), before))

    with start_session(seed=1) as session:
        for step in session.steps(start=0, until=4, save=save):
            torch.rand(3)
            if step == 2:
                before = torch.get_rng_state()
                for batch in session.evaluating(range(6)):
                    batches += 1
                    torch.rand(2)
                    if batch == 2:
                        ask(page, tick_of(2, 0, 4), action)
                assert torch.equal(torch.get_rng_state(), before)
    return saves, same, before, batches


def test_a_stop_inside_an_evaluation_saves_the_random_numbers_from_before_it(page):
    saves: list[int] = []
    states: list[torch.Tensor] = []

    def save(step: int) -> None:
        saves.append(step)
        states.append(torch.get_rng_state())

    before = torch.Tensor()
    seen = 0
    with pytest.raises(PlannedStop) as stop, start_session(seed=1) as session:
        for step in session.steps(start=0, until=4, save=save):
            if step == 2:
                before = torch.get_rng_state()
                for batch in session.evaluating(range(6)):
                    seen += 1
                    torch.rand(2)
                    if batch == 2:
                        ask(page, tick_of(2, 0, 4))
    assert (stop.value.step, saves, seen) == (2, [2], 3)
    assert torch.equal(states[0], before)
    assert page[Slot.SAVED] == 2


def test_a_stop_inside_an_evaluation_is_seen_as_a_stop(page):
    with pytest.raises(PlannedStop), start_session() as session:
        for _ in session.steps(start=0, until=4, save=lambda _: None):
            ask(page, tick_of(0, 0, 2))
            for _ in session.evaluating(range(6)):
                pass
    assert page[Slot.STATE] == State.STOPPED


def test_a_save_inside_an_evaluation_goes_on_with_it(page):
    saves, same, _, batches = evaluate_with_a_stop_inside(page, StopAction.SAVE)
    assert saves == [2, 4]
    assert same[0]
    assert batches == 6


def test_an_evaluation_needs_steps_around_it(page):
    ask(page, tick_of(0, 0, 1))
    with start_session() as session, pytest.raises(RuntimeError, match=r"needs session.steps"):
        list(session.evaluating(range(3)))


# SIGTERM


def test_a_term_alone_stops_nobody_while_an_agent_watches(page):
    with start_session() as session:
        training = Training(session).run(4, during={1: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert training.done == [0, 1, 2, 3]


def test_without_an_agent_a_term_saves_and_stops():
    with pytest.raises(PlannedStop) as stop, start_session() as session:
        training = Training(session)
        training.run(9, during={3: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert stop.value.step == 4
    assert training.saves == [4]


def test_a_handler_that_the_user_installs_later_is_called_too():
    called: list[int] = []
    with pytest.raises(PlannedStop) as stop, start_session() as session:
        training = Training(session)

        def term() -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def install() -> None:
            signal.signal(signal.SIGTERM, lambda number, _: called.append(number))

        training.run(9, during={1: install, 3: term})
    assert called == [signal.SIGTERM]
    assert stop.value.step == 4


def test_a_handler_that_calls_the_one_before_it_is_called_once():
    """What a well-behaved handler does, such as Lightning's: its predecessor is ours."""
    called: list[int] = []
    with pytest.raises(PlannedStop), start_session() as session:
        training = Training(session)

        def install() -> None:
            def handler(number: int, frame: object) -> None:
                called.append(number)
                if callable(before):
                    before(number, frame)  # type: ignore[arg-type]

            before = signal.signal(signal.SIGTERM, handler)

        training.run(9, during={1: install, 3: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    assert called == [signal.SIGTERM]


ENDS = """
import os, signal, sys
from slurmft.worker.session import start_session
from slurmft.ipc.pages import Page, Slot, State
from pathlib import Path

def loop(session, inside=lambda: None):
    for step in session.steps(start=0, until=4, save=lambda step: None):
        if step == 2:
            return inside()

def caught():
    try:
        with start_session() as session:
            loop(session, lambda: 1 / 0)
    except ZeroDivisionError:
        pass

def within(inside):
    with start_session() as session:
        loop(session, inside)

ends = {
    "left early": lambda: within(lambda: None),
    "without a with": lambda: loop(start_session()),
    "sys.exit(0)": lambda: within(lambda: sys.exit(0)),
    "caught": caught,
    "killed": lambda: within(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "os._exit": lambda: within(lambda: os._exit(0)),
    "sys.exit(3)": lambda: within(lambda: sys.exit(3)),
    "an exception": lambda: within(lambda: 1 / 0),
}
for name, end in ends.items():
    os.environ["SLURMFT_PAGE"] = path = f"{sys.argv[1]}/{name.replace('/', '')}"
    page = Page.create(Path(path), rank=0, generation=1)
    pid = os.fork()
    if pid == 0:
        end()
        sys.exit()
    os.waitpid(pid, 0)
    print(name, page[Slot.STATE] == State.CLOSED, sep=": ")
"""


@pytest.mark.long
def test_a_session_is_closed_where_its_process_ends_as_it_means_to(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    closed = {name: told == "True" for name, told in (line.split(": ") for line in done.stdout.splitlines())}
    orderly = {"left early", "without a with", "sys.exit(0)", "caught"}
    assert {name for name, is_closed in closed.items() if is_closed} == orderly
    assert len(closed) == 8


# gradients that wait for an optimizer


@pytest.fixture
def trained():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, SAVERS.gradients = SAVERS.gradients, OpenGradients()
    if before._hook is not None:  # of an earlier test: it would note first that the gradients are used
        before._hook.remove()
        before._hook = None
    SAVERS.trains(model, optimizer)
    yield model, optimizer
    SAVERS.gradients._hook.remove()
    SAVERS.gradients = before


def accumulate(model, optimizer, step: int, window: int = 4) -> None:
    model(torch.ones(2, 4)).sum().backward()
    if (step + 1) % window == 0:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("action", [StopAction.SAVE, StopAction.SAVE_AND_STOP])
def test_within_an_accumulation_a_stop_waits_for_the_optimizer(page, trained, action):
    with start_session() as session:
        training = Training(session)
        during = {step: functools.partial(accumulate, *trained, step) for step in range(30)}
        during[5] = lambda: (accumulate(*trained, 5), ask(page, tick_of(6), action))
        set_off = contextlib.nullcontext() if action is StopAction.SAVE else pytest.raises(PlannedStop)
        with set_off:
            training.run(12, during=during)
    assert 8 in training.saves and not {6, 7} & {*training.saves}
    assert page[Slot.ANSWERED] == tick_of(6) and page[Slot.SAVED] == training.saves[-1]
    assert training.done[-1] == (11 if action is StopAction.SAVE else 7)


def test_within_an_accumulation_a_periodic_save_waits_for_the_optimizer_and_the_last_one_does_not(page, trained):
    during = {step: functools.partial(accumulate, *trained, step) for step in range(30)}
    with start_session() as session:
        training = Training(session).run(18, during=during)
    assert training.saves == [8, 12, 16, 18]  # every fifth is due: 5, 10 and 15


def test_a_stop_within_an_evaluation_behind_half_an_accumulation_waits_for_its_end(page, trained):
    with pytest.raises(PlannedStop), start_session() as session:
        training = Training(session)
        for step in session.steps(start=0, until=9, save=training.saves.append):
            training.done.append(step)
            if step == 2:
                for batch in session.evaluating(range(6)):
                    if batch == 1:
                        ask(page, tick_of(2, 0, 3))
            accumulate(*trained, step)
    assert (training.saves, training.done[-1], page[Slot.ANSWERED]) == ([4], 3, tick_of(2, 0, 3))


def test_a_loop_whose_gradients_wait_behind_each_step_is_refused_before_it_saves(page, trained):
    model, optimizer = trained
    training = Training(start_session())

    def late() -> None:
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()

    with training.session, pytest.raises(UsageError, match="earlier step"):
        training.run(30, during=dict.fromkeys(range(30), late))
    assert training.saves == []


# large numbers


@pytest.mark.parametrize("start", [2**29 - 1, 2**29, 2**30, 2**31, 2**34 - 1, 2**40 + 7, 10**15 - 20])
def test_a_run_stops_at_any_step(page, start):
    first = start - base_of(start)
    with pytest.raises(PlannedStop) as stopped, start_session() as session:
        training = Training(session)
        training.run(start + 12, start, during={start + 2: lambda: ask(page, tick_of(first + 4))})
    assert stopped.value.step == training.saves[-1] == start + 4 and training.done[-1] == start + 3
    with start_session() as session:
        assert Training(session).run(start + 3, start).done == [start, start + 1, start + 2]
    assert page[Slot.TICK] == END


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_save_in_a_handler_of_the_stop_signal_is_left_to_the_session(page, trained, tmp_path, monkeypatch, name):
    """Of ``preemption.signal``, whichever it is; of another one it is refused."""
    for variable in ("SLURMFT_PAGE", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    number = signal.Signals[name]
    if name != "SIGTERM":  # as an agent tells it
        monkeypatch.setenv("SLURMFT_STOP_SIGNAL", name)
    checkpoints, answers = CheckpointManager(tmp_path), list[object]()

    def save(step: int) -> None:
        checkpoints.save(*trained, step=step)

    with pytest.raises(PlannedStop), start_session() as session:
        before = signal.signal(number, lambda *_: answers.append(save(99)))
        try:
            for step in session.steps(start=0, until=9, save=save):
                accumulate(*trained, step, window=1)
                if step == 2:
                    os.kill(os.getpid(), number)
        finally:
            signal.signal(number, before)
            session._signal.seen = False
    assert answers == [None] and [one.step for one in Catalog(tmp_path).committed()][:1] == [3]


@of_each(
    environment__folder=[
        ({}, "checkpoints"),
        ({"SLURM_JOB_ID": "7"}, "checkpoints"),
        ({"SLURM_JOB_ID": "7", "SUBMITIT_EXECUTOR": "slurm"}, "checkpoints/7"),
        ({"SUBMITIT_LOCAL_JOB_ID": "9", "SUBMITIT_EXECUTOR": "local"}, "checkpoints/9"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "checkpoints/7_0"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURMFT_CHECKPOINT_DIR": "/c"}, "/c"),
    ]
)
def test_points_of_a_sweep_do_not_share_their_checkpoints(environment, folder):
    assert str(checkpoint_dir_of(environment)) == folder
