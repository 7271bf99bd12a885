"""A queue between programs: each item once, in one order, whatever is killed, torn, put twice or asked for again."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import slowness

from slurmft.errors import DirectoryInUse, Fenced, StorageError, StorageUnavailable, UsageError
from slurmft.storage import queue as module
from slurmft.storage.queue import Queue, SegmentWriter, line_of, stop_taking


@pytest.fixture(autouse=True)
def outside_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURMFT_RUN_FOLDER", "SLURMFT_GENERATION", "RANK"):
        monkeypatch.delenv(name, raising=False)


def filled(folder: Path, count: int, **options: Any) -> Queue:
    queue = Queue(folder, **options)
    for number in range(count):
        queue.put(f"q{number}", {"number": number})
    return queue


def names(queue: Queue, count: int, **options: Any) -> list[str]:
    return [item.id for item in queue.take(count, timeout_s=0, **options)]


def resumed(folder: Path, position: int, **options: Any) -> Queue:
    queue = Queue(folder, **options)
    queue.load_state_dict({"position": position})
    return queue


def test_what_is_put_is_taken_once_as_it_was(tmp_path):
    writer, reader = Queue(tmp_path / "q"), Queue(tmp_path / "q")
    writer.put("a", {"tokens": [1, 2], "text": "\udce4\n", "reward": float("-inf")}, version=7)
    writer.put("b", None)
    (first,) = reader.take(1)
    assert (first.id, first.version) == ("a", 7)
    assert first.value == {"tokens": [1, 2], "text": "\udce4\n", "reward": float("-inf")}
    assert names(reader, 1) == ["b"]
    with pytest.raises(TimeoutError, match="fewer than 1 items"):
        reader.take(1, timeout_s=0.05)
    assert reader.state_dict() == {"position": 2} == reader.shared_position(reader.state_dict())


def test_an_id_counts_once_whoever_puts_it_and_when(tmp_path):
    reader = Queue(tmp_path)
    filled(tmp_path, 3)
    filled(tmp_path, 4)
    assert sorted(names(reader, 4)) == ["q0", "q1", "q2", "q3"]
    filled(tmp_path, 5)
    assert names(reader, 1) == ["q4"]
    reader.close()
    filled(tmp_path, 6)
    assert names(resumed(tmp_path, 5), 1) == ["q5"]


def test_a_reader_that_begins_again_gets_the_same_items_in_the_same_order(tmp_path):
    filled(tmp_path, 3)
    first = Queue(tmp_path)
    taken = names(first, 3)
    for _ in range(3):  # writers whose names sort before and after
        filled(tmp_path, 20)
    taken += names(first, 5) + names(first, 2)
    again = resumed(tmp_path, 4)
    assert names(again, 6) == taken[4:10], "also where the number at a time has changed"
    assert len({*taken, *names(again, 10)}) == 20


def test_items_that_are_named_come_in_that_order(tmp_path):
    queue = filled(tmp_path, 6)
    assert [item.id for item in queue.take(ids=["q4", "q1"])] == ["q4", "q1"]
    with pytest.raises(TimeoutError):
        queue.take(ids=["q0", "later"], timeout_s=0.05)
    assert queue.position == 2
    queue.put("later", 1)
    assert [item.id for item in queue.take(ids=["q0", "later"])] == ["q0", "later"]
    with pytest.raises(UsageError, match="was 'q0', and 'q5' is asked for"):
        resumed(tmp_path, 2).take(ids=["q5", "later"])


@pytest.mark.parametrize(
    "wrong",
    [{}, {"count": 0}, {"count": 1, "ids": ["a"]}, {"ids": ["a", "a"]}, {"ids": ["a"], "oldest_version": 1}],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="take"):
        Queue(tmp_path).take(**wrong)


def test_a_writer_waits_for_room_also_when_the_reader_begins_again(tmp_path):
    writer = filled(tmp_path, 2, max_waiting=2)
    with pytest.raises(TimeoutError, match="nobody takes"):
        writer.put("more", 1, timeout_s=0.05)
    reader = Queue(tmp_path)
    assert names(reader, 1) == ["q0"]
    writer.put("more", 1, timeout_s=0)
    with pytest.raises(TimeoutError):
        writer.put("even more", 1, timeout_s=0)
    assert names(resumed(tmp_path, 0), 3) == ["q0", "q1", "more"]
    writer.put("even more", 1, timeout_s=0)


def test_a_writer_that_puts_again_what_is_taken_does_not_wait_for_it(tmp_path):
    filled(tmp_path, 4)
    reader = Queue(tmp_path)
    names(reader, 4)
    writer = filled(tmp_path, 2, max_waiting=2)
    with pytest.raises(TimeoutError):
        reader.take(1, timeout_s=0)
    writer.put("q2", 1, timeout_s=0)


def test_items_that_are_too_old_are_dropped_and_never_come_back(tmp_path):
    writer, reader = Queue(tmp_path, max_waiting=4), Queue(tmp_path)
    for version in (1, 2, 1, 3):
        writer.put(f"v{version}-{random.random()}", version, version=version)
    with pytest.raises(TimeoutError):
        reader.take(3, oldest_version=2, timeout_s=0)
    writer.put("v2", 2, version=2, timeout_s=0)
    assert [item.version for item in reader.take(3, oldest_version=2, timeout_s=0)] == [2, 3, 2]
    assert len(names(resumed(tmp_path, 0), 3)) == 3
    with pytest.raises(TimeoutError):
        resumed(tmp_path, 3).take(1, timeout_s=0)


def test_after_its_end_there_is_what_is_left_and_then_nothing(tmp_path):
    queue = filled(tmp_path, 3)
    queue.end()
    assert len(names(queue, 2)) == 2
    assert (len(names(queue, 2)), names(queue, 2)) == (1, [])
    assert names(resumed(tmp_path, 2), 5) == ["q2"]
    with pytest.raises(UsageError, match="has ended"):
        queue.put("late", 1)


def test_a_writer_that_begins_again_after_the_end_puts_nothing_new(tmp_path):
    queue = filled(tmp_path, 3)
    names(queue, 1)
    queue.end()
    assert filled(tmp_path, 3).take(ids=["q0"], timeout_s=0)[0].id == "q0"
    with pytest.raises(UsageError, match="has ended"):
        filled(tmp_path, 4)
    assert names(resumed(tmp_path, 1), 5) == ["q1", "q2"]


def test_a_writer_that_begins_again_knows_what_is_there(tmp_path):
    assert "q0" not in Queue(tmp_path)
    filled(tmp_path, 3)
    names(Queue(tmp_path), 1)
    again = Queue(tmp_path)
    assert [name in again for name in ("q0", "q2", "q3")] == [True, True, False]
    filled(tmp_path, 4)
    assert "q3" not in again, "as it was at the first look"
    again.end()
    again.put("q3", 1)


def test_while_a_job_stops_nobody_waits_for_items(tmp_path):
    queue = filled(tmp_path / "queues/q", 2)
    stop_taking(tmp_path / "queues")
    assert names(queue, 2) == ["q0", "q1"], "what is there"
    with pytest.raises(SystemExit) as ended:
        queue.take(1)
    assert ended.value.code == 75
    stop_taking(tmp_path / "queues", over=True)
    with pytest.raises(TimeoutError):
        queue.take(1, timeout_s=0)
    stop_taking(tmp_path / "there is none")


def test_a_superseded_reader_decides_nothing_more(tmp_path):
    filled(tmp_path, 4)
    old = Queue(tmp_path)
    assert names(old, 1) == ["q0"]
    new = resumed(tmp_path, 1)
    assert names(new, 1) == ["q1"]
    with pytest.raises(Fenced, match="another reader"):
        old.take(1)
    (first, *_) = sorted(tmp_path.glob("order-*"))
    segment = next(path.name for path in (tmp_path / "segments").iterdir())
    with first.open("ab") as file:  # one that was about to, when it was stopped
        file.write(line_of({"items": [[segment, 0, 10, "q3"]]}))
    assert names(resumed(tmp_path, 1), 3) == ["q1", "q2", "q3"]


def test_a_queue_belongs_to_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path / "a"))
    filled(tmp_path / "q", 2).take(1)
    assert Queue("q").folder == tmp_path / "a/queues/q"
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path / "b"))
    with pytest.raises(DirectoryInUse, match="is read by"):
        Queue(tmp_path / "q").take(1)
    Queue(tmp_path / "q").put("others may write", 1)


def test_a_name_needs_a_run(tmp_path):
    with pytest.raises(UsageError, match="to none"):
        Queue("rollouts")
    for wrong in ("", ".", "a b", "-a", "x" * 65):
        with pytest.raises(UsageError, match="no name"):
            Queue(wrong)


def test_all_ranks_get_what_rank_0_decides(tmp_path, monkeypatch):
    def of_rank(rank: int, generation: int, position: int = 0) -> Queue:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("SLURMFT_GENERATION", str(generation))
        queue = resumed(tmp_path, position)
        queue._order = queue._opened()
        return queue

    filled(tmp_path, 9)
    other, lead = of_rank(1, 1), of_rank(0, 1)
    with pytest.raises(TimeoutError):
        other.take(1, timeout_s=0)
    taken = names(lead, 3) + names(lead, 3)
    assert names(other, 3) + names(other, 3) == taken
    early = of_rank(1, 2, position=3)
    with pytest.raises(TimeoutError):
        early.take(1, timeout_s=0)  # of the attempt before it reads nothing
    lead = of_rank(0, 2, position=3)
    assert names(early, 3) == names(lead, 3) == taken[3:]
    assert names(lead, 3) == names(early, 3)
    lead.end()
    assert names(lead, 3) == names(early, 3) == []


def test_what_no_checkpoint_needs_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT_BYTES", 200)
    writer, reader = Queue(tmp_path, max_waiting=50), Queue(tmp_path, keep_items=20)
    for number in range(500):
        writer.put(f"q{number}", number)
        assert names(reader, 1) == [f"q{number}"]
    assert 4 < len(list((tmp_path / "segments").iterdir())) < 12
    filled(tmp_path, 400).close()
    assert names(resumed(tmp_path, 480, keep_items=20), 20) == [f"q{number}" for number in range(480, 500)]
    with pytest.raises(StorageError, match="is deleted"):
        resumed(tmp_path, 10).take(1, timeout_s=0)
    with pytest.raises(TimeoutError):
        resumed(tmp_path, 500).take(1, timeout_s=0)


def test_a_segment_that_was_deleted_beneath_its_writer_is_begun_anew(tmp_path):
    writer = filled(tmp_path, 1)
    reader = Queue(tmp_path, keep_items=1)
    names(reader, 1)
    (path,) = (tmp_path / "segments").iterdir()
    os.utime(path, (0, 0))
    filled(tmp_path, 3)
    assert names(reader, 2) == ["q1", "q2"]
    assert not path.exists()
    writer.put("new", 1)
    assert names(reader, 1) == ["new"]


def test_a_child_writes_to_a_segment_of_its_own(tmp_path):
    writer = filled(tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        writer.put("child", 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    writer.put("parent", 1)
    assert sorted(names(Queue(tmp_path), 3)) == ["child", "parent", "q0"]
    assert len(list((tmp_path / "segments").iterdir())) == 2


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object()])
def test_what_json_cannot_say_is_refused(tmp_path, value):
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        Queue(tmp_path).put("a", value)


def test_what_is_too_large_or_has_no_id_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", 1000)
    with pytest.raises(UsageError, match="at most 1000"):
        Queue(tmp_path).put("a", "x" * 1000)
    for wrong in ("", "x" * 513, None):
        with pytest.raises(UsageError, match="512"):
            Queue(tmp_path).put(wrong, 1)  # type: ignore[arg-type]


def test_a_full_disk_is_waited_for_and_tears_nothing(tmp_path, monkeypatch):
    queue, real, tries = Queue(tmp_path, patience_s=30), os.write, []

    def write(descriptor: int, data: Any) -> int:
        tries.append(1)
        if len(tries) == 1:
            return real(descriptor, bytes(data[:10]))
        if len(tries) < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    queue.put("a", 1)
    monkeypatch.setattr("slurmft.storage.patience.PAUSE_S", 0.01)
    monkeypatch.setattr(os, "write", write)
    queue.put("b", 2)
    assert names(queue, 2) == ["a", "b"]
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(StorageUnavailable):
        Queue(tmp_path, patience_s=0).put("c", 3)


def test_a_queue_that_is_deleted_beneath_its_reader_is_told(tmp_path):
    reader = filled(tmp_path / "q", 1)
    names(reader, 1)
    shutil.rmtree(tmp_path / "q")
    with pytest.raises(StorageError, match="cannot look"):
        reader.take(1, timeout_s=0)


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises((StorageError, OSError), match="open"):
        Queue(tmp_path / "open")


def test_a_damaged_item_is_said_with_its_place(tmp_path):
    filled(tmp_path, 2)
    reader = Queue(tmp_path)
    names(reader, 1)
    (path,) = (tmp_path / "segments").iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    names(resumed(tmp_path, 1), 1)
    path.write_bytes(content)
    with pytest.raises(StorageError, match="damaged at byte"):
        resumed(tmp_path, 1).take(1, timeout_s=0)


def test_what_a_newer_version_wrote_is_refused(tmp_path):
    filled(tmp_path, 1)
    SegmentWriter(tmp_path / "order-000001.jsonl", {"order": 2}).close()
    with pytest.raises(StorageError, match="newer slurmft"):
        Queue(tmp_path).take(1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["put", "again", "take", "crash", "save"]), max_size=60), st.integers(1, 4))
def test_lives(tmp_path_factory, actions, at_a_time):
    """The weights' history is what was taken from the last saved position on: each item in it once, all in the end."""
    folder = tmp_path_factory.mktemp("queue")
    writer, reader, put = Queue(folder), Queue(folder), 0
    used: list[str] = []
    saved: tuple[int, list[str]] = 0, []
    for action in actions:
        if action == "put":
            writer.put(f"q{put}", put)
            put += 1
        elif action == "again":  # a writer that begins anew, and does not know how far it had come
            writer = filled(folder, put)
        elif action == "take":
            if put - len(used) >= at_a_time:
                used += names(reader, at_a_time)
        elif action == "save":
            saved = reader.state_dict()["position"], list(used)
        else:
            reader, used = resumed(folder, saved[0]), list(saved[1])
    writer.end()
    used += names(reader, 100)
    assert sorted(used) == sorted(f"q{number}" for number in range(put))


