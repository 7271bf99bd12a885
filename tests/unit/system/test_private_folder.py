"""Private folders in shared memory, beside what other users put there."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from another_user import OTHER, as_user, needs_root, sticky_folder

from slurmft.agent.workers import Workers
from slurmft.checkpoint.replicas import local_folder
from slurmft.checkpoint.snapshots import Arena
from slurmft.errors import StorageUnavailable
from slurmft.health.checker import clean
from slurmft.health.node import Scene, orphaned_memory
from slurmft.system import files
from slurmft.system.files import LOCK, UnsafeFile, is_left_over, make_private_folder, prefix, remove_tree
from slurmft.system.processes import bounded

SOON_S = 3.0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with sticky_folder() as folder:
        monkeypatch.setattr(files, "SHARED_MEMORY", folder)
        yield folder


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < SOON_S, f"{took_s:.1f} s"


@contextlib.contextmanager
def leased(path: Path) -> Iterator[None]:
    """A file whose owner makes every other opener wait for 45 s (fcntl(2), leases)."""
    handler = signal.signal(signal.SIGIO, signal.SIG_IGN)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.fchmod(descriptor, 0o666)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, handler)


def test_what_was_being_made_or_removed_when_its_process_was_killed_goes_later(memory):
    old = time.time() - files.UNFINISHED_S - 1
    empty, in_use, new = (memory / f"{prefix()}{name}" for name in ("empty", "in-use", "new"))
    for folder in (empty, in_use, new):
        folder.mkdir(mode=0o700)
    (in_use / "memory").touch()
    for folder in (empty, in_use):
        os.utime(folder, (old, old))
    make_private_folder().close()
    assert sorted(memory.iterdir()) == sorted([in_use, new])


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(memory):
    living, dead = make_private_folder(), make_private_folder()
    (dead.path / "memory").mkdir()
    (dead.path / "memory" / "shard-0.a.image").write_bytes(b"x")
    os.close(dead.lock)
    unfinished = memory / f"{prefix()}young"
    unfinished.mkdir(mode=0o700)
    third = make_private_folder()
    assert set(memory.iterdir()) == {living.path, third.path, unfinished}
    for each in (living, third):
        assert each.path.stat().st_mode & 0o777 == 0o700
        each.close()
    assert list(memory.iterdir()) == [unfinished]


CHURN_S = 2.0
CHURNING = 4


def test_of_processes_that_come_and_go_at_once_none_loses_its_folder(memory):
    """Each tidies up after dead ones while others are between making their folder and locking it."""

    def churn() -> int:
        made, ends_at = 0, time.monotonic() + CHURN_S
        while time.monotonic() < ends_at:
            folder = make_private_folder()
            if not os.path.samestat(os.stat(folder.path / LOCK), os.fstat(folder.lock)):
                return 0
            folder.close()
            made += 1
        return made

    pids, receive, send = [], *os.pipe()
    for _ in range(CHURNING):
        if not (pid := os.fork()):
            made = 0
            with contextlib.suppress(BaseException):
                made = churn()
            os.write(send, f"{made} ".encode())
            os._exit(0)
        pids.append(pid)
    os.close(send)
    for pid in pids:
        os.waitpid(pid, 0)
    with open(receive, encoding="ascii") as told:
        counts = [int(word) for word in told.read().split()]
    assert len(counts) == CHURNING and all(counts) and sum(counts) > 1000, counts
    assert not list(memory.iterdir())


def _foreign_folders(memory: Path, uid: int, kinds: tuple[str, ...]) -> list[Path]:
    """What another user (the caller) puts where user ``uid`` looks."""
    made = []
    for kind in kinds:
        for start in ("slurmft", "slurmft-memory", "slurmft-sweep", "slurmft-local"):
            folder = memory / f"{start}-{uid}-{kind}"
            folder.mkdir()
            folder.chmod(0o777)
            lock = folder / "lock"
            if kind == "fifo":
                os.mkfifo(lock, 0o666)
            elif kind == "link":
                lock.symlink_to("/dev/zero")
            elif kind == "free":
                lock.touch(mode=0o666)
            made.append(folder)
    (memory / f"slurmft-{uid}-loop").symlink_to(memory)
    os.mkfifo(memory / f"slurmft-sweep-{uid}-pipe")
    return made


@needs_root
@pytest.mark.timeout(40)
def test_folders_of_another_user_are_not_opened_not_waited_for_and_not_removed(memory):
    foreign = _foreign_folders(memory, OTHER, ("fifo", "link", "free", "leased"))

    def work() -> list[str]:
        arena, workers = Arena(0, None), Workers(lambda _: None)
        folders = [arena.folder, workers.folder]
        assert bounded(lambda: 5, limit_s=5, name="slurmft-sweep", environment={}) == 5
        assert all(folder.stat().st_uid == OTHER for folder in folders)
        arena.close()
        workers.close()
        return sorted(os.listdir(memory))

    with contextlib.ExitStack() as leases:
        for folder in foreign:
            if folder.name.endswith("leased"):
                leases.enter_context(leased(folder / "lock"))
        with quickly():
            left = as_user(OTHER, work)
    own_lock = [name for name in left if (memory / name).lstat().st_uid == OTHER]
    assert len(own_lock) == 1
    assert own_lock[0].startswith(f"slurmft-sweep-{OTHER}-")
    assert all(folder.is_dir() for folder in foreign)


@needs_root
def test_a_hundred_thousand_entries_of_another_user_cost_nothing(memory, monkeypatch):
    shared = memory / "dev/shm"
    shared.mkdir(parents=True)
    shared.chmod(0o1777)
    monkeypatch.setattr(files, "SHARED_MEMORY", shared)
    for number in range(100_000):
        (shared / f"slurmft-{OTHER}-{number}").mkdir()

    def work() -> float:
        began = time.process_time()
        make_private_folder().close()
        return time.process_time() - began

    assert as_user(OTHER, work) < SOON_S  # less than 30 us for each, on a slow machine
    began = time.process_time()
    assert orphaned_memory(Scene(node="n", now=time.time() + 1000, root=memory)) == []
    assert time.process_time() - began < 2 * SOON_S


@needs_root
@pytest.mark.timeout(40)
def test_roots_lock_is_not_ended_by_a_file_that_another_user_put_there_first(memory):
    """It used to be /tmp/slurmft-sweep-0.lock; with a name that cannot be guessed there is nothing to take."""

    def occupy() -> None:
        for name in ("slurmft-sweep-0.lock", "slurmft-sweep-0", "slurmft-sweep-0-a"):
            (memory / name).touch(mode=0o666)
        _foreign_folders(memory, 0, ("fifo", "free"))

    as_user(OTHER, occupy)
    with quickly():
        assert bounded(lambda: 5, limit_s=5, name="slurmft-sweep", environment={}) == 5

    def second() -> int:
        try:
            bounded(lambda: 5, limit_s=1, name="slurmft-sweep", environment={})
        except StorageUnavailable:
            return 7
        return 8

    assert bounded(second, limit_s=5, name="slurmft-sweep", environment={}) == 7


@needs_root
@pytest.mark.timeout(40)
@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "leased", "foreign"])
def test_root_neither_waits_for_a_users_lock_nor_opens_what_is_none(memory, kind):
    folder = memory / f"slurmft-{OTHER}-x"
    folder.mkdir(mode=0o700)
    lock = folder / "lock"
    lease: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "link":
        (memory / "target").touch()
        lock.symlink_to(memory / "target")
    elif kind == "folder":
        lock.mkdir()
    elif kind == "leased":
        lease = leased(lock)
    with lease:
        if kind not in ("foreign", "leased"):
            os.chown(lock, OTHER, OTHER, follow_symlinks=False)
        elif kind == "foreign":
            lock.touch()
        os.chown(folder, OTHER, OTHER)
        if kind == "leased":
            os.chown(lock, OTHER, OTHER)
        with quickly():
            assert not is_left_over(folder, owner=OTHER)


@needs_root
@pytest.mark.timeout(40)
def test_the_epilog_removes_what_cannot_be_opened_and_does_not_follow_it(tmp_path):
    shm = tmp_path / "dev/shm"
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").touch()
    folder = shm / f"slurmft-{OTHER}-dead"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(keep)
    deep = folder / "a"
    for _ in range(5):
        deep.mkdir()
        os.mkfifo(deep / "pipe")
        deep = deep / "a"
    old = shm / f"slurmft-memory-{OTHER}-old"
    old.mkdir()
    (old / "lock").touch()
    for path in [keep / "file", keep, *shm.rglob("*")]:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    folder.chmod(0o700)
    scene = Scene(node="n", now=time.time(), root=tmp_path)
    with quickly():
        cleaned = clean(scene, "5", OTHER)
    assert set(cleaned.paths) == {str(folder), str(old)}
    assert list(shm.iterdir()) == []
    assert (keep / "file").exists()


def test_a_tree_that_is_too_deep_or_not_ours_stays(memory):
    deep = memory / f"{prefix()}x"
    inner = deep
    for _ in range(40):
        inner.mkdir(mode=0o700)
        inner = inner / "a"
    with pytest.raises(OSError, match="too deeply"):
        remove_tree(deep, owner=os.geteuid())
    with pytest.raises(UnsafeFile):
        remove_tree(deep, owner=OTHER)
    link = memory / "link"
    link.symlink_to(deep)
    with pytest.raises(OSError):
        remove_tree(link, owner=os.geteuid())
    assert deep.is_dir()


@needs_root
@pytest.mark.timeout(40)
@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_a_local_folder_whose_name_is_taken_gets_another_name(memory, tmp_path, kind):
    taken = memory / f"slurmft-{OTHER}"
    if kind == "fifo":
        os.mkfifo(taken, 0o666)
    elif kind == "link":
        taken.symlink_to("/etc")
    else:
        taken.mkdir(mode=0o777)
    checkpoints = memory / "checkpoints"
    checkpoints.mkdir(mode=0o777)
    checkpoints.chmod(0o777)

    def work() -> list[str]:
        return [str(local_folder(memory, checkpoints)) for _ in range(2)]

    with quickly():
        first, second = as_user(OTHER, work)
    assert first == second
    assert Path(first).stat().st_uid == OTHER
    assert not first.startswith(f"{taken}/")


@needs_root
@pytest.mark.timeout(40)
def test_a_place_beside_the_checkpoints_that_another_user_made_first_is_an_error_at_once(memory):
    spill = memory / ".staging"
    spill.mkdir()
    spill.chmod(0o777)

    def work() -> str:
        try:
            Arena(0, spill)
        except OSError as error:
            return str(error)
        return ""

    with quickly():
        assert "belongs to user id 0" in as_user(OTHER, work)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_an_image_that_is_no_file_is_an_error_at_once(tmp_path, kind):
    arena = Arena(0, tmp_path)
    if kind == "fifo":
        os.mkfifo(tmp_path / "shard-0.a.image")
    else:
        (tmp_path / "shard-0.a.image").symlink_to(tmp_path / "target")
    with quickly(), pytest.raises(UnsafeFile):
        arena.places[0].begin(1000)
    assert not (tmp_path / "target").exists()


def killed_with(name: str) -> Path:
    """The folder of an agent of this name that was killed."""
    pid = os.fork()
    if not pid:
        (Workers(print, name).memory / "snapshot").write_text(name)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    [path] = [each for each in files.shared_memory().iterdir() if (each / LOCK).read_text() == name]
    return path


def test_an_agent_takes_over_the_memory_of_the_one_that_was_killed_in_its_place(memory):
    own, others = killed_with("this start, node 0"), killed_with("this start, node 1")
    agent = Workers(print, "this start, node 0")
    try:
        assert (agent.memory / "snapshot").read_text() == "this start, node 0"
        assert not own.exists() and others.exists(), "the other one's heir may still come"
        later = time.time() - files.KEPT_S - 1
        os.utime(others / LOCK, (later, later))
        make_private_folder().close()
        assert not others.exists(), "it has not come"
    finally:
        agent.close()
    assert not agent.folder.exists()


def test_no_memory_is_taken_from_a_living_agent_or_for_another_start(memory):
    name = "this start, node 0"
    alive, left = Workers(print, name), killed_with("an earlier start, node 0")
    (alive.memory / "snapshot").touch()
    second = Workers(print, name)
    try:
        assert [*second.memory.iterdir()] == [] and (alive.memory / "snapshot").exists() and left.exists()
    finally:
        for one in (alive, second):
            one.close()


@needs_root
def test_memory_that_another_user_puts_there_is_inherited_by_nobody(memory):
    name = "this start, node 0"

    def plant() -> None:
        folder = memory / f"{prefix()}planted"
        (folder / "memory").mkdir(parents=True)
        (folder / "memory" / "snapshot").touch()
        (folder / LOCK).write_text(name)

    as_user(OTHER, plant)
    agent = Workers(print, name)
    try:
        assert [*agent.memory.iterdir()] == []
    finally:
        agent.close()
