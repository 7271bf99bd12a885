"""Exit 16: the run goes on, on different nodes, whatever happens in between; or it ends and says why it cannot."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.conftest import STEPS, Run, eventually, submit_with
from slurm.conftest import TRAINER as BYTE_GPT
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]
TRAINER = Path(__file__).parent / "trainers" / "blames.py"


@pytest.fixture
def blaming(new_run: NewRun, request: pytest.FixtureRequest) -> Callable[..., Run]:
    """A run on two nodes of which some compute wrongly."""

    def make(*bad: str, **changes: object) -> Run:
        run = new_run(re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-"))
        config = {"command": ["python", str(TRAINER), "--bad", *bad], "nproc_per_node": 1,
                  "exclusions": {"path": str(run.path.with_suffix(".exclusions"))},
                  "fault_tolerance": {"preload": False}}  # fmt: skip
        run.configure(**{**config, **changes})
        return run

    return make


@pytest.fixture
def nodes(lab: Lab) -> Iterator[Callable[[str, str], None]]:
    """Drain nodes, or resume them; all are resumed at the end."""

    def change(names: str, state: str) -> None:
        lab.run_as_admin(["scontrol", "update", f"NodeName={names}", f"State={state}", "Reason=test"])

    yield change
    lab.run_as_admin(["scontrol", "update", "NodeName=n[1-4]", "State=RESUME"], check=False)
    lab.wait_until_idle(60)


def nodes_of(run: Run) -> list[str]:
    """Hostlist of each attempt."""
    return [event.details["nodes"] for event in run.events("attempt started")]


def test_exit_16_goes_on_on_different_nodes(blaming: Callable[..., Run]) -> None:
    run = blaming("n1")
    job = run.submit()
    run.wait_until_done()
    story = run.story()
    assert nodes_of(run)[0] == "n[1-2]", story
    assert "n1" not in nodes_of(run)[1], story
    assert len(nodes_of(run)) == 2, story
    verdict = run.events("verdict")[0].details
    assert (verdict["cause"], verdict["rerun"]) == ("rerun elsewhere", "undecided"), story
    decision = run.events("decision")[0].details
    assert (decision["action"], decision["avoid"], decision["elsewhere"]) == ("continue", ["n1"], True), story
    assert run.folder.jobs() == [job]
    begins, requeued = run.events("attempt started")[1].at, run.events("requeued")[0].at
    assert (begins - requeued).total_seconds() < 20, story


def test_where_all_others_are_drained_the_result_is_inconclusive(
    blaming: Callable[..., Run], nodes: Callable[[str, str], None]
) -> None:
    run = blaming("n1", "n2")
    nodes("n[3-4]", "DRAIN")
    job = run.submit()
    run.wait_until_out_of_queue(job)
    story = run.story()
    assert len(run.events("attempt started")) == 1, story
    assert run.events("decision")[-1].details["exit_code"] == 17, story
    assert "inconclusive" in run.events("decision")[-1].details["reason"], story
    assert not run.events("requeued"), story


@pytest.mark.parametrize(
    "gpus",
    [pytest.param(2, id="with another GPU"), pytest.param(1, id="without another GPU", marks=pytest.mark.soak)],
)
def test_where_there_is_no_other_node_another_gpu_of_it_will_do(
    blaming: Callable[..., Run], nodes: Callable[[str, str], None], moody: Path, gpus: int
) -> None:
    smi = moody / "nvidia-smi"
    smi.write_text("#!/bin/bash\n" + "".join(f"echo '{index}, GPU-{'ab'[index]}'\n" for index in range(gpus)))
    smi.chmod(0o755)
    run = blaming("n1", command=["python", str(TRAINER), "--bad", "n1", "--bad-gpu", "GPU-a"])
    nodes("n[3-4]", "DRAIN")
    job = submit_with(run, moody)
    run.wait_until_out_of_queue(job, within_s=90)
    story = run.story()
    assert run.events("avoiding_gpus")[0].details["gpus"] == ["GPU-a"], story
    assert nodes_of(run) == ["n[1-2]", "n[1-2]"], story
    if gpus == 2:
        assert run.folder.done() is not None, story
        assert "rank 0 on n1, GPU-b" in run.output(), story
    else:
        assert run.events("exclusion_escaped")[0].details["gpus"] == ["GPU-a"], story
        assert {event.details["node"] for event in run.events("evidence")} == {"n1"}, story
        assert run.events("decision")[-1].details["exit_code"] == 17, story
        assert "inconclusive" in run.events("decision")[-1].details["reason"], story


@pytest.mark.parametrize(
    "waits",
    [pytest.param(True, id="waits for them"), pytest.param(False, id="is inconclusive", marks=pytest.mark.soak)],
)
def test_where_all_others_are_busy_it(lab: Lab, blaming: Callable[..., Run], waits: bool) -> None:
    options = ["--parsable", "-N", "2", "-w", "n[3-4]", "--exclusive", "-t", "5", "-o", "/dev/null"]
    other = lab.run(["sbatch", *options, "--wrap", "sleep 300"], cwd=lab.home).stdout.strip()

    def state(job: str) -> list[str]:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T %r"]).stdout.split()

    eventually(lambda: state(other)[:1] == ["RUNNING"], 30, "others that are busy")
    run = blaming("n1", rerun={"wait_for_others": waits})
    job = run.submit()
    if not waits:
        run.wait_until_out_of_queue(job)
        decision = run.events("decision")[-1].details
        assert decision["exit_code"] == 17, run.story()
        assert "only 1 of 2 nodes are free now" in decision["reason"], run.story()
        return
    run.wait_for("requeued")
    eventually(
        lambda: state(job) in (["PENDING", "Resources"], ["PENDING", "Priority"]), 60, lambda: f"waits\n{run.story()}"
    )
    lab.run(["scancel", other])
    run.wait_until_done()
    assert len(nodes_of(run)) == 2, run.story()
    assert "n1" not in nodes_of(run)[1], run.story()


def test_a_spare_in_the_allocation_needs_no_requeue(blaming: Callable[..., Run]) -> None:
    run = blaming("n2", spare_nodes=1)
    job = run.submit()
    run.wait_until_done()
    story = run.story()
    assert [event.attempt for event in run.events("attempt started")] == [f"{job}.0.0", f"{job}.0.1"], story
    assert not run.events("requeued"), story
    assert run.events("keeping off")[0].details["chosen"] == ["n1", "n3"], story
    seconds = (run.events("workers started")[1].at - run.events("verdict")[0].at).total_seconds()
    assert seconds < 15, story


def test_a_supervisor_killed_between_requeue_and_update(lab: Lab, blaming: Callable[..., Run], moody: Path) -> None:
    run = blaming("n1")
    (moody / "mode").write_text("die\n")
    job = submit_with(run, moody)
    run.wait_for("requeueing")

    def is_pending() -> bool:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout.split() == ["PENDING"]

    eventually(is_pending, 60, lambda: f"pending\n{run.story()}")
    assert not run.events("requeued"), run.story()
    (moody / "mode").write_text("none\n")
    assert "finished the requeue" in run.slurmft("requeue", "--rescue", str(run.path))
    run.wait_until_done()
    assert "n1" not in nodes_of(run)[1], run.story()
    assert run.folder.jobs() == [job]


def test_a_guardian_finishes_what_its_supervisor_began(blaming: Callable[..., Run], moody: Path) -> None:
    run = blaming("n1")
    (moody / "mode").write_text("orphan\n")
    job = submit_with(run, moody)
    run.wait_until_done()
    story = run.story()
    assert run.events("supervisor lost"), story
    assert run.events("placed")[0].details["excluded"] == "n1", story
    assert len(nodes_of(run)) == 2, story
    assert "n1" not in nodes_of(run)[1], story
    assert run.folder.jobs() == [job], story


def test_a_supervisor_killed_after_its_decision_leaves_an_ended_job(
    lab: Lab, blaming: Callable[..., Run], moody: Path
) -> None:
    """Requeueing fails, so that the job ends while it should go on: cron finds it in Slurm's memory."""
    run = blaming("n1", preemption={"continue_by": "requeue"})
    (moody / "mode").write_text("refuse\n")
    job = submit_with(run, moody)
    run.wait_until_out_of_queue(job)
    assert run.events("requeue failed"), run.story()
    (moody / "mode").write_text("none\n")
    began = time.monotonic()
    run.slurmft("requeue", "--rescue", str(run.path))
    run.wait_until_done()
    assert time.monotonic() - began < 30, run.story()
    assert nodes_of(run)[1] == "n[2-3]", run.story()
    assert run.folder.jobs() == [job]


