"""The agent's side of hangs: how long its workers' sections have been open, by their pages, and evidence of where they
stand.

watch = HangWatch(config, report)
watch.begin(workers, learned={})    # at every start of workers
await watch.run()                   # for as long as the agent lives
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import structs

from slurmft.agent import workers as agent_workers
from slurmft.agent.workers import Worker
from slurmft.config.run import RunConfig
from slurmft.ipc import flight_dump, pages
from slurmft.ipc.channel import encoded
from slurmft.ipc.messages import DurationsReport, HangReport, RankEvidence, SectionsReply, WorkerSections
from slurmft.ipc.pages import OpenSection, Page, SectionDurations, Slot, State, open_sections
from slurmft.policy.hangs import CHECKPOINTING, SETUP, Limits, WorkerLook, exceeded, next_due_s
from slurmft.policy.judge import Progress, Where, whereabouts
from slurmft.storage.patience import FolderThread
from slurmft.system.files import read_part, write_bytes, write_json
from slurmft.system.processes import View, is_stopped, view

# --- forensics ---
# Evidence that an agent collects from its workers before they are killed: asked of them, and seen from outside.
#
# Each living worker is asked for its Python stacks (``ipc.pages``), and looked at by way of /proc while it answers. A
# worker that is stopped, or is not a Python process of ours, is only looked at. All of it takes some milliseconds, and
# never exceeds its limits. Files go to the attempt's folder, without waiting for it:
#
#     stacks-rank-N.txt      all Python threads, as often as they were asked for or the worker crashed
#     evidence-NODE.json     for each rank: where it is, its page, the kernel's view of its threads
#     flight-recorder-...    torch's own record of its collectives, where it keeps one that can be asked for
#                            (NCCL); read here, so that the supervisor can find which ranks had not entered
#                            which collective

LOOK_S = 0.001
"""Pause between two looks for answers."""

DUMP_LOOK_S = 0.1
"""Pause between two looks for dumps; torch looks at its pipes once a second."""

WAIT_SHARE = 0.7
"""Share of the time for dumps in which they must appear; the rest is for reading them: 0.1 s for each full one."""

LEAST_READ_S = 0.05

QUIET_S = 0.02
"""An answer without a recognisable end is over when nothing has come for so long."""

MAX_REPLY_BYTES = 200_000
"""What fits into a message, with room for its frame."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Look:
    """One worker while it is being looked at."""

    worker: Worker
    pid: int
    """Of the process that trains; 0 where there is none yet."""

    kernel: View | None
    asked_from: int | None = None
    """Size of its file of stacks when it was asked; None when it was not."""

    length: int = 0
    changed_at: float = 0.0
    dump: str = ""

    def has_answered(self, now: float) -> bool:
        """Take in what has come; whether that is all, or nothing can come."""
        if self.asked_from is None:
            return True
        length = pages.size(self.worker.stacks) - self.asked_from
        if length != self.length:
            self.length, self.changed_at = length, now
            self.dump = pages.read(self.worker.stacks, self.asked_from).decode(errors="replace")
        return length > 0 and (pages.is_complete(self.dump) or now - self.changed_at > QUIET_S)


