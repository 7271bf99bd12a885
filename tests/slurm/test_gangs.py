"""One engine over two nodes of a real cluster: the power of one of them is off, and another node takes its place."""

import pytest

from slurm.conftest import PATIENCE_S, eventually
from slurm.endpoints import EndpointRun, Load, NewEndpoint
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
COMMAND = ["python", "{folder}/gang_engine.py", "--rank", "{node_rank}", "--nodes", "{nodes}", "--head", "{head}",
           "--head-port", "{head_port}", "--port", "{port}"]  # fmt: skip
CLIENTS = 20


def begin(new_endpoint: NewEndpoint, spare_nodes: int) -> EndpointRun:
    run = new_endpoint(spare_nodes=spare_nodes, replicas_per_node=1, engine={"command": ["e", "{port}"]})
    command = [word.replace("{folder}", str(run.path.parent)) for word in COMMAND]
    run.configure(inference={"engine": {"command": command, "nodes": 2}})
    run.slurmft("serve", str(run.config))
    run.wait_for("replica ready")
    run.wait_for_routers(2)
    return run


@pytest.mark.long
def test_a_node_in_reserve_takes_the_place_of_one_whose_power_is_off(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = begin(new_endpoint, 1)
    load = Load(run, 200, clients=CLIENTS)
    run.wait_for_step(100)
    formed, host = run.events("gang formed")[0].details["nodes"], run.events("attempt started")[0].details["host"]
    victim = next(node for node in formed if node != host)
    lab.kill_node(victim)
    try:
        again = run.wait_for("gang formed", 2)
        run.wait_for("replica ready", 2)
        run.wait_for_step(((run.folder.progress() or {}).get("step") or 0) + 100)
        told = load.enough(right=200)
    finally:
        lab.start_node(victim)
    assert victim not in again.details["nodes"] and len(run.events("attempt started")) == 1, run.story()
    broken, ready = run.events("gang broken")[0], run.events("replica ready")[1]
    print(told, f"ready {(ready.at - broken.at).total_seconds():.1f} s after the loss was seen")
    run.end()


@pytest.mark.soak
def test_without_a_node_in_reserve_the_job_is_requeued(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = begin(new_endpoint, 0)
    host = run.events("attempt started")[0].details["host"]
    victim = next(node for node in run.events("gang formed")[0].details["nodes"] if node != host)
    lab.kill_node(victim)
    try:
        verdict = run.wait_for("verdict")
        assert verdict.details["cause"] == "node lost" and victim in str(verdict.details["suspects"]), run.story()
        run.wait_for("replica ready", 2, within_s=2 * PATIENCE_S)
        eventually(lambda: run.routers, PATIENCE_S, run.story)
    finally:
        lab.start_node(victim)
    run.end()
