"""An endpoint of one node that borrows three more while its load needs them, and gives them back."""

import pytest

from slurm.conftest import PATIENCE_S, eventually
from slurm.endpoints import EndpointRun, Load, NewEndpoint, maker
from slurm.test_handover_corners import supervisor_of
from slurmft.lab.cluster import Lab

LENT = 3
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def new_small(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> NewEndpoint:
    """One node of its own, which holds eight requests at a time, and some that are lent, each a whole one."""
    new_endpoint = maker(lab, request)

    def make(*, lent: int = LENT) -> EndpointRun:
        return new_endpoint(nodes=1, elastic={"max_nodes": 1 + lent}, slurm={"cpus_per_task": 8}, replicas_per_node=1,
                            concurrency=8, serving={"routers": 1, "replicas": {"min": 0, "idle_s": 4}})  # fmt: skip

    return make


@pytest.fixture
def small(new_small: NewEndpoint) -> EndpointRun:
    return new_small()


def submit(run: EndpointRun) -> str:
    job = run.slurmft("serve", str(run.config)).split(" as job ")[1].split()[0]
    run.wait_for_routers(1)
    return job


def jobs(run: EndpointRun) -> list[str]:
    """Of the user, but for the run's own and others that a test has submitted."""
    told = run.lab.run(["squeue", "-h", "-o", "%i %j"]).stdout.splitlines()
    return [line.split()[0] for line in told if line.split()[1].startswith("lend-")]


def nothing_lent(run: EndpointRun) -> None:
    eventually(lambda: jobs(run) == [], PATIENCE_S, run.story)
    noted = [event.details["job"] for event in run.events("joining")]
    assert sorted(noted) == sorted(event.details["job"] for event in run.events("lender cancelled")), run.story()


@pytest.mark.long
def test_replicas_go_from_none_to_lent_nodes_and_back_and_no_request_fails(small: EndpointRun) -> None:
    run = small
    submit(run)
    assert run.events("replica ready") == []
    steady = Load(run, 300, kind="plain", clients=3)
    run.wait_for_step(20)
    assert len(run.events("replica ready")) == 1 and jobs(run) == []
    crowd = Load(run, 45, kind="plain", clients=40)
    run.wait_for("replica ready", 1 + LENT, within_s=PATIENCE_S)
    assert len({event.details["node"] for event in run.events("replica ready")}) == 1 + LENT, run.story()
    assert len(run.routers) == 1, "its address stays"
    eventually(lambda: "4 of 4 replicas" in run.slurmft("status", "--json", str(run.path)), PATIENCE_S, run.story)
    told = [crowd.result()]
    run.wait_for("lender cancelled", LENT, within_s=PATIENCE_S)
    run.wait_for("agent left", LENT)
    nothing_lent(run)
    before = run.events("replicas wanted")[-1].details["wanted"]
    told.append(steady.enough())
    print(told)
    assert all(each["errors"] == {} and each["right"] == each["asked"] > 100 for each in told), f"{told}\n{run.story()}"
    eventually(lambda: run.events("replicas wanted")[-1].details["wanted"] == 0, PATIENCE_S, run.story)
    assert before == 1 and [e for e in run.events("replica died") if e.details["in_flight"]] == [], run.story()
    run.end()


@pytest.mark.long
@pytest.mark.parametrize("then", ["it goes on", "it is stopped"])
def test_a_job_that_waits_to_lend_a_node_does_not_outlive_its_use_when_the_supervisor_is_killed(
    lab: Lab, small: EndpointRun, then: str
) -> None:
    run, job = small, submit(small)
    host = run.events("attempt started")[0].details["host"]
    others = ["sbatch", "--parsable", "--partition=low", f"--nodes={LENT}", "--exclusive", f"--exclude={host}",
              "--output=/dev/null", "--wrap=sleep 300"]  # fmt: skip
    blocker = lab.run(others).stdout.strip()
    try:
        steady = Load(run, 300, kind="plain", clients=3)
        run.wait_for_step(20)
        crowd = Load(run, 20, kind="plain", clients=30)
        run.wait_for("joining", LENT)
        names = [event.event for event in run.folder.journal().read()]
        assert names.index("borrowing") < names.index("joining"), run.story()
        assert len(jobs(run)) == LENT
        lab.run_on_as_admin(host, ["kill", "-9", supervisor_of(lab, host, job)])
        if then == "it is stopped":
            run.slurmft("stop", str(run.path))
            told = [crowd.result(), steady.enough()]
        else:
            run.wait_for("supervisor lost")
            told = [crowd.result()]
            run.wait_for("lender cancelled", LENT, within_s=PATIENCE_S)
            told.append(steady.enough())
            print(told)
            assert all(each["errors"] == {} and each["right"] > 100 for each in told), f"{told}\n{run.story()}"
            nothing_lent(run)
            run.slurmft("stop", str(run.path))
        run.wait_until_out_of_queue(job)
        nothing_lent(run)
    finally:
        lab.run(["scancel", blocker])


@pytest.mark.soak
def test_a_successor_job_goes_on_with_what_is_lent(new_small: NewEndpoint) -> None:
    run = new_small(lent=2)
    job = submit(run)
    load = Load(run, 300, clients=30)
    run.wait_for("replica ready", 3)
    lent = jobs(run)
    run.slurmft("requeue", str(run.path))
    successor = run.wait_for("handed over", within_s=PATIENCE_S).details["job"]
    run.wait_until_out_of_queue(job)

    def ready() -> int:
        return sum(event.attempt.startswith(f"{successor}.") for event in run.events("replica ready"))

    eventually(lambda: ready() >= 3, PATIENCE_S, run.story)
    assert jobs(run) == lent and len(run.events("joining")) == 2, run.story()
    load.enough(right=300)
    run.end()
    nothing_lent(run)