class Forensics:
    """Takes the evidence of one node.

    Args:
        node: the node's name, for file names.
    """

    def __init__(self, node: str) -> None:
        self._node = re.sub(r"[^\w.-]", "_", node)[:100]
        self._thread = FolderThread()
        self._dumps_read: dict[int, tuple[int, int]] = {}

    async def take_evidence(
        self, workers: Sequence[Worker], folder: Path, within_s: float, dumps_within_s: float = 0.0
    ) -> list[RankEvidence]:
        """One summary for each worker, dead ones too; a worker that does not answer in time is only described from
        outside.

        Where flight recorders were asked, it waits up to ``dumps_within_s`` more for their files; nowhere else. Dumps
        that are there, of dead ranks too, are read within the same time. Never raises for odd files or failed writes.
        """
        started = time.monotonic()
        looks = [_look_at(worker) for worker in workers]
        alive = [each.worker for each in looks if each.kernel is not None]
        recorders = [worker for worker in alive if agent_workers.ask(worker.stacks.parent, worker.rank)]
        pending = looks
        while pending := [each for each in pending if not each.has_answered(time.monotonic())]:
            if time.monotonic() - started > within_s:
                break
            await asyncio.sleep(LOOK_S)
        summaries = [_summary(each) for each in looks]
        dumps = [(each.worker.rank, dump) for each in looks if (dump := _not_kept_yet(each.worker))]
        kernel = [each.kernel for each in looks]
        writing = asyncio.wrap_future(self._thread.submit(lambda: self._write(dumps, summaries, kernel, folder)))
        left_s = max(0.0, within_s - (time.monotonic() - started))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(writing), left_s)
        if recorders and dumps_within_s:
            await self._dumps([worker.rank for worker in recorders], folder, dumps_within_s * WAIT_SHARE)
        left_s = max(LEAST_READ_S, within_s + dumps_within_s - (time.monotonic() - started))
        progress = await self._progress([worker.rank for worker in workers], folder, left_s)
        return as_reply([structs.replace(each, collectives=tuple(progress.get(each.rank, ()))) for each in summaries])

    async def _progress(self, ranks: Sequence[int], folder: Path, within_s: float) -> dict[int, list[Progress]]:
        """How far ranks with a new dump have come in their collectives."""
        paths = {rank: agent_workers.dump_of(folder, rank) for rank in ranks}
        reading = asyncio.wrap_future(
            self._thread.submit(lambda: flight_dump.read_new(paths, self._dumps_read, within_s))
        )
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(reading), within_s + LEAST_READ_S)
        return {}

    async def _dumps(self, ranks: Sequence[int], folder: Path, within_s: float) -> None:
        """Return when each of these ranks has a dump that grows no more, or the time is up."""

        def sizes() -> list[int]:
            return [pages.size(agent_workers.dump_of(folder, rank)) for rank in ranks]

        deadline, before = time.monotonic() + within_s, [0] * len(ranks)
        while time.monotonic() < deadline:
            await asyncio.sleep(DUMP_LOOK_S)
            asking = asyncio.wrap_future(self._thread.submit(sizes))  # stop waiting for a folder that hangs
            try:
                now = await asyncio.wait_for(asking, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return
            if all(now) and now == before:
                return
            before = now

    def keep_last_words(self, worker: Worker, folder: Path) -> None:
        """Have the stacks that a worker wrote when it crashed copied; returns at once."""
        if dump := _not_kept_yet(worker):
            self._thread.submit(lambda: _append(folder, worker.rank, dump, f"exit code {worker.exit_code}"))

    def finish(self, timeout_s: float) -> None:
        """Return when everything is written, or does not get written."""
        with contextlib.suppress(TimeoutError):
            self._thread.submit(lambda: None).result(timeout_s)

    def _write(
        self, dumps: Sequence[tuple[int, str]], summaries: Sequence[RankEvidence], kernel: Sequence[View | None],
        folder: Path,
    ) -> None:  # fmt: skip
        for rank, dump in dumps:
            _append(folder, rank, dump, "asked for")
        views = [each.as_json() if each is not None else None for each in kernel]
        ranks = [{**_in_file(summary), "kernel": seen} for summary, seen in zip(summaries, views, strict=True)]
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            write_json(folder / f"evidence-{self._node}.json", {"at": at, "ranks": ranks}, durable=False)
        except OSError as error:
            log.warning("the evidence of %s could not be written: %s", self._node, error)


def _not_kept_yet(worker: Worker) -> str:
    """The stacks that a worker has written since the last time."""
    dump = pages.read(worker.stacks, worker.stacks_kept)
    worker.stacks_kept += len(dump)
    return dump.decode(errors="replace")


def _look_at(worker: Worker) -> _Look:
    """Ask a living worker, unless it could not answer or the signal would end it, and look at it."""
    pid = worker.trainer_pid if worker.alive and worker.pid else worker.pid
    kernel = view(pid) if worker.alive and pid else None
    look = _Look(worker, pid, kernel)
    if kernel is not None and kernel.state not in "Tt" and kernel.catches(pages.STACKS_SIGNAL):
        before = pages.size(worker.stacks)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, pages.STACKS_SIGNAL)
            look.asked_from = before
    return look


