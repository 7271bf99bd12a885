"""``@slurmft.record``: why a rank failed, written down without an agent, and never in the way of the exception."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slurmft
from slurmft.policy.judge import Circumstances, WorkerEnd, judge
from slurmft.policy.verdict import Cause
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.supervisor.observations import collect


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMFT_ERROR_DIR", str(tmp_path / "errors"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return tmp_path / "errors"


@slurmft.record
def fail(error: BaseException) -> None:
    """Raise it."""
    raise error


def test_an_exception_is_written_down_and_raised_again(folder):
    with pytest.raises(ValueError, match="no such luck"):
        fail(ValueError("no such luck"))
    text = (folder / "error.rank_3").read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: no such luck\n")
    assert [path.name for path in folder.iterdir()] == ["error.rank_3"]
    assert (fail.__name__, fail.__doc__) == ("fail", "Raise it.")


def test_what_is_returned_is_returned(folder):
    assert slurmft.record(lambda a, *, b: (a, b))(1, b=2) == (1, 2)
    assert not folder.exists()


@pytest.mark.parametrize("error", [SystemExit(16), KeyboardInterrupt(), slurmft.PlannedStop(3)], ids=str)
def test_ends_that_are_meant_leave_nothing(folder, error):
    with pytest.raises(type(error)):
        fail(error)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "12"}, "12"),
        ({"RANK": "", "SLURM_PROCID": "4"}, "4"),
        ({"RANK": "../x"}, "0"),
        ({"RANK": "\u0663"}, "0"),
    ],
)
def test_whose_file_it_is(folder, monkeypatch, variables, name):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError):
        fail(ValueError())
    assert [path.name for path in folder.iterdir()] == [f"error.rank_{name}"]


@pytest.mark.parametrize("target", ["/proc/nowhere", "/dev/null/x", "a\0b"], ids=ascii)
def test_a_file_that_cannot_be_written_does_not_hide_the_exception(folder, monkeypatch, target):
    if "\0" in target:
        monkeypatch.setattr(os, "environ", {**os.environ, "SLURMFT_ERROR_DIR": target})
    else:
        monkeypatch.setenv("SLURMFT_ERROR_DIR", target)
    with pytest.raises(ValueError, match="the true one"):
        fail(ValueError("the true one"))


def test_without_the_variables_nothing_is_written(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("SLURMFT_ERROR_DIR")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        fail(ValueError())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("x" * 100_000 + " the end", "xx the end"),
        ("a \udcff surrogate", "a \\udcff surrogate"),
        ("two\nlines", "lines"),
    ],
    ids=["long", "odd", "two"],
)
def test_any_message_can_be_written(folder, text, end):
    with pytest.raises(ValueError):
        fail(ValueError(text))
    written = (folder / "error.rank_3").read_text(encoding="utf-8")
    assert len(written) <= 9000
    assert written.rstrip().endswith(end)


def test_torchruns_file_is_written_once(folder, monkeypatch, tmp_path):
    path = tmp_path / "torch" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for message in ("first", "second"):
        with pytest.raises(ValueError):
            fail(ValueError(message))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: first"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: first\n")
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_the_supervisor_understands_both_files(folder, monkeypatch, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    attempt = Attempt(job="7", restart=0)
    mine = run.attempts / str(attempt)
    monkeypatch.setenv("SLURMFT_ERROR_DIR", str(mine))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(mine / "torch.rank_3"))
    with pytest.raises(MemoryError):
        fail(MemoryError())
    for name in ("error.rank_3", "torch.rank_3"):
        ends = [WorkerEnd(rank=3, node="n1", code=1)]
        found = judge(ends, world_size=1, seen=Circumstances(heard=collect(run, attempt, ends)))
        assert (found.cause, found.rank) == (Cause.HOST_OUT_OF_MEMORY, 3)
        (mine / name).unlink()


def test_decorating_imports_no_torch(folder, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, slurmft\n@slurmft.record\ndef main():\n    raise RuntimeError('x')\n"
        "try:\n    main()\nexcept RuntimeError:\n    sys.exit(7 if 'torch' in sys.modules else 5)\n"
    )
    assert subprocess.run([sys.executable, str(script)], timeout=60, check=False).returncode == 5
    assert (folder / "error.rank_3").exists()
