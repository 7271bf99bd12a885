"""The driver of one replica: starts its engine, asks it what the agent hands over, and writes the answers.

    python -m slurmft.inference.driver      (forked by the agent's zygote)

It speaks with its agent over a Unix socket in a private folder, one JSON object a line. Every answer is in the
segment before the agent hears of it, and on the disk before it is reported as ``answered``. When the engine ends, the
driver ends with its code; when the agent is gone, so is the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurmft.config.config import load
from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference.engines import Closed, Engine, engine_of
from slurmft.inference.ledger import segments_of
from slurmft.inference.replica import ReplicaSettings
from slurmft.inference.request_checkpoints import CheckpointFile, RequestCheckpointer, fingerprint, records_in
from slurmft.inference.requests import Requests, folder_of
from slurmft.inference.retrying import Again, Answer, OutOfMemory, RetryManager
from slurmft.inference.segments import SegmentWriter, segment_name
from slurmft.policy.inference.answers import is_good
from slurmft.policy.inference.engines import patience_for, smallest
from slurmft.policy.inference.slots import Slots
from slurmft.system.agents_child import run_below_agent

SETTINGS_VARIABLE = "SLURMFT_REPLICA"
MAX_LINE_BYTES = 4 << 20
COMMIT_AFTER = 512
"""Answers after which a commit does not wait for its interval."""

TOGETHER_S = 0.003
"""What begins and ends within this time is told together: each message costs as much as half a request."""

LAST_WRITE_S = 1.0
STORAGE_PAUSE_S = 1.0
TOKENS_LOOKS = 8
"""How often the engine's counter is read within the time that counts as a hang."""

LIVE = 2
"""Looks in a row at which a counter has grown although no request has ended: it does so while answers are made."""

