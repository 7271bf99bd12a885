"""The writer process and its client: what is staged becomes durable and committed, whoever dies meanwhile."""

import contextlib
import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from staging import Client, Memory, begun, ended, quick_folder
from waiting import until

from slurmft.checkpoint import write_requests
from slurmft.checkpoint.catalog import Catalog
from slurmft.checkpoint.image_file import image_file, index_file, is_held, read_index, reading
from slurmft.checkpoint.snapshots import Arena
from slurmft.checkpoint.write_requests import NICE, ProgressPage, Report, WriteRequest
from slurmft.checkpoint.writer import POLITE_BYTES, ImageLane, Outbox, Task, give_up, gone_file
from slurmft.errors import UsageError
from slurmft.system.files import write_json

SLOW = 2_000_000.0
"""Bytes per second at which a megabyte takes long enough to do something meanwhile."""


@pytest.fixture
def memory() -> Iterator[Memory]:
    with quick_folder() as folder:
        yield Memory(folder / "memory", folder / "checkpoints")


Start = Callable[..., Client]


@pytest.fixture
def start(clients) -> Start:
    """Starts clients; their processes are ended."""

    def begin(**details: object) -> Client:
        clients.append(Client(**details))
        return clients[-1]

    return begin


def saved(client: Client, request: WriteRequest) -> Report:
    client.submit(request)
    return ended(client, request)


def kinds(client: Client) -> list[str]:
    return [report.kind for report in client.poll()]


def test_a_snapshot_becomes_a_checkpoint(memory, start):
    client = start()
    request = memory.stage(5, metrics={"loss": float("nan"), "accuracy": 0.5})
    report = saved(client, request)
    assert (report.kind, report.final, report.errno) == ("committed", True, 0)
    (entry,) = Catalog(memory.checkpoints).committed()
    assert memory.steps() == [5]
    assert set(entry.files) == {".metadata", "__0_0.distcp", "__0_0.json"}
    assert (entry.world_size, entry.size_bytes, entry.metrics["accuracy"]) == (1, report.size_bytes, 0.5)
    until(lambda: "pruned" in kinds(client))
    staged = read_index(request.snapshot)
    assert staged is not None and staged.is_hashed, "a restart from memory verifies by the digests"
    assert client.close(5) and client.unfinished() == []
    with pytest.raises(UsageError, match="was closed"):
        client.submit(request)


def test_a_client_that_is_closed_in_the_thread_of_its_own_reports_waits_for_nothing(memory, start):
    """The garbage collector may come by there, and find a manager that the trainer has forgotten."""
    took_s = list[float]()

    def close(report: Report) -> None:
        if not took_s:
            before = time.monotonic()
            client.close(30.0)
            took_s.append(time.monotonic() - before)

    client = start(on_report=close)
    client.submit(memory.stage(1))
    until(lambda: took_s)
    assert took_s[0] < 10.0
    until(lambda: memory.steps() == [1])


def test_it_starts_quickly_and_needs_neither_torch_nor_numpy():
    code = (
        "import sys, slurmft.checkpoint.writer, slurmft.checkpoint.write_requests\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'click', 'yaml', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "size_bytes", [0, 1, 4095, 4096, 4097, (16 << 20) + 5], ids=["0", "1", "block-1", "block", "block+1", "piece+5"]
)
def test_an_image_of_any_size_is_written_byte_for_byte(tmp_path, start, size_bytes):
    memory = Memory(tmp_path / "memory", tmp_path / "checkpoints")  # on a disk, where writes are direct
    assert saved(start(), memory.stage(1, size_bytes=size_bytes)).kind == "committed"
    assert memory.steps() == [1]


def test_every_rank_writes_and_rank_0_commits_when_all_have(memory, start):
    lead, other = start(), start()
    requests = [memory.stage(1, shard=shard, shards=2) for shard in (0, 1)]
    lead.submit(requests[0])
    until((requests[0].folder / index_file(0)).exists)
    assert memory.steps() == []
    report = saved(other, requests[1])
    assert (report.kind, report.final) == ("written", True)
    assert ended(lead, requests[0]).kind == "committed"
    assert memory.steps() == [1]


