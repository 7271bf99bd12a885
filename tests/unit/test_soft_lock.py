"""A lock that is a file: one holder at a time, and none for ever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.storage.soft_lock import SoftLock

DIE_HOLDING = """
import os, sys
from pathlib import Path
from slurmft.storage.soft_lock import SoftLock
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
        assert time.monotonic() - began < 2
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

    monkeypatch.setattr("slurmft.storage.soft_lock.os.write", refuse)
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

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(StorageError, match="cannot lock"):
        SoftLock(path).try_acquire()
