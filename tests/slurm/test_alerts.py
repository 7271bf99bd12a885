"""The shipped rules and dashboards on a real Prometheus and Alertmanager, with faults in a run on the lab."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slurm import monitoring
from slurm.conftest import TRAINER as SMALL
from slurm.conftest import Run, eventually
from slurm.test_local import LocalRun
from slurm.test_local_serving import Endpoint
from slurmft.inference.router import Metrics
from slurmft.lab.cluster import Lab
from slurmft.operations.sweep import SweepReport, metrics_text
from slurmft.reporting.metrics import families, looks_at
from slurmft.system.exposition import text

TRAINER = ["python", str(Path(__file__).parent / "trainers" / "hangs.py")]
needs_prometheus = pytest.mark.skipif(bool(monitoring.unavailable()), reason=monitoring.unavailable() or "is there")


@needs_prometheus
def test_the_rules_pass_promtools_unit_tests():
    folder = monitoring.CONFIGS / "prometheus"
    for words in (["check", "rules", "slurmft.rules.yml"], ["test", "rules", "slurmft.test.yml"]):
        told = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout + told.stderr


class _Router:
    in_flight, degraded, waiting, ready = 1, True, 2, 1
    replicas = SimpleNamespace(expected=4, wanted=4)


def _router_text() -> Callable[[], str]:
    """A router in trouble: of the router's own metrics, half of whose requests fail."""
    counted = Metrics(_Router())

    def look() -> str:
        counted.answered(200, 0.2)
        counted.failed("timeout")
        return counted.answer("")[0].decode()

    return look


@pytest.mark.long
@needs_prometheus
@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_alerts_fire_for_the_faults_of_a_run_and_dashboards_show_data(
    new_run: Callable[..., Run], lab: Lab, tmp_path: Path
):  # fmt: skip
    run = new_run(
        command=[*TRAINER, "--steps", "100000"], checkpoint={"interval_steps": 10},
        fault_tolerance={"num_job_retries_on_failure": 2, "retry_delay_s": 10, "num_warmup_iterations": 3,
                         "rank_section_timeouts": {"step": 20}},
    )  # fmt: skip
    textfiles = run.path.with_suffix(".textfiles")
    textfiles.mkdir(mode=0o755)
    os.chown(textfiles, lab.uid, lab.gid)
    run.configure(
        metrics={"textfile_folder": str(textfiles), "interval_s": 1},
        exclusions={
            "path": str(run.path.with_suffix(".exclusions")),
            "threshold": 0.1,
            "probation": 0.05,
            "max_excluded_fraction": 0.3,
        },
    )
    swept = run.path.with_suffix(".sweep.prom")

    def from_the_job() -> str:
        return "".join(path.read_text() for path in textfiles.glob("*.prom"))

    def from_cron() -> str:
        return text(families(looks_at([run.folder])[0]))

    name, since = run.path.name, time.time()
    sources = {"/job": from_the_job, "/cron": from_cron, "/sweep": swept.read_text, "/router": _router_text()}
    with monitoring.monitoring(tmp_path / "prometheus", sources) as world:
        run.submit()
        run.wait_for_saved(10)
        world.wait_for("SlurmftEndpointDegraded", "")

        # the checkpoint directory takes nothing any more
        (run.path / "checkpoints").chmod(0o555)
        for alert in ("SlurmftSavesFailing", "SlurmftNoSave"):
            world.wait_for(alert, name)
        (run.path / "checkpoints").chmod(0o700)

        # a rank stands still: first nothing moves, then its time limit runs out, and the run goes through the queue
        pid = run.output(rank=2).partition("process ")[2].split()[0]
        lab.run_on_as_admin(run.wait_for("agents ready").details["hosts"][1], ["kill", "-STOP", pid])
        for alert in ("SlurmftNoProgress", "SlurmftHangBudgetNearlySpent"):
            assert run.events("worker hung") == [] or (alert, name) in world.alerts
            world.wait_for(alert, name)
        hung = run.wait_for("worker hung").details
        world.wait_for("SlurmftWaitingTooLong", name)

        # its node is on the list, and takes the place of all that may be
        run.wait_for("evidence")
        done = run.slurmft("sweep", "--config", str(run.config), "--metrics", str(swept), check=False)
        assert world.wait_for("SlurmftNodeLemon", hung["node"]), done
        world.wait_for("SlurmftExclusionsNearCapacity", "")
        world.wait_for("SlurmftEndpointErrors", "")

        # back again, all queries of the dashboards have something to show
        run.wait_for("first step", count=2)
        labels = {"$run": name, "$user": lab.user, "$cluster": from_cron().partition('cluster="')[2].partition('"')[0]}
        for dashboard in ("run", "cluster"):
            for title, expression in monitoring.expressions(dashboard):
                filled = expression
                for variable, value in labels.items():
                    filled = filled.replace(variable, value)
                eventually(
                    lambda query=filled: world.shown(query, since) or None, 20, f"{dashboard}, {title}: {filled}"
                )

        # the supervisor stands still, with all that it would report
        owner = run.folder.owner()
        assert owner is not None
        lab.run_on_as_admin(owner.host, ["kill", "-STOP", str(owner.pid)])
        try:
            world.wait_for("SlurmftTelemetryGone", name)
        finally:
            lab.run_on_as_admin(owner.host, ["kill", "-CONT", str(owner.pid)], check=False)
    assert {where for _, where in world.alerts} <= {name, "", hung["node"]}


