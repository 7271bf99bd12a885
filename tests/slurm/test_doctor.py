"""``slurmft doctor`` on real clusters: a good one, and badly configured ones."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


def told(run: Run) -> tuple[int, dict[str, Any]]:
    """The exit code, and what is not well by check."""
    result = run.lab.run(["slurmft", "doctor", str(run.config), "--json"], check=False)
    found = json.loads(result.stdout)
    assert result.returncode == found["exit_code"]
    bad = [each for each in found["findings"] if each["level"] in ("warning", "problem")]
    assert all(each["remedy"] or each["check"] == "grace budget" for each in bad)
    return found["exit_code"], {each["check"]: each["level"] for each in bad}


def test_a_good_cluster_and_two_bad_partitions(new_run: NewRun) -> None:
    assert told(new_run("doctor-good")) == (0, {})
    code, found = told(new_run("doctor-nograce", slurm={"partition": "nograce"}))
    assert (code, found["partition nograce"]) == (1, "warning")
    refused = new_run("doctor-refused", command=["python", "gone.py"], slurm={"mem": "900T"})
    code, found = told(refused)
    assert (code, found["options"], found["command"]) == (2, "problem", "problem")
    stuck = new_run("doctor-cancel", slurm={"partition": "cancel"}, preemption={"continue_by": "requeue"})
    assert told(stuck) == (2, {"partition cancel": "problem"})


def test_what_an_administrator_could_set_up_is_a_note(new_run: NewRun) -> None:
    """A lab without hooks: an ordinary user is told of each. Its shared folder is a local one of this machine."""
    run = new_run("doctor-site")
    result = run.lab.run(["slurmft", "doctor", str(run.config), "--json"], check=False)
    found = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    missing = ("HealthCheckProgram", "Epilog", "EpilogSlurmctld", "health.yaml")
    assert [found[check]["level"] for check in missing] == ["note"] * 4
    assert "which other nodes usually do not see" in found["run folder's place"]["text"]
    assert (found["installation"]["level"], result.returncode) == ("ok", 0)


@pytest.mark.soak
def test_a_badly_configured_cluster_and_a_silent_one(lab: Lab, new_run: NewRun) -> None:
    run = new_run()
    before = lab.slurm_conf.read_text()
    bad = before.replace("KillWait=5", "KillWait=1").replace("JobRequeue=1", "JobRequeue=0\nMinJobAge=5")
    bad = bad.replace("SlurmdTimeout=8", "SlurmdTimeout=3600") + "\nRequeueExitHold=16\n"
    lab.slurm_conf.write_text(bad)
    try:
        lab.run_as_admin(["scontrol", "reconfigure"])
        expected = {"KillWait": "warning", "SlurmdTimeout": "warning", "exit codes": "problem"}
        assert told(run) == (2, expected)
    finally:
        lab.slurm_conf.write_text(before)
        lab.run_as_admin(["scontrol", "reconfigure"])
    lab.stop_controller()
    try:
        assert told(run)[0] == 75
    finally:
        lab.start_controller()
