"""The writer's thread that copies steps: one after the other, and not for long without its worker."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from made_snapshots import KEY, stage
from waiting import until
from worker_variable import worker_variable

from slurmft.checkpoint.write_requests import WriteRequest, request_from, request_line
from slurmft.checkpoint.writer import Outbox, StepCopyLane, Task
from slurmft.storage.checkpoint_names import KEY_FILE, Identity


@pytest.fixture
def lane(tmp_path: Path) -> StepCopyLane:
    """Of a node whose peer has never said where it listens."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / KEY_FILE).write_bytes(KEY)
    return StepCopyLane(
        {
            **worker_variable(checkpoint={"peer_copies": 1}), "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "SLURMFT_ATTEMPT": "1.0.0", "SLURMFT_RUN_FOLDER": str(tmp_path),
            "SLURMFT_MEMORY_DIR": str(tmp_path / "mine"),
        }
    )  # fmt: skip


def request(tmp_path: Path, step: int, **details: Any) -> WriteRequest:
    index, image = stage(tmp_path / "mine", f"shard-0.{step}", identity=(step, 3, step), size=1000, hashed=False)
    identity = Identity(step, 3, step)
    return WriteRequest(identity=identity, shard=0, shards=2, snapshot=index, image=image, is_step_copy=True,
                        folder=tmp_path / "checkpoints" / identity.folder_name, **details)  # fmt: skip


def told(outbox: Outbox) -> list[tuple[str, int, bool]]:
    reports = [json.loads(line) for line in outbox.take().splitlines()]
    return [(one["kind"], one["identity"][0], one["final"]) for one in reports]


def test_without_its_worker_a_copy_to_a_peer_that_is_gone_ends(tmp_path, lane):
    outbox = Outbox()
    for step in (1, 2):
        lane.offer(Task(request(tmp_path, step), outbox))
    assert not lane.is_idle()
    lane.end_within(0.1)
    until(lane.is_idle)
    assert told(outbox) == [("abandoned", 1, True), ("abandoned", 2, True)]


def test_one_that_is_given_up_makes_room_for_the_next(tmp_path, lane):
    outbox = Outbox()
    for step in (1, 2):
        lane.offer(Task(request(tmp_path, step), outbox))
    assert lane.abandon(Identity(1, 3, 1))
    assert not lane.abandon(Identity(7, 3, 7))
    until(lambda: told_of(outbox, 1))
    assert not lane.is_idle()
    assert lane.abandon(Identity(2, 3, 2))
    until(lane.is_idle)


def told_of(outbox: Outbox, step: int) -> bool:
    return ("abandoned", step, True) in told(outbox)


def test_a_snapshot_that_is_not_the_announced_one_is_a_failure(tmp_path, lane):
    outbox, asked = Outbox(), request(tmp_path, 1)
    stage(tmp_path / "mine", "shard-0.1", identity=(9, 3, 9), size=1000)
    lane.offer(Task(asked, outbox))
    until(lane.is_idle)
    assert told(outbox) == [("failed", 1, True)]


def test_without_an_offer_there_is_no_thread():
    before = threading.active_count()
    assert StepCopyLane({}).is_idle()
    assert threading.active_count() == before


@pytest.mark.parametrize("keeps", [None, Identity(4, 3, 2)])
def test_a_request_comes_as_it_was_sent(tmp_path, keeps):
    sent = request(tmp_path, 5, keeps=keeps, goes_to_peers=False, max_bytes_per_s=7.0)
    assert request_from(json.loads(request_line(sent))) == sent
