"""Anything under any name in a checkpoint directory: an older checkpoint is taken, and no verb hangs or fails oddly."""

import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import odd_files
import pytest
import stored_state
import torch
from another_user import OTHER, as_user, needs_root, sticky_folder
from click.testing import CliRunner
from of_each import of_each
from verbs import slurmft
from waiting import slowness, until

from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint.catalog import METADATA_FILE, Catalog, Pruner, remove_folder, remove_left_overs
from slurmft.checkpoint.image_file import alone, holding, image_file, index_file, is_held
from slurmft.checkpoint.state import Trainee
from slurmft.checkpoint.write_requests import CommitOrder, SpawnedWriter
from slurmft.checkpoint.writer import _committed_before, _opened, give_up, gone_file, reason_of
from slurmft.cli.main import cli
from slurmft.errors import StorageError
from slurmft.storage.checkpoint_names import MANIFEST, MAX_NUMBER, QUARANTINE, Identity, usable
from slurmft.system.files import UnsafeFile

OLD, NEW = Identity(1, 0, 1), Identity(2, 0, 2)
NEEDED = (MANIFEST, index_file(0), index_file(1), image_file(0), image_file(1))
SOON_S = 10.0


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for step, identity in enumerate((OLD, NEW), start=1):
        model, optimizer = trained(float(step))
        stored_state.publish(directory, identity, Trainee(model, optimizer), ranks=2)
    return directory


@pytest.fixture
def directory(tmp_path, template, own_environment) -> Path:
    return copy_of(template, tmp_path)


def copy_of(template: Path, folder: Path) -> Path:
    return shutil.copytree(template, folder / "checkpoints")


def trained(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    return model, torch.optim.SGD(model.parameters(), momentum=0.9)


def put(kind: str, directory: Path, name: str) -> Path:
    path = directory / NEW.folder_name / name
    content = path.read_bytes() if path.exists() else b'{"format": 1}'
    return odd_files.put(kind, path, content)


def loaded_step(directory: Path) -> int:
    model, optimizer = trained(0.0)
    manager = CheckpointManager(directory)
    try:
        found = manager.load_latest(model, optimizer)
    finally:
        manager.close()
    assert model.weight.unique().tolist() == [float(found.step)]
    return found.step


checkpoint = functools.partial(slurmft, "checkpoint", COLUMNS="600")


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S * slowness()


@pytest.mark.timeout(300)
@of_each(name=NEEDED, kind=[kind for kind in odd_files.MAKERS if kind != "dangling link"])
def test_a_checkpoint_with_an_odd_file_is_passed_over_for_an_older_one(tmp_path, template, own_environment, kind, name):
    directory = copy_of(template, tmp_path)
    put(kind, directory, name)
    with quickly():
        assert loaded_step(directory) == 1


@pytest.mark.timeout(300)
@of_each(name=[METADATA_FILE, gone_file(0), "lineage.json", ".manifest.json.lock", QUARANTINE], kind=odd_files.NO_FILES)
def test_what_a_load_does_not_need_does_not_disturb_it(tmp_path, template, own_environment, kind, name):
    directory = copy_of(template, tmp_path)
    put(kind, directory, name)
    odd_files.put(kind, directory / name)
    with quickly():
        assert loaded_step(directory) == 2


@pytest.mark.timeout(600)
@of_each(name=[*NEEDED, METADATA_FILE], kind=odd_files.MAKERS)
def test_the_verbs_tell_what_is_wrong_and_go_on(tmp_path, template, own_environment, kind, name):
    directory = copy_of(template, tmp_path)
    put(kind, directory, name)
    is_missing = kind == "dangling link" and name == MANIFEST
    with quickly():
        code, text = checkpoint("list", directory)
        assert code == 0
        assert "1970" not in text
        code, text = checkpoint("verify", directory)
        assert f"{OLD.folder_name}: intact" in text
        owner_does_not_matter = kind == "stranger's" and name == METADATA_FILE  # its digest is in the marker
        assert code == (0 if is_missing or owner_does_not_matter else 1), text
        code, text = checkpoint("verify", directory, "--json")
        assert len(json.loads(text)["checkpoints"]) >= 1
        code, text = checkpoint("export", directory, tmp_path / "out.pt")
        assert code in (0, 1), text
        code, text = checkpoint("export", directory, tmp_path / "out.pt", "--step", 1, "--overwrite")
        assert code == 0, text
        if not is_missing:
            code, text = checkpoint("rm", directory, 2, "--force")
            assert code == 0, text
            assert not (directory / NEW.folder_name).exists()
    assert (directory / OLD.folder_name / MANIFEST).exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", odd_files.NO_FILES)
def test_the_folder_itself_may_be_anything(directory, kind):
    shutil.rmtree(directory / NEW.folder_name)
    odd_files.put(kind, directory / NEW.folder_name)
    with quickly():
        assert loaded_step(directory) == 1
        assert checkpoint("list", directory)[0] == 0
        assert checkpoint("verify", directory)[0] == 0


@pytest.mark.timeout(60)
def test_a_checkpoint_of_more_ranks_than_there_can_be_is_damaged_and_takes_no_memory(directory):
    marker = directory / NEW.folder_name / MANIFEST
    for ranks in (2**63, 10**12):
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"world_size": ranks}))
        with quickly():
            assert checkpoint("verify", directory)[0] == 1
            assert f"it names {ranks} ranks" in checkpoint("list", directory)[1]
            assert loaded_step(directory) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", odd_files.NO_FILES)
