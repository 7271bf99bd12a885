"""The agents of one start of a job, and the folders of an attempt that they share. They and their warm zygotes outlive
attempts, so that a restart is a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError, SlurmError, SlurmftError, StorageError, StorageUnavailable
from slurmft.ipc.messages import Hello, LimitReport, Ping, RehearsalReport, Rehearse, Shutdown, SyncFolders, SyncReport
from slurmft.policy import decide
from slurmft.policy.stop import longest_silence_s, ping_interval_s
from slurmft.scheduler.parsing import ended_tasks, parse_srun_lines
from slurmft.storage.journal import EventName
from slurmft.storage.patience import write_state
from slurmft.storage.run_folder import Attempt, Owner
from slurmft.supervisor.agents import BROKEN_S, AgentLink, AgentLost, AgentPool, Orphan, Outlived
from slurmft.supervisor.cluster import Cluster, Start
from slurmft.system.background import Background, heard_awake, overslept_s
from slurmft.system.files import read_json, read_part
from slurmft.system.processes import allow_descriptors

# --- attempt folder ---
# The supervisor's reads and writes in the run folder while an attempt runs, none of which blocks the supervisor.

FIRST_FILE_S = 60.0
"""How long the first file of an attempt may take; nothing can start without it."""

PROGRESS_S = 1.0
"""How often progress is written."""

SRUN_ERRORS_BYTES = 1 << 20
MAX_WORDS = 6
_OWN = ("slurmft: ", "  hint: ")
_OF_NO_USE = ("srun: ", "slurmstepd", "slurmft ")
"""Beginnings of lines that say how a task ended, or are of an agent's log."""


class AttemptFolder:
    """One attempt's view of its run folder.

    Args:
        of: an earlier attempt of this start of the job, in whose folder agents find their supervisor.
    """

    def __init__(self, start: Start, *, of: Attempt | None = None) -> None:
        self._run, self._thread = start.run, start.thread
        self.attempt = of or start.cluster.attempt
        self.generation = start.generation
        """As which this process owns the run; a candidate has one of its own once it has become the owner."""

        self._is_superseded = False
        self.path = start.run.attempts / str(self.attempt)
        self._kill_seen = False
        self._told_at = 0.0

    async def tell_agents(self, where: Mapping[str, Any]) -> None:
        """Write where the supervisor listens.

        Raises:
            StorageError: it cannot be written.
        """
        path = self.path / "control.json"
        try:
            await asyncio.wait_for(self._thread.ask(lambda: write_state(path, where)), FIRST_FILE_S)
        except TimeoutError as error:
            raise StorageUnavailable(f"{path} could not be written within {FIRST_FILE_S:.0f} s") from error

    async def ended_agent(self) -> tuple[str, str] | None:
        """Node of an agent that has ended, or could not be started, and how, in srun's words; None when there is none.

        Where one could not be started, srun ends the others.
        """
        with contextlib.suppress(OSError, StorageError):
            text = await self._thread.ask(lambda: self._text("srun.err"))
            return next(iter((*parse_srun_lines(text).refused, *ended_tasks(text))), None)
        return None

    async def requests(self, *, ready: bool) -> dict[str, str]:
        """New requests and their authors: KILL, REQUEUE, and SAVE when the workers are ``ready`` for one."""
        if self._is_superseded:  # requests are for the new owner to handle
            return {}
        with contextlib.suppress(OSError, StorageError):  # a transient filesystem error; the next look finds the file
            found = await self._thread.ask(lambda: self._look(ready=ready))
            self._kill_seen = self._kill_seen or "KILL" in found
            return found
        return {}

    def is_due(self) -> bool:
        """Whether it is time again to tell of progress; asked about once in that time."""
        if time.monotonic() - self._told_at < PROGRESS_S:
            return False
        self._told_at = time.monotonic()
        return True

    async def tell(self, *exchanges: Callable[[], object]) -> Owner | None:
        """Write progress, and what else there is; returns the run's owner where that is a newer start."""
        with contextlib.suppress(OSError, StorageError):
            for exchange in exchanges:
                await self._thread.ask(exchange)
            owner = await self._thread.ask(self._run.owner)
            self._is_superseded = owner is not None and owner.generation > self.generation
            return owner if self._is_superseded else None
        return None

    def leave(self, *last: Callable[[], object]) -> None:
        """Write this, before anything that is journaled from now on."""

        def work() -> None:
            with contextlib.suppress(OSError, SlurmftError):
                for each in last:
                    each()

        self._thread.submit(work)

    def remove_secret(self) -> None:
        """Remove the secret, so that no further agent can connect."""

        def work() -> None:
            with contextlib.suppress(OSError):
                (self.path / "secret").unlink(missing_ok=True)

        self._thread.submit(work)

    def last_words(self) -> str:
        """Why agents could not start, in their own words or else in those of what starts them; empty when unknown."""
        lines = [*self._lines("agents.log"), *self._lines("srun.err")]
        own = [line for line in lines if line.startswith(_OWN)]
        others = [line for line in lines if not line.startswith((*_OWN, *_OF_NO_USE))]
        if words := dict.fromkeys(line.strip()[:300] for line in (*others[-1:], *own[-MAX_WORDS:])):
            return f"; {'; '.join(words)}"
        return f"; srun: {lines[-1][:300]}" if lines else ""

    def _lines(self, name: str) -> list[str]:
        try:
            return [line for line in self._text(name).splitlines() if line.strip()]
        except OSError:
            return []

    def _text(self, name: str) -> str:
        return read_part(self.path / name, -SRUN_ERRORS_BYTES, SRUN_ERRORS_BYTES).decode(errors="replace")

    def _look(self, *, ready: bool) -> dict[str, str]:
        found = {
            "KILL": None if self._kill_seen else self._run.see_request("KILL"),
            "REQUEUE": self._run.take_request("REQUEUE"),
            "SAVE": self._run.take_request("SAVE") if ready else None,
        }
        return {kind: who for kind, who in found.items() if who is not None}


