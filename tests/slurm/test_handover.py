"""An endpoint is handed over from job to job, while a hundred clients ask it."""

from typing import Any

import pytest

from slurm.conftest import eventually, preempt
from slurm.endpoints import NODES, EndpointRun, Load, NewEndpoint
from slurmft.inference.endpoint import read_handover
from slurmft.lab.cluster import Lab

PLAIN = 20
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("continue_by", ["auto", pytest.param("resubmit", marks=pytest.mark.soak)])
def test_a_requeue_hands_over_without_a_failed_request(new_endpoint: NewEndpoint, continue_by: str) -> None:
    run = new_endpoint(preemption={"continue_by": continue_by})
    job = run.submit()
    load, before = Load(run, 180), run.routers
    plain, rereading = (Load(run, 180, kind=kind, clients=PLAIN) for kind in ("plain", "rereading"))
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    handed = run.wait_for("handed over")
    run.wait_until_out_of_queue(job)
    told = load.enough(right=600)
    assert told["longest_s"] < 10.0, f"a client waited\n{told}\n{run.story()}"
    check_plain(plain.result(), rereading.result(), before, run)
    successor = handed.details["job"]
    assert run.folder.jobs() == [job, successor]
    owner = run.folder.owner()
    assert owner is not None and (owner.job, owner.generation) == (successor, 2), run.story()
    assert len(run.routers) == NODES and set(run.routers).isdisjoint(before)
    assert not run.events("superseded") and not run.events("requeued"), run.story()
    assert not run.events("decision"), "the old job decides nothing"
    run.end()
    eventually(lambda: run.routers == [], 20, run.story)
    assert run.job_states()[job] == "COMPLETED", run.story()


def check_plain(plain: dict[str, Any], rereading: dict[str, Any], before: list[str], run: EndpointRun) -> None:
    """Clients without a second try: what broke is connections to a router of the old job alone."""
    story = f"plain {plain}\nrereading {rereading}\n{run.story()}"
    print(f"plain {plain}\nrereading {rereading}")
    for told in (plain, rereading):
        assert told["right"] + sum(told["errors"].values()) == told["asked"] and told["right"] > 0, story
        assert all(what.partition(" of ")[2] in before for what in told["errors"]), story
        assert told["longest_s"] < 10.0, story
    # those that keep to the old address are refused once its router has left
    cut = {what: count for what, count in plain["errors"].items() if not what.startswith("ClientConnectorError")}
    assert sum(plain["errors"].values()) > sum(cut.values()) <= PLAIN, story
    assert sum(rereading["errors"].values()) <= PLAIN, story


def supervisor_of(lab: Lab, node: str, job: str) -> str:
    """Process id of a job's supervisor: below the guardian, which is the batch script's own process."""
    script = f"""
        for p in $(pgrep -f "[s]lurmft run "); do
            tr '\\0' '\\n' < /proc/$p/environ | grep -qx SLURM_JOB_ID={job} || continue
            pgrep -f "[s]lurmft run " -P $p
        done"""
    found = lab.run_on_as_admin(node, ["bash", "-c", script], check=False).stdout.split()
    assert len(found) == 1, f"{found} on {node}"
    return found[0]


def wait_for_owner(run: EndpointRun, job: str) -> None:
    eventually(lambda: (owner := run.folder.owner()) is not None and owner.job == job, 90, run.story)


