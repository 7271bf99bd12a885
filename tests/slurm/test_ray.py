"""``launcher: ray`` on one machine, with the real Ray: what is left behind, who gets in, what a stop saves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from extras import needs

from slurm.conftest import eventually
from slurm.test_local import LocalRun
from slurmft.system.processes import session_members

pytestmark = [needs("ray"), pytest.mark.timeout(900)]

RAY_S = 300.0
DRIVER = Path(__file__).parent / "trainers" / "ray_driver.py"
SMALL = {
    "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": "100000000",
    "SLURM_CPUS_PER_TASK": "2",
    "RAY_worker_niceness": "0",
}


RUNS: list[RayRun] = []


class RayRun(LocalRun):
    """A run with a cluster of one node."""

    def __init__(self, path: Path, command: list[str], **changes: Any) -> None:
        RUNS.append(self)
        super().__init__(path, command=command, launcher="ray", nodes=1, nproc_per_node=1, environment=SMALL,
                         fault_tolerance={"num_in_job_restarts": 0}, **changes)  # fmt: skip

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those of this run with all these words on their command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            try:
                mine = process.environ().get("SLURMFT_RUN_FOLDER") == str(self.folder.path)
            except psutil.Error:
                continue
            if mine and all(any(word in each for each in line) for word in words):
                found.append(process)
        return found

    def holder(self) -> psutil.Process:
        """Forked from the zygote, whose command line it has; its sweeper names it."""
        return psutil.Process(int(self.processes("slurmft.agent.ray", "--sweep")[0].cmdline()[-2]))

    def words(self) -> str:
        return self.story() + "".join(path.read_text(errors="replace")[-3000:]
                                      for path in self.folder.attempts.glob("*/rank-0.log"))  # fmt: skip


@pytest.fixture(autouse=True)
def _end_of_runs() -> Iterator[None]:
    """A test that fails in between leaves a run behind, which would go on."""
    RUNS.clear()
    yield
    for run in RUNS:
        named = [one for one in psutil.process_iter(["cmdline"])
                 if any(str(run.folder.path) in word for word in one.info["cmdline"] or [])]  # fmt: skip
        for process in (*named, *run.processes()):
            with contextlib.suppress(psutil.Error):
                process.kill()


def waiting(path: Path, *options: str) -> tuple[RayRun, Path]:
    """A run whose command notes what it sees of its cluster."""
    notes = path.with_suffix(".json")
    run = RayRun(path, [sys.executable, str(DRIVER), str(notes), *options])
    run.submit()
    return run, notes


def seen(run: RayRun, notes: Path) -> dict[str, Any]:
    eventually(lambda: notes.exists() and notes.read_text(), RAY_S, run.words)
    facts: dict[str, Any] = json.loads(notes.read_text())
    return facts


def ask(address: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ask the cluster at this address for its nodes, without a token but what is in ``environment``."""
    code = ("import sys, ray._raylet as r; "
            "print('nodes', len(r.GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))")  # fmt: skip
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run([sys.executable, "-c", code, address], env=without | environment, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip


@pytest.mark.long
def test_two_runs_on_one_node_do_not_meet_and_a_stranger_gets_nothing(tmp_path: Path) -> None:
    pairs = [waiting(tmp_path / name) for name in ("one", "two and a space")]
    facts = [seen(*pair) for pair in pairs]
    assert [each["nodes"] for each in facts] == [1, 1]
    assert [each["rank"] for each in facts] == [{}, {}], "no worker of Ray's is a rank of slurmft's"
    assert facts[0]["address"] != facts[1]["address"]
    tokens = [next(iter(run.processes(str(DRIVER)))).environ()["RAY_AUTH_TOKEN_PATH"] for run, _ in pairs]
    answer = ask(facts[0]["address"], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=tokens[0])
    assert answer.stdout == "nodes 1\n", answer.stderr
    for strange in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": tokens[1]}):
        answer = ask(facts[0]["address"], **strange)
        assert answer.returncode != 0 and "nodes" not in answer.stdout, answer
        assert "nauthenticated" in answer.stderr, answer.stderr
    for run, _ in pairs:  # Ray opens its own folder to all users
        words = " ".join(run.processes("raylet/raylet")[0].cmdline())
        folder = Path(re.findall(r"=(\S+/slurmft-[^/]+)/", words)[0])
        assert folder.stat().st_mode & 0o077 == 0, folder
    members = [session_members(run.holder().pid) for run, _ in pairs]
    for _, notes in pairs:
        notes.with_suffix(".end").touch()
    for run, _ in pairs:
        run.wait_until_done()
    assert all(not psutil.pid_exists(pid) for each in members for pid in each)
    assert not folder.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "victim",
    ["holder", *(pytest.param(each, marks=pytest.mark.soak) for each in ("agent", "raylet", "gcs_server", "driver"))],
)
def test_nothing_is_left_behind_whatever_is_killed(tmp_path: Path, victim: str) -> None:
    run, notes = waiting(tmp_path / victim)
    seen(run, notes)
    holder = run.holder()
    members = {psutil.Process(pid) for pid in session_members(holder.pid)}
    assert len(members) > 5, members
    agent = next(one for one in holder.parents() if "agent" in one.cmdline())
    named = {"driver": str(DRIVER), "raylet": "raylet/raylet", "gcs_server": "gcs/gcs_server"}
    found = {"holder": holder, "agent": agent}.get(victim) or run.processes(named[victim])[0]
    os.kill(found.pid, signal.SIGKILL)
    eventually(lambda: not any(each.is_running() and each.status() != "zombie" for each in members), 30,
               lambda: f"{[each for each in members if each.is_running()]}\n{run.words()}")  # fmt: skip
    eventually(lambda: run.events("verdict"), 60, run.words)
    cause = run.events("verdict")[0].details["cause"]
    assert cause == ("unknown" if victim == "agent" else "signal crash"), run.words()  # of one node: all are gone
    run.slurmft("stop", str(run.folder.path), "--timeout", "60", check=False)  # or the run is started again
    eventually(lambda: not run.processes("slurmft.agent"), 60, run.words)


@pytest.mark.soak
def test_the_commands_exit_code_is_the_runs(tmp_path: Path) -> None:
    run, _ = waiting(tmp_path / "validation failed", "17")
    eventually(lambda: run.events("verdict"), RAY_S, run.words)
    assert run.events("verdict")[0].details["cause"] == "result validation failed", run.words()


@pytest.mark.soak
def test_a_stop_saves_the_last_step_and_the_next_start_goes_on_from_it(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    command = [sys.executable, "-m", "slurmft.examples.ray_regression", "--storage", str(storage), "--steps", "400",
               "--save-every", "150", "--workers", "1", "2"]  # fmt: skip
    run = RayRun(tmp_path / "stopped", command)

    def steps() -> list[int]:
        path = storage / "steps.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    run.submit()
    eventually(lambda: len(steps()) > 20, RAY_S, run.words)
    run.slurmft("stop", str(run.folder.path), "--timeout", "60")
    stopped = steps()[-1]
    assert stopped < 150, "it had saved by itself"
    run.submit()
    eventually(lambda: run.folder.done() is not None, RAY_S, run.words)
    assert steps() == list(range(1, 401)), f"stopped after {stopped}"
