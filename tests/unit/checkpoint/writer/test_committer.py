"""The thread that commits, on receipts that lie there: what it reads of them, and when it writes torch's own index."""

from __future__ import annotations

import itertools
import json
import select
import threading
import time

import pytest
import stored_state
import torch

from slurmft.checkpoint.catalog import read_entry
from slurmft.checkpoint.format.dcp_metadata import METADATA_FILE, metadata_bytes
from slurmft.checkpoint.format.flat_state import FlatState
from slurmft.checkpoint.format.shard_index import image_file, index_file, read_index
from slurmft.checkpoint.verify import verify
from slurmft.checkpoint.writer import committer
from slurmft.checkpoint.writer.committer import CommitLane
from slurmft.checkpoint.writer.progress_page import ProgressPage
from slurmft.checkpoint.writer.write_requests import CommitOrder, WriteRequest
from slurmft.checkpoint.writer.writer_task import Outbox, Task

SHARDS = 20
WAIT_S = 30.0


def receipts(folder) -> list:
    """Of a state that all ranks have; the indexes."""
    tensors = {f"model.{n}": torch.full((n + 1,), float(n)) for n in range(30)}
    for shard in range(SHARDS):
        memory, index = stored_state.stage(FlatState(tensors=tensors), shard=shard, shards=SHARDS)
        stored_state.write(folder, memory, index)
    return [read_index(folder / index_file(shard)) for shard in range(SHARDS)]


def committed(folder) -> list[dict]:
    """The reports until the newest says that old checkpoints were looked at."""
    outbox, lane = Outbox(), CommitLane(ProgressPage.new())
    request = WriteRequest(
        identity=stored_state.IDENTITY, shard=0, shards=SHARDS, snapshot=folder / "no", image=folder / "no",
        folder=folder, commit=CommitOrder(),
    )  # fmt: skip
    lane.add(Task(request, outbox))
    threading.Thread(target=lane.run, daemon=True).start()
    reports, deadline = list[dict](), time.monotonic() + WAIT_S
    while not (lane.is_idle() and reports and reports[-1]["kind"] in ("pruned", "failed")):
        assert time.monotonic() < deadline, reports
        select.select([outbox.wake], [], [], 0.01)
        reports += map(json.loads, outbox.take().splitlines())
    return reports


@pytest.mark.parametrize(
    ("before", "later", "is_named", "is_there"),
    [
        pytest.param(1 << 20, 1 << 20, True, True, id="small: before the commit"),
        pytest.param(0, 1 << 20, False, True, id="larger: after it"),
        pytest.param(0, 0, False, False, id="too large: not at all"),
    ],
)
def test_metadata(tmp_path, monkeypatch, before, later, is_named, is_there):
    monkeypatch.setattr(committer, "METADATA_BYTES", before)
    monkeypatch.setattr(committer, "LATER_METADATA_BYTES", later)
    folder = tmp_path / stored_state.IDENTITY.folder_name
    indexes = receipts(folder)
    assert [report["kind"] for report in committed(folder)] == ["committed", "pruned"]
    entry = read_entry(folder)
    assert entry.world_size == SHARDS
    expected = {name for shard in range(SHARDS) for name in (image_file(shard), index_file(shard))}
    assert entry.files.keys() == (expected | {METADATA_FILE} if is_named else expected)
    assert verify(entry) == []
    path = folder / METADATA_FILE
    assert path.exists() == is_there
    if is_there:
        assert path.read_bytes() == metadata_bytes(indexes)


@pytest.fixture(params=["one thread", "many"], autouse=True)
def readers(request, monkeypatch) -> None:
    """Receipts of a filesystem that answers at once, and of one that lets readers wait."""
    waits = itertools.count(step=1000 if request.param == "many" else 0)
    monkeypatch.setattr(committer, "_PROBED", 4)
    monkeypatch.setattr(committer, "_waits", lambda: next(waits))


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda raw: raw[: len(raw) // 2], "is not the index of a shard"),
        (lambda raw: raw.replace(b'"shards": 20', b'"shards": 21'), "is not of this save"),
        (lambda raw: raw.replace(b'"identity": [7', b'"identity": [8'), "is not of this save"),
    ],
)
def test_a_receipt_that_is_none_is_never_committed(tmp_path, monkeypatch, limit, spoil, text):
    monkeypatch.setattr(committer, "METADATA_BYTES", limit)
    folder = tmp_path / stored_state.IDENTITY.folder_name
    receipts(folder)
    path = folder / index_file(17)
    path.write_bytes(spoil(path.read_bytes()))
    newest = committed(folder)[-1]
    assert newest["kind"] == "failed"
    assert text in newest["text"]
    assert read_entry(folder) is None
