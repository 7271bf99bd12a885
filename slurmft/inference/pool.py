"""A node's replicas, owned by its agent: started, fed, watched, restarted, each without the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from slurmft.config.inference import InferenceConfig
from slurmft.errors import StorageError
from slurmft.inference.driver import MAX_LINE_BYTES, STORAGE_PAUSE_S
from slurmft.inference.ledger import segments_of
from slurmft.inference.requests import folder_of, left_in, load, runs_of, segment_name
from slurmft.ipc import messages
from slurmft.policy.inference import EXIT_CODE, EXIT_NODE, Restarts, how_it_ended
from slurmft.policy.verdict import EXIT_USAGE
from slurmft.system.background import Background, overslept_s

# --- Whether a node's replicas still work, and whether one that does not is started again ---

SUSPECTED = 0.5
"""Of the time that counts as a hang."""


@dataclass(slots=True)
class Watched:
    """One life of a replica, judged by progress and not by a health page: engines answer 200 while they hang.

    Progress is a byte of an answer or a new token. That a request has begun, or that its client has given up, is none:
    while there are requests the time without progress adds up. Half of it makes a suspect, which is to answer the
    smallest request; where it does, it lives, and what takes so long is a request. All times are seconds of one
    monotonic clock.
    """

    since_s: float
    """When it was started or made progress; moved on by the time in which it had nothing to do."""

    is_over: bool = False
    """It has ended, or another node answers for it."""

    idle_s: float | None = None
    """Since when it has nothing to do."""

    is_ready: bool = False
    in_flight: int = 0
    patience: float = 1.0
    """By how much longer than ``hang_timeout_s`` the requests that it has may take."""

    asked_s: float | None = None
    """Since when it is to answer the smallest request there is."""

    worked: bool = False
    """It has made progress."""

    def ready(self, now_s: float) -> None:
        """It takes requests from now on."""
        self.is_ready, self.since_s, self.idle_s = True, now_s, now_s

    def holds(self, more: int, now_s: float) -> None:
        """It has so many more requests, or fewer."""
        if not self.is_over:
            self.in_flight = max(0, self.in_flight + more)
            self._settle(now_s)

    def progressed(self, now_s: float) -> None:
        """It made a token, sent a byte of an answer, or answered the smallest request."""
        if not self.is_over:
            self.since_s, self.asked_s, self.idle_s, self.worked = now_s, None, None, True
            self._settle(now_s)

    def asleep(self, seconds: float) -> None:
        """This process itself was stopped for so long, and could not see progress."""
        self.since_s += seconds
        self.idle_s = None if self.idle_s is None else self.idle_s + seconds
        self.asked_s = None if self.asked_s is None else self.asked_s + seconds

    def is_to_prove(self, now_s: float, hang_s: float) -> bool:
        """Whether it is to answer the smallest request, which it is asked now."""
        is_late = self._silent_s(now_s) > hang_s * self.patience * SUSPECTED
        if self.is_over or not self.is_ready or self.asked_s is not None or not is_late:
            return False
        self.asked_s = now_s
        return True

    def overdue(self, now_s: float, hang_s: float, startup_s: float) -> str:
        """Why it hangs, or does not become ready; empty where neither is so.

        Args:
            hang_s: without progress while requests are in flight.
            startup_s: from the start until it is ready.
        """
        silent_s, left_s = self._silent_s(now_s), hang_s * self.patience * (1 - SUSPECTED)
        if self.is_over:
            return ""
        if not self.is_ready and silent_s > startup_s:
            return f"not ready {silent_s:.1f} s after its start (inference.startup_timeout_s)"
        if self.asked_s is not None and now_s - self.asked_s > left_s:
            return (
                f"no byte of an answer and no token for {silent_s:.1f} s with {self.in_flight} in flight "
                f"(inference.hang_timeout_s{f' times {self.patience:.1f}' if self.patience > 1 else ''})"
            )
        return ""

    def _silent_s(self, now_s: float) -> float:
        """Seconds without progress while there was something to do."""
        return (now_s if self.idle_s is None else self.idle_s) - self.since_s

    def _settle(self, now_s: float) -> None:
        """Let the time run while it has something to do, and only then."""
        is_busy = self.in_flight > 0 or self.asked_s is not None
        if is_busy and self.idle_s is not None:
            self.since_s += now_s - self.idle_s
            self.idle_s = None
        elif not is_busy and self.idle_s is None:
            self.idle_s = now_s


# --- One engine of a node, as its pool sees it ---

RENEWED = "it gets another engine"


class Phase(StrEnum):
    """A replica's state."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """For its next start."""

    DOWN = "down"
    """It stays so until the next attempt."""

    OFF = "off"
    """It is not needed for the load."""

    MEMBER = "member"
    """Another node answers for the engine, of which this one has a part, or has none to be the head of."""


