"""What can go wrong under a writer: killed at each named point, stopped, no space, read-only, errors that pass."""

import ast
import errno
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from save_points import COMMIT_POINTS, STAGING_POINTS, STEP_COPY_POINTS, WRITER_POINTS
from staging import Client, Memory, begun, ended, quick_folder
from waiting import slowness, until

import slurmft.checkpoint
from slurmft.checkpoint import write_requests, writer
from slurmft.checkpoint.write_requests import ONCE_VARIABLE, VARIABLE, Report
from slurmft.storage.checkpoint_names import MANIFEST

ALL_POINTS = (*WRITER_POINTS, *COMMIT_POINTS)


@pytest.fixture
def memory() -> Iterator[Memory]:
    with quick_folder() as folder:
        yield Memory(folder / "memory", folder / "checkpoints")


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    """A writer that died is started again without a pause."""
    monkeypatch.setattr(write_requests, "_PAUSE_S", 0.0)


def left_overs(memory: Memory) -> list[str]:
    """Files that belong to no committed checkpoint."""
    try:
        return [
            path.name
            for path in memory.checkpoints.rglob("*")
            if path.name.endswith((".tmp", ".gone")) or (path.is_dir() and not (path / MANIFEST).exists())
        ]
    except FileNotFoundError:
        return ["being removed"]


@pytest.mark.parametrize("point", ALL_POINTS)
def test_killed_at_a_named_point_it_leaves_the_earlier_checkpoint_and_another_writer_completes_the_save(
    memory, clients, monkeypatch, point
):
    once = memory.memory.parent / "once"
    monkeypatch.setenv(VARIABLE, f"{point}=kill")
    monkeypatch.setenv(ONCE_VARIABLE, str(once))
    once.touch()
    seen: list[list[int]] = []

    def look(report: Report) -> None:
        if report.kind == "failed":
            seen.append(memory.steps())  # verifies every byte of what counts as committed

    clients.append(client := Client(on_report=look))
    first, second = memory.stage(1, slot="a"), memory.stage(2, slot="b")
    client.submit(first)
    assert ended(client, first).kind == "committed"
    until(lambda: any(report.kind == "pruned" for report in client.poll()))
    once.unlink()
    client.submit(second)
    assert ended(client, second).kind == "committed"
    until(once.exists)  # it was killed there
    assert memory.steps() == [2, 1]
    if point not in ("before pruning", "pruned"):  # where the save is over, and nobody has to be told
        until(lambda: any(report.kind == "pruned" for report in client.poll()))
        assert seen and seen[0] in ([1], [2, 1]), seen
        assert left_overs(memory) == []


def test_the_named_points_are_those_that_are_reached():
    folder = Path(slurmft.checkpoint.__file__).parent
    used = {
        node.args[0].value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("reached") and node.args
        if isinstance(node.args[0], ast.Constant)
    }
    assert set(ALL_POINTS) <= used <= {*ALL_POINTS, *STAGING_POINTS, *STEP_COPY_POINTS}


def test_a_point_that_nobody_asked_for_does_nothing(monkeypatch):
    monkeypatch.setenv(VARIABLE, "image written=28")
    write_requests.reached("image begun")
    with pytest.raises(OSError, match="No space left"):
        write_requests.reached("image written")


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param("folder made", errno.ENOSPC, id="folder-passing"),
        pytest.param("image written", errno.ENOSPC, id="image-passing"),
        pytest.param("before marker", errno.ENOSPC, id="marker-passing"),
        pytest.param("receipt written", errno.ENOSPC, id="receipt-passing", marks=pytest.mark.soak),
        pytest.param("hashed", errno.ENOSPC, id="hash-passing", marks=pytest.mark.soak),
        pytest.param("image written", errno.EACCES, id="image-final"),
        pytest.param("before marker", errno.EACCES, id="marker-final"),
        pytest.param("folder made", errno.EACCES, id="folder-final", marks=pytest.mark.soak),
        pytest.param("hashed", errno.EACCES, id="hash-final", marks=pytest.mark.soak),
    ],
)
def test_an_error_is_told_once_and_tried_again_where_it_may_pass(memory, clients, monkeypatch, point, number):
    monkeypatch.setenv(VARIABLE, f"{point}={number}")
    monkeypatch.setenv(ONCE_VARIABLE, str(memory.memory.parent / "once"))
    clients.append(client := Client())
    request = memory.stage(1)
    client.submit(request)
    report = ended(client, request)
    (failed,) = [each for each in client.poll() if each.kind == "failed"]
    assert (failed.errno, failed.text, failed.final) == (number, os.strerror(number), number == errno.EACCES)
    assert failed.phase
    assert report.kind == ("committed" if number == errno.ENOSPC else "failed")
    assert memory.steps() == ([1] if number == errno.ENOSPC else [])
    if number == errno.ENOSPC:
        assert left_overs(memory) == []


