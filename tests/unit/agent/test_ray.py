"""A node of a Ray cluster under an agent: what Ray is told, what it must not learn, and what its sweeper ends."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmft.agent.launchers import ray
from slurmft.agent.launchers.ray import head_address, leave_token, rays_environment, start_argv, token_of, why_not
from slurmft.agent.launchers.torchrun import worker_command
from slurmft.config.config import validate
from slurmft.errors import ConfigError
from slurmft.system.processes import session_members

LEAST = {"command": ["python", "train.py"], "run_folder": "/r", "launcher": "ray"}


def given(folder: Path, rank: int = 0, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "MASTER_ADDR": "n1", "MASTER_PORT": "4711", "WORLD_SIZE": "4",
            "SLURMFT_ATTEMPT": "7.0.0", "SLURMFT_PAGE": str(folder / f"rank-{rank}"), **more}  # fmt: skip


def test_the_holder_promises_ray_the_time_of_a_stop():
    config = validate({**LEAST, "preemption": {"stop_timeout_s": 45.6, "signal_lead_s": 20}}, source="test")
    assert worker_command(config)[1:] == ["-m", "slurmft.agent.launchers.ray", "--hold", "46", "python", "train.py"]


def test_ray_has_one_holder_on_each_node():
    with pytest.raises(ConfigError, match="nproc_per_node"):
        validate({**LEAST, "nproc_per_node": 2}, source="test")


@pytest.mark.parametrize(
    ("version", "what"),
    [(None, "not installed"), ("2.51.1", "2.60 or newer, and this node has 2.51.1"), ("1.13.0", "2.60 or newer")],
)
def test_a_ray_that_asks_for_no_token_is_refused(version, what):
    assert what in why_not(version)


def test_the_version_that_is_installed_and_constrained_is_taken(tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[3]
    (lowest,) = re.findall(r"^\s+ray\[train\]>=(\d+)\.(\d+)$", (root / "setup.cfg").read_text(), re.MULTILINE)
    assert tuple(map(int, lowest)) == ray.LOWEST
    assert not any(map(why_not, (".".join(lowest) + ".0", "2.60.0", "3.0.0rc1")))
    monkeypatch.setattr(ray.importlib.metadata, "version", lambda _name: "2.40.0")
    assert ray.hold(["python", "train.py"], "1", given(tmp_path)) == 2
    assert "this node has 2.40.0\n  hint: pip install 'slurmft[ray]'" in capsys.readouterr().err


def test_the_token_is_of_one_attempt_and_only_the_user_reads_it(tmp_path):
    leave_token(tmp_path, b"secret", "7.0.0")
    path = Path(rays_environment(given(tmp_path))["RAY_AUTH_TOKEN_PATH"])
    assert path.read_text() == token_of(b"secret", "7.0.0") != token_of(b"secret", "7.0.1")
    assert token_of(b"secret", "7.0.0") != token_of(b"other", "7.0.0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64


def test_the_command_is_no_rank_and_knows_no_other_cluster(tmp_path):
    told = rays_environment(given(tmp_path, RAY_ADDRESS="elsewhere:1", RAY_AUTH_TOKEN="leaked",
                                  RAY_AUTH_MODE="disabled", TORCHELASTIC_RUN_ID="x", HOME="/h"))  # fmt: skip
    assert set(told) == {"SLURMFT_ATTEMPT", "HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED",
                         "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "RAY_worker_niceness"}  # fmt: skip
    assert told["RAY_AUTH_MODE"] == "token"


def test_a_node_has_free_ports_the_cpus_of_the_allocation_and_no_dashboard(tmp_path):
    head = start_argv(given(tmp_path, SLURM_CPUS_PER_TASK="3"), "10.0.0.1:4711", tmp_path)
    assert {"--head", "--node-ip-address=10.0.0.1", "--port=4711", "--include-dashboard=false", "--num-cpus=3",
            "--min-worker-port=0", "--dashboard-agent-listen-port=0",
            f"--temp-dir={tmp_path}"} <= set(head)  # fmt: skip
    other = start_argv(given(tmp_path, 2, SLURM_CPUS_ON_NODE="8"), "10.0.0.1:4711", tmp_path)
    assert {"--address=10.0.0.1:4711", "--num-cpus=8", "--node-name=slurmft-2"} <= set(other)
    assert not {"--head", "--port=4711"} & set(other)
    assert not any("token" in word for word in head + other), "never on a command line"


def test_the_head_has_an_address_in_numbers():
    assert head_address("localhost", "4711") in ("127.0.0.1:4711", "[::1]:4711")


def test_the_sweeper_ends_a_session_with_its_groups_and_removes_the_folder(tmp_path):
    folder = tmp_path / "private"
    (folder / "/".join("abcdefghijklmnopqrstuvwxyz")).mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import os, subprocess, time\n"
         "subprocess.Popen(['sleep', '600'], process_group=0)\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)"],
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while len(members := session_members(holder.pid)) < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    argv = [sys.executable, "-m", "slurmft.agent.launchers.ray", "--sweep", str(holder.pid), str(folder)]
    sweeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    os.kill(holder.pid, 9)
    holder.wait()
    assert session_members(holder.pid) == members - {holder.pid}, "the sweeper waits for the end of its input"
    sweeper.communicate(timeout=60)
    assert session_members(holder.pid) == set()
    assert not folder.exists()
