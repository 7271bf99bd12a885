"""What copies of steps cost (``checkpoint.peer_interval: 1``): two ranks, each a node of its own, over loopback.

A step is a pause, as on a host whose GPU computes. Writers and keepers are the real ones, in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from slurmft.policy.worker_settings import WORKER_VARIABLE
from slurmft.storage.checkpoint_names import (
    GENERATION_VARIABLE,
    KEY_FILE,
    MEMORY_VARIABLE,
    RUN_FOLDER_VARIABLE,
    announcement,
)
from slurmft.system.files import write_json

ATTEMPT = "1.0.0"
NEW_PLACES = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank saw."""

    stalls_s: list[float]
    """The training's, for each copy but the first ones, which meet new memory."""

    agreeing_s: list[float]
    """The exchanges alone."""

    whole_s: list[float]
    """From the end of the stall until the peer had it."""

    writer_s: float
    keeper_s: float
    """Processor time for each copy."""

    interval: int
    skipped: int
    made: int
    step_s: float


def measure(size: int, *, step_s: float, seconds: float) -> list[Found]:
    """Train for so long with ``size`` bytes of state on each of two ranks."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="slurmft-bench-"))
    try:
        with _nodes(root) as keepers:
            argv = [sys.executable, __file__, str(root), str(size), str(step_s), str(seconds)]
            ranks = [
                subprocess.Popen([*argv, str(rank), str(keepers[rank])], env=_environment(root, rank), text=True,
                                 stdout=subprocess.PIPE)
                for rank in range(2)
            ]  # fmt: skip
            found = [rank.communicate()[0] for rank in ranks]
            assert all(rank.returncode == 0 for rank in ranks)
        return [Found(**json.loads(text.splitlines()[-1])) for text in found]
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _nodes(root: Path) -> Iterator[list[int]]:
    """The memory folder and the keeper of each node; the keepers' process ids."""
    (root / "attempts" / ATTEMPT).mkdir(parents=True)
    key, keepers = os.urandom(32).hex().encode(), []
    try:
        for rank in range(2):
            memory = root / f"memory-{rank}"
            memory.mkdir(mode=0o700)
            (memory / KEY_FILE).write_bytes(key)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                argv = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas", str(memory)]
                number = listener.fileno()
                keepers.append(subprocess.Popen([*argv, str(number)], pass_fds=[number], stderr=subprocess.DEVNULL))
                where = {"hosts": ["127.0.0.1"], "port": listener.getsockname()[1]}
                write_json(announcement(root / "attempts" / ATTEMPT, rank), where, durable=False)
        yield [keeper.pid for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


def _environment(root: Path, rank: int) -> dict[str, str]:
    settings = {"checkpoint": {"peer_copies": 1, "peer_interval": 1, "just_in_time": False}}
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
               "GROUP_WORLD_SIZE": 2, GENERATION_VARIABLE: 1, "OMP_NUM_THREADS": 1}  # fmt: skip
    return {
        **os.environ, **{name: str(number) for name, number in numbers.items()}, "SLURMFT_ATTEMPT": ATTEMPT,
        RUN_FOLDER_VARIABLE: str(root), MEMORY_VARIABLE: str(root / f"memory-{rank}"),
        WORKER_VARIABLE: json.dumps(settings),
    }  # fmt: skip


