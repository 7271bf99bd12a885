"""Processes of this machine, as /proc and the kernel show them, and a node's memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pwd
import re
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


import fcntl
import json
import selectors
import sys
import warnings
from collections.abc import Sequence
from dataclasses import field
from tempfile import mkdtemp

from slurmft.errors import StorageUnavailable
from slurmft.system.files import IS_FOLDER, check_private, own_folders, prefix, shared_memory, write_all

# --- Importing without the garbage collector, which looks at all modules again and again meanwhile ---


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: their objects stay, and looking for garbage among them takes up to a quarter of the time.

    Afterwards the collector leaves them alone, so that forked children share their pages for as long as they can.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# --- Processes of this machine, as /proc shows them ---

MARK_VARIABLE = "SLURMFT_PROCESS_MARK"
"""In the environment of what a worker starts, and what ends with it in whatever session; empty for what outlives it."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LISTENS = "0A"
_LOOPBACK = frozenset({"0100007F", "7F000001", "0000000000000000FFFF00000100007F", "00000000000000000000FFFF7F000001"})
"""127.0.0.1, also as an IPv6 address, on machines of either byte order."""

OUTPUT_LOOK_S = 0.01

_START_TICKS = 18
"""Index of starttime among the fields of /proc/PID/stat that follow the process's state (proc(5), field 22)."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as another machine may remember it."""

    host: str
    pid: int
    birth: str
    """Distinguishes it from a later one with the same id (``birth_of``)."""


def me() -> Process:
    """The process that asks."""
    pid = os.getpid()
    return Process(os.uname().nodename, pid, birth_of(pid))


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for this signal when the parent dies; end here where ``parent`` has died already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, whatever session and environment it
    has (PR_SET_CHILD_SUBREAPER). Its end is to be collected then (``reap_adopted``)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(own: Collection[int]) -> None:
    """Collect the ends of adopted children; ``own`` are the others, whose ends are for those who started them."""
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and end.si_pid not in own:
            os.waitpid(end.si_pid, 0)


def own_children(variable: str = "SLURMD_NODENAME") -> set[int]:
    """Children that this process has started, and not adopted: they began with this variable of its environment."""
    value = os.environ.get(variable)
    return {pid for pid, _ in children_of(os.getpid()) if value is None or was_given(pid, variable, value)}


def _prctl(option: int, value: int) -> None:
    libc().prctl(option, value, 0, 0, 0)


@functools.cache
def libc() -> Any:
    """The C library; loaded in a parent, it need not be in each child between fork and exec."""
    import ctypes  # verbs of a login node, which need none, start a millisecond sooner

    return ctypes.CDLL(None, use_errno=True)


def allow_descriptors(wanted: int) -> int:
    """Raise this process's soft limit of open files to so many, as far as the hard one allows; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


def birth_of(pid: int) -> str:
    """Distinguishes a process from a later one with the same id: the machine's boot, and its start in ticks since then.

    Empty when there is no such process. A start in Unix seconds would move with every correction of the clock.
    """
    boot, (_, fields) = text_of("/proc/sys/kernel/random/boot_id").strip(), _stat(pid)
    return f"{boot}:{fields[_START_TICKS]}" if boot and fields else ""


def lives(pid: int, birth: str) -> bool:
    """Whether the process that was born then still runs on this machine; a zombie does not."""
    return bool(birth) and birth_of(pid) == birth


def was_given(pid: int, variable: str, value: str) -> bool:
    """Whether the process began with this environment variable; False where it is gone, or not ours to look at."""
    return f"{variable}={value}".encode() in _environment_of(pid).split(b"\0")


def is_stopped(pid: int) -> bool:
    """Whether the kernel has stopped the process: SIGSTOP, or a debugger."""
    return text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def user_name(user_id: int | None = None) -> str:
    """Login name of the user, by default this process's; the number where the system has no name for it.

    Never from LOGNAME or USER, which name the user who logged in and not the process's user.
    """
    user_id = os.getuid() if user_id is None else user_id
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def who() -> str:
    """This process's user, as user@host: who asked, in journals and requests."""
    return f"{user_name()}@{os.uname().nodename}"


def children_of(pid: int) -> list[tuple[int, str]]:
    """Process id and name of its living children."""
    found = [(each, *_stat(each)) for each in _ids()]
    return [(each, name) for each, name, fields in found if fields and fields[0] == str(pid)]


