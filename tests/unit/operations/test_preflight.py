"""What is seen of a command before it is submitted: the shell's python, the script, and what it imports."""

import os
import sys
import time
from pathlib import Path

import pytest

from slurmft.config.run import RunConfig, from_values
from slurmft.errors import UsageError
from slurmft.operations import submit

LACKS_ALL = 'shift 3; echo "missing: $@"'
LOUD = 'echo loaded module torch; shift 3; [ "$1" = torch ] && echo missing:'


def python_in(folder: Path, name: str = "python", body: str = LACKS_ALL) -> Path:
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
    changed = submit.with_the_shells_python(settings, {"PATH": str(other.parent)})
    assert changed.command == (str(other), "train.py")


def test_ones_own_python_stays_a_word_so_that_workers_are_forked(tmp_path):
    settings = settings_of(tmp_path, "python3", "train.py")
    own = {"PATH": str(Path(sys.executable).parent)}
    assert submit.with_the_shells_python(settings, own) is settings
    assert submit.with_the_shells_python(settings, {"PATH": str(tmp_path)}) is settings  # there is none


def test_the_environment_of_the_run_counts_before_the_shells(tmp_path):
    mine, shells = python_in(tmp_path / "mine"), python_in(tmp_path / "shells")
    settings = settings_of(tmp_path, "python", "train.py", environment={"PATH": str(mine.parent)})
    assert submit.with_the_shells_python(settings, {"PATH": str(shells.parent)}).command[0] == str(mine)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("python", "gone.py"), "there is no gone.py in"),
        (("python", "-u", "gone.py", "here.py"), "there is no gone.py in"),
        (("./gone.py",), "there is no ./gone.py in"),
        (("no-such-launcher", "here.py"), "there is no program no-such-launcher in PATH"),
        (("{other}", "here.py"), "here.py imports torch and slurmft, which"),
        (("python", "-m", "no_such.thing"), "-m no_such.thing needs no_such, which"),
        (("{other}", "-u", "-m", "slurmft.examples.byte_gpt"), "-m slurmft.examples.byte_gpt needs slurmft, which"),
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


@pytest.mark.parametrize(
    ("command", "script", "body"),
    [
        pytest.param("python -m json.tool", "", "", id="a module"),
        pytest.param("python -u -m train", "", "", id="a module that is here"),
        pytest.param("python -c 1", "", "", id="code"),
        pytest.param("true", "", "", id="a program"),
        pytest.param("{other} train.py", "try:\n    import torch\nexcept ImportError:\n    torch = None\n", LACKS_ALL,
                     id="an import that may fail"),
        pytest.param("{other} train.py", '"""Type:\n\nimport torch\n"""\n', LACKS_ALL, id="a docstring"),
        pytest.param("{other} train.py", "import torch +\n", LACKS_ALL, id="no syntax"),
        pytest.param("{other} train.py", "import torch\n", "echo nonsense; exit 3", id="an interpreter that is broken"),
        pytest.param("{other} train.py", "import torch\n", LOUD, id="words that one prints at its start"),
        pytest.param("{other}-on-numa 0 train.py", "import torch\n", LACKS_ALL, id="a wrapper with its name"),
    ],
)  # fmt: skip
def test_what_it_cannot_judge_it_lets_pass(tmp_path, command, script, body):
    (tmp_path / "train.py").write_text(script)
    other = tmp_path / "bin" / "python"
    for name in ("python", "python-on-numa"):
        python_in(other.parent, name, body)
    words = command.replace("{other}", str(other)).split()
    submit.refuse_unusable_command(settings_of(tmp_path, *words), os.environ)


def test_torchrun_is_started_by_slurmfts_own_interpreter(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, "python", "-m", "json.tool", launcher="torchrun")
    submit.refuse_unusable_command(settings, os.environ)
    monkeypatch.setattr(submit.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="launcher: torchrun"):
        submit.refuse_unusable_command(settings, os.environ)


def test_a_script_that_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "train.py")
    submit.refuse_unusable_command(settings_of(tmp_path, "python", "train.py"), os.environ)


def another_python(folder: Path) -> Path:
    """A real interpreter that is not slurmft's own, and has no packages but the standard library's."""
    return python_in(folder, body=f'exec "{Path(sys.executable).resolve()}" -S "$@"')


def test_nothing_of_the_current_folder_runs_when_an_interpreter_is_asked(tmp_path, monkeypatch):
    other = another_python(tmp_path / "bin")
    for name in ("contextlib", "types", "sitecustomize", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import torch\n")
    with pytest.raises(UsageError, match=r"train\.py imports torch, which"):
        submit.refuse_unusable_command(settings_of(tmp_path, str(other), "src/train.py"), os.environ)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("own", [True, False], ids=["own python", "another"])
@pytest.mark.parametrize("way", ["beside", "PYTHONPATH"])
def test_packages_beside_the_script_and_in_the_runs_own_path_are_found(tmp_path, monkeypatch, own, way):
    other = sys.executable if own else str(another_python(tmp_path / "bin"))
    monkeypatch.setattr(submit, "_imported", lambda _script: ["only_here"])
    folder = tmp_path / "src" if way == "beside" else tmp_path / "lib"
    (folder / "only_here").mkdir(parents=True)
    (folder / "only_here" / "__init__.py").touch()
    (tmp_path / "src").mkdir(exist_ok=True)
    (tmp_path / "src" / "train.py").touch()
    with_path = {"environment": {"PYTHONPATH": str(folder)}} if way == "PYTHONPATH" else {}
    submit.refuse_unusable_command(settings_of(tmp_path, other, "src/train.py", **with_path), os.environ)
    (folder / "only_here").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="imports only_here"):
        submit.refuse_unusable_command(settings_of(tmp_path, other, "src/train.py", **with_path), os.environ)


def test_an_interpreter_that_hangs_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    slow = python_in(tmp_path / "bin", body=f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.setattr(submit, "ASK_S", 1.0)
    submit.refuse_unusable_command(settings_of(tmp_path, str(slow), "train.py"), os.environ)
    pid, until = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}").exists()
