"""Why agents could not start, by what srun, a container's runtime and agents have left in the attempt's folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmft.supervisor.crew import AttemptFolder

ENDED = "srun: error: n1: task 0: Exited with exit code 1\n"
OUTSIDE = "slurmft: container bwrap /image: ended with exit code 1 on n1\n"


def folder(path: Path) -> AttemptFolder:
    start: Any = SimpleNamespace(run=SimpleNamespace(attempts=path), journal=None, thread=None, generation=1,
                                 lease=None, cluster=SimpleNamespace(attempt="7.0.0"))  # fmt: skip
    (path / "7.0.0").mkdir()
    return AttemptFolder(start)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param(ENDED, f"; srun: {ENDED.strip()}", id="srun alone"),
        pytest.param("slurmstepd: error: execve(): python: No such file\n" + ENDED, f"; srun: {ENDED.strip()}",
                     id="slurmstepd"),
        pytest.param("bwrap: Can't find source path /x\n" + OUTSIDE + ENDED,
                     f"; bwrap: Can't find source path /x; {OUTSIDE.strip()}", id="a runtime"),
        pytest.param("slurmft 12:00:00 WARNING late\n" + OUTSIDE + OUTSIDE + ENDED, f"; {OUTSIDE.strip()}",
                     id="the same of each node, and a log"),
        pytest.param("slurmft: container x: no torch\n  hint: install it\n" + ENDED,
                     "; slurmft: container x: no torch; hint: install it", id="with a hint"),
        pytest.param("make `/b/rootfs` private: No such file\n" + ENDED, "; make `/b/rootfs` private: No such file",
                     id="words of no one we know"),
    ],
)  # fmt: skip
def test_the_reason_is_found(tmp_path: Path, errors: str, expected: str):
    attempt = folder(tmp_path)
    (attempt.path / "srun.err").write_text(errors)
    assert attempt.last_words() == expected


def test_without_slurm_the_agents_log_is_read(tmp_path: Path):
    attempt = folder(tmp_path)
    (attempt.path / "agents.log").write_text(OUTSIDE)
    assert attempt.last_words() == f"; {OUTSIDE.strip()}"
