"""torchrun between the agent and the trainer: what it is told, and what a rank's two processes tell each other."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.agent.torchrun import torchrun_argv, trainers_environment, worker_command
from slurmft.config.run import validate

RANK = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "4711"}  # fmt: skip


def test_by_default_the_command_is_the_users_own():
    config = validate({"command": ["python", "x y.py"], "run_folder": "/r"}, source="test")
    assert worker_command(config) == ("python", "x y.py")


def test_a_stop_has_the_time_of_the_grace_and_not_thirty_seconds():
    raw = {"command": ["python", "x.py"], "run_folder": "/r", "launcher": "torchrun"}
    config = validate({**raw, "preemption": {"stop_timeout_s": 45.6, "signal_lead_s": 20}}, source="test")
    command = worker_command(config)
    assert command[-4:] == ["--shutdown-timeout", "46", "python", "x.py"]
    config = validate({**raw, "preemption": {"stop_timeout_s": 45, "signal_lead_s": 300}}, source="test")
    assert worker_command(config)[-3] == "300"


def test_torchrun_starts_this_nodes_ranks_in_our_order_and_restarts_nothing():
    argv = torchrun_argv(RANK)
    assert {"--nnodes=3", "--node-rank=2", "--nproc-per-node=2", "--master-addr=n1", "--master-port=4711",
            "--max-restarts=0"} <= set(argv)  # fmt: skip
    assert argv[argv.index("--no-python") + 1] == sys.executable


def test_the_trainer_has_torchruns_word_on_the_group_and_ours_on_everything_else():
    ours = {**RANK, "TORCHELASTIC_ERROR_FILE": "/ours", "TORCHELASTIC_USE_AGENT_STORE": "False", "X": "1", "HOME": "/a"}
    theirs = {**RANK, "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "/theirs", "TORCHELASTIC_USE_AGENT_STORE": "True",
              "X": "2", "HOME": "/b", "Y": "3"}  # fmt: skip
    told = trainers_environment(ours, theirs)
    assert (told["MASTER_PORT"], told["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "True")
    assert (told["TORCHELASTIC_ERROR_FILE"], told["X"], told["HOME"]) == ("/ours", "1", "/a")
    assert "Y" not in told


class Pair:
    """A holder of a rank that is not the first of its node, and the stand-in that torchrun would start."""

    def __init__(self, folder: Path, *command: str) -> None:
        environment = {**os.environ, **RANK, "SLURMFT_PAGE": str(folder / "rank-5"), "SLURMFT_ATTEMPT": "1.0.0"}
        self.log = folder / "log"
        module = [sys.executable, "-m", "slurmft.agent.torchrun"]
        with self.log.open("wb") as log:
            self.holder = subprocess.Popen(
                [*module, "--shutdown-timeout", "5", *command], env=environment, stdout=log, stderr=log, cwd=folder
            )
        self.stand_in = subprocess.Popen(module, env={**environment, "TORCHELASTIC_RUN_ID": "x"})

    def codes(self) -> tuple[int, int]:
        return self.holder.wait(30), self.stand_in.wait(30)

    def says(self, text: str) -> None:
        until = time.monotonic() + 30
        while text not in self.log.read_text():
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[type[Pair]]:
    made: list[Pair] = []

    def make(*command: str) -> Pair:
        made.append(Pair(tmp_path, *command))
        return made[-1]

    yield make
    for each in made:
        each.holder.kill()
        each.stand_in.kill()
        each.codes()


@pytest.mark.parametrize(
    ("code", "holders"), [("pass", 0), ("raise SystemExit(16)", 16), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_holder_ends_as_the_rank_does(pair, code, holders):
    assert pair(sys.executable, "-c", code).codes() == (holders, holders)


def test_the_command_runs_where_the_holder_is_and_writes_into_its_log(pair, tmp_path):
    script = tmp_path / "it's here.py"
    script.write_text("import os, json; print(json.dumps([os.getcwd(), os.environ['TORCHELASTIC_RUN_ID']]))")
    both = pair("it's here.py")
    assert both.codes() == (0, 0)
    assert json.loads(both.log.read_text()) == [str(tmp_path), "x"]


def test_a_program_that_is_not_there_is_127(pair):
    both = pair("no such\nprogram")
    assert both.codes() == (127, 127)
    assert "cannot start 'no such" in both.log.read_text()


LOOP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("who", ["holder", "stand_in"])
def test_a_signal_to_either_reaches_the_trainer(pair, who):
    both = pair(sys.executable, "-c", LOOP)
    both.says("ready")
    getattr(both, who).send_signal(signal.SIGTERM)
    assert both.codes() == (75, 75)


@pytest.mark.parametrize(("who", "codes"), [("holder", (-9, -9)), ("stand_in", (-9, -9))])
def test_who_is_killed_takes_the_other_and_the_trainer_along(pair, who, codes):
    both = pair(sys.executable, "-c", f"import os; print(os.getpid(), flush=True)\n{LOOP}")
    both.says("ready")
    trainer = int(both.log.read_text().split()[0])
    getattr(both, who).kill()
    assert both.codes() == codes
    until = time.monotonic() + 10
    while Path(f"/proc/{trainer}").exists() and "Z" not in Path(f"/proc/{trainer}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until
        time.sleep(0.02)