# --- kept folders ---
# Kept folders (``sync:``), the supervisor's side: restored before workers start, uploaded when they have ended.

FOLDERS_LOOK_S = 0.2
MARGIN_S = 30.0
"""Beyond an agent's own limit: when this has passed, the agent does not answer as it should."""

IDENTITY_S = 60.0
EVENTS: Mapping[str, EventName] = {
    "restored": EventName.FOLDER_RESTORED,
    "kept": EventName.FOLDER_KEPT,
    "set aside": EventName.FOLDER_SET_ASIDE,
    "uploaded": EventName.FOLDER_UPLOADED,
    "failed": EventName.SYNC_FAILED,
    "works again": EventName.SYNC_WORKS_AGAIN,
}


class KeptFolders:
    """Has agents restore and upload their folders; nothing where none is configured."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool) -> None:
        self._folders = config.sync
        self._start, self._pool = start, pool
        self._run = ""
        self._generation = 0

    async def restore(self, start: Start, members: Sequence[AgentLink], over: asyncio.Event) -> None:
        """Return when every member has what its workers are to find, or the attempt is over.

        Raises:
            LaunchError: a folder cannot be restored.
            AgentLost: an agent is gone.
        """
        if not self._folders:
            return
        self._start, self._generation = start, start.generation
        self._run = self._run or await asyncio.to_thread(self._identity)
        end_s = time.monotonic() + max(each.restore_timeout_s for each in self._folders) + MARGIN_S
        orders = [self._order(link, place, lambda: end_s, over) for place, link in enumerate(members)]
        problems = await asyncio.gather(*orders)
        if not over.is_set() and (problem := next(filter(None, problems), "")):
            raise LaunchError(problem)

    async def upload(self, until_s: Callable[[], float]) -> None:
        """Have every member that can be reached upload what its workers have left; failures are in the journal.

        Args:
            until_s: the monotonic time at which there is none left, which may become known in between.
        """
        if not self._folders or not self._run:
            return
        end_s = time.monotonic() + max(each.upload_timeout_s for each in self._folders)

        def until() -> float:
            return min(end_s, until_s())

        members = list(self._pool.members)
        orders = [self._order(link, place, until) for place, link in enumerate(members)]
        for link, result in zip(members, await asyncio.gather(*orders, return_exceptions=True), strict=True):
            if isinstance(result, AgentLost):
                self._note_failure(link, f"the last upload was not made: {result}")
            elif isinstance(result, BaseException):
                raise result

    def note(self, link: AgentLink, report: SyncReport) -> None:
        """Write into the journal what a node reports."""
        if (event := EVENTS.get(report.what)) is None:
            return
        facts = {"version": report.version, "files": report.files, "bytes": report.bytes}
        facts = {name: value for name, value in facts.items() if value}
        took = {"seconds": round(report.took_s, 3)} if report.took_s else {}
        reason = {"reason": report.reason} if report.reason else {}
        self._start.journal.append(event, node=link.host, path=report.path, **facts, **took, **reason)

    def _note_failure(self, link: AgentLink, reason: str) -> None:
        paths = ", ".join(str(each.path) for each in self._folders)
        self.note(link, SyncReport(what="failed", path=paths, reason=reason))

    async def _order(
        self, link: AgentLink, place: int, until_s: Callable[[], float], over: asyncio.Event | None = None
    ) -> str:
        """A restore, which nobody needs once the attempt is over; else an upload. Returns why it was not done."""
        within_s = max(1.0, until_s() - time.monotonic()) if over is None else 0.0
        call = SyncFolders(upload=over is None, number=secrets.randbits(60), run=self._run, place=place,
                           generation=self._generation, within_s=within_s)  # fmt: skip
        while over is None or not over.is_set():
            reply = await link.call(call)
            if reply.done:
                return reply.problem
            if time.monotonic() > until_s():
                action = "upload" if over is None else "restore"
                problem = f"{action} of the kept folders on {link.host} was not done in time"
                self._note_failure(link, problem)
                return problem
            await asyncio.sleep(FOLDERS_LOOK_S)
        return ""

    def _identity(self) -> str:
        """The run's name where folders are stored: two runs with one address, or a later one of this name, never meet.

        Raises:
            StorageError: the run folder cannot be read or written.
        """
        path = self._start.run.path / "sync.json"

        def work() -> str:
            found = (read_json(path) or {}).get("run")
            if not isinstance(found, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", found):
                name = re.sub(r"[^A-Za-z0-9_-]", "_", self._start.run.path.name)[:60]
                found = f"{name}-{secrets.token_hex(8)}"
                write_state(path, {"run": found})
            return found

        return self._start.thread.call(work, timeout_s=IDENTITY_S)


# --- Which of a job's nodes are usable, over all attempts of its start; decided by ``policy.decide`` ---

REVIVAL_S = 20.0
"""How long the next attempt waits for an agent that is being started again, where it would be smaller without it."""


class Roster:
    """Reads the pool; holds no connection of its own."""

    def __init__(self, pool: AgentPool, size: decide.Size) -> None:
        self._pool, self.size = pool, size
        self.returning: set[int] = set()
        """Nodes whose agent is being started again."""

        self._names: dict[int, str] = {}
        self._last: tuple[str, ...] = ()

    def next(self, allowed: Collection[str], *, waited_s: float) -> decide.Members | decide.Wait | decide.TooFew:
        """The members of the next attempt; ``allowed`` are the hosts of the job that may take part, empty for all."""
        return decide.next_members(
            self._nodes(allowed), self._last, self.size, waited_s=waited_s, patience_s=REVIVAL_S
        )  # fmt: skip

    def take(self, members: decide.Members) -> list[AgentLink]:
        """Remember that they take part; returns their agents in the order of their ranks."""
        by_name = {self._name(link): link for link in self._pool.links.values()}
        self._last = members.nodes
        return [by_name[name] for name in members.nodes]

    def can_go_on(self, without: Collection[str] = ()) -> bool:
        """Whether another attempt is possible with the nodes that are left, ``without`` these hosts."""
        allowed = {link.host for link in self._pool.links.values()}.difference(without)
        return bool(allowed) and not isinstance(self.next(allowed, waited_s=0.0), decide.TooFew)

    def patience_s(self, link: AgentLink, timeout_s: float) -> float:
        """Seconds that this agent may be silent."""
        is_needed = link in self._pool.members and not self.can_go_on({link.host})
        return decide.lost_after_s(timeout_s, replaceable=not is_needed)

    def newcomers(self, allowed: Collection[str]) -> tuple[str, ...]:
        """Nodes that the next attempt would take in; empty when the run is as large as it should be."""
        ready = {self._name(link) for link in self._pool.links.values() if link.ready or link in self._pool.members}
        return decide.growth([node for node in self._nodes(allowed) if node.name in ready], self._last, self.size)

    def _nodes(self, allowed: Collection[str]) -> list[decide.Node]:
        return [self._node(link, allowed) for _, link in sorted(self._pool.links.items())]

    def _node(self, link: AgentLink, allowed: Collection[str]) -> decide.Node:
        agent = decide.Agent.LOST
        if link.channel is not None:
            agent = decide.Agent.LIVING
        elif link.node in self.returning or not link.dropped:  # it has disconnected, and may be back at once
            agent = decide.Agent.RETURNING
        return decide.Node(
            name=self._name(link),
            agent=agent,
            standing=decide.Standing.BARRED if link.is_barred(allowed) else decide.Standing.CLEAN,
            warm=link.ready or not self._last,  # at first all are cold, and the allocation's order counts
            joined=bool(link.lender),
            leaving=link.leaving,
        )

    def _name(self, link: AgentLink) -> str:
        # all nodes of a local run have one host; the name of the first is plain
        if link.node not in self._names:
            taken = link.host in self._names.values()
            self._names[link.node] = f"{link.host}:{link.node}" if taken else link.host
        return self._names[link.node]


# --- Agents that are gone: started again in steps of one node each, or given up for good ---
# What Slurm does (seen on 22.05, in a job and a step with --no-kill):
#
# - A one-node step on a living node starts within 0.05 s. On a dead node that Slurm has not noticed it fails after 6 s.
# - Once Slurm says that the node is down, it has left the allocation for good; every step on it is refused at once,
#   also when the node is up again. It can only be lent by another job.
# - A node that restarts before Slurm has noticed anything makes srun end the whole step, on all nodes, with "io
#   error and missing step". Not where the job has given the node back before.
#
# So a node that stays silent for as long as its agent would wait for us is given back; the agent of one that is cut off
# for a shorter time comes back by itself.

PAUSES_S = (0.0, 5.0, 10.0, 20.0)
"""Before each try."""

TRY_S = 15.0
MAX_AT_ONCE = 32
RESTARTS_LOOK_S = 0.1

log = logging.getLogger(__name__)


class Reviver:
    """One task for each lost agent of the job's own nodes. Nodes that others lend are their lenders' business."""

    def __init__(self, config: RunConfig, start: Start, pool: AgentPool, roster: Roster, folder: AttemptFolder) -> None:
        self._config, self._cluster, self._journal = config, start.cluster, start.journal
        self._pool, self._roster, self._folder = pool, roster, folder
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._expecting: asyncio.Task[None] | None = None
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self.processes: list[asyncio.subprocess.Process] = []

    def lost(self, link: AgentLink, *, hung_up: bool) -> None:
        """Deal with a lost agent; ``hung_up``: its connection was closed, so its node lives."""
        if link.lender or link.leaving or link.node in self._tasks:
            return
        if hung_up:
            self._roster.returning.add(link.node)
        self._tasks[link.node] = task = asyncio.create_task(self._revive(link) if hung_up else self._give_up(link))
        task.add_done_callback(lambda _: self._tasks.pop(link.node, None))

    def expect(self, cluster: Cluster, within_s: float, of: Sequence[Orphan]) -> None:
        """Start agents where none has reported within this time; those that lived before have ended by then.

        Sooner where all that has started those, ``of``, has ended.
        """
        self._expecting = asyncio.create_task(self._start_missing(cluster, within_s, of))

    @property
    def is_expecting(self) -> bool:
        """Whether agents are still to report, or to be started in their places."""
        return self._expecting is not None and not self._expecting.done()

    async def _start_missing(self, cluster: Cluster, within_s: float, of: Sequence[Orphan]) -> None:
        await asyncio.wait([asyncio.ensure_future(asyncio.gather(*(each.wait() for each in of)))], timeout=within_s)
        for node, host in enumerate(cluster.agent_hosts(self._config)):
            if node not in self._pool.links:
                hello = Hello(node=node, host=host, pid=0, birth=None, lender=None)
                self._pool.links[node] = link = AgentLink(None, hello)
                link.dropped = True
                self.lost(link, hung_up=True)

    async def close(self) -> None:
        """Try no more."""
        tasks = [*self._tasks.values(), *([self._expecting] if self._expecting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _revive(self, link: AgentLink) -> None:
        try:
            for pause_s in PAUSES_S:
                await self._until_back(link, pause_s)
                if self._is_back(link):
                    return
                async with self._room:
                    await self._try(link)
                self._roster.returning.discard(link.node)  # after the first try it is not waited for any more
        finally:
            self._roster.returning.discard(link.node)

    async def _give_up(self, link: AgentLink) -> None:
        await self._until_back(link, self._config.fault_tolerance.supervisor_lease_s)
        if self._is_back(link) or not self._config.survives_nodes:
            return
        why = await asyncio.to_thread(self._cluster.give_back, link.host)
        self._journal.append(
            EventName.NODE_KEPT if why else EventName.NODE_GIVEN_BACK,
            node=link.host,
            **({"reason": why} if why else {}),
        )

    async def _try(self, link: AgentLink) -> None:
        try:
            process = await self._cluster.start_agent(
                self._config, self._folder.path, self._folder.attempt, host=link.host, index=link.node
            )
        except (SlurmError, OSError) as error:
            log.warning("the agent on %s cannot be started again: %s", link.host, error)
            return
        self.processes.append(process)
        await self._until_back(link, TRY_S, process)
        if not self._is_back(link) and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _is_back(self, link: AgentLink) -> bool:
        return self._pool.links[link.node] is not link and self._pool.links[link.node].channel is not None

    async def _until_back(
        self, link: AgentLink, seconds: float, process: asyncio.subprocess.Process | None = None
    ) -> None:
        """Return when the agent has reported, the process that starts it has ended, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._is_back(link) and (process is None or process.returncode is None):
                    await asyncio.sleep(RESTARTS_LOOK_S)


