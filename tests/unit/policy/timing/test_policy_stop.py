"""The stop agreement: its arithmetic, and the whole protocol as interleaved atomic steps.

The supervisor in the model is the real ``supervisor.stops.agree``; agents and workers do what
``agent.agent`` and ``worker.signals`` do, cut at every access to a page. That the worker's model is the worker's
code is a test too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from drawn import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.ipc import messages
from slurmft.ipc.messages import Looks
from slurmft.ipc.pages import NOTHING, Slot, StopAction
from slurmft.policy.stop import (
    END,
    LAST_BATCH,
    NEVER,
    NOT_STARTED,
    Instead,
    Look,
    StopAt,
    base_of,
    end_of_evaluation,
    passed,
    plan_stop,
    step_of,
    tick_of,
)
from slurmft.supervisor.stops import agree

# The arithmetic


def looks(*ticks: int) -> list[Look]:
    return [Look(attached=True, tick=tick, alive=True) for tick in ticks]


@of_each(
    place__tick=[
        ((0,), 0),
        ((1,), 1 << 26),
        ((3, 0, 5), (3 << 26) + 5),
        ((3, 2, 5), (3 << 26) + (2 << 18) + 5),
        ((3, 0, 1 << 30), (3 << 26) + LAST_BATCH - 1),
        ((3, 1 << 30, 1 << 30), (4 << 26) - 2),
        ((10**8,), 10**8 << 26),
    ]
)
def test_a_tick_is_a_step_and_a_place_in_it(place, tick):
    assert tick_of(*place) == tick
    assert step_of(tick) == place[0]


@given(st.integers(0, 10**15 - 1))
def test_an_attempt_may_begin_at_any_step_and_has_a_year_before_it(start):
    base = base_of(start)
    assert 0 <= base <= start and (start < 1 << 34) == (base == 0)
    assert NOT_STARTED < tick_of(start - base) < end_of_evaluation(start - base + (1 << 34) - 1, 1 << 30) < END


PLACES = st.tuples(st.integers(0, (1 << 35) - 1), st.integers(0, 250), st.integers(0, LAST_BATCH - 1))


@given(PLACES, PLACES)
def test_ticks_are_in_the_order_of_training(one, other):
    first, second = sorted([one, other])
    assert tick_of(*first) <= tick_of(*second)
    assert NOT_STARTED < tick_of(*first) < end_of_evaluation(*first[:2]) < tick_of(first[0], first[1] + 1)
    assert end_of_evaluation(*second[:2]) < END < NEVER
    assert step_of(end_of_evaluation(*first[:2])) == first[0]


def test_not_started_belongs_to_no_step():
    assert step_of(NOT_STARTED) < 0


@pytest.mark.parametrize(
    ("ranks", "tries", "plan"),
    [
        pytest.param([], 0, Instead.NOTHING_TO_SAVE, id="no worker was ever started"),
        pytest.param([Look(attached=False, tick=-1, alive=False)] * 2, 0, Instead.NOTHING_TO_SAVE, id="none lives"),
        pytest.param([Look(attached=False, tick=-1, alive=True)], 0, Instead.BY_THEMSELVES, id="none uses a session"),
        pytest.param(
            [Look(attached=False, tick=-1, alive=False), Look(attached=False, tick=-1, alive=True)], 0,
            Instead.BY_THEMSELVES, id="one of two plain workers still lives",
        ),
        pytest.param(
            [Look(attached=True, tick=-1, alive=True), Look(attached=False, tick=-1, alive=True)], 0,
            Instead.NOTHING_TO_SAVE, id="one has attached, none has begun",
        ),
        pytest.param(looks(tick_of(3), NOT_STARTED), 0, Instead.NOTHING_TO_SAVE, id="one has not begun"),
        pytest.param(looks(END, tick_of(3)), 0, Instead.FINISHING, id="one has left its loop"),
        pytest.param(looks(END, NOT_STARTED), 0, Instead.FINISHING, id="one has left, one has not begun"),
        pytest.param(looks(tick_of(3), tick_of(4)), 0, StopAt(tick_of(5)), id="the boundary after the furthest"),
        pytest.param(looks(tick_of(0), tick_of(0)), 0, StopAt(tick_of(1)), id="at the very first boundary"),
        pytest.param(looks(tick_of(4)), 1, StopAt(tick_of(6)), id="second try two steps ahead"),
        pytest.param(looks(tick_of(4, 0, 7)), 3, StopAt(tick_of(12)), id="fourth try eight steps ahead"),
        pytest.param(
            looks(tick_of(4, 1, 7), tick_of(4, 1, 2)), 0, StopAt(tick_of(4, 1, 8)), id="all in one evaluation"
        ),
        pytest.param(looks(tick_of(4, 1, 7), tick_of(4)), 0, StopAt(tick_of(5)), id="one does not evaluate"),
        pytest.param(looks(tick_of(4, 1, 7), tick_of(4, 0, 7)), 0, StopAt(tick_of(5)), id="in two evaluations"),
        pytest.param(looks(tick_of(4, 0, 7), end_of_evaluation(4, 0)), 0, StopAt(tick_of(5)), id="one is through"),
    ],
)  # fmt: skip
def test_the_plan(ranks, tries, plan):
    assert plan_stop(ranks, tries) == plan


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8), st.integers(0, 28))
def test_a_proposal_lies_ahead_of_every_rank(ticks, tries):
    plan = plan_stop(looks(*ticks), tries)
    assert isinstance(plan, StopAt)
    assert plan.tick > max(ticks)
    assert not passed(looks(*ticks), plan.tick)


P = tick_of(5)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        pytest.param(Look(attached=True, tick=P - 1, alive=True), False, id="before it"),
        pytest.param(Look(attached=True, tick=P, alive=True), True, id="at it, perhaps compared before it was written"),
        pytest.param(Look(attached=True, tick=P, alive=True, holding=P), False, id="waits at it"),
        pytest.param(Look(attached=True, tick=P, alive=True, holding=P - 9), True, id="waits at an older one"),
        pytest.param(Look(attached=True, tick=P + 1, alive=True, holding=P), False, id="waits behind it in its step"),
        pytest.param(Look(attached=True, tick=tick_of(6), alive=True, holding=P), True, id="waits at a later step"),
        pytest.param(Look(attached=True, tick=P + 1, alive=True), True, id="behind it"),
        pytest.param(Look(attached=True, tick=END, alive=True), True, id="has left its loop"),
    ],
)
def test_who_has_passed_a_proposal(look, expected):
    assert passed([Look(attached=True, tick=tick_of(1), alive=True), look], P) is expected


# The protocol

Step = Generator[None, None, None]


class MemoryPage:
    """A heartbeat page without shared memory."""

    def __init__(self) -> None:
        self.slots = dict.fromkeys(Slot, 0)
        self.slots[Slot.TICK] = NOT_STARTED
        for slot in (Slot.COMMITTED, Slot.ANSWERED, Slot.HOLDING):
            self.slots[slot] = NOTHING
        self.slots[Slot.PROPOSED] = NEVER

    def __getitem__(self, slot: Slot) -> int:
        return self.slots[slot]

    def __setitem__(self, slot: Slot, value: int) -> None:
        self.slots[slot] = value


@dataclass
class ModelWorker:
    """``AgreementByAgent.at`` cut at every access, inside the loop of ``Session.steps`` and ``evaluating``."""

    page: Any
    acted_on: int = -1

    def at(self, tick: int) -> Generator[None, None, StopAction]:
        page = self.page
        page[Slot.TICK] = tick
        yield
        if tick < page[Slot.PROPOSED]:
            return StopAction.NONE
        while True:
            yield
            proposed = page[Slot.PROPOSED]
            if tick < proposed or proposed == self.acted_on:
                yield
                page[Slot.HOLDING] = -1
                return StopAction.NONE
            yield
            page[Slot.HOLDING] = proposed
            yield
            if page[Slot.COMMITTED] == proposed:
                self.acted_on = proposed
                yield
                return StopAction(page[Slot.ACTION])


@dataclass
class Rank:
    """What one rank trains, and what became of it."""

    evaluations: list[tuple[int, ...]]
    """Batches of each evaluation at the beginning of each step; a negative number: left early, after so many."""

    worker: ModelWorker = field(default_factory=lambda: ModelWorker(MemoryPage()))
    in_collective: int = -1
    stopped_at: int | None = None
    stopped_tick: int | None = None
    finished: bool = False

    def train(self, world: World) -> Step:
        self.worker.page[Slot.PID] = 1
        yield
        for step, evaluations in enumerate(self.evaluations):
            for tick in self.ticks(step, evaluations):
                if tick < 0:  # left early: published, not compared
                    self.worker.page[Slot.TICK] = -tick
                elif (yield from self.worker.at(tick)) is StopAction.SAVE_AND_STOP:
                    self.stopped_at, self.stopped_tick = step, tick
                    return
                yield
            self.in_collective = step
            yield
        self.in_collective = len(self.evaluations)
        self.worker.page[Slot.TICK] = END
        self.finished = True

    @staticmethod
    def ticks(step: int, evaluations: Sequence[int]) -> Iterator[int]:
        yield tick_of(step)
        for number, batches in enumerate(evaluations):
            yield from (tick_of(step, number, batch) for batch in range(1, abs(batches) + 1))
            yield end_of_evaluation(step, number) * (1 if batches >= 0 else -1)

    def may_run(self, world: World) -> bool:
        """Coupled ranks leave a step's collective when all have entered it; a rank that has stopped never will."""
        if self.stopped_at is not None or self.finished:
            return False
        return not world.coupled or all(other.in_collective >= self.in_collective for other in world.ranks)


