"""What a worker and its writer share: requests and reports (one JSON object per line, both ways), the page of a save's
progress, and how a writer yields to the training. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from slurmft.policy.checkpoint_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity

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

    def __init__(self, max_bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_bytes_per_s
        self._clock = clock
        self._since = clock()
        self._sleep: Callable[[float], None] = time.sleep

    def lift(self) -> None:
        """No cap from now on."""
        self._max = 0.0

    def pass_on(self, done_bytes: int, tick: Callable[[], None]) -> None:
        """Return when ``done_bytes`` since the beginning are within the cap; calls ``tick`` ten times a second."""
        while self._max > 0 and (ahead_s := self._since + done_bytes / self._max - self._clock()) > 0:
            self._sleep(min(ahead_s, _NAP_S))
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
class Keep:
    """Which checkpoints stay when a new one is committed; the newest two good ones do in any case."""

    keep_last_n: int = 3
    """Checkpoints of this many steps."""

    keep_every: int = 0
    """Also the first one at or after every multiple of so many steps; 0: none for that reason."""

    best_metric: str = ""
    """Also the one that is best by this metric; empty: none for that reason."""

    best_mode: BestMode = "min"
    distrusted: tuple[str, ...] = ()
    """Names of folders that a load found damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOrder:
    """The data for rank 0's writer to commit a checkpoint once all ranks have written."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    attempt: str = ""
    keep: Keep = field(default_factory=Keep)


def order_of(settings: CheckpointSettings, metrics: Mapping[str, float], distrusted: Iterable[Path]) -> CommitOrder:
    """The order for a commit in this attempt; ``distrusted`` are folders that a load found damaged."""
    keep = Keep(
        keep_last_n=settings.keep_last_n, keep_every=settings.keep_every,
        best_metric=settings.best_metric if settings.save_best else "", best_mode=settings.best_mode,
        distrusted=tuple(sorted(path.name for path in distrusted)),
    )  # fmt: skip
    return CommitOrder(metrics=dict(metrics), attempt=os.environ.get("SLURMFT_ATTEMPT", ""), keep=keep)


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

    step: int
    since: float
    is_written: bool = False
    is_committed: bool = False
    is_fenced: bool = False
    errno: int = 0
    """Why the newest try failed; 0 when it did not."""

    problem: str = ""


def request_line(request: WriteRequest) -> bytes:
    """The request as the writer reads it."""
    return _line({"kind": "write", **_plain(request)})


def request_from(value: Mapping[str, Any]) -> WriteRequest:
    """The reverse of ``request_line``, of the object in the line."""
    order, keeps = value["commit"], value["keeps"]
    objects = {
        "identity": identity_from(value),
        "keeps": None if keeps is None else Identity(*keeps),
        "commit": None if order is None else _order(**order),
        **{name: Path(value[name]) for name in ("snapshot", "image", "folder")},
    }
    return WriteRequest(**{name: each for name, each in value.items() if name != "kind"} | objects)


def abandon_line(identity: Identity) -> bytes:
    """Asks the writer to leave a save, whether it waits or is being written."""
    return _line({"kind": "abandon", "identity": identity})


def report_line(report: Report) -> bytes:
    """The report as the client reads it."""
    return _line(report)


def report_from(line: bytes) -> Report:
    """The reverse of ``report_line``."""
    value = json.loads(line)
    return Report(**value | {"identity": identity_from(value)})


def identity_from(value: Mapping[str, Any]) -> Identity:
    """The save that a line is about."""
    return Identity(*value["identity"])


def _order(metrics: Mapping[str, float], attempt: str, keep: Mapping[str, Any]) -> CommitOrder:
    kept = Keep(**{**keep, "distrusted": tuple(keep["distrusted"])})
    return CommitOrder(metrics=metrics, attempt=attempt, keep=kept)


def _plain(value: Any) -> Any:
    """A path, or a dataclass of this module, for JSON."""
    if isinstance(value, Path):
        return str(value.absolute())
    facts = {name: getattr(value, name) for name in value.__slots__}
    return [*facts.values()] if isinstance(value, Identity) else facts


def _line(value: Any) -> bytes:
    return json.dumps(value, default=_plain).encode() + b"\n"  # never a line break inside, even in names of folders


HURRY_LINE = _line({"kind": "hurry"})
"""Asks the writer to lift the bandwidth cap of what it is writing."""

CLOSE_LINE = _line({"kind": "close"})
"""Asks the writer to end when nothing is left to do."""
