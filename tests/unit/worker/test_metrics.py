"""The numbers of a session as one curve, over restarts, full disks and attempts that were replaced."""

import json
import time
from pathlib import Path

import pytest

from slurmft.worker.saves import MetricsLog


def curve(folder: Path) -> list[tuple[int, float | None]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(value["step"], value["loss"]) for value in map(json.loads, lines)]


def train(folder: Path, start: int, until: int, loss: float, *, close: bool = True) -> MetricsLog:
    metrics = MetricsLog(folder)
    metrics.begin(start)
    for step in range(start, until):
        metrics.note(step, {"loss": loss})
    if close:
        metrics.close()
    return metrics


def test_steps_that_are_done_again_replace_their_lines(tmp_path: Path) -> None:
    train(tmp_path, 0, 30, 1.0)
    train(tmp_path, 20, 40, 2.0)
    assert curve(tmp_path) == [*((step, 1.0) for step in range(20)), *((step, 2.0) for step in range(20, 40))]


def test_several_reports_of_a_step_are_one_line_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    metrics.note(0, {"loss": 9.0})  # before the loop: of no step
    metrics.begin(0)
    metrics.note(0, {"loss": 1.0})
    metrics.note(0, {"rate": 0.5, "loss": float("nan"), "step": 77.0})
    metrics.flush()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["loss"], line["rate"]) == (0, None, 0.5)
    metrics.close()


def test_a_process_that_was_killed_leaves_a_curve_that_the_next_one_continues(tmp_path: Path) -> None:
    train(tmp_path, 0, 30, 1.0, close=False).flush()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"loss": 1.0, "st')
    train(tmp_path, 25, 35, 2.0)
    assert [step for step, _ in curve(tmp_path)] == list(range(35))


def test_an_attempt_that_was_replaced_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMFT_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("SLURMFT_GENERATION", "1")
    owner = {"format": 1, "generation": 1, "job": "7"}
    (tmp_path / "owner.json").write_text(json.dumps(owner))
    stale = train(tmp_path, 0, 10, 1.0, close=False)
    stale.flush()
    (tmp_path / "owner.json").write_text(json.dumps(owner | {"generation": 2}))
    for step in range(10, 20):
        stale.note(step, {"loss": 1.0})
    stale.close()
    assert [step for step, _ in curve(tmp_path)] == list(range(10))


def test_lines_wait_for_a_disk_that_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurmft.worker import saves as module

    real, refused = module.append_lines, list[int]()

    def refusing(path: Path, lines: list[str]) -> None:
        if not refused:
            refused.append(1)
            real(path, lines[:3])  # a part is there
            raise OSError(28, "No space left on device")
        real(path, lines)

    monkeypatch.setattr(module, "append_lines", refusing)
    metrics = train(tmp_path, 0, 10, 1.0, close=False)
    metrics.flush()
    metrics.close()
    assert refused and [step for step, _ in curve(tmp_path)] == list(range(10))


def test_a_step_costs_little_and_a_filesystem_that_hangs_costs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurmft.worker import saves as module

    monkeypatch.setattr(module, "append_lines", lambda *_: time.sleep(30))
    metrics = MetricsLog(tmp_path)
    metrics.begin(0)
    began_s = time.process_time()
    for step in range(20_000):
        metrics.note(step, {"loss": 1.0, "rate": 0.5})
    assert (time.process_time() - began_s) / 20_000 < 200e-6
    assert len(metrics._lines) <= module.MAX_WAITING


def test_without_a_run_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURMFT_RUN_FOLDER", raising=False)
    for is_lead in (True, False):
        metrics = MetricsLog.from_environment(is_lead=is_lead)
        metrics.begin(0)
        metrics.note(0, {"loss": 1.0})
        metrics.close()
    assert list(tmp_path.iterdir()) == []
