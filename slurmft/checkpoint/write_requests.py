"""What a worker and its writer share, and the worker's side: requests and reports, the page of a save's agreement,
and a writer that is gone replaced.

On the worker's side nothing blocks but ``wait`` and ``close``, up to their timeouts. A daemon thread that sleeps in
poll() does all the watching.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import math
import mmap
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from slurmft.errors import UsageError
from slurmft.policy.worker_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.system.files import UnsafeFile, open_regular
from slurmft.system.processes import MARK_VARIABLE

# --- fault points ---
# Named points of a save at which a test makes the process die, stop, or meet an error. Costs nothing otherwise.
#
# ``SLURMFT_FAULT_POINT="image half written=kill"``, or ``=stop``, or ``=28`` for an OSError with that errno. With
# ``SLURMFT_FAULT_ONCE`` naming a file that does not exist yet, only the first process that gets there is hit.

VARIABLE = "SLURMFT_FAULT_POINT"
ONCE_VARIABLE = "SLURMFT_FAULT_ONCE"


def reached(point: str) -> None:
    """Nothing, unless a test asked for a fault here.

    Raises:
        OSError: it was asked for.
    """
    name, _, fault = os.environ.get(VARIABLE, "").partition("=")
    if name != point or not _is_first():
        return
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread must not run on until another is woken
    else:
        raise OSError(int(fault), os.strerror(int(fault)), point)


def _is_first() -> bool:
    path = os.environ.get(ONCE_VARIABLE)
    if not path:
        return True
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


# --- Keeps a writer from slowing the training beside it, and from being ended by signals before its work is done ---

IGNORED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Slurm sends its TERM to the whole tree on some sites; the writer ends when its worker has, and its work is done."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
"""The number of the system call, which has no function in libc."""

_BEST_EFFORT, _LOWEST = 2 << 13, 7
_NAP_S = 0.1

NICE = 10
"""A tenth of a processor that training wants as well: at most 5 % of two. The lowest would take ten times as long."""


def ignore_signals() -> None:
    """From now on; those that came since the process was started are forgotten as well."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def yield_to_others() -> None:
    """Give this thread, and every thread that it starts later, a low priority for processor and disk.

    Not the idle classes: a node whose processors or disks are never idle would never finish a checkpoint.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # on Linux it is the calling thread's alone
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        # a session of its own is a group of its own for the kernel's autogroup, which looks at no process's nice value
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
    if number := _IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT | _LOWEST)


def do_politely(work: Callable[[], object]) -> None:
    """Do it in a thread of its own, whose low priority cannot be undone; returns at its end, also where it raised."""

    def behind_others() -> None:
        yield_to_others()
        work()

    thread = threading.Thread(target=behind_others, daemon=True)
    thread.start()
    thread.join()


class Throttle:
    """Sleeps whenever more bytes have passed than ``max_bytes_per_s`` allows; 0 allows any number."""

    def __init__(self, max_bytes_per_s: float) -> None:
        self._max, self._since = max_bytes_per_s, time.monotonic()

    def lift(self) -> None:
        """No cap from now on."""
        self._max = 0.0

    def pass_on(self, done_bytes: int, tick: Callable[[], None]) -> None:
        """Return when ``done_bytes`` since the beginning are within the cap; calls ``tick`` ten times a second."""
        while self._max > 0 and (ahead_s := self._since + done_bytes / self._max - time.monotonic()) > 0:
            time.sleep(min(ahead_s, _NAP_S))
            tick()


# --- progress page ---
# A page of memory that a writer and its worker share: it changes with the writer's progress, and costs no message.

_WORDS = 8
_BYTES = _WORDS * 8


class Lane(IntEnum):
    """The threads of a writer, each with two words of the page: is it at work, and its own counter."""

    LISTENING = 0
    IMAGE = 2
    COMMIT = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the image that is being written."""

    done_bytes: int
    size_bytes: int