def test_a_stop_during_a_handover_stops_both(new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    run.submit()
    run.slurmft("requeue", str(run.path))
    run.wait_for("candidate started")
    run.end()
    assert len(run.events("attempt started")) == 1, run.story()
    assert run.events("candidate left") and read_handover(run.path) is None and run.routers == [], run.story()
    assert run.folder.see_request("KILL") is None


@pytest.mark.parametrize("victim", ["owner", "candidate"])
@pytest.mark.soak
def test_a_killed_supervisor_in_the_middle_costs_no_request(lab: Lab, new_endpoint: NewEndpoint, victim: str) -> None:
    run = new_endpoint()
    job = run.submit()
    load = Load(run, 40)
    run.wait_for_step(300)
    run.slurmft("requeue", str(run.path))
    candidate = run.wait_for("candidate started")
    successor = candidate.attempt.partition(".")[0]
    start, killed = (run.events("attempt started")[0], job) if victim == "owner" else (candidate, successor)
    host = start.details["host"]
    lab.run_on_as_admin(host, ["kill", "-9", supervisor_of(lab, host, killed)])
    wait_for_owner(run, successor)
    run.wait_until_out_of_queue(job)
    load.result(right=600)
    assert run.folder.jobs() == [job, successor]
    run.end()


@pytest.mark.soak
def test_a_candidate_that_is_cancelled_leaves_the_owner_in_charge_which_tries_again(
    lab: Lab, new_endpoint: NewEndpoint
) -> None:
    run = new_endpoint()
    job = run.submit()
    load = Load(run, 60)
    run.slurmft("requeue", str(run.path))
    first = run.wait_for("candidate started").attempt.partition(".")[0]
    lab.run(["scancel", first])
    run.wait_for("successor lost")
    handed = run.wait_for("handed over", within_s=120)
    load.result(right=600)
    assert run.folder.jobs() == [job, first, handed.details["job"]]
    run.end()


@pytest.mark.soak
def test_a_successor_without_room_is_reported_and_stopped_with_the_run(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(slurm={"exclusive": True})
    run.submit()
    filler = lab.run(["sbatch", "--parsable", "-p", "low", "-N", "2", "--exclusive", "-t", "5", "-o", "/dev/null",
                      "--wrap", "sleep 300"], cwd=lab.home).stdout.strip()  # fmt: skip
    eventually(lambda: "RUNNING" in lab.run(["squeue", "-h", "-j", filler, "-o", "%T"]).stdout, 60, run.story)
    run.slurmft("requeue", str(run.path))
    waits = run.wait_for("successor waits")
    assert waits.details["reason"] and waits.details["ends"], run.story()
    assert f"job {waits.details['job']} waits" in run.slurmft("status", str(run.path))
    assert "successor waits" in run.slurmft("explain", str(run.path))
    run.end()
    lab.run(["scancel", filler])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_three_jobs_in_a_row_behind_one_endpoint(new_endpoint: NewEndpoint) -> None:
    """The shortest limits that leave room: Slurm counts minutes, and its signal may come 30 s early."""
    run = new_endpoint(slurm={"time": "4"}, preemption={"signal_lead_s": 20}, serving={"handover_lead_s": 110})
    run.submit()
    load = Load(run, 330)
    run.wait_for("handed over", 2, within_s=400)
    told = load.result(right=6000)
    leaving = [run.events("router ended")[2 * n + 1].at - run.events("handed over")[n].at for n in range(2)]
    assert all(each.total_seconds() < 20 for each in leaving), f"{leaving}\n{run.story()}"
    assert told["longest_s"] < 10.0, f"a client waited\n{told}\n{run.story()}"
    jobs = run.folder.jobs()
    states = run.job_states()
    assert len(jobs) >= 3 and [states[job] for job in jobs[:2]] == ["COMPLETED"] * 2, f"{states}\n{run.story()}"
    run.end()
    print(told)


@pytest.mark.soak
def test_a_preemption_without_room_leaves_the_run_to_the_successor(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    job = run.submit()
    load = Load(run, 40)
    run.wait_for_step(300)
    preempt(lab, seconds=5)
    run.wait_for("successor submitted")
    run.wait_until_out_of_queue(job)
    load.result(right=600)
    jobs = run.folder.jobs()
    owner = run.folder.owner()
    assert len(jobs) == 2 and owner is not None and (owner.job, owner.restart) == (jobs[1], 0), run.story()
    assert not run.events("candidate started"), run.story()
    run.end()


@pytest.mark.soak
def test_a_dead_owner_node_in_the_middle_makes_the_candidate_the_owner(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(slurm={"exclusive": True})
    job = run.submit()
    load = Load(run, 60)
    run.wait_for_step(300)
    victim = run.events("attempt started")[0].details["host"]
    run.slurmft("requeue", str(run.path))
    successor = run.wait_for("candidate started").attempt.partition(".")[0]
    lab.kill_node(victim)
    try:
        wait_for_owner(run, successor)
        load.result(right=600)
    finally:
        lab.start_node(victim)
    # without its batch host the old job would keep its other node
    run.wait_until_out_of_queue(job)
    owner = run.folder.owner()
    assert owner is not None and owner.job == successor, run.story()
    run.end()


def test_a_requeue_by_scontrol_is_handed_over_as_well(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint()
    job = run.submit()
    load = Load(run, 120, clients=PLAIN)
    run.wait_for_step(100)
    lab.run(["scontrol", "requeue", job])
    successor = run.wait_for("successor submitted").details["job"]
    wait_for_owner(run, successor)
    run.wait_for_routers(NODES)
    told = load.enough()
    print(told)
    assert told["errors"] == {} and told["right"] == told["asked"], f"{told}\n{run.story()}"
    assert told["longest_s"] < 25.0, f"{told}\n{run.story()}"
    run.end()