WRITER = """
import sys
from slurmft.storage.queue import Queue, stop_taking
queue = Queue(sys.argv[1] + "/", max_waiting=16)
for number in range(int(sys.argv[3])):
    queue.put(f"{sys.argv[2]}-{number}", [number] * 100)
"""
TRAINER = """
import hashlib, json, os, sys
from slurmft.storage.queue import Queue, stop_taking
folder, state, writers, count, named = sys.argv[1] + "/", sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
queue, used, weights = Queue(folder), [], "0"
if os.path.exists(state):
    saved = json.load(open(state))
    queue.load_state_dict(saved["queue"])
    used, weights = saved["used"], saved["weights"]
while len(used) < writers * count:
    if named == "named":
        items = queue.take(ids=[f"{writer}-{len(used) // writers}" for writer in range(writers)])
    else:
        items = queue.take(writers)
    for item in items:
        used.append(item.id)
        weights = hashlib.sha256(f"{weights}{item.id}{item.value}".encode()).hexdigest()
    if len(used) // writers % 3 == 0:
        with open(state + ".tmp", "w") as file:
            json.dump({"queue": queue.state_dict(), "used": used, "weights": weights}, file)
        os.replace(state + ".tmp", state)
with open(state + ".end", "w") as file:
    json.dump({"used": used, "weights": weights}, file)
"""


