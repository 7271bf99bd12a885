"""Hugging Face's Trainer with ``engine="slurmft"``: checkpoints of slurmft, and the weights of an undisturbed run."""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from extras import needs

from slurm.conftest import eventually
from slurm.test_local import LocalRun
from slurmft.checkpoint.catalog import Catalog
from slurmft.integrations.folders import step_folders

pytestmark = [needs("transformers"), pytest.mark.timeout(600), pytest.mark.soak]

TRAINER = [sys.executable, str(Path(__file__).parent / "trainers" / "hf_trainer.py")]
STEPS = 40
"""Of 4 epochs with 10 steps each."""


def training(path: Path, *options: str, delay: float = 0.1, **changes: object) -> LocalRun:
    command = [*TRAINER, f"--output={path}/out", f"--delay={delay}", "--epochs=4", *options]
    return LocalRun(path, command=command, nodes=1, environment={"OMP_NUM_THREADS": "1"}, **changes)


def output(run: LocalRun) -> str:
    paths = sorted(run.folder.attempts.glob("*/rank-0.log"), key=lambda path: path.stat().st_mtime)
    return "".join(path.read_text() for path in paths)


def starts(run: LocalRun) -> list[int]:
    """The step with which each start went on, where it was not the first."""
    return [int(step) for step in re.findall(r"loaded step (\d+) of", output(run))]


def pid_of(run: LocalRun, rank: int) -> int:
    """The living process that writes a rank's log; it has the environment of the zygote that it was forked from."""
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:
            continue
        if log.name == f"rank-{rank}.log" and log.is_relative_to(run.folder.attempts):
            return process.pid
    raise AssertionError(f"rank {rank} does not run\n{run.story()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same training with the Trainer's own files."""
    run = training(tmp_path_factory.mktemp("hf") / "undisturbed", delay=0.0)
    run.submit("--wait")
    return run.digest()


def test_a_killed_rank_and_a_stop_cost_no_bit(tmp_path: Path, undisturbed: str) -> None:
    run = training(tmp_path / "engine", "--engine=slurmft", "--save_steps=6")
    run.reach(9)
    os.kill(pid_of(run, 1), signal.SIGKILL)
    eventually(lambda: len(starts(run)) == 1, 100, run.story)
    run.wait_for_step(14)
    run.slurmft("stop", str(run.folder.path), "--timeout", "60")
    (agreed,) = [event.details["step"] for event in run.folder.journal().read() if event.event == "stop agreed"]
    run.submit("--wait")

    assert run.digest() == undisturbed
    resumed, stopped = starts(run)
    assert resumed in (6, 12, 18) and stopped == agreed, run.story() + output(run)  # the kill may come some steps later
    assert step_folders(run.folder.path / "out") == {}, "the Trainer writes no folder of its own"
    assert "missing keys" not in output(run)
    steps = [entry.step for entry in Catalog(run.folder.path / "checkpoints").committed()]
    assert steps == [STEPS, 36, 30], "keep_last_n"
    assert sorted(path.name for path in (run.folder.path / "out").glob("slurmft-*")) == [
        "slurmft-30", "slurmft-36", f"slurmft-{STEPS}",
    ]  # fmt: skip