def test_what_cannot_be_written_gives_way_to_what_is_newer(memory, clients, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"folder made={errno.EIO}")
    clients.append(client := Client())
    first, second = memory.stage(1, slot="a"), memory.stage(2, slot="b")
    client.submit(first)
    until(lambda: [report.errno for report in client.poll()] == [errno.EIO])
    started = time.monotonic()
    client.submit(second)
    report = ended(client, first)
    assert (report.kind, report.errno) == ("superseded", errno.EIO)
    assert time.monotonic() - started < 5 * slowness(), "it must not sit out its pause"


def test_on_a_disk_that_takes_nothing_for_long_folders_of_saves_do_not_pile_up(memory, clients, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"image half written={errno.ENOSPC}")
    clients.append(client := Client())
    for number in range(1, 9):
        client.submit(memory.stage(number, slot="ab"[number % 2]))
        until(lambda: [one.kind for one in client.poll()].count("failed") == 1)
        assert len(list(memory.checkpoints.iterdir())) <= 2, "the one that is tried, and the one given up last"
    assert memory.steps() == []


def test_a_stopped_writer_is_noticed_told_and_replaced(memory, clients):
    heard: list[Report] = []
    clients.append(client := Client(stall_timeout_s=2.0, on_report=heard.append))
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=4e6))
    os.kill(client.pid, signal.SIGSTOP)
    assert ended(client, request).kind == "committed"
    assert {(each.errno, each.final) for each in heard if each.kind == "failed"} == {(errno.ETIMEDOUT, False)}
    assert memory.steps() == [1] and left_overs(memory) == []


def test_before_that_it_is_told_that_nothing_moves(memory, clients, monkeypatch):
    monkeypatch.setattr(write_requests, "WARN_AFTER_S", 0.5)
    clients.append(client := Client(stall_timeout_s=60.0))
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=4e6))
    os.kill(client.pid, signal.SIGSTOP)
    until(lambda: any(each.kind == "stalled" and not each.final for each in client.poll()))
    os.kill(client.pid, signal.SIGCONT)
    assert ended(client, request).kind == "committed"


def test_a_slow_writer_is_not_taken_for_a_stalled_one(memory, clients):
    clients.append(client := Client(stall_timeout_s=2.0))
    request = memory.stage(1, size_bytes=10**6, max_bytes_per_s=2.5e5)
    client.submit(request)
    report = ended(client, request)
    assert report.kind == "committed" and report.seconds > 3.9
    assert "failed" not in {each.kind for each in client.poll()}


def test_waiting_for_other_ranks_is_no_stall(memory, clients):
    clients.append(client := Client(stall_timeout_s=2.5))
    client.submit(request := memory.stage(1, shards=2))
    assert client.end_of(request.identity, 4.5) is None
    assert "failed" not in {each.kind for each in client.poll()}
    clients.append(other := Client())
    other.submit(memory.stage(1, shard=1, shards=2))
    assert ended(client, request).kind == "committed"


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_save_that_no_writer_survives_is_given_up(memory, clients, monkeypatch, fault):
    monkeypatch.setenv(VARIABLE, f"image begun={fault}")
    clients.append(client := Client(stall_timeout_s=0.7))
    request = memory.stage(1)
    client.submit(request)
    report = ended(client, request)
    assert (report.kind, report.final) == ("failed", True)
    assert "killed by SIGKILL" in report.text or report.errno == errno.ETIMEDOUT
    monkeypatch.delenv(VARIABLE)
    second = memory.stage(2, slot="b")
    client.submit(second)
    assert ended(client, second).kind == "committed", "a replacement takes later saves"
    until(lambda: left_overs(memory) == [])


def test_an_idle_writer_that_was_killed_is_replaced_by_the_next_save(memory, clients):
    clients.append(client := Client())
    pid = client.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.pid == 0)
    request = memory.stage(1)
    client.submit(request)
    assert ended(client, request).kind == "committed" and client.pid != pid