def trained(folder: Path, named: str, kills: int = 0, seed: int = 0) -> dict[str, Any]:
    """What the trainer ends with, while it and its writers are killed, and each begins again from its beginning."""
    writers, count, dice = 3, 40, random.Random(seed)
    folder.mkdir()
    argv = [
        *([sys.executable, "-c", WRITER, str(folder / "q"), str(number), str(count)] for number in range(writers)),
        [sys.executable, "-c", TRAINER, str(folder / "q"), str(folder / "state"), str(writers), str(count), named],
    ]
    running = [subprocess.Popen(each) for each in argv]
    deadline, seen = time.monotonic() + 30 * slowness(), 0
    try:
        while running[-1].poll() is None and time.monotonic() < deadline:
            size = sum(path.stat().st_size for path in (folder / "q").glob("order-*"))
            if kills and size > seen + 300:  # it has come further since the last one
                one = dice.randrange(len(running))
                running[one].kill()
                running[one].wait()
                running[one] = subprocess.Popen(argv[one])
                kills, seen = kills - 1, size
            time.sleep(0.005)
        assert running[-1].returncode == 0
        assert kills == 0, "it was over before all kills"
        return json.loads((folder / "state.end").read_text())
    finally:
        for each in running:
            each.kill()
            each.wait()