@dataclass
class Call:
    """One message to all agents, as the supervisor awaits it."""

    asked: messages.Call[Any]

    def __await__(self) -> Generator[Call, list[Any], list[Any]]:
        return (yield self)


class ModelPool:
    def call_all(self, call: messages.Call[Any]) -> Call:
        return Call(call)


def agent_handles(call: Call, ranks: list[Rank], reply: dict[str, Any]) -> Step:
    """``launch.agent.Agent._handle``, cut at every access to a page."""

    def write(slot: Slot, value: int) -> Step:
        for rank in ranks:
            yield
            rank.worker.page[slot] = value

    if isinstance(call.asked, messages.Propose):
        yield from write(Slot.ACTION, call.asked.action)
        yield from write(Slot.COMMITTED, NOTHING)
        yield from write(Slot.PROPOSED, call.asked.tick)
    elif isinstance(call.asked, messages.Commit):
        yield from write(Slot.COMMITTED, call.asked.tick)
    elif isinstance(call.asked, messages.Withdraw):
        yield from write(Slot.PROPOSED, NEVER)
    found = []
    for rank in ranks:
        page, look = rank.worker.page, []
        for slot in (Slot.PID, Slot.TICK, Slot.HOLDING):
            yield
            look.append(page[slot])
        found.append(Look(attached=look[0] != 0, tick=look[1], alive=True, holding=look[2]))
    reply["looks"] = tuple(found)