def test_a_thousand_receipts_are_seen_at_once(memory, start):
    request = memory.stage(1, shards=1000, size_bytes=0)
    request.folder.mkdir(parents=True)
    for shard in range(1, 1000):
        base = {"format": 1, "identity": [1, 0, 1], "items": [], "shard": shard, "shards": 1000, "size_bytes": 0}
        (request.folder / index_file(shard)).write_text(json.dumps(base) + "\n")
        (request.folder / image_file(shard)).touch()
    report = saved(start(), request)
    assert report.kind == "committed" and report.seconds < 5
    assert len(Catalog(memory.checkpoints).committed()[0].files) == 2001


def test_the_newest_that_waits_wins_and_nothing_of_the_others_stays(memory, start):
    client = start()
    first, second, third = (memory.stage(n, slot=str(n), max_bytes_per_s=SLOW, size_bytes=10**6) for n in (1, 2, 3))
    for request in (first, second, third):
        client.submit(request)
        until(lambda: client.progress().done_bytes or client.unfinished() != [first.identity])
    assert ended(client, second).kind == "superseded"
    assert ended(client, first).kind == ended(client, third).kind == "committed"
    assert memory.steps() == [3, 1]
    until(lambda: sorted(p.name for p in memory.checkpoints.iterdir()) == [r.folder.name for r in (first, third)])


def test_what_waits_comes_next_once_the_one_before_it_is_written(memory):
    """A save that was asked for just then, which there was room for, took the place of the one that waited."""
    outbox, written = Outbox(), list[int]()
    first, second, third = (Task(memory.stage(n, slot=str(n)), outbox) for n in (1, 2, 3))

    def hand_over(task: Task) -> None:
        written.append(task.request.identity.step)
        if task is first:
            lane.offer(second)
            lane.offer(third)

    lane = ImageLane(ProgressPage.new(), hand_over)
    lane.offer(first)
    threading.Thread(target=lane.run, daemon=True).start()
    until(lane.is_idle)
    assert written == [1, 2, 3]


def test_a_stop_waits_for_neither_the_cap_nor_for_an_older_image(memory, start):
    client = start()
    first = memory.stage(1, slot="a", max_bytes_per_s=1000.0)
    client.submit(first)
    until(lambda: client.progress().size_bytes)
    urgent = memory.stage(2, slot="b", max_bytes_per_s=1000.0, urgent=True)
    assert saved(client, urgent).kind == "committed"
    assert ended(client, first).kind in ("superseded", "committed")  # whichever half of it was written
    assert memory.steps()[0] == 2


def test_hurry_lifts_the_cap_of_what_is_being_written(memory, start):
    client = start()
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=1000.0))
    client.hurry()
    assert ended(client, request).kind == "committed"


def test_the_cap_is_kept(memory, start):
    report = saved(start(), memory.stage(1, size_bytes=10**6, max_bytes_per_s=2e6))
    assert report.kind == "committed" and report.seconds > 0.45


@pytest.mark.parametrize("phase", ["waiting", "writing", "for-receipts"])
def test_an_abandoned_save_is_left(memory, start, phase):
    client = start()
    blocker = memory.stage(1, slot="a", max_bytes_per_s=1e5)
    request = memory.stage(2, slot="b", shards=2, max_bytes_per_s=0.0 if phase == "for-receipts" else 1e5)
    if phase == "waiting":
        begun(client, blocker)
    client.submit(request)
    if phase == "writing":
        until(lambda: client.progress().done_bytes)
    if phase == "for-receipts":
        until(lambda: "written" in kinds(client))
    client.abandon(request.identity)
    assert ended(client, request).kind == "abandoned"
    until(lambda: not (request.folder / image_file(0)).exists())  # cleared after the report
    assert memory.steps() == []


def test_the_image_is_held_while_it_is_read_and_no_longer(memory, start):
    client = start()
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=1e5))
    assert is_held(request.image)
    successor = Arena(0, memory.memory)  # of a worker that knows nothing of this writer
    taken, free = successor.places
    assert (taken.image, successor.free([])) == (request.image, free)
    client.hurry()
    ended(client, request)
    assert not is_held(request.image)