class ProgressPage:
    """Counters in shared memory; each word has one thread that writes it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")

    @classmethod
    def new(cls) -> ProgressPage:
        """A page that a child can inherit by its descriptor."""
        descriptor = os.memfd_create("slurmft-writer")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def begin(self, lane: Lane) -> None:
        """The lane has something to do; from now on it has to move."""
        self._words[lane + 1] += 1
        self._words[lane] = 1

    def end(self, lane: Lane) -> None:
        """It has nothing to do."""
        self._words[lane] = 0
        self._words[lane + 1] += 1

    def tick(self, lane: Lane) -> None:
        """The lane has made progress."""
        self._words[lane + 1] += 1

    def show(self, progress: Progress) -> None:
        """Of the image lane."""
        self._words[6], self._words[7] = progress.done_bytes, progress.size_bytes

    def progress(self) -> Progress:
        """The newest progress."""
        return Progress(self._words[6], self._words[7])

    def counts(self) -> dict[Lane, tuple[bool, int]]:
        """Of each lane: whether it is at work, and its counter."""
        return {lane: (bool(self._words[lane]), self._words[lane + 1]) for lane in Lane}


# --- write requests ---

BestMode = Literal["min", "max"]

LIFETIME_S = 600.0
"""How long a writer works on after its worker has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOrder:
    """The data for rank 0's writer to commit a checkpoint once all ranks have written, and which ones stay then; the
    newest two good ones do in any case."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    attempt: str = ""
    keep_last_n: int = 3
    """Checkpoints of this many steps."""

    keep_every: int = 0
    """Also the first one at or after every multiple of so many steps; 0: none for that reason."""

    best_metric: str = ""
    """Also the one that is best by this metric; empty: none for that reason."""

    best_mode: BestMode = "min"
    distrusted: Sequence[str] = ()
    """Names of folders that a load found damaged."""


def order_of(settings: CheckpointSettings, metrics: Mapping[str, float], distrusted: Iterable[Path]) -> CommitOrder:
    """The order for a commit in this attempt; ``distrusted`` are folders that a load found damaged."""
    return CommitOrder(
        metrics=dict(metrics), attempt=os.environ.get("SLURMFT_ATTEMPT", ""),
        keep_last_n=settings.keep_last_n, keep_every=settings.keep_every,
        best_metric=settings.best_metric if settings.save_best else "", best_mode=settings.best_mode,
        distrusted=sorted(path.name for path in distrusted),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """Make one rank's staged snapshot durable; on rank 0, commit the checkpoint as well."""

    identity: Identity
    shard: int
    shards: int
    snapshot: Path
    """The image's index in the memory folder; it is there while the image is complete."""

    image: Path
    folder: Path
    """The checkpoint's own folder; made where it is missing."""

    commit: CommitOrder | None = None
    urgent: bool = False
    """A stop waits for this one: no bandwidth cap, and an older image of which less than half is written is dropped."""

    max_bytes_per_s: float = 0.0
    """0: as fast as the disk takes it from a process of the lowest priority."""

    is_written: bool = False
    """Only to be committed: a writer before this one has written the image. Set by the client."""

    goes_to_peers: bool = True
    """Copied to other nodes' memory as well, where the run has that."""

    keeps: Identity | None = None
    """Of a step that is copied, and never written: which copy its peers must still have until this one is whole."""

    is_step_copy: bool = False


