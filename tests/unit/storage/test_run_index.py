"""The index of a user's runs: found from any folder, bounded, private, and never in the way of a submission."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmft.cli.main import cli
from slurmft.errors import SlurmftError, StorageError, UsageError
from slurmft.operations import control
from slurmft.storage import run_folder
from slurmft.storage.run_folder import Attempt, Owner, RunFolder, find_run, noted_runs, touch


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
    run_folder.note_run(path, os.environ)
    return run


def slurmft(*words: str, answers: str | None = None) -> str:
    result = CliRunner().invoke(cli, words, input=answers)
    if isinstance(result.exception, SlurmftError):
        raise result.exception
    return result.output


def test_the_newest_comes_first_and_vanished_ones_are_left_out(tmp_path, environment):
    first, second, third = (run_at(tmp_path / name / "run") for name in "abc")
    run_folder.note_run(first.path, environment)  # submitted again
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
        run_folder.note_run(folder / f"run-{number}", os.environ)


def test_two_processes_at_once_lose_nothing_and_it_is_bounded(tmp_path, environment, monkeypatch):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_note_many, args=(tmp_path, first)) for first in (0, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    folder = tmp_path / "state" / "slurmft" / "runs"
    assert len(list(folder.iterdir())) == 80
    monkeypatch.setattr(run_folder, "MAX_RUNS", 10)
    run_folder.note_run(tmp_path / "last", environment)
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
    run_folder.note_run(tmp_path / "run", environment)
    assert noted_runs(environment) == []


def _no_home() -> Path:
    raise RuntimeError


def test_a_link_that_goes_meanwhile_is_passed_over(tmp_path, environment, monkeypatch):
    run = run_at(tmp_path / "run")
    run_at(tmp_path / "other")
    real = os.scandir

    def scan(folder: Path) -> contextlib.AbstractContextManager[list[os.DirEntry[str]]]:
        with real(folder) as entries:
            found = list(entries)
        run_folder.forget_run(tmp_path / "other", environment)
        return contextlib.nullcontext(found)

    monkeypatch.setattr(run_folder.os, "scandir", scan)
    assert [each.path for each in noted_runs(environment)] == [run.path]


def test_no_verb_acts_on_a_guess(tmp_path, environment):
    """The only run that is noted is not the only one of the user's: others lie in ./runs, or cannot be looked at."""
    one = run_at(tmp_path / "project" / "one")
    older = RunFolder(tmp_path / "runs" / "older")
    older.create()
    older.journal().append("submitting")
    for verb in ("stop", "save", "requeue"):
        with pytest.raises(UsageError, match="2 of yours are not finished") as caught:
            slurmft(verb)
        assert str(one.path) in caught.value.hint and str(older.path) in caught.value.hint
    older.mark_done(reason="finished")
    with pytest.raises(UsageError, match="run one is not running"):
        slurmft("save")
    assert one.see_request("KILL") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root looks into every folder")
def test_a_run_that_cannot_be_looked_at_may_be_the_one_that_is_meant(tmp_path, environment):
    one, away = run_at(tmp_path / "one"), run_at(tmp_path / "away" / "run")
    away.path.parent.chmod(0)
    try:
        with pytest.raises(SlurmftError):
            slurmft("stop")
    finally:
        away.path.parent.chmod(0o700)
    assert one.see_request("KILL") is None


def test_completing_a_word_asks_for_no_run(tmp_path, environment):
    words = {"_SLURMFT_COMPLETE": "bash_complete", "COMP_WORDS": "slurmft stop --ti", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-P", "-m", "slurmft"], env=environment | words, capture_output=True,
                          text=True, check=False, timeout=60)  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (["plain,--timeout"], "")


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