EXIT_SICK = 70
"""EX_SOFTWARE of sysexits.h: the engine lives, and fails every request."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A request that the agent has handed over."""

    index: int
    request: dict[str, Any]
    patience: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do."""

    in_flight: int
    ended: int
    """Requests in this life, however they ended."""

    patience: float
    """As ``patience_for``, of the largest request in flight."""


async def watch_progress(
    engine: Engine, hang_timeout_s: float, load: Callable[[], Load], tell: Callable[..., None]
) -> None:
    """Tell the agent of tokens, as an engine may be long over an answer without sending a byte of it; and how long it
    may be silent, as long as its counter was not seen to grow but at the end of requests."""
    count, ended, grown, times = 0.0, 0, 0, 1.0
    while True:
        await asyncio.sleep(max(0.05, min(5.0, hang_timeout_s / TOKENS_LOOKS)))
        now = load()
        if now.in_flight:
            before, count = count, await engine.tokens()
            has_ended, ended = load().ended != ended, now.ended
            if count > before:
                tell(kind="progress")
                grown = grown if grown >= LIVE else 0 if has_ended else grown + 1
        if times != (times := 1.0 if grown >= LIVE else now.patience):
            tell(kind="patience", times=times)


async def works(engine: Engine, proof: Mapping[str, Any] | None) -> bool:
    """Whether an engine answers the smallest request of a kind that it has answered before.

    It decides wherever an engine is only suspected: it has made no progress for long, or fails what it is asked.
    """
    if proof is None:
        return False
    path = str(proof.get("url", engine.request_path))
    try:
        answer = (await engine.answer([{**proof, "body": smallest(path, proof["body"]) or proof["body"]}]))[0]
    except Again:
        return False
    return is_good(answer)


class Driver:
    """One replica, from its engine's start to its end."""

    def __init__(self, settings: ReplicaSettings, config: InferenceConfig, run_folder: Path) -> None:
        self._settings, self._config = settings, config
        self._folder = folder_of(run_folder)
        self._requests = Requests(self._folder)
        self._partials = RequestCheckpointer(expire_after_s=config.partial_expires_after_s)
        owner = {name: getattr(settings, name) for name in ("generation", "node", "replica", "life")}
        self._fingerprint = fingerprint(config.engine)
        self._partials_file = CheckpointFile(self._folder, owner, self._fingerprint, self._partials)
        self._engine: Engine = engine_of(config, settings.replica, settings.device, self._partials)
        self._slots = Slots.full(config.concurrency)
        self._retries = RetryManager(config.max_retries, config.base_delay_s, config.max_delay_s)
        self._waiting: deque[_Taken] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._asked = 0
        """Requests that the engine has."""

        self._in_hand: dict[int, tuple[_Taken, float, asyncio.Timeout]] = {}
        """What the engine works on: since when, and how to end that."""

        self._begun: list[int] = []
        """Those of them that the agent does not know of yet."""

        self._completed: dict[int, list[int]] = {}
        """Answers that are written, by their epochs, of which it does not know either."""

        self._more = asyncio.Event()
        self._segment: SegmentWriter | None = None
        self._epoch = -1
        self._uncommitted: list[int] = []
        self._commit_now = asyncio.Event()
        self._draining = False
        self._good = self._ended = 0
        """Answers of the engine in this life, and all requests that have ended."""

        self._proof: dict[str, Any] | None = None
        """A request that the engine has answered in this life."""

        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when all that was in flight at a stop is answered."""

        self._finishing: asyncio.Task[None] | None = None
        self._sick: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> int:
        """Work until the agent says so or the engine ends; returns the exit code.

        Raises:
            SlurmftError: the engine cannot be started.
        """
        reader, self._writer = await asyncio.open_unix_connection(self._settings.socket, limit=MAX_LINE_BYTES)
        self._send(kind="hello", replica=self._settings.replica, life=self._settings.life)
        hearing = asyncio.create_task(self._hear(reader))
        try:
            await self._engine.start()
            self._send(kind="ready", slots=self._slots.now)
            return await self._work(hearing)
        finally:
            await self._engine.close()

    async def _work(self, hearing: asyncio.Task[None]) -> int:
        ended = asyncio.create_task(self._engine.ended())
        regular = (
            self._dispatch_lists(), self._commit_regularly(), self._partials_file.save_regularly(),
            watch_progress(self._engine, self._config.hang_timeout_s, self._load, self._send),
        )  # fmt: skip
        tasks = [asyncio.create_task(work) for work in regular]
        waits: list[asyncio.Future[Any]] = [hearing, ended, self._sick, self._finished, *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._send()
        for task in self._running:
            task.cancel()  # each notes what it has so far
        if self._running:
            await asyncio.wait(set(self._running), timeout=LAST_WRITE_S)
        with contextlib.suppress(TimeoutError):  # a disk that hangs must not hold up the end of an engine
            await asyncio.wait_for(self._partials_file.save(), LAST_WRITE_S)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if ended.done():
            sys.stderr.write(f"slurmft: the engine has ended with {ended.result()}\n")
            return exit_code_of(ended.result())
        if self._sick.done():
            sys.stderr.write(f"slurmft: the engine fails every request: {self._sick.result()}\n")
            return EXIT_SICK
        await self._commit()
        return 0

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Return when the agent is gone, or gives back what is in flight."""
        while line := await reader.readline():
            message = json.loads(line)
            if message["kind"] == "do" and not self._draining:
                self._run(self._take(message["indexes"], message["epoch"], message.get("partials", ())))
            elif message["kind"] == "revoke":  # what the engine has is finished; the rest goes elsewhere
                self._send(kind="dropped", count=len(self._waiting))
                self._waiting.clear()
            elif message["kind"] == "prove":
                self._run(self._prove())
            elif message["kind"] == "give back":  # the time of a stop is up: others go on from what there is
                return
            elif message["kind"] == "drain":
                self._draining = True
                self._finishing = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        while self._waiting or self._running:
            await asyncio.wait(self._running or {asyncio.create_task(asyncio.sleep(0.01))})
        if not self._finished.done():
            self._finished.set_result(None)

    async def _take(self, indexes: Sequence[int], epoch: int, partials: Sequence[str]) -> None:
        """Read requests before their turn comes: an engine must not wait for the run folder."""

        def read() -> list[tuple[dict[str, Any], float]]:
            found = [{**self._requests.get(index), "key": str(index)} for index in indexes]
            return [(each, patience_for(json.dumps(each["body"]).encode())) for each in found]

        requests = await asyncio.to_thread(read)
        wanted = {str(index) for index in indexes}
        for name in partials:  # one after the other: text of a request begins in each of them
            records = records_in(self._folder, name, self._fingerprint)
            mine = await asyncio.to_thread(list, (each for each in records if each["request"] in wanted))
            self._partials.adopt(mine)
        self._partials_file.epoch = max(epoch, self._partials_file.epoch)
        taken = [_Taken(index, *each, epoch) for index, each in zip(indexes, requests, strict=True)]
        if self._waiting and indexes[-1] < self._waiting[0].index:  # left by a dead replica
            self._waiting.extendleft(reversed(taken))
        else:
            self._waiting.extend(taken)
        self._fill()

    def _fill(self) -> None:
        """Keep the engine as busy as it may be."""
        if self._engine.at_once > 1:
            self._more.set()
            return
        while self._waiting and self._asked < self._slots.now:
            taken = self._waiting.popleft()
            self._tell_soon()
            self._begun.append(taken.index)
            self._asked += 1
            self._run(self._answer_one(taken))

    async def _dispatch_lists(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                await self._answer_together()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._one_is_over)

    def _one_is_over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._sick.done():
            self._sick.set_exception(error)

    async def _answer_together(self) -> None:
        """One list for the callable; where that fails, each request of it alone."""
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._slots.now))]
        self._send(kind="begun", indexes=[each.index for each in taken])
        task = asyncio.ensure_future(self._answer_list(taken))
        self._running.add(task)
        try:
            await task
        finally:
            self._running.discard(task)

    async def _answer_list(self, taken: Sequence[_Taken]) -> None:
        if len(taken) > 1:
            try:
                answers = await self._engine.answer([each.request for each in taken])
            except OutOfMemory as error:
                self._shrink(str(error))
                self._waiting.extendleft(reversed(taken))
                return
            except Again as error:
                log.info("a list of %d requests failed, each is tried alone: %s", len(taken), error)
            else:
                self._proof = taken[-1].request
                pairs = zip(taken, answers, strict=True)
                await self._keep([(each.index, each.epoch, answer) for each, answer in pairs])
                return
        for each in taken:
            if (found := await self._answer_of(each)) is not None:
                await self._keep([(each.index, each.epoch, found[0])], by_engine=found[1])

    async def _answer_one(self, taken: _Taken) -> None:
        found = await self._answer_of(taken)
        self._asked -= 1
        self._fill()  # before the answer is written: meanwhile the engine has its next request
        if found is not None:
            await self._keep([(taken.index, taken.epoch, found[0])], by_engine=found[1])

    async def _answer_of(self, taken: _Taken) -> tuple[Answer, bool] | None:
        """The answer, and whether the engine gave it; None when the engine gives none at all."""
        good_before = self._good

        async def attempt() -> Answer:
            try:
                async with asyncio.timeout(None) as limit:
                    self._in_hand[taken.index] = taken, time.monotonic(), limit
                    return (await self._engine.answer([taken.request]))[0]
            except OutOfMemory as error:
                self._shrink(str(error))
                raise
            except TimeoutError as error:
                told = "the engine answers others, and not this one (inference.hang_timeout_s)"
                raise Again(told) from error
            finally:
                self._in_hand.pop(taken.index, None)

        try:
            answer = await self._retries.call(attempt)
        except Closed:  # others may still be finished; then the engine ends, or it counts as hung
            await asyncio.Event().wait()
            return None
        except Again as error:
            if self._good == good_before and not await works(self._engine, self._proof):
                if not self._sick.done():
                    self._sick.set_result(str(error))
                return None
            tries = self._config.max_retries + 1
            return {"error": {"code": "no_answer", "message": f"{tries} tries failed, the last: {error}"}}, False
        if is_good(answer):
            self._proof = taken.request
        return answer, True

    def _load(self) -> Load:
        return Load(
            len(self._running), self._ended, max((taken.patience for taken, *_ in self._in_hand.values()), default=1.0)
        )

    async def _prove(self) -> None:
        # a function in this process answers one list after the other, and could not show that it lives
        proof = self._proof or next((taken.request for taken, *_ in self._in_hand.values()), None)
        if self._engine.at_once == 1 and await works(self._engine, proof):
            self._send(kind="progress")
            now_s, loop = time.monotonic(), asyncio.get_running_loop()
            for taken, since_s, limit in self._in_hand.values():
                if now_s - since_s > self._config.hang_timeout_s * taken.patience:
                    limit.reschedule(loop.time())
        self._ended += 1

    def _shrink(self, why: str) -> None:
        smaller = self._slots.out_of_memory()
        if smaller.now < self._slots.now:
            self._send(kind="slots", now=smaller.now, why=why[:500])
        self._slots = smaller

    async def _keep(self, answers: Sequence[tuple[int, int, Answer]], *, by_engine: bool = True) -> None:
        """Write answers (number, epoch, answer), then say that they are there.

        A disk that is full holds everything up, and loses nothing.
        """
        for epoch in dict.fromkeys(epoch for _, epoch, _ in answers):
            records = [{"index": index, **answer} for index, at, answer in answers if at == epoch]
            indexes = [record["index"] for record in records]
            if epoch >= self._epoch:  # else its lease was revoked, and another agent has the request
                while not self._write(records, epoch):
                    await asyncio.sleep(STORAGE_PAUSE_S)
                self._uncommitted += indexes
            self._tell_soon()
            self._completed.setdefault(epoch, []).extend(indexes)
        self._good += len(answers) * by_engine
        self._ended += len(answers)
        raised = self._slots.ended_well(len(answers))
        if raised.now > self._slots.now:
            self._send(kind="slots", now=raised.now, why="")
        self._slots = raised
        if len(self._uncommitted) >= COMMIT_AFTER:
            self._commit_now.set()

    def _write(self, records: Sequence[Mapping[str, Any]], epoch: int) -> bool:
        try:
            self._segment_of(epoch).append(records)
        except (OSError, StorageError) as error:
            log.warning("%d answers cannot be written, trying again: %s", len(records), error)
            self._send(kind="held", why=str(error))
            return False
        return True

    def _segment_of(self, epoch: int) -> SegmentWriter:
        """Each lease epoch has a segment of its own: what belongs to a lost one never counts."""
        if self._segment is None or epoch != self._epoch:
            mine = self._settings
            header = {"generation": mine.generation, "node": mine.node, "replica": mine.replica, "life": mine.life,
                      "epoch": epoch}  # fmt: skip
            segment = SegmentWriter(segments_of(self._folder) / segment_name(**header), header)
            self._segment, self._epoch, self._uncommitted = segment, epoch, []
        return self._segment

    async def _commit_regularly(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._commit_now.wait(), self._config.commit_interval_s)
            self._commit_now.clear()
            await self._commit()

    async def _commit(self) -> None:
        segment, indexes, epoch = self._segment, self._uncommitted, self._epoch
        if segment is None or not indexes:
            return
        end, self._uncommitted = segment.end, []
        while True:
            try:
                await asyncio.to_thread(segment.sync)
                break
            except OSError as error:
                log.warning("answers cannot be made durable, trying again: %s", error)
                self._send(kind="held", why=str(error))
                await asyncio.sleep(STORAGE_PAUSE_S)
        self._send(kind="answered", segment=segment.path.name, end=end, indexes=indexes, epoch=epoch)

    def _tell_soon(self) -> None:
        if not self._begun and not self._completed:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._send)

    def _send(self, **message: Any) -> None:
        """Tell the agent, and before it which requests have begun and ended: each write wakes it up."""
        messages: list[Mapping[str, Any]] = [{"kind": "begun", "indexes": self._begun}] if self._begun else []
        messages += [{"kind": "completed", "indexes": each, "epoch": epoch} for epoch, each in self._completed.items()]
        messages += [message] if message else []
        self._begun, self._completed = [], {}
        if messages and self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in messages))


def exit_code_of(code: int) -> int:
    """As a shell has it: 128 and the signal; an engine that ends without being asked to never ends well."""
    return 128 - code if code < 0 else code or 1


class OneReplica(Protocol):
    """A driver."""

    async def run(self) -> int:
        """Drive until the agent says so or the engine ends; returns the exit code."""


def drive(kind: Callable[[ReplicaSettings, InferenceConfig, Path], OneReplica]) -> int:
    """Run a driver of this kind as the environment describes it; returns the exit code."""

    async def run() -> int:
        settings = ReplicaSettings.from_text(os.environ.pop(SETTINGS_VARIABLE))
        config = load(Path(settings.config))
        assert config.inference is not None
        return await kind(settings, config.inference, config.run_folder).run()

    return run_below_agent(run)


if __name__ == "__main__":
    os._exit(drive(Driver))  # threads of an engine that does not answer must not hold the end up