ReportKind = Literal[
    "hashed", "written", "committed", "failed", "abandoned", "superseded", "pruned", "stalled", "copied"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One thing that happened to one save."""

    kind: ReportKind
    identity: Identity
    seconds: float = 0.0
    """Since the request for it came."""

    final: bool = False
    """Whether nothing more happens to this save. A failure that is not final is being retried."""

    phase: str = ""
    """What failed: reading the image, writing it, waiting for other ranks, committing, pruning."""

    errno: int = 0
    text: str = ""
    fenced: bool = False
    """A newer attempt owns the run; nothing that this process stages will ever be committed."""

    size_bytes: int = 0
    """Of the image; of a commit, of all its files."""


@dataclass(kw_only=True, slots=True)
class Standing:
    """How far one snapshot is, as this rank knows."""

    since: float
    is_written: bool = False
    is_committed: bool = False
    is_fenced: bool = False
    errno: int = 0
    """Why the newest try failed; 0 when it did not."""

    problem: str = ""


def request_line(request: WriteRequest) -> bytes:
    """The request as the writer reads it."""
    return line_of({"kind": "write", **_plain(request)})


def request_from(value: Mapping[str, Any]) -> WriteRequest:
    """The reverse of ``request_line``, of the object in the line."""
    order, keeps = value["commit"], value["keeps"]
    objects = {
        "identity": Identity(*value["identity"]),
        "keeps": None if keeps is None else Identity(*keeps),
        "commit": None if order is None else CommitOrder(**order),
        **{name: Path(value[name]) for name in ("snapshot", "image", "folder")},
    }
    return WriteRequest(**{name: each for name, each in value.items() if name != "kind"} | objects)


def abandon_line(identity: Identity) -> bytes:
    """Asks the writer to leave a save, whether it waits or is being written."""
    return line_of({"kind": "abandon", "identity": identity})


def report_from(line: bytes) -> Report:
    """The reverse of ``line_of`` a report."""
    value = json.loads(line)
    return Report(**value | {"identity": Identity(*value["identity"])})


def _plain(value: Any) -> Any:
    """A path, or a dataclass of this module, for JSON."""
    if isinstance(value, Path):
        return str(value.absolute())
    return {name: getattr(value, name) for name in value.__slots__}


def line_of(value: Any) -> bytes:
    """A report, or a mapping, as the other side reads it."""
    return json.dumps(value, default=_plain).encode() + b"\n"  # never a line break inside, even in names of folders


HURRY_LINE = line_of({"kind": "hurry"})
"""Asks the writer to lift the bandwidth cap of what it is writing."""

CLOSE_LINE = line_of({"kind": "close"})
"""Asks the writer to end when nothing is left to do."""


# --- spawned writer ---
# One writer process on its worker's side: its start, the messages over a socket, its end. Never blocks.

_START = "import sys; sys.path.append(sys.argv.pop(1)); from slurmft.checkpoint.writer import main; main(sys.argv[1:])"
"""As ``python -m slurmft.checkpoint.writer``, from our own package, independent of the working folder."""

_RECEIVE_BYTES = 64 * 1024


class LineSocket:
    """Lines over a connected socket, which is never waited for."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._in, self._out = connection, b"", bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        """For waiting until the other side sends something, or ends."""
        return self._socket.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether lines wait until the other side takes them."""
        return bool(self._out)

    def send(self, lines: bytes) -> bool:
        """Have ``lines`` sent as soon as they can be; as ``flush``."""
        self._out += lines
        return self.flush()

    def flush(self) -> bool:
        """Send what the other side takes now; whether it is there, as far as that shows."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Lines that have come; None when the other side is gone."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._in = (self._in + data).split(b"\n")
        return lines


class SpawnedWriter(LineSocket):
    """A running ``checkpoint.writer`` in a session of its own: it outlives its worker and finishes by itself.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, *, lifetime_s: float, log: Path | None) -> None:
        self.page = ProgressPage.new()
        mine, theirs = socket.socketpair()
        super().__init__(mine)
        try:
            self.pid = self._start(theirs, lifetime_s, log)
        except BaseException:
            self.let_go()
            raise
        finally:
            theirs.close()
        self._status: int | None = None
        _living.add(self)

    def _start(self, theirs: socket.socket, lifetime_s: float, log: Path | None) -> int:
        root = str(Path(__file__).resolve().parents[2])
        numbers = [theirs.fileno(), self.page.descriptor]
        argv = [sys.executable, "-P", "-c", _START, root, *map(str, numbers), str(lifetime_s)]
        with contextlib.ExitStack() as stack:
            # its worker's own output may be a pipe, whose reader would wait for the writer's end
            output = subprocess.DEVNULL if log is None else _appending(log, stack)
            stack.enter_context(_blocked())
            process = subprocess.Popen(
                argv,
                env=os.environ | {MARK_VARIABLE: ""},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=numbers,
            )
        process.returncode = 0  # reaped below; no warning that it outlives its worker, which is its purpose
        return process.pid

    def kill(self) -> None:
        """End it; a process inside a filesystem call that hangs only ends when that returns."""
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether it has ended; reaps it."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has reaped it
                pid, status = self.pid, 0
            if pid:
                self._status = status
        return self._status is not None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self._status is None:
            return "has closed its socket"
        code = os.waitstatus_to_exitcode(self._status)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def let_go(self) -> None:
        """Close this side: it finishes its present work, and ends."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self.page.descriptor)
            self.page.descriptor = -1


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """A child that is started meanwhile keeps signals pending until it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_living: weakref.WeakSet[SpawnedWriter] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child, such as a loader's worker, must not keep the socket open when its parent has died."""
    for writer in list(_living):
        writer.let_go()


os.register_at_fork(after_in_child=_forget_in_child)


def _appending(log: Path, stack: contextlib.ExitStack) -> int:
    """A descriptor to write behind what is there; nothing is logged where something else than a file lies."""
    try:
        descriptor = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o666)
    except UnsafeFile:
        return subprocess.DEVNULL
    stack.callback(os.close, descriptor)
    return descriptor


# --- A worker's side of its writer: hands snapshots over, takes in reports, replaces a writer that is gone ---

STALL_TIMEOUT_S = 30.0
WARN_AFTER_S = 5.0
"""Without progress for so long, a save is reported as ``stalled``; nothing is done about it yet."""

MAX_TRIES = 3
"""Writers that may die or stall over one snapshot before it is given up."""

MAX_STUCK = 2
"""Processes that cannot be killed, because a filesystem holds them, before no further writer is started."""

_LOOK_S = 0.5
_PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Save:
    request: WriteRequest
    since: float
    tries: int = 0
    abandoned: bool = False


