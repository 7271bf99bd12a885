"""A process group as strict as NCCL is, and stricter: what hangs on a cluster fails here, and says why.

Ranks are small processes; a referee, a process of its own, sees what each of them does on each communicator:

- one operation at a time on each communicator: what is issued first ends first, and nothing behind it begins
- a send outside of a batch returns only when its receive is posted; a batch happens as a whole
- all ranks issue the same collectives in the same order, of equal types and sizes
- no operation but in the main thread
- "strict" plays NCCL: it refuses what this package itself hands to it, as that lies in main memory
- "strict-host" takes such data: put in the place of gloo it shows that the order alone would do
- where a rank has died, the others wait until their process aborts the group, or is killed
- where all that live wait for each other, each is told so, instead of a hang
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch
import torch.distributed as dist

ADDRESS_VARIABLE = "STRICT_REFEREE"
DEVICE, HOST = "strict", "strict-host"
OF_THE_TRAINER = ("slurmft.worker.session",)
"""Modules of this package whose collectives are DDP's own, of tensors on the device."""


class Violation(RuntimeError):
    """What NCCL would hang in, or do wrong."""


# The referee's side


@dataclass(eq=False)
class Member:
    """One rank's end of one communicator."""

    line: Connection
    process: int
    group: str
    rank: int
    size: int
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    """Operations of the batch, or the one collective, that it waits for."""

    received: dict[int, bytes] = field(default_factory=dict)


class Referee:
    """Matches operations; ``run`` returns when every process of the attempt has gone.

    Args:
        processes: how many ranks the attempt has.
    """

    def __init__(self, address: str, processes: int) -> None:
        self._listener = Listener(address, backlog=64)
        self._processes = processes
        self._members: list[Member] = []
        self._lives: dict[int, Connection] = {}
        self._ended: dict[int, str] = {}

    def run(self) -> None:
        lines: list[Any] = [self._listener._listener._socket]  # type: ignore[attr-defined]
        while len(self._ended) < self._processes:
            for ready in wait(lines):
                if ready is lines[0]:
                    line = self._listener.accept()
                    self._hello(line)
                    lines.append(line)
                    continue
                try:
                    self._take(ready, ready.recv())
                except (EOFError, OSError):
                    lines.remove(ready)
                    self._gone(ready)

    def _hello(self, line: Connection) -> None:
        kind, process, *rest = line.recv()
        if kind == "life":
            self._lives[process] = line
        else:
            self._members.append(Member(line, process, *rest))

    def _gone(self, line: Any) -> None:
        for process, life in self._lives.items():
            if life is line:
                self._ended.setdefault(process, "died")
                self._look_for_deadlock()
        self._members = [one for one in self._members if one.line is not line]

    def _take(self, line: Any, message: tuple[Any, ...]) -> None:
        if message[0] == "bye":
            self._ended[message[1]] = "finished"
            return self._look_for_deadlock()
        if message[0] == "abort":
            for one in self._members:
                if one.process == message[1] and one.waiting:
                    self._answer(one, Violation("aborted"))
            return None
        (member,) = [one for one in self._members if one.line is line]
        member.waiting, member.received = list(message[1]), {}
        self._match([one for one in self._members if one.group == member.group])
        return self._look_for_deadlock()

    def _match(self, members: list[Member]) -> None:
        by_rank = {one.rank: one for one in members}
        for sender in members:
            for operation in list(sender.waiting):
                if operation[0] == "send":
                    self._deliver(sender, operation, by_rank.get(operation[1]))
        collective = [one for one in members if one.waiting and one.waiting[0][0] not in ("send", "recv")]
        if collective and len(collective) == collective[0].size:
            self._collective(sorted(collective, key=lambda one: one.rank))

    def _deliver(self, sender: Member, operation: tuple[Any, ...], target: Member | None) -> None:
        wanted = ("recv", sender.rank)
        found = next((one for one in target.waiting if one[:2] == wanted), None) if target is not None else None
        if target is None or found is None:
            return
        sender.waiting.remove(operation)
        target.waiting.remove(found)
        if operation[3] != found[3]:
            problem = Violation(f"rank {sender.rank} sends {operation[3]} and {target.rank} expects {found[3]}")
            self._answer(sender, problem)
            self._answer(target, problem)
            return
        target.received[found[2]] = operation[4]
        for one in (sender, target):
            if not one.waiting:
                self._answer(one, one.received)

    def _collective(self, members: list[Member]) -> None:
        said = [one.waiting[0][:-1] for one in members]
        if any(one != said[0] for one in said):
            problem = Violation(f"ranks differ: {dict(enumerate(said))}")
            for one in members:
                self._answer(one, problem)
            return
        kind, about, _ = said[0]
        data = [one.waiting[0][-1] for one in members]
        if kind == "allreduce":
            outcome: Any = _reduced(data, *about)
        else:
            outcome = data[about] if kind == "broadcast" else data
        for one in members:
            self._answer(one, outcome)

    def _answer(self, member: Member, outcome: Any) -> None:
        member.waiting = []
        with contextlib.suppress(OSError):
            member.line.send(outcome)

    def _look_for_deadlock(self) -> None:
        """Where a rank has died, the others wait for it; where none has, one that waits for ever is told."""
        if "died" in self._ended.values() or len(self._lives) < self._processes:
            return
        living = {process for process in self._lives if process not in self._ended}
        waiting = [one for one in self._members if one.waiting]
        if living and {one.process for one in waiting} >= living:
            what = {one.rank: [operation[:2] for operation in one.waiting] for one in waiting}
            for one in waiting:
                self._answer(one, Violation(f"every rank waits for another one: {what}"))


