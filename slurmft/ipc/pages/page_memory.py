"""The shared memory below a page: a file of fixed size in a folder of the node's memory, mapped by both sides."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def create(path: Path, size: int) -> mmap.mmap:
    """A new page of ``size`` bytes, all zero, readable by this user alone.

    Raises:
        OSError: there is no room for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # a store into a page without memory would kill the worker
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def attach(path: Path, size: int) -> mmap.mmap:
    """The page that the other side has made.

    Raises:
        ValueError: the file is smaller than ``size`` bytes.
        OSError: there is no such file.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
