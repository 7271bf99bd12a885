"""Saves that go on in the background, what memory keeps of them, and the last step that is kept just in time."""

import errno
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import same, steps
from worker_variable import set_settings

from slurmft.checkpoint import Catalog, CheckpointManager, DistributedCheckpointManager, snapshots
from slurmft.checkpoint.image_file import index_file
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.notes import RankRecord, read_record
from slurmft.checkpoint.snapshots import Arena, SnapshotSlot
from slurmft.checkpoint.state import Trainee, capture
from slurmft.checkpoint.write_requests import ONCE_VARIABLE, VARIABLE, CommitOrder
from slurmft.errors import CheckpointError, UsageError
from slurmft.policy.worker_settings import CheckpointSettings
from slurmft.storage.checkpoint_names import Identity
from slurmft.trainer.savers import SAVERS, SaveOutcome


class Run(tiny_run.Run):
    """Its buffers change in each forward pass."""

    @staticmethod
    def last() -> torch.nn.Module:
        return torch.nn.BatchNorm1d(16)


@pytest.fixture(autouse=True)
def in_background(monkeypatch, synchronous_saves):
    set_settings(monkeypatch, checkpoint={"async_save": True})
    yield
    SAVERS.save_ended()


@pytest.fixture
def run() -> Run:
    run = Run()
    run.train(1)
    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


