"""``launcher: torchrun``: torch's own elastic agent starts the trainer, and every rank still has a process of ours.

    agent ── zygote ──┬─ holder of rank 0 ── torchrun (one per node, no restarts of its own)
                      └─ holder of rank 1        ├─ stand-in of rank 0 ── the trainer's command
                              ▲                  └─ stand-in of rank 1 ── the trainer's command
                              └──── a socket: environment, output, signals, exit code ────┘

To the agent a holder is the worker: it ends as the rank does, gets its signals, and its death is the rank's. So pages,
sections, stops, verdicts and restarts are what they are without torchrun. The command sees torchrun's own variables.

    python -m slurmft.agent.torchrun ...
        --shutdown-timeout S COMMAND...   a holder; starts torchrun where LOCAL_RANK is 0
        (nothing)                         a stand-in, started by torchrun
        --trainer STACKS VERDICT ...      a Python trainer that reports its stacks
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurmft.ipc import pages
from slurmft.ipc.pages import PAGE_VARIABLE, STACKS_SIGNAL, STACKS_SUFFIX
from slurmft.storage.verdicts import VERDICT_VARIABLE
from slurmft.system.processes import MARK_VARIABLE, die_with_parent, libc

if TYPE_CHECKING:
    from slurmft.config.run import RunConfig  # a stand-in, of which each rank has one, must start at once

CONNECT_S = 60.0
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, STACKS_SIGNAL)
ENDED_WELL = (0, 75)
TORCHRUNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_", "GROUP_",
             "ROLE_", "TORCHELASTIC_")  # fmt: skip
"""Variables, or beginnings of their names, that torchrun's values override; its file for errors is ours."""


def worker_command(config: RunConfig) -> Sequence[str]:
    """The command of the agent's workers."""
    if config.launcher == "agent":
        return config.command
    timeout_s = max(config.preemption.signal_lead_s, round(config.preemption.stop_timeout_s))
    if config.launcher == "ray":
        return [sys.executable, "-m", "slurmft.agent.ray", "--hold", str(timeout_s), *config.command]
    return [sys.executable, "-m", "slurmft.agent.torchrun", "--shutdown-timeout", str(timeout_s), *config.command]


def torchrun_argv(environment: Mapping[str, str]) -> list[str]:
    """The torchrun of one node, as the environment of its first rank describes it."""
    options = {
        "--nnodes": environment["GROUP_WORLD_SIZE"],
        "--node-rank": environment["GROUP_RANK"],
        "--nproc-per-node": environment["LOCAL_WORLD_SIZE"],
        "--master-addr": environment["MASTER_ADDR"],
        "--master-port": environment["MASTER_PORT"],
        "--rdzv-id": environment.get("TORCHELASTIC_RUN_ID", "slurmft"),
        "--max-restarts": "0",
    }
    words = [f"{name}={value}" for name, value in options.items()]
    stand_in = [sys.executable, "-P", "-m", "slurmft.agent.torchrun"]
    return [sys.executable, "-P", "-m", "torch.distributed.run", *words, "--no-python", *stand_in]


