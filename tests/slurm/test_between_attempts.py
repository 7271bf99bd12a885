"""What happens while one attempt is over and the next has not begun; no Slurm is needed for it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurm.conftest import eventually
from slurm.test_local import SLURMFT, LocalRun
from slurmft.storage.journal import Event

pytestmark = pytest.mark.timeout(200)
FAILING = Path(__file__).parent / "trainers" / "fails.py"


class FailingRun:
    """A run whose rank 1 fails ``times`` times; from its second restart on it waits for seconds."""

    def __init__(self, path: Path, times: int, **settings: float) -> None:
        faults = {"num_in_job_restarts": 5, "retry_delay_s": 2.0, **settings}
        command = ["python", str(FAILING), "--rank", "1", "--times", str(times), "--step-delay", "0.3"]
        self.run = LocalRun(path, nproc_per_node=1, command=command, fault_tolerance=faults)
        self.process = subprocess.Popen([*SLURMFT, "run", str(self.run.config)], stderr=subprocess.DEVNULL)

    def wait_for(self, name: str, count: int) -> None:
        eventually(lambda: len(self.events(name)) >= count, 60, lambda: f"{count} x {name}\n{self.run.story()}")

    def events(self, name: str) -> list[Event]:
        return [event for event in self.run.folder.journal().read() if event.event == name]

    def agents(self) -> list[int]:
        """Process ids, in the order of the nodes."""
        found = [process for process in psutil.process_iter(["pid", "cmdline"]) if self._is_agent(process)]
        return sorted(process.pid for process in found)

    def _is_agent(self, process: psutil.Process) -> bool:
        words = process.info["cmdline"] or []
        return "agent" in words and str(self.run.folder.config) in words


@pytest.fixture
def failing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FailingRun]:
    one = FailingRun(tmp_path / "failing", request.param)
    yield one
    if one.process.poll() is None:
        one.process.terminate()
    one.process.wait(60)


@pytest.mark.parametrize("failing", [99], indirect=True)
def test_a_signal_before_a_restart_is_no_stop_of_workers_that_are_gone(failing: FailingRun) -> None:
    failing.wait_for("decision", 2)
    owner = failing.run.folder.owner()
    assert owner is not None
    os.kill(owner.pid, signal.SIGINT)
    assert failing.process.wait(30) == 75, failing.run.story()
    assert len(failing.events("workers started")) == 2, failing.run.story()
    assert not failing.events("stop overdue")
    assert "Ctrl-C" in failing.events("decision")[-1].details["reason"]


@pytest.mark.long
@pytest.mark.parametrize("failing", [2], indirect=True)
def test_an_agent_that_dies_while_it_starts_workers_is_a_lost_node(failing: FailingRun) -> None:
    failing.wait_for("decision", 2)
    second = failing.agents()[1]
    os.kill(second, signal.SIGSTOP)
    failing.wait_for("agents ready", 3)
    os.kill(second, signal.SIGKILL)
    assert failing.process.wait(90) == 0, failing.run.story()
    verdicts = [event.details["cause"] for event in failing.events("verdict")]
    assert verdicts == ["worker error", "worker error", "node lost", "finished"], failing.run.story()


@pytest.mark.long
@pytest.mark.parametrize("failing", [2], indirect=True)
def test_a_request_before_a_restart_is_heard_after_it(failing: FailingRun) -> None:
    failing.wait_for("decision", 2)
    failing.run.folder.request("REQUEUE", "somebody")
    assert failing.process.wait(90) == 0, failing.run.story()
    assert failing.events("verdict")[2].details["reason"].startswith("requeued by somebody"), failing.run.story()
    assert not failing.events("dropped a stale request")


@pytest.mark.long
def test_agents_outlive_a_wait_that_is_longer_than_the_lease(tmp_path: Path) -> None:
    failing = FailingRun(tmp_path / "failing", 2, retry_delay_s=8.0, supervisor_lease_s=2.0)
    try:
        failing.wait_for("decision", 2)
        agents = failing.agents()
        assert len(agents) == 2
        failing.wait_for("workers started", 3)
        began, waited = failing.events("workers started")[2], failing.events("decision")[1]
        assert (began.at - waited.at).total_seconds() > 6, "too short to show anything"
        assert failing.agents() == agents, failing.run.story()
    finally:
        failing.process.terminate()
        failing.process.wait(60)
