"""Journeys of a run on process groups as strict as NCCL: ``python strict_journeys.py FOLDER RANKS``.

One process imports torch, and forks the ranks of every attempt: each is a node of its own, with a memory folder that
outlives it. It plays the agent as well: pages, the question for the last step, and the kill.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_snapshots
import strict_group
import torch
import torch._dynamo  # what building an optimizer imports: here once, and not in every rank
import torch.distributed as dist
from torch import nn
from waiting import until
from worker_variable import worker_variable

from slurmft.checkpoint import CheckpointManager, memory_sources
from slurmft.checkpoint.memory_sources import from_rows, scan, to_row
from slurmft.ipc.pages import PAGE_VARIABLE, RESCUE_SUFFIX, Page, Slot
from slurmft.policy.checkpoints import choose_snapshot
from slurmft.storage.checkpoint_names import KEY_FILE
from slurmft.trainer import savers
from slurmft.trainer.savers import Team
from slurmft.worker.digests import weights_digest
from slurmft.worker.session import abort_device_groups, start_session

STEPS, DIES_AT = 6, 4
PATIENCE_S = 60.0

Work = Callable[[int], None]


def main(root: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for backend in ("gloo", strict_group.HOST):
        with Place(root / f"exchange-{backend}", ranks, backend) as place:
            place.attempt(everything_travels, ranks)
            report[f"exchange-{backend}"] = place.reports(ranks)
    with Place(root / "undisturbed", ranks) as place:
        place.attempt(train, ranks)
        report["undisturbed"] = place.reports(ranks)
    with Place(root / "killed", ranks) as place:
        place.attempt(train, ranks, dies=ranks - 1)
        place.attempt(train, ranks)
        report["killed"] = place.reports(ranks)
    with Place(root / "node lost", ranks) as place:
        place.attempt(train, ranks, dies=ranks - 1)
        place.empty(ranks - 1)
        place.attempt(train, ranks)
        report["node lost"] = place.reports(ranks)
    smaller = max(1, ranks // 2)
    with Place(root / "shrinks and grows", ranks) as place:
        place.attempt(train, ranks, until=2)
        place.attempt(train, smaller, until=4)
        report["shrunk"] = place.reports(smaller)
        place.attempt(train, ranks, until=STEPS)
        report["grown"] = place.reports(ranks)
    with Place(root / "abort", ranks) as place:
        place.attempt(aborts, ranks, dies=ranks - 1)
        report["abort"] = place.reports(ranks - 1)
    for fault in (without_a_batch, host_data_over_nccl, in_a_thread, in_another_order):
        with Place(root / fault.__name__, ranks, strict_group.HOST) as place:
            place.attempt(lambda rank, fault=fault: wrongly(rank, fault), ranks)  # type: ignore[misc]
            report[fault.__name__] = place.reports(ranks)
    (root / "report.json").write_text(json.dumps(report))


class Place:
    """One run: its folders, and its attempts one after the other."""

    def __init__(self, root: Path, ranks: int, host_backend: str = "gloo") -> None:
        self.root, self.generation, self._host_backend = root, 0, host_backend
        self.root.mkdir()
        for rank in range(ranks):
            self.memory(rank).mkdir()
            (self.memory(rank) / KEY_FILE).write_bytes(b"k" * 64)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def memory(self, rank: int) -> Path:
        return self.root / f"memory-{rank}"

    def empty(self, rank: int) -> None:
        for path in self.memory(rank).iterdir():
            if path.name != KEY_FILE:
                path.unlink()

    def attempt(self, work: Work, ranks: int, *, dies: int | None = None, until: int = STEPS) -> None:
        """One attempt; where a rank dies, the others are asked to keep their state, and killed."""
        self.generation += 1
        address = str(self.root / f"referee-{self.generation}")
        pages = [
            Page.create(self.root / f"rank-{rank}", rank=rank, generation=self.generation) for rank in range(ranks)
        ]

        def setting(rank: int) -> dict[str, str]:
            return {
                "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1",
                "GROUP_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
                PAGE_VARIABLE: str(self.root / f"rank-{rank}"), "SLURMFT_MEMORY_DIR": str(self.memory(rank)),
                "SLURMFT_CHECKPOINT_DIR": str(self.root / "checkpoints"), "SLURMFT_GENERATION": str(self.generation),
                **worker_variable(checkpoint={"interval_steps": 3}, backend=strict_group.DEVICE,
                                  init_timeout_minutes=1, step_timeout_minutes=1),
                "OMP_NUM_THREADS": "1",
                "DIES": str(int(rank == dies)), "UNTIL": str(until), "PLACE": str(self.root),
            }  # fmt: skip

        def run(rank: int) -> None:
            errors = os.open(self.root / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(errors, 2)
            savers.BACKEND = self._host_backend
            work(rank)

        self._port = free_port()
        with strict_group.refereed(address, ranks):
            pids = strict_group.forked(run, ranks, setting)
            try:
                if dies is not None:
                    os.waitpid(pids[dies], 0)
                    del pids[dies], pages[dies]
                    if work is train:
                        self._rescue(pages)
                        for pid in pids:
                            os.kill(pid, signal.SIGKILL)
                        for pid in pids:
                            os.waitpid(pid, 0)
                        return
                codes = [ended(pid) for pid in pids]
            except BaseException:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                raise
        assert codes == [0] * len(codes), self._said(codes)

    def _said(self, codes: list[int]) -> str:
        """What the ranks that failed have written."""
        errors = {rank: (self.root / f"errors-{rank}").read_text()[-3000:] for rank, code in enumerate(codes) if code}
        told = "".join(f"\n---- rank {rank} ended with {codes[rank]}:\n{said}" for rank, said in errors.items())
        return f"{self.root.name}, attempt {self.generation}: {codes}{told}"

    def _rescue(self, pages: list[Page]) -> None:
        """As ``agent.agent``: ask those that wait, and return when each has kept its state."""
        until(lambda: pages[0][Slot.DURABLE] == 3, what="step 3 is durable")
        until(lambda: all(page[Slot.RESCUABLE] == DIES_AT for page in pages), what="the others have the last step")
        for page in pages:
            pipe = (self.root / f"rank-{page[Slot.RANK]}").with_suffix(RESCUE_SUFFIX)
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"!")
            os.close(descriptor)
        until(lambda: all(page[Slot.RESCUED] == DIES_AT for page in pages), what="they have kept it")

    def reports(self, ranks: int) -> list[Any]:
        return [json.loads((self.root / f"report-{rank}.json").read_text()) for rank in range(ranks)]


def tell(rank: int, found: Any) -> None:
    Path(os.environ["PLACE"], f"report-{rank}.json").write_text(json.dumps(found))


def train(rank: int) -> None:
    """A session with DDP, over the group that plays NCCL; saves every three steps."""
    dies, until_step = os.environ["DIES"] == "1", int(os.environ["UNTIL"])
    with start_session(seed=rank) as session:
        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        torch.manual_seed(rank)
        model = session.distributed(plain, lambda wrapped: wrapped(torch.ones(4, 6)).mean())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        checkpoints = CheckpointManager(session.checkpoint_dir)
        loaded = checkpoints.load_latest(model, optimizer)
        begun, digests = parameters_digest(plain), {}

        def save(step: int) -> None:
            checkpoints.save(model, optimizer, step=step)

        for step in session.steps(start=loaded.step, until=until_step, save=save):
            x = torch.randn(4, 6)
            if dies and step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            digests[step + 1] = parameters_digest(plain)
        checkpoints.wait()
        checkpoints.close()
        tell(rank, {"step": loaded.step, "source": loaded.source, "begun": begun, "end": weights_digest(plain),
                    "end_parameters": parameters_digest(plain), "digests": digests})  # fmt: skip


def parameters_digest(model: nn.Module) -> str:
    """Without buffers: each rank has its own until DDP sends rank 0's to all before the next step."""
    return weights_digest(nn.ParameterDict({name.replace(".", "_"): one for name, one in model.named_parameters()}))