def _reduced(data: list[list[bytes]], dtypes: tuple[str, ...], how: str) -> list[bytes]:
    sums = []
    for place, name in enumerate(dtypes):
        dtype = getattr(torch, name)
        parts = [torch.frombuffer(bytearray(one[place]), dtype=dtype) for one in data if one[place]]
        if not parts:
            sums.append(b"")
            continue
        whole = parts[0].clone()
        for part in parts[1:]:  # in the order of ranks, so that every run sums alike
            whole = torch.maximum(whole, part) if how == "MAX" else whole + part
        sums.append(_raw(whole / len(parts) if how == "AVG" else whole))
    return sums


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _fill(tensor: torch.Tensor, raw: bytes) -> None:
    if raw:
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(bytearray(raw), dtype=tensor.dtype).view(tensor.shape))


# The ranks' side


class Done(dist._Work):
    """What is over already."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class StrictGroup(dist.ProcessGroup):
    """One communicator. Each operation returns when it is over."""

    def __init__(self, store: Any, rank: int, size: int, *, takes_host_data: bool) -> None:
        super().__init__(rank, size)
        if rank == 0:
            store.set("id", os.urandom(8).hex())
        self._name, self._takes_host_data = store.get("id").decode(), takes_host_data
        self._line = Client(os.environ[ADDRESS_VARIABLE])
        self._line.send(("member", os.getpid(), self._name, rank, size))
        self._place = rank
        self._is_busy = threading.Lock()

    def getBackendName(self) -> str:
        return HOST if self._takes_host_data else DEVICE

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        how = str(opts.reduceOp).split(".")[-1].strip("<>: 0123456789") if opts is not None else "SUM"
        dtypes = tuple(str(one.dtype).removeprefix("torch.") for one in tensors)
        about = (dtypes, "MAX" if "MAX" in how else "AVG" if "AVG" in how else "SUM")
        outcome = self._do([("allreduce", about, _sizes(tensors), [_raw(one) for one in tensors])])
        for tensor, raw in zip(tensors, outcome, strict=True):
            _fill(tensor, raw)
        return Done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Done:
        outcome = self._do([("broadcast", opts.rootRank, _sizes(tensors), [_raw(one) for one in tensors])])
        for tensor, raw in zip(tensors, outcome, strict=True):
            _fill(tensor, raw)
        return Done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Done:
        outcome = self._do([("allgather", None, _sizes(inputs), [_raw(one) for one in inputs])])
        for place, one in enumerate(outputs[0]):
            _fill(one, outcome[place][0])
        return Done(outputs[0])

    def barrier(self, opts: Any = None) -> Done:
        self._do([("barrier", None, (), [])])
        return Done([])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Done:
        self.batch([("send", peer, tensors[0])])
        return Done(tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Done:
        self.batch([("recv", peer, tensors[0])])
        return Done(tensors)

    def batch(self, operations: list[tuple[str, int, torch.Tensor]]) -> None:
        rows = [
            (kind, peer, number, _sizes([tensor]), _raw(tensor) if kind == "send" else b"")
            for number, (kind, peer, tensor) in enumerate(operations)
        ]
        outcome = self._do(rows)
        for number, (kind, _, tensor) in enumerate(operations):
            if kind == "recv":
                _fill(tensor, outcome[number])

    def abort(self) -> None:
        LIFE[0].send(("abort", os.getpid()))

    def _do(self, rows: list[tuple[Any, ...]]) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise _noted(f"{rows[0][0]} in the thread {threading.current_thread().name}")
        if not self._takes_host_data and (module := _asked_by()).startswith("slurmft."):
            raise _noted(f"{module} gives {rows[0][0]} of data in main memory to the group that plays NCCL")
        if not self._is_busy.acquire(blocking=False):
            raise _noted(f"{rows[0][0]} while another operation of this communicator is under way")
        try:
            self._line.send(("do", rows))
            outcome = self._line.recv()
        finally:
            self._is_busy.release()
        if isinstance(outcome, Violation):
            raise _noted(str(outcome)) if str(outcome) != "aborted" else outcome
        return outcome


LIFE: list[Connection] = []
"""This process's line to the referee: it ends with the process."""

