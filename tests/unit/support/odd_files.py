"""What may lie under any name in a shared folder instead of the file that belongs there, one maker for each."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

TERABYTE = 1 << 40
STRANGER = 12345


def _fifo(path: Path, _content: bytes) -> None:
    os.mkfifo(path)


def _socket(path: Path, _content: bytes) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as each:
            each.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path, _content: bytes) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path, _content: bytes) -> None:
    path.mkdir()


def _endless(path: Path, _content: bytes) -> None:
    with path.open("wb") as stream:
        stream.truncate(TERABYTE)


def _strangers(path: Path, content: bytes) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path.write_bytes(content)
    os.chown(path, STRANGER, STRANGER)


def _dangling(path: Path, _content: bytes) -> None:
    path.symlink_to(path.with_name("no such file"))


def _torn(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])


def _newer(path: Path, _content: bytes) -> None:
    path.write_bytes(b'{"format": 99, "crc": 1,\n"at": 1}\n')


MAKERS: dict[str, Callable[[Path, bytes], None]] = {
    "FIFO": _fifo, "socket": _socket, "device": _device, "folder": _folder, "endless": _endless,
    "stranger's": _strangers, "dangling link": _dangling, "torn": _torn, "newer": _newer,
}  # fmt: skip

NO_FILES = ("FIFO", "socket", "device", "folder")
"""Those that are never read, whatever belongs there."""


def put(kind: str, path: Path, content: bytes = b'{"format": 1, "at": 1, "event": "x", "attempt": ""}\n') -> Path:
    """Put a thing of that kind at ``path``; ``content`` is what a sound file there would hold."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    MAKERS[kind](path, content)
    return path
