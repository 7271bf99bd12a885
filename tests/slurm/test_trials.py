"""Sweeps on a real cluster: jobs come and go, and every trial has one result."""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm.conftest import PATIENCE_S, Run, eventually, preempt
from slurmft.lab.cluster import Lab
from slurmft.scheduler.slurm import expand

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewSweep = Callable[..., "SweepRun"]
PHASE = 40
"""Trials that wait together for the test's word, so that each fault comes while there is work."""

TRIAL = """
import os, pathlib, sys, time
number, phase = int(sys.argv[1]), int(sys.argv[2])
folder = pathlib.Path(os.environ["SLURMFT_TRIAL_FOLDER"])
with open(folder / "starts", "a") as stream:
    stream.write("s")
while not (pathlib.Path(__file__).parent / f"go-{phase}").exists():
    time.sleep(0.05)
time.sleep(float(sys.argv[3]))
with open(folder / "ends", "a") as stream:
    stream.write("e")
print(number ** 2)
"""
COUNTED = ("squeue", "sbatch", "scontrol", "scancel", "sacct", "sinfo", "srun")
COUNT = """#!/bin/bash
echo {name} >> {folder}/calls
exec /usr/bin/{name} "$@"
"""


class SweepRun(Run):
    """A sweep of trials whose right results are known."""

    @property
    def counted(self) -> Path:
        """A folder of Slurm's commands, which note that they were called."""
        return self.path.parent / "counted"

    def counting(self, *argv: str) -> list[str]:
        """A command whose own commands of Slurm, and those of the jobs that it submits, are counted."""
        path = self.lab.run(["printenv", "PATH"]).stdout.strip()
        return ["env", f"PATH={self.counted}:{path}", *argv]

    def sweep(self, *arguments: str, check: bool = True) -> str:
        return self.lab.run(self.counting("slurmft", "trials", *arguments), check=check, timeout=180).stdout

    def submit(self, *options: str) -> str:
        return self.sweep(str(self.config), *options).split(" as job ")[1].split()[0]

    def go(self, phase: int) -> None:
        """Let the trials of a phase come to their end."""
        (self.path.parent / f"go-{phase}").touch()

    def requests(self) -> Counter[str]:
        """Those that slurmft has made to Slurm, by command."""
        return Counter((self.counted / "calls").read_text().split())

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.sweep("results", str(self.path), "--json").splitlines()]

    def pilots(self) -> dict[str, str]:
        """Jobs that lend a node, and their nodes; empty for one that waits."""
        told = self.lab.run(["squeue", "-h", "-t", "PD,R", "-o", "%i|%j|%N"]).stdout.splitlines()
        return {job: node for job, name, node in (line.split("|") for line in told) if name.startswith("lend-")}

    def nodes(self) -> set[str]:
        """Those on which trials run at the moment."""
        return {node for node in self.lab.nodes if self.pids_of(node, f"{self.path.parent}/trial.py")}

    def pids_of(self, node: str, words: str) -> list[str]:
        """Processes of Python with these first words, a pattern."""
        argv = ["pgrep", "-f", f"^[^ ]*python[^ ]* {words}"]
        return self.lab.run_on_as_admin(node, argv, check=False).stdout.split()

    def wait_for_nodes(self, *, beside: set[str] = frozenset(), count: int) -> set[str]:  # type: ignore[assignment]
        """The nodes with trials, when there are so many without those of ``beside``."""
        return eventually(lambda: found if len(found := self.nodes() - beside) >= count else None, PATIENCE_S,
                          lambda: f"trials on {count} nodes beside {beside}\n{self.story()}")  # fmt: skip