@dataclass(slots=True)
class PooledReplica:
    """One engine of this node."""

    number: int
    phase: Phase
    restarts: Restarts
    life: int = 0
    generation: int = 0
    """The run's at the start of this life; part of its segments' names."""

    slots: int = 0
    writer: asyncio.StreamWriter | None = None
    in_flight: dict[int, float] = field(default_factory=dict)
    """Requests that it has, and since when (monotonic)."""

    begun: set[int] = field(default_factory=set)
    """Of those, the ones that its engine has; the others wait in the driver."""

    void: int = 0
    """Requests that it still works on although their lease was revoked."""

    alone: bool = False
    """It works on a suspect, and gets nothing else until that is over."""

    is_giving_back: bool = False
    """It was told to end with what it has, as the time of a stop is up."""

    is_leaving: bool = False
    """It was told to end, as it is not needed for the load."""

    answered: int = 0
    """Requests completed in this life."""

    ends: dict[str, int] = field(default_factory=dict)
    """Its segments of this life, and up to where they were reported."""

    is_held: bool = False
    """The disk takes none of its answers."""

    port: int = 0
    """Where its gate listens; 0 for a replica of a batch. Before it is ready: where it waits for members."""

    part: messages.JoinGang | None = None
    """In an engine over several nodes, as it was told, and ..."""

    runs: messages.JoinGang | None = None
    """... that of its process; None where there is none."""

    ended_first: int = 0
    """Rank of the member whose end is that of the engine."""

    why: str = ""
    """What it is killed for."""

    is_hung: bool = False
    """That is a hang."""

    hung_before: bool = False
    """So was the end of the life before this one, in which it had answered nothing."""

    watched: Watched = field(default_factory=lambda: Watched(0.0, is_over=True))
    """This life, or the last one."""

    def begin(self, generation: int) -> None:
        """Another life of it, in which nothing of the last one counts."""
        self.life, self.generation = self.life + 1, generation
        self.phase, self.slots, self.answered, self.alone = Phase.STARTING, 0, 0, False
        self.in_flight, self.begun, self.void, self.ends, self.why, self.port = {}, set(), 0, {}, "", 0
        self.is_held = self.is_giving_back = self.is_hung = self.is_leaving = False
        self.ended_first = 0

    def room(self, ahead: int = 0) -> int:
        """Requests that it can take now, of which ``ahead`` wait for a slot."""
        if self.phase is not Phase.READY or self.alone:
            return 0
        return max(0, self.slots + ahead - len(self.in_flight) - self.void)


def slow_requests(replicas: Sequence[PooledReplica], before_s: float) -> list[int]:
    """Requests that only one of these has, since before this moment (monotonic), and not alone."""
    held = Counter(index for replica in replicas for index in replica.in_flight)
    return [
        index for replica in replicas if not replica.alone for index, since_s in replica.in_flight.items()
        if held[index] == 1 and since_s < before_s
    ]  # fmt: skip


async def in_its_words(code: int, last_words: Callable[[], str]) -> str:
    """How a process has ended, with the last line of its log where its exit code alone says little."""
    how = how_it_ended(code)
    words = await asyncio.to_thread(last_words) if how.startswith(EXIT_CODE) else ""
    return f"{how}; its last words: {words}" if words else how


# --- The pool: replicas are started, fed, watched and restarted ---

LOOK_S = 0.1
PREFETCH = 2
"""Requests that a node holds for each slot of its replicas, those in flight included."""

AHEAD = 0.5
"""Requests for each slot of a replica that wait in its driver, so that no engine waits for this process."""

LUMP = 8
"""What waits in a driver is filled up by no less than this part of its slots, in one message."""