VIOLATIONS: list[str] = []
"""What this rank has done wrong; also where something has caught the exception."""


def _noted(problem: str) -> Violation:
    VIOLATIONS.append(problem)
    return Violation(problem)


def _sizes(tensors: list[torch.Tensor]) -> tuple[tuple[str, int], ...]:
    return tuple((str(one.dtype), one.numel()) for one in tensors)


def _asked_by() -> str:
    """The module that has called torch for this operation."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] not in ("torch", "contextlib"):
            return "" if name in OF_THE_TRAINER else name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def install() -> None:
    """In a rank, before its session: make both backends known to torch."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    life = Client(os.environ[ADDRESS_VARIABLE])
    life.send(("life", os.getpid()))
    LIFE[:] = [life]
    VIOLATIONS.clear()
    for name, takes in ((DEVICE, False), (HOST, True)):

        def create(store: Any, rank: int, size: int, _timeout: Any, takes: bool = takes) -> StrictGroup:
            return StrictGroup(store, rank, size, takes_host_data=takes)

        dist.Backend.register_backend(name, create, devices=["cpu"])
    batched: Callable[..., Any] = dist.batch_isend_irecv

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group
        if not isinstance(group, StrictGroup):
            return batched(operations)
        group.batch([("send" if one.op is dist.isend else "recv", one.peer, one.tensor) for one in operations])
        return []

    dist.batch_isend_irecv = batch  # type: ignore[assignment]


def leave() -> None:
    """In a rank that ends as it should: the others need not wait for it."""
    LIFE[0].send(("bye", os.getpid()))


# The conductor's side: torch is imported once, and ranks are forked


@contextlib.contextmanager
def refereed(address: str, processes: int) -> Iterator[None]:
    """A referee for one attempt of so many ranks."""
    os.environ[ADDRESS_VARIABLE] = address
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        referee = Referee(address, processes)
        os.write(tell, b"!")
        with contextlib.suppress(KeyboardInterrupt):
            referee.run()
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def forked(work: Callable[[int], None], ranks: int, setting: Callable[[int], dict[str, str]]) -> list[int]:
    """One child for each rank, with its environment; it ends when ``work(rank)`` returns. Returns their ids."""
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.environ |= setting(rank)
                install()
                work(rank)
                code = 3 if VIOLATIONS else 0
                if VIOLATIONS:
                    sys.stderr.write(f"rank {rank}: {VIOLATIONS}\n")
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:  # noqa: BLE001 - a rank that fails says why, whatever it was
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    leave()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids
