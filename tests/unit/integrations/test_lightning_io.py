"""SlurmftCheckpointIO with real Lightning: whole files only, in the order of the calls, and no code of theirs."""

import importlib.util
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from another_user import OTHER, needs_root

from slurmft.errors import CheckpointError, Fenced, UsageError
from slurmft.integrations import lightning
from slurmft.integrations.lightning import SlurmftCheckpointIO

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
pytestmark = pytest.mark.skipif(not HAS_LIGHTNING, reason="pip install lightning")


@pytest.fixture
def plugin():
    one = SlurmftCheckpointIO()
    yield one
    one.teardown()


def state(value: float) -> dict[str, object]:
    return {"state_dict": {"w": torch.full((300,), value)}, "epoch": 3, "names": ["a", "b"]}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    """Every write waits until it is set."""
    gate, write = threading.Event(), lightning.replace_atomically

    def wait_and_write(*args: object, **options: object) -> None:
        assert gate.wait(60)
        write(*args, **options)

    monkeypatch.setattr(lightning, "replace_atomically", wait_and_write)
    yield gate
    gate.set()


def test_a_file_is_torchs_own_and_has_what_was_saved(plugin, tmp_path):
    path = tmp_path / "new" / "a.ckpt"
    plugin.save_checkpoint(state(1.0), path)
    assert torch.equal(plugin.load_checkpoint(path)["state_dict"]["w"], torch.full((300,), 1.0))
    assert torch.load(path)["names"] == ["a", "b"]
    assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"]
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022


def test_a_save_is_of_the_moment_of_the_call(plugin, tmp_path, gate):
    given = state(1.0)
    plugin.save_checkpoint(given, tmp_path / "a.ckpt")
    given["state_dict"]["w"].zero_()
    given["names"].append("c")
    assert not (tmp_path / "a.ckpt").exists(), "it returned before it was written"
    gate.set()
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert (loaded["state_dict"]["w"][0].item(), loaded["names"]) == (1.0, ["a", "b"])


def test_two_saves_in_a_row_are_in_memory_and_a_third_waits(plugin, tmp_path, gate):
    for number in range(2):
        plugin.save_checkpoint(state(float(number)), tmp_path / "last.ckpt")
    third = threading.Timer(0.3, gate.set)
    third.start()
    plugin.save_checkpoint(state(2.0), tmp_path / "last.ckpt")
    assert gate.is_set()
    assert plugin.load_checkpoint(tmp_path / "last.ckpt")["state_dict"]["w"][0] == 2.0


@pytest.mark.parametrize("writer", ["slurmft", "torch"])
def test_every_torn_or_flipped_file_is_refused(plugin, tmp_path, writer):
    path, damaged = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    save = plugin.save_checkpoint if writer == "slurmft" else torch.save
    save({"w": torch.arange(4.0), "step": 5}, path)
    plugin.wait()
    whole, silent = path.read_bytes(), 0
    for length in range(0, len(whole), 7):
        damaged.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="torn or damaged"):
            plugin.load_checkpoint(damaged)
    for place in range(len(whole)):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 0x11]) + whole[place + 1 :])
        try:
            loaded = plugin.load_checkpoint(damaged)
        except CheckpointError:
            continue
        silent += 1
        assert loaded["step"] == 5
        assert torch.equal(loaded["w"], torch.arange(4.0)), place
    assert silent <= (0 if writer == "slurmft" else len(whole) / 2), "of torch's, padding, dates and the like"


