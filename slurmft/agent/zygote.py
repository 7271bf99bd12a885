"""The zygote: a process with torch imported already, from which workers are forked.

``import torch`` and what optimizers pull in lazily cost two to three seconds; a fork costs milliseconds. The zygote
stays single-threaded and never touches a GPU, so that its children can do both. It speaks with its agent over a
socketpair, one JSON object per packet (a request names the file it lies in). It ends with its agent, and its children
with it; what an ended child has started is killed, whatever ended it. A child that "adopts" keeps all that it starts
below it, and at its end the zygote inherits that: engines of others may be of many processes, in sessions of their own.

Run as ``python -m slurmft.agent.zygote FD PRELOAD...``.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from slurmft.errors import SlurmftError, StorageError
from slurmft.ipc import pages
from slurmft.policy.judge import claimed
from slurmft.policy.symptoms import cause_of_text, last_words
from slurmft.policy.verdict import EXIT_USAGE, Cause
from slurmft.storage.verdicts import WorkerVerdict, read_verdict, write_verdict
from slurmft.system.files import appending
from slurmft.system.foreign_text import one_line
from slurmft.system.processes import (
    MARK_VARIABLE,
    adopt_orphans,
    die_with_parent,
    kill_left,
    reap_adopted,
    without_collections,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PACKET_BYTES = 64 * 1024
MAX_LOSSES = 16
"""Waiting children that end, such as by the OOM killer, until none is forked ahead any more."""

AHEAD_AFTER_S = 2.0
"""Without work for so long, it forks one child more for each that works: a restart then finds its workers forked."""

LEFT_S = 10.0
"""How long the next fork, or the end, waits for what ended workers had started."""

_CUDA_DEVICE = "/dev/nvidia-uvm"
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
_WARM_UP = "slurmft.checkpoint.manager"
_OPTIONAL = ("torch", "numpy")
"""Programs that train nothing do without."""


class ForkRequest(NamedTuple):
    """The worker that the agent asks for, in a file: an environment may be larger than what a socket holds."""

    rank: int
    environment: dict[str, str]
    python: bool
    """``argv`` is what Python is to run; else it is a program of its own."""

    argv: list[str]
    folder: str
    log: str
    verdict: str
    stacks: str
    adopts: bool

    @classmethod
    def read(cls, path: Path) -> Self:
        """As the agent wrote it."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """For the zygote."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(self._asdict()), encoding="utf-8")


def main(arguments: Sequence[str]) -> NoReturn:
    """Serve fork requests until the agent is gone. In a forked child, become the worker and end with its exit code."""
    die_with_parent()
    # Slurm sends its TERM to the whole tree on some sites; only the agent answers to it
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=int(arguments[0]))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a module that only asks for a GPU must not begin CUDA
    with without_collections():
        for module in arguments[1:]:
            _preload(module)
    die_with_parent(number=signal.SIGCONT)  # from here on its socket shows the agent's end, and workers are cleaned up
    _send(agent, {"kind": "ready", "pid": os.getpid()})
    worker = _serve(agent, forks_ahead=len(arguments) > 1)
    if worker is None:
        os._exit(0)
    _leave(worker())


