"""Hydra's multiruns as sweeps on this machine: what users give, and what becomes of it when apps are killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs
from waiting import until

from slurmft.storage.run_folder import RunFolder

pytestmark = [needs("hydra"), pytest.mark.timeout(400), pytest.mark.slow]

APP = """
import logging, os, pathlib, time
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg):
    output = pathlib.Path(HydraConfig.get().runtime.output_dir)
    with open(output / "starts", "a") as stream:
        stream.write(f"{HydraConfig.get().job.id} {HydraConfig.get().job.num} {os.environ.get('TOLD')}\\n")
    logging.getLogger("app").info("x is %s", cfg.x)
    while not os.path.exists(f"{cfg.go}-{cfg.phase}"):
        time.sleep(0.05)
    if cfg.kind == "exit":
        raise SystemExit(3)
    if cfg.kind == "generator":
        return (x for x in "abc")
    if cfg.kind == "error":
        return 1 / 0
    return {"square": cfg.x**2, "no number": float("nan"), "tuple": (cfg.x, "a")}[cfg.kind]

if __name__ == "__main__":
    main()
"""
CONFIG = {"x": 0, "phase": 0, "kind": "square", "go": "?", "text": "", "hydra": {"job": {"env_set": {"TOLD": "yes"}}}}

SWEEPER = """
import json
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

@dataclass
class GoldenConf:
    _target_: str = "hydra_plugins.golden.GoldenSweeper"
    told: str = "?"

ConfigStore.instance().store(group="hydra/sweeper", name="golden", node=GoldenConf)

