"""A node of a Ray cluster under an agent: what Ray is told, what it must not learn, and what its sweeper ends."""

import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmft.agent import ray
from slurmft.agent.ray import head_address, leave_token, rays_environment, start_argv, token_of, why_not
from slurmft.agent.torchrun import worker_command
from slurmft.config.run import validate
from slurmft.errors import ConfigError
from slurmft.policy import judge as policy_judge
from slurmft.policy.judge import Circumstances, WorkerEnd, held_against, judge
from slurmft.policy.verdict import Cause, Verdict
from slurmft.storage.verdicts import read_verdict
from slurmft.system.processes import session_members

LEAST = {"command": ["python", "train.py"], "run_folder": "/r", "launcher": "ray"}


def given(folder: Path, rank: int = 0, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "MASTER_ADDR": "n1", "MASTER_PORT": "4711", "WORLD_SIZE": "4",
            "SLURMFT_ATTEMPT": "7.0.0", "SLURMFT_PAGE": str(folder / f"rank-{rank}"), **more}  # fmt: skip


def test_the_holder_promises_ray_the_time_of_a_stop():
    config = validate({**LEAST, "preemption": {"stop_timeout_s": 45.6, "signal_lead_s": 20}}, source="test")
    assert worker_command(config)[1:] == ["-m", "slurmft.agent.ray", "--hold", "46", "python", "train.py"]


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
    assert "this node has 2.40.0\n  hint: pip install 'ray[train]'" in capsys.readouterr().err


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


def held_with(start: str, folder: Path, rank: int, *, more: str = "") -> tuple[int, str]:
    """Exit code and log of a holder whose ``ray start`` is this program, with Ray's folder in its first argument."""
    program = f"""
import sys
from pathlib import Path
from slurmft.agent import ray
from slurmft.system.files import PrivateFolder
ray.start_argv = lambda given, address, folder: [sys.executable, "-c", {start!r}, str(folder)]
ray._answers = lambda address, terms: True
{more}
given = {given(folder, rank, MASTER_ADDR="localhost", SLURMFT_VERDICT_FILE=str(folder / "verdict"))!r}
private = PrivateFolder(Path({str(folder)!r}), -1)
ray.leave_as(ray._hold([sys.executable, "-c", "raise SystemExit(5)"], "1", given, private, []))
"""
    with (folder / "log").open("ab") as log:
        log.write(b"of an earlier attempt\n")
        log.flush()
        done = subprocess.run([sys.executable, "-c", program], stderr=log, stdout=log, timeout=60, check=False)
    return done.returncode, (folder / "log").read_text()


FAILS = """
import sys
from pathlib import Path
logs = Path(sys.argv[1]) / "session_latest" / "logs"
logs.mkdir(parents=True)
(logs / "gcs_server.err").write_text("bind: address already in use\\n")
sys.exit("Exception: The current node timed out during startup.")
"""


def judged(folder: Path, code: int) -> Verdict:
    end = WorkerEnd(rank=0, node="n1", code=code)
    told = read_verdict(folder / "verdict")
    reports = (
        ()
        if told is None
        else (
            policy_judge.Report(
                source="verdict",
                rank=0,
                node="n1",
                cause=policy_judge.claimed(told.cause),
                message=told.message,
                traceback=told.traceback,
                binding=True,
            ),
        )
    )
    return judge([end], world_size=1, seen=Circumstances(heard=policy_judge.Testimony(reports=reports)))


def test_a_head_that_does_not_start_is_an_error_in_rays_words_and_accuses_no_node(tmp_path):
    code, log = held_with(FAILS, tmp_path, 0)
    verdict = judged(tmp_path, code)
    assert (code, verdict.cause, verdict.suspects) == (1, Cause.WORKER_ERROR, ())
    assert verdict.reason == ("rank 0 on n1 exited with 1: Ray did not start: it exited with 1: "
                              "Exception: The current node timed out during startup.")  # fmt: skip
    assert "gcs_server.err:\nbind: address already in use" in verdict.traceback
    assert "earlier attempt" not in verdict.traceback
    assert "bind: address already in use" in log, "Ray's folder is removed"
    assert held_against(verdict, [], at=0.0) == ()


def test_a_head_that_is_never_up_is_given_up(tmp_path):
    code, _ = held_with("import time; time.sleep(600)", tmp_path, 0, more="ray.HEAD_S = 0.3")
    assert (code, judged(tmp_path, code).reason) == (
        1, "rank 0 on n1 exited with 1: Ray did not start: it was not up within 0 s",
    )  # fmt: skip


def test_another_node_whose_ray_does_not_start_leaves_no_verdict_for_the_run(tmp_path):
    code, log = held_with(FAILS, tmp_path, 2)
    assert code == 1
    assert "Ray did not start: it exited with 1: Exception: The current node timed out" in log
    assert not (tmp_path / "verdict").exists()


@pytest.mark.parametrize("up", ["", "(folder / 'ray_current_cluster').touch(); time.sleep(1); "])
def test_a_ray_that_is_killed_still_counts_as_a_crash(tmp_path, up):
    start = ("import os, sys, time; from pathlib import Path; folder = Path(sys.argv[1]); folder.mkdir(); "
             f"{up}os.kill(os.getpid(), 9)")  # fmt: skip
    code, _ = held_with(start, tmp_path, 3)
    assert (code, judged(tmp_path, code).cause) == (-9, Cause.SIGNAL_CRASH)


def test_the_command_of_a_head_that_is_up_ends_the_node(tmp_path):
    start = ("import sys, time; from pathlib import Path; folder = Path(sys.argv[1]); folder.mkdir(); "
             "(folder / 'ray_current_cluster').touch(); time.sleep(600)")  # fmt: skip
    assert held_with(start, tmp_path, 0)[0] == 5


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
    argv = [sys.executable, "-m", "slurmft.agent.ray", "--sweep", str(holder.pid), str(folder)]
    sweeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    os.kill(holder.pid, 9)
    holder.wait()
    assert session_members(holder.pid) == members - {holder.pid}, "the sweeper waits for the end of its input"
    sweeper.communicate(timeout=60)
    assert session_members(holder.pid) == set()
    assert not folder.exists()
