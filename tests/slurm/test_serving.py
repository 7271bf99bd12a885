"""An endpoint on a real cluster: nodes die and are cut off, the job is requeued, and another user tries his luck."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually
from slurmft.inference.serving.endpoint import HighAvailabilityCluster, folder_of
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewEndpoint = Callable[..., "EndpointRun"]
HERE = Path(__file__).parent
CLIENTS, NODES, REPLICAS = 100, 2, 2


class Load:
    """A hundred clients on the login node, in a thread of ours."""

    def __init__(self, run: EndpointRun, seconds: float) -> None:
        argv = ["python", str(run.path.parent / "load.py"), str(run.path), str(CLIENTS), str(seconds), "ours"]
        self._told: dict[str, Any] = {"errors": {"the clients": "have not ended"}}

        def work() -> None:
            result = run.lab.run(argv, check=False, timeout=seconds + 120)
            self._told = json.loads(result.stdout) if result.returncode == 0 else {"errors": result.stderr[-2000:]}

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def result(self) -> dict[str, Any]:
        self._thread.join(200)
        return self._told


class EndpointRun(Run):
    """An endpoint whose right answers are known."""

    def submit(self, *options: str) -> str:
        output = self.slurmft("serve", str(self.config), *options)
        job = output.split(" as job ")[1].split()[0]
        nodes = yaml.safe_load(self.config.read_text())["nodes"]
        self.wait_for("replica ready", nodes * REPLICAS)
        self.wait_for_routers(2)
        return job

    def wait_for_routers(self, count: int) -> None:
        eventually(lambda: len(self.routers) == count, PATIENCE_S, lambda: f"{count} routers\n{self.story()}")

    @property
    def routers(self) -> list[str]:
        """Addresses, one for each router."""
        return [each.urls[0] for each in HighAvailabilityCluster.read(self.path).routers]

    @property
    def other_node(self) -> str:
        """A node without the supervisor."""
        host = self.events("attempt started")[0].details["host"]
        return next(event.details["node"] for event in self.events("node answers") if event.details["node"] != host)


@pytest.fixture
def new_endpoint(lab: Lab, request: pytest.FixtureRequest) -> NewEndpoint:
    def make(**changes: Any) -> EndpointRun:
        name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
        name += "-again" * (getattr(request.node, "execution_count", 1) > 1)
        folder = lab.home / "endpoints" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(HERE / "serving_engine.py", folder / "engine.py")
        shutil.copy(HERE / "serving_load.py", folder / "load.py")
        run = EndpointRun(lab, folder / "run", folder / "serve.yaml")
        section = {
            "engine": {"command": ["python", str(folder / "engine.py"), "--socket", "{socket}", "--delay", "0.2"]},
            "replicas_per_node": REPLICAS, "concurrency": 64, "hang_timeout_s": 5, "serving": {}, **changes,
        }  # fmt: skip
        config = {
            "run_folder": str(run.path), "nodes": NODES, "inference": section, "slurm": {"partition": "low"},
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 6, "retry_delay_s": 0},
        }  # fmt: skip
        run.config.write_text(yaml.safe_dump(config))
        for path in (folder.parent, folder, *folder.iterdir()):
            os.chown(path, lab.uid, lab.gid)
        return run

    return make


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_node_costs_no_request_of_our_client(lab: Lab, new_endpoint: NewEndpoint, how: str) -> None:
    run = new_endpoint()
    job = run.submit()
    load, victim = Load(run, 15), run.other_node
    run.wait_for_step(300)
    (lab.kill_node if how == "killed" else lab.partition)(victim)
    try:
        run.wait_for("agent lost")
        run.wait_for_routers(1)
        told = load.result()
    finally:
        (lab.start_node if how == "killed" else lab.heal)(victim)
    assert told["errors"] == {} and told["right"] == told["asked"] > 600, f"{told}\n{run.story()}"
    assert len(run.events("attempt started")) == 1
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)


def test_a_requeued_endpoint_comes_back_and_our_client_waits_for_it(new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    job = run.submit()
    load, before = Load(run, 25), run.routers
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    told = load.result()
    assert told["errors"] == {} and told["right"] == told["asked"] > 600, f"{told}\n{run.story()}"
    assert len(run.events("endpoint opened")) == 2, run.story()
    run.wait_for_routers(NODES)
    assert set(run.routers).isdisjoint(before)
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    assert run.routers == []
    assert run.events("decision")[-1].details["action"] == "stop"


def test_another_user_gets_nothing(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    job, other = run.submit(), lab.second_user()
    for name in ("token", "key", "headers"):
        assert lab.run_as(other, ["cat", str(folder_of(run.path) / name)], check=False).returncode != 0
    asked = lab.run_as(other, ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{run.routers[0]}/v1/models"])
    assert asked.stdout == "401"
    # every port of the node but the router's: the gates let nobody in who does not hold the key
    node = run.other_node
    listening = lab.run_on_as_admin(node, ["ss", "-tlnH"]).stdout.splitlines()
    ports = {int(line.split()[3].rpartition(":")[2]) for line in listening}
    routers = {each.port for each in HighAvailabilityCluster.read(run.path).routers}
    tried = 0
    for port in ports - routers:
        if port > 20_000:
            found = lab.run_as(other, ["curl", "-s", "-m", "3", f"http://{node}:{port}/v1/models"], check=False)
            assert b"owned_by" not in found.stdout.encode(errors="replace") and found.returncode != 0
            tried += 1
    assert tried >= REPLICAS
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