def _preload(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a worker that needs it will raise the error itself
        if not (isinstance(error, ImportError) and error.name in _OPTIONAL):
            sys.stderr.write(f"slurmft: {module} could not be imported ahead of the workers: {one_line(str(error))}\n")


def _leave(code: int) -> NoReturn:
    """End like an interpreter does, without taking the module state apart.

    That part costs a forked child about a second of copying shared pages, and torch's destructors can deadlock in it.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _serve(agent: socket.socket, *, forks_ahead: bool) -> Callable[[], int] | None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    children, ended = dict[int, str](), dict[int, str]()
    ahead: dict[int, int] = {}
    zygote, folder, losses, adopts = os.getpid(), Path(), 0, False

    def forked() -> int:
        """As os.fork; the child has nothing of what its parent serves with."""
        if (pid := os.fork()) == 0:
            die_with_parent(zygote)
            signal.set_wakeup_fd(-1)
            for descriptor in (wake_read, wake_write, *ahead.values()):
                os.close(descriptor)
            agent.close()
        return pid

    while True:
        lacks = len(children) - len(ahead) if forks_ahead and losses < MAX_LOSSES else 0
        ready = select.select([agent.fileno(), wake_read], [], [], AHEAD_AFTER_S if lacks > 0 else None)[0]
        if not ready:
            for _ in range(lacks):
                gpu_in_use, (takes, gives) = why_not_to_fork(), os.pipe()
                if (pid := forked()) == 0:
                    os.close(gives)
                    return functools.partial(_await_request, takes, gpu_in_use, folder)
                os.close(takes)
                ahead[pid] = gives
            continue
        if wake_read in ready:
            os.read(wake_read, 4096)
            losses += _forget_ended(ahead)
            ended |= _reap(agent, children, _others(adopts, children, ahead))
        if agent.fileno() not in ready:
            continue
        packet = agent.recv(PACKET_BYTES)
        if not packet:
            _end({*children, *ahead})
            kill_left(ended | children, LEFT_S, _others(adopts, children, ahead))
            return None
        path = Path(json.loads(packet)["request"])
        request, folder = ForkRequest.read(path), path.parent
        adopts = adopts or _adopts(request)
        kill_left(ended, LEFT_S, _others(adopts, children, ahead))
        ended.clear()
        if not (pid := _handed_over(path, ahead)):
            gpu_in_use = why_not_to_fork()
            if (pid := forked()) == 0:
                return functools.partial(_become, request, gpu_in_use)
        children[pid] = request.environment[MARK_VARIABLE]
        _send(agent, {"kind": "started", "rank": request.rank, "pid": pid})


def _handed_over(request: Path, ahead: dict[int, int]) -> int:
    """The child that was forked ahead and now becomes this worker; 0 where there is none.

    It is given the file's name, for which any pipe has room: it may be stopped, and the zygote serves others.
    """
    while ahead:
        pid, gives = ahead.popitem()
        try:
            with os.fdopen(gives, "wb") as pipe:
                pipe.write(os.fsencode(request))
        except BrokenPipeError:  # it was ended from outside
            os.waitpid(pid, 0)
            continue
        return pid
    return 0


def _await_request(takes: int, gpu_in_use: str, folder: Path) -> int:
    """In a child that was forked ahead: become the worker of the request that comes, or end where none does."""
    for name in [name for name in os.environ if name.startswith("SLURMFT_")]:
        del os.environ[name]  # they speak of a worker
    warm = sys.modules.get(_WARM_UP)
    if warm is not None and not any(map(os.path.exists, _GPU_DEVICES)):  # which GPUs it may see is not known yet
        warm.warm_up(folder)
    with os.fdopen(takes, "rb") as pipe:
        request = pipe.read()
    if not request:
        os._exit(0)
    return _become(ForkRequest.read(Path(os.fsdecode(request))), gpu_in_use)


def _forget_ended(ahead: dict[int, int]) -> int:
    """Forget those that were ended from outside; how many."""
    ended = [pid for pid in ahead if os.waitpid(pid, os.WNOHANG)[0]]
    for pid in ended:
        os.close(ahead.pop(pid))
    return len(ended)


def _reap(agent: socket.socket, children: dict[int, str], own: set[int] | None) -> dict[int, str]:
    """Report children that have ended, and kill what they had started: it would hold their memory and their GPU."""
    ended = dict[int, str]()
    for pid in list(children):
        if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            ended[pid] = children.pop(pid)
            _send(agent, {"kind": "exited", "pid": pid, "code": code})
    if ended:
        kill_left(ended, own=own)
    for pid in ended:  # only now: until then their ids are not given to others
        os.waitpid(pid, 0)
    if own is not None:
        reap_adopted(own)
    return ended


def _others(adopts: bool, children: Mapping[int, str], ahead: Mapping[int, int]) -> set[int] | None:
    return {*children, *ahead} if adopts else None


def _adopts(request: ForkRequest) -> bool:
    if request.adopts:
        adopt_orphans()
    return request.adopts


def _end(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _send(agent: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the agent is gone; the next read shows it
        agent.send(json.dumps(message).encode())


def why_not_to_fork(descriptors: Path = Path("/proc/self/fd")) -> str:
    """Why no child of this process could use a GPU; empty where it can.

    CUDA does not survive a fork. torch reports its own use, and other use shows by the device that only CUDA opens:
    that of some library that was imported, or of a sitecustomize of the user's.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "torch has initialised CUDA"
    for path in descriptors.iterdir():
        with contextlib.suppress(OSError):
            if path.readlink().as_posix().startswith(_CUDA_DEVICE):
                return f"{_CUDA_DEVICE} is open"
    return ""


def _become(request: ForkRequest, gpu_in_use: str = "") -> int:
    """Turn this child into the worker: signals, session, output, environment, then the user's program."""
    # workers must not inherit signals that the starting shell ignored: SIGINT and SIGQUIT, behind &
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    _adopts(request)
    with appending(request.log) as log:
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request.environment)
    pages.ignore_stop_signal(os.environ)
    for module, generator in (("numpy", "random"), ("torch", "default_generator")):
        if (owner := getattr(sys.modules.get(module), generator, None)) is not None:
            owner.seed()  # else all workers draw alike, after every start; Python's own generator does so by itself
    if gpu_in_use and request.python:
        text = f"{gpu_in_use} in the process that workers are forked from, so that none of them could use a GPU"
        hint = "something uses CUDA while it is imported (sitecustomize?); or set fault_tolerance.preload: false"
        sys.stderr.write(f"slurmft: {text}\n  hint: {hint}\n")
        _leave_verdict(Path(request.verdict), text)
        return EXIT_USAGE
    try:
        os.chdir(request.folder)
        if request.python:
            pages.arm(Path(request.stacks))
            return run_python(request.argv, Path(request.verdict))
        os.execvp(request.argv[0], list(request.argv))  # noqa: S606 - an argument list, no shell
    except OSError as error:
        sys.stderr.write(f"slurmft: cannot start {request.argv[0]!r} in {request.folder}: {error}\n")
        return 127


