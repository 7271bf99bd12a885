"""Four ranks train a model that is spread over some of them, fail in the middle of step 7, and begin anew.

    python hsdp_life.py ROOT CASES

``CASES`` is a list in JSON of ``Case``s. Each rank leaves ``ROOT/<case>/report-<rank>.json`` behind. A checkpoint is
saved after step 4. Ranks "die" by leaving without a word; the others keep what they have from within a forward pass,
when FSDP has put whole weights into the places of its parts.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from listener import Listener
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from waiting import until

from slurmft.checkpoint import CheckpointManager, just_in_time, write_requests
from slurmft.checkpoint.notes import BoundaryNotes
from slurmft.checkpoint.state import Trainee, capture
from slurmft.trainer.savers import SAVERS

RANKS, SAVED_AT, FAILS_IN, UNTIL = 4, 4, 7, 9


@dataclass(frozen=True)
class Case:
    """One failure."""

    name: str
    mesh: list[Any]
    """Of ranks: replicas by shards, or shards alone."""

    per_node: int = 2
    dead: list[int] = field(default_factory=list)
    lost_node: int = -1
    """Whose memory is gone at the restart."""

    sends_notes: bool = False
    """Each node has the other's notes, as ``checkpoint.peer_copies`` brings them there."""

    is_through: list[int] = field(default_factory=list)
    """Ranks that have completed the step in which the others fail."""

    fails: bool = True
    optimizer: str = "foreach"
    ranks: int = RANKS
    shrinks: bool = False
    """The restart has half of the ranks: the shards of one replica."""

    again: bool = False
    """The restart dies before anything of its own is durable."""

    full_node: int = -1
    """Which has no memory when its ranks keep their parts."""

    dies_copying: int = -1
    """The rank that is killed in the middle of keeping its part."""

    late: int = -1
    """The rank that ends the step only when another one of its node has begun to keep its part."""

    stale: list[int] = field(default_factory=list)
    """Ranks that have kept the last complete step before all went back to the checkpoint, and on to it again."""