def test_a_writer_that_cannot_be_started_is_a_failed_save_and_no_more(memory, clients, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    clients.append(client := Client())
    request = memory.stage(1)
    client.submit(request)
    report = ended(client, request)
    assert (report.kind, report.errno, report.final) == ("failed", errno.ENOENT, True)


def test_what_all_have_written_is_committed_although_the_writer_died_meanwhile(memory, clients):
    """Its slot may hold something newer by then: only the commit is handed over to the next writer."""
    clients.append(client := Client())
    request = memory.stage(1, shards=2, slot="a")
    client.submit(request)
    until(lambda: any(report.kind == "written" for report in client.poll()))
    newer = memory.stage(2, shards=2, slot="a")
    client.submit(newer)
    os.kill(client.pid, signal.SIGKILL)
    clients.append(other := Client())
    for number in (1, 2):
        other.submit(part := memory.stage(number, shard=1, shards=2, slot=str(number)))
        ended(other, part)
    assert ended(client, newer).kind == "committed"
    assert ended(client, request).kind in ("committed", "superseded")
    assert memory.steps()[0] == 2


@pytest.fixture
def small_disk(memory: Memory) -> Iterator[Path]:
    """Two megabytes, for root."""
    path = memory.checkpoints
    path.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a filesystem")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_on_a_full_disk_the_old_checkpoint_stays_and_the_save_goes_on_when_there_is_room(
    memory, small_disk, clients, monkeypatch
):
    heard: list[Report] = []
    clients.append(client := Client(on_report=heard.append))
    request = memory.stage(1, slot="a")
    client.submit(request)
    assert ended(client, request).kind == "committed"
    (small_disk / "ballast").write_bytes(bytes(10**6))
    big = memory.stage(2, slot="b", size_bytes=10**6)
    client.submit(big)
    until(lambda: any(each.errno == errno.ENOSPC for each in heard))
    assert memory.steps() == [1]
    (small_disk / "ballast").unlink()
    assert ended(client, big).kind == "committed"
    assert memory.steps() == [2, 1] and left_overs(memory) == []


def test_a_save_that_found_no_room_leaves_none_of_it_taken(memory, small_disk, clients):
    clients.append(client := Client())
    big = memory.stage(1, slot="a", size_bytes=3 * 10**6)
    client.submit(big)
    until(lambda: any(each.errno == errno.ENOSPC for each in client.poll()))
    small = memory.stage(2, slot="b", size_bytes=10**6)
    client.submit(small)
    assert ended(client, big).kind == "superseded"
    assert ended(client, small).kind == "committed"
    until(lambda: left_overs(memory) == [])
    assert shutil.disk_usage(small_disk).used < 1.2 * 10**6


def test_a_read_only_disk_is_waited_for(memory, small_disk, clients):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    clients.append(client := Client())
    request = memory.stage(1)
    client.submit(request)
    until(lambda: any(each.errno == errno.EROFS and not each.final for each in client.poll()))
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert ended(client, request).kind == "committed"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own that can be frozen, for root."""
    image, path = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as stream:
        stream.truncate(64 << 20)
    path.mkdir()
    if os.geteuid() or not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        pytest.skip("no right or no tools to make a filesystem")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(path)], capture_output=True, check=False).returncode:
        pytest.skip("no loop devices")
    yield path
    subprocess.run(["fsfreeze", "-u", str(path)], capture_output=True, check=False)
    until(lambda: subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode == 0)


@pytest.mark.soak
def test_a_filesystem_that_hangs_fails_saves_and_blocks_nothing(memory, disk, clients):
    """A process inside it cannot be killed; not more than two are left there."""
    hung = Memory(memory.memory, disk / "checkpoints")
    clients.append(client := Client(stall_timeout_s=2.0))
    first, second, third = (hung.stage(number, slot=str(number)) for number in (1, 2, 3))
    client.submit(first)
    assert ended(client, first).kind == "committed"
    subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
    client.submit(second)
    assert ended(client, second).errno == errno.ETIMEDOUT
    client.submit(third)
    report = client.end_of(third.identity, 1.0)
    assert report is not None and "earlier writers hang" in report.text
    started = time.monotonic()
    clients.append(other := Client())
    other.submit(third)
    assert other.close(0.5) is False and time.monotonic() - started < 2 * slowness()
    subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
    until((hung.checkpoints / third.folder.name / MANIFEST).exists)  # it has finished alone
    later = itertools.count(4)

    def saves_again() -> bool:
        client.submit(request := hung.stage(next(later)))
        return ended(client, request).kind == "committed"

    until(saves_again)


def test_pauses_grow_and_stay_below_the_time_that_counts_as_a_stall():
    assert list(writer.PAUSES_S) == sorted(writer.PAUSES_S)
    assert writer.PAUSES_S[-1] < write_requests.STALL_TIMEOUT_S
