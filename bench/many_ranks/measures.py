"""One measurement in a process of its own, so that its memory is its own: prints seconds and MiB as JSON."""

from __future__ import annotations

import json
import resource
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmft.storage.checkpoint_names import Identity

IDENTITY = Identity(100, 0, 1)
WAIT_S = 600.0


def measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, MiB by which the process grew at most, and the result."""
    before, began = peak_mib(), time.monotonic()
    result = work()
    return time.monotonic() - began, peak_mib() - before, result


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def commit(folder: Path, ranks: int) -> dict[str, Any]:
    """The real thread of rank 0's writer, from when all receipts are there to when the checkpoint exists."""
    from slurmft.checkpoint.write_requests import CommitOrder, ProgressPage, WriteRequest
    from slurmft.checkpoint.writer import CommitLane, Outbox, Task

    outbox, lane = Outbox(), CommitLane(ProgressPage.new())
    request = WriteRequest(identity=IDENTITY, shard=0, shards=ranks, snapshot=folder / "none", image=folder / "none",
                           folder=folder, commit=CommitOrder())  # fmt: skip

    def work() -> str:
        lane.add(Task(request, outbox))
        threading.Thread(target=lane.run, daemon=True).start()
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            select.select([outbox.wake], [], [], 1.0)
            for line in outbox.take().splitlines():
                kind = json.loads(line)["kind"]
                if kind in ("committed", "failed"):
                    return str(kind)
        return "nothing"

    seconds, mib, kind = measured(work)
    if kind != "committed":
        raise SystemExit(f"the commit of {folder} ended with: {kind}")
    return {"seconds": seconds, "mib": mib, "metadata": (folder / ".metadata").exists()}


def load(folder: Path, kind: str, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank reads of a checkpoint: its marker, the indexes that it needs, and its own values."""
    import torch
    from folders import DENSE_VALUES, VALUES, dense_tensors, spread_tensors

    from slurmft.checkpoint.loading import _believed_entry
    from slurmft.checkpoint.reading import DiskSources, Stored, Target

    dense, keys = dense_tensors(), list(spread_tensors(0))

    def work() -> int:
        sources = DiskSources(_believed_entry(folder))
        share = len(sources) // ranks
        stored = Stored(sources, own=rank)
        if kind == "dense":
            targets = {key: Target(torch.empty(DENSE_VALUES), (0,)) for key in dense}
        else:
            targets = {key: Target(torch.empty(VALUES * share), (VALUES * share * rank,)) for key in keys}
        stored.fill(targets)
        for place, key in enumerate(targets):
            value = targets[key].tensor
            expected = dense[key] if kind == "dense" else torch.arange(share).repeat_interleave(VALUES) + rank * share
            assert torch.equal(value, expected + (0 if kind == "dense" else place)), key
        return len(stored.seen)

    seconds, mib, taken = measured(work)
    return {"seconds": seconds, "mib": mib, "indexes": taken}


def decide(ranks: int, on_node: int) -> dict[str, Any]:
    """From the offers of all nodes' memories to one decision, as every rank computes it."""
    import torch  # noqa: F401 - a rank has it: what is measured comes on top

    from slurmft.checkpoint.memory_sources import ROW_LENGTH, from_rows
    from slurmft.policy.checkpoints import Committed, Tier, choose_snapshot

    row_words = [100, 0, 1, ranks, 1]
    rows = []
    for rank in range(ranks):
        held = [shard + 1 << 2 | Tier.MEMORY for shard in range(rank, rank + on_node)] if rank % on_node == 0 else []
        words = [low | high << 32 for low, high in zip(held[::2], held[1::2], strict=True)]
        row = [*row_words, *words] if held else []
        rows.append(row + [0] * (ROW_LENGTH - len(row)))

    def work() -> object:
        return choose_snapshot(
            from_rows(rows), Committed(name=(90, 0, 0), shards=ranks), generation=1, quarantined=frozenset()
        )

    seconds, mib, decision = measured(work)
    assert decision.name == (100, 0, 1), decision
    return {"seconds": seconds, "mib": mib}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "commit":
        found = commit(Path(rest[0]), int(rest[1]))
    elif what == "load":
        found = load(Path(rest[0]), rest[1], int(rest[2]), int(rest[3]))
    else:
        found = decide(int(rest[0]), int(rest[1]))
    print(json.dumps(found))