# --- crew ---

CREW_LOOK_S = 0.05
OUTSLEPT_S = 10.0
"""How long after a stop of this process the ends of agents meanwhile may be noticed."""

LOOKS_PER_TIMEOUT = 12

SPARE_DESCRIPTORS = 200


class Watching(Protocol):
    """What an attempt adds to the watch over the agents that work for it."""

    def ping(self) -> Ping:
        """What they are told regularly."""

    def on_silence(self, link: AgentLink, silent_s: float, timeout_s: float) -> None:
        """One of them has not been heard for so long, which is more than ``timeout_s``; called again and again."""


class Crew:
    """Agents on all nodes of the allocation, spares included, from the first attempt of the job's start to the last.

    Args:
        start: the first attempt's; its folder is where agents find the supervisor, and where srun leaves its errors.
        outlived: agents that have outlived the supervisor before this one; they are not started but listened to.
    """

    def __init__(self, config: RunConfig, start: Start, outlived: Outlived | None = None) -> None:
        self._config, self._outlived = config, outlived
        self.secret = start.secret
        size = start.cluster.size(config)
        silence_s = max(config.fault_tolerance.agent_timeout_s, longest_silence_s(size))
        self.pool = AgentPool(start.secret, size, patience_s=2 * decide.lost_after_s(silence_s, replaceable=False))
        self.roster = Roster(self.pool, config.size)
        self.folder = AttemptFolder(start, of=outlived.attempt if outlived else None)
        self.reviver = Reviver(config, start, self.pool, self.roster, self.folder)
        self.processes: list[asyncio.subprocess.Process | Orphan] = []
        self.kept = KeptFolders(config, start, self.pool)
        self._journal = start.journal
        self._mustered, self._settled_s, self._outslept_s = False, 0.0, -math.inf
        self._attempt: Watching | None = None
        self._background = Background()

    @contextlib.contextmanager
    def working_for(self, attempt: Watching, start: Start) -> Iterator[None]:
        """Within the block the agents work for this attempt; before and after it they are only kept."""
        self._attempt, self._journal, self.pool.generation = attempt, start.journal, start.generation
        try:
            yield
        finally:
            self._attempt = self.pool.generation = None

    async def _watch(self) -> None:
        """Agents stop their workers when they hear nothing for the lease; so ping them, and expect their reports.

        From the first attempt to the last, and between them: a decision, Slurm or the run folder may keep a run
        waiting for longer than the lease.
        """
        section, pool, pinged_s = self._config.fault_tolerance, self.pool, 0.0
        while True:
            agents = len(pool.links)  # none of them is there yet at the first look
            timeout_s = max(section.agent_timeout_s, longest_silence_s(agents))
            if asleep_s := await overslept_s(timeout_s / LOOKS_PER_TIMEOUT):
                if asleep_s + ping_interval_s(agents, lease_s=section.supervisor_lease_s) > section.supervisor_lease_s:
                    self._outslept_s = time.monotonic()
                self._journal.append(EventName.WAS_SUSPENDED, seconds=round(asleep_s, 1))
                for link in pool.links.values():  # while the supervisor was stopped it could not receive reports
                    link.last_heard = heard_awake(link.last_heard, asleep_s)
            now_s = time.monotonic()
            if now_s - pinged_s > ping_interval_s(agents, lease_s=section.supervisor_lease_s):
                pinged_s = now_s
                pool.ping(Ping() if self._attempt is None else self._attempt.ping())
            for link in pool.silent_for(timeout_s, now_s):
                if self._attempt is not None:  # else the next one loses it
                    self._attempt.on_silence(link, now_s - link.last_heard, timeout_s)

    @property
    def reconnect_s(self) -> float:
        """The time to reconnect; those that have outlived a supervisor have its lease, since a restart costs more."""
        return max(BROKEN_S, self._settled_s - time.monotonic())

    async def reconnected(self, link: AgentLink) -> None:
        """Return when another connection has taken the place of this broken one, or its agent is given up."""
        await self.pool.are_back([link], self.reconnect_s)

    @property
    def has_outslept(self) -> bool:
        """This process has just been stopped for so long that agents have ended, as after their supervisor."""
        return time.monotonic() - self._outslept_s < OUTSLEPT_S

    @property
    def is_complete(self) -> bool:
        """Every agent has reported once."""
        return self.pool.complete.is_set()

    async def muster(self, cluster: Cluster) -> None:
        """Have the agents started, unless they are; they report to the pool when they are ready.

        Raises:
            StorageError: the run folder does not take the address that they look for.
            SlurmUnavailable: there is no srun.
        """
        if self._mustered:
            self._muster_again()
            return
        self._mustered = True
        self._background.start(self._watch())
        allow_descriptors(cluster.size(self._config) + SPARE_DESCRIPTORS)
        if self._outlived is not None and not any(each.returncode is None for each in self._outlived.processes):
            self._outlived.end()  # their lease was over before this supervisor came to listen to them
            self._outlived = None
        if self._outlived is not None and self._outlived.listener is not None:
            await self.pool.listen(None, self._outlived.listener)
            self.processes = [*self._outlived.processes]
            lease_s = self._config.fault_tolerance.supervisor_lease_s
            self._settled_s = time.monotonic() + lease_s
            self.reviver.expect(cluster, lease_s, self._outlived.processes)
            return
        port = await self.pool.listen(cluster.listen_host)
        await self.folder.tell_agents({"hosts": cluster.control_hosts(), "port": port})
        self.processes = [*await cluster.start_agents(self._config, self.folder.path)]

    @property
    def outlived_roles(self) -> tuple[Orphan, ...]:
        """Supervisors of roles that go on without the job's, which has ended before this one."""
        return () if self._outlived is None else self._outlived.processes

    @property
    def has_outlived(self) -> bool:
        """The agents are those of the supervisor before this one, and have not been heard yet."""
        return self._outlived is not None and not self._mustered

    def _muster_again(self) -> None:
        """Where every srun has ended, each agent has, too, or will: one by one they are started again."""
        if self.lives:
            return
        for link in self.pool.links.values():
            self.pool.drop(link)
            self.reviver.lost(link, hung_up=True)

    @property
    def lives(self) -> bool:
        """Whether a process lives that has started agents."""
        return any(process.returncode is None for process in (*self.processes, *self.reviver.processes))

    async def all_ended(self) -> list[int]:
        """The exit codes of the processes that started the agents, when all have ended, later ones too."""
        while True:
            processes = [*self.processes, *self.reviver.processes]
            codes = await asyncio.gather(*(process.wait() for process in processes))
            more = len(processes) < len(self.processes) + len(self.reviver.processes)
            if not more and not self.roster.returning and not self.reviver.is_expecting:
                return codes
            await asyncio.sleep(CREW_LOOK_S)

    async def enlist(self, start: Start, over: asyncio.Event) -> list[AgentLink]:
        """The agents of an attempt, in the order of their ranks; waits for agents that are being restarted.

        Their kept folders hold what the workers are to find.

        Args:
            start: the attempt's.
            over: once it is set no agent is needed, and the crew does not change any more.

        Raises:
            LaunchError: too few of them are there, or a kept folder cannot be restored.
        """
        allowed = start.cluster.nodes
        since_s = time.monotonic()
        # agents that died together with the one that ended the last attempt are detected before they are counted on
        await self.pool.tell_all(Ping(), timeout_s=self._config.fault_tolerance.agent_timeout_s)
        while isinstance(found := self.roster.next(allowed, waited_s=time.monotonic() - since_s), decide.Wait):
            if over.is_set():
                return self.pool.members
            await asyncio.sleep(CREW_LOOK_S)
        if isinstance(found, decide.TooFew):
            raise LaunchError(found.reason)
        self.pool.members = self.roster.take(found)
        for link in self.pool.links.values():
            if link.leaving and link not in self.pool.members:
                with contextlib.suppress(AgentLost):  # the node may be released as soon as nothing of the run is on it
                    await link.call(Shutdown())
        await self.kept.restore(start, self.pool.members, over)
        return self.pool.members

    async def rehearse(self) -> None:
        """Have the spares run the trainer for two steps, where that was asked for; each reports when it has."""
        if self._config.spares == "rehearse":
            spares = [one for one in self.pool.links.values() if one not in self.pool.members and not one.leaving]
            await asyncio.gather(*(link.call(Rehearse()) for link in spares), return_exceptions=True)

    def note(self, link: AgentLink, report: LimitReport | SyncReport | RehearsalReport) -> None:
        """Write into the journal what an agent has reported of its node."""
        if isinstance(report, SyncReport):
            self.kept.note(link, report)
        elif isinstance(report, RehearsalReport):
            self._journal.append(
                EventName.SPARE_REHEARSED, node=link.host, took_s=round(report.took_s, 3), reason=report.problem
            )
        else:
            self._journal.append(EventName.CONTAINER_LIMIT, node=link.host, reason=report.what)

    async def dismiss(self, *, node_lost: bool) -> None:
        """End the agents, and the processes that started them; nothing of the job is left on any node then.

        Nothing where none was mustered, or all have been dismissed.
        """
        if self.has_outlived and self._outlived is not None and self._outlived.listener is not None:
            outlived, self._outlived = self._outlived, None  # nothing was left to do for them
            await asyncio.to_thread(outlived.end)
        if not self._mustered:
            return
        self._mustered = False
        await self.reviver.close()
        await end_agents(self.pool, [*self.processes, *self.reviver.processes], node_lost=node_lost)
        await self._background.cancel_all()
        await self.pool.close()
        self.folder.remove_secret()


