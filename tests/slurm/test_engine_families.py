"""Engines of several processes on the lab: all of them end, whatever ends first, and none hears a step's signal."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from slurm.endpoints import NODES, REPLICAS, EndpointRun, Load, NewEndpoint, maker
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(500)]
ENGINES = NODES * REPLICAS


@pytest.fixture
def run(lab: Lab, request: pytest.FixtureRequest) -> Iterator[EndpointRun]:
    new: NewEndpoint = maker(lab, request)
    found = new(serving={"handover": False}, max_restarts=9)
    config = yaml.safe_load(found.config.read_text())
    command = config["inference"]["engine"]["command"]
    command[1] = command[1].replace("engine.py", "family_engine.py")
    found.config.write_text(yaml.safe_dump(config))
    yield found
    for one in left(found):  # later tests of this lab count the user's processes
        found.lab.run_on_as_admin(one.node, ["kill", "-9", one.pid], check=False)


@dataclass(frozen=True)
class Child:
    """A process of an engine."""

    node: str
    engine: str
    pid: str
    made_by: str


def family(run: EndpointRun) -> list[Child]:
    """All that ever were."""
    return [Child(*line.split()) for line in (run.path.parent / "family.txt").read_text().splitlines()]


def living(run: EndpointRun, node: str) -> set[str]:
    script = "for p in /proc/[0-9]*; do grep -q '^State:.[ZX]' $p/status 2>/dev/null || basename $p; done"
    return set(run.lab.run_on_as_admin(node, ["bash", "-c", script]).stdout.split())


def left(run: EndpointRun) -> list[Child]:
    """Children that live, while their engine does not."""
    now = {node: living(run, node) for node in {one.node for one in family(run)}}
    return [one for one in family(run) if one.pid in now[one.node] and one.engine not in now[one.node]]


@pytest.mark.parametrize(
    "victim", ["engine", pytest.param("driver", marks=pytest.mark.soak), "zygote", "agent and zygote"]
)
def test_no_process_of_an_engine_outlives_it(run: EndpointRun, victim: str) -> None:
    run.submit()
    node = run.other_node
    assert len(family(run)) == 2 * ENGINES and not left(run)
    patterns = {"engine": "[f]amily_engine.py", "zygote": "[s]lurmft.agent.zygote",
                "agent and zygote": "[s]lurmft agent |[s]lurmft.agent.zygote"}  # fmt: skip
    if victim == "driver":
        run.kill(node, *run.pids(node))
    else:
        run.lab.run_on_as_admin(node, ["bash", "-c", f"kill -9 $(pgrep -f '{patterns[victim]}')"])
    run.wait_for("replica ready", ENGINES + REPLICAS)
    # what has neither parent, session nor environment of ours is out of reach once all of ours are killed at once
    kinds = {"fork"} if victim == "agent and zygote" else {"fork", "exec"}
    assert not [one for one in left(run) if one.made_by in kinds], f"{left(run)}\n{run.story()}"
    now = living(run, node)
    assert sum(one.node == node and one.engine in now and one.pid in now for one in family(run)) == 2 * REPLICAS
    run.end()
    assert not [one for one in family(run) if one.pid in living(run, one.node) and one.made_by in kinds], run.story()


@pytest.mark.long
def test_a_signal_to_the_whole_step_ends_no_engine(lab: Lab, request: pytest.FixtureRequest) -> None:
    """As the notice of a time limit or a preemption where all processes of a step get it, as with this lab's proctrack.

    All engines of the old job serve until those of the successor do.
    """
    run = maker(lab, request)()
    job = run.submit()
    load = Load(run, 90, kind="patient", clients=20)
    run.wait_for_step(100)
    lab.run(["scancel", "--signal=TERM", job])
    run.wait_for("handed over")
    run.wait_until_out_of_queue(job)
    told = load.enough(right=100)
    assert told["longest_s"] < 5.0, f"{told}\n{run.story()}"
    logs = "".join(path.read_text() for path in run.folder.attempts.glob(f"{job}.0.0/rank-*.log"))
    assert "the engine has ended" not in logs and not run.events("replica died"), run.story()
    run.end()