def test_checksums_are_there_also_where_the_script_has_none(plugin, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        plugin.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_a_packed_file_is_refused(plugin, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000)
    with pytest.raises(CheckpointError, match="torn or damaged"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


class Code:
    """Its place in a pickle runs code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def test_code_in_a_file_is_run_only_where_that_is_asked_for_and_the_file_is_the_users_own(plugin, tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "a.ckpt"
    plugin.save_checkpoint({"x": Code(ran)}, path)
    for options in ({}, {"weights_only": True}, {"weights_only": None}):
        with pytest.raises(pickle.UnpicklingError):
            plugin.load_checkpoint(path, **options)
    path.chmod(0o664)
    with pytest.raises(CheckpointError, match="others may write to it"):
        plugin.load_checkpoint(path, weights_only=False)
    assert not ran.exists()
    path.chmod(0o644)
    SlurmftCheckpointIO(weights_only=False).load_checkpoint(path)
    assert ran.exists()


def test_an_older_file_goes_when_the_newer_one_is_written(plugin, tmp_path, gate):
    (tmp_path / "old.ckpt").write_text("old")
    plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").exists()
    gate.set()
    plugin.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["new.ckpt"]
    (tmp_path / "folder.ckpt" / "part").mkdir(parents=True)
    plugin.remove_checkpoint(tmp_path / "folder.ckpt")
    plugin.remove_checkpoint(tmp_path / "none.ckpt")
    plugin.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["new.ckpt"]


def test_a_save_that_fails_is_told_and_what_it_was_to_replace_stays(plugin, tmp_path, monkeypatch):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "old.ckpt").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(lightning, "replace_atomically", full)
        plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
        plugin.remove_checkpoint(tmp_path / "old.ckpt")
        with pytest.raises(CheckpointError, match=r"new.ckpt was not saved: .*No space left"):
            plugin.wait()
        assert (tmp_path / "old.ckpt").exists()
        plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
        with pytest.raises(CheckpointError, match="No space left"):
            plugin.teardown()
        plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
        try:
            raise SystemExit(75)
        except SystemExit:
            plugin.teardown()  # a planned stop stays one
    plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    plugin.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["new.ckpt"]


def test_an_attempt_that_was_replaced_writes_and_removes_nothing(plugin, tmp_path, monkeypatch):
    (tmp_path / "owner.json").write_text('{"format": 1, "generation": 2, "job": "7"}')
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLURMFT_GENERATION", "1")
    (tmp_path / "old.ckpt").write_text("old")
    plugin.save_checkpoint(state(1.0), tmp_path / "new.ckpt")
    with pytest.raises(Fenced):
        plugin.wait()
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    plugin.wait()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old.ckpt", "owner.json"]


def test_what_a_killed_save_has_left_goes_and_what_is_being_written_stays(plugin, tmp_path):
    left, young, other = (tmp_path / name for name in (".a.ckpt.abcd1234.tmp", ".b.ckpt.abcd1234.tmp", ".notes.tmp"))
    for path in (left, young, other):
        path.write_text("half")
    long_ago = time.time() - 2 * lightning.ABANDONED_S
    for path in (left, other):
        os.utime(path, (long_ago, long_ago))
    plugin.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
    plugin.wait()
    assert (left.exists(), young.exists(), other.exists()) == (False, True, True)


KILLED = """
import os, pathlib, random, signal, sys, time, torch
from slurmft.integrations.lightning import SlurmftCheckpointIO

plugin, path, seen = SlurmftCheckpointIO(), pathlib.Path(sys.argv[1]) / "last.ckpt", []
random.seed(4)
torch.set_num_threads(1)  # a fork has none of torch's threads
for life in range(1, 21):
    before = set(path.parent.iterdir())
    if not (child := os.fork()):
        for number in range(10_000):
            plugin.save_checkpoint({"w": torch.full((200_000,), float(life)), "number": number}, path)
    until = time.monotonic() + 20
    while not set(path.parent.iterdir()) - before and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if path.exists():
        found = plugin.load_checkpoint(path)
        assert bool((found["w"] == found["w"][0]).all())
        seen.append(int(found["w"][0]))
print(len(seen), len(set(seen)), len(list(path.parent.glob(".*"))))
"""


@pytest.mark.long
def test_after_a_kill_a_file_is_whole_or_not_there(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, tmp_path], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    loaded, lives, hidden = map(int, done.stdout.split())
    assert loaded > 10
    assert lives > 5
    assert hidden > 0, "some were killed in a write"


def test_a_save_at_once_does_not_hide_that_an_earlier_one_has_failed(plugin, tmp_path, monkeypatch, gate):
    (tmp_path / "old.ckpt").write_text("old")
    (tmp_path / "file").write_text("no folder")
    plugin.save_checkpoint(state(1.0), tmp_path / "file" / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    gate.set()
    with pytest.raises(CheckpointError, match="was not saved"), plugin.writing_at_once():
        plugin.save_checkpoint(state(1.0), tmp_path / "fit.ckpt")  # raises itself where the other has ended already
        plugin.wait()
    assert (tmp_path / "old.ckpt").exists()


@pytest.mark.parametrize("name", [".lr_find_1.ckpt", ".temp.ckpt"])
def test_files_that_other_processes_read_at_once_are_there_on_return(plugin, tmp_path, name):
    plugin.save_checkpoint(state(1.0), tmp_path / name)
    assert torch.load(tmp_path / name)["epoch"] == 3
    plugin.remove_checkpoint(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_saves_of_a_run_are_there_on_return(plugin, tmp_path):
    with lightning._writing_at_once(SimpleNamespace(checkpoint_io=plugin)):
        plugin.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
        assert torch.load(tmp_path / "a.ckpt")["epoch"] == 3
    assert not plugin._at_once


def test_what_is_no_file_is_refused(plugin, tmp_path):
    with pytest.raises(UsageError, match=r"s3://b/a\.ckpt is none"):
        plugin.save_checkpoint({}, "s3://b/a.ckpt")
    with pytest.raises(UsageError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    os.mkfifo(tmp_path / "fifo.ckpt")
    with pytest.raises(OSError, match="FIFO"):
        plugin.load_checkpoint(tmp_path / "fifo.ckpt")


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLURMFT_PAGE", raising=False)
        return pytest.importorskip(request.param)


pytest_quiet = pytest.mark.filterwarnings("ignore")


def trained(package, folder: Path, *, epochs: int, plugin: object = None, ckpt_path: Path | None = None, **more):
    """(weights, Trainer) after ``epochs`` on fixed data in a fixed order."""

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(1)
    x = torch.randn(16, 4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    net = Net()
    callbacks = package.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", **{"save_top_k": 1, **more})
    trainer = package.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callbacks], default_root_dir=folder,
        plugins=[plugin] if plugin else None,
    )  # fmt: skip
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in net.state_dict().items()}, trainer


@pytest_quiet
def test_a_fit_that_resumes_ends_with_the_same_weights(package, tmp_path):
    undisturbed, _ = trained(package, tmp_path / "without", epochs=4)
    plugin = SlurmftCheckpointIO()
    _, trainer = trained(package, tmp_path / "with", epochs=2, plugin=plugin, save_last=True)
    assert trainer.strategy.checkpoint_io is plugin
    assert {path.name for path in (tmp_path / "with").iterdir()} == {"epoch=1.ckpt", "last.ckpt"}
    resumed, _ = trained(package, tmp_path / "with", epochs=4, plugin=SlurmftCheckpointIO(),
                         ckpt_path=tmp_path / "with" / "last.ckpt")  # fmt: skip
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
    assert (tmp_path / "with" / "epoch=3.ckpt").exists()
    others, _ = trained(package, tmp_path / "others", epochs=4, ckpt_path=tmp_path / "with" / "last.ckpt")
    assert all(torch.equal(others[name], undisturbed[name]) for name in undisturbed), "Lightning's own reads the file"


@pytest_quiet
def test_a_fit_does_not_go_on_from_a_torn_file(package, tmp_path):
    trained(package, tmp_path, epochs=1, plugin=SlurmftCheckpointIO())
    path = tmp_path / "epoch=0.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="torn or damaged"):
        trained(package, tmp_path, epochs=2, plugin=SlurmftCheckpointIO(), ckpt_path=path)


@needs_root
@pytest.mark.parametrize("link", [False, True])
def test_what_another_user_has_put_into_our_folder_is_not_loaded(plugin, tmp_path, link):
    plugin.save_checkpoint(state(1.0), tmp_path / "ours" / "a.ckpt")
    plugin.save_checkpoint(state(2.0), tmp_path / "theirs" / "a.ckpt")
    plugin.wait()
    planted = tmp_path / "ours" / "hpc_ckpt_9.ckpt"
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "a.ckpt"):
        os.chown(path, OTHER, OTHER)
    assert plugin.load_checkpoint(tmp_path / "theirs" / "a.ckpt"), "a folder of its own is named by the caller"
    if link:
        planted.symlink_to(tmp_path / "theirs" / "a.ckpt")
        os.lchown(planted, OTHER, OTHER)
    else:
        shutil.copy(tmp_path / "ours" / "a.ckpt", planted)
        os.chown(planted, OTHER, OTHER)
    with pytest.raises(CheckpointError, match="is not loaded"):
        plugin.load_checkpoint(planted)