def everything_travels(rank: int) -> None:
    """Every node has its own shard, and needs those of all others: each sends and receives in every round."""
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(strict_group.DEVICE)
    memory_sources.CHUNK_BYTES = 64 * 1024
    memory, team = Path(os.environ["SLURMFT_MEMORY_DIR"]), Team()
    made_snapshots.stage(memory, f"shard-{rank}.a", shard=rank, shards=ranks, size=200_000 + 50_000 * rank)
    held = scan(memory, patience_s=0)
    decision = choose_snapshot(from_rows(team.exchange(to_row(held))), None, generation=3)
    mine = {one.index.shard: one for one in held}
    offers = from_rows(team.exchange(to_row(held)))
    lacking = memory_sources.supply(team, decision, offers, mine, wanted=range(ranks), memory=memory, node_lead=rank)
    got = memory_sources.fetched(memory, decision.name)
    tell(rank, {"lacking": len(lacking), "got": sorted(got), "groups": len(dist.distributed_c10d._world.pg_map)})
    dist.barrier(group=savers.host_group())


def aborts(rank: int) -> None:
    """A rank dies, and the others abort their communicators: each gets out of its collective."""
    dist.init_process_group(strict_group.DEVICE)
    dist.barrier()
    if os.environ["DIES"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.3, abort_device_groups).start()
    try:
        dist.all_reduce(torch.ones(3))
        tell(rank, "went on")
    except strict_group.Violation as error:
        tell(rank, str(error))