DRAIN_MARGIN_S = 2.0
SIGNALLED_S = 10.0
"""After a signal to the node, an engine's end is put down to it: with whichever code engines end then."""

GIVE_BACK_S = 1.0
"""What drivers have for saving the text of what is still in flight, before they are killed."""

MAX_TOLD = 2000

log = logging.getLogger(__name__)


class ReplicaPool:
    """The pool of one agent.

    Args:
        start: starts the driver of a replica; its end is told by ``on_exit``.
        kill: kills a replica's driver with everything that it started.
        last_words: the last line of a replica's log.
        report: sends a report to the supervisor.
    """

    def __init__(
        self, config: InferenceConfig, *, run_folder: Path, folder: Path, node: int, host: str,
        start: Callable[[int, str, int], None], kill: Callable[[int], None], last_words: Callable[[int], str],
        report: Callable[[messages.Sent], None],
    ) -> None:  # fmt: skip
        self._config, self._batch_folder, self._node, self._host = config, folder_of(run_folder), node, host
        self.socket = folder / "replicas.sock"
        self._start, self._kill, self._report, self._last_words = start, kill, report, last_words
        first = Phase.OFF if config.serving is not None and config.serving.replicas.min is not None else Phase.WAITING
        first = Phase.MEMBER if config.engine.nodes > 1 else first
        window_s = None if config.serving is None else config.serving.restart_window_s
        self._restarts = Restarts(config.max_restarts, window_s=window_s)
        self.replicas = [PooledReplica(number, first, self._restarts) for number in range(config.replicas_per_node)]
        self._queue: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._partials: dict[int, tuple[str, ...]] = {}
        """Files with text that requests of this node have already."""

        self._wanted = 0
        self._epoch = self.generation = 0
        self._total = 0
        self._server: asyncio.Server | None = None
        self._background = Background()
        self.is_draining = False
        """It ends; another ``begin`` is the end of that."""

        self._signalled_s = -1e9
        self._drained_told = False

    async def begin(self, *, epoch: int, generation: int) -> None:
        """Take part from now on: what was leased before is void, replicas that are down start again."""
        self._epoch, self.generation = epoch, generation
        self._queue.clear()
        self._suspects.clear()
        self._partials.clear()
        for replica in self.replicas:
            replica.void, replica.alone = replica.void + len(replica.in_flight), False
            self._tell(replica, kind="revoke")
            replica.in_flight, replica.begun = {}, set()
        self._wanted, self.is_draining, self._drained_told = 0, False, False
        if (batch := await asyncio.to_thread(load, self._batch_folder)) is not None:
            self._total = batch.total
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, self.socket, limit=MAX_LINE_BYTES)
            self._background.start(self._watch())
        for replica in self.replicas:
            replica.restarts = self._restarts
            if replica.phase in (Phase.WAITING, Phase.DOWN):
                self._start_replica(replica)
            else:  # it lives on: the supervisor may be a new one
                self.tell_state(replica)
        self._ask_for_more()

    def lease(
        self, runs: Sequence[Sequence[int]], alone: Sequence[int], epoch: int, partials: Sequence[str] = ()
    ) -> None:
        """Requests to answer; those ``alone`` one at a time on a replica that does nothing else.

        Args:
            partials: files with text that some of the ``runs`` have already.
        """
        if epoch != self._epoch:
            return
        late: list[int] = []
        for first, last in runs:
            if partials:
                self._partials.update(dict.fromkeys(range(first, last), tuple(partials)))
            if self._queue and last <= self._queue[-1]:  # left by a dead replica: it was its turn long ago
                late.extend(range(first, last))
            else:
                self._queue.extend(range(first, last))
            self._wanted -= last - first
        self._suspects.extend(alone)
        self._wanted = max(0, self._wanted - len(alone))
        self._put_first(late)
        if self.is_draining:
            self._give_back()
        self._feed()

    def _put_first(self, indexes: list[int]) -> None:
        """They get the next slots that become free, before what waits in the drivers."""
        able = [each for each in self.replicas if each.phase is Phase.READY and not each.alone]
        if self.is_draining or self._suspects:
            able = []
        for place, replica in enumerate(sorted(able, key=lambda each: -each.room())):
            if share := indexes[place :: len(able)]:
                self._hand_over(replica, share, time.monotonic())
        self._queue.extendleft(reversed(indexes if not able else []))

    def on_exit(self, number: int, code: int) -> None:
        """A replica's driver has ended."""
        replica = self.replicas[number]
        replica.watched.is_over, replica.writer = True, None
        self._background.start(self._bury(replica, code))

    def note_signal(self) -> None:
        """This node got a signal that asks for a stop; engines may have got it too."""
        self._signalled_s = time.monotonic()

    async def drain(self, within_s: float) -> None:
        """Finish what is in flight within this time, give everything else back, and end the replicas."""
        self.is_draining = True
        self._give_back()
        for replica in self.replicas:
            if replica.phase is Phase.READY:
                self._tell(replica, kind="drain")
            elif replica.phase is Phase.STARTING:
                self._kill_for(replica, "the run stops")
        deadline_s = time.monotonic() + max(0.0, within_s - DRAIN_MARGIN_S)
        while any(each.phase in (Phase.STARTING, Phase.READY) for each in self.replicas):
            if time.monotonic() > deadline_s - GIVE_BACK_S:
                for replica in self.replicas:
                    if replica.phase is Phase.READY and not replica.is_giving_back:
                        replica.is_giving_back = True
                        self._tell(replica, kind="give back")
            if time.monotonic() > deadline_s:
                for replica in self.replicas:
                    if replica.phase in (Phase.STARTING, Phase.READY):
                        self._kill_for(replica, "the time of the stop is up")
            await asyncio.sleep(0.02)
        if not self._drained_told:
            self._drained_told = True
            self._report(messages.Drained(epoch=self._epoch))

    async def renew(self, number: int, within_s: float) -> None:
        """End this replica when it has finished what it has, or that time is up, and start it again at once."""
        replica, until_s = self.replicas[number], time.monotonic() + within_s
        life, is_ready, replica.why = replica.life, replica.phase is Phase.READY, RENEWED
        if replica.phase in (Phase.WAITING, Phase.DOWN, Phase.OFF):
            self._start_replica(replica)
        self._tell(replica, kind="drain")
        while is_ready and replica.phase is Phase.READY and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        if replica.life == life and replica.phase in (Phase.STARTING, Phase.READY):
            self._kill(number)

    def want(self, numbers: Sequence[int] | None, epoch: int) -> None:
        """Have these replicas on; others end when they have answered what they have."""
        if self.is_draining or numbers is None or epoch != self._epoch:
            return
        for replica in self.replicas:
            is_on, is_off = replica.number in numbers, replica.phase is Phase.OFF
            if is_on and is_off:
                self._start_replica(replica)
            elif not is_on and replica.phase is Phase.WAITING:
                self._turn_off(replica)
            elif not is_on and replica.phase in (Phase.STARTING, Phase.READY) and not replica.is_leaving:
                replica.is_leaving = True
                self._tell(replica, kind="drain")
                if replica.phase is Phase.STARTING:
                    self._kill(replica.number)

    def join_gang(self, part: messages.JoinGang) -> None:
        """Have this node's part in an engine over several nodes; another one that it has ends at once."""
        if self.is_draining or part.epoch != self._epoch:
            return
        replica = self.replicas[0]
        replica.part, is_head = part, replica.phase is not Phase.MEMBER and not replica.is_leaving
        if is_head and part.rank == 0:
            return
        if replica.runs is None:
            self._take_part(replica)
        elif is_head or (replica.runs.rank, replica.runs.head) != (part.rank, part.head):
            replica.is_leaving = True
            self._kill(replica.number)

    def _take_part(self, replica: PooledReplica) -> None:
        replica.is_leaving = False
        if replica.part is not None and (replica.part.rank == 0 or replica.part.head is not None):
            self._start_replica(replica)
        else:
            replica.phase = Phase.MEMBER
            self.tell_state(replica)

    def _turn_off(self, replica: PooledReplica) -> None:
        replica.phase = Phase.OFF
        self.tell_state(replica)

    async def close(self) -> None:
        """Stop watching; the drivers are killed by the agent."""
        await self._background.cancel_all()
        if self._server is not None:
            self._server.close()

    # One replica's life

    def _start_replica(self, replica: PooledReplica) -> None:
        replica.begin(self.generation)
        replica.runs, why = replica.part, ""
        is_member = replica.part is not None and bool(replica.part.rank)
        replica.watched = Watched(time.monotonic(), is_over=is_member)
        if is_member:
            replica.phase = Phase.MEMBER
        try:
            self._start(replica.number, str(self.socket), replica.life)
        except (OSError, ValueError) as error:
            replica.watched.is_over, replica.phase, why = True, Phase.DOWN, str(error)
        self.tell_state(replica, why)

    async def _bury(self, replica: PooledReplica, code: int) -> None:
        """What a dead replica has answered counts; what it was working on goes elsewhere, and makes suspects."""
        answered = await self._salvage_now(*self._newest_of(replica))
        lost = [index for index in replica.in_flight if index not in answered]
        begun = lost if replica.alone else [index for index in lost if index in replica.begun]
        was_ready, asked = replica.phase is Phase.READY, self.is_draining or replica.why == "the run stops"
        how = replica.why or await in_its_words(code, lambda: self._last_words(replica.number))
        runs, replica.runs = replica.runs, None
        if (
            replica.is_leaving and replica.part is not None and not asked
        ):  # its gang is gone, for no fault of its own or of a request
            self._return(lost)
            self._give_back()
            self._take_part(replica)
            return
        if runs is not None and runs.rank:  # its head begins another life, and says where
            return
        replica.phase, replica.in_flight, replica.alone = Phase.WAITING, {}, False
        if replica.is_leaving:
            self._turn_off(replica)  # the roster names it again where it is needed by now
            return
        if asked or replica.why == RENEWED or time.monotonic() - self._signalled_s < SIGNALLED_S:
            self._return(lost)
            if asked:
                replica.phase = Phase.DOWN
            else:
                self._later(replica, 0.0 if replica.why == RENEWED else 1.0)
            return
        if replica.ended_first and code != EXIT_NODE and self._config.engine.process is not None:
            self._return(lost)  # a trial would have said why it ends: the member's node, or its agent, is gone
            self._give_back()
            lost = begun = []
        self._queue.extendleft(reversed([index for index in lost if index not in begun]))
        # a request may only have been long: an engine has to answer for a hang where it has answered nothing, twice
        is_excused = replica.is_hung and (replica.watched.worked or not replica.hung_before)
        replica.hung_before = replica.is_hung and not replica.watched.worked
        replica.restarts = replica.restarts if is_excused else replica.restarts.failed(time.monotonic())
        delay_s = 0.0 if is_excused else replica.restarts.delay_s
        if code == EXIT_USAGE and not was_ready:  # it fails again wherever it is tried
            delay_s = None
        died = messages.ReplicaDied(
            epoch=self._epoch, replica=replica.number, name=f"{self._host}/{replica.number}#{replica.life}", code=code,
            how=how[:MAX_TOLD], in_flight=tuple(sorted(begun)), was_ready=was_ready, answered=replica.answered,
            failures=replica.restarts.failures, load=max(len(begun), replica.watched.in_flight),
            member=replica.ended_first,
        )  # fmt: skip
        self._report(died)
        if delay_s is None:
            replica.phase = Phase.DOWN
            self.tell_state(replica, how)
        else:
            self._later(replica, delay_s)
        if not any(each.phase is not Phase.DOWN for each in self.replicas):
            self._give_back()
        self._feed()

    def _later(self, replica: PooledReplica, delay_s: float) -> None:
        async def start() -> None:
            await asyncio.sleep(delay_s)
            if replica.phase is Phase.WAITING and not self.is_draining:
                self._start_replica(replica)

        self._background.start(start())

    def _newest_of(self, replica: PooledReplica) -> tuple[str, int]:
        """The segment that it has written last, and up to where that was reported."""
        name = segment_name(generation=replica.generation, node=self._node, replica=replica.number, life=replica.life,
                            epoch=self._epoch)  # fmt: skip
        return name, replica.ends.get(name, 0)

    async def _salvage(self, name: str, start: int) -> list[int]:
        """Report the whole answers that a replica has written and did not live to report."""
        path = segments_of(self._batch_folder) / name
        if (batch := await asyncio.to_thread(load, self._batch_folder)) is not None:  # it may have grown
            self._total = batch.total
        epoch, (indexes, end) = self._epoch, await asyncio.to_thread(left_in, path, start, self._total)
        if indexes and epoch == self._epoch:
            self._report_answers(name, end, indexes)
        return indexes

    async def _salvage_now(self, name: str, start: int) -> list[int]:
        try:
            return await self._salvage(name, start)
        except (OSError, StorageError):  # a full disk: what is written there is in flight no more
            self._background.start(self._salvage_later(name, start))
            return []

    async def _salvage_later(self, name: str, start: int) -> None:
        epoch = self._epoch
        while epoch == self._epoch:  # else they are open again
            await asyncio.sleep(STORAGE_PAUSE_S)
            with contextlib.suppress(OSError, StorageError):
                await self._salvage(name, start)
                return

    def _kill_for(self, replica: PooledReplica, why: str) -> None:
        if not replica.why:
            replica.why = why
            self._kill(replica.number)

    # Work for the replicas

    def _feed(self) -> None:
        """Hand out what there is: suspects to idle replicas that have proved to work, the rest to all that are free."""
        ready = [each for each in self.replicas if each.phase is Phase.READY]
        now_s = time.monotonic()
        for replica in ready:
            # one at a time, as long as the others have something else to do
            may = not self._queue or (replica.answered > 0 and not any(each.alone for each in ready))
            if self._suspects and not replica.in_flight and not replica.alone and may:
                self._partials.pop(self._suspects[0], None)  # what it has so far may be what kills
                self._hand_over(replica, [self._suspects.popleft()], now_s)
                replica.alone = True
        ready.sort(key=lambda each: -each.room())
        is_wanted = bool(self._suspects) and not any(each.alone for each in ready)
        emptied = [each.number for each in ready if each.answered > 0][:is_wanted]  # for a suspect
        fed = [each for each in ready if each.number not in emptied]
        for replica, share in [(each, share) for share in (0.0, AHEAD) for each in fed]:
            count = min(replica.room(int(share * replica.slots)), len(self._queue))
            if count > 0 and (not share or count >= replica.slots // LUMP or count == len(self._queue)):
                self._hand_over(replica, [self._queue.popleft() for _ in range(count)], now_s)
        if not self._queue:
            self._double_the_tail(ready, now_s)
        self._ask_for_more()

    def _double_the_tail(self, ready: Sequence[PooledReplica], now_s: float) -> None:
        """What a slow replica has had for long is also given to one with nothing to do; the first answer counts."""
        idle = [each for each in ready if not each.in_flight and not each.alone]
        for index in slow_requests(ready, now_s - self._config.doubles_after_s) if idle else ():
            self._hand_over(idle[-1], [index], now_s)
            if not idle[-1].room():
                idle.pop()
            if not idle:
                return

    def _hand_over(self, replica: PooledReplica, indexes: list[int], now_s: float) -> None:
        replica.in_flight.update(dict.fromkeys(indexes, now_s))
        replica.watched.holds(len(indexes), now_s)
        names = {name for index in indexes for name in self._partials.get(index, ())} if self._partials else ()
        self._tell(
            replica, kind="do", indexes=indexes, epoch=self._epoch, **({"partials": sorted(names)} if names else {})
        )

    def _ask_for_more(self) -> None:
        """Keep as much at hand as the replicas that are ready will soon need."""
        if self.is_draining or self._config.serving is not None:
            return
        slots = sum(each.slots for each in self.replicas if each.phase is Phase.READY)
        held = sum(len(each.in_flight) for each in self.replicas) + len(self._queue)
        ahead = PREFETCH if self._config.engine.process is None else 1  # what waits here could begin on another node
        short = ahead * slots - held - self._wanted
        if short > 0 and (short >= slots // 2 or not self._queue):
            self._wanted += short
            self._report(messages.RequestsWanted(epoch=self._epoch, count=short))

    def _give_back(self) -> None:
        indexes = [*self._queue, *self._suspects]
        self._queue.clear()
        self._suspects.clear()
        self._return(indexes)

    def _return(self, indexes: Sequence[int]) -> None:
        if indexes:
            self._report(messages.RequestsReturned(epoch=self._epoch, runs=runs_of(indexes)))

    # Talk with drivers and supervisor

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, OSError, asyncio.CancelledError):
            hello = json.loads(await reader.readline())
            replica = self.replicas[hello["replica"]]
            if hello["life"] != replica.life or replica.phase not in (Phase.STARTING, Phase.MEMBER):
                return
            replica.writer = writer
            while line := await reader.readline():
                self._handle(replica, json.loads(line))
        writer.close()

    def _handle(self, replica: PooledReplica, message: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        match message["kind"]:
            case "ready":
                replica.phase, replica.slots, replica.port = Phase.READY, message["slots"], message.get("port", 0)
                replica.watched.ready(now_s)
                self.tell_state(replica)
                if self.is_draining:
                    self._tell(replica, kind="drain")
                self._feed()
            case "begun":
                replica.begun.update(message["indexes"])
            case "completed":
                self._note_completed(replica, message["indexes"], message["epoch"], now_s)
            case "held":  # the engine is not to blame
                replica.watched.progressed(now_s)
                if not replica.is_held:
                    self.tell_state(replica, message["why"])
                replica.is_held = True
            case "answered":
                replica.is_held = False
                if message["epoch"] == self._epoch:
                    replica.ends[message["segment"]] = message["end"]
                    self._report_answers(message["segment"], message["end"], message["indexes"])
            case "dropped":
                replica.void = max(0, replica.void - message["count"])
                replica.watched.holds(-message["count"], now_s)
            case "slots":
                replica.slots = message["now"]
                if message["why"]:
                    self._report(messages.ReplicaSmaller(epoch=self._epoch, replica=replica.number, slots=replica.slots,
                                                         why=message["why"]))  # fmt: skip
                self._feed()
            case _:
                self._note_work(replica, message, now_s)

    def _note_work(self, replica: PooledReplica, message: Mapping[str, Any], now_s: float) -> None:
        match message["kind"]:
            case "gathers":  # members are to find it
                replica.port = message["port"]
                self.tell_state(replica)
            case "broken":
                member, replica.ended_first = f"member {message['rank']} on {message['host']}", message["rank"]
                replica.why = replica.why or f"{member}: {how_it_ended(message['code'])}"
            case "progress":  # a byte of an answer, a token, or the answer to the smallest request
                replica.watched.progressed(now_s)
            case "patience":
                replica.watched.patience = message["times"]
            case "load":  # of an endpoint, whose routers send requests to the driver themselves
                replica.watched.holds(message["more"], now_s)
                replica.answered += message["completed"]

    def _note_completed(self, replica: PooledReplica, indexes: Sequence[int], epoch: int, now_s: float) -> None:
        replica.begun.difference_update(indexes)
        for index in indexes:
            self._partials.pop(index, None)
            if epoch == self._epoch:
                replica.in_flight.pop(index, None)
            else:
                replica.void = max(0, replica.void - 1)
        replica.alone = replica.alone and bool(replica.in_flight)
        replica.answered += len(indexes)
        replica.restarts = replica.restarts.succeeded()
        replica.watched.progressed(now_s)
        replica.watched.holds(-len(indexes), now_s)
        self._feed()

    async def _watch(self) -> None:
        while True:
            asleep_s, now_s = await overslept_s(LOOK_S), time.monotonic()
            for replica in self.replicas:
                replica.watched.asleep(asleep_s)
                if why := replica.watched.overdue(now_s, self._config.hang_timeout_s, self._config.startup_timeout_s):
                    replica.is_hung = replica.phase is Phase.READY
                    self._kill_for(replica, why)
                elif replica.watched.is_to_prove(now_s, self._config.hang_timeout_s):
                    self._tell(replica, kind="prove")
            if not self._queue:
                self._feed()

    def _tell(self, replica: PooledReplica, **message: Any) -> None:
        if replica.writer is not None and not replica.writer.is_closing():
            replica.writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def tell_state(self, replica: PooledReplica, why: str = "") -> None:
        """Report how it is."""
        port = replica.port if replica.phase in (Phase.STARTING, Phase.READY) and replica.port else None
        self._report(messages.ReplicaPhase(epoch=self._epoch, replica=replica.number, phase=replica.phase.value,
                                           life=replica.life, why=why[:MAX_TOLD], port=port))  # fmt: skip

    def _report_answers(self, segment: str, end: int, indexes: Sequence[int]) -> None:
        self._report(messages.RequestsAnswered(epoch=self._epoch, segment=segment, end=end, runs=runs_of(indexes)))
