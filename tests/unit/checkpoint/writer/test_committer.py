"""The thread that commits, on receipts that lie there: what it reads of them, and when it writes torch's own index."""

import itertools
import json
import select
import threading
import time
from dataclasses import replace

import pytest
import stored_state
import torch
from waiting import slowness

from slurmft.checkpoint import writer
from slurmft.checkpoint.catalog import METADATA_FILE, metadata_bytes, read_entry, verify
from slurmft.checkpoint.image_file import image_file, index_file, read_index
from slurmft.checkpoint.state import FlatState
from slurmft.checkpoint.write_requests import CommitOrder, ProgressPage, WriteRequest
from slurmft.checkpoint.writer import CommitLane, Outbox, Task
from slurmft.system.files import write_json

SHARDS = 20
WAIT_S = 30.0


def receipts(folder) -> list:
    """Of a state that all ranks have; the indexes."""
    tensors = {f"model.{n}": torch.full((n + 1,), float(n)) for n in range(30)}
    for shard in range(SHARDS):
        memory, index = stored_state.stage(FlatState(tensors=tensors), shard=shard, shards=SHARDS)
        stored_state.write(folder, memory, index)
    return [read_index(folder / index_file(shard)) for shard in range(SHARDS)]


def committed(folder, prepare=lambda lane: None) -> list[dict]:
    """The reports until the newest says that old checkpoints were looked at."""
    outbox, lane = Outbox(), CommitLane(ProgressPage.new())
    request = WriteRequest(
        identity=stored_state.IDENTITY, shard=0, shards=SHARDS, snapshot=folder / "no", image=folder / "no",
        folder=folder, commit=CommitOrder(),
    )  # fmt: skip
    lane.add(Task(request, outbox))
    prepare(lane)
    threading.Thread(target=lane.run, daemon=True).start()
    reports, deadline = list[dict](), time.monotonic() + WAIT_S
    while not (
        lane.is_idle()
        and reports
        and (reports[-1]["kind"] == "pruned" or (reports[-1]["kind"] == "failed" and reports[-1]["final"]))
    ):
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
    monkeypatch.setattr(writer, "METADATA_BYTES", before)
    monkeypatch.setattr(writer, "LATER_METADATA_BYTES", later)
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
    monkeypatch.setattr(writer, "_PROBED", 4)
    monkeypatch.setattr(writer, "_waits", lambda: next(waits))


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
    monkeypatch.setattr(writer, "METADATA_BYTES", limit)
    folder = tmp_path / stored_state.IDENTITY.folder_name
    receipts(folder)
    path = folder / index_file(17)
    path.write_bytes(spoil(path.read_bytes()))
    newest = committed(folder)[-1]
    assert newest["kind"] == "failed"
    assert text in newest["text"]
    assert read_entry(folder) is None


def incomplete(folder) -> None:
    """Rank 3 has not written its part."""
    receipts(folder)
    for name in (image_file(3), index_file(3)):
        (folder / name).unlink()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_without_its_worker_a_save_is_left_when_nobody_writes_any_more(tmp_path, monkeypatch, where):
    monkeypatch.setattr(writer, "STILL_S" if where == "here" else "STILL_ELSEWHERE_S", 0.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(SHARDS if where == "here" else SHARDS - 1))
    folder = tmp_path / stored_state.IDENTITY.folder_name
    incomplete(folder)
    began = time.monotonic()
    [report] = committed(folder, CommitLane.left_alone)
    assert report["kind"] == "failed" and report["final"] and "have not written" in report["text"]
    assert time.monotonic() - began < 9.0 * slowness()
    assert not folder.exists()


@pytest.mark.parametrize("writes", ["into the same save", "into an older one"])
def test_without_its_worker_a_save_waits_for_whoever_writes(tmp_path, monkeypatch, writes):
    monkeypatch.setattr(writer, "STILL_S", 2.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(SHARDS))
    folder = tmp_path / stored_state.IDENTITY.folder_name
    older = tmp_path / stored_state.IDENTITY._replace(step=1).folder_name
    receipts(folder)
    older.mkdir()
    (folder / index_file(3)).rename(tmp_path / "receipt")

    def write() -> None:
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            with (folder if writes == "into the same save" else older).joinpath(".part.tmp").open("ab") as file:
                file.write(b"more")
            time.sleep(0.1)
        (tmp_path / "receipt").rename(folder / index_file(3))

    thread = threading.Thread(target=write)
    thread.start()
    assert "committed" in [report["kind"] for report in committed(folder, CommitLane.left_alone)]
    thread.join()


def test_without_its_worker_a_save_is_left_to_a_newer_attempt(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints" / stored_state.IDENTITY.folder_name
    folder.parent.mkdir()
    incomplete(folder)
    write_json(tmp_path / "owner.json", {"generation": 8})
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    [report] = committed(folder, CommitLane.left_alone)
    assert report["fenced"] and report["final"] and folder.exists()


def test_what_a_stop_waits_for_is_committed_first(tmp_path, monkeypatch):
    identities = [stored_state.IDENTITY._replace(step=step, commit=step) for step in (1, 2, 3)]
    outbox, lane = Outbox(), CommitLane(ProgressPage.new())
    for identity in identities:
        folder = tmp_path / identity.folder_name
        memory, index = stored_state.stage(FlatState(tensors={"w": torch.ones(3)}))
        stored_state.write(folder, memory, replace(index, identity=identity))
        request = WriteRequest(identity=identity, shard=0, shards=1, snapshot=folder, image=folder, folder=folder,
                               commit=CommitOrder(), urgent=identity.step == 3)  # fmt: skip
        lane.add(Task(request, outbox))
    threading.Thread(target=lane.run, daemon=True).start()
    deadline, ends = time.monotonic() + WAIT_S, list[tuple[int, str]]()
    while len(ends) < 3:
        assert time.monotonic() < deadline, ends
        select.select([outbox.wake], [], [], 0.01)
        reports = map(json.loads, outbox.take().splitlines())
        ends += [(report["identity"][0], report["kind"]) for report in reports if report["final"]]
    assert ends == [(3, "committed"), (1, "superseded"), (2, "superseded")]
