"""Plays another user of the same machine: a child process of root that has taken another user id."""

import codecs
import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OTHER = 54_321
"""A user id without an account."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


@contextmanager
def sticky_folder() -> Iterator[Path]:
    """A folder like /tmp: everyone creates names in it, and removes only their own."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="slurmft.test."))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def as_user(uid: int, work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a child process of that user; fails where it raises."""
    codecs.lookup("ascii")  # the child may not be able to read the standard library
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = work(), ""
        except BaseException:  # noqa: BLE001 - also what pytest raises, which the parent raises again
            answer = None, traceback.format_exc()
        with open(writing, "wb") as stream:
            pickle.dump(answer, stream)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        value, problem = pickle.load(stream)
    os.waitpid(pid, 0)
    assert not problem, problem
    return value
