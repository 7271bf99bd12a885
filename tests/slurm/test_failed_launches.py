"""Nodes whose Prolog fails: Slurm holds the job, and `requeue --rescue` lets it begin elsewhere, so many times."""

from collections.abc import Callable, Iterator

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

NewRun = Callable[..., Run]


@pytest.fixture
def failing_prolog(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Called with a shell's pattern, the Prolog fails on nodes of these names; on none at the end."""
    before, prolog = lab.slurm_conf.read_text(), lab.folder / "prolog.sh"

    def fails_on(pattern: str) -> None:
        prolog.write_text(f'#!/bin/sh\ncase "$SLURMD_NODENAME" in {pattern}) exit 1 ;; esac\n')
        prolog.chmod(0o755)
        lab.slurm_conf.write_text(f"{before}Prolog={prolog}\n")
        lab.run_as_admin(["scontrol", "reconfigure"])
        eventually(lambda: str(prolog) in lab.run(["scontrol", "show", "config"]).stdout, 20, "the Prolog")

    yield fails_on
    lab.slurm_conf.write_text(before)
    lab.run_as_admin(["scontrol", "reconfigure"])
    for node in lab.nodes:
        lab.run_as_admin(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)


def is_held(lab: Lab, job: str) -> bool:
    return "held" in lab.run(["squeue", "-h", "-j", job, "-o", "%r"], check=False).stdout.lower()


def test_a_prolog_that_fails_on_one_node(lab: Lab, new_run: NewRun, failing_prolog: Callable[[str], None]) -> None:
    failing_prolog("n1")
    run = new_run(steps=5, delay=0.0, nodes=1)
    job = run.submit()
    eventually(lambda: is_held(lab, job), 30, run.story)
    waiting = new_run("held-by-a-person", slurm={"begin": "now+1hour"})
    kept = waiting.submit()
    lab.run(["scontrol", "hold", kept])

    assert "slurmft requeue --rescue releases it" in run.slurmft("status", str(run.path), "--json")
    assert "until it is released by hand" in " ".join(run.slurmft("doctor", str(run.config), check=False).split())
    said = run.slurmft("requeue", "--rescue", str(run.path))
    assert f"job {job} was held by Slurm (launch failed requeued held); it is released, now without n1" in said
    assert "nothing had to be rescued" in run.slurmft("requeue", "--rescue", str(waiting.path))
    run.wait_until_done()
    assert is_held(lab, kept), "a person's hold"
    assert [event.details["nodes"] for event in run.events("released")] == [["n1"]]
    assert [event.details["node"] for event in run.events("evidence")] == ["n1"]
    assert "n1" not in run.events("agents ready")[0].details["hosts"]
    assert run.folder.jobs() == [job]


@pytest.mark.long
def test_a_node_that_cannot_be_reached_when_the_agents_start(lab: Lab, new_run: NewRun) -> None:
    """srun ends the agent that it could start, too: that one's node is a victim."""
    run = new_run(steps=5, delay=0.0)
    go, log = lab.home / "start-now", run.path.with_suffix(".log")
    go.unlink(missing_ok=True)
    wrap = f"until [ -e {go} ]; do sleep 0.1; done; exec slurmft run {run.config}"
    options = ["--parsable", "-p", "low", "-N", "2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    job = lab.run(["sbatch", *options, "-o", str(log), "--wrap", wrap], cwd=lab.home).stdout.strip()
    eventually(lambda: lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip() == "RUNNING", 30, "it runs")
    second = lab.run(["scontrol", "show", "hostnames", lab.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()])
    node = second.stdout.split()[1]
    lab.kill_node(node)
    try:
        go.touch(mode=0o644)
        verdict = run.wait_for("verdict").details
        if verdict["cause"] != "requeued by Slurm":  # Slurm may notice the dead node before srun does
            assert (verdict["cause"], verdict["node"]) == ("launch failure", node), run.story()
            assert "could not start the agent" in verdict["reason"]
            assert run.wait_for("decision").details["avoid"] == [node]
        run.wait_until_done()
        assert node not in run.events("agents ready")[-1].details["hosts"]
    finally:
        lab.start_node(node)
        go.unlink()


def test_a_prolog_that_fails_everywhere(lab: Lab, new_run: NewRun, failing_prolog: Callable[[str], None]) -> None:
    """The fourth hold stays, with the reasons told."""
    failing_prolog("n*")
    run = new_run(nodes=1)
    job = run.submit()
    for _ in range(3):
        eventually(lambda: is_held(lab, job), 40, run.story)
        assert "it is released, now without n" in run.slurmft("requeue", "--rescue", str(run.path)), run.story()
    eventually(lambda: is_held(lab, job), 40, run.story)
    refused = lab.run(["slurmft", "requeue", "--rescue", str(run.path)], check=False)
    assert refused.returncode != 0
    assert f"job {job} of run {run.path.name} was refused by nodes 4 times in a row" in refused.stderr
    assert is_held(lab, job)
    assert sorted(node for event in run.events("evidence") for node in [event.details["node"]]) == ["n1", "n2", "n3"]