def _train(root: Path, size: int, step_s: float, seconds: float, rank: int, keeper: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from slurmft.checkpoint import CheckpointManager
    from slurmft.ipc.pages import Page
    from slurmft.trainer.savers import SAVERS
    from slurmft.worker.saves import PageListener

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2,
                            timeout=timedelta(seconds=60))  # fmt: skip
    SAVERS.listener = PageListener(Page.private())
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(size // 32)) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # as much again: two halves for two ranks
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpoints = CheckpointManager(root / "checkpoints")
    checkpoints.save(model, optimizer, step=1)
    checkpoints.wait()
    steps, places = checkpoints._steps, checkpoints._snapshots.copies
    stalls, agreeing, whole, made, taken = list[float](), list[float](), list[float](), 0, None
    began = time.monotonic()
    writer = psutil.Process(checkpoints._snapshots._writer_process().pid)
    before = None
    for step in range(2, 1_000_000):
        until = time.monotonic() + step_s
        while (left := until - time.monotonic()) > 0:
            if taken is not None and places.ended is not None:
                whole.append(time.monotonic() - taken)
                taken = None
            time.sleep(min(left, 0.002))
        over = torch.tensor(float(time.monotonic() - began > seconds))
        dist.all_reduce(over)  # as the gradients of a step: all ranks get to the boundary together
        if over.item():
            break
        current, at = places.current, time.perf_counter()
        SAVERS.at_boundary(step)
        stall = time.perf_counter() - at
        if places.current is not current:
            made += 1
            taken = time.monotonic()
            if made > NEW_PLACES:
                stalls.append(stall)
            if made == NEW_PLACES:
                before = _processor_s(writer), _processor_s(psutil.Process(keeper))
                whole.clear()
        if steps._spacing is not None and steps._spacing.is_due(step):
            agreeing.append(steps._costs[3] / 1e9)
    copies = max(1, made - NEW_PLACES)
    used = before or (0.0, 0.0)
    found = {
        "stalls_s": stalls, "agreeing_s": agreeing, "whole_s": whole,
        "writer_s": (_processor_s(writer) - used[0]) / copies,
        "keeper_s": (_processor_s(psutil.Process(keeper)) - used[1]) / copies,
        "interval": steps._spacing.interval if steps._spacing is not None else 0, "skipped": steps.skipped,
        "made": steps.made, "step_s": step_s,
    }  # fmt: skip
    dist.barrier()
    checkpoints.close()
    dist.destroy_process_group()
    return found


def _processor_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def floor(size: int) -> tuple[float, float]:
    """Seconds in which this machine copies so many bytes in memory; and hashes them and sends them over loopback."""
    import torch
    import xxhash

    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    torch.set_num_threads(1)
    copied = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    view = memoryview(source.numpy())
    hashed = min(_seconds(lambda: xxhash.xxh3_128(view).digest()) for _ in range(5))
    return copied, hashed + min(_sent_s(view) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _sent_s(view: memoryview) -> float:
    """Plain bytes to another thread, which receives them into memory that is there."""
    room = memoryview(bytearray(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def receive() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv_into(room):
                    pass

        reader = threading.Thread(target=receive)
        reader.start()
        began = time.perf_counter()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(view)
        reader.join()
        return time.perf_counter() - began


HEADER = [
    "| state of a rank | step | stall | memcpy alone | of it agreeing | peers have it after "
    "| hash + plain loopback alone | writer | keeper | at 1 | interval | then | copies, left out | load before |",
    "|" + "---|" * 14,
]


def row(size: int, step_s: float, seconds: float) -> str:
    """One line of the table, of the slower rank."""
    load, ranks = os.getloadavg()[0], measure(size, step_s=step_s, seconds=seconds)
    slower = max(ranks, key=lambda one: statistics.median(one.stalls_s))
    stall, whole = statistics.median(slower.stalls_s), statistics.median(slower.whole_s or [float("nan")])
    copied, sent = floor(size)
    cells = [
        f"{size / 1e6:g} MB", f"{1000 * step_s:g} ms", f"{1000 * stall:.1f} ms", f"{1000 * copied:.1f} ms",
        f"{1000 * statistics.median(slower.agreeing_s):.2f} ms", f"{1000 * whole:.0f} ms", f"{1000 * sent:.0f} ms",
        f"{1000 * slower.writer_s:.0f} ms", f"{1000 * slower.keeper_s:.0f} ms", f"{100 * stall / step_s:.1f} %",
        f"{slower.interval}", f"{100 * stall / step_s / slower.interval:.1f} %", f"{slower.made}, {slower.skipped}",
        f"{load:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """All of it; four minutes."""
    lines = [
        "", "## Copies of every step (`checkpoint.peer_interval: 1`)", "",
        "Two ranks, each a node of its own; a step is a pause, as of a host whose GPU computes. Stall: what the "
        "training waits for (agreeing, and the copy into memory); beside it the same bytes copied alone. Writer "
        "and keeper: processor time for each copy. At 1: stall by step; then: the same at the interval where the "
        "back-off came to rest. Left out: boundaries at which the copy before was still under way. Medians of the "
        f"slower rank, without the first {NEW_PLACES} copies, which meet new memory.", "",
        *HEADER,
    ]  # fmt: skip
    for size, step_s, seconds in ((4, 0.1, 12), (4, 1.0, 20), (64, 0.1, 25), (64, 1.0, 25), (512, 0.1, 60),
                                  (512, 1.0, 60)):  # fmt: skip
        lines.append(row(size * 10**6, step_s, seconds))
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    print(json.dumps(_train(Path(folder), int(numbers[0]), float(numbers[1]), float(numbers[2]), int(numbers[3]),
                            int(numbers[4]))))  # fmt: skip
