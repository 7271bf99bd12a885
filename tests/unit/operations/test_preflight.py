"""What is seen of a command before it is submitted: the shell's python, the script, and what it imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurmft.config.run import RunConfig, from_values
from slurmft.errors import UsageError
from slurmft.operations import preflight, submit


def python_in(folder: Path, name: str = "python", body: str = 'shift 2; echo "$@"') -> Path:
    """An interpreter that lacks every package that it is asked for."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def settings_of(folder: Path, *command: str, **more: object) -> RunConfig:
    return from_values({"command": list(command), "run_folder": str(folder / "run"), "working_directory": str(folder),
                        **more}, source="test")  # fmt: skip


def test_python_is_the_one_that_the_shell_finds(tmp_path):
    other = python_in(tmp_path / "bin")
    settings = settings_of(tmp_path, "python", "train.py")
    changed = preflight.with_the_shells_python(settings, {"PATH": str(other.parent)})
    assert changed.command == (str(other), "train.py")


def test_ones_own_python_stays_a_word_so_that_workers_are_forked(tmp_path):
    settings = settings_of(tmp_path, "python3", "train.py")
    own = {"PATH": str(Path(sys.executable).parent)}
    assert preflight.with_the_shells_python(settings, own) is settings
    assert preflight.with_the_shells_python(settings, {"PATH": str(tmp_path)}) is settings  # there is none


def test_the_environment_of_the_run_counts_before_the_shells(tmp_path):
    mine, shells = python_in(tmp_path / "mine"), python_in(tmp_path / "shells")
    settings = settings_of(tmp_path, "python", "train.py", environment={"PATH": str(mine.parent)})
    assert preflight.with_the_shells_python(settings, {"PATH": str(shells.parent)}).command[0] == str(mine)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("python", "gone.py"), "there is no gone.py in"),
        (("python", "-u", "gone.py", "here.py"), "there is no gone.py in"),
        (("./gone.py",), "there is no ./gone.py in"),
        (("no-such-launcher", "here.py"), "there is no program no-such-launcher in PATH"),
        (("{other}", "here.py"), "here.py imports torch and slurmft, which"),
    ],
    ids=str,
)
def test_what_cannot_start_is_refused_before_anything_is_made(tmp_path, monkeypatch, command, words):
    other = python_in(tmp_path / "bin", "python3.9")
    (tmp_path / "here.py").write_text("import os\nimport torch.distributed as dist\nfrom slurmft import session\n")
    settings = settings_of(tmp_path, *(word.replace("{other}", str(other)) for word in command))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words) as caught:
        submit.submit_run(settings, cluster="local", who="me", command="test", tell=lambda _: None)
    assert "--unchecked" in caught.value.hint
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=words):
        submit.plan(settings, (), strict=False, cluster="local", tell=lambda _: None)
    assert submit.plan(settings, (), strict=False, cluster="local", tell=lambda _: None, unchecked=True)


@pytest.mark.parametrize("command", [("python", "-m", "anything"), ("python", "-c", "1"), ("true",)], ids=str)
def test_what_it_cannot_judge_it_lets_pass(tmp_path, command):
    preflight.refuse_unusable(settings_of(tmp_path, *command), os.environ)


def test_torchrun_is_started_by_slurmfts_own_interpreter(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, "python", "-m", "anything", launcher="torchrun")
    preflight.refuse_unusable(settings, os.environ)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="launcher: torchrun"):
        preflight.refuse_unusable(settings, os.environ)


def test_a_script_that_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "train.py")
    preflight.refuse_unusable(settings_of(tmp_path, "python", "train.py"), os.environ)


def test_an_interpreter_that_answers_nonsense_is_not_judged(tmp_path):
    broken = python_in(tmp_path / "bin", body="echo nonsense; exit 3")
    (tmp_path / "train.py").write_text("import torch\n")
    preflight.refuse_unusable(settings_of(tmp_path, str(broken), "train.py"), os.environ)
