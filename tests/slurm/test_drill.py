"""``slurmft drill`` on real Slurm: it passes where preemption works, and says what does not where it does not."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurm.conftest import Run
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]


def drilled(run: Run, *options: str) -> tuple[int, dict[str, bool | None], dict[str, str]]:
    """Exit code, what passed and what was said; its jobs and its folder must be gone."""
    before = sorted(run.path.parent.iterdir())
    result = run.lab.run(["slurmft", "drill", str(run.config), "--json", *options], check=False, timeout=300)
    assert result.stdout, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    assert sorted(run.path.parent.iterdir()) == before, "it has left something behind"
    jobs = run.lab.run(["squeue", "-h", "-n", "slurmft-drill", "-t", "PD,R", "-o", "%i"]).stdout
    assert jobs == ""
    return (result.returncode, {row["what"]: row["passed"] for row in rows}, {row["what"]: row["text"] for row in rows})


@pytest.mark.soak
def test_it_passes_where_preemption_works(new_run: NewRun) -> None:
    code, passed, text = drilled(new_run(slurm={"partition": "low"}))
    assert code == 0, text
    assert [name for name, each in passed.items() if each is None] == ["your workload"], text
    assert text["who got it"] == "the agents, and 4 of 4 ranks"
    assert "the one that was saved" in text["resumed"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("partition", "failed", "said"),
    [
        ("low", [], ""),
        ("nograce", ["grace"], "GraceTime=0 for partition nograce"),
        ("cancel", ["requeue"], "PreemptMode=CANCEL for partition cancel"),
    ],
    ids=["low", "nograce", "cancel"],
)
def test_a_real_preemption_shows_what_fails(
    lab: Lab, new_run: NewRun, partition: str, failed: list[str], said: str
) -> None:
    code, passed, text = drilled(new_run(slurm={"partition": partition}), "--preempt-with", "high")
    assert [name for name, each in passed.items() if each is False] == failed, text
    assert code == (1 if failed else 0)
    assert all(said in text[name] for name in failed)
    assert "preemption by a job in partition high" in text["signal"]


def test_a_dry_run_submits_nothing(new_run: NewRun) -> None:
    run = new_run()
    output = run.slurmft("drill", str(run.config), "--dry-run", "--preempt-with", "high")
    assert "scancel JOB" in output
    assert "--partition=high --nodelist=NODES --exclusive" in output
    assert list(run.path.parent.glob(".slurmft-drill-*")) == []