def test_a_snapshot_that_is_gone_or_another_is_no_checkpoint(memory, start):
    client = start()
    gone = memory.stage(1)
    gone.snapshot.unlink()
    assert saved(client, gone).phase == "reading the image"
    other = memory.stage(2)
    memory.stage(3)
    report = saved(client, other)
    assert (report.kind, report.final) == ("failed", True) and "holds shard 0 of step-00000003.g0.c3" in report.text
    torn = begun(client, memory.stage(4, size_bytes=10**6, max_bytes_per_s=2e6))
    torn.snapshot.unlink()  # as a worker does before it copies into the slot again
    report = ended(client, torn)
    assert report.kind == "failed" and "was changed while it was written" in report.text
    assert memory.steps() == []


def test_a_worker_may_end_and_take_its_memory_folder_away(memory, start):
    client = start()
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=2e6))
    shutil.rmtree(memory.memory)
    assert ended(client, request).kind == "committed" and memory.steps() == [1]


def test_the_writer_finishes_after_its_worker_was_killed(memory):
    code = (
        "import os, signal, sys, pickle\n"
        "from slurmft.checkpoint.write_requests import WriterClient\n"
        "client = WriterClient()\n"
        "client.submit(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "print(client.pid, flush=True)\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    request = memory.stage(1, size_bytes=10**6, max_bytes_per_s=2e6)
    worker = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(request).hex()],
        capture_output=True, timeout=60, check=False, start_new_session=True,
    )  # fmt: skip
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    writer = int(worker.stdout)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(writer, number)
    until(lambda: not Path(f"/proc/{writer}").exists())
    assert memory.steps() == [1]


def test_after_its_lifetime_the_writer_ends_whatever_is_unfinished(memory, start):
    client = start(lifetime_s=0.2)
    begun(client, memory.stage(1, max_bytes_per_s=1000.0))
    pid = client.pid
    assert client.close(0) is False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    assert memory.steps() == []


def test_a_forked_child_does_not_keep_the_writer_alive(memory, start):
    client = start()
    go_read, go_write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(go_write)
        os.read(go_read, 1)
        os._exit(0)
    pid = client.pid
    assert client.close(5)
    os.waitpid(pid, 0)  # ends although the child, which had inherited the socket, lives
    os.close(go_write)
    os.close(go_read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_newer_attempt_fences_the_writer_of_an_older_one(memory, start, monkeypatch):
    run = memory.memory.parent / "run"
    run.mkdir()
    write_json(run / "owner.json", {"generation": 7})
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(run))
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    old = start()
    assert saved(old, memory.stage(1, generation=7, slot="a")).kind == "committed"
    write_json(run / "owner.json", {"generation": 8})
    monkeypatch.setenv("SLURMFT_GENERATION", "8")
    new = start()
    late = memory.stage(2, generation=7, slot="a")
    report = saved(old, late)
    assert (report.kind, report.fenced, report.final) == ("failed", True, True)
    assert memory.steps() == [1] and late.folder.exists()
    assert saved(new, late).kind == "committed", "the newer attempt may take over what the older one has staged"
    assert saved(new, memory.stage(2, commit=3, generation=8, slot="b")).kind == "committed"
    assert memory.steps() == [2, 2, 1]


def test_two_writers_of_one_snapshot_do_no_harm(memory, start):
    request = memory.stage(1, size_bytes=10**6, max_bytes_per_s=4e6)
    clients = [start(), start()]
    for client in clients:
        client.submit(request)
    assert {ended(client, request).kind for client in clients} == {"committed"}
    assert memory.steps() == [1]


def test_a_folder_that_was_removed_is_not_written_to_again(memory, start):
    client = start()
    request = begun(client, memory.stage(1, size_bytes=10**6, max_bytes_per_s=1e6))
    (request.folder).rename(memory.checkpoints / "moved away")
    request.folder.mkdir()
    report = ended(client, request)
    assert (report.kind, report.text) == ("superseded", "its folder was removed") and memory.steps() == []
    assert not (request.folder / image_file(0)).exists()


def test_who_gives_up_lets_nobody_wait(memory, start):
    lead, other = start(), start()
    requests = [memory.stage(1, shard=shard, shards=2) for shard in (0, 1)]
    lead.submit(requests[0])
    until((requests[0].folder / index_file(0)).exists)
    requests[1].image.unlink()
    assert saved(other, requests[1]).errno == errno.ENOENT
    report = ended(lead, requests[0])
    assert report.kind == "failed" and gone_file(1) in report.text and "No such file" in report.text
    until(lambda: not (requests[0].folder / image_file(0)).exists())  # cleared after the report
    assert saved(lead, memory.stage(2, slot="b")).kind == "committed"
    until(lambda: not requests[0].folder.exists())