def test_locks_and_notes_never_wait_for_what_is_no_file(tmp_path, kind):
    path = odd_files.put(kind, tmp_path / "x")
    with quickly():
        for hold in (holding, alone):
            with pytest.raises(UnsafeFile), hold(path):
                pass
        assert not is_held(path)
        assert reason_of(tmp_path, "x") == ""
        odd_files.put("endless", tmp_path / "y")
        assert reason_of(tmp_path, "y") == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_a_writer_starts_where_its_log_cannot_be_written(tmp_path, kind):
    odd_files.put(kind, tmp_path / "writer-0.log")
    with quickly():
        writer = SpawnedWriter(lifetime_s=1.0, log=tmp_path / "writer-0.log")
        assert not writer.is_gone()
        writer.kill()
        until(writer.is_gone)
        writer.let_go()


def test_a_link_with_a_checkpoints_name_is_never_emptied(directory, tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("1")
    link = directory / "step-00000003.g0.c3"
    link.symlink_to(thesis)
    for path in (thesis / "chapter", thesis):
        os.utime(path, (0, 0))  # no writer can still be at work there
    remove_left_overs(directory)
    assert loaded_step(directory) == 2
    assert "is a symbolic link" in remove_folder(link)
    assert (thesis / "chapter").exists()


# Another user


@needs_root
@pytest.mark.timeout(60)
def test_a_whole_checkpoint_that_another_user_has_put_there_is_not_loaded_and_not_removed(template):
    """In a directory that a group writes to: the newest one is another member's, valid to the last byte."""
    with sticky_folder() as shared:
        directory = shutil.copytree(template, shared / "checkpoints")
        os.chown(directory, OTHER, OTHER)
        directory.chmod(0o777)
        for path in [directory / OLD.folder_name, *(directory / OLD.folder_name).iterdir()]:
            os.chown(path, OTHER, OTHER)
        stranger = OTHER + 1
        for path in [directory / NEW.folder_name, *(directory / NEW.folder_name).iterdir()]:
            os.chown(path, stranger, stranger)

        def work() -> list[object]:
            found = Catalog(directory).scan()
            return [
                [entry.step for entry in found.committed], [reason for _, reason in found.foreign],
                remove_folder(directory / NEW.folder_name),
            ]  # fmt: skip

        committed, unreadable, problem = as_user(OTHER, work)
        assert committed == [1]
        assert f"belongs to user id {stranger}" in unreadable[0]
        assert f"belongs to user id {stranger}" in problem
        assert (directory / NEW.folder_name / MANIFEST).exists()
        assert [entry.step for entry in Catalog(directory).committed()] == [1], "root believes its owner"


@needs_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_nothing_is_saved_into_a_folder_that_another_user_made_first(template, kind):
    with sticky_folder() as shared:
        directory = shared / "checkpoints"
        directory.mkdir()
        os.chown(directory, OTHER, OTHER)
        stranger = shared / "strangers"
        stranger.mkdir()
        stranger.chmod(0o777)
        os.chown(stranger, OTHER + 1, OTHER + 1)
        taken = directory / NEW.folder_name
        if kind == "link":
            taken.symlink_to(stranger)
        else:
            taken.mkdir()
            taken.chmod(0o777)
            os.chown(taken, OTHER + 1, OTHER + 1)

        def work() -> str:
            try:
                with _opened(taken) as folder:
                    (folder / "file").touch()
            except OSError as error:
                return str(error)
            return ""

        assert as_user(OTHER, work) != ""
        assert list(stranger.iterdir()) == []
        assert list(taken.iterdir()) == []


@needs_root
@pytest.mark.timeout(60)
def test_a_save_clears_nothing_behind_a_link_that_another_user_put_in_the_place_of_its_folder():
    with sticky_folder() as shared:
        directory, private = shared / "checkpoints", shared / "private"
        for folder in (directory, private):
            folder.mkdir()
            os.chown(folder, OTHER, OTHER)
        (private / "authorized_keys").touch()
        taken = directory / NEW.folder_name
        taken.symlink_to(private)
        os.chown(taken, OTHER + 1, OTHER + 1, follow_symlinks=False)

        as_user(OTHER, lambda: give_up(taken, 0, "its folder cannot be made"))
        assert [one.name for one in private.iterdir()] == ["authorized_keys"]

        (private / MANIFEST).touch()  # of a checkpoint that is damaged, or of another format

        def commit() -> None:
            with pytest.raises(OSError, match=NEW.folder_name):
                _committed_before(SimpleNamespace(request=SimpleNamespace(folder=taken)))

        as_user(OTHER, commit)
        assert (private / MANIFEST).exists()


@needs_root
@pytest.mark.timeout(60)
def test_a_lock_that_a_reader_does_not_let_go_keeps_nothing_from_being_verified(template, tmp_path):
    import fcntl

    directory = shutil.copytree(template, tmp_path / "checkpoints")
    descriptor = os.open(directory / NEW.folder_name / MANIFEST, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with quickly():
            code, text = checkpoint("verify", directory)
            assert code == 0
            assert f"{NEW.folder_name}: intact" in text
            assert loaded_step(directory) == 2
    finally:
        os.close(descriptor)


PLANTED = "step-00000001.g9.c999999999999999"


def _planted(path: Path, kind: str) -> None:
    """What another member of the group puts into a checkpoint directory to be the newest for ever."""
    stranger = OTHER + 1
    if kind == "folder":
        shutil.copytree(path.parent / OLD.folder_name, path)
        for each in [path, *path.iterdir()]:
            os.chown(each, stranger, stranger)
        return
    hidden = path.parent / "hidden"
    hidden.mkdir(mode=0o700, exist_ok=True)
    targets = {"link to ours": OLD.folder_name, "link to itself": path.name, "link to nowhere one may look": "hidden/x"}
    path.symlink_to(targets[kind])
    os.chown(path, stranger, stranger, follow_symlinks=False)


@needs_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["folder", "link to ours", "link to itself", "link to nowhere one may look"])
def test_what_another_user_has_planted_is_never_the_newest(template, kind, caplog):
    with sticky_folder() as shared:
        directory = shutil.copytree(template, shared / "checkpoints")
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, OTHER, OTHER)
        directory.chmod(0o777)
        CliRunner().invoke(cli, ["checkpoint", "verify", "--newest", str(directory)])  # imports what it needs
        _planted(directory / PLANTED, kind)

        def work() -> list[Any]:
            catalog, found = Catalog(directory), Catalog(directory).scan()
            newest = catalog.newest_commit(), catalog.identities()[0], usable(directory)[0]
            verified = CliRunner().invoke(cli, ["checkpoint", "verify", "--newest", str(directory)])
            Pruner(directory).prune(CommitOrder(keep_last_n=2))
            remove_left_overs(directory)
            assert os.path.lexists(directory / PLANTED)
            return [newest, [entry.step for entry in found.committed], len(found.unreadable), len(found.foreign),
                    verified.exit_code, verified.output]  # fmt: skip

        newest, committed, unreadable, foreign, code, output = as_user(OTHER, work)
        assert newest == (NEW.commit, NEW, NEW.folder_name)
        assert (committed, unreadable, foreign, code) == ([2, 1], 0, 1, 0), output
        assert f"belongs to user id {OTHER + 1}" in output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["step-00000001.g9.c1000000000000", "step-00000001.g999999999999999.c3"])
def test_a_number_that_no_save_can_have_is_damage(template, tmp_path, name, caplog):
    directory = shutil.copytree(template, tmp_path / "checkpoints")
    shutil.copytree(directory / OLD.folder_name, directory / name)
    catalog, found = Catalog(directory), Catalog(directory).scan()
    assert (catalog.newest_commit(), catalog.identities()[0], usable(directory)[0]) == (
        NEW.commit,
        NEW,
        NEW.folder_name,
    )
    assert "a number that no save can have" in caplog.text
    assert [reason for _, reason in found.unreadable] == [f"{directory / name} has a number that no save can have"]
    (directory / f"step-00000001.g0.c{MAX_NUMBER}").mkdir()
    with pytest.raises(StorageError, match="the last number"):
        catalog.newest_commit()
