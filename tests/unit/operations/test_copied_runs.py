"""Run folders that were copied or moved: a verb works on the folder that it was given, or refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurmft.cli.submit import submit
from slurmft.config import run as configuration
from slurmft.errors import StorageError, UsageError
from slurmft.operations.run_configuration import (
    configuration_of,
    load_given,
    original_of,
    refuse_moved,
    refuse_shared,
    run_around,
)
from slurmft.storage.run_folder import RunFolder


def written(path: Path, **checkpoint: str) -> RunFolder:
    run = RunFolder(path)
    run.create()
    settings = configuration.validate(
        {"command": "true", "run_folder": str(path), "checkpoint": checkpoint}, source="test"
    )  # fmt: skip
    run.config.write_text(settings.as_yaml())
    run.journal().append("submitted", job="7")
    return run


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return written(tmp_path / "original")


def copied(run: RunFolder) -> RunFolder:
    return RunFolder(Path(shutil.copytree(run.path, run.path.with_name("copy"))))


def submitted(*words: object) -> Result:
    return CliRunner().invoke(submit, [*map(str, words), "--dry-run", "--cluster", "local"], standalone_mode=False)


def test_the_configuration_of_its_own_folder_is_what_was_written(run):
    assert configuration_of(run) == load_given(run.config) == configuration.load(run.config)
    assert original_of(run) is None
    refuse_moved(run)


def test_what_lay_inside_lies_inside_now_and_what_lay_outside_stays(tmp_path):
    inside = copied(written(tmp_path / "original", directory=str(tmp_path / "original" / "own" / "ckpt")))
    assert configuration_of(inside).checkpoint_dir == inside.path / "own" / "ckpt"
    shutil.rmtree(tmp_path / "original")
    shutil.rmtree(inside.path)
    outside = copied(written(tmp_path / "original", directory=str(tmp_path / "far")))
    assert configuration_of(outside).checkpoint_dir == tmp_path / "far"


def test_a_copy_is_known_by_its_configuration_until_the_original_is_gone(run):
    copy = copied(run)
    assert original_of(copy) == run.path
    with pytest.raises(StorageError, match="was moved from"):
        refuse_moved(copy)
    shutil.rmtree(run.path)
    assert original_of(copy) is None


def test_another_spelling_of_the_same_folder_is_no_copy(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    same = RunFolder(tmp_path / "link" / "original")
    assert original_of(same) is None
    assert load_given(same.config) == configuration.load(run.config)
    refuse_moved(same)


def test_only_what_both_name_is_shared(tmp_path):
    run = written(tmp_path / "original", directory=str(tmp_path / "far"))
    copy = copied(run)
    refuse_shared(run, tmp_path / "far")
    refuse_shared(copy, tmp_path / "other")
    refuse_shared(copy, copy.path / "checkpoints")
    for text in (run.config.read_text(), "{"):
        run.config.write_text(text)
        (tmp_path / "far").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="is a copy of"):
            refuse_shared(copy, tmp_path / "far")


def test_a_new_run_shares_nothing_yet(tmp_path):
    refuse_shared(RunFolder(tmp_path / "absent"), tmp_path / "far")
    (tmp_path / "empty").mkdir()
    refuse_shared(RunFolder(tmp_path / "empty"), tmp_path / "far")


def test_to_submit_a_copys_configuration_does_not_act_on_the_original(run):
    copy = copied(run)
    refused = submitted(copy.config).exception
    assert isinstance(refused, UsageError) and f"lies in a copy of {run.path}" in str(refused)
    assert submitted(copy.config, "--set", f"run_folder={copy.path}").exception is None
    assert submitted(run.config).exception is None


@pytest.mark.parametrize("place", ["far", "original/own"])
def test_a_new_run_does_not_begin_in_the_checkpoints_of_the_run_whose_configuration_it_takes(tmp_path, place):
    run = written(tmp_path / "original", directory=str(tmp_path / place))
    new = f"run_folder={tmp_path / 'new'}"
    refused = submitted(run.config, "--set", new).exception
    assert isinstance(refused, UsageError) and f"holds the checkpoints of {run.path}" in str(refused)
    assert submitted(run.config, "--set", new, "--set", f"checkpoint.directory={tmp_path / 'new'}/c").exception is None
    assert submitted(run.config, "--set", f"run_folder={run.path}").exception is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_the_originals_directory_mounted_into_a_copy_is_still_the_originals(run):
    own, copy = run.path / "checkpoints", copied(run)
    mounted = copy.path / "checkpoints"
    own.mkdir()
    mounted.mkdir()
    refuse_shared(copy, mounted)
    if subprocess.run(["mount", "--bind", own, mounted], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts are not allowed here")
    try:
        with pytest.raises(UsageError, match="is a copy of"):
            refuse_shared(copy, mounted)
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_the_run_around_a_directory_is_told_by_its_name(run, tmp_path):
    (tmp_path / "far").mkdir()
    (run.path / "link").symlink_to(tmp_path / "far")
    around = run_around(run.path / "link" / "deeper")
    assert around is not None and around.path == run.path
    assert run_around(tmp_path / "far") is None
    assert run_around(run.path / ".." / "far") is None


def test_to_submit_a_moved_runs_configuration_continues_it_where_it_is(run, caplog):
    moved = RunFolder(run.path.rename(run.path.with_name("moved")))
    result = submitted(moved.config)
    assert result.exception is None
    assert str(moved.config) in result.stdout
    assert "is used for" in caplog.text
    assert not run.path.exists()


def test_a_configuration_beside_no_records_means_what_it_says(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("command: x\nrun_folder: elsewhere\n")
    assert load_given(path).run_folder == Path("elsewhere").absolute()