@pytest.fixture
def new_sweep(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> NewSweep:
    def make(trials: dict[str, Any], *, seconds: float = 0.1, **changes: Any) -> SweepRun:
        name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
        name += "-again" * (getattr(request.node, "execution_count", 1) > 1)
        folder = lab.home / "sweeps" / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "counted").mkdir(parents=True)
        run = SweepRun(lab, folder / "run", folder / "sweep.yaml")
        (folder / "trial.py").write_text(TRIAL)
        (run.counted / "calls").touch()
        for command in COUNTED:
            (run.counted / command).write_text(COUNT.format(name=command, folder=run.counted))
            (run.counted / command).chmod(0o755)
        config = {
            "run_folder": str(run.path), "trials": trials,
            "command": ["python", str(folder / "trial.py"), "{x}", "{phase}", str(seconds)],
            "slurm": {"partition": "low", "time": "20", "cpus_per_task": 8},  # whole nodes
            "fault_tolerance": {"agent_timeout_s": 3, "supervisor_lease_s": 15, "retry_delay_s": 0}, **changes,
        }  # fmt: skip
        run.config.write_text(yaml.safe_dump(config))
        for path in (folder.parent, folder, *folder.iterdir(), *run.counted.iterdir()):
            os.chown(path, lab.uid, lab.gid)
        return run

    return make