# --- Ending an attempt's agents: by a message first, then through their srun, then by force ---

WIND_DOWN_S = 10.0
LOST_S = 2.0


async def end_agents(
    pool: AgentPool, processes: Sequence[asyncio.subprocess.Process | Orphan], *, node_lost: bool
) -> None:
    """Return when the agents and the processes that started them have ended, or cannot be ended.

    A srun waits for the tasks of a lost node until Slurm has noticed, so with ``node_lost`` it is not waited for.
    """
    patience_s = LOST_S if node_lost else WIND_DOWN_S
    pool.is_over = True
    await pool.tell_all(Shutdown())
    if not pool.complete.is_set():
        for process in processes:  # agents that are still starting cannot get the message
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
    await pool.wait_until_gone(WIND_DOWN_S)  # even without their srun: no agent may be alive at the requeue
    waits = [asyncio.create_task(process.wait()) for process in processes]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=patience_s)
    if late:
        log.warning("%d agent processes did not end within %.0f s; killing them", len(late), patience_s)
    for process in processes:
        if process.returncode is None:
            process.terminate()  # srun kills its step at once when it gets TERM
    _, late = await asyncio.wait(waits, timeout=patience_s)
    if late:  # an agent that never connected takes a TERM for a user's signal
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.wait(waits, timeout=patience_s)
