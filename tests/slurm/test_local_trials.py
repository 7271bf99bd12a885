"""Sweeps on this machine, while trials, drivers, agents and the supervisor are killed."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from waiting import until

from slurmft.storage.run_folder import RunFolder

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
TRIAL = """
import json, os, sys, time
os.chdir(os.environ["SLURMFT_TRIAL_FOLDER"])
with open("starts", "a") as stream:
    stream.write("s")
time.sleep(0.3)
with open("ends", "a") as stream:
    stream.write("e")
with open(os.environ["SLURMFT_TRIAL_RESULT"], "w") as stream:
    json.dump({"square": int(sys.argv[1]) ** 2}, stream)
"""
NEXT = """
def ask(ended):
    ask.known += [row["result"]["square"] for row in ended]
    if len(ask.known) >= 6:
        return None
    return {"x": len(ask.known) + 1} if len(ask.known) == ask.given else (setattr(ask, "given", len(ask.known)) or [])
ask.known, ask.given = [], -1
"""


class Sweep:
    def __init__(self, folder: Path, trials: dict[str, Any], **keys: Any) -> None:
        self.folder, self.run = folder, RunFolder(folder / "run")
        (folder / "trial.py").write_text(TRIAL)
        config = {"run_folder": str(self.run.path), "command": [sys.executable, str(folder / "trial.py"), "{x}"],
                  "trials": trials, **keys}  # fmt: skip
        (folder / "sweep.yaml").write_text(yaml.safe_dump(config))

    def call(self, *words: str, code: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        done = subprocess.run([sys.executable, "-m", "slurmft", "trials", *words], cwd=self.folder, env=environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *options: str, code: int = 0) -> str:
        return self.call("sweep.yaml", "--cluster", "local", *options, code=code)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.call("results", str(self.run.path), "--json").splitlines()]

    def running(self) -> Iterator[psutil.Process]:
        """The processes of trials."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder / "trial.py") in process.cmdline():
                    yield process

    def victim(self, kind: str) -> tuple[str, psutil.Process] | None:
        """The trial that is hit, and the process to be killed."""
        if kind == "supervisor":
            owner = self.run.owner()
            return None if owner is None else ("", psutil.Process(owner.pid))
        for process in self.running():
            with contextlib.suppress(psutil.Error, StopIteration):
                name, parents = process.cmdline()[-1], process.parents()
                match kind:
                    case "trial":
                        return name, process
                    case "driver":
                        return name, parents[0]
                    case "agent":
                        return name, next(each for each in parents if "agent" in each.cmdline())
        return None


@pytest.mark.long
def test_every_result_once_while_everything_is_killed(tmp_path: Path) -> None:
    count = 40
    sweep = Sweep(tmp_path, {"grid": {"x": list(range(count))}, "per_node": 2, "retries": 2}, nodes=2)
    sweep.submit()
    kills, hit = ["driver", "trial", "agent", "supervisor", "driver", "trial", "supervisor", "agent"], set[str]()
    while sweep.run.done() is None:
        if kills and (found := sweep.victim(kills[0])) is not None and found[0] not in hit:
            with contextlib.suppress(psutil.Error):
                found[1].kill()
                hit |= {found[0]} - {""}
                kills.pop(0)
                time.sleep(0.5)
        time.sleep(0.02)
    assert not kills, "the sweep was over too soon"
    found = sweep.rows()
    assert [row["parameters"]["x"] for row in found] == list(range(count))
    assert [row["state"] for row in found] == ["done"] * count, [row["error"] for row in found if row["error"]]
    assert all(row["result"] == {"square": row["parameters"]["x"] ** 2} for row in found)
    ran = {
        row["trial"]: [len((Path(row["folder"]) / name).read_text()) for name in ("starts", "ends")] for row in found
    }
    again = {name: counts for name, counts in ran.items() if counts != [1, 1]}
    assert len(again) <= 4 * 8, again  # each kill cuts off four trials at most
    assert all(starts - ends <= 3 for starts, ends in again.values()), again
    until(lambda: not list(sweep.running()), 30)


