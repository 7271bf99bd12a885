"""A cloud announces to take a node away, on real Slurm: the run is saved and elsewhere before it does."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
SERVICE = Path(__file__).parent / "trainers" / "metadata_service.py"
LEFT_S = 20.0


@pytest.fixture
def announce(lab: Lab) -> Iterator[Callable[[str], None]]:
    """A metadata service on every node; what it gives announces the end of one."""
    folder = lab.home / "notices"
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, str(SERVICE), "8099", str(folder), str(LEFT_S)]
    services = []
    for node in lab.nodes:
        command, environment = lab.command(argv, node=node, admin=True)
        services.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
    yield lambda node: (folder / node).touch()
    for service in services:
        service.terminate()
        service.wait()
    for path in folder.iterdir():
        path.unlink()


def submit_in_cloud(run: Run) -> str:
    endpoint = "AWS_EC2_METADATA_SERVICE_ENDPOINT=http://127.0.0.1:8099"
    output = run.lab.run(["env", endpoint, "slurmft", "submit", str(run.config)]).stdout
    return output.split(" as job ")[1].split()[0]


@pytest.mark.long
def test_a_spot_notice_is_answered_by_a_save_and_a_requeue_elsewhere_in_time(
    new_run: NewRun, undisturbed: str, announce: Callable[[str], None]
) -> None:
    run = new_run(notices={"poll_seconds": 0.5})
    submit_in_cloud(run)
    run.wait_for_step(28)
    announced = time.time()
    announce("n2")
    requeued = run.wait_for("requeued")
    assert requeued.seconds() < announced + LEFT_S
    run.wait_until_done()
    verdict, decision = run.events("verdict")[0].details, run.events("decision")[0].details
    assert verdict["cause"] == "node reclaimed", run.story()
    assert verdict["saved_step"] == verdict["last_step"]
    assert decision["avoid"] == ["n2"]
    hosts = [event.details["hosts"] for event in run.events("agents ready")]
    assert ["n2" in names for names in hosts] == [True, False]
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_node_that_is_taken_away(
    new_run: NewRun, undisturbed: str, announce: Callable[[str], None]
) -> None:
    run = new_run(spare_nodes=1, notices={"poll_seconds": 0.5})
    submit_in_cloud(run)
    run.wait_for_step(28)
    announce("n2")
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("verdict")] == ["resized", "finished"], run.story()
    hosts = [event.details["hosts"] for event in run.events("agents ready")]
    assert hosts == [["n1", "n2"], ["n1", "n3"]]
    assert not run.events("requeueing")
    assert run.digest() == undisturbed