class GoldenSweeper(Sweeper):
    def __init__(self, told):
        self.told = told

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        low, high, number, told = -8, 8, 0, []
        while high - low > 3:
            points = [low + (high - low) // 4, high - (high - low) // 4]
            found = self.launcher.launch([[*arguments, f"x={x}"] for x in points], initial_job_idx=number)
            number += len(points)
            told.append([[x, each.return_value, each.cfg.x, each.hydra_cfg.hydra.job.num]
                         for x, each in zip(points, found)])
            low, high = (low, points[1]) if found[0].return_value <= found[1].return_value else (points[0], high)
        with open(self.told, "w") as stream:
            json.dump(told, stream)
"""


class App:
    """A Hydra app in a folder of its own, and the sweep that it makes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sweep = folder, folder / "sweep of mine"
        (folder / "app.py").write_text(APP)
        (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "go": str(folder / "go")}))
        (folder / "go-0").touch()

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.sweep / "sweep-app")

    def words(self, *overrides: str, app: str = "app.py", sweep: Path | None = None) -> list[str]:
        """The command line of a multirun; Ctrl-C reaches it also where the tests run in the background of a shell."""
        return ["env", "--default-signal=INT", sys.executable, app, "-m", "hydra/launcher=slurmft",
                f"hydra.sweep.dir='{sweep or self.sweep}'",
                "hydra.launcher.cluster=local", "hydra.launcher.linger_s=20", *overrides]  # fmt: skip

    def start(self, *overrides: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        return subprocess.Popen(self.words(*overrides, **options), cwd=self.folder, env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def call(self, *overrides: str, code: int = 0, **options: Any) -> str:
        process = self.start(*overrides, **options)
        said, _ = process.communicate(timeout=200)
        assert process.returncode == code, said
        return said

    def rows(self) -> list[dict[str, Any]]:
        argv = [sys.executable, "-m", "slurmft", "trials", "results", str(self.run.path), "--json"]
        said = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
        return [json.loads(line) for line in said.splitlines()]

    def starts(self) -> dict[str, list[str]]:
        """Folder of a job -> the lines that it has written at its starts."""
        return {path.parent.name: path.read_text().splitlines() for path in self.sweep.glob("*/starts")}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(tmp_path)
    yield app
    if app.run.path.is_dir() and app.run.done() is None:
        subprocess.run([sys.executable, "-m", "slurmft", "stop", str(app.run.path)], check=False, timeout=60)


@pytest.mark.long
def test_an_app_that_is_killed_finds_its_sweep_and_no_job_runs_twice(app: App) -> None:
    process = app.start("x=range(6)", "phase=1", "hydra.launcher.per_node=2")
    until(lambda: len(app.starts()) == 2, 120)
    process.kill()
    process.communicate()
    process = app.start("x=range(6)", "phase=1")
    assert process.stdout is not None
    assert any("0 jobs are added to the sweep, 6 were there" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"slurmft stop {app.run.path}" in said and "Traceback" not in said, said
    (app.folder / "go-1").touch()
    said = app.call("x=range(6)", "phase=1")
    assert "0 jobs are added to the sweep, 6 were there" in said and "6 of 6 jobs have ended" in said, said
    assert app.starts() == {str(number): [f"sweep-app_{number} {number} yes"] for number in range(6)}
    assert [row["result"]["return_value"] for row in app.rows()] == [x**2 for x in range(6)]
    assert (app.sweep / "3" / ".hydra" / "overrides.yaml").read_text() == "- x=3\n- phase=1\n"
    assert "x is 3" in (app.sweep / "3" / "app.log").read_text()
    until(lambda: app.run.done() is not None, 60)  # it does not wait for an app that has ended well
    said = app.call("x=range(8)", "phase=1")
    assert "2 jobs are added to the sweep, 6 were there" in said, said
    assert len(app.starts()) == 8 and {len(lines) for lines in app.starts().values()} == {1}


@pytest.mark.long
def test_a_sweeper_gets_what_jobs_return_and_its_batches_are_one_sweep(app: App) -> None:
    (app.folder / "hydra_plugins").mkdir()
    (app.folder / "hydra_plugins/golden.py").write_text(SWEEPER)
    told = app.folder / "told.json"
    words = ("hydra/sweeper=golden", f"hydra.sweeper.told={told}")
    app.call(*words)
    found = json.loads(told.read_text())
    assert all(value == x**2 == seen**2 for batch in found for x, value, seen, _ in batch)
    numbers = [number for batch in found for *_, number in batch]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 6
    submitted = [event for event in app.run.journal().read() if event.event == "submitting"]
    assert len(submitted) == 1, "the sweep stays between batches"
    told.unlink()
    app.call(*words)
    assert json.loads(told.read_text()) == found
    assert {len(lines) for lines in app.starts().values()} == {1}


@pytest.mark.long
def test_what_is_no_json_comes_back_and_what_failed_is_told(app: App) -> None:
    kinds = ("'no number'", "tuple", "error", "exit", "generator")
    said = app.call("x=2", f"kind={','.join(kinds)}", "hydra.launcher.per_node=3", code=1)
    found = app.rows()
    assert [row["state"] for row in found] == ["done", "done", "failed", "failed", "failed"]
    assert [row["result"]["return_value"] for row in found[:2]] == ["nan", "(2, 'a')"]
    for row, words in zip(found[2:], ("ZeroDivisionError", "exit code 3", "cannot be taken to the app"), strict=True):
        assert words in row["error"], row
    assert "Traceback" not in said and "job 2 has failed" in said and "ZeroDivisionError: division by zero" in said
    assert "hydra.launcher.retry_failed=true" in said and f"{found[2]['folder']}/log.txt" in said
    mended = APP.replace("1 / 0", "7").replace("raise SystemExit(3)", "return 8").replace('(x for x in "abc")', "9")
    (app.folder / "app.py").write_text(mended)
    app.call("x=2", f"kind={','.join(kinds)}", "hydra.launcher.retry_failed=true")
    assert [row["result"]["return_value"] for row in app.rows()] == ["nan", "(2, 'a')", 7, 8, 9]
    assert [len(lines) for _, lines in sorted(app.starts().items())] == [1, 1, 2, 2, 2]


@pytest.mark.long
def test_names_that_no_folder_can_have(app: App) -> None:
    texts = ["a/b", "a b", "'a,b'", "'a=b'", "../up", "'ä'", '"it\'s"', "x" * 300]
    said = app.call(f"text={','.join(texts)}", "hydra.launcher.per_node=4")
    assert f"{len(texts)} of {len(texts)} jobs have ended" in said, said
    assert len(app.starts()) == len(texts)
    assert len({row["folder"] for row in app.rows()}) == len(texts)


@pytest.mark.long
def test_what_would_mix_two_sweeps_is_refused(app: App) -> None:
    app.call("x=1,2")
    (app.folder / "other.py").write_text(APP)
    said = app.call("x=3", app="other.py", code=1)
    assert "has the sweep of another app" in said and "hydra.sweep.dir" in said and "Traceback" not in said
    script = app.folder / "app.py"
    script.write_text(APP.replace("cfg.x**2", "cfg.x**3"))
    said = app.call("x=1,3")
    assert "has changed since this sweep began" in said
    assert [row["result"]["return_value"] for row in app.rows()] == [1, 4, 27]
    config = app.folder / "config.yaml"
    config.write_text(config.read_text().replace("text: ''", "text: new"))
    said = app.call("x=1", code=1)
    assert "with other settings" in said and "Traceback" not in said, said


def test_what_cannot_be_submitted_says_why(app: App) -> None:
    for word, said in {
        "hydra.launcher.setup=[module load x]": "load modules before you submit",
        "hydra.launcher.per_node=0": "hydra.launcher.per_node is 0",
        "hydra.launcher.config={fault_tolerance: {agent_timeout: 3}}": "did you mean agent_timeout_s",
        "hydra.launcher.config=3": "a mapping of sections",
    }.items():
        told = app.call("x=1", word, code=1)
        assert said in told and "Traceback" not in told, told
    script = app.folder / "app.py"
    script.write_text(APP.replace("import hydra\n", "import hydra, threading\nLOCK = threading.Lock()\n")
                      .replace("    output =", "    LOCK.acquire()\n    output ="))  # fmt: skip
    told = app.call("x=1", code=1)
    assert "cannot be taken to the nodes" in told and "Traceback" not in told, told
    assert not app.run.path.exists()
