"""A spare's rehearsal, with real trainers: it ends before anything is saved, and goes away when the node is needed."""

import asyncio
import json
import os
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from waiting import until_async

from slurmft.agent.workers import SpareRehearsal
from slurmft.config.run import RunConfig
from slurmft.errors import ConfigError
from slurmft.ipc.messages import RehearsalReport

WAIT_S = 60.0

TRAINER = """
    import json, os, sys, time
    from pathlib import Path
    from slurmft.worker.session import start_session
    out = Path(sys.argv[1])
    with start_session() as session:
        (out / f"began-{session.rank}").write_text(json.dumps([
            session.is_rehearsal, session.world_size, os.getpid(), str(session.checkpoint_dir),
            os.environ.get("SLURMFT_RUN_FOLDER"),
        ]))
        def save(step):
            (out / "saved").touch()
        for step in session.steps(start=0, until=int(sys.argv[2]), save=save):
            (out / f"step-{session.rank}-{step}").touch()
            time.sleep(float(sys.argv[3]))
    (out / "behind").touch()
"""


def rehearsal(tmp_path: Path, *, until: int = 100, pause_s: float = 0.0, script: str = TRAINER, ranks: int = 1):
    """The rehearsal, and the list of its reports."""
    (tmp_path / "out").mkdir()
    trainer = tmp_path / "trainer.py"
    trainer.write_text(textwrap.dedent(script))
    config = RunConfig(
        command=["python", str(trainer), str(tmp_path / "out"), str(until), str(pause_s)],
        run_folder=tmp_path / "run", nproc_per_node=ranks, spare_nodes=1, spares="rehearse",
    )  # fmt: skip
    reports: list[RehearsalReport] = []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return SpareRehearsal(config, environment, tmp_path, reports.append), reports


async def reported(reports: list[RehearsalReport]) -> RehearsalReport:
    await until_async(lambda: reports, WAIT_S)
    return reports[0]


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("until", "steps"),
    [pytest.param(100, 2, id="two steps"), pytest.param(2, 1, id="never the last one"), pytest.param(1, 0, id="none")],
)
async def test_it_ends_before_anything_is_saved(tmp_path, until, steps):
    spare, reports = rehearsal(tmp_path, until=until, ranks=2)
    spare.begin()
    spare.begin()
    report = await reported(reports)
    assert report.problem == ""
    assert report.took_s > 0
    expected = {f"step-{rank}-{step}" for rank in range(2) for step in range(steps)}
    assert left(tmp_path) == {"began-0", "began-1"} | expected
    is_rehearsal, ranks, _, folder, run = json.loads((tmp_path / "out" / "began-1").read_text())
    assert (is_rehearsal, ranks, run) == (True, 2, None)
    assert not Path(folder).parent.exists(), "nothing of it is left"
    assert len(reports) == 1


async def test_when_the_node_is_needed_nothing_of_it_is_left(tmp_path):
    spare, reports = rehearsal(tmp_path, pause_s=600.0)
    spare.begin()
    while not (tmp_path / "out" / "step-0-0").exists():
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await spare.stop()
    assert time.monotonic() - began < 2.0
    pid = json.loads((tmp_path / "out" / "began-0").read_text())[2]
    assert not psutil.pid_exists(pid)
    assert not (tmp_path / "rehearsal").exists()
    assert reports == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        pytest.param("raise SystemExit(3)", "exit code 3: ", id="without a word"),
        pytest.param("raise RuntimeError('no such data')", "exit code 1: RuntimeError: no such data", id="an error"),
        pytest.param("import os; os.kill(os.getpid(), 9)", "exit code -9: ", id="killed"),
    ],
)
async def test_what_went_wrong_is_reported_once(tmp_path, script, problem):
    spare, reports = rehearsal(tmp_path, script=script)
    spare.begin()
    found = await reported(reports)
    spare.begin()
    await asyncio.sleep(0)
    assert found.problem == problem
    assert len(reports) == 1


async def test_a_program_that_is_not_there(tmp_path):
    spare, reports = rehearsal(tmp_path)
    spare._config = spare._config.model_copy(update={"working_directory": tmp_path / "none"})
    spare.begin()
    assert "could not be started" in (await reported(reports)).problem


@pytest.mark.parametrize("other", [{"launcher": "torchrun"}, {"launcher": "ray"}])
def test_only_where_the_agent_starts_the_trainer(tmp_path, other):
    with pytest.raises((ConfigError, ValueError), match="spares: rehearse needs"):
        RunConfig(command=["x"], run_folder=tmp_path / "r", spare_nodes=1, spares="rehearse", **other)
