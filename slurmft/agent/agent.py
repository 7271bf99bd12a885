"""The agent: one process per node. Owns the node's workers, answers the supervisor, and never runs a Slurm command.

Around it: where it finds its supervisor, faults on request, the keeper of copies, and the reports of digests and
timings.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from slurmft.agent.container import Outside, limits_here
from slurmft.agent.hangs import Forensics, HangWatch
from slurmft.agent.notices import NoticeWatch
from slurmft.agent.ray import leave_token
from slurmft.agent.torchrun import worker_command
from slurmft.agent.workers import (
    LENDER_VARIABLE,
    VISIBLE_VARIABLE,
    SpareRehearsal,
    Worker,
    Workers,
    common_environment,
    reserve_port,
    visible_without,
    wait_until_free,
    worker_environment,
)
from slurmft.config.run import RunConfig
from slurmft.errors import LaunchError, SlurmftError, StorageError
from slurmft.ipc import messages
from slurmft.ipc.channel import UNANSWERED, BadMessage, Channel, Fields, connect_to_any, listening_socket
from slurmft.ipc.flight_dump import ask_ras, outliers
from slurmft.ipc.pages import FAULT_SUFFIX, NOTHING, RESCUE_S, RESCUE_SUFFIX, Slot
from slurmft.ipc.zygote_start import Zygote, useful
from slurmft.policy.stop import NEVER, report_interval_s
from slurmft.policy.values import BY_SIGNAL, NOT_YET, Fault, order_of
from slurmft.policy.verdict import EXIT_TEMPORARY
from slurmft.storage.checkpoint_names import GENERATION_FILE, KEY_FILE, announcement, copies_key
from slurmft.storage.run_folder import RunFolder
from slurmft.system.background import Background, end_child, heard_awake, overslept_s
from slurmft.system.files import open_regular, read_bytes, read_json, replace_atomically, trusted_owners, write_json
from slurmft.system.processes import birth_of, is_stopped

if TYPE_CHECKING:
    from slurmft.agent.inference import NodeReplicas

# --- Kept folders (``sync:``): their process is started here, what it says passed on; nothing waits for a store ---

SYNC_COMMAND = (sys.executable, "-P", "-m", "slurmft.sync.folder")
MAX_SYNC_LINE_BYTES = 1 << 16
SYNC_RESTART_S = 10.0
SYNC_END_S = 0.5
"""How long its end is waited for: one that hangs in a filesystem cannot be killed, and is left behind."""


class NodeSync:
    """Starts the process when it is needed first, and again where it has ended by itself.

    Args:
        report: sends a report to the supervisor.
    """

    def __init__(
        self, config: RunConfig, environment: Mapping[str, str], report: Callable[[messages.Sent], None]
    ) -> None:
        self._folders = config.sync
        self._environment, self._report = environment, report
        self._process: asyncio.subprocess.Process | None = None
        self._background = Background()
        self._number = 0
        self._waiting: set[int] = set()
        self._problems: list[str] = []
        self._began: messages.SyncFolders | None = None
        """The attempt that the folders are kept for."""

    async def handle(self, call: messages.SyncFolders) -> messages.Synced:
        """Begin what is ordered, once, and say whether it is done."""
        if call.number != self._number:
            if not call.upload:
                self._began = call
            self._number, self._problems = call.number, []
            self._waiting = set(range(len(self._folders)))
            await self._send(call)
        return messages.Synced(done=not self._waiting, problem="; ".join(self._problems)[:4000])

    async def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            await end_child(process, SYNC_END_S)
        await self._background.cancel_all()

    async def _send(self, call: messages.SyncFolders, *, resume: bool = False) -> None:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *SYNC_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=dict(self._environment), limit=MAX_SYNC_LINE_BYTES,
            )  # fmt: skip
            self._write({"folders": [each.model_dump(mode="json") for each in self._folders]})
            self._background.start(self._listen(self._process))
            if call.upload and self._began is not None:  # it has forgotten what for
                self._write(_sync_order(self._began, "resume"))
        self._write(_sync_order(call, "resume" if resume else "upload" if call.upload else "restore"))

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            self._hear(json.loads(line))
        code = await process.wait()
        if self._process is not process:
            return
        self._process = None
        reason = f"the process that keeps folders has ended with {code}"
        self._problems += [reason] if self._waiting else []
        self._waiting = set()
        for each in self._folders:
            self._report(messages.SyncReport(what="failed", path=str(each.path), reason=reason))
        await asyncio.sleep(SYNC_RESTART_S)
        if self._process is None and self._began is not None:
            await self._send(self._began, resume=True)

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "done":
            if message["number"] == self._number and message["folder"] in self._waiting:
                self._waiting.discard(message["folder"])
                self._problems += [message["problem"]] if message["problem"] else []
            return
        self._report(messages.SyncReport(**{name: value for name, value in message.items() if name != "kind"}))


def _sync_order(call: messages.SyncFolders, action: str) -> Mapping[str, Any]:
    return {
        "action": action, "number": 0 if action == "resume" else call.number, "run": call.run, "place": call.place,
        "generation": call.generation, "within_s": call.within_s,
    }  # fmt: skip


# --- Where an agent finds its supervisor ---

log = logging.getLogger(__name__)

Address = tuple[list[str], int, bytes]
"""Hosts, best first, a port, and the secret."""


def supervisor_in(folder: Path) -> Address:
    """The supervisor's address, which it leaves in the folder of an attempt.

    Raises:
        OSError: it is not there yet, or damaged.
    """
    where = read_json(folder / "control.json")
    if where is None:
        raise OSError("the supervisor has not said yet where it listens")
    try:
        hosts, port = [str(host) for host in where["hosts"]], int(where["port"])
        if not hosts:
            raise ValueError("no host")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise OSError(f"{folder / 'control.json'} is damaged") from error
    return hosts, port, read_bytes(folder / "secret", owners=trusted_owners(folder))


# --- The agent's side of replica digests: those that its workers have left in their pages, as messages ---

DIGESTS_PER_MESSAGE = 16
"""A message must fit into a line of the control channel."""


def new_digests(workers: Sequence[Worker]) -> Iterator[messages.DigestsReport]:
    """Messages with what these workers have left since the last call; none where there is nothing."""
    found = list[messages.RankDigests]()
    for worker in workers:
        ring, told = worker.digests, worker.digests_told
        if (count := ring.count) != told:
            found.append(messages.RankDigests(rank=worker.rank, group=ring.group, digests=tuple(ring.since(told))))
            worker.digests_told = count
    for first in range(0, len(found), DIGESTS_PER_MESSAGE):
        yield messages.DigestsReport(ranks=tuple(found[first : first + DIGESTS_PER_MESSAGE]))


# --- The agent's part of an injected fault: signals to its workers, and orders that their sessions read at a step ---


def strike(workers: Sequence[Worker], order: Mapping[str, Any], ranks: Sequence[int] | None) -> messages.Injected:
    """Inject a fault into those of these workers that are meant; None means all of them.

    Returns the ranks that were hit, and why others were not.
    """
    hit: list[int] = []
    refused: list[str] = []
    try:
        fault = order_of(order).fault
    except ValueError as error:
        return messages.Injected(injected=(), refused=(str(error),))
    for worker in workers:
        if ranks is not None and worker.rank not in ranks:
            continue
        if why := _strike_one(worker, fault):
            refused.append(f"rank {worker.rank} {why}")
        else:
            hit.append(worker.rank)
    return messages.Injected(injected=tuple(hit), refused=tuple(refused))


def _strike_one(worker: Worker, fault: Fault) -> str:
    """Why it could not be done; empty when it was."""
    if not worker.alive:
        return "is not alive"
    if not worker.pid:
        return NOT_YET
    try:
        if fault in BY_SIGNAL:
            os.kill(worker.trainer_pid, signal.Signals[BY_SIGNAL[fault]])
            return ""
        if worker.page[Slot.PID] == 0:
            return f"uses no session; only {', '.join(BY_SIGNAL)} reach it"
        path = worker.stacks.with_suffix(FAULT_SUFFIX)
        write_json(path, {"fault": fault.value}, durable=False)
    except OSError as error:
        return f"cannot be reached: {error.strerror}"
    worker.page[Slot.FAULT] += 1  # only now: the worker reads the file when it sees another number
    return ""


# --- Before workers are killed: those that have the newest complete step keep it (``checkpoint.just_in_time``) ---
# A worker that waits in a collective for one that is gone cannot run anything in its main thread, so a thread of its
# own waits at a pipe beside its page. Where nothing would be gained, there is no wait.

BEGIN_S = 1.0
"""How long a worker may take to begin: its thread needs the interpreter for a moment."""

LOOK_S = 0.002


async def rescue_on_node(workers: Sequence[Worker]) -> int:
    """The newest step that this node's workers have kept when this returns; a negative number where they have none."""
    # a stopped worker can do nothing; others of its node may have the same state
    workers = [worker for worker in workers if not (worker.alive and worker.pid and is_stopped(worker.trainer_pid))]
    asked: set[tuple[int, int]] = set()
    began = time.monotonic()
    while able := [worker for worker in workers if worker.alive and worker.page[Slot.RESCUABLE] != NOTHING]:
        for worker in able:  # a worker that is updating its weights will be at the end of its step in a moment
            step = worker.page[Slot.RESCUABLE]
            if step >= 0 and (worker.rank, step) not in asked:
                asked.add((worker.rank, step))
                _wake(worker.stacks.with_suffix(RESCUE_SUFFIX))
        took_s = time.monotonic() - began
        if all(_is_kept(part, able, workers) for part in _parts(able)) or took_s > RESCUE_S:
            break
        if took_s > BEGIN_S and not any(worker.page[Slot.RESCUING] for worker in able):
            break
        await asyncio.sleep(LOOK_S)
    return _kept(workers)