@pytest.mark.long
def test_every_result_once_while_pilots_agents_nodes_and_the_supervisors_job_go(lab: Lab, new_sweep: NewSweep) -> None:
    phases = 5
    count, jobs = PHASE * phases, 3
    given = [{"x": x, "phase": x // PHASE} for x in range(count)]
    run = new_sweep({"list": given, "per_node": 2, "max_jobs": jobs})
    run.go(0)
    job = run.submit()
    own = run.wait_for("attempt started").details["host"]
    run.wait_for_nodes(count=jobs)
    assert len(run.pilots()) == jobs - 1, run.story()

    gone, back = sorted(run.pilots())  # one is cancelled, and another one begins; one is requeued
    lab.run_as_admin(["scancel", gone])
    lab.run_as_admin(["scontrol", "requeue", back])
    run.wait_for("agent left", 2)  # what it had is open again, before others have gone on to the next phase
    run.go(1)
    eventually(lambda: gone not in run.pilots() and len(run.pilots()) == jobs - 1, PATIENCE_S, run.story)
    run.wait_for_step(2 * PHASE)
    pilot = sorted(run.wait_for_nodes(beside={own}, count=jobs - 1))[0]  # also the one that Slurm would let wait

    before = len(run.events("node answers"))
    lab.run_on_as_admin(pilot, ["kill", "-KILL", *run.pids_of(pilot, f".*slurmft agent {run.path}")])
    run.wait_for("agent lost")
    run.go(2)
    run.wait_for_step(3 * PHASE)
    run.wait_for("node answers", before + 1)
    assert len(run.events("attempt started")) == 1, run.story()

    victim = sorted(run.wait_for_nodes(beside={own}, count=1))[0]
    lab.kill_node(victim)
    try:
        run.wait_for("agent lost", 2)
        run.go(3)
        run.wait_for_step(4 * PHASE)
        lab.run_as_admin(["scontrol", "requeue", job])
        run.wait_for("requests opened", 2)
        run.go(4)
        run.wait_until_done()
    finally:
        lab.start_node(victim)

    found = run.rows()
    assert [row["parameters"] for row in found] == given
    assert {row["state"] for row in found} == {"done"}, run.story()
    assert [row["result"] for row in found] == [x**2 for x in range(count)]
    ran = [[len((Path(row["folder"]) / name).read_text()) for name in ("starts", "ends")] for row in found]
    again = sum(starts - 1 for starts, _ in ran)
    assert again <= 6 * jobs * 2, ran  # what one fault cuts off
    assert sum(ends - 1 for _, ends in ran) <= again, ran
    run.wait_until_out_of_queue(job)
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 30, run.story)
    noted = [event.details["job"] for event in run.events("joining")]
    assert len(noted) <= jobs + 3, run.story()
    seconds = (run.events()[-1].at - run.events()[0].at).total_seconds()
    asked = run.requests()
    assert asked["squeue"] <= seconds / 10 + 10, asked
    assert asked["sbatch"] == 1 + len(noted), asked
    assert sum(asked.values()) <= seconds / 10 + 60, asked  # those at starts and ends of jobs, and of five faults
    print(f"{seconds:.0f} s, {again} tries again, {len(noted)} pilots, requests: {run.requests()}")


@pytest.mark.long
def test_every_result_once_while_the_node_of_a_pilot_is_cut_off_and_comes_back(lab: Lab, new_sweep: NewSweep) -> None:
    """Its trials begin again elsewhere, while it runs them on until its lease is over."""
    cut_off_s, jobs, given = 35.0, 3, [{"x": x, "phase": x // PHASE} for x in range(2 * PHASE)]
    times = {"agent_timeout_s": 3, "supervisor_lease_s": 10}
    run = new_sweep({"list": given, "per_node": 2, "max_jobs": jobs}, seconds=1, fault_tolerance=times)
    run.go(0)
    job = run.submit()
    own = run.wait_for("attempt started").details["host"]
    pilot = sorted(run.wait_for_nodes(beside={own}, count=jobs - 1))[0]
    run.wait_for_step(4)
    lab.partition(pilot)
    healed_s = time.monotonic() + cut_off_s
    try:
        run.wait_for("agent lost")
        eventually(lambda: time.monotonic() > healed_s, cut_off_s, "the time is up")
    finally:
        lab.heal(pilot)
    run.go(1)
    run.wait_until_done()
    found = run.rows()
    assert [(row["state"], row["result"]) for row in found] == [("done", x**2) for x in range(2 * PHASE)], run.story()
    starts = [len((Path(row["folder"]) / "starts").read_text()) for row in found]
    assert sum(starts) - len(starts) <= 2 * jobs, starts
    run.wait_until_out_of_queue(job)
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 30, run.story)


@pytest.mark.long
def test_after_a_preemption_of_all_jobs_a_stop_leaves_none_and_another_submission_goes_on(
    lab: Lab, new_sweep: NewSweep
) -> None:
    jobs, given = 3, [{"x": x, "phase": int(x >= 20)} for x in range(40)]
    run = new_sweep({"list": given, "per_node": 2, "max_jobs": jobs}, preemption={"stop_timeout_s": 5})
    run.go(0)
    job = run.submit()
    run.wait_for_nodes(count=jobs)
    run.wait_for_step(20)
    preempt(lab)
    run.wait_for("requests opened", 2)
    run.wait_for_nodes(count=1)
    assert len(run.pilots()) <= jobs - 1, run.story()
    run.sweep("results", str(run.path), "--csv")
    run.slurmft("stop", str(run.path))
    run.wait_until_out_of_queue(job)
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 30, run.story)
    assert {row["state"] for row in run.rows()} == {"done", "open"}, run.story()
    run.go(1)
    assert "0 trials added, 40 were there" in run.sweep(str(run.config), "--wait")
    found = run.rows()
    assert [(row["state"], row["result"]) for row in found] == [("done", x**2) for x in range(40)], run.story()
    assert [len((Path(row["folder"]) / "starts").read_text()) for row in found][:20] == [1] * 20, "no one runs again"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_pilot_gives_its_node_to_the_run_s_own_job_where_there_is_no_other_one(lab: Lab, new_sweep: NewSweep) -> None:
    """It held the only node for as long as its time limit."""
    run = new_sweep({"list": [{"x": x, "phase": x // PHASE} for x in range(2 * PHASE)], "per_node": 2, "max_jobs": 2})
    run.go(0)
    job = run.submit()
    own = run.wait_for("attempt started").details["host"]
    [pilot] = run.wait_for_nodes(beside={own}, count=1)
    run.wait_for_step(PHASE)
    others = ",".join(sorted({*lab.nodes} - {pilot}))
    lab.run_as_admin(["scontrol", "update", f"nodename={others}", "state=drain", "reason=test"])
    try:
        lab.run_as_admin(["scontrol", "requeue", job])
        run.wait_for("lender gave way", within_s=2 * PATIENCE_S)
        run.go(1)
        assert run.wait_for("attempt started", 2).details["host"] == pilot
        run.wait_until_done()
    finally:
        lab.run_as_admin(["scontrol", "update", f"nodename={others}", "state=resume"])
    assert [row["result"] for row in run.rows()] == [x**2 for x in range(2 * PHASE)]


TRAINING = """
import json, os, pathlib, signal, socket, sys, time
import torch.distributed as dist
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
rank, world, local, local_world, node = (int(os.environ[name]) for name in names)
assert (world, local_world, rank) == (4, 2, 2 * node + local), dict(os.environ)
folder = pathlib.Path(os.environ["SLURMFT_TRIAL_FOLDER"])
with open(folder / f"starts-{rank}", "a") as stream:
    stream.write("s")
def save(*_):
    time.sleep(1)
    (folder / f"saved-{rank}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
dist.init_process_group("gloo")
assert dist.get_world_size() == world
while not (pathlib.Path(__file__).parent / "go-0").exists():
    time.sleep(0.05)
total, nodes = dist.torch.tensor(int(sys.argv[1]) * (rank + 1)), [None] * world
dist.all_reduce(total)
dist.all_gather_object(nodes, socket.gethostname())
pathlib.Path(os.environ["SLURMFT_TRIAL_RESULT"]).write_text(json.dumps({"sum": total.item(), "nodes": nodes}))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_trials_over_two_nodes_have_each_result_once_though_an_agent_a_job_and_a_node_are_lost(
    lab: Lab, new_sweep: NewSweep
) -> None:
    given = [{"x": x, "phase": 0} for x in range(6)]
    run = new_sweep({"list": given, "nodes": 2, "nproc_per_node": 2, "max_jobs": 2})
    (run.path.parent / "trial.py").write_text(TRAINING)
    job = run.submit()
    nodes = run.wait_for_nodes(count=4)
    own = set(expand(lab.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()))
    first = run.wait_for("attempt started").details["host"]
    assert own < nodes and len(own) == 2 and len(run.pilots()) == 1, run.story()

    second = next(iter(own - {first}))
    lab.run_on_as_admin(second, ["kill", "-KILL", *run.pids_of(second, f".*slurmft agent {run.path}")])
    run.wait_for("gang formed", 3)
    run.wait_for_nodes(count=4)
    lab.run_as_admin(["scontrol", "requeue", *run.pilots()])
    run.wait_for("gang formed", 4)
    victim = sorted(run.wait_for_nodes(count=4) - own)[-1]
    before = len(run.events("agent lost"))
    lab.kill_node(victim)
    try:
        run.wait_for("agent lost", before + 1)
        eventually(lambda: run.nodes() == own, PATIENCE_S, run.story)
    finally:
        lab.start_node(victim)
    run.wait_for("gang formed", 5)
    assert run.wait_for_nodes(count=4) == nodes
    run.go(0)
    run.wait_until_done()
    found = run.rows()
    told = [(row["state"], row["result"] and row["result"]["sum"]) for row in found]
    assert told == [("done", 10 * x) for x in range(6)], run.story()
    assert all(set(row["result"]["nodes"]) in (own, nodes - own) for row in found), found
    starts = [[len((Path(row["folder"]) / f"starts-{rank}").read_text()) for rank in range(4)] for row in found]
    assert sum(map(max, starts)) <= 6 + 3, starts  # one for each fault
    saved = [len([*Path(row["folder"]).glob("saved-*")]) for row in found]
    assert 4 in saved, (saved, run.story())  # of the job that was requeued
    run.wait_until_out_of_queue(job)
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 30, run.story)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_trials_over_two_nodes_have_each_result_once_though_nodes_fall_silent(lab: Lab, new_sweep: NewSweep) -> None:
    run = new_sweep({"list": [{"x": x, "phase": 0} for x in range(6)], "nodes": 2, "nproc_per_node": 2, "max_jobs": 2})
    (run.path.parent / "trial.py").write_text(TRAINING)
    job = run.submit()
    nodes = run.wait_for_nodes(count=4)
    own = set(expand(lab.run(["squeue", "-h", "-j", job, "-o", "%N"]).stdout.strip()))
    first = run.wait_for("attempt started").details["host"]
    for number, victim in enumerate((sorted(nodes - own)[-1], next(iter(own - {first}))), 1):
        lab.partition(victim)
        try:
            run.wait_for("agent lost", number)
        finally:
            lab.heal(victim)
        if number == 1:
            run.wait_for_nodes(count=4)
    run.go(0)
    run.wait_until_done()
    found = run.rows()
    assert [row["result"] and row["result"]["sum"] for row in found] == [10 * x for x in range(6)], run.story()
    starts = [[len((Path(row["folder"]) / f"starts-{rank}").read_text()) for rank in range(4)] for row in found]
    assert sum(map(max, starts)) <= 6 + 2, starts  # one for each fault
    eventually(lambda: not run.pilots(), PATIENCE_S, run.story)
    eventually(lambda: not run.nodes(), 60, run.story)
