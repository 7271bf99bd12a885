"""A lock that is a file: one holder at a time, and none for ever."""

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import odd_files
import pytest
from waiting import slowness

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.storage.patience import GARBAGE_S, SoftLock

DIE_HOLDING = """
import os, sys
from pathlib import Path
from slurmft.storage.patience import GARBAGE_S, SoftLock
assert SoftLock(Path(sys.argv[1])).try_acquire()
os._exit(9)
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "list.lock"


def die_holding(path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", DIE_HOLDING, str(path)], timeout=30, check=False).returncode == 9
    assert path.exists()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_there_is_one_holder(path):
    first, second = SoftLock(path), SoftLock(path)
    assert first.try_acquire()
    assert first.is_ours()
    assert not second.try_acquire()
    assert not second.is_ours()
    second.release()
    assert path.exists(), "who does not hold it cannot give it back"
    first.release()
    assert not path.exists()
    assert second.try_acquire()


def test_waiting_ends_with_who_it_is(path):
    SoftLock(path, host="n7").try_acquire()
    with pytest.raises(StorageUnavailable, match=f"process {os.getpid()} on n7 holds it"), SoftLock(path).hold(0.1):
        pytest.fail("two holders")


def test_a_dead_holders_lock_is_taken_at_once(path):
    die_holding(path)
    began = time.monotonic()
    with SoftLock(path).hold(5):
        assert time.monotonic() - began < 2 * slowness()
    assert names(path) == []


def test_a_living_holders_lock_is_not_however_old(path):
    assert SoftLock(path).try_acquire()
    os.utime(path, (0, 0))
    assert not SoftLock(path).try_acquire()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="another host's"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff{", id="damaged"),
        pytest.param(b"[1]", id="of something else"),
        pytest.param(b'{"host": 3, "pid": "x", "birth": []}', id="odd"),
    ],
)
def test_where_its_holder_cannot_be_looked_at_only_age_counts(path, content):
    if content is None:
        die_holding(path)
        value = json.loads(path.read_bytes())
        content = json.dumps(value | {"host": "elsewhere"}).encode()
    path.write_bytes(content)
    assert not SoftLock(path).try_acquire()
    old = time.time() - 3600
    os.utime(path, (old, old))
    assert SoftLock(path).try_acquire()


def test_a_container_with_the_same_host_name_is_another_machine(path):
    die_holding(path)
    value = json.loads(path.read_bytes())
    path.write_text(json.dumps(value | {"namespace": "pid:[1]"}))
    assert not SoftLock(path).try_acquire()


def test_a_lock_that_was_taken_away_is_not_given_back(path):
    slow, other = SoftLock(path), SoftLock(path)
    assert slow.try_acquire()
    path.unlink()
    assert other.try_acquire()
    assert not slow.is_ours()
    slow.release()
    assert other.is_ours()


def test_of_many_that_find_a_dead_holder_one_gets_it(path):
    for _ in range(20):
        die_holding(path) if not path.exists() else None
        dead = path.read_bytes()
        locks = [SoftLock(path) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(SoftLock.try_acquire, locks))
        assert sum(lock.is_ours() for lock in locks) == sum(got) == 1
        path.write_bytes(dead)


def test_a_breaker_that_was_killed_keeps_nobody_out_for_ever(path):
    die_holding(path)
    breaker = path.with_name(f".{path.name}.breaking")
    breaker.touch()
    assert not SoftLock(path).try_acquire()
    old = time.time() - 3600
    os.utime(breaker, (old, old))
    with SoftLock(path).hold(5):
        assert not breaker.exists()


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(StorageError, match="cannot lock"):
        SoftLock(tmp_path / "gone" / "lock").try_acquire()


def test_a_full_disk_leaves_no_lock(path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slurmft.storage.patience.os.write", refuse)
    with pytest.raises(StorageUnavailable, match="No space left"):
        SoftLock(path).try_acquire()
    assert names(path) == []


def test_a_holder_that_is_killed_before_it_says_who_it_is_leaves_no_lock(path):
    """With the name first and the content second, the next one would wait for the age of an empty file."""
    killed = DIE_HOLDING.replace("assert", "os.write = lambda *_: os._exit(9)\nassert")
    assert subprocess.run([sys.executable, "-c", killed, str(path)], timeout=30, check=False).returncode == 9
    assert SoftLock(path).try_acquire()


def test_a_filesystem_without_hard_links_will_do(path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    first, second = SoftLock(path), SoftLock(path)
    assert first.try_acquire() and first.is_ours()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    assert names(path) == [path.name]


def test_a_link_whose_answer_was_lost_counts(path, monkeypatch):
    link = Path.hardlink_to

    def link_twice(new: Path, target: Path) -> None:
        link(new, target)
        link(new, target)

    monkeypatch.setattr(Path, "hardlink_to", link_twice)
    assert SoftLock(path).try_acquire()


def test_a_folder_that_cannot_be_looked_at_is_an_error_of_ours(path, monkeypatch):
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(StorageError, match="cannot lock"):
        SoftLock(path).try_acquire()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder", "dangling link", "stranger's"])
@pytest.mark.timeout(10)
def test_what_is_no_lock_is_an_error_at_once(path, kind):
    odd_files.put(kind, path)
    began = time.monotonic()
    with pytest.raises(StorageError, match="is not a lock of slurmft") as error, SoftLock(path).hold(20):
        pytest.fail("it is held")
    assert time.monotonic() - began < 1 * slowness()
    assert str(path) in str(error.value) and "remove it" in error.value.hint
    assert os.path.lexists(path), "it is not ours to remove"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff{", b"[1]", b"[" * 4000, b'{"token": 1}', b'{"pid": ' + b"9" * 309 + b"}", b"9" * 5000, None],
    ids=["empty", "damaged", "a list", "deep", "no token", "huge number", "digits", "endless"],
)
@pytest.mark.parametrize("dated_s", [0, 86_400 * 365, -86_400])
@pytest.mark.timeout(10)
def test_a_file_that_names_no_holder_is_removed_as_soon_as_nobody_can_be_writing_it(path, content, dated_s):
    odd_files.put("endless", path) if content is None else path.write_bytes(content)
    at = time.time() + dated_s
    os.utime(path, (at, at))
    began = time.monotonic()
    with SoftLock(path).hold(20):
        assert time.monotonic() - began < 5 * slowness()
    assert names(path) == []


def test_a_file_that_is_being_written_is_waited_for(path):
    """Without hard links a lock is created first and written then."""
    path.touch()
    assert not SoftLock(path).try_acquire()
    holder = SoftLock(path.with_name("draft"), host="elsewhere")
    assert holder.try_acquire()
    path.write_bytes(holder.path.read_bytes())
    with pytest.raises(StorageUnavailable, match="elsewhere holds it"), SoftLock(path).hold(GARBAGE_S + 1):
        pytest.fail("it is held")


def test_a_lock_that_is_dated_in_the_future_is_nobodys(path):
    holder = SoftLock(path, host="elsewhere")
    assert holder.try_acquire()
    ahead = time.time() + 30
    os.utime(path, (ahead, ahead))
    assert not SoftLock(path).try_acquire(), "a clock may be ahead"
    ahead = time.time() + 3600
    os.utime(path, (ahead, ahead))
    assert SoftLock(path).try_acquire()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.timeout(10)
def test_an_odd_breaker_is_an_error_at_once(path, kind):
    die_holding(path)
    odd_files.put(kind, path.with_name(f".{path.name}.breaking"))
    with pytest.raises(StorageError, match="breaking is not a lock"):
        SoftLock(path).try_acquire()


def test_the_words_of_a_lock_cannot_move_the_cursor(path):
    SoftLock(path, host="n\x1b[2J").try_acquire()
    with pytest.raises(StorageUnavailable) as error, SoftLock(path).hold(0.1):
        pytest.fail("two holders")
    assert "\x1b" not in str(error.value)


def test_a_group_shares_its_locks(path):
    """The lock of a colleague is one, where the list is a group's."""
    assert SoftLock(path, mode=0o660, host="elsewhere").try_acquire()
    if os.getuid() == 0:
        os.chown(path, odd_files.STRANGER, -1)
    assert not SoftLock(path, mode=0o660).try_acquire()
