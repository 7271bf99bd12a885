"""Slurm's hooks on a real cluster: jobs run although the prolog is broken, the epilog cleans up, a requeued job begins
at once, HealthCheckProgram leaves its results."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import slurmft
from slurm.conftest import eventually
from slurmft.health.checker import read_results
from slurmft.lab.cluster import Lab

pytestmark = pytest.mark.slurm
BIN = Path(slurmft.__file__).parents[1] / "bin"


@pytest.fixture
def hooked(lab: Lab) -> Iterator[Callable[..., None]]:
    """Adds lines to slurm.conf, and takes them away again."""
    before = lab.slurm_conf.read_text()

    def reconfigure(**lines: str | int | Path) -> None:
        lab.slurm_conf.write_text(before + "".join(f"{key}={value}\n" for key, value in lines.items()))
        lab.run_as_admin(["scontrol", "reconfigure"])

        def is_read() -> bool:
            shown = lab.run_as_admin(["scontrol", "show", "config"]).stdout
            return all(str(value) in shown for value in lines.values() if isinstance(value, Path))

        eventually(is_read, 20, "the new configuration")

    yield reconfigure
    lab.slurm_conf.write_text(before)
    lab.run_as_admin(["scontrol", "reconfigure"])
    lab.run_as_admin(["scancel", "--user", lab.user], check=False)
    lab.wait_until_idle(60)


@pytest.fixture
def script(lab: Lab) -> Callable[..., Path]:
    """One of our scripts with an environment, which slurm.conf cannot give it."""

    def make(name: str, **environment: str | Path) -> Path:
        path = lab.folder / f"hook-{name}"
        words = " ".join(f"{key}='{value}'" for key, value in environment.items())
        path.write_text(f"#!/bin/sh\n{words} exec {BIN}/slurmft-{name}\n")
        path.chmod(0o755)
        return path

    return make


def states(lab: Lab) -> set[str]:
    return set(lab.node_states().values())


@pytest.mark.long
def test_a_broken_prolog_harms_no_job_and_the_epilog_leaves_nothing(lab, hooked, script):
    broken = lab.folder / "broken"
    shutil.copytree(BIN, broken / "bin", dirs_exist_ok=True)  # no .venv beside it
    hooked(Prolog=broken / "bin" / "slurmft-prolog", Epilog=script("epilog"))
    # one process outside of Slurm's tree, and what a killed data loader leaves
    left = "setsid -f sleep 300 < /dev/null > /dev/null 2>&1; touch /dev/shm/torch_1_left_2 /dev/shm/dataset; sleep 0.5"
    done = lab.run(["srun", "-w", "n1", "-t", "1", "bash", "-c", left], timeout=60)
    assert done.returncode == 0

    def processes() -> str:
        return lab.run_on_as_admin("n1", ["pgrep", "-u", lab.user, "sleep"], check=False).stdout

    eventually(lambda: not processes(), 20, lambda: f"no process: {processes()}")

    def memory() -> list[str]:
        return lab.run_on_as_admin("n1", ["ls", "/dev/shm"]).stdout.split()

    eventually(lambda: "torch_1_left_2" not in memory(), 20, lambda: f"no left-over memory: {memory()}")
    assert "dataset" in memory()
    lab.run_on_as_admin("n1", ["rm", "-f", "/dev/shm/dataset"])
    lab.wait_until_idle(30)
    assert states(lab) == {"IDLE"}


@pytest.mark.soak
def test_every_broken_hook_drains_no_node(lab, hooked, script):
    config = lab.folder / "broken.yaml"
    config.write_text("gpu: {expectd: 8}")
    hooked(
        Prolog=script("prolog", SLURMFT_HEALTH_CONFIG=config),
        Epilog=script("epilog", SLURMFT_PYTHON="/no/such/python"),
        HealthCheckProgram=script("healthcheck", SLURMFT_PYTHON="/bin/false"), HealthCheckInterval=2,
    )  # fmt: skip
    for _ in range(3):
        assert lab.run(["srun", "-N", "4", "-t", "1", "true"], timeout=60).returncode == 0
    lab.wait_until_idle(30)
    assert states(lab) == {"IDLE"}


@pytest.mark.soak
def test_a_prolog_that_may_refuse_drains_a_sick_node_with_its_reason(lab, hooked, script):
    config = lab.folder / "sick.yaml"
    evidence = f"evidence_folder: {lab.folder}/evidence\nhooks: {{prolog_refuses: true}}\n"
    config.write_text(evidence + "user_probes: {bad: {command: [/bin/sh, -c, 'test $(uname -n) != n1 || exit 2']}}\n")
    hooked(Prolog=script("prolog", SLURMFT_HEALTH_CONFIG=config))
    lab.run(["sbatch", "-w", "n1", "-t", "1", "--wrap", "true"], cwd=lab.home)
    eventually(lambda: "DRAIN" in lab.node_states()["n1"], 30, lambda: str(lab.node_states()))
    assert lab.run(["srun", "-w", "n2", "-t", "1", "true"], timeout=60).returncode == 0
    lab.run_as_admin(["scancel", "--user", lab.user])
    eventually(lambda: not lab.run(["squeue", "-h"]).stdout, 30, "an empty queue")
    lab.run_as_admin(["scontrol", "update", "NodeName=n1", "State=RESUME"])


@pytest.mark.soak
def test_the_health_check_of_every_node_lies_in_the_shared_folder(lab, hooked, script):
    results, config = lab.folder / "results", lab.folder / "health.yaml"
    config.write_text(f"evidence_folder: {lab.folder}/evidence\nresults_folder: {results}\n")
    hooked(HealthCheckProgram=script("healthcheck", SLURMFT_HEALTH_CONFIG=config), HealthCheckInterval=5)
    eventually(lambda: set(read_results(results).checkups) >= set(lab.nodes), 60, lambda: str(read_results(results)))
    found = read_results(results)
    assert found.problems == ()
    assert {look.context for looks in found.checkups.values() for look in looks} == {"healthcheck"}
    assert json.loads((lab.folder / "evidence" / "n1.evidence.json").read_text())["node"] == "n1"


@pytest.mark.soak
@pytest.mark.parametrize("hooked_up", [True, False], ids=["with the hook", "without"])
def test_a_requeued_job_begins_at_once(lab, hooked, script, hooked_up):
    if hooked_up:
        hooked(EpilogSlurmctld=script("epilog-slurmctld", SLURM_CONF=lab.slurm_conf))
        lab.stop_controller()  # 22.05 does not take a first EpilogSlurmctld at a reconfigure
        lab.start_controller()
    out = lab.home / "requeued"
    out.unlink(missing_ok=True)
    script_text = f"date +%s >> {out}; sleep 60"
    job = lab.run(["sbatch", "--parsable", "--requeue", "-t", "2", "-o", "/dev/null", "--wrap", script_text],
                  cwd=lab.home).stdout.strip()  # fmt: skip
    eventually(out.exists, 30, "the first start")
    began = time.monotonic()
    lab.run(["scontrol", "requeue", job])
    if hooked_up:
        eventually(lambda: len(out.read_text().split()) == 2, 30, "the second start")
        assert time.monotonic() - began < 25
    else:
        eventually(lambda: "BeginTime" in lab.run(["squeue", "-h", "-j", job, "-o", "%r"]).stdout, 30, "it waits")