def trainers_environment(holders: Mapping[str, str], stand_ins: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment of the rank, with the variables that torchrun has set since."""
    told = {name: value for name, value in stand_ins.items() if name.startswith(TORCHRUNS)}
    told.pop("TORCHELASTIC_ERROR_FILE", None)  # where the supervisor looks
    return {**holders, **told}


def hold(command: Sequence[str], shutdown_timeout_s: str, environment: Mapping[str, str]) -> int:
    """Stand for a rank towards the agent; returns its exit code, negative for a signal."""
    torchrun = None
    with _listening(environment) as server, _Events(server) as events:
        if environment["LOCAL_RANK"] == "0":
            # torchrun is of all ranks: what ends with this one is its trainer
            told = {**environment, MARK_VARIABLE: "", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": shutdown_timeout_s}
            torchrun = start_child(torchrun_argv(environment), told, signal.SIGTERM, new_session=True)
        stand_in: socket.socket | None = None
        while True:
            for event in events.wait():
                if event is server:
                    stand_in, _ = server.accept()
                    _send_start(stand_in, command, environment)
                    events.watch(stand_in)
                elif event is stand_in:
                    return _after(torchrun, _exit_code(stand_in), float(shutdown_timeout_s))
                elif isinstance(event, int) and stand_in is not None and event != signal.SIGCHLD:
                    with contextlib.suppress(OSError):
                        stand_in.sendall(bytes([event]))
                elif event == signal.SIGTERM and torchrun is not None:  # not as far as a trainer yet
                    torchrun.terminate()
            if stand_in is None and torchrun is not None and (code := torchrun.poll()) is not None:
                return code or 1


def stand_in(environment: Mapping[str, str]) -> int:
    """Start the trainer for the holder of this rank, and report how it ends."""
    with contextlib.suppress(PermissionError):  # leads its session already
        os.setpgid(0, 0)
    with _connected(environment) as holder, _Events(holder) as events:
        start = _receive_start(holder)
        told = trainers_environment(start["environment"], environment)
        try:
            trainer = start_child(start["command"], told, signal.SIGKILL, folder=start["folder"])
        except OSError as error:
            sys.stderr.write(f"slurmft: cannot start {start['command'][0]!r} in {start['folder']}: {error}\n")
            holder.sendall(b"127\n")
            return 127
        while (code := trainer.poll()) is None:
            for event in events.wait():
                if event is holder:
                    numbers = holder.recv(64)
                    if not numbers:  # the agent has killed it, and with it all processes of the rank
                        os.killpg(0, signal.SIGKILL)
                    for number in numbers:
                        trainer.send_signal(number)
                elif isinstance(event, int) and event != signal.SIGCHLD:
                    trainer.send_signal(event)
        with contextlib.suppress(OSError):
            holder.sendall(f"{code}\n".encode())
        return code


class _Events:
    """Sockets that can be read, and numbers of signals, as they come."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._mine, theirs = socket.socketpair()
        self._mine.setblocking(False)
        theirs.setblocking(False)
        self._theirs = theirs
        for each in (*sockets, self._mine):
            self.watch(each)

    def watch(self, one: socket.socket) -> None:
        self._selector.register(one, selectors.EVENT_READ)

    def wait(self) -> Iterator[socket.socket | int]:
        for key, _ in self._selector.select():
            if key.fileobj is self._mine:
                yield from self._mine.recv(64)
            else:
                yield key.fileobj  # type: ignore[misc]

    def __enter__(self) -> _Events:
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()


def start_child(
    argv: Sequence[str], environment: Mapping[str, str], at_death: int, *, folder: str | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """A child that gets the signal ``at_death`` when this process dies."""
    parent = os.getpid()
    libc()

    def in_child() -> None:
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # without a handler the signal would end a program
        pages.ignore_stop_signal(environment)
        die_with_parent(number=at_death)
        if os.getppid() != parent:  # it died before
            os.kill(os.getpid(), at_death)

    return subprocess.Popen(
        list(argv), env=dict(environment), cwd=folder, preexec_fn=in_child, start_new_session=new_session  # noqa: PLW1509
    )  # fmt: skip


def _after(torchrun: subprocess.Popen[bytes] | None, code: int, within_s: float) -> int:
    """``code``, at once when the rank has failed; otherwise the others of the node may still need torchrun."""
    if torchrun is not None and code in ENDED_WELL:
        with contextlib.suppress(subprocess.TimeoutExpired):
            torchrun.wait(within_s)
    return code


def _path(environment: Mapping[str, str]) -> Path:
    """In the agent's private folder; other attempts and ranks have others."""
    attempt, rank = environment["SLURMFT_ATTEMPT"], environment["RANK"]
    return Path(environment[PAGE_VARIABLE]).parent / f"torchrun-{attempt}-{rank}"


@contextlib.contextmanager
def _listening(environment: Mapping[str, str]) -> Iterator[socket.socket]:
    path = _path(environment)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        yield server
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _connected(environment: Mapping[str, str]) -> Iterator[socket.socket]:
    path, until = str(_path(environment)), time.monotonic() + CONNECT_S
    with socket.socket(socket.AF_UNIX) as holder:
        while True:
            try:
                holder.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        yield holder


def _send_start(stand_in: socket.socket, command: Sequence[str], environment: Mapping[str, str]) -> None:
    start = {"command": runnable(command, environment), "environment": dict(environment), "folder": str(Path.cwd())}
    content = json.dumps(start).encode()
    socket.send_fds(stand_in, [len(content).to_bytes(8, "big")], [1, 2])
    stand_in.sendall(content)


def _receive_start(holder: socket.socket) -> dict[str, Any]:
    """The start, with the rank's own log in the place of torchrun's output."""
    head, descriptors, _, _ = socket.recv_fds(holder, 8, 2)
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    size, content = int.from_bytes(head, "big"), bytearray()
    while len(content) < size:
        if not (part := holder.recv(size - len(content))):
            raise EOFError("the holder is gone")
        content += part
    start: dict[str, Any] = json.loads(content)
    return start


def _exit_code(stand_in: socket.socket) -> int:
    text = b""
    with contextlib.suppress(OSError):
        text = stand_in.recv(64)
    return int(text) if text.strip() else -signal.SIGKILL  # killed before it could report


def runnable(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command as the agent would start it: Python trainers report their stacks, and why they fail."""
    from slurmft.ipc.zygote_start import zygote_arguments  # more than a stand-in needs

    if (arguments := zygote_arguments(command)) is None:
        return list(command)
    told = str(Path(environment[PAGE_VARIABLE]).with_suffix(STACKS_SUFFIX))
    return [sys.executable, "-P", "-m", "slurmft.agent.torchrun", "--trainer", told,
            environment.get(VERDICT_VARIABLE, os.devnull), *arguments]  # fmt: skip


def _train(told: str, verdict: str, arguments: Sequence[str]) -> int:
    from slurmft.agent.zygote import run_python

    pages.arm(Path(told))
    return run_python(arguments, Path(verdict))


def leave_as(code: int) -> NoReturn:
    """End as the rank has ended."""
    sys.stdout.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        time.sleep(1.0)
    os._exit(code & 0xFF)


def main(argv: Sequence[str]) -> NoReturn:
    if argv[:1] == ["--shutdown-timeout"]:
        leave_as(hold(argv[2:], argv[1], os.environ))
    if argv[:1] == ["--trainer"]:
        sys.exit(_train(argv[1], argv[2], argv[3:]))
    leave_as(stand_in(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
