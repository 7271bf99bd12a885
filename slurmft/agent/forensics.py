"""Evidence that an agent collects from its workers before they are killed: asked of them, and seen from outside.

Each living worker is asked for its Python stacks (``ipc.stacks``), and looked at by way of /proc while it answers.
A worker that is stopped, or is not a Python process of ours, is only looked at. All of it takes some milliseconds, and
never exceeds its limits. Files go to the attempt's folder, without waiting for it:

    stacks-rank-N.txt      all Python threads, as often as they were asked for or the worker crashed
    evidence-NODE.json     for each rank: where it is, its page, the kernel's view of its threads
    flight-recorder-...    torch's own record of its collectives, where it keeps one that can be asked for (NCCL); read
                           here, so that the supervisor can find which ranks had not entered which collective
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import structs

from slurmft.agent import flight_recorder
from slurmft.agent.workers import Worker
from slurmft.ipc import flight_dump, stacks
from slurmft.ipc.channel import encoded
from slurmft.ipc.pages.heartbeat import Slot, State
from slurmft.ipc.pages.section_stack import open_sections
from slurmft.ipc.replies import RankEvidence
from slurmft.policy.verdicts.collectives import Progress
from slurmft.policy.verdicts.whereabouts import Where, whereabouts
from slurmft.storage.patience import FolderThread
from slurmft.system.files import write_json
from slurmft.system.kernel_view import View, view
from slurmft.system.opening import write_bytes

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
        length = stacks.size(self.worker.stacks) - self.asked_from
        if length != self.length:
            self.length, self.changed_at = length, now
            self.dump = stacks.read(self.worker.stacks, self.asked_from).decode(errors="replace")
        return length > 0 and (stacks.is_complete(self.dump) or now - self.changed_at > QUIET_S)


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
        recorders = [worker for worker in alive if flight_recorder.ask(worker.stacks.parent, worker.rank)]
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
        paths = {rank: flight_recorder.dump_of(folder, rank) for rank in ranks}
        reading = asyncio.wrap_future(
            self._thread.submit(lambda: flight_dump.read_new(paths, self._dumps_read, within_s))
        )
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(reading), within_s + LEAST_READ_S)
        return {}

    async def _dumps(self, ranks: Sequence[int], folder: Path, within_s: float) -> None:
        """Return when each of these ranks has a dump that grows no more, or the time is up."""

        def sizes() -> list[int]:
            return [stacks.size(flight_recorder.dump_of(folder, rank)) for rank in ranks]

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
    dump = stacks.read(worker.stacks, worker.stacks_kept)
    worker.stacks_kept += len(dump)
    return dump.decode(errors="replace")


def _look_at(worker: Worker) -> _Look:
    """Ask a living worker, unless it could not answer or the signal would end it, and look at it."""
    pid = worker.trainer_pid if worker.alive and worker.pid else worker.pid
    kernel = view(pid) if worker.alive and pid else None
    look = _Look(worker, pid, kernel)
    if kernel is not None and kernel.state not in "Tt" and kernel.catches(stacks.STACKS_SIGNAL):
        before = stacks.size(worker.stacks)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, stacks.STACKS_SIGNAL)
            look.asked_from = before
    return look


def _summary(look: _Look) -> RankEvidence:
    worker, page, now_ns = look.worker, look.worker.page, time.monotonic_ns()
    opened = [each for group in open_sections(page) for each in group]
    if look.kernel is None:
        calls = stacks.crashed_thread(stacks.read(worker.stacks).decode(errors="replace"))
    else:
        calls = stacks.main_thread(look.dump)
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
        python_top=tuple(stacks.innermost(calls)),
        exit_code=worker.exit_code,
        killed=worker.killed,
    )


def as_reply(summaries: Sequence[RankEvidence]) -> list[RankEvidence]:
    """The summaries as far as a message holds them: with fewer calls and groups, and then fewer ranks."""
    kept = list(summaries)
    for calls, groups in ((stacks.MAX_FRAMES, flight_dump.MAX_GROUPS), (2, 4), (1, 2), (0, 1), (0, 0)):
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