def session_members(session: int) -> set[int]:
    """Process ids of a session's living processes; its leader may have ended (setsid(2))."""
    return {pid for pid in _ids() if _session_of(pid) == session and _stat(pid)[1]}


def kill_left(ended: Mapping[int, str], within_s: float = 0.0, own: Collection[int] | None = None) -> None:
    """SIGKILL what is left of processes that led a session, and wait so many seconds at most until it is gone.

    Args:
        ended: their ids, and the marks that their children began with. A job of its own that one has submitted keeps
            the mark and is spared.
        own: children of this process that live on; given where it adopts what ended ones leave.
    """
    marks = frozenset(ended.values())
    if ended or own is not None:
        _kill_until_gone(lambda: _left_of(ended, lambda _, mark: mark in marks, own), within_s)


def kill_marked(is_left: Callable[[int, str], bool], within_s: float) -> None:
    """As ``kill_left``, for processes whose id and mark ``is_left`` picks."""
    _kill_until_gone(lambda: _left_of((), is_left, None), within_s)


def _kill_until_gone(find: Callable[[], set[int]], within_s: float) -> None:
    until = time.monotonic() + within_s
    while left := find():
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= until:
            return
        time.sleep(0.005)


def _left_of(sessions: Collection[int], is_left: Callable[[int, str], bool], own: Collection[int] | None) -> set[int]:
    # Ranks wait for it between two attempts, on nodes with thousands of processes: two system calls for most of them.
    job, begins = f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID', '')}".encode(), f"{MARK_VARIABLE}=".encode()
    found = set[int]()
    for pid in _ids():
        if sessions and _session_of(pid) in sessions:
            if _stat(pid)[1]:
                found.add(pid)
        elif begins in (environment := _environment_of(pid)):
            words = environment.split(b"\0")
            mark = next((os.fsdecode(one[len(begins) :]) for one in words if one.startswith(begins)), "")
            if mark and is_left(pid, mark) and all(one == job for one in words if one.startswith(b"SLURM_JOB_ID=")):
                found.add(pid)
    adopted = [] if own is None else [pid for pid, _ in children_of(os.getpid()) if pid not in own]
    while adopted:
        found.add(pid := adopted.pop())
        adopted += [child for child, _ in children_of(pid)]
    return found


def _ids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it is gone, or not ours to ask
        return None


def _environment_of(pid: int) -> bytes:
    """What it began with, NAME=VALUE ended by zeros; empty where it is gone, or not ours to look at."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def output_of(process: subprocess.Popen[bytes], within_s: float, limit_bytes: int) -> tuple[list[bytes], int | None]:
    """The beginning of what it writes to each of its pipes until it ends, and its exit code; None: not in time.

    Not until the end of a pipe, which a process that it has left behind may hold open.
    """
    import selectors  # by few; a zygote and a verb of a login node start without

    until_s, is_over = time.monotonic() + within_s, False
    streams = [each for each in (process.stdout, process.stderr) if each is not None]
    said = [bytearray() for _ in streams]
    with selectors.DefaultSelector() as waiting:
        for number, stream in enumerate(streams):
            waiting.register(stream, selectors.EVENT_READ, number)
        while (left_s := until_s - time.monotonic()) > 0:
            ready = waiting.select(0.0 if is_over else min(OUTPUT_LOOK_S, left_s))
            for key, _ in ready:
                if not (part := os.read(key.fd, 1 << 16)):
                    waiting.unregister(key.fileobj)
                said[key.data] += part[: limit_bytes - len(said[key.data])]
            if is_over and (not ready or max(map(len, said)) == limit_bytes):
                break
            is_over = process.poll() is not None
    code = process.poll()
    for stream in streams:  # one that still writes ends by that
        stream.close()
    return [bytes(each) for each in said], code


def end_group(process: subprocess.Popen[bytes], within_s: float) -> None:
    """SIGKILL it, where it still lives, and its group; one that is stuck in the kernel is left behind."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # nothing where it has ended; it may have left its group
    until_s = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.005)


def words_of(pid: int) -> list[str]:
    """The command line of a living process; empty where there is none, or it is not ours to look at."""
    return text_of(f"/proc/{pid}/cmdline").split("\0")[:-1]