@pytest.mark.parametrize("case", ["committed", "receipt", "fenced", "neither"])
def test_giving_up_touches_nothing_that_may_be_committed(memory, monkeypatch, case):
    folder = memory.checkpoints / "step-00000001.g0.c1"
    folder.mkdir(parents=True)
    (folder / image_file(1)).touch()
    if case == "committed":
        (folder / "manifest.json").touch()
    if case == "receipt":
        (folder / index_file(1)).touch()
    if case == "fenced":
        write_json(memory.checkpoints / "owner.json", {"generation": 8})
        monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(memory.checkpoints))
        monkeypatch.setenv("SLURMFT_GENERATION", "7")
    give_up(folder, 1, "superseded")
    assert (folder / image_file(1)).exists() == (case != "neither")
    assert (folder / gone_file(1)).exists() == (case == "neither")


def test_pruning_keeps_what_is_being_read_the_best_and_every_so_many_steps(memory, start):
    client = start()
    keep = {"keep_last_n": 1, "keep_every": 10, "best_metric": "loss"}

    def commit(step: int, loss: float) -> WriteRequest:
        request = memory.stage(step, keep=keep, metrics={"loss": loss})
        assert saved(client, request).kind == "committed"
        until(lambda: any(r.kind == "pruned" and r.identity == request.identity for r in client.poll()))
        return request

    with reading(commit(1, 5.0).folder):
        for step in (2, 3, 4, 5):
            commit(step, 5.0 - step)
        assert memory.steps() == [5, 4, 1]
    commit(10, 1.0)
    commit(11, 9.0)
    assert memory.steps() == [11, 10, 5]
    commit(12, 9.0)
    commit(13, 9.0)
    assert memory.steps() == [13, 12, 10, 5]


def test_a_callback_hears_everything_and_may_fail(memory, start, caplog):
    heard: list[str] = []

    def callback(report: Report) -> None:
        heard.append(report.kind)
        raise ValueError("a bug of the caller")

    assert saved(start(on_report=callback), memory.stage(1)).kind == "committed"
    until(lambda: len(heard) == 4)
    assert set(heard) == {"hashed", "written", "committed", "pruned"}
    assert "could not be handled" in caplog.text


def test_what_is_large_yields_to_whoever_trains_and_what_is_urgent_does_not(memory, start, monkeypatch):
    client = start()
    request = memory.stage(1, size_bytes=POLITE_BYTES, max_bytes_per_s=1e6)

    def priorities() -> list[tuple[int, int]]:
        threads = [int(task.name) for task in Path(f"/proc/{client.pid}/task").iterdir()]
        return [(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread)) for thread in threads]

    client.submit(request)
    until(lambda: (NICE, os.SCHED_BATCH) in priorities())
    client.hurry()
    ended(client, request)
    until(lambda: set(priorities()) == {(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))})


def test_while_it_idles_nothing_runs(start):
    client = start()

    def is_asleep() -> bool:
        spent = [task.joinpath("schedstat").read_text() for task in Path(f"/proc/{client.pid}/task").iterdir()]
        time.sleep(0.5)
        later = [task.joinpath("schedstat").read_text() for task in Path(f"/proc/{client.pid}/task").iterdir()]
        return len(spent) >= 2 and spent == later

    until(is_asleep)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 9))])
def test_killed_at_any_moment_the_newest_committed_is_whole(memory, start, monkeypatch, seed):
    monkeypatch.setattr(write_requests, "MAX_TRIES", 50)
    monkeypatch.setattr(write_requests, "_PAUSE_S", 0.0)
    chance = random.Random(seed)
    client = start()
    for step in range(1, 6):
        request = memory.stage(step, slot="ab"[step % 2], size_bytes=3 * 10**6)
        client.submit(request)
        time.sleep(chance.random() * 0.15)  # some moment of about one save
        if pid := client.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert memory.steps()[:1] in ([step], [step - 1], [])
        assert ended(client, request).kind == "committed"
        assert memory.steps()[0] == step
    assert client.close(5)