def test_killed_writers_and_trainers_leave_the_weights_of_an_undisturbed_run(tmp_path):
    found = trained(tmp_path / "killed", "named", kills=8, seed=1)
    assert found == trained(tmp_path / "undisturbed", "named")


def test_killed_writers_and_trainers_lose_and_double_nothing(tmp_path):
    found = trained(tmp_path / "killed", "any", kills=8, seed=2)
    assert sorted(found["used"]) == sorted(f"{writer}-{number}" for writer in range(3) for number in range(40))


def test_a_reader_that_was_killed_before_its_first_line_was_written_leaves_the_order_as_it_was(tmp_path):
    filled(tmp_path, 6)
    names(Queue(tmp_path), 2)
    for number, left in ((2, b""), (3, b'0123abcd {"order":1,"ru')):
        (tmp_path / f"order-{number:06d}.jsonl").write_bytes(left)
    assert names(resumed(tmp_path, 1), 2) == ["q1", "q2"]
    assert names(resumed(tmp_path, 0), 4) == ["q0", "q1", "q2", "q3"]


def test_a_damaged_first_line_of_an_order_is_said(tmp_path):
    filled(tmp_path, 2)
    names(Queue(tmp_path), 1)
    path = tmp_path / "order-000001.jsonl"
    path.write_bytes(b"f" + path.read_bytes()[1:])
    with pytest.raises(StorageError, match="damaged at byte 0"):
        resumed(tmp_path, 0).take(1, timeout_s=0)


