"""What a run changes about itself before it is tried again: real runs, on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runs.test_local import LocalRun
from slurmft.storage.journal import Event

pytestmark = pytest.mark.timeout(180)
FRAIL = Path(__file__).parent / "trainers" / "frail.py"


def frail(path: Path, *options: str, **changes: object) -> LocalRun:
    command = ["python", str(FRAIL), "--steps", "12", *options]
    return LocalRun(path, **{"command": command, "nodes": 1, "checkpoint": {"interval_steps": 4}, **changes})


def events(run: LocalRun, name: str) -> list[Event]:
    return [event for event in run.folder.journal().read() if event.event == name]


def weights(run: LocalRun) -> str:
    found = re.findall(r"^final weights sha256: (\w+)", output(run), re.MULTILINE)
    assert len(found) == 1, run.story() + output(run)
    return str(found[0])


def output(run: LocalRun, rank: int = 0) -> str:
    paths = sorted(run.folder.attempts.glob(f"*/rank-{rank}.log"), key=lambda path: path.stat().st_mtime)
    return "".join(path.read_text() for path in paths)


def test_a_batch_that_does_not_fit_is_computed_in_smaller_pieces(tmp_path: Path) -> None:
    """Too large at the first step, twice: all steps were computed in the same pieces, so the weights are the same."""
    run = frail(tmp_path / "reduced", "--micro-batch", "8", "--fits", "2", oom={"action": "reduce_batch"})
    run.submit("--wait")
    assert [event.details["micro_batches"] for event in events(run, "batch reduced")] == [[4], [2]], run.story()
    assert {event.details["cause"] for event in events(run, "verdict")[:2]} == {"out of host memory"}
    undisturbed = frail(tmp_path / "undisturbed", "--micro-batch", "2")
    undisturbed.submit("--wait")
    assert weights(run) == weights(undisturbed)


def test_a_batch_that_cannot_be_smaller_ends_the_run(tmp_path: Path) -> None:
    run = frail(
        tmp_path / "too-large", "--micro-batch", "8", "--fits", "1", oom={"action": "reduce_batch", "min_batch": 3}
    )
    run.submit("--wait", check=False)
    decision = events(run, "decision")[-1].details
    assert (decision["action"], decision["exit_code"]) == ("stop", 93), run.story()
    assert "the micro-batch of 4 samples could next be 2, below oom.min_batch=3" in decision["reason"]