@pytest.mark.soak
def test_an_exclusion_that_escapes_is_repeated(lab: Lab, blaming: Callable[..., Run]) -> None:
    """Somebody takes the exclusion away while the job waits."""
    run = blaming("n1", preemption={"requeue_delay_s": 6})
    job = run.submit()
    run.wait_for("requeued")

    def cleared() -> bool:
        done = lab.run_as_admin(["scontrol", "update", f"JobId={job}", "ExcNodeList=", "Requeue=1"], check=False)
        return done.returncode == 0

    eventually(cleared, 20, "cleared")
    run.wait_until_done()
    story = run.story()
    assert run.events("exclusion_escaped")[0].details["suspects"] == ["n1"], story
    assert len(run.events("exclusion_escaped")) == 1, story
    assert "n1" not in nodes_of(run)[-1], story


@pytest.mark.soak
def test_a_refused_update_keeps_what_was_excluded_and_ends_in_a_bounded_number_of_escapes(
    blaming: Callable[..., Run], moody: Path
) -> None:
    wrapper = (moody / "scontrol").read_text()
    refusal = '*:scontrol:update) [[ "$*" == *ExcNodeList* ]] && { echo "Invalid node name specified" >&2; exit 1; } ;;'
    (moody / "scontrol").write_text(
        wrapper.replace("refuse:scontrol:requeue", f"{refusal}\nrefuse:scontrol:requeue", 1)
    )
    run = blaming("n1", preemption={"requeue_delay_s": 1})
    job = submit_with(run, moody)
    eventually(lambda: len(run.events("exclusion_escaped")) == 4, 120, lambda: f"4 escapes\n{run.story()}")
    run.wait_until_out_of_queue(job)
    story = run.story()
    assert run.events("requeued")[0].details["excluded_refused"].endswith("Invalid node name specified"), story
    last = run.events("decision")[-1].details
    assert (last["action"], last["exit_code"]) == ("stop", 17), story
    assert "inconclusive" in last["reason"], story


