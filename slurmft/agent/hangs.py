"""The agent's side of hang detection: how long its workers' sections have been open, from their pages.

watch = HangWatch(config, report)
watch.begin(workers, learned={})    # at every start of workers
await watch.run()                   # for as long as the agent lives
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slurmft.config.config import RunConfig
from slurmft.ipc.pages.heartbeat import Page, Slot
from slurmft.ipc.pages.section_durations import SectionDurations
from slurmft.ipc.pages.section_stack import OpenSection, open_sections
from slurmft.ipc.replies import SectionsReply, WorkerSections
from slurmft.ipc.reports import DurationsReport, HangReport
from slurmft.policy.timing.hangs import CHECKPOINTING, SETUP, Limits, WorkerLook, exceeded, next_due_s
from slurmft.system.opening import read_part
from slurmft.system.processes import is_stopped

MIN_PAUSE_S = 0.02
DUE_MARGIN_S = 0.005
LEARNING_PAUSE_S = 0.25
"""Resolution of learned durations, which is small beside the least learned limit."""

SUSPENDED_S = 1.0
"""Oversleeping by so much means that everything was suspended, the workers as well, not that the machine was busy."""

MAX_SUSPENSIONS = 100
WORKERS_PER_MESSAGE = 64
DURATIONS_EVERY_S = 5.0

NS = 1e-9

OWN_LOOP = "a loop of its own, or setup"
"""Stands for the setup, and for the time out of any section, of a worker that counts no steps: the end of the one and
the length of the other are unknown, so they have no limit but one that the user has set."""


Held = tuple[str, float]
"""Name of a section, and for how many seconds it has been open."""


class Watched(Protocol):
    """A worker as this module needs it."""

    rank: int
    page: Page
    pid: int
    forked_at: float | None

    @property
    def alive(self) -> bool:
        """It has not been seen to end."""
        return True


class HangWatch:
    """Looks at the pages in time, and reports each worker that exceeds a limit once."""

    def __init__(
        self,
        config: RunConfig,
        report: Callable[[HangReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        settings = config.fault_tolerance
        self._settings, self._report, self._clock = settings, report, clock
        self._workers: Sequence[Watched] = ()
        self._own, self._limits = settings.limits(), settings.limits()
        self._told: set[int] = set()
        self._began_s = self._looked_s = self._due_s = clock()
        self._suspensions: list[tuple[float, float]] = []
        self._calls_slurmft = self._counts_steps = False
        self._durations, self._told_durations_s = SectionDurations(), clock()
        self._news = asyncio.Event()
        self._command, self._folder = config.command, config.trainer_directory

    def begin(self, workers: Sequence[Watched], *, learned: Mapping[str, float]) -> None:
        """Look at these workers from now on."""
        self._workers, self._told = workers, set()
        self._began_s = self._looked_s = self._due_s = self._clock()
        self._suspensions = []
        self._durations = SectionDurations()
        self.learn(learned)

    def learn(self, learned: Mapping[str, float]) -> None:
        """Use these limits in place of the configured ones, where they are given."""
        self._limits = replace(self._own, sections={**self._own.sections, **learned})
        self._news.set()

    async def run(self) -> None:
        """Look, report, and wait until the next limit may be exceeded."""
        # in a thread that is not waited for: the script may lie on a filesystem that stalls
        threading.Thread(target=self._read_script, daemon=True, name="script").start()
        while True:
            now_s = self._clock()
            if now_s - self._due_s >= SUSPENDED_S:
                self.was_suspended(self._looked_s, now_s)  # its beginning is unknown
            pause_s = self.look()
            self._looked_s = self._clock()
            self._due_s = self._looked_s + pause_s
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    def look(self) -> float:
        """Report workers that have exceeded a limit; returns after how many seconds to look again."""
        looks = list(self.looks())
        limits = self._limits_now(looks)
        for look in looks:
            if look.rank not in self._told and (one := exceeded(look, limits)) is not None:
                # only now: it takes a system call, and stopped workers are rare
                one = exceeded(replace(look, stopped=self._is_stopped(look.rank)), limits) or one
                self._told.add(look.rank)
                held_s = round(one.held_s, 3)
                self._report(
                    HangReport(rank=one.rank, section=one.section, held_s=held_s, limit_s=one.limit_s, why=one.why)
                )
        left = [look for look in looks if look.rank not in self._told]
        due_s = min([next_due_s(look, limits) for look in left] + [limits.smallest_s()]) if left else math.inf
        pause_s = min(self._settings.workload_check_interval, max(MIN_PAUSE_S, due_s + DUE_MARGIN_S))
        return min(pause_s, LEARNING_PAUSE_S) if self._settings.calc_ft_timeouts and left else pause_s

    def was_suspended(self, from_s: float, until_s: float) -> None:
        """Nothing ran in this time, by the monotonic clock: no section counts it."""
        self._suspensions = [*self._suspensions[-MAX_SUSPENSIONS + 1 :], (from_s, until_s)]

    def looks(self) -> Iterator[WorkerLook]:
        """The sections of each living worker."""
        now_s = self._clock()
        self._counts_steps = self._counts_steps or any(each.alive and counts_steps(each.page) for each in self._workers)
        for worker in self._workers:
            if worker.alive:
                page = worker.page
                main, elsewhere = open_sections(page)
                look = self._look(worker, now_s, main, elsewhere)
                # first steps are not a sample of later ones
                usual = (SETUP, CHECKPOINTING) if look.warming_up else None
                sections = [each for each in (*main, *elsewhere) if usual is None or each.name in usual]
                self._durations.note(worker.rank, sections, now_s)
                yield look

    def facts(self, first: int) -> SectionsReply:
        """The sections of each living worker, for the supervisor; from the ``first`` on as many as a message takes."""
        looks = list(self.looks())
        page = looks[first : first + WORKERS_PER_MESSAGE]
        workers = tuple(facts_of(replace(look, stopped=self._is_stopped(look.rank))) for look in page)
        return SectionsReply(workers=workers, more=first + len(page) < len(looks))

    def durations(self) -> DurationsReport | None:
        """The longest that each section took, now and then; None when none has ended."""
        if not self._settings.calc_ft_timeouts or self._clock() - self._told_durations_s < DURATIONS_EVERY_S:
            return None
        self._told_durations_s = self._clock()
        if longest := self._durations.take():
            return DurationsReport(sections=tuple((name, round(each, 3)) for name, each in longest.items()))
        return None

    def _look(
        self, worker: Watched, now_s: float, main: Sequence[OpenSection], elsewhere: Sequence[OpenSection]
    ) -> WorkerLook:
        page = worker.page
        # before it is forked, its zygote may still be importing: that is the launch's time
        waiting_until_s = min(now_s, self._began_s + self._settings.launch_timeout_s)
        began_s = waiting_until_s if worker.forked_at is None else worker.forked_at
        signs = [page[Slot.CLOSED_AT_NS], page[Slot.BEAT_AT_NS], page[Slot.ATTACHED_AT_NS]]
        newest_ns = max([*signs, *(each.began_ns for each in main)])  # sections of another thread prove nothing
        beat_ns = page[Slot.BEAT_AT_NS]
        proposed = page[Slot.PROPOSED]
        done = max(page[Slot.STEP] - page[Slot.RESUMED] if page[Slot.RESUMED] >= 0 else 0, page[Slot.OWN_STEPS])
        quiet_s = self._since(newest_ns * NS if newest_ns > 0 else began_s, now_s)
        sections = [(each.name, self._since(each.began_ns * NS, now_s)) for each in main]
        attached_s = self._since(page[Slot.ATTACHED_AT_NS] * NS, now_s)
        return WorkerLook(
            rank=worker.rank,
            attached=page[Slot.PID] != 0,
            age_s=self._since(began_s, now_s),
            sections=tuple(sections if self._counts_steps else self._without_default_limits(sections, quiet_s)),
            elsewhere=tuple((each.name, self._since(each.began_ns * NS, now_s)) for each in elsewhere),
            quiet_s=quiet_s,
            heartbeat_s=self._since(beat_ns * NS, now_s) if beat_ns > 0 else None,
            step=max(page[Slot.STEP], page[Slot.OWN_STEPS]),
            own_work=page[Slot.OWN_WORK_DONE],
            holding=page[Slot.HOLDING] == proposed != page[Slot.COMMITTED],
            # where no step is ever counted, the first ones are over when a setup would be
            warming_up=done < self._settings.num_warmup_iterations
            and (counts_steps(page) or attached_s < (self._limits.sections.get(SETUP) or math.inf)),
        )

    def _without_default_limits(self, sections: Sequence[Held], quiet_s: float) -> Sequence[Held]:
        if not sections and not self._settings.out_of_section_is_given:
            return [(OWN_LOOP, quiet_s)]
        if self._settings.setup_is_given:
            return sections
        return [(OWN_LOOP if name == SETUP else name, held_s) for name, held_s in sections]

    def _since(self, began_s: float, now_s: float) -> float:
        """Seconds in which this machine was not suspended."""
        asleep_s = sum(max(0.0, woke_s - max(slept_s, began_s)) for slept_s, woke_s in self._suspensions)
        return max(0.0, now_s - began_s - asleep_s)

    def _limits_now(self, looks: Sequence[WorkerLook]) -> Limits:
        self._calls_slurmft = self._calls_slurmft or any(look.attached for look in looks)
        limits = self._limits
        if self._calls_slurmft or self._settings.start_up_is_given:
            return limits
        return replace(limits, start_up_s=0.0)  # a script that never calls slurmft is not hung for that

    def _read_script(self) -> None:
        self._calls_slurmft = self._calls_slurmft or mentions(b"start_session", self._command, self._folder)
        self._counts_steps = self._counts_steps or mentions(b".steps(", self._command, self._folder)

    def _is_stopped(self, rank: int) -> bool:
        mine = [worker for worker in self._workers if worker.rank == rank and worker.pid]
        return any(is_stopped(worker.pid) or is_stopped(worker.page[Slot.PID]) for worker in mine)


def facts_of(look: WorkerLook) -> WorkerSections:
    """``look`` as the control channel takes it."""
    return WorkerSections(
        rank=look.rank, attached=look.attached, age_s=round(look.age_s, 3), quiet_s=round(look.quiet_s, 3),
        sections=tuple((name, round(held_s, 3)) for name, held_s in look.sections),
        elsewhere=tuple((name, round(held_s, 3)) for name, held_s in look.elsewhere),
        step=look.step, own_work=look.own_work, stopped=look.stopped, holding=look.holding,
        warming_up=look.warming_up, heartbeat_s=None if look.heartbeat_s is None else round(look.heartbeat_s, 3),
    )  # fmt: skip


def counts_steps(page: Page) -> bool:
    """Whether the worker has entered ``session.steps``, or has ended a section ``step`` of its own."""
    return page[Slot.RESUMED] >= 0 or page[Slot.OWN_STEPS] > 0


def mentions(what: bytes, command: Sequence[str], folder: Path) -> bool:
    """Whether the script that is to be run has ``what`` in it; False where that cannot be seen."""
    for word in command[:3]:
        if word.endswith(".py"):
            try:
                return what in read_part(folder / word, 0, 1 << 20)
            except OSError:
                return False
    return False
