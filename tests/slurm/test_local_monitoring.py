"""The companion of a supervisor on this machine: what it publishes, and that a dead webhook delays nothing."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from slurm.conftest import TRAINER, eventually
from slurm.test_local import LocalRun

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


def companions(run: LocalRun) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-2:] == ["companion", str(run.folder.config)]:
            found.append(process)
    return found


def test_metrics_are_published_and_a_dead_webhook_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    textfiles = tmp_path / "textfiles"
    textfiles.mkdir()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # it accepts, and never answers
        secret = f"http://127.0.0.1:{silent.getsockname()[1]}/SECRET"
        monkeypatch.setenv("HOOK", secret)
        run = LocalRun(
            tmp_path / "run", command=[*TRAINER, "--steps", "60", "--step-delay", "0.1"],
            metrics={"port": 0, "textfile_folder": str(textfiles), "interval_s": 1},
            notify={"webhook_variable": "HOOK", "events": ["first step", "verdict", "decision"], "timeout_s": 100,
                    "last_s": 2},
        )  # fmt: skip
        run.reach(5)
        port = eventually(lambda: _port(run), 30, run.story)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            body = answer.read().decode()
        assert 'slurmft_run_active{cluster="local",run="run"' in body
        (file,) = eventually(lambda: list(textfiles.glob("*.prom")), 10, run.story)
        assert "slurmft_run_attempts_total" in file.read_text()
        run.wait_until_done()
        done_s = time.monotonic()
        eventually(lambda: not companions(run), 15, run.story)
        assert time.monotonic() - done_s < 10, "it waits for last_s, and a second"
    assert list(textfiles.iterdir()) == [] and not (run.folder.path / "metrics.json").exists()
    assert all(b"SECRET" not in path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file())


@pytest.mark.soak
def test_a_killed_companion_comes_back_with_the_next_attempt(tmp_path: Path):
    told = tmp_path / "told"
    keep = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + chr(10))"
    run = LocalRun(
        tmp_path / "run", command=[*TRAINER, "--steps", "80", "--step-delay", "0.1"],
        checkpoint={"interval_steps": 5}, fault_tolerance={"num_in_job_restarts": 2},
        notify={"command": [sys.executable, "-c", keep], "events": ["first step", "worker failed", "decision: finish"]},
    )  # fmt: skip
    run.reach(6)
    (first,) = eventually(lambda: companions(run), 20, run.story)
    eventually(told.exists, 20, run.story)
    first.send_signal(signal.SIGTERM)  # as Slurm's signals do: it goes on
    first.kill()
    rank = psutil.Process(_pid_of_rank(run, 1))
    rank.kill()
    run.wait_until_done()
    eventually(lambda: not companions(run), 15, run.story)
    events = [json.loads(line)["event"] for line in told.read_text().splitlines()]
    assert events == ["first step", "worker failed", "first step", "decision"], run.story()


def _pid_of_rank(run: LocalRun, rank: int) -> int:
    (log,) = run.folder.attempts.glob(f"*.0/rank-{rank}.log")
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log):
                return process.pid
        except OSError:
            continue
    raise AssertionError("no such rank")


def _port(run: LocalRun) -> int | None:
    try:
        return int(json.loads((run.folder.path / "metrics.json").read_text())["port"])
    except (OSError, ValueError):
        return None
