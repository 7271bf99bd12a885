"""Nodes die with what they had in memory: their peers' copies are read, and the disk where those are lost too."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

NewRun = Callable[..., Run]
KEPT_COPIES = "copied to node"
SHARDED = Path(__file__).parent / "trainers" / "sharded.py"


def copies_made(run: Run) -> int:
    """How many copies the writers' logs tell of."""
    logs = run.folder.attempts.glob("*/writer-*.log")
    return sum(path.read_text(errors="replace").count(KEPT_COPIES) for path in logs)


def end_without(lab: Lab, run: Run, hosts: Sequence[str]) -> int:
    """Have these nodes lose their power, and the run come to its end without them; the step that it had done then."""
    for host in hosts:
        lab.kill_node(host)
    step: int = (run.folder.progress() or {})["step"]
    try:
        run.wait_for("first step", 2)
        run.wait_until_done(120)
    finally:
        for host in hosts:
            lab.start_node(host)
    return step


@pytest.mark.long
def test_a_peer_has_what_a_dead_node_had(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    run = new_run(
        spare_nodes=1,
        checkpoint={"interval_steps": 10, "peer_copies": 1},
        fault_tolerance={"num_in_job_restarts": 3},
    )
    run.submit()
    eventually(lambda: copies_made(run) >= 4, 90, run.story)
    hosts = run.events("agents ready")[0].details["hosts"]
    run.wait_for_step(15)  # between two snapshots
    before = end_without(lab, run, hosts[1:])
    assert run.events("first step")[1].details["resumed_from"] >= before - 1, run.story()
    (kept,) = run.events("state kept just in time")
    assert kept.at <= run.events("killing workers")[0].at
    assert run.digest() == undisturbed


@pytest.mark.long
def test_a_node_whose_packets_are_dropped_costs_no_step(lab: Lab, new_run: NewRun, undisturbed: str) -> None:
    """No connection is closed or reset, and the node itself trains on until it misses the others."""
    run = new_run(
        spare_nodes=1,
        checkpoint={"interval_steps": 25, "peer_copies": 1},
        fault_tolerance={"num_in_job_restarts": 3, "agent_timeout_s": 3},
    )
    run.submit()
    host = run.wait_for("agents ready").details["hosts"][1]
    run.wait_for_saved(1)
    run.wait_for_step(12)
    lab.partition(host)
    try:
        resumed = run.wait_for("first step", 2, within_s=60)
        run.wait_until_done(120)
    finally:
        lab.heal(host)
    (kept,) = run.events("state kept just in time")
    lost = run.events("verdict")[0].details
    assert (lost["cause"], lost["node"]) == ("node lost", host), run.story()
    assert resumed.details["resumed_from"] == kept.details["step"] >= lost["last_step"] >= 12, run.story()
    assert kept.at <= run.events("killing workers")[0].at
    assert run.digest() == undisturbed


@pytest.mark.soak
def test_where_the_peer_is_lost_too_the_disk_is_read(lab: Lab, new_run: NewRun) -> None:
    """Of three nodes in a ring, the second's copies lie with the third."""
    run = new_run(
        steps=40,
        nodes=3,
        nproc_per_node=1,
        elastic={"min_nodes": 1},
        checkpoint={"interval_steps": 10, "peer_copies": 1},
        fault_tolerance={"num_in_job_restarts": 3},
    )
    run.submit()
    eventually(lambda: copies_made(run) >= 3, 90, run.story)
    run.wait_for_step(25)
    run.wait_for_saved(20)
    hosts = run.events("agents ready")[0].details["hosts"]
    end_without(lab, run, hosts[1:])
    assert run.events("first step")[-1].details["resumed_from"] >= 20
    # the first node has its own shard, and the third one's copy; the second one's copy went with the third
    told = "1 of 3 shards from memory, 1 of 3 shards from memory of a peer, 1 of 3 shards from disk"
    assert told in run.output(), run.output()


@pytest.mark.long
def test_a_lost_node_costs_a_sharded_run_a_step_where_every_step_is_copied(lab: Lab, new_run: NewRun) -> None:
    """Saves go to disk after the first step and at the end alone."""
    whole = new_run("sharded-undisturbed", command=["python", str(SHARDED), "--steps", "30", "--step-delay", "0"])
    whole.submit()
    run = new_run(
        command=["python", str(SHARDED), "--steps", "30", "--step-delay", "0.3"],
        spare_nodes=1,
        checkpoint={"interval_steps": 1000, "peer_copies": 1, "peer_interval": 1},
        fault_tolerance={"num_in_job_restarts": 3},
    )
    whole.wait_until_done(120)
    run.submit()
    eventually(lambda: ((run.folder.progress() or {}).get("copied") or 0) >= 12, 90, run.story)
    hosts = run.events("agents ready")[0].details["hosts"]
    before = end_without(lab, run, hosts[1:])
    assert "2 of 4 shards from memory, 2 of 4 shards from memory of a peer" in run.output(), run.output()
    assert run.events("first step")[1].details["resumed_from"] >= before - 2, run.story()
    assert run.digest() == whole.digest()
