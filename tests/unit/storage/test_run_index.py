"""The index of a user's runs: found from any folder, bounded, private, and never in the way of a submission."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmft.cli.main import cli
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.storage import run_index
from slurmft.storage.run_folder import RunFolder, find_run
from slurmft.storage.run_index import noted_runs


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURMFT_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return dict(os.environ)


def run_at(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.create()
    run.journal().append("submitting")
    run_index.note(path, os.environ)
    return run


def slurmft(*words: str, answers: str | None = None) -> str:
    result = CliRunner().invoke(cli, words, input=answers)
    if isinstance(result.exception, SlurmftError):
        raise result.exception
    return result.output


def test_the_newest_comes_first_and_vanished_ones_are_left_out(tmp_path, environment):
    first, second, third = (run_at(tmp_path / name / "run") for name in "abc")
    run_index.note(first.path, environment)  # submitted again
    third.journal().path.unlink()
    assert [run.path for run in noted_runs(environment)] == [first.path, second.path]


def test_a_name_is_found_from_any_folder(tmp_path, environment):
    run = run_at(tmp_path / "project" / "my gpt")
    assert find_run("my gpt", Path("nowhere"), lambda: noted_runs(environment)).path == run.path
    run_at(tmp_path / "other" / "my gpt")
    with pytest.raises(StorageError, match="2 runs called 'my gpt'"):
        find_run("my gpt", Path("nowhere"), lambda: noted_runs(environment))


def test_verbs_take_the_newest_or_the_only_one(tmp_path, environment):
    with pytest.raises(UsageError, match="which run"):
        slurmft("explain")
    one = run_at(tmp_path / "one")
    assert "submitting" in slurmft("explain") and f"run {one.path}" in slurmft("explain")
    assert "one" in slurmft("status")
    two = run_at(tmp_path / "two")
    assert f"run {two.path}" in slurmft("explain")
    with pytest.raises(UsageError, match="2 of yours are not finished") as caught:
        slurmft("save")
    assert str(one.path) in caught.value.hint and str(two.path) in caught.value.hint
    two.mark_done(reason="finished")
    with pytest.raises(UsageError, match="run one is not running"):
        slurmft("save")


def _note_many(folder: Path, first: int) -> None:
    for number in range(first, first + 40):
        run_index.note(folder / f"run-{number}", os.environ)


def test_two_processes_at_once_lose_nothing_and_it_is_bounded(tmp_path, environment, monkeypatch):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_note_many, args=(tmp_path, first)) for first in (0, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    folder = tmp_path / "state" / "slurmft" / "runs"
    assert len(list(folder.iterdir())) == 80
    monkeypatch.setattr(run_index, "MAX_RUNS", 10)
    run_index.note(tmp_path / "last", environment)
    assert len(list(folder.iterdir())) == 10
    assert str(tmp_path / "last") in map(os.readlink, folder.iterdir())


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path, environment):
    run_at(tmp_path / "run")
    folder = tmp_path / "state" / "slurmft" / "runs"
    folder.chmod(0o777)
    assert noted_runs(environment) == []
    folder.chmod(0o700)
    assert len(noted_runs(environment)) == 1
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert noted_runs(environment) == []


@pytest.mark.parametrize("hindrance", ["file", "no home"])
def test_no_submission_fails_for_it(tmp_path, environment, monkeypatch, hindrance):
    if hindrance == "file":
        (tmp_path / "state").write_text("in the way")
    else:
        environment.pop("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
    run_index.note(tmp_path / "run", environment)
    assert noted_runs(environment) == []


def _no_home() -> Path:
    raise RuntimeError


# slurmft rm


def test_rm_removes_the_folder_and_follows_no_link(tmp_path, environment):
    run = run_at(tmp_path / "run")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").touch()
    (run.path / "link").symlink_to(tmp_path / "data")
    (run.path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="would be removed"):
        slurmft("rm", "run")
    assert run.exists()
    assert slurmft("rm", "run", "--yes") == f"removed {run.path}\n"
    assert not os.path.lexists(run.path) and (tmp_path / "data" / "kept").exists()
    assert [each.name for each in tmp_path.iterdir() if "removed" in each.name] == []
    assert noted_runs(environment) == [] and not list((tmp_path / "state/slurmft/runs").iterdir())


def test_rm_refuses_a_link_and_a_copy_and_a_running_one(tmp_path, environment):
    run = run_at(tmp_path / "run")
    (tmp_path / "link").symlink_to(run.path)
    with pytest.raises(UsageError, match="is a link"):
        slurmft("rm", "link", "--yes")
    from slurmft.system import processes

    birth = processes.birth_of(os.getpid())
    run.journal().append("started here", process=os.getpid(), birth=birth, host=processes.me().host)
    with pytest.raises(SlurmftError, match="is running here") as caught:
        slurmft("rm", "run", "--yes")
    assert "slurmft stop" in caught.value.hint
    assert run.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's folder takes root")
def test_rm_refuses_another_users(tmp_path, environment):
    run = run_at(tmp_path / "run")
    for each in (run.path, *run.path.rglob("*")):
        os.chown(each, 12345, 12345)
    with pytest.raises(SlurmftError):
        slurmft("rm", "run", "--yes")
    assert run.exists()