def test_a_sweep_grows_while_it_runs_and_after_its_end_and_repeats_what_failed(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"grid": {"x": [1, 2, 3, 4, "bad"]}})
    sweep.submit()
    until(lambda: (sweep.run.progress() or {}).get("step"), 60)
    config = yaml.safe_load((tmp_path / "sweep.yaml").read_text())
    config["trials"]["grid"]["x"] += [5, 6]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(config))
    assert "2 trials added, 5 were there" in sweep.submit()
    until(lambda: sweep.run.done() is not None and len(sweep.rows()) == 7, 90)
    states = {row["parameters"]["x"]: row["state"] for row in sweep.rows()}
    assert states == {1: "done", 2: "done", 3: "done", 4: "done", "bad": "failed", 5: "done", 6: "done"}
    assert "the sweep is finished" in sweep.submit()
    script = tmp_path / "trial.py"
    script.write_text(script.read_text().replace("int(sys.argv[1]) ** 2", "sys.argv[1]"))
    assert "1 trials added" in sweep.call("retry", str(sweep.run.path), "--failed", "--cluster", "local", "--wait")
    assert {row["state"] for row in sweep.rows()} == {"done"} and len(sweep.rows()) == 7
    assert [len((Path(row["folder"]) / "starts").read_text()) for row in sweep.rows()] == [1, 1, 1, 1, 2, 1, 1]


def test_a_function_is_asked_for_the_next_trial(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"next": "asked:ask"}, environment={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "asked.py").write_text(NEXT)
    sweep.submit("--wait")
    assert [row["result"]["square"] for row in sweep.rows()] == [1, 4, 9, 16, 25, 36]


@pytest.mark.long
def test_an_error_of_that_function_ends_the_run_and_is_told_with_its_place(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"next": "asked:ask"}, environment={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "asked.py").write_text("def ask(ended):\n    return {'x': 1} if not ended else 1 / 0\n")
    sweep.submit()
    until(lambda: any(event.event == "decision" for event in sweep.run.journal().read()), 60)
    verdict = [event.details for event in sweep.run.journal().read() if event.event == "verdict"][-1]
    said = f"trials.next: asked:ask: ZeroDivisionError: division by zero ({tmp_path}/asked.py, line 2)"
    assert (verdict["reason"], verdict["exit_code"]) == (said, 2)
    assert sweep.run.done() is None, "it goes on when it is submitted with a function that works"
    (tmp_path / "asked.py").write_text("def ask(ended):\n    return None\n")
    sweep.submit("--wait")
    assert [row["state"] for row in sweep.rows()] == ["done"]


def test_a_stop_is_heard_while_no_trial_is_named_yet(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"next": "asked:ask"}, environment={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "asked.py").write_text("def ask(ended):\n    return []\n")
    sweep.submit()
    until(lambda: any(event.event == "requests opened" for event in sweep.run.journal().read()), 60)
    subprocess.run([sys.executable, "-m", "slurmft", "stop", str(sweep.run.path)], check=True, timeout=60)
    until(lambda: any(event.event == "decision" for event in sweep.run.journal().read()), 60)
    decision = [event.details for event in sweep.run.journal().read() if event.event == "decision"][-1]
    assert decision["action"] == "stop" and "stopped by" in decision["reason"]


@pytest.mark.long
def test_another_sweep_in_the_same_folder_is_refused_and_the_own_one_may_change_its_size(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"grid": {"x": [1, "bad"]}})
    sweep.submit("--wait")
    config = yaml.safe_load((tmp_path / "sweep.yaml").read_text())
    other = {**config, "command": [*config["command"], "--another"], "trials": {"list": [{"x": 7}]}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(other))
    assert "--another" not in (said := sweep.submit(code=2)) and "choose another run_folder" in said
    assert [row["parameters"]["x"] for row in sweep.rows()] == [1, "bad"]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**config, "trials": {"list": [{"x": 7}], "per_node": 2}}))
    sweep.submit("--wait")
    assert [row["state"] for row in sweep.rows()] == ["done", "failed", "done"]


def test_status_counts_failed_trials_while_others_run(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"grid": {"x": ["bad", "worse", *range(1000)]}})
    sweep.submit()

    def status() -> str:
        argv = [sys.executable, "-m", "slurmft", "status", "--json", str(sweep.run.path)]
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout

    until(lambda: "2 trials failed" in status(), 60)
    subprocess.run([sys.executable, "-m", "slurmft", "stop", str(sweep.run.path)], check=True, timeout=60)
    until(lambda: any(event.event == "decision" for event in sweep.run.journal().read()), 60)


def test_results_as_a_parquet_file(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    sweep = Sweep(tmp_path, {"grid": {"x": [3, "bad"]}})
    sweep.submit("--wait")
    sweep.call("results", str(sweep.run.path), "--parquet", str(tmp_path / "found.parquet"))
    found = parquet.read_table(tmp_path / "found.parquet").to_pylist()
    assert [json.loads(row["parameters"]) for row in found] == [{"x": 3}, {"x": "bad"}]
    assert [(row["state"], json.loads(row["result"])) for row in found] == [("done", {"square": 9}), ("failed", None)]
    assert found[0]["error"] is None and "invalid literal" in found[1]["error"] and found[0]["seconds"] > 0.2