@pytest.fixture
def patient_lab() -> Iterator[Lab]:
    """A cluster that notices a dead node only after ten minutes."""
    folder = Path(f"/var/lib/slurmft-lab-patient-{os.getpid()}")
    try:
        yield Lab.up(LabSettings(folder=folder, nodes=3, kill_wait_s=5, slurmd_timeout_s=600))
    finally:
        cluster.purge(folder)


@pytest.mark.soak
def test_a_dead_node_that_slurm_has_not_noticed_holds_nothing_up(patient_lab: Lab, undisturbed: str) -> None:
    lab = patient_lab
    run = Run(lab, lab.home / "run")
    config = {"command": [*BYTE_GPT, "--steps", str(STEPS), "--step-delay", "0.1"], "run_folder": str(run.path),
              "nodes": 2, "nproc_per_node": 2, "checkpoint": {"interval_steps": 25}, "slurm": {"time": "10"},
              "fault_tolerance": {"supervisor_lease_s": 4}}  # fmt: skip
    run.config.write_text(json.dumps(config))
    job = run.reach(30)
    began = time.monotonic()
    lab.kill_node("n2")
    run.wait_for("attempt started", 2, within_s=60)
    seconds = time.monotonic() - began
    run.wait_until_done()
    story = run.story()
    assert run.events("shrunk")[0].details["lost"] == ["n2"], story
    assert seconds < 40, story
    assert nodes_of(run) == ["n[1-2]", "n[1,3]"], story
    assert run.folder.jobs() == [job]
    assert run.digest() == undisturbed
