"""Kept folders on real filesystems: versions, restores, and writers that do not keep still."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmft.config.sections import SyncConfig
from slurmft.errors import Fenced, StorageError, StorageUnavailable
from slurmft.sync import folder as sync_folder
from slurmft.sync.folder import (
    KeptFolder,
    Order,
    Record,
    StillChanging,
    Uploader,
    begin,
    collect_garbage,
    newest,
    restore,
)
from slurmft.sync.stores import FolderStore, Store, open_store

RUN = "a-run-0123456789abcdef"


class Node:
    """One node's folder; all have one store."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path, self.store = path / "models", store
        path.mkdir(exist_ok=True)

    def begin(self, generation: int, *, follows_lead: bool = False, **settings: Any) -> str:
        """What the restore chose."""
        if not follows_lead:
            begin(self.store, generation)
        done = restore(
            Record(self.path), self.store, newest(self.store, RUN), run=RUN, generation=generation,
            follows_lead=follows_lead,
        )  # fmt: skip
        self.uploader = Uploader(
            self.store, Record(self.path), run=RUN, generation=generation, newest=newest(self.store, RUN),
            **{"keep": 2, "exclude": (), "bytes_per_s": 0.0, **settings},
        )  # fmt: skip
        return str(done.choice)

    def upload(self, patience_s: float = 5.0) -> sync_folder.Manifest | None:
        return self.uploader.upload(at_end=True, patience_s=patience_s)

    def keep(self, **files: str) -> None:
        """Begin its first generation, and have these files uploaded."""
        self.begin(1)
        self.write(**files)
        self.upload()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.path / name).write_text(text)

    def content(self) -> Mapping[str, bytes]:
        return {
            path.relative_to(self.path).as_posix(): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "shared", f"{RUN}/lead")


@pytest.fixture
def node(tmp_path: Path, store: FolderStore) -> Node:
    return Node(tmp_path / "node-1", store)


@pytest.fixture
def other(tmp_path: Path, store: FolderStore) -> Node:
    return Node(tmp_path / "node-2", store)