@needs_prometheus
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_alerts_fire_for_a_run_that_fails_again_and_again_and_a_sweep_that_sees_nothing(tmp_path: Path):
    run = LocalRun(
        tmp_path / "burns", command=[*SMALL, "--steps", "100000", "--step-delay", "0.1"],
        checkpoint={"interval_steps": 5}, fault_tolerance={"num_in_job_restarts": 9},
    )  # fmt: skip

    def from_cron() -> str:
        return text(families(looks_at([run.folder])[0]))

    sources = {"/cron": from_cron, "/sweep": lambda: metrics_text(SweepReport())}
    with monitoring.monitoring(tmp_path / "prometheus", sources) as world:
        run.submit()
        try:
            for attempt in range(4):
                (log,) = eventually(
                    lambda number=attempt: list(run.folder.attempts.glob(f"*.{number}/rank-1.log")), 120, run.story
                )
                eventually(lambda number=attempt: len(run.events("first step")) > number, 120, run.story)
                pid = next(pid for pid in psutil.pids() if _writes_to(pid, log))
                os.kill(pid, signal.SIGKILL)
                eventually(lambda number=attempt: len(run.events("verdict")) > number, 120, run.story)
            world.wait_for("SlurmftRestartsBurning", "burns")
            world.wait_for("SlurmftSweepMissing", "")
        finally:
            run.slurmft("stop", str(run.folder.path), "--timeout", "60", check=False)


@needs_prometheus
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_alert_fires_for_replicas_that_die_again_and_again(tmp_path: Path):
    endpoint = Endpoint(tmp_path / "serves", max_restarts=20)

    def from_cron() -> str:
        return text(families(looks_at([endpoint.folder])[0]))

    with monitoring.monitoring(tmp_path / "prometheus", {"/cron": from_cron}) as world:
        endpoint.start()
        try:
            for deaths in range(1, 6):
                endpoint.wait_for(2, 4)
                endpoint.processes("serving_engine.py")[0].kill()
                eventually(lambda number=deaths: len(endpoint.events("replica died")) >= number, 60, endpoint.story)
            world.wait_for("SlurmftReplicasDying", "serves")
        finally:
            endpoint.slurmft("stop", str(endpoint.folder.path), "--timeout", "60")


def _writes_to(pid: int, log: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/1") == str(log)
    except OSError:
        return False