def failing_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int = errno.ENOSPC) -> None:
    """The next call fails, and those after it do not."""
    real, left = getattr(owner, name), [1]

    def call(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr("slurmft.storage.patience.PAUSE_S", 0.01)
    monkeypatch.setattr(owner, name, call)


def test_a_disk_that_is_full_when_a_reader_begins_is_waited_for(tmp_path, monkeypatch):
    filled(tmp_path, 2)
    failing_once(monkeypatch, os, "write")
    assert names(Queue(tmp_path, patience_s=30), 2) == ["q0", "q1"]
    assert [path.name for path in tmp_path.glob("order-*")] == ["order-000001.jsonl"]


def test_an_entry_that_does_not_reach_the_disk_at_first_is_decided_once(tmp_path, monkeypatch):
    queue = filled(tmp_path, 4, patience_s=30)
    names(queue, 1)
    failing_once(monkeypatch, SegmentWriter, "sync", errno.EIO)
    assert names(queue, 1) + names(queue, 1) == ["q1", "q2"]
    assert names(resumed(tmp_path, 0), 4) == ["q0", "q1", "q2", "q3"]


def test_a_filesystem_that_is_away_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    queue = filled(tmp_path, 2, patience_s=30)
    names(queue, 1)
    with monkeypatch.context() as patch:
        failing_once(patch, os, "pread", errno.ESTALE)
        assert names(queue, 1) == ["q1"]
    with monkeypatch.context() as patch:
        failing_once(patch, Path, "stat", errno.ESTALE)
        queue.put("more", 1)


def test_after_the_end_all_ranks_get_nothing_also_where_something_is_put_late(tmp_path, monkeypatch):
    late, lead = filled(tmp_path, 1), Queue(tmp_path)
    assert names(lead, 1) == ["q0"]
    lead.end()
    assert names(lead, 1) == []
    late._writer.append({"id": "late", "value": 1, "version": 0})  # it had looked before the end
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("SLURMFT_GENERATION", "")
    other = resumed(tmp_path, 1)
    assert names(other, 1) == names(lead, 1) == []


def test_a_value_that_a_reader_might_not_get_through_is_refused(tmp_path):
    value: Any = 1
    for _ in range(module.MAX_DEPTH):
        value = [value]
    queue = Queue(tmp_path)
    queue.put("deep", value)
    with pytest.raises(UsageError, match="100 deep"):
        queue.put("deeper", {"a": value})
    assert names(queue, 1) == ["deep"]
