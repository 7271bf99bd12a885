"""Opening what lies in a shared place: kind, owner and size are checked, and nothing blocks."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from slurmft.system.files import UnsafeFile, open_regular, read_bytes, read_part, read_text, write_bytes


def test_a_regular_file_is_read_whole(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    assert read_bytes(tmp_path / "a") == b"x" * 3_000_000
    assert read_text(tmp_path / "a", limit_bytes=3_000_000) == "x" * 3_000_000


def test_a_file_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(UnsafeFile, match="longer than 10 bytes"):
        read_bytes(tmp_path / "a", limit_bytes=10)


def test_a_file_that_is_to_be_new_is_never_one_that_is_there(tmp_path):
    """Segments of a batch, of which each has one writer, were opened again, and what they held was cut off."""
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        open_regular(tmp_path / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow=False)
    assert (tmp_path / "a").read_bytes() == b"x"
    os.close(open_regular(tmp_path / "b", os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow=False))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _socket, _device, _folder])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
@pytest.mark.timeout(10)
def test_anything_but_a_regular_file_is_refused_at_once(tmp_path, make, flags):
    make(tmp_path / "a")
    with pytest.raises(UnsafeFile, match="not a regular file"):
        open_regular(tmp_path / "a", flags)


def test_an_endless_file_of_the_kernel_is_cut(tmp_path):
    with pytest.raises(UnsafeFile, match="longer"):
        read_bytes("/proc/self/maps", limit_bytes=100)


def test_links_are_followed_only_where_that_is_asked_for(tmp_path):
    (tmp_path / "a").write_text("there")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_text(tmp_path / "b") == "there"
    with pytest.raises(UnsafeFile, match="symbolic link"):
        read_text(tmp_path / "b", follow=False)


def test_nothing_is_created_through_a_dangling_link(tmp_path):
    (tmp_path / "b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="symbolic link to nothing"):
        open_regular(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "elsewhere").exists()


def test_the_owner_is_checked(tmp_path):
    (tmp_path / "a").write_text("mine")
    assert read_text(tmp_path / "a", owners={os.getuid()}) == "mine"
    with pytest.raises(UnsafeFile, match="belongs to user id"):
        read_text(tmp_path / "a", owners={os.getuid() + 1})


def test_a_missing_file_is_created_by_one_of_two(tmp_path):
    for number in range(50):
        path, opened = tmp_path / str(number), []
        threads = [
            threading.Thread(target=lambda: opened.append(open_regular(path, os.O_RDWR | os.O_CREAT)))  # noqa: B023
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({os.fstat(each).st_ino for each in opened}) == 1
        for each in opened:
            os.close(each)


def test_a_missing_file_is_told_as_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "a")


def test_a_file_that_says_it_is_too_long_is_not_read_for_it(tmp_path, monkeypatch):
    with (tmp_path / "a").open("wb") as stream:
        stream.truncate(1 << 40)
    monkeypatch.setattr(os, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UnsafeFile, match="longer than"):
        read_bytes(tmp_path / "a")


@pytest.mark.parametrize(
    ("start", "limit", "part"), [(0, 3, b"abc"), (2, 99, b"cdef"), (-2, 9, b"ef"), (-99, 2, b"ab")]
)
def test_a_part_of_a_file(tmp_path, start, limit, part):
    (tmp_path / "a").write_bytes(b"abcdef")
    assert read_part(tmp_path / "a", start, limit) == part


def test_writing_replaces_or_adds(tmp_path):
    write_bytes(tmp_path / "a", b"one")
    write_bytes(tmp_path / "a", b"2")
    write_bytes(tmp_path / "a", b"3", append=True)
    assert (tmp_path / "a").read_bytes() == b"23"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_file_that_another_host_has_replaced_is_opened_anew(tmp_path, monkeypatch):
    """NFS answers ESTALE for a name that only this host remembers; opening by name asks the server."""
    (tmp_path / "a").write_text("new")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    real = os.open

    def stale(path: str | Path, *rest: int) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", stale)
    assert read_text(tmp_path / "a") == "new"
    write_bytes(tmp_path / "a", b"2")
    assert read_text(tmp_path / "a") == "2"
    with pytest.raises(OSError, match="Too many levels"):
        read_text(tmp_path / "link")
    with pytest.raises(UnsafeFile, match="belongs to"):
        read_text(tmp_path / "a", owners=[os.getuid() + 1])