class WriterClient:
    """The writer of one rank. Any thread may call; methods do not block unless they say so.

    Args:
        on_report: called in the watching thread with every report, within about a second of its event.
        stall_timeout_s: without any progress for so long, a save has failed (ETIMEDOUT) and the writer is replaced.
        lifetime_s: how long the writer works on after this process has died or closed it.
        log: a file for what the writer logs; None: nowhere.
    """

    def __init__(
        self, *, on_report: Callable[[Report], None] | None = None, stall_timeout_s: float = STALL_TIMEOUT_S,
        lifetime_s: float = LIFETIME_S, log: Path | None = None,
    ) -> None:  # fmt: skip
        self._on_report = on_report
        self._stall_timeout_s = stall_timeout_s
        self._lifetime_s = lifetime_s
        self._log = log
        self._changed = threading.Condition()
        self._saves: dict[Identity, _Save] = {}
        self._unheard: list[Report] = []
        self._writer: SpawnedWriter | None = None
        self._stuck: list[SpawnedWriter] = []
        self._moved: dict[Lane, tuple[tuple[bool, int], float]] = {}
        self._looked_at = time.monotonic()
        self._start_again_at = 0.0
        self._warned = False
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._changed:
            self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="checkpoint writer")
        self._thread.start()

    @property
    def pid(self) -> int:
        """The writer's process id; 0 while there is none."""
        return self._writer.pid if self._writer else 0

    def submit(self, request: WriteRequest) -> None:
        """Have a snapshot written; the newest that waits wins, older waiting ones are reported as superseded.

        The image belongs to the writer until a report says ``written``, or is final.

        Raises:
            UsageError: ``close`` was called before.
        """
        with self._changed:
            if self._closing:
                raise UsageError("the checkpoint writer was closed; nothing more is written")
            if not self._saves:
                self._moved.clear()
            self._saves[request.identity] = _Save(request, time.monotonic())
            if self._writer is None:
                self._start()
            else:
                self._writer.send(request_line(request))
        self._awaken()

    def abandon(self, identity: Identity) -> None:
        """Give up a save as soon as possible; ``abandoned`` is reported then, or an earlier final report."""
        with self._changed:
            if identity in self._saves:
                self._saves[identity].abandoned = True
                self._tell(abandon_line(identity))
        self._awaken()

    def hurry(self) -> None:
        """Lift the bandwidth cap of what is being written now."""
        with self._changed:
            self._tell(HURRY_LINE)
        self._awaken()

    def unfinished(self) -> list[Identity]:
        """Saves that have no final report yet, oldest first."""
        with self._changed:
            return list(self._saves)

    def wait(self, identity: Identity, timeout_s: float) -> None:
        """Block until there is a final report on a save, or for ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: identity not in self._saves, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Whether everything was finished within ``timeout_s`` seconds; blocks no longer.

        What is not finished then, the writer finishes by itself, within its lifetime. A manager that is forgotten may
        be collected in the very thread that hears of its saves, which then waits for nothing.
        """
        is_listening = threading.current_thread() is self._thread
        with self._changed:
            done = self._changed.wait_for(lambda: not self._saves, 0.0 if is_listening else timeout_s)
            self._closing = True
        self._awaken()
        if not is_listening:
            self._thread.join(_LOOK_S)
        return done

    # -- the lock is held from here on

    def _tell(self, line: bytes) -> None:
        if self._writer is not None:
            self._writer.send(line)

    def _start(self) -> None:
        """Start a writer and hand over what is unfinished; try again later where that fails."""
        self._start_again_at = math.inf
        self._stuck = [writer for writer in self._stuck if not writer.is_gone()]
        if len(self._stuck) >= MAX_STUCK:
            self._failed_try("starting the writer", errno.ETIMEDOUT, "earlier writers hang in the filesystem")
            return
        try:
            self._writer = SpawnedWriter(lifetime_s=self._lifetime_s, log=self._log)
        except OSError as error:
            self._failed_try("starting the writer", error.errno or 0, f"the writer cannot be started: {error}")
            return
        self._moved.clear()
        for identity, save in self._saves.items():
            self._writer.send(request_line(save.request))
            if save.abandoned:
                self._writer.send(abandon_line(identity))

    def _failed_try(self, phase: str, number: int, text: str) -> None:
        """A writer has failed all unfinished saves: reported once for each, and retried up to a limit."""
        stuck = len(self._stuck) >= MAX_STUCK
        for identity, save in list(self._saves.items()):
            save.tries += 1
            over = stuck or save.tries >= MAX_TRIES
            seconds = time.monotonic() - save.since
            failed = Report(kind="failed", identity=identity, phase=phase, errno=number, text=text)
            self._note(replace(failed, seconds=seconds, final=over))
        if self._saves and not self._closing:
            tries = max(save.tries for save in self._saves.values())
            self._start_again_at = time.monotonic() + (tries - 1) * _PAUSE_S

    def _note(self, report: Report) -> None:
        if report.identity not in self._saves and report.kind != "pruned":
            return  # its end was reported already, by a writer that was taken for dead
        if report.kind == "written" and not report.final:
            save = self._saves[report.identity]
            save.request = replace(save.request, is_written=True)
        self._unheard.append(report)
        if report.final and self._saves.pop(report.identity, None) is not None:
            self._changed.notify_all()

    def _hear(self) -> None:
        """Take in the writer's reports; replace it when it is gone."""
        writer = self._writer
        if writer is None:
            return
        writer.flush()
        lines = writer.receive()
        for line in lines or ():
            self._note(report_from(line))
        if lines is None:
            self._lost(writer)

    def _lost(self, writer: SpawnedWriter) -> None:
        self._retire(writer)  # one without a socket is of no use
        if not self._closing:
            log.warning("the checkpoint writer (process %d) %s", writer.pid, writer.ending)
            self._failed_try("writer", 0, f"the writer {writer.ending}")

    def _retire(self, writer: SpawnedWriter) -> None:
        writer.kill()
        deadline = time.monotonic() + 0.2
        while not writer.is_gone() and time.monotonic() < deadline:
            time.sleep(0.005)  # between its socket and its exit status lie microseconds
        writer.let_go()
        self._writer = None
        if not writer.is_gone():
            self._stuck.append(writer)

    def _look_for_stall(self, now: float) -> None:
        late = now - self._looked_at > 10 * _LOOK_S
        self._looked_at = now
        writer = self._writer
        if writer is None or not self._saves:
            return
        if late:
            self._moved.clear()  # this process was stopped as well: a suspended job
        counts = writer.page.counts()
        for lane, state in counts.items():
            if self._moved.get(lane, (None, 0.0))[0] != state:
                self._moved[lane] = (state, now)
        rest_s = {lane: now - since for lane, (_, since) in self._moved.items()}
        busy = [rest_s[lane] for lane, (at_work, _) in counts.items() if at_work]
        still_s = max(busy, default=min(rest_s.values()))
        if still_s > self._stall_timeout_s:
            self._replace_stalled(writer)
        elif still_s < WARN_AFTER_S:
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._warn(still_s)

    def _warn(self, still_s: float) -> None:
        text = f"the writer has made no progress for {still_s:.0f} s: the filesystem may hang"
        log.warning("%s", text)
        for identity, save in self._saves.items():
            seconds = time.monotonic() - save.since
            self._note(Report(kind="stalled", identity=identity, seconds=seconds, errno=errno.ETIMEDOUT, text=text))

    def _replace_stalled(self, writer: SpawnedWriter) -> None:
        log.error("the checkpoint writer (process %d) makes no progress; it is replaced", writer.pid)
        self._retire(writer)
        text = f"the writer made no progress for {self._stall_timeout_s:.0f} s: the filesystem hangs, or it was stopped"
        self._failed_try("writer", errno.ETIMEDOUT, text)

    # -- the watching thread

    def _awaken(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    def _watch(self) -> None:
        while not self._is_over():
            self._sleep()
            with self._changed:
                self._hear()
                now = time.monotonic()
                self._look_for_stall(now)
                self._stuck = [writer for writer in self._stuck if not writer.is_gone()]
                if self._writer is None and now >= self._start_again_at:
                    self._start()
                heard, self._unheard = self._unheard, []
            for report in heard:
                self._call_back(report)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def _is_over(self) -> bool:
        with self._changed:
            if not self._closing:
                return False
            if self._writer is not None:
                self._writer.send(CLOSE_LINE)
                self._writer.let_go()
                self._writer = None
            return True

    def _sleep(self) -> None:
        """Wait for a report; while a save is unfinished, no longer than the interval of looks."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._changed:
            restless = bool(self._saves or self._stuck)
            if self._writer is not None:
                poll.register(self._writer, select.POLLIN | (select.POLLOUT if self._writer.wants_to_send else 0))
        for number, _ in poll.poll(_LOOK_S * 1000 if restless else None):
            if number == self._wake:
                os.eventfd_read(self._wake)

    def _call_back(self, report: Report) -> None:
        if self._on_report is not None:
            try:
                self._on_report(report)
            except Exception:
                log.exception("what came of %s could not be handled", report.identity.folder_name)
