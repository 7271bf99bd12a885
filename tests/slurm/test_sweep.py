"""``slurmft sweep`` on real Slurm: a sick node goes out, stays out, and comes back; Slurm's silence changes nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from slurm.conftest import eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

SLURMFT = [sys.executable, "-P", "-m", "slurmft"]
KEPT = "own"


@dataclass
class Site:
    """A site whose only probe says that a node is sick while a file of its name is there."""

    lab: Lab
    folder: Path

    @property
    def health(self) -> Path:
        return self.folder / "health.yaml"

    def look(self, *nodes: str) -> None:
        """As HealthCheckProgram would: beside the jobs, as root."""
        argv = [*SLURMFT, "health", "--context", "cron", "--config", str(self.health)]
        for node in nodes:
            self.lab.run_on_as_admin(node, argv, check=False, timeout=60)

    def sick(self, *nodes: str) -> None:
        for node in nodes:
            (self.folder / node).touch()

    def well(self, *nodes: str) -> None:
        for node in nodes:
            (self.folder / node).unlink()

    def sweep(self, *options: str, admin: bool = True) -> subprocess.CompletedProcess[str]:
        files = ["--health", str(self.health), "--file", str(self.folder / f"list-{admin}.json")]
        argv = ["env", f"SLURMFT_RUNS={self.folder}/runs", *SLURMFT, "sweep", *files, *options]
        return (self.lab.run_as_admin if admin else self.lab.run)(argv, check=False, timeout=60)

    def excluded(self) -> str:
        argv = [*SLURMFT, "exclude", "list", "--file", str(self.folder / "list-True.json"), "--nodes"]
        return self.lab.run_as_admin(argv).stdout.strip()

    def reason(self, node: str) -> str:
        return self.lab.run(["sinfo", "-h", "-N", "-n", node, "-p", "low", "-o", "%T %E"]).stdout.strip()


@pytest.fixture
def site(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Site]:
    folder = lab.home / request.node.name
    folder.mkdir()
    os.chown(folder, lab.uid, lab.gid)
    probe = folder / "probe.sh"
    probe.write_text(f"#!/bin/bash\n[[ ! -e {folder}/$HOSTNAME ]] && echo fine || {{ echo broken; exit 2; }}\n")
    probe.chmod(0o755)
    settings = {
        "results_folder": str(folder / "results"), "evidence_folder": str(folder / "evidence"),
        "user_probes": {KEPT: {"command": [str(probe)], "timeout_s": 20}}, "filesystems": {"detect": False},
        "verdict": {"min_spacing_s": 0},
    }  # fmt: skip
    found = Site(lab, folder)
    found.health.write_text(yaml.safe_dump(settings))
    yield found
    for node in lab.nodes:
        if "drain" in found.reason(node):
            lab.run_as_admin(["scontrol", "update", f"NodeName={node}", "State=RESUME"])


@pytest.mark.soak
def test_a_sick_node_is_drained_avoided_and_returns_after_probation(site: Site) -> None:
    lab, nodes = site.lab, site.lab.nodes
    site.sick("n2")
    site.look(*nodes)
    assert "n2" not in site.excluded()
    assert site.sweep("--drain").returncode == 1, "one look is not enough"
    site.look("n2")

    told = site.sweep("--drain", admin=False)
    assert "scontrol update NodeName=n2 State=DRAIN" in told.stdout, told.stderr
    assert site.reason("n2").startswith("idle"), "the user may not"

    result = site.sweep("--drain")
    assert result.returncode == 2, result.stdout + result.stderr
    assert site.reason("n2") == "drained slurmft: [node_problem] own: broken"
    assert site.excluded() == "n2"
    job = lab.run(["sbatch", "--parsable", "-N", "3", "-p", "low", "-o", "/dev/null", "--wrap", "sleep 60"],
                  cwd=lab.home).stdout.strip()  # fmt: skip

    def where() -> str:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()

    assert eventually(where, 30, "the job runs") == "n[1,3-4]"
    lab.run(["scancel", job])

    site.well("n2")
    site.look("n2")
    site.sweep("--drain")
    assert site.reason("n2").startswith("drained"), "one clean look is not enough"
    site.look("n2")
    assert "n2 resumed" in site.sweep("--drain").stdout
    assert not site.reason("n2").startswith("drain")
    assert site.excluded() == "", "on probation"
    assert "n2 credited" not in site.sweep("--drain").stdout, "without a new look nothing changes"


@pytest.mark.soak
def test_a_silent_slurm_a_problem_of_all_nodes_and_a_person_change_no_node(site: Site) -> None:
    lab, nodes = site.lab, site.lab.nodes
    site.sick(*nodes)
    for _ in range(2):
        site.look(*nodes)
    result = site.sweep("--drain")
    assert result.returncode == 2
    assert result.stdout.count("cluster problem: own fails on 4 of 4 nodes") == 1, result.stdout
    assert site.excluded() == ""
    site.well("n1", "n3", "n4")
    site.look(*nodes)
    lab.stop_controller()
    try:
        result = site.sweep("--drain")
        assert result.returncode == 75, result.stdout
        assert site.excluded() == ""
    finally:
        lab.start_controller()
    eventually(lambda: site.reason("n2").startswith("idle"), 30, "Slurm is back")
    lab.run_as_admin(["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=cable"])
    site.sweep("--drain")
    assert site.reason("n2") == "drained cable"
    assert site.excluded() == ""


@pytest.mark.soak
def test_an_idle_node_is_looked_at_by_a_job(site: Site) -> None:
    (site.folder / "results").mkdir()
    os.chown(site.folder / "results", site.lab.uid, site.lab.gid)
    result = site.sweep("--test", "2", admin=False)
    assert "n1 and n2 are looked at by job" in result.stdout, result.stdout + result.stderr
    eventually(lambda: len(list((site.folder / "results").glob("n*.json"))) == 2, 120, "two results")
