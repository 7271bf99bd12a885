"""A run folder that is full, read-only or silent: who waits, who does not, and what is written once it can be."""

import errno
import gc
import os
import threading
import time

import pytest
from of_each import of_each
from waiting import slowness

from slurmft.errors import StorageError, StorageUnavailable
from slurmft.storage.journal import Journal
from slurmft.storage.patience import PASSING, FolderThread, PatientJournal, patiently, translated, write_state


class Disk:
    """Makes ``Journal.write`` fail or wait until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.flows = threading.Event()
        self.flows.set()
        original = Journal.write

        def write(journal, record):
            self.flows.wait(60)
            if self.error is not None:
                raise self.error
            original(journal, record)

        monkeypatch.setattr(Journal, "write", write)


@pytest.fixture
def disk(monkeypatch):
    faulty = Disk(monkeypatch)
    yield faulty
    faulty.flows.set()


@pytest.fixture
def journal(tmp_path):
    return PatientJournal(tmp_path, FolderThread(), attempt="7.0.0")


def names(journal: PatientJournal) -> list[str]:
    return [event.event for event in journal.read()]


def test_events_are_written_in_order_with_their_own_times(journal):
    before = time.time()
    for number in range(50):
        journal.append(f"event {number}", number=number)
    assert journal.flush(10)
    assert names(journal) == [f"event {number}" for number in range(50)]
    assert all(before - 1 <= event.seconds() <= time.time() + 1 for event in journal.read())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ESTALE], ids=errno.errorcode.get)
def test_events_wait_in_memory_while_the_disk_takes_nothing(journal, disk, number):
    disk.error = OSError(number, os.strerror(number))
    journal.append("first")
    journal.append("second")
    assert not journal.flush(0.1)
    assert [event.event for event in journal.unwritten()] == ["first", "second"]
    disk.error = None
    journal.append("third")
    assert journal.flush(10)
    assert names(journal) == ["first", "second", "third"]
    assert journal.unwritten() == []


def test_nobody_waits_for_a_folder_that_does_not_answer(journal, disk):
    disk.flows.clear()
    began = time.monotonic()
    journal.append("decision")
    assert not journal.flush(0.2)
    assert time.monotonic() - began < 5 * slowness()
    disk.flows.set()
    assert journal.flush(10)
    assert names(journal) == ["decision"]


def test_half_a_line_on_a_full_disk_is_no_event_and_is_written_whole_later(tmp_path, monkeypatch):
    journal = PatientJournal(tmp_path, FolderThread())
    journal.append("before")
    assert journal.flush(10)
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, data[: len(data) // 2]))
    journal.append("torn")
    assert not journal.flush(0.1)
    monkeypatch.setattr(os, "write", original)
    assert journal.flush(10)
    assert [event.event for event in journal.read()] == ["before", "torn"]


def test_a_call_that_takes_too_long_is_an_unavailable_folder():
    thread, gate = FolderThread(), threading.Event()
    with pytest.raises(StorageUnavailable, match="did not answer within 0 s"):
        thread.call(gate.wait, timeout_s=0.1)
    gate.set()
    assert thread.call(lambda: 5, timeout_s=10) == 5, "its thread goes on"


def test_an_error_of_the_work_reaches_its_caller_and_not_the_thread():
    thread = FolderThread()
    with pytest.raises(KeyError):
        thread.call(lambda: {}["x"], timeout_s=10)
    with pytest.raises(TimeoutError):
        thread.call(lambda: (_ for _ in ()).throw(TimeoutError("its own")), timeout_s=10)
    assert thread.submit(lambda: 1).result(10) == 1


def test_work_that_nobody_wants_any_more_is_skipped():
    thread, gate = FolderThread(), threading.Event()
    thread.submit(gate.wait)
    done: list[int] = []
    unwanted = thread.submit(lambda: done.append(1))
    assert unwanted.cancel()
    gate.set()
    assert thread.call(lambda: 2, timeout_s=10) == 2
    assert done == []


def test_patience_ends_with_success_or_with_the_last_error():
    tries: list[int] = []

    def works_at_the_third() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise StorageUnavailable("full")
        return "done"

    assert patiently(works_at_the_third, patience_s=5, pause_s=0.01) == "done"
    with pytest.raises(StorageUnavailable, match="still"):
        patiently(lambda: (_ for _ in ()).throw(StorageUnavailable("still full")), patience_s=0.05, pause_s=0.01)


def test_what_no_waiting_mends_is_told_at_once():
    tries: list[int] = []

    def broken() -> None:
        tries.append(1)
        raise StorageError("it is damaged")

    with pytest.raises(StorageError, match="damaged"):
        patiently(broken, patience_s=60)
    assert len(tries) == 1


@of_each(number=sorted(errno.errorcode))
def test_every_error_of_the_system_is_one_of_ours(number):
    error = translated("cannot write /x", OSError(number, os.strerror(number)))
    assert isinstance(error, StorageUnavailable) is (number in PASSING)
    assert os.strerror(number) in error.what


def test_a_state_file_that_cannot_be_written_is_our_error(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*No such file"):
        write_state(tmp_path / "gone" / "x.json", {})


def test_a_thread_ends_with_whoever_had_it() -> None:
    """A long run has thousands of attempts, and each has threads of its own."""

    class Owner:
        def __init__(self) -> None:
            self.thread = FolderThread()
            self.done: list[int] = []

        def work(self) -> None:
            self.done.append(1)

    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "run folder"}

    gc.collect()
    before = ours()
    owners = [Owner() for _ in range(8)]
    done = [owner.done for owner in owners]
    for owner in owners:
        owner.thread.submit(owner.work)
    new = ours() - before
    assert len(new) == 8
    del owners, owner
    for thread in new:
        thread.join(10)
        assert not thread.is_alive()
    assert done == [[1]] * 8, "what had been handed in was done"


def test_what_one_attempt_could_not_write_the_next_one_writes_first(tmp_path, disk):
    thread = FolderThread()
    earlier = PatientJournal(tmp_path, thread, attempt="7.0.0")
    disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    earlier.append("verdict")
    assert not earlier.flush(10)
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        thread.call(PatientJournal(tmp_path, thread).catch_up, timeout_s=10)
    disk.error = None
    thread.call(PatientJournal(tmp_path, thread).catch_up, timeout_s=10)
    assert names(earlier) == ["verdict"], "before the next attempt reads the journal"
    disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    earlier.append("decision")
    later = PatientJournal(tmp_path, thread, attempt="7.0.1")
    disk.error = None
    later.append("attempt started")
    assert later.flush(10)
    assert [(event.event, event.attempt) for event in later.read()] == [
        ("verdict", "7.0.0"), ("decision", "7.0.0"), ("attempt started", "7.0.1"),
    ]  # fmt: skip