def test_what_one_node_stores_another_one_gets(node: Node, other: Node):
    assert node.begin(1) == "keep"
    (node.path / "a" / "b").mkdir(parents=True)
    (node.path / "empty folder").mkdir()
    (node.path / "a" / "b" / "snapshot.bin").write_bytes(os.urandom(3 << 20))
    (node.path / "a" / "latest").symlink_to("b/snapshot.bin")
    (node.path / "empty").write_bytes(b"")
    with (node.path / "sparse").open("wb") as file:
        file.truncate(8 << 20)
    odd = node.path / os.fsdecode(b"odd \xff 'name'\n\xe2\x80\xae.txt")
    odd.write_text("odd")
    (node.path / "run.sh").write_text("#!/bin/sh\n")
    (node.path / "run.sh").chmod(0o750)
    assert node.upload() is not None
    assert other.begin(2) == "restore"
    assert other.content() == node.content()
    assert (other.path / "a" / "latest").readlink() == Path("b/snapshot.bin")
    assert (other.path / "empty folder").is_dir()
    assert (other.path / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (other.path / "run.sh").stat().st_mtime_ns == (node.path / "run.sh").stat().st_mtime_ns


def test_what_has_not_changed_is_not_sent_twice(node: Node, store: FolderStore, monkeypatch: pytest.MonkeyPatch):
    node.keep(big="x" * 100_000, small="1")
    sent: list[str] = []
    write = FolderStore.write
    monkeypatch.setattr(
        FolderStore, "write", lambda self, name, *a, **k: (sent.append(name), write(self, name, *a, **k))
    )
    assert node.upload() is None
    assert sent == []
    os.utime(node.path / "big")
    node.write(small="2")
    node.upload()
    assert [name.partition("/")[0] for name in sent] == ["data", "versions"]
    node.begin(2)  # another process: what is stored is known from the store
    sent.clear()
    node.write(small="3")
    node.upload()
    assert [name.partition("/")[0] for name in sent] == ["data", "versions"]


def test_only_so_many_versions_are_kept_and_what_they_need(node: Node, other: Node, store: FolderStore):
    node.begin(1)
    for count in range(5):
        node.write(snapshot=str(count), constant="same")
        node.upload()
    assert len(store.names("versions")) == 2
    assert len(store.names("data")) == 3
    other.begin(2)
    assert other.content() == {"snapshot": b"4", "constant": b"same"}


def test_a_garbage_collection_that_was_killed_is_made_up_for(node: Node, store: FolderStore):
    node.begin(1)
    for count in range(3):
        node.write(snapshot=str(count))
        node.upload()
    store.write("data/" + "0" * 64, [b"orphan"], size=6)
    collect_garbage(store, RUN, keep=1)
    digest = hashlib.sha256(b"2").hexdigest()
    assert set(store.names("data")) == {digest}


def test_beside_a_version_that_cannot_be_read_nothing_is_removed(node: Node, other: Node, store: FolderStore):
    node.keep(snapshot="1")
    store.write(sync_folder.new_name(sync_folder.Version(1, 7)), [b"{torn"], size=5)
    node.write(snapshot="2")
    node.upload()
    collect_garbage(store, RUN, keep=1)
    assert len(store.names("data")) == 2
    assert other.begin(2) == "restore"
    assert other.content() == {"snapshot": b"2"}


def test_a_version_without_its_contents_does_not_count(node: Node, other: Node, store: FolderStore):
    node.begin(1)
    for text in ("old", "new"):
        node.write(snapshot=text)
        node.upload()
    store.remove([f"data/{hashlib.sha256(b'new').hexdigest()}"])
    other.begin(2)
    assert other.content() == {"snapshot": b"old"}


def test_altered_contents_are_not_given_to_the_script(tmp_path: Path, node: Node, other: Node):
    node.keep(snapshot="good")
    (blob,) = (tmp_path / "shared" / RUN / "lead" / "data").iterdir()
    blob.write_text("evil")
    with pytest.raises(StorageError, match="digest"):
        other.begin(2)
    assert other.content() == {}
    assert not list(Record(other.path).own.glob("incoming-*"))


# Which files win


def test_a_restart_on_the_same_node_keeps_what_is_newer_there(node: Node):
    node.keep(snapshot="stored")
    node.write(snapshot="newer, and not stored")
    assert node.begin(2) == "keep"
    assert node.content() == {"snapshot": b"newer, and not stored"}


def test_a_node_that_comes_back_gets_what_was_saved_elsewhere_and_keeps_its_own_beside(node: Node, other: Node):
    node.keep(snapshot="1")
    node.write(snapshot="never stored")
    assert other.begin(2) == "restore"
    other.write(snapshot="2")
    other.upload()
    assert node.begin(3) == "restore"
    assert node.content() == {"snapshot": b"2"}
    assert (Record(node.path).aside / "snapshot").read_text() == "never stored"


def test_what_lies_there_of_something_else_is_set_aside(node: Node, other: Node):
    node.keep(snapshot="1")
    other.path.mkdir()
    other.write(snapshot="another training's", rest="x")
    assert other.begin(2) == "restore"
    assert other.content() == {"snapshot": b"1"}
    assert (Record(other.path).aside / "rest").read_text() == "x"


def test_a_first_start_takes_what_the_user_has_put_there(node: Node):
    node.path.mkdir()
    node.write(snapshot="pretrained")
    assert node.begin(1) == "keep"
    assert node.content() == {"snapshot": b"pretrained"}


def test_the_other_nodes_follow_the_first_one(node: Node, other: Node):
    node.begin(1)
    other.begin(1, follows_lead=True)
    node.write(snapshot="1")
    other.write(log="mine")
    node.upload()
    assert other.begin(2, follows_lead=True) == "restore"
    assert other.content() == {"snapshot": b"1"}
    assert other.begin(3, follows_lead=True) == "keep"


def test_a_restore_that_was_killed_is_done_again(node: Node, other: Node, monkeypatch: pytest.MonkeyPatch):
    node.keep(a="1", b="2")
    other.path.mkdir()
    other.write(mine="old")
    rename, moved = Path.rename, []

    def dies(self: Path, target: Path) -> Path:
        if "incoming" in str(self):
            moved.append(self)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        other.begin(2)
    monkeypatch.undo()
    assert len(other.content()) == 1
    assert other.begin(2) == "restore"
    assert other.content() == {"a": b"1", "b": b"2"}
    assert not list(Record(other.path).own.glob("incoming-*"))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(path)], check=False)
    if made.returncode:
        pytest.skip("only root can mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_restore_that_does_not_fit_leaves_everything_as_it_was(node: Node, tiny_disk: Path):
    node.begin(1)
    (node.path / "snapshot").write_bytes(os.urandom(12 << 20))
    node.upload()
    full = Node(tiny_disk, node.store)
    full.path.mkdir()
    full.write(snapshot="mine")
    with pytest.raises(StorageUnavailable, match="MiB free, the stored version needs 28"):
        full.begin(2)
    assert full.content() == {"snapshot": b"mine"}


def test_a_disk_that_fills_up_while_it_is_restored(node: Node, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_folder, "SPARE_BYTES", -(64 << 20))  # another process takes the space after the look
    node.begin(1)
    (node.path / "snapshot").write_bytes(os.urandom(30 << 20))
    node.upload()
    full = Node(tiny_disk, node.store)
    full.path.mkdir()
    full.write(snapshot="mine")
    with pytest.raises(StorageUnavailable, match="No space left"):
        full.begin(2)
    assert full.content() == {"snapshot": b"mine"}
    assert not list(Record(full.path).own.glob("incoming-*"))


# Writers that do not keep still


def test_no_version_holds_half_a_file_that_is_always_written(node: Node, other: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_folder, "QUIET_AT_THE_END_S", 0.05)
    node.begin(1)
    over = threading.Event()

    def write() -> None:
        count = 0
        while not over.is_set():
            count += 1
            with (node.path / "snapshot").open("w") as file:
                for _ in range(40):
                    file.write(f"{count:08}\n" * 500)
                    file.flush()
                    time.sleep(0.001)
            time.sleep(0.7)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            node.upload(20)
            found = newest(node.store, RUN)
            assert found is not None
            (blob,) = [each.sha256 for each in found.files]
            lines = b"".join(node.store.chunks(f"data/{blob}")).split()
            assert (len(lines), len(set(lines))) == (20_000, 1)
            time.sleep(0.15)
    finally:
        over.set()
        writer.join()


def test_a_file_that_grows_for_ever_is_named_and_can_be_left_out(node: Node, other: Node):
    node.begin(1)
    node.write(snapshot="1")
    with (node.path / "train.log").open("w") as log:
        log.write("x")
        log.flush()
        with pytest.raises(StillChanging, match=r"train\.log did not stop changing(.|\n)*exclude"):
            node.upload(0.5)
        assert newest(node.store, RUN) is None
        node.begin(1, exclude=["*.log"])
        assert node.upload() is not None
    other.begin(2)
    assert other.content() == {"snapshot": b"1"}


def test_a_log_that_is_open_but_at_rest_is_taken(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_folder, "HELD_OPEN_S", 0.5)
    node.begin(1)
    with (node.path / "events").open("w") as log:
        log.write("x")
        log.flush()
        assert node.upload() is not None


def test_a_snapshot_whose_writer_was_killed_is_not_stored_and_not_used(node: Node):
    node.begin(1)
    with zipfile.ZipFile(node.path / "snapshot.pth", "w") as file:
        file.writestr("data.pkl", b"1" * 10_000)
    node.upload()
    whole = (node.path / "snapshot.pth").read_bytes()
    (node.path / "snapshot.pth").write_bytes(whole[:5000])
    with pytest.raises(StorageUnavailable, match=r"snapshot\.pth ends in the middle"):
        node.upload()
    assert node.begin(2) == "restore"
    assert node.content() == {"snapshot.pth": whole}


def test_a_file_that_vanishes_while_it_is_read(node: Node, monkeypatch: pytest.MonkeyPatch):
    node.begin(1)
    node.write(stays="1", goes="2")
    digest = Uploader._digest_of

    def removes(self: Uploader, name: str, expected: sync_folder.Look) -> str:
        (node.path / "goes").unlink(missing_ok=True)
        return digest(self, name, expected)

    monkeypatch.setattr(Uploader, "_digest_of", removes)
    found = node.upload()
    assert found is not None
    assert [each.path for each in found.files] == ["stays"]


def test_a_file_with_the_same_size_and_time_is_still_noticed(node: Node, other: Node):
    node.keep(snapshot="aaaa")
    status = (node.path / "snapshot").stat()
    node.write(snapshot="bbbb")
    os.utime(node.path / "snapshot", ns=(status.st_atime_ns, status.st_mtime_ns))
    node.upload()
    other.begin(2)
    assert other.content() == {"snapshot": b"bbbb"}


def test_many_small_files(node: Node, other: Node):
    node.begin(1)
    for count in range(2000):
        (node.path / f"{count}").write_text(str(count % 500))
    node.upload()
    assert len(node.store.names("data")) == 500
    other.begin(2)
    assert len(other.content()) == 2000


# Attempts that are cut off, and strangers


def test_an_attempt_that_was_overtaken_stores_and_removes_nothing(node: Node, other: Node):
    node.keep(snapshot="1")
    other.begin(2)
    node.write(snapshot="late")
    with pytest.raises(Fenced):
        node.upload()
    other.write(snapshot="2")
    other.upload()
    assert node.begin(3) == "restore"
    assert node.content() == {"snapshot": b"2"}


def test_the_order_of_versions_is_not_that_of_clocks(node: Node, other: Node, monkeypatch: pytest.MonkeyPatch):
    node.begin(1)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    node.write(snapshot="1")
    os.utime(node.path / "snapshot", (4e9, 4e9))
    node.upload()
    monkeypatch.setattr(time, "time", lambda: 1e6)
    other.begin(2)
    other.write(snapshot="2")
    os.utime(other.path / "snapshot", (1e6, 1e6))
    other.upload()
    node.begin(3)
    assert node.content() == {"snapshot": b"2"}


def test_a_folder_that_others_can_write_to_is_not_believed(tmp_path: Path, node: Node, other: Node):
    node.keep(snapshot="1")
    (tmp_path / "shared" / RUN / "lead" / "data").chmod(0o777)
    with pytest.raises(StorageError, match="written to by other users"):
        other.begin(2)


def test_a_link_in_the_place_of_contents_is_not_followed(tmp_path: Path, node: Node, other: Node):
    node.keep(snapshot="1")
    (blob,) = (tmp_path / "shared" / RUN / "lead" / "data").iterdir()
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    assert other.begin(2) == "keep"  # nothing complete is stored
    assert other.content() == {}


@pytest.mark.parametrize(
    "change",
    [
        {"files": [["../out", 1, 0o600, 1, "0" * 64]]},
        {"files": [["/etc/out", 1, 0o600, 1, "0" * 64]]},
        {"files": [["a/../../out", 1, 0o600, 1, "0" * 64]]},
        {"files": [["nul\0", 1, 0o600, 1, "0" * 64]]},
        {"files": [["twice", 1, 0o600, 1, "0" * 64]] * 2},
        {"files": [["link/through", 1, 0o600, 1, "0" * 64]], "links": [["link", "inside"]]},
        {"files": [["big", 1 << 60, 0o600, 1, "0" * 64]]},
        {"files": [["small", -1, 0o600, 1, "0" * 64]]},
        {"files": [["bool", True, 0o600, 1, "0" * 64]]},
        {"files": [["digest", 1, 0o600, 1, "../../x"]]},
        {"files": [["row"]]},
        {"files": 7},
        {"links": [["out", "../../etc"]]},
        {"links": [["out", "/etc/passwd"]]},
        {"links": [["a/b/s", "../.."], ["ckpt", "a/b/s/../.."]], "folders": ["a", "a/b"]},
        {"links": [["a/b/s", "../.."], ["a/b/t", "s/../../.ssh"]], "folders": ["a", "a/b"]},
        {"links": [["a/s", "t"], ["a/t", ".."], ["u", "a/s/.."]], "folders": ["a"]},
        {"links": [["one", "two"], ["two", "one"]]},
        {"links": [["self", "self/x"]]},
        {"folders": [".."]},
        {"run": "another"},
        {"generation": 9},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_a_manifest_that_names_something_else_is_refused(change: Mapping[str, Any]):
    good = {"format": 1, "run": RUN, "generation": 1, "sequence": 1, "files": [], "folders": [], "links": []}
    sync_folder.parse(json.dumps(good).encode(), run=RUN, version=sync_folder.Version(1, 1))
    with pytest.raises(StorageError):
        sync_folder.parse(json.dumps(good | change).encode(), run=RUN, version=sync_folder.Version(1, 1))


def test_links_whose_chain_leads_out_are_left_out_and_the_rest_is_stored(tmp_path: Path, node: Node, other: Node):
    node.begin(1)
    (node.path / "a" / "b").mkdir(parents=True)
    node.write(snapshot="1")
    for link, target in {"a/b/s": "../..", "ckpt": "a/b/s/../..", "good": "a/b/s/snapshot"}.items():
        (node.path / link).symlink_to(target)
    (node.path / "snapshot").chmod(0o666)
    node.upload()
    assert other.begin(2) == "restore"
    assert (other.path / "good").read_text() == "1"
    assert not (other.path / "ckpt").is_symlink()
    assert (other.path / "snapshot").stat().st_mode & 0o777 == 0o644, "a sync does not choose what others may write"


def test_a_folder_of_another_user_is_refused(tmp_path: Path):
    if os.geteuid():
        pytest.skip("only root can make a folder of another user")
    path = tmp_path / "models"
    path.mkdir()
    os.chown(path, 4242, 4242)
    with pytest.raises(StorageError, match="not a folder of this user"):
        sync_folder.scan(path)


# The thread of a folder


def said(messages: list[Mapping[str, Any]], wanted: Any, within_s: float = 20.0) -> Mapping[str, Any]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := [each for each in messages if wanted(each)]:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(messages)


def test_a_failure_is_told_once_and_tried_again_until_it_works(tmp_path: Path):
    messages: list[Mapping[str, Any]] = []
    shared = tmp_path / "shared"
    config = SyncConfig(path=tmp_path / "models", url=f"file://{shared}", frequency=1.0)
    folder = KeptFolder(config, 0, messages.append)
    folder.take(Order(action="restore", number=1, run=RUN, generation=1))
    assert said(messages, lambda each: each.get("number") == 1)["problem"] == ""
    shared.rename(tmp_path / "away")
    shared.write_text("a file in its place")
    (tmp_path / "models" / "snapshot").write_text("1")
    said(messages, lambda each: each.get("what") == "failed")
    time.sleep(1.5)
    shared.unlink()
    (tmp_path / "away").rename(shared)
    said(messages, lambda each: each.get("what") == "works again")
    assert said(messages, lambda each: each.get("what") == "uploaded")["version"] == "1.1"
    assert len([each for each in messages if each.get("what") == "failed"]) == 1
    (tmp_path / "models" / "snapshot").write_text("2")
    folder.take(Order(action="upload", number=2, within_s=10))
    assert said(messages, lambda each: each.get("number") == 2)["problem"] == ""
    found = newest(open_store(config.url, f"{RUN}/lead"), RUN)
    assert found is not None
    assert found.files[0].sha256 == hashlib.sha256(b"2").hexdigest()


def test_the_bandwidth_cap(node: Node):
    node.begin(1, bytes_per_s=1e6)
    (node.path / "a").write_bytes(os.urandom(1_500_000))
    began = time.monotonic()
    node.upload(20)
    assert time.monotonic() - began > 0.4  # the second megabyte waits for the first one


@pytest.mark.parametrize(
    ("url", "package", "hint"),
    [("gs://bucket/x", "gcsfs", "pip install gcsfs"), ("s3://bucket/x", "s3fs", "pip install s3fs")],
)
def test_an_address_whose_package_is_missing_is_refused_at_once(
    url: str, package: str, hint: str, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("fsspec")
    for name in [name for name in sys.modules if name.split(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, name, None)
    fsspec = importlib.import_module("fsspec.registry")
    monkeypatch.setattr(fsspec, "_registry", {})
    with pytest.raises(StorageError, match=package) as error:
        open_store(url, f"{RUN}/lead")
    assert not isinstance(error.value, StorageUnavailable), "it would be tried again for a quarter of an hour"
    assert hint in str(error.value)


def test_an_unknown_address_is_refused_at_once():
    pytest.importorskip("fsspec")
    with pytest.raises(StorageError, match="nonsense") as error:
        open_store("nonsense://bucket/x", f"{RUN}/lead")
    assert not isinstance(error.value, StorageUnavailable)


def test_a_store_that_is_silent_is_told_of_while_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The thread that waits for it cannot do that."""
    monkeypatch.setattr(sync_folder, "SILENT_S", 0.4)
    answers = threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        answers.wait(30)

    messages: list[Mapping[str, Any]] = []
    config = SyncConfig(path=tmp_path / "models", url=f"file://{tmp_path}/shared", frequency=1.0)
    folder = KeptFolder(config, 0, messages.append)
    folder.take(Order(action="restore", number=1, run=RUN, generation=1))
    said(messages, lambda each: each.get("number") == 1)
    monkeypatch.setattr(Uploader, "_publish", lambda *_: hangs())
    (tmp_path / "models" / "snapshot").write_text("1")
    reason = said(messages, lambda each: each.get("what") == "failed")["reason"]
    assert "has not answered for" in reason
    monkeypatch.undo()
    answers.set()
    said(messages, lambda each: each.get("what") == "works again")