def run_python(argv: Sequence[str], verdict: Path) -> int:
    """Run ``script.py ARGS``, ``-m module ARGS`` or ``-c code ARGS`` as the interpreter itself would."""
    sys.stdout, sys.stderr = _log_stream(1), _log_stream(2)
    try:
        if argv[0] == "-m":
            sys.argv = [argv[1], *argv[2:]]
            sys.path.insert(0, str(Path.cwd()))
            sys.modules.pop(argv[1], None)  # imported ahead: an interpreter of its own would not know it either
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            script = Path(argv[0])
            if not script.exists():
                sys.stderr.write(f"slurmft: there is no script {argv[0]!r} in {Path.cwd()}\n")
                return EXIT_USAGE
            sys.path.insert(0, str(script.resolve().parent))
            _run_script(script.absolute())
    except SystemExit as stop:
        return _exit_code(stop)
    except SlurmftError as error:  # the message is complete; a traceback would bury it
        sys.stderr.write(f"slurmft: {error}\n")
        _leave_verdict(verdict, str(error.what))
        return error.exit_code
    except BaseException:  # noqa: BLE001 - any error of the user's program, as the interpreter would report it
        text = traceback.format_exc()
        kind, value, trace = sys.exc_info()
        if kind is not None and value is not None:
            sys.excepthook(kind, value, trace)
        _leave_verdict(verdict, text)
        return 1
    return 0


class _LogFile(io.FileIO):
    """A log whose full disk does not end the training: output that cannot be written is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def _log_stream(descriptor: int) -> io.TextIOWrapper:
    stream = io.BufferedWriter(_LogFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _run_script(path: Path) -> None:
    """As ``python path`` would: ``__file__`` absolute, ``sys.argv[0]`` as given. runpy makes them the same."""
    name = str(path)
    module = types.ModuleType("__main__")
    vars(module).update(
        __file__=name, __cached__=None, __spec__=None, __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", name),
    )  # fmt: skip
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), name, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the user's own program


def _leave_verdict(path: Path, text: str) -> None:
    """Leave a verdict, unless the worker has left a better one: the failure now is a consequence then."""
    with contextlib.suppress(OSError, ValueError):
        with contextlib.suppress(StorageError):
            earlier = read_verdict(path)
            if earlier is not None and claimed(earlier.cause) not in (Cause.UNKNOWN, Cause.WORKER_ERROR):
                return
        cause = cause_of_text(text) or Cause.WORKER_ERROR
        text = text.encode(errors="backslashreplace").decode()
        write_verdict(path, WorkerVerdict(cause=cause, message=last_words(text), traceback=text))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