def wrongly(rank: int, fault: Work) -> None:
    """What the double must find, or it shows nothing.

    The ranks leave together. Some faults end a rank before any other one has to answer, and rank 0 takes the store
    with it, from which a slower rank still reads how to join.
    """
    dist.init_process_group(strict_group.DEVICE)
    try:
        fault(rank)
        dist.all_reduce(torch.ones(1))  # what a fault that only some ranks see leaves behind
        tell(rank, "")
    except strict_group.Violation as error:
        tell(rank, str(error))
    strict_group.VIOLATIONS.clear()
    reports = [Path(os.environ["PLACE"], f"report-{one}.json") for one in range(dist.get_world_size())]
    until(lambda: all(report.exists() for report in reports), what="every rank has said what it found")


def without_a_batch(rank: int) -> None:
    """As the exchange once was: send and receive posted one after the other, both before either is waited for."""
    ranks, piece, room = dist.get_world_size(), torch.ones(5), torch.zeros(5)
    group = savers.host_group()
    works = [dist.isend(piece, (rank + 1) % ranks, group=group), dist.irecv(room, (rank - 1) % ranks, group=group)]
    for work in works:
        work.wait()


def host_data_over_nccl(_rank: int) -> None:
    """A row of integers of this package over the default group."""
    team = Team()
    team._group = None
    tensor = torch.ones(2, dtype=torch.int64)
    exec("dist.all_reduce(tensor)", {"__name__": "slurmft.checkpoint.agreement", "dist": dist, "tensor": tensor})


def in_a_thread(_rank: int) -> None:
    """A collective beside those of the training."""
    found: list[Exception] = []

    def work() -> None:
        try:
            dist.barrier()
        except strict_group.Violation as error:
            found.append(error)

    thread = threading.Thread(target=work, name="beside")
    thread.start()
    thread.join()
    raise found[0]


def in_another_order(rank: int) -> None:
    """Two collectives that one rank issues the other way round."""
    steps = [lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(3), src=0)]
    for step in steps if rank else reversed(steps):
        step()


def ended(pid: int) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
