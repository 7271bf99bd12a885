"""The writer's thread for copies: peers and local disk, the newest first, and nobody waits."""

import socket
import threading
from pathlib import Path

import pytest
from made_snapshots import stage
from waiting import until
from worker_variable import worker_variable

from slurmft.checkpoint import writer
from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.memory_sources import scan
from slurmft.checkpoint.replicas import Keeper, local_folder
from slurmft.checkpoint.write_requests import WriteRequest
from slurmft.checkpoint.writer import CopyLane
from slurmft.policy.checkpoints import Tier
from slurmft.storage.checkpoint_names import KEY_FILE, PEERS, Identity, announcement
from slurmft.system.files import write_json


def environment(tmp_path: Path, local_directory: str | None = None, **more: str) -> dict[str, str]:
    return {
        **worker_variable(checkpoint={"peer_copies": 1, "local_directory": local_directory}),
        "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "SLURMFT_ATTEMPT": "1.0.0",
        "SLURMFT_RUN_FOLDER": str(tmp_path), "SLURMFT_MEMORY_DIR": str(tmp_path / "mine"), **more,
    }  # fmt: skip


def offered(tmp_path: Path, step: int) -> WriteRequest:
    index, image = stage(tmp_path / "mine", f"shard-0.{step}", identity=(step, 3, step), size=1000)
    identity = Identity(step, 3, step)
    folder = tmp_path / "checkpoints" / identity.folder_name
    return WriteRequest(identity=identity, shard=0, shards=2, snapshot=index, image=image, folder=folder)


def test_peers_and_the_local_disk_get_it(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / KEY_FILE).write_bytes(b"key")
    (tmp_path / "attempts/1.0.0").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = threading.Thread(target=Keeper(tmp_path / "theirs", listener).serve, daemon=True)
        keeper.start()
        where = {"hosts": ["127.0.0.1"], "port": listener.getsockname()[1]}
        write_json(announcement(tmp_path / "attempts/1.0.0", 1), where, durable=False)
        disk = tmp_path / "local disk"
        lane = CopyLane(environment(tmp_path, local_directory=str(disk)))
        lane.offer(offered(tmp_path, 40))
        until(lane.is_idle, 10)
        listener.shutdown(socket.SHUT_RDWR)
        keeper.join(5)
    assert [one.name for one in holdings_in(tmp_path / "theirs" / PEERS, Tier.PEER)] == [(40, 3, 40)]
    assert [one.name for one in scan(None, local_folder(disk, tmp_path / "checkpoints"))] == [(40, 3, 40)]


def test_of_those_that_wait_the_newest_wins(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    gate, sent = threading.Event(), []

    def slow(index: Path, *_: object, **__: object) -> str:
        sent.append(index.name)
        gate.wait(10)
        if len(sent) == 2:
            raise RuntimeError("a bug")
        return ""

    monkeypatch.setattr(writer, "send_copy", slow)
    lane = CopyLane(environment(tmp_path))
    lane.offer(offered(tmp_path, 1))
    until(lambda: sent, 10)
    for step in (2, 3, 4):
        lane.offer(offered(tmp_path, step))
    assert not lane.is_idle()
    gate.set()
    until(lane.is_idle, 10)
    lane.offer(offered(tmp_path, 5))
    until(lane.is_idle, 10)
    assert sent == ["shard-0.1.json", "shard-0.4.json", "shard-0.5.json"]


@pytest.mark.parametrize("changes", [{"SLURMFT_WORKER": ""}, {"SLURMFT_MEMORY_DIR": ""}])
def test_a_run_without_copies_pays_nothing(tmp_path, changes):
    before = threading.active_count()
    lane = CopyLane(environment(tmp_path, **changes))
    lane.offer(offered(tmp_path, 1))
    assert lane.is_idle()
    assert threading.active_count() == before


def test_what_does_not_work_is_logged(tmp_path, caplog, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(writer, "find_peers", lambda _: [])
    (tmp_path / "a file").write_text("")
    lane = CopyLane(environment(tmp_path, local_directory=str(tmp_path / "a file")))
    lane.offer(offered(tmp_path, 1))
    until(lane.is_idle, 10)
    assert "no copy in" in caplog.text