@dataclass
class World:
    """Ranks, their agents, and a supervisor that wants a stop; ``run`` interleaves them by a schedule."""

    ranks: list[Rank]
    per_node: int
    coupled: bool
    plan: Any = None
    decided: bool = False

    def run(self, schedule: Iterator[int], patience: int = 40_000) -> None:
        trainers = [rank.train(self) for rank in self.ranks]
        supervisor = agree(ModelPool(), StopAction.SAVE_AND_STOP)  # type: ignore[arg-type]
        nodes = [self.ranks[i : i + self.per_node] for i in range(0, len(self.ranks), self.per_node)]
        handlers: dict[int, Step] = {}
        replies: list[dict[str, Any]] = []
        awaited: Call | None = None
        for _, choice in zip(range(patience), schedule, strict=False):
            actors: list[Callable[[], None]] = []
            for rank, trainer in zip(self.ranks, trainers, strict=True):
                if rank.may_run(self):
                    actors.append(lambda trainer=trainer: next(trainer, None))
            actors += [lambda node=node: self._step(handlers, node) for node in handlers]
            if not handlers and not self.decided:

                def advance() -> None:
                    nonlocal awaited
                    try:
                        awaited = supervisor.send([Looks(**reply) for reply in replies] if awaited else None)
                    except StopIteration as end:
                        self.plan, self.decided = end.value, True
                        return
                    replies[:] = [{} for _ in nodes]
                    handlers.update({i: agent_handles(awaited, node, replies[i]) for i, node in enumerate(nodes)})

                actors.append(advance)
            if not actors:
                break
            actors[choice % len(actors)]()
        supervisor.close()

    @staticmethod
    def _step(handlers: dict[int, Step], node: int) -> None:
        try:
            next(handlers[node])
        except StopIteration:
            del handlers[node]

    def check(self) -> None:
        """The promise of the agreement."""
        assert self.decided, "the supervisor is still trying"
        stops = {rank.stopped_at for rank in self.ranks}
        if isinstance(self.plan, StopAt):
            finished = [rank for rank in self.ranks if rank.finished]
            # nobody had passed the tick, and none exists behind it: they finish instead, all of them
            assert len(finished) in (0, len(self.ranks)), "some ranks finished, others stopped"
            assert len(stops) == 1, f"ranks stopped at different steps: {stops}"
            assert finished or None not in stops, "a rank is stuck"
            for rank in self.ranks:
                assert rank.finished or rank.stopped_tick >= self.plan.tick
        else:
            assert isinstance(self.plan, Instead)
            assert stops == {None}, "a rank stopped although no tick was committed"
            assert all(rank.finished for rank in self.ranks), "a rank was left waiting"


