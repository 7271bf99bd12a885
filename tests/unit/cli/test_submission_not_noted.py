"""A disk that fills up between sbatch's answer and our note of it: no job stays behind that its run does not know."""

import json
from pathlib import Path

import pytest

from slurmft.cli.main import main
from slurmft.errors import SlurmError, StorageUnavailable
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler import own_jobs
from slurmft.storage import run_folder

STUBS = {
    "sbatch": 'echo "Submitted batch job 42"',
    "scontrol": 'case "$*" in *config*) echo "ClusterName = c1" ;; esac',
    "squeue": "",
    "sacct": "",
    "sinfo": "",
    "scancel": 'echo "$*" >> "$0.asked"',
}


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in STUBS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"command: [python, -m, json.tool]\nrun_folder: {tmp_path / 'run'}\nnproc_per_node: 1\n")
    return path


def submit(config: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["slurmft", "submit", "--cluster", "slurm", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def submit_on_full_disk(config: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    def refuse(path: Path, _value: object) -> None:
        raise StorageUnavailable(f"cannot write {path}: No space left on device", hint="free space")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_state", refuse)
        return submit(config, monkeypatch)


def test_a_job_that_cannot_be_noted_is_cancelled(commands, config, monkeypatch, capsys):
    assert submit_on_full_disk(config, monkeypatch) == StorageUnavailable.exit_code
    assert (commands / "scancel.asked").read_text() == "42\n"
    assert "job 42, just submitted, is cancelled" in capsys.readouterr().err
    assert submit(config, monkeypatch) == 0
    assert json.loads((config.parent / "run" / "jobs.json").read_text())["jobs"] == ["42"]


@pytest.mark.usefixtures("commands")
def test_one_that_cannot_be_cancelled_either_is_named(config, monkeypatch, capsys):
    def refuse(_job: OwnJob) -> None:
        raise SlurmError("Access denied")

    monkeypatch.setattr(own_jobs, "cancel", refuse)
    assert submit_on_full_disk(config, monkeypatch) == 1
    assert "scancel 42, or the next submission makes a second job" in capsys.readouterr().err
