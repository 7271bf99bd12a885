"""A run folder and an exclusion list that were written before modules had their names of today are used as they are.

``data/run-before-0.1.0`` is a run of the byte-level GPT on two ranks, stopped at step 22 of 40.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).parents[1] / "data" / "run-before-0.1.0"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The recorded folder at a place of its own, as git does not keep modes."""
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run").chmod(0o700)
    return tmp_path


def slurmft(place: Path, *arguments: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # its command starts "python"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slurmft", *arguments], cwd=place, capture_output=True, text=True, timeout=200,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_records_are_read(place):
    (status,) = map(json.loads, slurmft(place, "status", "run", "--json").splitlines())
    assert (status["state"], status["step"], status["saved"]) == ("stopped", 22, 22)
    story = slurmft(place, "explain", "run")
    assert "all ranks stopped at step 22" in story and "generation=1" in story


def test_its_checkpoint_is_whole(place):
    assert "step-00000022.g1.c3: intact" in slurmft(place, "checkpoint", "verify", "run")


@pytest.mark.long
def test_it_goes_on(place):
    said = slurmft(
        place, "submit", "run/config.yaml", "--cluster", "local", "--wait", "--set", f"working_directory={place}"
    )
    assert "steps      40 of 40" in said
    events = [json.loads(line) for line in (place / "run" / "journal.jsonl").read_text().splitlines()]
    assert [event["resumed_from"] for event in events if event["event"] == "first step"] == [0, 22]


def test_its_exclusion_list_is_read(place):
    assert "n7" in slurmft(place, "exclude", "list", "--file", "excluded.json")
