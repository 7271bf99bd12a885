"""Hydra's multiruns and Optuna's studies on a real cluster, while apps, jobs and nodes go.

``SLURMFT_SEARCH_TRIALS=200`` makes them longer than the tests are, with five kills of the app in place of three.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs

from slurm.conftest import PATIENCE_S, eventually
from slurm.test_local_searches import APP, CONFIG
from slurm.test_trials import SweepRun
from slurmft.lab.cluster import Lab

COUNT = int(os.environ.get("SLURMFT_SEARCH_TRIALS", "24"))
PHASES = 5 if COUNT >= 100 else 3
PHASE = COUNT // PHASES
"""Trials that wait together for the test's word, so that each fault comes while there is work."""

JOBS = 3
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400 + 4 * COUNT)]

TUNE = """
import os, pathlib, time
import optuna
from slurmft.integrations.optuna import Search

HERE = pathlib.Path(__file__).parent

def objective(trial):
    x = trial.suggest_float("x", -10, 10)
    with open(pathlib.Path(os.environ["SLURMFT_TRIAL_FOLDER"]) / "starts", "a") as stream:
        stream.write("s")
    trial.report((x - 2) ** 2 + 1, 0)
    while not (HERE / f"go-{trial.number // PHASE}").exists():
        time.sleep(0.05)
    if trial.number % 10 == 3:
        raise optuna.TrialPruned
    if trial.number == 5:
        raise ValueError("no value here")
    return (x - 2) ** 2

search = Search(objective, journal=HERE / "study.journal", n_trials=COUNT, sampler=optuna.samplers.TPESampler(seed=1))
"""
SLURM = {"partition": "low", "time": 20, "cpus_per_task": 8}  # whole nodes
FAULTS = {"agent_timeout_s": 3, "supervisor_lease_s": 15, "retry_delay_s": 0}


class Search(SweepRun):
    """A sweep whose trials somebody asks for."""

    def nodes(self) -> set[str]:
        return {node for node in self.lab.nodes if self.pids_of(node, "-m slurmft.inference.trial_call [^-]")}

    def phases(self) -> list[int]:
        return [int(path.name.removeprefix("go-")) for path in self.path.parent.glob("go-*")]

    def cancel_and_requeue_pilots(self) -> None:
        """Of both pilots, when their trials wait for the test's word."""
        gone, back = sorted(self.pilots())
        self.lab.run_as_admin(["scancel", gone])
        self.lab.run_as_admin(["scontrol", "requeue", back])
        self.wait_for("agent left", 2)