def explore(evaluations: list[list[tuple[int, ...]]], *, per_node: int, coupled: bool, schedule: bytes) -> None:
    world = World([Rank(list(steps)) for steps in evaluations], per_node=per_node, coupled=coupled)
    # the chosen schedule first; then everybody in turn, fairly, so that only a real deadlock is one
    world.run(itertools.chain(schedule, itertools.cycle(range(251))))
    world.check()


MODEL = settings(
    max_examples=examples(300), deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
SCHEDULES = st.binary(max_size=400)
RANKS = st.integers(1, 4)
NODE = st.integers(1, 2)


COUNTS = st.sampled_from([(), (), (), (1,), (4,), (2, 3), (0,)])
WITHOUT_EVALUATION = st.tuples(st.integers(1, 12), RANKS).map(lambda size: [[()] * size[0]] * size[1])
EVEN = st.tuples(st.lists(COUNTS, min_size=1, max_size=12), RANKS).map(lambda both: [both[0]] * both[1])


def each_its_own(counts: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[list[list[tuple[int, ...]]]]:
    return st.integers(1, 8).flatmap(
        lambda steps: st.lists(st.lists(counts, min_size=steps, max_size=steps), min_size=1, max_size=4)
    )


UNEVEN = each_its_own(COUNTS)
LEFT_EARLY = each_its_own(st.sampled_from([(), (4,), (-1,), (-3,)]))


@MODEL
@pytest.mark.parametrize(
    ("evaluations", "coupled"),
    [
        pytest.param(EVEN, True, id="with a collective per step"),
        pytest.param(WITHOUT_EVALUATION, False, id="without one"),
        pytest.param(UNEVEN, True, id="with uneven evaluations"),
        pytest.param(UNEVEN, False, id="with neither in common"),
        pytest.param(LEFT_EARLY, True, id="that leave evaluations early"),
    ],
)
@given(data=st.data(), per_node=NODE, schedule=SCHEDULES)
def test_ranks_stop_together(evaluations, coupled, data, per_node, schedule):
    explore(data.draw(evaluations), per_node=per_node, coupled=coupled, schedule=schedule)


def test_a_rank_that_waits_some_steps_behind_the_proposal_has_passed_it():
    """Gradient accumulation: rank 0 ran three boundaries ahead before the proposal for step 5 reached its page."""
    ahead = Look(attached=True, tick=tick_of(8), alive=True, holding=P)
    waiting = Look(attached=True, tick=P, alive=True, holding=P)
    assert passed([ahead, waiting], P)


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param((), id="never"),
        pytest.param((1,), id="shorter"),
        pytest.param((-1,), id="left early"),
    ],
)
def test_a_rank_that_is_in_the_collective_is_not_left_behind_by_one_that_evaluates(batches):
    """Rank 1 is in the collective of step 2 already when the stop comes; it cannot be called back."""
    ranks = [Rank([(), (), (6,), ()]), Rank([(), (), batches, ()])]
    world = World(ranks, per_node=1, coupled=True)

    def schedule() -> Iterator[int]:
        # both ranks in turn, until rank 0 is inside the evaluation of step 2 and rank 1 in the collective
        while (first := ranks[0].worker.page[Slot.TICK] < tick_of(2, 0, 2)) or ranks[1].in_collective < 2:
            yield 0 if first else 1
        yield from itertools.repeat(-1, 200)  # now the supervisor, as fast as it can
        yield from itertools.cycle(range(251))

    world.run(schedule())
    world.check()


