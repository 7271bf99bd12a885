"""A Trainer whose ranks are killed in the middle of saves never goes on from a folder that is not finished."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install transformers accelerate"
)
needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install lightning")
FRAMEWORKS = [
    pytest.param("huggingface", marks=needs_transformers),
    pytest.param("lightning", marks=needs_lightning),
]
TRAINER = Path(__file__).parent / "trainers" / "killed_in_saves.py"


def final_weights(folder: Path, *options: str, within_s: float) -> tuple[str, str]:
    """The line on kills, and the one with the digest of the weights."""
    command = [sys.executable, str(TRAINER), str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=within_s, check=False, env=environment, cwd=folder.parent
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    kills, digest = result.stdout.splitlines()
    return kills, digest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_transformers
def test_kills_in_saves_lose_only_the_save(tmp_path: Path) -> None:
    kills, digest = final_weights(tmp_path / "killed", "--kills", "2", within_s=300)
    assert kills.startswith("kills 2, ")
    assert digest == final_weights(tmp_path / "calm", "--kills", "0", "--steps", "6", within_s=200)[1]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_hundred_kills_in_saves(tmp_path: Path, framework: str) -> None:
    of = ("--framework", framework)
    kills, digest = final_weights(tmp_path / "killed", "--kills", "100", "--seed", "1", *of, within_s=5400)
    assert kills.startswith("kills 100, of which ") and int(kills.split()[4]) > 20, "most must strike in a save"
    assert digest == final_weights(tmp_path / "calm", "--kills", "0", "--steps", "300", *of, within_s=1200)[1]
