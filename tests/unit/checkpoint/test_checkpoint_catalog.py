"""The catalog works on a login node: no torch, nothing changed."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurmft.checkpoint.catalog import Catalog, Entry, FileRecord, Identity, write_marker
from slurmft.errors import StorageError


def commit(folder: Path, step: int, commit: int, generation: int = 0) -> Path:
    path = folder / Identity(step, generation, commit).folder_name
    path.mkdir()
    files = {"shared.pt": FileRecord(10, "ab"), "rank-00000.pt": FileRecord(5, "cd")}
    write_marker(Entry(step, path, {"loss": 0.5}, datetime.now(UTC), generation, commit, "7.0.1", 1, files))
    return path


def test_importing_the_package_and_reading_a_catalog_needs_no_torch(tmp_path):
    commit(tmp_path, 5, 1)
    code = (
        "import sys; from slurmft.checkpoint import Catalog, Entry\n"
        f"assert [e.step for e in Catalog({str(tmp_path)!r}).committed()] == [5]\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_the_public_names_are_exactly_these():
    import slurmft.checkpoint

    names = ["Catalog", "CheckpointManager", "DistributedCheckpointManager", "Entry", "LoadedCheckpoint"]
    assert dir(slurmft.checkpoint) == names
    assert all(getattr(slurmft.checkpoint, name) for name in dir(slurmft.checkpoint))
    with pytest.raises(AttributeError):
        slurmft.checkpoint.Nothing  # noqa: B018


def test_entries_come_newest_commit_first_whatever_their_step(tmp_path):
    commit(tmp_path, 100, 1)
    commit(tmp_path, 300, 2)
    commit(tmp_path, 200, 10, generation=2)
    entries = Catalog(tmp_path).committed()
    assert [(one.step, one.generation, one.commit) for one in entries] == [(200, 2, 10), (300, 0, 2), (100, 0, 1)]
    assert entries[0].attempt == "7.0.1" and entries[0].size_bytes == 15 and entries[0].committed_at.tzinfo


def test_a_scan_tells_committed_unreadable_and_uncommitted_apart(tmp_path):
    good = commit(tmp_path, 1, 1)
    bad = commit(tmp_path, 2, 2)
    (bad / "manifest.json").write_text("{}")
    (tmp_path / "step-00000003.g0.c3").mkdir()
    contents = Catalog(tmp_path).scan()
    assert [entry.path for entry in contents.committed] == [good]
    assert [path for path, _ in contents.unreadable] == [bad]
    assert [path.name for path in contents.uncommitted] == ["step-00000003.g0.c3"]


def test_the_marker_has_the_permissions_of_its_folder(tmp_path):
    path = commit(tmp_path, 1, 1)
    assert (path / "manifest.json").stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_an_absent_folder_is_empty_and_a_file_is_an_error(tmp_path):
    assert Catalog(tmp_path / "absent").committed() == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot list"):
        Catalog(tmp_path / "file").committed()


@pytest.mark.parametrize(
    "name",
    [
        "step-1.g0.c1",
        "step-00000001.g00.c1",
        "step-00000001.g0.c1 ",
        "step-\u0661\u0660000000.g0.c1",
        "step-00000001.g0",
    ],
)
def test_only_names_as_we_write_them_are_checkpoints(name):
    assert Identity.parse(name) is None


@pytest.mark.parametrize("identity", [Identity(0, 0, 1), Identity(10**9, 7, 12), Identity(99_999_999, 0, 10**9)])
def test_a_name_says_who_it_is(identity):
    assert Identity.parse(identity.folder_name) == identity