def children() -> set[int]:
    """Processes that this one has started, and that are no zombies."""
    pids = {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
    return {pid for pid in pids if " Z " not in Path(f"/proc/{pid}/stat").read_text()}


class Writer:
    """The writer of the next manager: it stops by itself at a point of its first save, until it is let go on."""

    def __init__(self, monkeypatch, once: Path, eventually) -> None:
        self.before, self._eventually = children(), eventually
        monkeypatch.setenv(VARIABLE, "request read=stop")
        monkeypatch.setenv(ONCE_VARIABLE, str(once))

    @property
    def pid(self) -> int:
        [pid] = children() - self.before
        return pid

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def await_stop(self) -> None:
        self._eventually(self.is_stopped)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def go_on_soon(self) -> threading.Thread:
        def work() -> None:
            time.sleep(0.3)  # whoever waits is waiting by then; if it is not, the test passes as well
            self.go_on()

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def writer(monkeypatch, tmp_path, eventually) -> Writer:
    return Writer(monkeypatch, tmp_path / "stopped once", eventually)


def test_a_save_returns_before_it_is_durable_and_holds_what_was_then(folder, run, writer, listener):
    checkpoints = CheckpointManager(folder)
    path = checkpoints.save(*run.objects, step=1, **run.parts)
    writer.await_stop()
    assert SAVERS.outcome is SaveOutcome.STAGED and steps(folder) == [] and listener.saved == []
    before, draw = run.tensors(), random.getstate()
    with torch.no_grad():
        for value in [*run.model.state_dict().values(), *run.optimizer.state[run.model[0].weight].values()]:
            value.add_(1)
    run.train(1)
    assert not same(before, run.tensors())
    writer.go_on()
    checkpoints.wait()
    checkpoints.wait()
    assert (path / "manifest.json").exists() and listener.saved == [1]
    fresh = Run(seed=9)
    loaded = CheckpointManager(folder).load_latest(*fresh.objects, **fresh.parts)
    assert (loaded.step, loaded.is_durable) == (1, True)
    assert same(before, fresh.tensors()) and random.getstate() == draw


@pytest.mark.parametrize("by", ["the same manager", "another one", "another one by the best metric"])
def test_a_load_waits_for_what_this_process_still_saves(folder, run, writer, by):
    checkpoints = saving = CheckpointManager(folder, best_metric="loss")
    saving.save(*run.objects, step=1, metrics={"loss": 2.0}, **run.parts)
    writer.await_stop()
    saved, fresh, thread = run.tensors(), Run(seed=9), writer.go_on_soon()
    if by != "the same manager":
        (folder.parent / "link").symlink_to(folder)
        checkpoints = CheckpointManager(folder.parent / "link", best_metric="loss")
    load = checkpoints.load_best if "best" in by else checkpoints.load_latest
    loaded = load(*fresh.objects, **fresh.parts)
    thread.join()
    assert (loaded.step, loaded.is_durable) == (1, True) and same(saved, fresh.tensors())


def test_a_load_after_a_save_that_fails_says_so_and_takes_the_older_one(folder, run, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, f"before marker={errno.EROFS}")
    checkpoints = CheckpointManager(folder)
    checkpoints.save(*run.objects, step=1, **run.parts)
    fresh = Run(seed=9)
    assert not checkpoints.load_latest(*fresh.objects, **fresh.parts).found
    assert "step-00000001.g0.c1 was not committed" in caplog.text
    monkeypatch.delenv(VARIABLE)


def test_a_save_that_waits_for_the_disk_gives_way_to_a_newer_one(
    folder, run, memory, monkeypatch, listener, caplog, eventually
):
    set_settings(monkeypatch, checkpoint={"async_save": True, "bandwidth": 20})  # so that one save takes minutes
    checkpoints = CheckpointManager(folder)
    assert checkpoints.save(*run.objects, step=1)
    eventually(lambda: checkpoints._snapshots._writer._writer.page.progress().done_bytes)
    states = {}
    for step in range(2, 20):
        run.train(1)
        states[step] = run.tensors()
        SAVERS.save_begins(urgent=False)
        assert checkpoints.save(*run.objects, step=step)
        SAVERS.save_ended()
        assert SAVERS.outcome is SaveOutcome.STAGED
        assert len(list(folder.glob("step-*"))) <= 2 and len(checkpoints._snapshots._saves()) == 2
    told = [one.getMessage() for one in caplog.records if "is not saved" in one.getMessage()]
    assert [text.split()[1] for text in told] == ["2", "3", "5", "9", "17"], "after 1, 2, 4 of them, not each time"
    checkpoints.wait()  # which lifts the cap
    assert steps(folder) == [19, 1] and listener.saved == [1, 19] and listener.failed == []
    fresh = Run(seed=9)
    assert CheckpointManager(folder).load_latest(*fresh.objects).step == 19 and same(fresh.tensors(), states[19])


def test_what_is_being_written_gives_way_to_nothing_but_a_stop(folder, run, writer, caplog):
    """Both saves of rank 0 are begun: one waits for the other ranks, the next is being written."""
    checkpoints = CheckpointManager(folder)
    assert checkpoints.save(*run.objects, step=1)
    writer.await_stop()
    assert checkpoints.save(*run.objects, step=2)
    checkpoints._snapshots.standing(Identity(1, 0, 1)).is_written = True
    SAVERS.save_begins(urgent=False)
    assert checkpoints.save(*run.objects, step=3) is None
    SAVERS.save_ended()
    assert SAVERS.outcome is SaveOutcome.SKIPPED and "step 3 is not saved" in caplog.text
    writer.go_on()
    checkpoints.wait()
    assert steps(folder) == [2, 1]
    assert checkpoints.save(*run.objects, step=4)
    checkpoints.wait()
    assert steps(folder)[0] == 4


def test_saves_that_are_written_and_wait_for_their_commit_are_two_at_most(folder, run, memory, eventually):
    """Their memory is free again, so that alone would let them pile up: rank 1 writes nothing."""
    saving = snapshots.Snapshots(
        CheckpointSettings(), memory=memory, spill=folder, on_committed=lambda *_: None, on_failed=lambda *_: None
    )
    flat, written = capture(Trainee(*run.objects), None, rank=0), []
    for step in range(1, 7):
        prepared = saving.prepare(flat, rank=0, world_size=2)
        if prepared.place is None:  # as for a save that is skipped, or waits
            continue
        identity = Identity(step, 0, step)
        path = folder / identity.folder_name
        saving.stage(prepared, identity, path, order=CommitOrder())
        eventually((path / index_file(0)).exists)
        eventually(lambda: not saving._busy())
        written.append(step)
    saving.make_room()
    saving.close()
    assert written == [1, 2]


@pytest.mark.parametrize("why", ["when_busy", "urgent", "synchronous", "the trainer's own wish"])
def test_a_save_that_must_not_be_skipped_waits(folder, run, writer, monkeypatch, why):
    if why == "when_busy":
        set_settings(monkeypatch, checkpoint={"when_busy": "wait"})
    checkpoints = CheckpointManager(folder)
    checkpoints.save(*run.objects, step=1)
    writer.await_stop()
    checkpoints.save(*run.objects, step=2)
    thread = writer.go_on_soon()
    if why != "the trainer's own wish":
        SAVERS.save_begins(urgent=why == "urgent")
    path = checkpoints.save(*run.objects, step=3, async_save=why != "synchronous")
    thread.join()
    checkpoints.wait()
    assert path is not None and steps(folder)[0] == 3


def test_of_saves_in_a_loop_of_epochs_none_is_missing_at_the_end(folder, run, writer):
    checkpoints = DistributedCheckpointManager(folder, keep_last_n=9)
    checkpoints.save_checkpoint(*run.objects, epoch=1)
    writer.await_stop()
    thread = writer.go_on_soon()
    assert all(checkpoints.save_checkpoint(*run.objects, epoch=epoch) for epoch in range(2, 6))
    thread.join()
    checkpoints.wait()
    assert steps(folder) == [5, 4, 3, 2, 1]


def test_a_save_in_a_signal_handler_is_refused_with_the_way_to_write_it(folder, run):
    checkpoints, caught = CheckpointManager(folder), list[Exception]()

    def handler(*_: object) -> None:
        for save in (
            lambda: checkpoints.save(*run.objects, step=1),
            lambda: checkpoints.save_checkpoint({"a": 1}, "b"),
        ):
            try:
                save()
            except UsageError as error:
                caught.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(caught) == 2
    assert all("handler of SIGUSR1" in str(one) and "DistributedSignalHandler" in str(one.hint) for one in caught)
    assert steps(folder) == []
    handler(signal.SIGUSR1, None)  # the same function as an ordinary call
    checkpoints.wait()
    assert len(caught) == 2 and steps(folder)[-1] == 1


def test_a_disk_that_is_full_for_long_is_told_and_training_goes_on(
    folder, run, listener, monkeypatch, caplog, eventually
):
    monkeypatch.setenv(VARIABLE, f"image half written={errno.ENOSPC}")
    set_settings(monkeypatch, checkpoint={"max_failed_saves": 2})
    checkpoints = CheckpointManager(folder)
    for step in (1, 2):
        assert checkpoints.save(*run.objects, step=step)
        eventually(lambda: [one for one in listener.failed if one[0] == step])  # noqa: B023 - called at once
        assert [record for record in caplog.records if record.levelno == logging.CRITICAL] == [] or step == 2
    assert set(listener.failed) == {(1, errno.ENOSPC), (2, errno.ENOSPC)}
    assert "failure 2 in a row" in next(one.getMessage() for one in caplog.records if one.levelno == logging.CRITICAL)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as caught:
        checkpoints.wait()
    assert caught.value.errno == errno.ENOSPC and listener.saved == [] and steps(folder) == []


def test_a_closed_manager_has_saved_and_leaves_nothing_behind(folder, run, eventually):
    before, places = children(), set(Path("/dev/shm").glob(f"slurmft-{os.getuid()}-*"))
    checkpoints = CheckpointManager(folder)
    checkpoints.save(*run.objects, step=1)
    checkpoints.close()
    assert steps(folder) == [1]
    dropped = CheckpointManager(folder)
    dropped.save(*run.objects, step=2)
    assert len(children() - before) >= 1
    del dropped
    gc.collect()
    assert steps(folder)[0] == 2
    eventually(lambda: not children() - before)
    mine = set(Path("/dev/shm").glob(f"slurmft-{os.getuid()}-*")) - places
    assert not [path for path in mine if path.exists() and path.stat().st_uid == os.getuid() and is_mine(path)]


def is_mine(path: Path) -> bool:
    """Whether this process still maps something in a folder (other tests may run beside this one)."""
    return str(path) in Path("/proc/self/maps").read_text()


AT_ONCE = """
import sys, torch
from slurmft.checkpoint import CheckpointManager
model = torch.nn.Linear(1000, 1000)
CheckpointManager(sys.argv[1]).save(model, torch.optim.SGD(model.parameters()), step=1)
kept = CheckpointManager(sys.argv[1])
kept.save(model, torch.optim.SGD(model.parameters()), step=2)
"""


@pytest.mark.long
def test_the_end_of_the_process_waits_for_its_last_save(folder):
    command = [sys.executable, "-W", "error", "-c", AT_ONCE, str(folder)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(folder) == [2, 1]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def uncommitted(folder, run, memory, monkeypatch) -> list[torch.Tensor]:
    """Step 1 is on disk, step 2 in memory only; its weights."""
    first = CheckpointManager(folder)
    first.save(*run.objects, step=1, metrics={"loss": 3.0}, **run.parts)
    first.wait()
    first.close()
    run.train(1)
    monkeypatch.setenv(VARIABLE, f"before marker={errno.EROFS}")
    second = CheckpointManager(folder)
    second.save(*run.objects, step=2, metrics={"loss": 2.0}, extra={"name": "x"}, **run.parts)
    with pytest.raises(CheckpointError):
        second.wait()
    second.close()
    return run.tensors()


def load(folder: Path):
    fresh = Run(seed=9)
    checkpoints = CheckpointManager(folder)
    return checkpoints, fresh, checkpoints.load_latest(*fresh.objects, **fresh.parts)


def test_what_is_only_in_memory_is_loaded_and_saved_again(folder, uncommitted, memory, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    checkpoints, fresh, loaded = load(folder)
    assert (loaded.step, loaded.is_durable, loaded.metrics, loaded.extra) == (2, False, {"loss": 2.0}, {"name": "x"})
    assert "memory" in loaded.source and same(uncommitted, fresh.tensors())
    tries = json.loads((memory / "tries.json").read_text())["tries"]
    assert tries == {"step-00000002.g0.c2": [0], "step-00000002.g0.c3": [0]}, "generations that began with it"
    checkpoints.wait()
    [newest, older] = Catalog(folder).committed()
    assert (newest.step, newest.metrics, older.step) == (2, {"loss": 2.0}, 1)
    again = load(folder)[2]
    assert (again.step, again.is_durable) == (2, True)


def test_a_state_that_is_never_committed_is_begun_with_only_so_often(folder, uncommitted, monkeypatch):
    begun = []
    for generation in range(1, 5):
        monkeypatch.setenv("SLURMFT_GENERATION", str(generation))
        checkpoints, _, loaded = load(folder)
        begun.append(loaded.step)
        checkpoints.close()
    assert begun == [2, 2, 1, 1]


def edit(name: str, change):
    """Change the newest snapshot's index or image in memory."""

    def damage(memory: Path) -> None:
        for path in memory.glob(f"shard-0.*.{name}"):
            path.write_bytes(change(bytearray(path.read_bytes())))

    return damage


def flipped(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


def first_item(content: bytearray) -> bytearray:
    content[8] ^= 1
    return content


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(edit("image", first_item), id="flipped bit of an image"),
        pytest.param(edit("image", lambda content: content[:5000]), id="image cut off"),
        pytest.param(edit("image", lambda content: b""), id="empty image"),
        pytest.param(edit("image", lambda content: os.urandom(len(content))), id="garbage image"),
        pytest.param(edit("json", lambda content: content[:100]), id="index cut off"),
        pytest.param(edit("json", lambda content: os.urandom(len(content))), id="garbage index"),
        pytest.param(edit("json", lambda content: b"[]"), id="index is a list"),
        pytest.param(edit("json", lambda content: b'{"format": 99}'), id="index of a newer format"),
        pytest.param(edit("json", flipped), id="flipped bit of an index"),
        pytest.param(lambda memory: [path.unlink() for path in memory.glob("*.image")], id="no image"),
        pytest.param(lambda memory: [path.unlink() for path in memory.glob("*.json")], id="no index"),
    ],
)
def test_damaged_memory_falls_back_to_disk(folder, uncommitted, memory, damage, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    damage(memory)
    _, fresh, loaded = load(folder)
    assert (loaded.step, loaded.is_durable) == (1, True)
    assert not same(uncommitted, fresh.tensors())


def test_a_save_does_not_wait_for_room_that_is_still_being_made(folder, memory, monkeypatch):
    room, warm = threading.Event(), SnapshotSlot._warm

    def warm_slowly(place: SnapshotSlot, size_bytes: int) -> None:
        room.wait(60)
        warm(place, size_bytes)

    monkeypatch.setattr(SnapshotSlot, "_warm", warm_slowly)
    run, checkpoints = Run(), CheckpointManager(folder)
    for step in (1, 2):
        checkpoints.save(*run.objects, step=step, **run.parts)
        checkpoints.wait()
    assert [path.name for path in memory.glob("*.image")] == ["shard-0.a.image"], "the place that was warm"
    room.set()
    checkpoints.save(*run.objects, step=3, **run.parts)
    checkpoints.save(*run.objects, step=4, **run.parts)
    assert len(list(memory.glob("*.image"))) == 2
    checkpoints.wait()
    checkpoints.close()
    assert load(folder)[2].step == 4


def test_no_room_is_made_while_the_training_waits_for_a_copy(tmp_path, monkeypatch, eventually):
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 4096)
    made = Arena(0, tmp_path)
    with made.copying():
        made.warm_up(1 << 20)
        assert all(place.is_warming for place in made.places)
        assert all(path.stat().st_size == 0 for path in tmp_path.glob("*.image"))
    eventually(lambda: not any(place.is_warming for place in made.places))
    assert {len(place.memory or b"") for place in made.places} == {1 << 20}


def test_who_wants_a_place_does_not_wait_until_its_room_is_made_politely(tmp_path):
    made = Arena(0, tmp_path)
    with made.copying():
        made.warm_up(1 << 20)
        assert len(made.places[1].begin(1 << 20)) == 1 << 20
        assert not made.places[1].is_warming


def test_closing_ends_the_making_of_room_before_the_memory_goes(tmp_path):
    staged = Arena(0, tmp_path / "memory")
    staged.warm_up(1 << 30)
    staged.close()
    assert not any(place.is_warming or place.memory for place in staged.places)


def test_what_is_saved_beside_the_runs_own_checkpoints_never_meets_them(tmp_path, memory, monkeypatch):
    """An average of the weights, say: the same keys and steps, the same rank, another directory."""
    monkeypatch.setenv("SLURMFT_CHECKPOINT_DIR", str(tmp_path / "own"))
    set_settings(monkeypatch, checkpoint={"when_busy": "wait"})
    run, average = Run(), Run(seed=1)
    managers = CheckpointManager(tmp_path / "own"), CheckpointManager(tmp_path / "average")
    for step in range(1, 4):
        for each, checkpoints in zip((run, average), managers, strict=True):
            each.train(1)
            checkpoints.save(*each.objects, step=step, **each.parts)
    for checkpoints in managers:
        checkpoints.wait()
        checkpoints.close()
    assert {path.suffix for path in memory.glob("shard-*")} == {".image", ".json"}, "the run's own outlive the worker"
    for folder, each in ((tmp_path / "own", run), (tmp_path / "average", average)):
        _, fresh, loaded = load(folder)
        assert loaded.step == 3 and same(each.tensors(), fresh.tensors())
        assert loaded.source.startswith("memory" if each is run else "disk")


# ---- just in time ----------------------------------------------------------------------------------------------------


def test_the_last_complete_step_is_kept_bit_for_bit(folder, memory, listener):
    whole = Run()
    whole.train(9)
    first = Run()
    checkpoints = CheckpointManager(folder)
    first.train(1)
    checkpoints.save(*first.objects, step=1, **first.parts)
    checkpoints.wait()
    assert SAVERS.is_armed
    first.train(3)
    first.forward()  # of a step that is never over: it draws, counts on, and changes the buffers
    assert listener.rescuable == 4
    SAVERS.rescue()
    SAVERS.rescue()
    assert listener.rescued == [4]
    checkpoints.close()
    checkpoints, second, loaded = load(folder)
    assert (loaded.step, loaded.is_durable) == (4, False)
    second.train(5)
    assert same(whole.tensors(), second.tensors())
    checkpoints.wait()
    assert steps(folder) == [4, 1]


def test_weights_between_two_steps_are_never_kept(folder, memory, listener):
    run, checkpoints = Run(), CheckpointManager(folder)
    checkpoints.save(*run.objects, step=0, **run.parts)
    run.train(2)
    run.forward()
    run.optimizer.step()
    assert listener.rescuable < 0
    SAVERS.rescue()
    run.scheduler.step()
    SAVERS.rescue()
    assert listener.rescued == []
    checkpoints.wait()
    checkpoints.close()
    assert load(folder)[2].step == 0


def two_steps_after_a_save(folder: Path) -> tuple[Run, CheckpointManager]:
    run, checkpoints = Run(), CheckpointManager(folder)
    checkpoints.save(*run.objects, step=0, **run.parts)
    checkpoints.wait()
    run.train(2)
    return run, checkpoints


def test_a_rescue_waits_for_a_copy_that_is_under_way_and_takes_the_other_place(folder, memory, listener, monkeypatch):
    run, checkpoints = two_steps_after_a_save(folder)
    rescue = threading.Thread(target=SAVERS.rescue)
    copy = snapshots.copy_into

    def copy_meanwhile(*arguments: object, **options: object) -> None:
        if not rescue.ident:
            rescue.start()
            rescue.join(0.3)
            assert rescue.is_alive(), "it copies into what is being filled"
        copy(*arguments, **options)

    monkeypatch.setattr(snapshots, "copy_into", copy_meanwhile)
    checkpoints.save(*run.objects, step=2, **run.parts)
    rescue.join()
    assert listener.rescued == [2]
    checkpoints.wait()
    checkpoints.close()
    assert steps(folder) == [2, 0]
    _, fresh, loaded = load(folder)
    assert (loaded.step, loaded.is_durable) == (2, False), "the newer of the two"
    assert same(run.tensors(), fresh.tensors())


def test_what_a_rescue_has_kept_is_not_written_over(folder, memory, listener):
    """This rank was late for a save that another has died in."""
    run, checkpoints = two_steps_after_a_save(folder)
    SAVERS.rescue()
    assert listener.rescued == [2] and listener.rescuable < 0 and not listener.is_rescuing
    kept = [path for path in memory.glob("*.json") if json.loads(path.read_text())["identity"][0] == 2]
    content = kept[0].read_bytes()
    checkpoints.save(*run.objects, step=2, **run.parts)
    checkpoints.wait()
    assert steps(folder) == [2, 0] and kept[0].read_bytes() == content
    checkpoints.close()
    assert load(folder)[2].step == 2


def test_a_rescue_that_fails_does_not_let_the_agent_wait(folder, memory, listener, monkeypatch):
    _run = two_steps_after_a_save(folder)
    monkeypatch.setenv(VARIABLE, f"half staged={errno.ENOMEM}")
    SAVERS.rescue()
    assert listener.rescued == [] and listener.rescuable < 0 and not listener.is_rescuing


def test_a_rescue_asks_for_room_before_it_grows(folder, memory, listener, monkeypatch, caplog):
    _run = two_steps_after_a_save(folder)
    before = {path.name: path.read_bytes() for path in memory.glob("shard-0.*")}
    monkeypatch.setattr(snapshots.Layout, "capacity_bytes", lambda *_: 1 << 50)  # more than any node has
    with caplog.at_level(logging.WARNING):
        SAVERS.rescue()
    assert listener.rescued == []
    assert "step 2 is not kept just in time" in caplog.text and "are needed" in caplog.text
    assert {path.name: path.read_bytes() for path in memory.glob("shard-0.*")} == before, "nothing was given up for it"


def test_a_save_does_not_fail_of_what_is_for_a_rescue_alone(folder, memory, listener, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise MemoryError("no room for buffers")

    monkeypatch.setattr(JustInTime, "_copy_buffers", fail)
    run, checkpoints = Run(), CheckpointManager(folder)
    with caplog.at_level(logging.INFO):
        checkpoints.save(*run.objects, step=1, **run.parts)
        checkpoints.wait()
    assert steps(folder) == [1]
    assert "no step is kept just in time: MemoryError: no room for buffers" in caplog.text
    SAVERS.rescue()
    assert listener.rescued == []


@pytest.mark.parametrize("notes", [2, 3])
def test_of_two_notes_of_one_boundary_the_newer_counts(tmp_path, notes):
    """A script that saves inside of a step, and draws after that."""
    record = RankRecord(tmp_path, 0, 1)
    for place in range(notes):
        record.note(7, {"place": place})
    found = read_record(tmp_path, 0, 7, 1)
    assert found is not None and found["loader"] == {"place": notes - 1}
