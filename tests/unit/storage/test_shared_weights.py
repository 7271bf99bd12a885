"""Models in a node's memory: whole or not there, one for all, of this user, and never in the way."""

import errno
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from another_user import OTHER, as_user, needs_root

import slurmft
from slurmft.storage import shared_weights as module


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "memory of it's node"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(path))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "my models" / "mine"
    (path / "inner").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "inner" / "weights.bin").write_bytes(bytes(range(256)) * 1000)
    (path / ".cache").mkdir()
    (path / ".cache" / "large").write_text("left out")
    return path


def in_child(work: Callable[[], Any]) -> Any:
    """What it returns in a process of its own, which has let go of everything."""
    return as_user(os.geteuid(), work)


def killed_in_child(work: Callable[[], Any]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def kill_this_process(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WHOLE = {"config.json": b"{}", "inner/weights.bin": bytes(range(256)) * 1000}


def test_a_copy_outlives_its_process_and_is_made_once(memory: Path, model: Path) -> None:
    first = in_child(lambda: slurmft.stage_in_memory(model))
    assert first.is_relative_to(memory) and first.name == "mine" and content(first) == WHOLE
    before = (first / "config.json").stat()
    assert slurmft.stage_in_memory(str(model)) == first
    assert (first / "config.json").stat() == before


def test_a_single_file_keeps_its_name_also_behind_a_link(memory: Path, model: Path) -> None:
    link = model / "m.gguf"
    link.symlink_to(model / "inner" / "weights.bin")
    copy = slurmft.stage_in_memory(link)
    assert copy.is_relative_to(memory) and copy.name == "m.gguf"
    assert copy.read_bytes() == WHOLE["inner/weights.bin"] and not copy.is_symlink()


def test_folders_behind_links_and_paths_with_dots_are_copied_and_a_loop_is_not(memory: Path, model: Path) -> None:
    (model / "link").symlink_to(model / "inner")
    copy = slurmft.stage_in_memory(model / "inner" / "..")
    assert copy.name == "mine" and copy.is_relative_to(memory)
    assert content(copy) == WHOLE | {"link/weights.bin": WHOLE["inner/weights.bin"]}
    (model / "loop").symlink_to(model)
    assert slurmft.stage_in_memory(model) == model


def test_a_changed_model_is_copied_again_and_the_old_one_goes_once_nobody_uses_it(memory: Path, model: Path) -> None:
    slurmft.stage_in_memory(model / "config.json")  # by this process, which lives
    old = in_child(lambda: slurmft.stage_in_memory(model))
    (model / "config.json").write_text("{'a': 1}")
    new = in_child(lambda: slurmft.stage_in_memory(model))
    assert content(new) == {**WHOLE, "config.json": b"{'a': 1}"}
    assert not old.exists() and len(list((memory / "weights").glob("*/"))) == 2, "what is in use stays"


@pytest.mark.parametrize("at", ["_copy", "write_json"])
def test_one_that_was_killed_in_the_middle_leaves_nothing_that_is_used(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def half(_source: Path, target: Path, _size: int) -> None:
        target.write_text("half")
        kill_this_process()

    with monkeypatch.context() as patched:
        patched.setattr(module, at, half if at == "_copy" else kill_this_process)
        killed_in_child(lambda: slurmft.stage_in_memory(model))
    assert [path for path in (memory / "weights").rglob("*") if path.is_file() and path.suffix != ".lock"]
    copy = slurmft.stage_in_memory(model)
    assert copy.is_relative_to(memory) and content(copy) == WHOLE


def test_a_copy_that_was_cut_is_not_used(memory: Path, model: Path) -> None:
    copy = in_child(lambda: slurmft.stage_in_memory(model))
    os.truncate(copy / "inner" / "weights.bin", 100)
    assert in_child(lambda: content(slurmft.stage_in_memory(model))) == WHOLE


@needs_root
def test_files_of_another_user_in_its_place_are_not_used(memory: Path, model: Path, caplog: Any) -> None:
    copy = in_child(lambda: slurmft.stage_in_memory(model))
    (copy / "config.json").write_text("[]")
    os.chown(copy / "config.json", OTHER, OTHER)
    assert in_child(lambda: content(slurmft.stage_in_memory(model))) == WHOLE, "copied again"
    os.chown(copy.parent, OTHER, OTHER)
    assert slurmft.stage_in_memory(model) == model
    assert "belongs to user id" in caplog.text
    os.chown(memory / "weights", OTHER, OTHER)
    assert slurmft.stage_in_memory(model / "config.json") == model / "config.json"


def test_without_room_the_original_is_used_with_one_warning(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(module, "fits", lambda needed, _folder: f"{needed} bytes are too many")
    assert slurmft.stage_in_memory(model) == model
    assert [each.levelno for each in caplog.records] == [logging.WARNING] and "256002 bytes" in caplog.text
    loads: list[int] = []
    weights = slurmft.shared_weights("name", lambda: loads.append(1) or {"w": torch.ones(4)})  # type: ignore[func-returns-value]
    assert loads == [1] and weights["w"].tolist() == [1.0] * 4, "it is not loaded again"
    assert len(caplog.records) == 2 and list((memory / "weights").glob("*/")) == []


@pytest.mark.parametrize("way", ["full in the middle", "changes meanwhile", "gone", "a FIFO", "empty"])
def test_what_cannot_be_copied_is_used_where_it_is(
    memory: Path, model: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def full(*_arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy = module._copy

    def copy_and_change(source: Path, target: Path, size: int) -> None:
        copy(source, target, size)
        (model / "config.json").write_text("longer than it was")

    match way:
        case "full in the middle":
            monkeypatch.setattr(os, "sendfile", full)
        case "changes meanwhile":
            monkeypatch.setattr(module, "_copy", copy_and_change)
        case "gone":
            model = model / "not there"
        case "empty":
            (model := model / "nothing").mkdir()
        case "a FIFO":
            os.mkfifo(model / "pipe")
    assert slurmft.stage_in_memory(model) == model
    assert list((memory / "weights").glob("*/")) + list((memory / "weights").glob("*.json")) == []


def test_without_an_agent_everything_is_as_it_was(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.delenv("SLURMFT_MEMORY_DIR", raising=False)
    assert slurmft.stage_in_memory(model) == model
    made = {"w": torch.ones(4)}
    assert slurmft.shared_weights("name", lambda: made) is made and caplog.text == ""


def test_many_replicas_load_once_and_what_one_writes_is_its_own(memory: Path, tmp_path: Path) -> None:
    loads = tmp_path / "loads"
    made = {"w": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "n": torch.tensor(7)}

    def load() -> dict[str, torch.Tensor]:
        with loads.open("a") as stream:
            stream.write("x")
        return made

    def replica() -> None:
        weights = slurmft.shared_weights("org/model", load, version="bf16")
        assert all(torch.equal(weights[name], tensor) for name, tensor in made.items())
        weights["w"].zero_()

    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                replica()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    in_child(replica)
    assert loads.read_text() == "x"
    in_child(lambda: slurmft.shared_weights("org/model", load, version="fp8") and None)
    assert loads.read_text() == "xx", "another version is another model"


def test_an_error_of_the_loader_is_the_callers(memory: Path) -> None:
    def load() -> dict[str, torch.Tensor]:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        slurmft.shared_weights("name", load)
    assert list((memory / "weights").glob("*/")) == []