def _parts(workers: Sequence[Worker]) -> set[int]:
    """The parts that these workers have of a state that is spread over ranks; one and the same where it is not."""
    return {worker.page[Slot.RESCUE_PART] for worker in workers}


def _is_kept(part: int, able: Sequence[Worker], workers: Sequence[Worker]) -> bool:
    """Whether any worker has kept the newest step of this part."""
    newest = max(worker.page[Slot.RESCUABLE] for worker in able if worker.page[Slot.RESCUE_PART] == part)
    return 0 <= newest <= _kept([worker for worker in workers if worker.page[Slot.RESCUE_PART] == part])


def _kept(workers: Sequence[Worker]) -> int:
    return max((worker.page[Slot.RESCUED] for worker in workers), default=-1)


def _wake(pipe: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # refused where there is no reader
        try:
            os.write(descriptor, b"!")
        finally:
            os.close(descriptor)


# --- The node's memory for snapshots, and its keeper: the agent's child that takes copies of other nodes' shards ---
# The agent holds the listening socket, so a keeper that dies is followed by another one at the same address.


class Keeping:
    """The keeper of one node, over all attempts of its agent. A run without copies has none.

    Nothing here may keep workers from starting: errors are logged, and the copies are missing.
    """

    def __init__(self, memory: Path, copies: int) -> None:
        self._memory, self._copies = memory, copies
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def begin(
        self, attempt_folder: Path, *, generation: int, place: int, nodes: int, hosts: Sequence[str], secret: bytes
    ) -> None:
        """Workers of a new attempt begin: copies of older ones are refused from now on, and its nodes get our address.

        Args:
            place: of this node in the attempt.
            hosts: names and addresses at which other nodes find this one.
        """
        try:
            self._advance_fence(generation)
            if nodes < 2:
                return
            if not (self._memory / KEY_FILE).exists():
                replace_atomically(self._memory / KEY_FILE, copies_key(secret).decode(), durable=False)
            if not self._copies:
                return
            if self._listener is None:
                is_local = all(host.startswith("127.") for host in hosts)
                self._listener = listening_socket("127.0.0.1" if is_local else None)
            self.look_after()
        except OSError as error:
            log.error("no copies of other nodes' snapshots are taken: %s", error)
            self.close()  # it may know an older fence
            return
        where = {"hosts": list(hosts), "port": self._listener.getsockname()[1]}
        path = announcement(attempt_folder, place)
        # not waited for: a run folder that stalls must not keep the workers from starting
        threading.Thread(target=_announce, args=(path, where), daemon=True).start()

    def _advance_fence(self, generation: int) -> None:
        """On a full filesystem in place: the file's page is there already, and a generation never gets shorter.

        Raises:
            OSError: there is no room, and no such file yet.
        """
        path = self._memory / GENERATION_FILE
        try:
            replace_atomically(path, str(generation), durable=False)
        except OSError:
            descriptor = open_regular(path, os.O_WRONLY)
            try:
                os.write(descriptor, str(generation).encode())
            finally:
                os.close(descriptor)

    def look_after(self) -> None:
        """Start the keeper where it should run and does not.

        Raises:
            OSError: it cannot be started.
        """
        if self._listener is None or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            log.warning("the keeper of copies ended with code %s; starting another", self._process.returncode)
        number = self._listener.fileno()
        argv = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas", str(self._memory), str(number)]
        self._process = subprocess.Popen(argv, pass_fds=[number], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the keeper."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @property
    def pid(self) -> int | None:
        """The keeper's process id, where one runs."""
        return None if self._process is None else self._process.pid


def _announce(path: Path, where: dict[str, object]) -> None:
    try:
        write_json(path, where, durable=False)
    except (OSError, StorageError) as error:
        log.error("other nodes will send no copies here: %s", error)


async def look_after_regularly(keeping: Keeping, interval_s: float) -> None:
    """Start the keeper again whenever it has died."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            keeping.look_after()
        except OSError as error:
            log.error("no copies of other nodes' snapshots are taken: %s", error)


# --- The agent's side of straggler detection: at the end of each window, numbers from its workers' timing pages ---

MIN_SAMPLES = 3
"""Where a window holds fewer, older ones are added: steps may be as long as a window."""

TIMINGS_PER_MESSAGE = 32
"""A message must fit into a line of the control channel, also with long names of sections."""


class TimingReports:
    """Cuts time into windows and reports what each worker measured in them."""

    def __init__(self, interval_s: float, began_s: float) -> None:
        self._interval_s, self._began_s = interval_s, began_s
        self._window = 0
        self._taken: dict[int, dict[str, int]] = {}

    def due(self, workers: Sequence[Worker], now_s: float) -> Iterator[messages.TimingsReport]:
        """The messages of the window that has ended, none before its end. A window that was slept through is left out.

        ``now_s`` is of the clock that ``began_s`` was of.
        """
        window = int((now_s - self._began_s) / self._interval_s)
        if window <= self._window:
            return
        self._window = window
        facts = [found for worker in workers if (found := self._facts(worker)) is not None]
        for first in range(0, len(facts), TIMINGS_PER_MESSAGE):
            yield messages.TimingsReport(window=window, ranks=tuple(facts[first : first + TIMINGS_PER_MESSAGE]))

    def _facts(self, worker: Worker) -> messages.RankTimings | None:
        page = worker.timings
        if page is None:
            return None
        counts = page.counts()  # before the durations: one that comes in between is sent twice, rather than lost
        durations = page.newest(self._taken.get(worker.rank, {}), MIN_SAMPLES)
        self._taken[worker.rank] = counts
        sections = tuple(
            (name, statistics.median(values) / 1e9, len(values)) for name, values in durations.items() if values
        )
        return messages.RankTimings(rank=worker.rank, role=page.role, device=page.device, sections=sections)


# --- agent ---

RECONNECT_PAUSE_S = 0.2
LEASE_CHECK_S = 1.0
KEEPER_LOOK_S = 5.0
STOPPED_GRACE_S = 20.0
"""Time for a worker's finalizers after it has stopped at the agreed step."""

MAX_LASTING = 1024
"""Ends, signals, hangs and notices that each connection begins with."""

LAST_FILES_S = 1.0
"""How long the end waits for files of evidence that are still being written."""

LAST_KEEP_S = 2.0
"""How long workers may keep their newest step when the lease is over."""

STORE_BUFFER_S = 0.001
"""Wait between writing a proposal and reading the ticks, so that a tick stored before it is surely visible."""


class Agent:
    """One node's agent, from its first connection to its shutdown."""

    def __init__(
        self, config: RunConfig, attempt: str, environment: Mapping[str, str], begun: Zygote | None = None
    ) -> None:
        self._config, self._run, self._attempt = config, RunFolder(config.run_folder), attempt
        self._environment, self._begun = environment, begun
        self._index = int(environment.get("SLURMFT_NODE_INDEX", environment.get("SLURM_NODEID", "0")))
        self._host = environment.get("SLURMD_NODENAME") or socket.gethostname()
        self._lender = environment.get(LENDER_VARIABLE, "")
        self._birth = birth_of(os.getpid())
        self._taken_back = False
        name = f"{self._run.attempts / attempt}\n{self._lender}\n{self._index}"
        self._workers = Workers(self._report_exit, name)
        self._keeping = Keeping(self._workers.memory, config.checkpoint.peer_copies)
        self._channel: Channel | None = None
        self._port_holder: socket.socket | None = None
        self._term_count = 0
        self._passed_on: set[signal.Signals] = set()
        self._unreported: list[messages.Sent] = []
        self._lasting: deque[messages.Lasting] = deque(maxlen=MAX_LASTING)
        self._shutdown = False
        self._last_heard = time.monotonic()
        self._timings: TimingReports | None = None
        self._hangs = HangWatch(config, lambda report: self._report(replace(report, generation=self._generation)))
        self._generation = 0
        self._first_folder = self._run.attempts / attempt
        self._forensics = Forensics(self._host)
        self._replicas: NodeReplicas | None = None
        if config.inference is not None:
            from slurmft.agent.inference import NodeReplicas  # with numpy, which agents of a training do without

            self._replicas = NodeReplicas(config, environment, self._workers, node=self._index, host=self._host,
                                      report=self._report)  # fmt: skip
        self._sync = NodeSync(config, common_environment(config, environment), self._report)
        self._rehearsal = SpareRehearsal(config, environment, self._workers.folder, self._report)
        self._outside = Outside(self._note_signal)

    @functools.cached_property
    def _supervisor(self) -> Address:
        """Read once: a reconnection must not wait for a run folder that stalls."""
        return supervisor_in(self._first_folder)

    async def run(self) -> int:
        """Serve until shut down, or until the supervisor is gone for longer than the lease."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._note_own_signal, signal.Signals(number).name)
        is_signal = self._config.preemption.signal == "SIGINT"  # else it is a Ctrl-C, which the supervisor answers to
        heard = (self._note_own_signal, "SIGINT") if is_signal else (lambda: None,)
        loop.add_signal_handler(signal.SIGINT, *heard)
        if self._config.container.runtime != "none":
            self._settle_in_container()
        preload = useful(
            self._config.fault_tolerance.preloaded(self._config.launcher, self._config.inference), self._config.command
        )
        self._workers.start_zygote(common_environment(self._config, self._environment), preload, self._begun)
        reports = asyncio.create_task(self._report_regularly())
        serving = asyncio.create_task(self._serve())
        lease = asyncio.create_task(self._watch_lease())
        hangs = asyncio.create_task(self._hangs.run())
        alone = asyncio.create_task(self._outside.gone.wait())
        notices = asyncio.create_task(NoticeWatch(self._config, self._environment, self._report).run())
        keeping = asyncio.create_task(look_after_regularly(self._keeping, KEEPER_LOOK_S))
        for beside in (reports, hangs, keeping):
            beside.add_done_callback(_tell_error)  # an agent that falls silent is given up: at least its log says why
        try:
            await asyncio.wait([serving, lease, alone], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return EXIT_TEMPORARY if self._taken_back else serving.result()
            return LaunchError.exit_code
        finally:
            is_lease_over = lease.done()
            for task in (reports, serving, lease, hangs, keeping, notices, alone):
                task.cancel()
            if self._replicas is not None:
                await self._replicas.close()
            await asyncio.gather(notices, return_exceptions=True)  # a plug-in is ended with it
            self._keeping.close()
            await self._rehearsal.stop()
            self._workers.close(leave_memory=is_lease_over)  # a supervisor that wakes up goes on with it
            await self._sync.close()
            self._forensics.finish(LAST_FILES_S)
            if self._channel is not None:
                self._channel.close()  # only now: it shows the supervisor that nothing of this node is left

    def _settle_in_container(self) -> None:
        """Listen to the process outside, and report what is missing in here."""
        self._outside.listen()
        limits = list(limits_here(self._config, self._environment))
        if not self._config.container.is_started_by_srun and not self._outside.is_heard:
            limits.append("it does not pass standard input on: a stop reaches this node by the supervisor alone")
        for limit in limits:
            log.warning("in the container on %s: %s", self._host, limit)
            self._report(messages.LimitReport(what=limit[:255]))

    async def _watch_lease(self) -> None:
        """Return when the supervisor was silent for the lease: the run may go on elsewhere, and two must never train.

        Only the time counts in which this process could listen: a suspended job wakes up where it was.
        """
        lease_s = self._config.fault_tolerance.supervisor_lease_s
        self._last_heard = time.monotonic()  # it could hear nothing while it began
        while time.monotonic() - self._last_heard < lease_s:
            asleep_s = await overslept_s(LEASE_CHECK_S)
            self._last_heard = heard_awake(self._last_heard, asleep_s)
        if self._config.checkpoint.just_in_time:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rescue_on_node(list(self._workers.by_rank.values())), LAST_KEEP_S)
        log.error("no message from the supervisor for %.0f s; stopping this node's workers", lease_s)

    async def _serve(self) -> int:
        while not self._shutdown:
            try:
                await self._serve_one_connection()
            except (OSError, BadMessage, StorageError) as error:  # OSError covers TimeoutError
                log.debug("no supervisor: %s", error)
            if not self._shutdown:
                await asyncio.sleep(RECONNECT_PAUSE_S)
        return 0

    async def _serve_one_connection(self) -> None:
        channel = await connect_to_any(*self._supervisor)
        # in containers with process ids of their own, every agent may have the same one
        hello = messages.Hello(
            node=self._index, host=self._host, pid=os.getpid(), birth=self._birth[:100] or None,
            lender=self._lender or None,
        )  # fmt: skip
        channel.send(hello)
        self._channel = channel
        for report in (*self._unreported, *self._lasting):
            channel.send(report)
        self._unreported = []
        try:
            while not self._shutdown:
                line = await channel.receive_line()
                if line is None:
                    return
                self._last_heard = time.monotonic()
                number, call = messages.parse_call(line)
                answer = await self._answer(call)
                if number != UNANSWERED:
                    channel.send(messages.as_reply(number, answer))
            await channel.drain()
        finally:
            if not self._shutdown:
                self._channel = None
                channel.close()

    async def _answer(self, call: messages.Call[Any] | None) -> Fields:
        """The reply to a call; what goes wrong with it is no error of the connection."""
        try:
            is_for_replicas = self._replicas is not None and await self._replicas.handle(call)
            return messages.Done() if is_for_replicas else await self._handle(call)
        except (OSError, SlurmftError, RuntimeError, ValueError) as error:
            log.error("%s: %s", getattr(call, "kind", "an unknown call"), error, exc_info=error)
            place = f"{self._workers.folder}: " if isinstance(error, OSError) and not error.filename else ""
            return messages.Failed(error=f"{place}{error}"[:500])

    async def _handle(self, call: messages.Call[Any] | None) -> Fields:
        match call:
            case messages.StartWorkers():
                return await self._start(call)
            case messages.Port():
                if self._port_holder is not None:
                    self._port_holder.close()
                self._port_holder, port = reserve_port()
                return messages.ReservedPort(port=port)
            case messages.AskSections(first=first):
                return self._hangs.facts(first)
            case messages.Ping():
                self._hangs.learn(call.limits or {})
            case messages.LookNow():
                return self._looks()
            case messages.Propose() | messages.Commit() | messages.Withdraw():
                return await self._agree(call)
            case messages.PassOnTerm() | messages.Kill() | messages.Rehearse():
                self._obey(call)
            case messages.TakeEvidence() | messages.RescueState() | messages.SyncFolders():
                return await self._save_what_there_is(call)
            case messages.Inject(order=order, ranks=ranks):
                return strike(list(self._workers.by_rank.values()), order, ranks)
            case messages.Shutdown():
                self._shutdown = True
        return messages.Done()

    def _obey(self, call: messages.PassOnTerm | messages.Kill | messages.Rehearse) -> None:
        match call:
            case messages.PassOnTerm(at_last=at_last):
                self._pass_on_term(at_last=bool(at_last))
            case messages.Kill():
                if self._replicas is not None:
                    self._replicas.end()
                self._workers.kill()
            case messages.Rehearse():
                self._rehearsal.begin()

    async def _start(self, call: messages.StartWorkers) -> messages.Started:
        """Start the workers, on none of the suspect GPUs; or report which of them cannot be spared."""
        config, environment = self._config, self._environment
        if call.generation == self._generation and self._workers.by_rank:  # the connection has lost our answer
            return messages.Started()
        await self._rehearsal.stop()
        if suspects := call.suspect_gpus:
            visible = await asyncio.to_thread(visible_without, environment, suspects, config.nproc_per_node)
            if visible is None:
                return messages.Started(suspect_gpus=suspects)
            environment = {**environment, VISIBLE_VARIABLE: visible}
        await self._workers.end_earlier()  # an attempt that went on without this node while it was cut off
        if held := await asyncio.to_thread(wait_until_free, self._workers.earlier_pids(), environment):
            log.error("GPU memory is still held by processes that have ended: %s; the node may need a reset", held)
        self._attempt, self._generation = call.attempt, call.generation
        self._term_count, self._passed_on = 0, set()
        ranks = range(call.first_rank, call.first_rank + config.nproc_per_node)
        folder = self._run.attempts / self._attempt
        self._begin_keeping(call, folder)
        if config.launcher == "ray":
            leave_token(self._workers.folder, self._supervisor[2], self._attempt)
        self._workers.start(
            ranks,
            [worker_environment(config, environment, call, rank, self._attempt) for rank in ranks],
            command=worker_command(config),
            folder=config.trainer_directory,
            logs=folder,
            verdicts=[self._run.verdicts / f"{self._attempt}.rank-{rank}.json" for rank in ranks],
            generation=call.generation,
            timed=config.straggler_detection.enabled,
        )
        self._timings = TimingReports(config.straggler_detection.report_time_interval, time.monotonic())
        self._hangs.begin(list(self._workers.by_rank.values()), learned=call.limits or {})
        return messages.Started()

    def _begin_keeping(self, call: messages.StartWorkers, folder: Path) -> None:
        address = self._channel.own_address if self._channel is not None else ""
        self._keeping.begin(
            folder,
            generation=call.generation,
            place=call.first_rank // self._config.nproc_per_node,
            nodes=call.nodes,
            hosts=[host for host in (self._host, address) if host],
            secret=self._supervisor[2],
        )

    async def _save_what_there_is(
        self, call: messages.TakeEvidence | messages.RescueState | messages.SyncFolders
    ) -> messages.EvidenceReply | messages.Rescued | messages.Synced:
        """Save the workers' evidence, their newest state, or the folders that are kept."""
        if isinstance(call, messages.SyncFolders):
            return await self._sync.handle(call)
        workers = list(self._workers.by_rank.values())
        if isinstance(call, messages.RescueState):
            return messages.Rescued(step=await rescue_on_node(workers))
        folder = self._run.attempts / self._attempt
        # one report is of all ranks
        ras_s = call.dumps_within_s if any(worker.rank == 0 for worker in workers) else 0.0
        taking = self._forensics.take_evidence(workers, folder, call.within_s, call.dumps_within_s)
        found, report = await asyncio.gather(taking, ask_ras(self._environment, ras_s))
        return messages.EvidenceReply(ranks=tuple(found), outliers=tuple(outliers(report)))

    async def _agree(
        self, call: messages.Propose | messages.Commit | messages.Withdraw
    ) -> messages.Looks | messages.Done:
        """One step of the agreement on a stop (``policy.stop``)."""
        match call:
            case messages.Propose(tick=tick, action=action):
                self._propose(tick, action)
                await asyncio.sleep(STORE_BUFFER_S)
                return self._looks()
            case messages.Commit(tick=tick):
                self._write(Slot.COMMITTED, tick)
            case messages.Withdraw():
                self._write(Slot.PROPOSED, NEVER)
        return messages.Done()

    def _propose(self, tick: int, action: int) -> None:
        # in this order: a worker acts when the commit equals the proposal, which must never be that of an older stop
        self._write(Slot.ACTION, action)
        self._write(Slot.COMMITTED, NOTHING)
        self._write(Slot.PROPOSED, tick)

    def _write(self, slot: Slot, value: int) -> None:
        for worker in self._workers.by_rank.values():
            worker.page[slot] = value

    def _looks(self) -> messages.Looks:
        return messages.Looks(looks=tuple(worker.look() for worker in self._workers.by_rank.values()))

    def _note_own_signal(self, name: str) -> None:
        if not self._outside.is_heard:  # the process outside has got the same one
            self._note_signal(name)

    def _note_signal(self, name: str) -> None:
        self._term_count += 1
        if self._replicas is not None:  # its engines finish what they have, or give it back
            self._replicas.note_signal()
            self._taken_back = bool(self._lender)
        elif self._lender:  # its job ends, not the run: the workers stop with all others, at an agreed step
            self._taken_back = True
        else:
            self._pass_on_term()
        self._report(messages.SignalReport(name=name, count=self._term_count, at=time.time()))

    def _pass_on_term(self, *, at_last: bool = False) -> None:
        """Give every worker ``preemption.signal`` once, so that handlers of the user's own run on every site alike.

        SIGTERM in its place goes to those that know no other signal, and to all when the time is nearly up.

        With proctrack/cgroup Slurm signals only this process, with others the whole tree.
        """
        knows_term_only = self._config.launcher == "ray" or self._config.inference is not None
        number = signal.Signals["SIGTERM" if at_last or knows_term_only else self._config.preemption.signal]
        if number not in self._passed_on:
            self._passed_on.add(number)
            self._workers.signal(number)

    def _report_exit(self, worker: Worker) -> None:
        if self._replicas is not None:
            self._replicas.on_exit(worker)
            return
        self._forensics.keep_last_words(worker, self._run.attempts / self._attempt)
        own, facts, code = self._generation, worker.facts(), worker.exit_code or 0
        killed, starved = worker.killed, worker.starved
        self._report_digests([worker])  # first: the end of the last rank ends the attempt
        self._report(messages.WorkerExited(code=code, killed=killed, starved=starved, generation=own, **asdict(facts)))

    def _report_digests(self, workers: Sequence[Worker]) -> None:
        for report in new_digests(workers):
            self._report(replace(report, generation=self._generation))

    def _report(self, report: messages.Sent) -> None:
        if isinstance(report, messages.Lasting):
            self._lasting.append(report)
        elif self._channel is None:
            self._unreported.append(report)
        if self._channel is not None:
            self._channel.send(report)

    async def _report_regularly(self) -> None:
        interval_s = report_interval_s(self._config.nodes + self._config.spare_nodes)
        while True:
            await asyncio.sleep(interval_s)
            self._workers.kill_lingering(STOPPED_GRACE_S)
            self._workers.private.tell_alive()
            if self._channel is not None:
                ranks = tuple(worker.facts() for worker in self._workers.by_rank.values())
                own, ready = self._generation, self._workers.ready.is_set()
                self._channel.send(messages.ProgressReport(ranks=ranks, ready=ready, generation=own))
                if self._timings is not None and self._config.straggler_detection.enabled:
                    for report in self._timings.due(list(self._workers.by_rank.values()), time.monotonic()):
                        self._channel.send(replace(report, generation=own))
                self._report_digests(list(self._workers.by_rank.values()))
                if (durations := self._hangs.durations()) is not None:
                    self._channel.send(replace(durations, generation=own))


def _tell_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("internal error: %r", error, exc_info=error)


async def serve(config: RunConfig, attempt: str, environment: Mapping[str, str], begun: Zygote | None = None) -> int:
    """Run this node's agent, whose zygote may have been ``begun`` already; returns its exit code."""
    agent = Agent(config, attempt, environment, begun)
    with contextlib.suppress(asyncio.CancelledError):
        return await agent.run()
    return LaunchError.exit_code