@of_each(begins=range(0, 60, 4))
def test_a_stop_in_the_first_step_says_that_there_is_nothing_to_save_or_stops_together(begins):
    world = World([Rank([(), ()]), Rank([(), ()])], per_node=1, coupled=True)
    world.run(itertools.chain(itertools.repeat(0, begins), itertools.cycle([2, 1, 0, 3])))
    world.check()


class ScriptedPage:
    """Reads come from a script; every access is logged."""

    class Over(Exception):
        pass

    def __init__(self, script: list[int]) -> None:
        self.script, self.log = iter(script), []

    def __getitem__(self, slot: Slot) -> int:
        value = next(self.script, None)
        if value is None:
            raise self.Over
        value = value % 3 if slot is Slot.ACTION else value
        self.log.append((slot.name, value))
        return value

    def __setitem__(self, slot: Slot, value: int) -> None:
        self.log.append((slot.name, "=", value))


@settings(MODEL, max_examples=examples(200))
@given(st.lists(st.sampled_from([3, 5, 6, 7, NEVER, NOTHING]), max_size=12), st.lists(st.integers(3, 7), max_size=3))
def test_the_models_worker_is_the_real_worker(script, ticks):
    from slurmft.worker import signals

    def outcome(act: Callable[[int], StopAction], page: ScriptedPage) -> list[Any]:
        results: list[Any] = []
        try:
            for tick in sorted(ticks):
                results.append(act(tick))
        except ScriptedPage.Over:
            results.append("out of script")
        return [results, page.log]

    def run_model(worker: ModelWorker, tick: int) -> StopAction:
        steps = worker.at(tick)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    real_page, model_page = ScriptedPage(script), ScriptedPage(script)
    real, model = signals.AgreementByAgent(real_page), ModelWorker(model_page)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "HOLD_PAUSE_S", 0.0)
        assert outcome(real.at, real_page) == outcome(lambda tick: run_model(model, tick), model_page)


class PoolThatSays:
    """Agents whose answers are written down; remembers what it was asked."""

    def __init__(self, *answers: list[tuple[int, int]]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, int | None]] = []

    async def call_all(self, call: messages.Call[Any]) -> list[Looks]:
        self.asked.append((call.kind, getattr(call, "tick", None)))
        ticks = self._answers.pop(0) if self._answers else []
        return [
            Looks(looks=tuple(Look(attached=True, tick=tick, alive=True, holding=holding) for tick, holding in ticks))
        ]


def test_a_rank_that_leaves_its_evaluation_before_the_proposed_batch_moves_the_stop_to_a_boundary():
    """The others wait at the batch; were it committed, they would save and wait for a rank that trains on."""
    batch, proposed, boundary = tick_of(4, 0, 7), tick_of(4, 0, 8), tick_of(7)
    pool = PoolThatSays(
        [(batch, NOTHING), (batch, NOTHING)],
        [(batch, NOTHING), (proposed, proposed)],
        [(batch, NOTHING), (proposed, proposed)],
        [(tick_of(5), NOTHING), (proposed, proposed)],
        [(tick_of(5), NOTHING), (proposed, boundary)],
    )
    plan = asyncio.run(agree(pool, StopAction.SAVE_AND_STOP))  # type: ignore[arg-type]
    assert plan == StopAt(boundary)
    assert pool.asked == [
        ("look", None), ("propose", proposed), ("look", None), ("look", None), ("propose", boundary),
        ("commit", boundary),
    ]  # fmt: skip


def test_a_batch_is_agreed_on_when_all_ranks_wait_at_it():
    batch, proposed = tick_of(4, 0, 7), tick_of(4, 0, 8)
    pool = PoolThatSays(
        [(batch, NOTHING), (batch, NOTHING)],
        [(batch, NOTHING), (proposed, proposed)],
        [(proposed, proposed), (proposed, proposed)],
    )
    plan = asyncio.run(agree(pool, StopAction.SAVE_AND_STOP))  # type: ignore[arg-type]
    assert plan == StopAt(proposed)
    assert pool.asked[-1] == ("commit", proposed)