def owners_of_loopback_port(port: int) -> set[int]:
    """User ids of the sockets that answer at 127.0.0.1 and this TCP port; empty where the kernel does not tell.

    Columns as in proc_net_tcp.txt of the kernel's documentation; an address is in the byte order of the machine.
    """
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            address, _, number = words[1].partition(":")
            if words[3] == _LISTENS and int(number, 16) == port and (address in _LOOPBACK or not address.strip("0")):
                found.add(int(words[7]))
    return found


def _stat(pid: int) -> tuple[str, list[str]]:
    """Name of a living process, and what follows its state in /proc/PID/stat, its parent first; else nothing."""
    before, _, after = text_of(f"/proc/{pid}/stat").rpartition(")")
    state, *fields = after.split() or ["Z"]
    return before.partition("(")[2], [] if state in "ZX" else fields


# --- kernel view ---
# A process as the kernel sees it: state, threads, what they wait for. The process itself is not involved.
#
# Unreadable values (another user's process, a kernel that hides them) are empty; a process that is gone is None.

MAX_THREADS = 64
"""Threads that are looked at; a process on a GPU has hundreds, and the first ones are the program's own."""

MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """One thread."""

    tid: int
    name: str
    state: str
    """Letter of proc(5): R runs, S sleeps, D sleeps uninterruptibly, T is stopped, Z is dead."""

    wchan: str
    """Function of the kernel in which it sleeps; empty or 0 where it does not, or where the kernel hides it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One process."""

    pid: int
    state: str
    threads: tuple[Thread, ...]
    """The main thread first."""

    caught: int
    """Mask of the signals that it has handlers for; bit 0 is signal 1."""

    status: str
    syscall: str
    """System call in which the main thread is, with its arguments."""

    stack: str
    """The main thread's calls in the kernel; only root may see them."""

    @property
    def wchan(self) -> str:
        """Where the main thread sleeps in the kernel."""
        return self.threads[0].wchan if self.threads else ""

    def catches(self, number: int) -> bool:
        """Whether it has a handler for the signal; without one, most signals would end it."""
        return bool(self.caught >> (number - 1) & 1)

    def as_json(self) -> dict[str, Any]:
        """For the file that people read."""
        value = asdict(self)
        del value["caught"]
        return {**value, "status": self.status.splitlines()}


