"""``launcher: torchrun``: torch's elastic agent in between, and the same endings."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from slurm.conftest import eventually
from slurm.test_local import LocalRun

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By the agent itself: who starts the workers makes no difference to the weights."""
    run = LocalRun(tmp_path_factory.mktemp("torchrun") / "undisturbed", nodes=1)
    run.submit("--wait")
    return run.digest()


def trainers(run: LocalRun) -> list[int]:
    """Process ids of the trainers that torchrun has started."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment, words = process.info["environ"] or {}, process.info["cmdline"] or []
        if environment.get("SLURMFT_RUN_FOLDER") == str(run.folder.path) and "--trainer" in words:
            found.append(process.pid)
    return found


@pytest.mark.long
def test_a_rank_that_dies_and_the_end(tmp_path: Path, undisturbed: str) -> None:
    run = LocalRun(tmp_path / "through torchrun", launcher="torchrun", nodes=1)
    run.submit()
    eventually(lambda: len(trainers(run)) == 2, 100, run.story)  # two imports of torch, one after the other
    run.wait_for_step(8)
    os.kill(max(trainers(run)), signal.SIGKILL)
    run.wait_until_done()
    verdict = run.events("verdict")[0]
    assert verdict.details["cause"] == "signal crash", run.story()
    # of the trainer itself, and not of the process that stands for it; nobody's where it has ended before it was asked
    told = "".join(path.read_text() for path in run.folder.attempts.glob("*.0.0/stacks-rank-*.txt"))
    assert " in hold\n" not in told, told
    assert run.digest() == undisturbed