@pytest.fixture
def folder(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = lab.home / "searches" / f"{request.node.name}-{getattr(request.node, 'execution_count', 1)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder


def given_to_the_user(lab: Lab, folder: Path) -> None:
    for path in (folder.parent, folder, *folder.rglob("*")):
        os.chown(path, lab.uid, lab.gid)


@pytest.mark.long
@needs("hydra")
def test_a_multirun_runs_each_job_once_while_its_app_is_killed_again_and_again(lab: Lab, folder: Path) -> None:
    (folder / "app.py").write_text(APP)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "go": str(folder / "go")}))
    given_to_the_user(lab, folder)
    run, began_s = Search(lab, folder / "sweep-app"), time.monotonic()
    words = ["python", "app.py", "-m", "hydra/launcher=slurmft", f"hydra.sweep.dir={folder}",
             "hydra.launcher.partition=low", "hydra.launcher.cpus_per_task=4", "hydra.launcher.per_node=2",
             f"hydra.launcher.max_jobs={JOBS}", f"hydra.launcher.config={{fault_tolerance: {_in_hydra(FAULTS)}}}",
             f"phase=range({PHASES})", f"x=range({PHASE})"]  # fmt: skip

    def start() -> subprocess.Popen[str]:
        argv, environment = lab.command(words, cwd=folder)
        return subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                start_new_session=True)  # fmt: skip

    def kill(process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    app, kills = start(), 0
    eventually(lambda: app.poll() is not None or (run.path.is_dir() and run.events("submitting")), PATIENCE_S, "it")
    assert app.poll() is None, app.communicate()[0]
    kill(app)  # Slurm may have the job, and the run folder may not know it yet
    kills += 1
    for phase in range(PHASES - 1):
        app = start()
        run.go(phase)
        run.wait_for_step(PHASE * (phase + 1), 2 * PATIENCE_S)
        assert app.poll() is None, app.communicate()[0]
        kill(app)
        kills += 1
    app = start()
    run.go(PHASES - 1)
    said, _ = app.communicate(timeout=PATIENCE_S + 2 * COUNT)
    assert app.returncode == 0, said + run.story()
    assert f"0 jobs are added to the sweep, {COUNT} were there" in said and kills == PHASES, said
    run.wait_until_done()

    found = run.rows()
    assert Counter(row["state"] for row in found) == {"done": COUNT}, run.story()
    wanted = sorted((x**2, phase) for x in range(PHASE) for phase in range(PHASES))
    assert sorted((row["result"]["return_value"], _setting(row, "phase")) for row in found) == wanted
    assert sorted(row["parameters"]["number"] for row in found) == list(range(COUNT))
    starts = {int(path.parent.name): len(path.read_text().splitlines()) for path in folder.glob("*/starts")}
    assert starts == dict.fromkeys(range(COUNT), 1), starts
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    print(f"{COUNT} jobs, {kills} kills of the app, {time.monotonic() - began_s:.0f} s")


def _in_hydra(keys: dict[str, Any]) -> str:
    return json.dumps(keys).replace('"', "")


def _setting(row: dict[str, Any], name: str) -> int:
    return next(int(each.partition("=")[2]) for each in row["parameters"]["overrides"] if each.startswith(f"{name}="))


@pytest.mark.long
@needs("optuna")
def test_each_trial_of_a_study_ends_while_pilots_a_node_and_the_supervisors_job_go(lab: Lab, folder: Path) -> None:
    (folder / "tune.py").write_text(TUNE.replace("PHASE", str(PHASE)).replace("COUNT", str(COUNT)))
    run, began_s = Search(lab, folder / "run", folder / "sweep.yaml"), time.monotonic()
    config = {
        "run_folder": str(run.path), "working_directory": str(folder), "slurm": SLURM, "fault_tolerance": FAULTS,
        "trials": {"next": "tune:search.ask", "callable": "tune:search.run", "per_node": 2, "max_jobs": JOBS},
    }  # fmt: skip
    run.config.write_text(yaml.safe_dump(config))
    given_to_the_user(lab, folder)
    enqueue = "from tune import search; search.study.enqueue_trial({'x': 2.0})"
    lab.run(["python", "-c", enqueue], cwd=folder, timeout=120)
    job = lab.run(["slurmft", "trials", str(run.config)], timeout=180).stdout.split(" as job ")[1].split()[0]
    own = run.wait_for("attempt started").details["host"]

    _busy(run, 0, JOBS)
    run.cancel_and_requeue_pilots()
    run.go(0)
    run.wait_for_step(PHASE)
    _busy(run, 1, JOBS)
    victim = sorted(run.wait_for_nodes(beside={own}, count=1))[0]
    lost = len(run.events("agent lost"))
    lab.kill_node(victim)
    try:
        run.wait_for("agent lost", lost + 1)
        run.go(1)
        run.wait_for_step(2 * PHASE)
        lab.run_as_admin(["scontrol", "requeue", job])
        run.wait_for("requests opened", 2)
        for phase in range(2, PHASES):
            run.go(phase)
        run.wait_until_done()
    finally:
        lab.start_node(victim)

    found = run.rows()
    trials = study_in(folder / "study.journal").get_trials()
    wanted = {"PRUNED": len(range(3, COUNT, 10)), "FAIL": 1, "RUNNING": 0}
    wanted["COMPLETE"] = COUNT - sum(wanted.values())
    states = Counter(trial.state.name for trial in trials)
    assert states == Counter(wanted), f"{states}\n{run.story()}"
    assert sorted(row["trial"] for row in found) == sorted(f"trial-{number}" for number in range(COUNT))
    for row in found:
        trial = trials[row["parameters"]["optuna_trial"]]
        assert (row["state"] == "failed") == (trial.state.name == "FAIL"), row
        if trial.state.name == "COMPLETE":
            assert [trial.value] == row["result"]["values"] == [(trial.params["x"] - 2) ** 2]
    assert study_in(folder / "study.journal").best_value == 0 and trials[0].params == {"x": 2.0}
    assert len({trial.params["x"] for trial in trials}) == COUNT, "a seed that all processes share"
    starts = [len((Path(row["folder"]) / "starts").read_text()) for row in found]
    assert sum(starts) - COUNT <= 5 * JOBS * 2, starts
    print(f"{COUNT} trials, {sum(starts) - COUNT} tries again, {dict(states)}, {time.monotonic() - began_s:.0f} s")


def _busy(run: Search, phase: int, nodes: int) -> None:
    """Return when the trials of a phase wait on all nodes."""
    assert phase not in run.phases()
    eventually(lambda: len(run.nodes()) == nodes, PATIENCE_S, run.story)


def study_in(journal: Path) -> Any:
    """The study, read and not written."""
    optuna = importlib.import_module("optuna")
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    return optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend))