class Net(nn.Module):
    """With all that makes it hard: odd sizes, a frozen weight, one that is not spread, buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 10)
        self.norm = nn.BatchNorm1d(10)
        self.narrow = nn.Linear(10, 1, bias=False)  # one row: only one rank has a part
        self.frozen = nn.Parameter(torch.randn(10), requires_grad=False)
        self.free = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.inside = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.wide(x).float(), 0.1)
        self.inside()
        return self.narrow(self.norm(hidden) + self.frozen) * self.free.detach().sum()


class Leave(Exception):
    """A rank ends in the middle of a step."""


just_in_time.LATE_S = 10.0  # a rank that ends its step later on a machine that others load is no dead one


class Life:
    """One rank in one attempt."""

    def __init__(self, root: Path, case: Case, rank: int) -> None:
        self.root, self.case, self.rank = root, case, rank
        self.is_missed = root / "a note was looked for and not found"
        self.listener = SAVERS.listener = Listener()
        names = ("replicate", "shard") if isinstance(case.mesh[0], list) else ("shard",)
        mesh = DeviceMesh("cpu", case.mesh, mesh_dim_names=names)
        torch.manual_seed(1)
        self.model = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.model.wide, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, ignored_params={self.model.free})
        kinds = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
        self.optimizer = torch.optim.AdamW(
            [one for one in self.model.parameters() if one.requires_grad and one is not self.model.free],
            lr=0.01, **kinds[case.optimizer],
        )  # fmt: skip
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.totals = {"seen": 0}
        self.manager = CheckpointManager(root / "checkpoints", extra=lambda: dict(self.totals))

    def load(self) -> Any:
        torch.manual_seed(77)
        loaded = self.manager.load_latest(self.model, self.optimizer, scheduler=self.schedule)
        self.totals = {"seen": loaded.extra.get("seen", 0)}
        if not loaded.found:
            torch.manual_seed(100 + self.rank)
        return loaded

    def step(self, number: int) -> None:
        loss = self.model(torch.randn(6, 7)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.case.is_through and number == FAILS_IN and self.rank not in self.case.is_through:
            self.keep()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.totals["seen"] += 6
        if self.rank == self.case.late and number == FAILS_IN:
            until(self.is_missed.exists, what="another rank keeps its part")
        SAVERS.at_boundary(number)

    def keep(self) -> None:
        has_come = self.root / "the copy that is not finished"
        if self.rank == self.case.dies_copying:
            os.environ |= {write_requests.VARIABLE: "half staged=kill", write_requests.ONCE_VARIABLE: str(has_come)}
        elif self.case.dies_copying >= 0:
            until(has_come.exists, what="a rank is killed in its copy")
        if self.rank // self.case.per_node == self.case.full_node:
            os.environ[write_requests.VARIABLE] = f"slot emptied={errno.ENOSPC}"
        if self.rank not in self.case.dead:
            if self.case.late >= 0:
                self.tell_of_looks()
            SAVERS.rescue()
        raise Leave

    def tell_of_looks(self) -> None:
        """Leave a file behind once the late rank's note was looked for, and not found."""
        look = BoundaryNotes._own_state

        def looked(notes: BoundaryNotes, rank: int, step: int) -> dict[str, Any] | None:
            state = look(notes, rank, step)
            if rank == self.case.late and state is None:
                self.is_missed.touch()
            return state

        BoundaryNotes._own_state = looked

    def run(self, start: int) -> None:
        for number in range(start + 1, UNTIL + 1):
            if number == FAILS_IN + 1 and self.case.is_through:
                self.keep()
            if number == FAILS_IN and self.case.fails and not self.case.is_through:
                self.model.inside = self.keep
            self.step(number)
            if number == SAVED_AT:
                self.manager.save(self.model, self.optimizer, step=number, scheduler=self.schedule, async_save=False)
            if number == FAILS_IN - 1 and self.case.stale:
                self.go_back(number)

    def go_back(self, number: int) -> None:
        """A trainer that has caught an error, and loads the checkpoint: the same step is another one afterwards."""
        dist.barrier()  # all have noted the end of the step
        if self.rank in self.case.stale:
            SAVERS.rescue()
        dist.barrier()
        self.manager.load_latest(self.model, self.optimizer, scheduler=self.schedule)
        torch.manual_seed(1000 + self.rank)
        for step in range(SAVED_AT + 1, number + 1):
            self.step(step)

    def digest(self, *, is_own: bool = True) -> str:
        """Of all values, and of what is this rank's own."""
        flat, digest = capture(Trainee(self.model, self.optimizer, scheduler=self.schedule), None, rank=self.rank), []
        for key, value in sorted(flat.tensors.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0 or key not in flat.of_lead:  # buffers are rank 0's
                digest.append((key, hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()))
        if not is_own:
            return hashlib.sha256(repr(digest).encode()).hexdigest()
        digest.append(("random", hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()))
        digest.append(("totals", str(self.totals) if self.rank == 0 else ""))
        return hashlib.sha256(repr(digest).encode()).hexdigest()


def live(root: Path, case: Case, rank: int, attempt: int) -> None:
    node = rank // case.per_node
    memory = root / f"memory-{node}"
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_RANK": str(rank % case.per_node),
        "LOCAL_WORLD_SIZE": str(case.per_node), "SLURMFT_MEMORY_DIR": str(memory), "SLURMFT_GENERATION": str(attempt),
    }  # fmt: skip
    torch.set_num_threads(1)
    meeting = f"file://{root}/meeting-{attempt}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=case.ranks, timeout=timedelta(seconds=60)
    )
    life = Life(root, case, rank)
    loaded = life.load()
    report = {"step": loaded.step, "source": loaded.source, "values": life.digest(is_own=False)}
    try:
        if attempt == 2 and case.again:
            dist.barrier()
            raise Leave
        life.run(loaded.step)
    except Leave:
        reason = getattr(life.manager._rescue, "reason", "")
        report |= {"kept": life.listener.rescued, "part": life.listener.part, "reason": reason}
    else:
        report["digest"] = life.digest()
        life.manager.wait()
    (root / f"report-{attempt}-{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def attempt_of(root: Path, case: Case, attempt: int) -> None:
    children = []
    if attempt > 1:
        case = replace(case, fails=False, is_through=[], stale=[], dies_copying=-1, late=-1)
        case = replace(case, ranks=2, mesh=[0, 1]) if case.shrinks else case
    for rank in range(case.ranks):
        if not (child := os.fork()):
            try:
                live(root, case, rank, attempt)
            finally:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    expected = [signal.SIGKILL if rank == case.dies_copying else 0 for rank in range(case.ranks)]
    assert ends == expected, (case.name, attempt)


def main(root: Path, cases: list[Case]) -> None:
    torch.optim.AdamW(Net().parameters())  # imports what is slow
    for case in cases:
        folder = root / case.name
        folder.mkdir()
        for node in range(RANKS // case.per_node):
            (folder / f"memory-{node}").mkdir(mode=0o700)
            (folder / f"memory-{node}" / "copies.key").write_bytes(b"k" * 64)
        attempt_of(folder, case, 1)
        if not case.fails and not case.is_through:
            continue
        if case.sends_notes:
            for one, other in ((0, 1), (1, 0)):
                (folder / f"memory-{other}" / "peers").mkdir(mode=0o700)
                for note in (folder / f"memory-{one}").glob("*.record"):
                    shutil.copy(note, folder / f"memory-{other}" / "peers")
        if case.lost_node >= 0:
            lost = folder / f"memory-{case.lost_node}"
            for path in lost.glob("*"):
                if path.name != "copies.key":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for attempt in (2, 3) if case.again else (2,):
            attempt_of(folder, case, attempt)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**one) for one in json.loads(sys.argv[2])])