def test_rm_refuses_what_is_no_runs_folder(tmp_path, environment):
    """Many a project has a file called config.yaml."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").write_text("lr: 1")
    with pytest.raises(UsageError, match="nothing was ever submitted"):
        slurmft("rm", "project", "--yes")
    assert (tmp_path / "project" / "config.yaml").exists()


@pytest.mark.parametrize("within", ["here", "home", "another run"])
def test_rm_refuses_more_than_a_run(tmp_path, environment, monkeypatch, within):
    run = run_at(tmp_path / "run")
    (run.path / "inner").mkdir()
    if within == "here":
        monkeypatch.chdir(run.path / "inner")
    elif within == "home":
        monkeypatch.setenv("HOME", str(run.path))
    else:
        run_at(run.path / "inner" / "run")
    with pytest.raises(UsageError, match=r"is in .*/run"):
        slurmft("rm", str(run.path), "--yes")
    assert (run.path / "inner").exists()


def _mount(source: Path, target: Path) -> bool:
    return subprocess.run(["mount", "--bind", source, target], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount takes root")
def test_rm_empties_no_mounted_folder(tmp_path, environment):
    run = run_at(tmp_path / "run")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").touch()
    (mounted := run.path / "my data").mkdir()
    if not _mount(tmp_path / "data", mounted):
        pytest.skip("no mount is possible here")
    try:
        with pytest.raises(UsageError, match="my data is mounted in it"):
            slurmft("rm", "run", "--yes")
    finally:
        for each in tmp_path.rglob("my data"):  # also where the run was given another name
            subprocess.run(["umount", each], check=True)
    assert (tmp_path / "data" / "kept").exists() and run.exists()


def test_rm_goes_on_where_it_was_killed(tmp_path, environment, monkeypatch):
    elsewhere = run_at(tmp_path / "elsewhere" / "run")
    run = run_at(tmp_path / "runs" / "run")
    killed = multiprocessing.get_context("fork").Process(target=_remove_until_killed, args=(run,))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -9
    (left,) = tmp_path.glob("runs/*")
    assert left.name.startswith(".run.removed-") and (left / "journal.jsonl").exists()
    monkeypatch.setenv("SLURMFT_RUNS", str(tmp_path / "runs"))
    assert "removed" not in slurmft("status")  # it is no run any more
    assert slurmft("rm", "run", "--yes") == f"removed {run.path}\n"
    assert not list(tmp_path.glob("runs/*")) and elsewhere.exists()


def _remove_until_killed(run: RunFolder) -> None:
    control.remove_tree = lambda *_args, **_rest: os.kill(os.getpid(), 9)
    control.remove(run)


def test_rm_takes_deep_folders_and_long_names(tmp_path, environment):
    run = run_at(tmp_path / ("\u8a13" * 84))
    (run.path / "/".join("d" * 60)).mkdir(parents=True)
    assert "removed" in slurmft("rm", str(run.path), "--yes")
    assert not run.exists() and not list(tmp_path.glob(".*removed*"))


def test_rm_refuses_a_run_of_another_login_node(tmp_path, environment):
    run = run_at(tmp_path / "run")
    attempt = Attempt(job="local-1", restart=0)
    run.take_over(Owner(job="local-1", restart=0, generation=1, cluster="local", host="login2", pid=1))
    run.attempt_folder(attempt)
    touch(run, attempt)
    assert control.is_alive(run)
    with pytest.raises(SlurmftError, match="is being trained"):
        slurmft("rm", "run", "--yes")
    assert run.exists()
    (tmp_path / "c.yaml").write_text(f"command: ['true']\nrun_folder: {run.path}\n")
    with pytest.raises(SlurmftError, match="is being trained") as caught:
        slurmft("submit", "c.yaml", "--cluster", "local", "--dry-run")
    assert "login2" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount takes root")
def test_rm_makes_room_on_a_full_disk(tmp_path, environment):
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=False).returncode:
        pytest.skip("no mount is possible here")
    try:
        run = run_at(disk / "run")
        run.take_over(Owner(job="1", restart=0, generation=1, cluster="slurm", host="n1", pid=1))
        with contextlib.suppress(OSError), (run.path / "weights").open("wb", buffering=0) as stream:
            while True:
                stream.write(b"0" * 4096)
        assert "removed" in slurmft("rm", str(run.path), "--yes")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)
