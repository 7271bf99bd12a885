"""An endpoint on a real cluster: nodes die and are cut off, the job is requeued, and another user tries his luck."""

import pytest

from slurm.conftest import eventually
from slurm.endpoints import NODES, REPLICAS, Load, NewEndpoint
from slurmft.inference.endpoint import HighAvailabilityCluster, folder_of
from slurmft.lab.cluster import Lab

PLAIN = 20
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("how", ["killed", pytest.param("cut off", marks=pytest.mark.soak)])
def test_a_lost_node_costs_no_request_of_a_patient_client(lab: Lab, new_endpoint: NewEndpoint, how: str) -> None:
    run = new_endpoint()
    run.submit()
    load, victim = Load(run, 15), run.other_node
    run.wait_for_step(300)
    (lab.kill_node if how == "killed" else lab.partition)(victim)
    try:
        run.wait_for("agent lost")
        run.wait_for_routers(1)
        load.result(right=600)
    finally:
        (lab.start_node if how == "killed" else lab.heal)(victim)
    assert len(run.events("attempt started")) == 1
    run.end()


@pytest.mark.long
def test_a_requeued_endpoint_comes_back_and_a_patient_client_waits_for_it(new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(serving={"handover": False})
    run.submit()
    load, before = Load(run, 25), run.routers
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    load.result(right=600)
    assert len(run.events("endpoint opened")) == 2, run.story()
    run.wait_for_routers(NODES)
    assert set(run.routers).isdisjoint(before)
    run.end()
    assert run.routers == []
    assert run.events("decision")[-1].details["action"] == "stop"


def test_another_user_gets_nothing(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    run.submit()
    other = lab.second_user()
    for name in ("token", "key", "headers"):
        assert lab.run_as(other, ["cat", str(folder_of(run.path) / name)], check=False).returncode != 0
    asked = lab.run_as(
        other, ["curl", "-s", "-k", "-o", "/dev/null", "-w", "%{http_code}", f"{run.routers[0]}/v1/models"]
    )
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
    run.end()


@pytest.mark.long
def test_replicas_of_a_lost_node_begin_on_an_idle_one(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    run.submit()
    victim = run.other_node
    lab.kill_node(victim)
    try:
        run.wait_for("agent lost")
        missing = run.wait_for("replicas missing")
        assert missing.details["nodes"] == [victim] and missing.details["expected"] == NODES * REPLICAS
        eventually(lambda: f"lost: {victim}" in run.slurmft("status", str(run.path)), 20, run.story)
        lender = run.wait_for("joining").details["job"]
        run.wait_for("replica ready", NODES * REPLICAS + REPLICAS)
        run.wait_for_routers(NODES)
        nodes = {event.details["node"] for event in run.events("node answers")}
        assert len(nodes) == NODES + 1 and len(run.events("joining")) == 1, run.story()
        eventually(lambda: "lost:" not in run.slurmft("status", str(run.path)), 20, run.story)
        run.end()
        run.wait_until_out_of_queue(lender)
    finally:
        lab.start_node(victim)


@pytest.mark.long
def test_one_address_of_plain_clients_survives_the_power_off_of_a_router_s_node(
    lab: Lab, new_endpoint: NewEndpoint
) -> None:
    run = new_endpoint()
    run.submit()
    victim = run.other_node
    told = run.path.parent / "forward"
    forward = f"slurmft endpoint {run.path} --forward 0 > {told} 2>&1 & echo $!"
    pid = lab.run(["bash", "-c", forward]).stdout.strip()
    try:
        eventually(lambda: told.exists() and told.read_text().startswith("https://127.0.0.1:"), 20, run.story)
        loads = {kind: Load(run, 40, kind=kind, clients=PLAIN) for kind in ("forwarded", "openai", "plain")}
        run.wait_for_step(300)
        lab.kill_node(victim)
        run.wait_for("agent lost")
        run.wait_for_routers(1)
        counts = {kind: load.result() for kind, load in loads.items()}
    finally:
        lab.run(["kill", pid], check=False)
        lab.start_node(victim)
    print(counts)
    # what was under way at the dead router breaks after 4 s; the client of OpenAI asks again by itself
    assert counts["openai"]["errors"] == {} and counts["openai"]["longest_s"] < 15.0, f"{counts}\n{run.story()}"
    assert sum(counts["forwarded"]["errors"].values()) <= PLAIN, f"{counts}\n{run.story()}"
    assert counts["forwarded"]["longest_s"] < 12.0 and counts["forwarded"]["right"] > 300, f"{counts}\n{run.story()}"
    assert any("TimeoutError" in what for what in counts["plain"]["errors"]), "it waits for a time-out of its own"
    run.end()
