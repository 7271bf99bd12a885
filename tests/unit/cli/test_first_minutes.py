"""What a newcomer types first: the bare name, a wrong verb, a script, TAB; and what goes into a pipe."""

import os
import re
import subprocess
import sys
import time

import pytest
from of_each import of_each

from slurmft.cli.main import GROUPS, VERBS
from slurmft.reporting.report import hours
from slurmft.storage.run_folder import RunFolder


def slurmft(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | environment
    return subprocess.run([sys.executable, "-P", "-m", "slurmft", *words], env=given, capture_output=True, text=True,
                          timeout=120, check=False, stdin=subprocess.DEVNULL)  # fmt: skip


def test_each_verb_is_in_one_group_of_the_help():
    assert sorted(name for names in GROUPS.values() for name in names.split()) == sorted(VERBS)


def test_the_bare_name_prints_the_help_once():
    done = slurmft()
    assert done.returncode == 2
    assert done.stderr.count("Usage:") == 1 and "Error" not in done.stderr
    assert all(f"{title}:" in done.stderr for title in GROUPS)


@of_each(
    word__meant=[
        ("list", "status"),
        ("ls", "status"),
        ("cancel", "stop"),
        ("resume", "submit"),
        ("remove", "rm"),
        ("stat", "status"),
    ]
)
def test_a_neighbours_word_is_answered_with_ours(word, meant):
    done = slurmft(word)
    assert done.returncode == 2 and f"did you mean {meant}" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.py", "import torch\n", "slurmft init train.py"),
        ("job.sh", "#!/bin/bash\nsrun x\n", "slurmft sbatch job.sh"),
    ],
)
def test_a_script_is_answered_with_what_to_type(tmp_path, monkeypatch, name, text, words):
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    done = slurmft("submit", name)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_the_shell_completes_verbs():
    """docs/how-to/first-run.md has the line for bash."""
    done = slurmft(_SLURMFT_COMPLETE="bash_complete", COMP_WORDS="slurmft sub", COMP_CWORD="1")
    assert done.stdout.split() == ["plain,submit"]
    script = slurmft(_SLURMFT_COMPLETE="bash_source").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_table_in_a_pipe_is_not_wrapped(tmp_path):
    run = RunFolder(tmp_path / ("a-name-" * 20))
    run.create()
    run.journal().append("submitting")
    shown = slurmft("status", SLURMFT_RUNS=str(tmp_path)).stdout.rstrip("\n").split("\n")
    assert len(shown) == 2 and run.path.name in shown[1]
    assert len(slurmft("status", SLURMFT_RUNS=str(tmp_path), COLUMNS="80").stdout.split("\n")) > 4


def test_moments_are_shown_as_times(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.journal().append("stopping", signal_at=time.time(), seconds_left=12.5)
    shown = slurmft("explain", str(run.path)).stdout
    assert "seconds_left=12.500" in shown
    assert re.search(r"signal_at=\d\d:\d\d:\d\d", shown)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (0.0, "0"), (0.002, "<0.01"), (3600.0, "1"), (3.6e7, "10,000")]
)
def test_rank_hours_are_for_people(seconds, shown):
    assert hours(seconds) == shown


def test_the_help_imports_neither_torch_nor_numpy():
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "slurmft", "--help"], capture_output=True,
                          text=True, timeout=60, check=True, cwd="/")  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported and imported & {"torch", "numpy", "rich"} == set()
