"""Handovers of an endpoint in settings of their own, and beside other changes; a hundred clients ask it meanwhile."""

import pytest

from slurm.conftest import PATIENCE_S, eventually
from slurm.endpoints import NODES, REPLICAS, EndpointRun, Load, NewEndpoint
from slurm.test_handover import supervisor_of
from slurm.test_rolling_update import with_engine
from slurmft.inference.endpoint import State, read_update
from slurmft.lab.cluster import Lab
from slurmft.scheduler.slurm import expand

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(500)]
PORT = 18_080


def engines(run: EndpointRun, node: str) -> list[str]:
    """Command lines of the engines on a node."""
    found = run.lab.run_on_as_admin(node, ["pgrep", "-af", f"[p]ython {run.path.parent}/engine.py"], check=False)
    return found.stdout.splitlines()


def test_a_fixed_port_moves_to_other_nodes(new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(serving={"port": PORT})
    job = run.submit()
    load, before = Load(run, 300), run.routers
    assert all(url.endswith(f":{PORT}") for url in before)
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    handed = run.wait_for("handed over", within_s=PATIENCE_S * 3)
    run.wait_until_out_of_queue(job)
    run.wait_for_routers(NODES)
    assert all(url.endswith(f":{PORT}") for url in run.routers) and set(run.routers).isdisjoint(before), run.story()
    (submitted,) = run.events("successor submitted")
    assert set(expand(run.events("attempt started")[0].details["nodes"])) <= set(submitted.details["excluded"])
    assert handed.details["job"] == run.folder.jobs()[-1]
    load.enough(right=600)
    run.end()


@pytest.mark.parametrize("first", ["update", "requeue"])
def test_an_update_and_a_handover_at_once_wait_for_each_other(new_endpoint: NewEndpoint, first: str) -> None:
    run = new_endpoint()
    job = run.submit()
    load = Load(run, 300)
    run.wait_for_step(300)
    path, told = with_engine(run, "--delay", "0.1"), run.path.parent / "told"
    update = f"slurmft serve --update {path} > {told} 2>&1 & sleep 0"
    requeue = f"slurmft requeue {run.path}"
    if first == "update":
        run.lab.run(["bash", "-c", update], check=False)
        run.wait_for("update begun")
        run.lab.run(["bash", "-c", requeue])
    else:
        run.lab.run(["bash", "-c", requeue])
        run.wait_for("handover begun")
        run.lab.run(["bash", "-c", update], check=False)
    run.wait_for("handed over", within_s=PATIENCE_S * 4)
    run.wait_for("update done", within_s=PATIENCE_S * 4)
    order = [e.event for e in run.folder.journal().read() if e.event in ("update done", "successor submitted")]
    assert (order[0] == "update done") == (first == "update"), run.story()
    run.wait_until_out_of_queue(job)
    eventually(lambda: f"all {NODES * REPLICAS} replicas" in told.read_text(), PATIENCE_S, run.story)
    update_now = read_update(run.folder)
    assert update_now is not None and update_now.state is State.DONE
    owner = [event for event in run.events("attempt started") if event.attempt.startswith(run.folder.jobs()[-1])]
    found = [line for node in expand(owner[0].details["nodes"]) for line in engines(run, node)]
    assert len(found) == NODES * REPLICAS and all(line.endswith("--delay 0.1") for line in found), found
    load.enough(right=600)
    run.end()


def test_the_successor_leaves_a_node_on_which_engines_die_again_and_again(new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(max_restarts=10)
    job = run.submit()
    load, victim = Load(run, 300), run.other_node
    run.wait_for_step(300)
    for count in range(3):
        ready = len(run.events("replica ready"))
        run.lab.run_on_as_admin(victim, ["pkill", "-KILL", "-o", "-f", f"[p]ython {run.path.parent}/engine.py"])
        run.wait_for("replica died", count + 1)
        run.wait_for("replica ready", ready + 1)
    evidence = run.wait_for("evidence")
    assert evidence.details["node"] == victim and "3 engines died" in str(evidence.details), evidence
    run.slurmft("requeue", str(run.path))
    run.wait_for("handed over", within_s=PATIENCE_S * 3)
    (submitted,) = run.events("successor submitted")
    assert submitted.details["excluded"] == [victim], run.story()
    run.wait_until_out_of_queue(job)
    load.enough(right=600)
    run.end()


@pytest.mark.parametrize("supervisor", ["lives", "is killed"])
def test_replicas_that_follow_the_load_stay_on_for_clients_that_keep_to_the_routers_of_the_job_before(
    lab: Lab, new_endpoint: NewEndpoint, supervisor: str
) -> None:
    """The new owner's own routers have nothing to do meanwhile."""
    run = new_endpoint(serving={"replicas": {"min": 0, "idle_s": 1}}, concurrency=4)
    job = run.slurmft("serve", str(run.config)).split(" as job ")[1].split()[0]
    run.wait_for_routers(NODES)
    load, before = Load(run, 120, kind="plain", clients=16), run.routers
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    successor = run.wait_for("handed over", within_s=PATIENCE_S * 3).details["job"]
    if supervisor == "is killed":
        host = run.events("candidate started")[0].details["host"]
        lab.run_on_as_admin(host, ["kill", "-9", supervisor_of(lab, host, successor)])
        run.wait_for("supervisor lost")
    run.wait_until_out_of_queue(job)
    told = load.enough()
    assert all(what.partition(" of ")[2] in before for what in told["errors"]), f"{told}\n{run.story()}"
    is_in_vain = any(what.startswith("TimeoutError") for what in told["errors"])
    assert not is_in_vain and told["right"] > 300, f"a client waited\n{told}\n{run.story()}"
    eventually(lambda: run.events("replicas wanted")[-1].details["wanted"] == 0, 60, run.story)
    left = [event for event in run.events("router ended") if event.attempt.partition(".")[0] == job]
    assert run.events("replicas wanted")[-1].seconds() > max(each.seconds() for each in left), run.story()
    run.end()