def view(pid: int) -> View | None:
    """One look at a living process; None when there is none, or it is a zombie."""
    status = text_of(f"/proc/{pid}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "Z")[:1]
    if not status or state in "ZX":
        return None
    threads = _threads(pid)
    return View(
        pid=pid,
        state=state,
        threads=threads,
        caught=int(fields.get("SigCgt", "0"), 16),
        status=status,
        syscall=text_of(f"/proc/{pid}/syscall").strip(),
        stack=text_of(f"/proc/{pid}/stack").strip(),
    )


def memory_kills(root: str = "") -> int:
    """How many processes of this process's control group the kernel has ended for memory; 0 where it does not say.

    Args:
        root: in the place of ``/``, for tests.
    """
    for line in text_of(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "none", "")[:3]
        if controllers == "":
            top, name = f"{root}/sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = f"{root}/sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # inside of a container the path is one of the host's, and the group's own files lie at the top
        text = text_of(f"{top}{path}/{name}") or text_of(f"{top}/{name}")
        if found := re.search(r"^oom_kill (\d{1,18})$", text, re.MULTILINE):
            return int(found[1])
    return 0


def _threads(pid: int) -> tuple[Thread, ...]:
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - names are all it takes
    except OSError:
        return ()
    return tuple(thread for tid in tids[:MAX_THREADS] if (thread := _thread(pid, tid)) is not None)


def _thread(pid: int, tid: int) -> Thread | None:
    before, _, after = text_of(f"/proc/{pid}/task/{tid}/stat").rpartition(")")
    if not before:
        return None
    wchan = text_of(f"/proc/{pid}/task/{tid}/wchan").strip()
    return Thread(tid=tid, name=before.partition("(")[2], state=after.strip()[:1], wchan=wchan if wchan != "0" else "")


def text_of(path: str | Path) -> str:
    """A file's text, at most a MiB of it, with any content; empty where it cannot be read. Never waits for a writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return ""
    try:
        pieces: list[bytes] = []
        while sum(map(len, pieces)) < MAX_TEXT_BYTES and (piece := os.read(descriptor, 1 << 16)):
            pieces.append(piece)
        return b"".join(pieces).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


# --- memory limits ---
# Whether snapshots fit into a node's memory beside the training itself. No torch.

SPARE_FRACTION = 0.05
"""Share of the node's memory that is left alone: later allocations of the training must not meet the OOM killer."""

_UNLIMITED = 1 << 60
"""cgroup v1 shows a limit that is none as a number next to 2**63."""


def fits(bytes_needed: int, folder: Path, *, root: Path = Path("/")) -> str:
    """Why ``bytes_needed`` more bytes cannot lie in ``folder``, a place in memory; empty when they can.

    Args:
        bytes_needed: of all ranks of this node together, and without what lies there already.
        root: where proc and sys are found.
    """
    for what, free, total in _rooms(folder, root):
        room = free - int(SPARE_FRACTION * total)
        if bytes_needed > room:
            return (
                f"{_gib(bytes_needed)} are needed and {what} has {_gib(max(free, 0))} free of {_gib(total)}, "
                f"{SPARE_FRACTION:.0%} of which are left alone"
            )
    return ""


def _rooms(folder: Path, root: Path) -> Iterator[tuple[str, int, int]]:
    """The limits of usable memory: name, bytes that are free, bytes in all."""
    try:
        status = os.statvfs(folder)
        yield str(folder), status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    except OSError as error:
        yield f"{folder} ({error.strerror})", 0, 0
    memory = _fields(root / "proc/meminfo")
    if "MemAvailable:" in memory:
        yield "this node", memory["MemAvailable:"] * 1024, memory.get("MemTotal:", memory["MemAvailable:"]) * 1024
    yield from _cgroups(root)


def _cgroups(root: Path) -> Iterator[tuple[str, int, int]]:
    """The limits of this process's control group and of all above it: any of them may be the tightest."""
    mount = root / "sys/fs/cgroup"
    for line in text_of(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            top, limit, usage, idle = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        # inside of a container the path is one of the host's, and the group's own files lie at the top
        for folder in [group, *group.parents] if (group / limit).exists() else [top]:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < _UNLIMITED:
                reclaimable = _fields(folder / "memory.stat").get(idle, 0)
                yield f"the control group {path}", most - used + reclaimable, most
            if folder == top:
                break


def _number(path: Path) -> int | None:
    try:
        return int(text_of(path))
    except ValueError:  # ``max``: no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    rows = [line.split() for line in text_of(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


# --- Calls in a child of their own, which may hang or die: bounded in time, or isolated for what they do ---

# --- Work in a child process with a time limit, wherever it hangs; one of a kind at a time ---

LOOK_S = 0.02
KILL_S = 2.0


def bounded(work: Callable[[], int], *, limit_s: float, name: str, environment: Mapping[str, str]) -> int:
    """The exit code of ``work``, which runs in a child.

    A child in uninterruptible sleep cannot be killed: it is left behind, and holds the lock until the kernel lets it
    go, so that a filesystem that hangs costs one process, and not one for each run of cron.

    Raises:
        StorageUnavailable: another one is at work, or it took longer than ``limit_s`` seconds.
    """
    locks = _lock(name, environment)
    pid = os.fork()
    if pid == 0:
        _be_bounded_child(work)
    _close(locks)  # the child has them
    deadline = time.monotonic() + limit_s
    while (code := _ended(pid)) is None:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + KILL_S
            while _ended(pid) is None and time.monotonic() < until:
                time.sleep(LOOK_S)
            raise StorageUnavailable(
                f"it took longer than {limit_s:.0f} s and was ended", hint="something hangs; see --limit"
            )
        time.sleep(LOOK_S)
    return code


def _be_bounded_child(work: Callable[[], int]) -> None:
    """Never returns to the caller's frames, which belong to the parent."""
    code = 70
    try:
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 70
    if found == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _lock(name: str, environment: Mapping[str, str]) -> list[int]:
    """Locks of this machine and user, in memory where that is offered: they must not hang with what they guard.

    The lock is on a folder of ours with a random name. No other user can take such a name before us, and other users'
    files beside it are neither opened nor waited for. Two processes that begin at once may both make one, so that all
    are locked.

    Raises:
        StorageUnavailable: another process holds one of them, or none can be made.
    """
    root, names = _place(environment), prefix(name)
    held: list[int] = []
    try:
        if not own_folders(root, names):
            mkdtemp(dir=root, prefix=names)
        for folder in own_folders(root, names):
            held.append(os.open(folder, IS_FOLDER))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        _close(held)
        raise StorageUnavailable("another one is at work on this machine", hint=f"it holds {folder}") from error
    except OSError as error:
        _close(held)
        raise StorageUnavailable(f"cannot lock anything in {root}: {error.strerror}") from error
    if not held:
        raise StorageUnavailable(f"cannot lock anything in {root}: the folder {names}... is not ours alone")
    return held


def _place(environment: Mapping[str, str]) -> Path:
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        if runtime.startswith("/"):
            check_private(Path(runtime))
            return Path(runtime)
    return shared_memory()


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


# --- isolation ---
# Each look at the node in a process of its own: one that crashes, hangs or is stuck in the kernel harms no other.
#
# A child that is stuck in uninterruptible sleep cannot be killed, so it is not waited for: it gets its signal, is left
# behind, and ends by itself when its system call returns. Children hold none of our streams open meanwhile.

MAX_ANSWER_BYTES = 4 << 20
_EXIT_NOW = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """A function to run, and how long it may take."""

    name: str
    limit_s: float
    task: Callable[[], Any]
    """Returns plain values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of an errand."""

    name: str
    value: Any = None
    error: str = ""
    """Why there is no value; empty when there is one."""

    timed_out: bool = False
    took_s: float = 0.0


@dataclass(slots=True)
class _Child:
    errand: Errand
    pid: int
    pipe: int
    began: float
    received: bytearray = field(default_factory=bytearray)

    @property
    def deadline(self) -> float:
        return self.began + self.errand.limit_s


def run_all(errands: Sequence[Errand], *, at_once: int = 32) -> list[Answer]:
    """Run them beside each other; the answers are in the order of the errands.

    Returns when all have answered or are too late; that is the longest of their limits where there are no more than
    ``at_once``. For programs with a single thread.
    """
    waiting, running, answers = list(reversed(errands)), dict[int, _Child](), dict[str, Answer]()
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < at_once:
                child = _start(waiting.pop())
                running[child.pipe] = child
                selector.register(child.pipe, selectors.EVENT_READ)
            soonest = min(child.deadline for child in running.values())
            for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                child = running[key.fd]
                if _has_answered(child):
                    answers[child.errand.name] = _read(child)
                    _let_go(child, running, selector)
            for child in [child for child in running.values() if child.deadline <= time.monotonic()]:
                answers[child.errand.name] = _too_late(child)
                _let_go(child, running, selector)
    return [answers[errand.name] for errand in errands]


def _start(errand: Errand) -> _Child:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; none is started in here
        pid = os.fork()
    if pid == 0:
        _be_isolated_child(errand, writer)
    os.close(writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both do it: the first one counts
    return _Child(errand=errand, pid=pid, pipe=reader, began=began)


def _be_isolated_child(errand: Errand, writer: int) -> None:
    """Never returns."""
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # a reader of our output must not wait for a child that was left behind
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        signal.alarm(int(errand.limit_s) + 2)  # should our parent be killed
        try:
            said = json.dumps({"value": errand.task()})
        except Exception as error:  # noqa: BLE001 - a probe that crashes is a result
            said = json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})
        write_all(writer, said.encode()[:MAX_ANSWER_BYTES])
    finally:
        os._exit(_EXIT_NOW)  # nothing of the parent's is flushed or cleaned up twice


def _has_answered(child: _Child) -> bool:
    piece = os.read(child.pipe, 1 << 16)
    child.received += piece
    return not piece or len(child.received) > MAX_ANSWER_BYTES


def _read(child: _Child) -> Answer:
    took = time.monotonic() - child.began
    try:
        said = json.loads(child.received)
    except ValueError:
        return Answer(name=child.errand.name, error="it died without an answer", took_s=took)
    return Answer(name=child.errand.name, value=said.get("value"), error=said.get("error", ""), took_s=took)


def _too_late(child: _Child) -> Answer:
    took = time.monotonic() - child.began
    return Answer(name=child.errand.name, error=f"no answer within {child.errand.limit_s:.1f} s", timed_out=True,
                  took_s=took)  # fmt: skip


def _let_go(child: _Child, running: dict[int, _Child], selector: selectors.BaseSelector) -> None:
    selector.unregister(child.pipe)
    os.close(child.pipe)
    del running[child.pipe]
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)  # and its child processes
    deadline = time.monotonic() + 0.05
    with contextlib.suppress(OSError):
        while os.waitpid(child.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)  # a moment for the kernel; one in uninterruptible sleep is left behind