def _summary(look: _Look) -> RankEvidence:
    worker, page, now_ns = look.worker, look.worker.page, time.monotonic_ns()
    opened = [each for group in open_sections(page) for each in group]
    if look.kernel is None:
        calls = pages.crashed_thread(pages.read(worker.stacks).decode(errors="replace"))
    else:
        calls = pages.main_thread(look.dump)
    if worker.exit_code is not None or (look.kernel is None and worker.pid):
        where, doing = Where.DEAD, "is dead"
    elif look.kernel is None:
        where, doing = Where.NO_ANSWER, "has not been forked yet"
    else:
        named = [(call.file, call.line, call.function) for call in calls]
        main = look.kernel.threads[0].state if look.kernel.threads else look.kernel.state
        where, doing = whereabouts(named, main)
    return RankEvidence(
        rank=worker.rank,
        pid=look.pid,
        kind=where,
        doing=doing[:200],
        process=look.kernel.state if look.kernel is not None else "",
        wchan=look.kernel.wchan[:64] if look.kernel is not None else "",
        attached=page[Slot.PID] != 0,
        state=page[Slot.STATE] if page[Slot.STATE] in tuple(State) else State.ABSENT.value,
        step=page[Slot.STEP],
        tick=page[Slot.TICK],
        sections=tuple(f"{each.name} ({(now_ns - each.began_ns) / 1e9:.1f} s)" for each in opened),
        python_top=tuple(pages.innermost(calls)),
        exit_code=worker.exit_code,
        killed=worker.killed,
    )


def as_reply(summaries: Sequence[RankEvidence]) -> list[RankEvidence]:
    """The summaries as far as a message holds them: with fewer calls and groups, and then fewer ranks."""
    kept = list(summaries)
    for calls, groups in ((pages.MAX_FRAMES, flight_dump.MAX_GROUPS), (2, 4), (1, 2), (0, 1), (0, 0)):
        kept = [
            structs.replace(each, python_top=each.python_top[:calls], collectives=each.collectives[:groups])
            for each in summaries
        ]
        if _size(kept) <= MAX_REPLY_BYTES:
            return kept
    while _size(kept) > MAX_REPLY_BYTES:
        kept = kept[: len(kept) // 2]
    return kept


def _size(ranks: Sequence[RankEvidence]) -> int:
    return len(encoded(ranks))


def _in_file(summary: RankEvidence) -> dict[str, Any]:
    return {name: value for name, value in summary.as_mapping().items() if name != "collectives"}


def _append(folder: Path, rank: int, dump: str, why: str) -> None:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    path = folder / f"stacks-rank-{rank}.txt"
    text = f"==== rank {rank}, {at}, {why}\n{dump.rstrip()}\n\n"
    try:
        write_bytes(path, text.encode("utf-8", "backslashreplace"), append=True, follow=False)
    except OSError as error:
        log.warning("the stacks of rank %d could not be written: %s", rank, error)


# --- The agent's side of hang detection: how long its workers' sections have been open, from their pages ---

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
        self._workers: Sequence[Worker] = ()
        self._own, self._limits = settings.limits(), settings.limits()
        self._told: set[int] = set()
        self._began_s = self._looked_s = self._due_s = clock()
        self._suspensions: list[tuple[float, float]] = []
        self._calls_slurmft = self._counts_steps = False
        self._durations, self._told_durations_s = SectionDurations(), clock()
        self._news = asyncio.Event()
        self._command, self._folder = config.command, config.trainer_directory

    def begin(self, workers: Sequence[Worker], *, learned: Mapping[str, float]) -> None:
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
        self, worker: Worker, now_s: float, main: Sequence[OpenSection], elsewhere: Sequence[OpenSection]
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
