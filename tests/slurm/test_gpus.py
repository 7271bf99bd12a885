"""Nodes with eight GPUs each on a real Slurm, without a GPU: real hooks, the sweep and runs on the stand-in."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gpu_stand_in
import pytest
import yaml
from gpu_faults import FAULTS, SETTINGS, Fault
from waiting import slowness

import slurmft
from slurm.conftest import Run, eventually
from slurmft.health.checker import read_results
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings
from slurmft.policy.node_health import Status
from slurmft.policy.suspicion import Observation
from slurmft.policy.verdict import Kind
from slurmft.storage.exclusions import ExclusionList

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600), *gpu_stand_in.needs_stand_in]

BIN = Path(slurmft.__file__).parents[1] / "bin"
BY_PROLOG_S = BY_AGENT_S = 10.0
PRINT = """
import os, sys, time
names = ("SLURMD_NODENAME", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
print("sees", *(os.environ.get(name, "-") for name in names), flush=True)
"""


@dataclass
class NodeOfLab:
    """One node: the file that steers its devices, and its kernel log, which is a file there as well."""

    lab: Lab
    name: str
    library: Path
    gpus: gpu_stand_in.Node = field(init=False)

    def __post_init__(self) -> None:
        self.gpus = gpu_stand_in.Node(self.library.with_name(f"{self.name}.gpus"))
        self.kernel_log = self.library.with_name(f"{self.name}.kmsg")
        self.kernel_log.touch()
        self.lab.run_on_as_admin(self.name, ["mount", "--bind", str(self.kernel_log), "/dev/kmsg"])

    def log(self, words: str) -> None:
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        with self.kernel_log.open("a") as file:
            file.write(f"4,1,{int(up_s * 1e6)},-;{words}\n")

    def heal(self) -> None:
        self.gpus.heal()
        self.kernel_log.write_text("")
        for path in (self.lab.folder / "evidence").glob(f"{self.name}.*"):
            path.unlink()

    @property
    def reason(self) -> str:
        """State and drain reason."""
        return self.lab.run(["sinfo", "-h", "-N", "-n", self.name, "-p", "low", "-o", "%T %E"]).stdout.strip()

    def resume(self) -> None:
        if "drain" in self.reason:
            self.lab.run_as_admin(["scontrol", "update", f"NodeName={self.name}", "State=RESUME"])
            eventually(lambda: self.reason.startswith("idle"), 30, lambda: self.reason)


@dataclass
class Site:
    """Five nodes with eight devices each, and root's configuration of their health."""

    lab: Lab
    library: Path
    nodes: dict[str, NodeOfLab]

    @property
    def health(self) -> Path:
        return self.lab.folder / "health.yaml"

    def as_root(self, *arguments: str, node: str = "") -> subprocess.CompletedProcess[str]:
        """A verb of slurmft with the stand-in's library: on a node, or where the sweep runs."""
        argv = ["env", f"LD_LIBRARY_PATH={self.library.parent}", f"SLURMFT_RUNS={self.lab.folder}/runs", "slurmft",
                *arguments]  # fmt: skip
        if node:
            return self.lab.run_on_as_admin(node, argv, check=False, timeout=120)
        return self.lab.run_as_admin(argv, check=False, timeout=120)

    def look(self, *nodes: str) -> None:
        for node in nodes:
            self.as_root("health", "--context", "healthcheck", "--config", str(self.health), node=node)

    def sweep(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        files = ["--health", str(self.health), "--file", str(self.lab.folder / f"{name}.exclusions")]
        return self.as_root("sweep", *files, *options)

    def forget(self) -> None:
        for path in (self.lab.folder / "results").glob("*"):
            path.unlink()
        for node in self.nodes.values():
            node.heal()
            node.resume()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """In the place of the labs of other tests: its nodes have GPUs."""
    reason = Lab.availability(accounting=True)
    if reason is not None:
        pytest.skip(reason)
    folder = Path(f"/var/lib/slurmft-lab-gpus-{os.getpid()}")
    instances = folder / "task-prolog"
    try:
        yield Lab.up(LabSettings(folder=folder, nodes=5, gpus=8, accounting=True, kill_wait_s=5, grace_s=15,
                                 slurmd_timeout_s=8, lines=(f"TaskProlog={instances}",)))  # fmt: skip
    finally:
        cluster.purge(folder)


@pytest.fixture(scope="module")
def site(lab: Lab) -> Site:
    library = gpu_stand_in.build(lab.folder / "nvml")
    for name in ("results", "evidence"):
        (lab.folder / name).mkdir()
    disabled = ["load", "processes", "clock", "disk-space", "names", "links", "shared-memory", "memory"]
    settings = {
        "results_folder": str(lab.folder / "results"), "evidence_folder": str(lab.folder / "evidence"),
        "filesystems": {"detect": False}, "verdict": {"min_spacing_s": 0, "max_nodes_per_hour": 100},
        "gpu": {**SETTINGS, "answer_s": 12}, "hooks": {"prolog_refuses": True}, "disabled": disabled,
    }  # fmt: skip
    found = Site(lab, library, {name: NodeOfLab(lab, name, library) for name in lab.nodes})
    found.health.write_text(yaml.safe_dump(settings))
    mig = lab.folder / "task-prolog"  # as a site would give its instances to tasks
    told = f"{lab.folder}/told-mig"
    mig.write_text(f'#!/bin/sh\n[ ! -e {told} ] || echo "export CUDA_VISIBLE_DEVICES=$(cat {told})"\n')
    mig.chmod(0o755)
    return found


@pytest.fixture
def with_prolog(site: Site) -> Iterator[None]:
    lab, before = site.lab, site.lab.slurm_conf.read_text()
    hook = lab.folder / "hook-prolog"
    words = f"LD_LIBRARY_PATH='{site.library.parent}' SLURMFT_HEALTH_CONFIG='{site.health}'"
    hook.write_text(f"#!/bin/sh\n{words} exec {BIN}/slurmft-prolog\n")
    hook.chmod(0o755)
    lab.slurm_conf.write_text(f"{before}Prolog={hook}\n")
    lab.run_as_admin(["scontrol", "reconfigure"])
    eventually(lambda: str(hook) in lab.run_as_admin(["scontrol", "show", "config"]).stdout, 20, "the prolog")
    yield
    lab.run_as_admin(["scancel", "--user", lab.user], check=False)
    lab.slurm_conf.write_text(before)
    lab.run_as_admin(["scontrol", "reconfigure"])
    eventually(lambda: not lab.run(["squeue", "-h"]).stdout, 60, "an empty queue")
    site.forget()


def inject(site: Site, node: str, fault: Fault, dice: random.Random) -> None:
    fault.inject(site.nodes[node], dice.randrange(1, 8), dice)  # type: ignore[arg-type]


KINDS = [fault for fault in FAULTS if "hang" not in fault.name and fault.takes_out]
A_FEW = ("fell off the bus", "devices are not listed", "driver and library differ", "many uncorrected errors",
         "NVLinks are down", "Xid 79", "a switch's fatal error", "a device does not start")  # fmt: skip


@pytest.mark.usefixtures("with_prolog")
def test_a_prolog_takes_a_node_out_within_ten_seconds(site: Site) -> None:
    refused_within_10_s(site, [fault for fault in KINDS if fault.name in A_FEW])


@pytest.mark.soak
@pytest.mark.usefixtures("with_prolog")
def test_a_prolog_takes_a_node_out_for_each_kind_of_fault(site: Site) -> None:
    refused_within_10_s(site, [fault for fault in KINDS if fault.name not in A_FEW])


def refused_within_10_s(site: Site, faults: list[Fault]) -> None:
    lab, dice = site.lab, random.Random(1)
    assert lab.run(["srun", "-N", "5", "-t", "1", "--gpus-per-node=8", "true"], timeout=60).returncode == 0
    for number, fault in enumerate(faults):
        sick = site.nodes[lab.nodes[number % 5]]
        inject(site, sick.name, fault, dice)
        job = lab.run(["sbatch", "--parsable", "-w", sick.name, "-t", "1", "-o", "/dev/null", "--wrap", "true"],
                      cwd=lab.home).stdout.strip()  # fmt: skip
        began = time.monotonic()
        eventually(lambda node=sick: "drain" in node.reason, BY_PROLOG_S, lambda: f"{fault.name}: {sick.reason}")  # noqa: B023
        assert time.monotonic() - began < BY_PROLOG_S * slowness()
        lab.run_as_admin(["scancel", job])
        sick.heal()
        eventually(lambda: not lab.run(["squeue", "-h"]).stdout, 30, "an empty queue")
        sick.resume()
    assert lab.run(["srun", "-N", "5", "-t", "1", "true"], timeout=60).returncode == 0, "all are well again"


@pytest.mark.long
def test_a_sweep_takes_out_the_sick_and_nobody_else(site: Site) -> None:
    site.forget()
    dice, lab = random.Random(2), site.lab
    site.look(*lab.nodes)
    assert site.sweep("first", "--drain").returncode == 0
    (hang,) = (fault for fault in FAULTS if fault.name == "a device hangs")
    (slow,) = (fault for fault in FAULTS if fault.name == "power brake")
    (users,) = (fault for fault in FAULTS if fault.name == "a program's Xid 31")
    inject(site, "n2", hang, dice)
    inject(site, "n3", slow, dice)
    inject(site, "n4", users, dice)
    for _ in range(2):
        site.look(*lab.nodes)
    result = site.sweep("first", "--drain")
    assert result.returncode == 2, result.stdout + result.stderr
    assert site.nodes["n2"].reason.startswith("drained slurmft: [hardware_problem] gpu-count: what it asks hangs")
    assert [name for name, node in site.nodes.items() if "drain" in node.reason] == ["n2"], result.stdout
    site.nodes["n2"].heal()
    for _ in range(2):
        site.look("n2")
    assert "n2 resumed" in site.sweep("first", "--drain").stdout
    site.forget()


@pytest.mark.long
def test_idle_nodes_are_checked_in_pairs_and_what_is_found_is_evidence(site: Site) -> None:
    """Of five nodes two at a time; the short looks that follow agree, and the node goes."""
    site.forget()
    inject(site, "n1", next(fault for fault in FAULTS if fault.name == "Xid 48"), random.Random(3))
    site.lab.wait_until_idle(60)  # also the node that was resumed a moment ago
    result = site.sweep("idle", "--check-idle", "40%", "--partition", "low")
    assert "n1 and n2 are looked at by job" in result.stdout, result.stdout + result.stderr
    folder = site.lab.folder / "results"
    eventually(lambda: {path.stem for path in folder.glob("n*.json")} == {"n1", "n2"}, 200, "two results")
    found = {node: looks[-1] for node, looks in read_results(folder).checkups.items()}
    assert {look.level for look in found.values()} == {2}
    (sick,) = (result for result in found["n1"].results if result.name == "xid")
    assert sick.status is Status.CRITICAL
    sums = [result.status for look in found.values() for result in look.results if result.name == "all-reduce"]
    assert sums == [Status.OK, Status.OK], "the pair has reduced together"
    site.lab.wait_until_idle(60)
    second = site.sweep("idle", "--check-idle", "40%", "--partition", "low", "--dry-run")
    assert "n3 and n4 would be looked at" in second.stdout, "those that have not been looked at"
    site.look("n1")
    assert "n1 excluded" in site.sweep("idle").stdout
    site.forget()


def with_smi(site: Site, run: Run, *options: str) -> str:
    """Submit it with the stand-in's nvidia-smi on its PATH; returns the job."""
    path = site.lab.run(["printenv", "PATH"]).stdout.strip()
    argv = ["env", f"PATH={site.library.parent}:{path}", "slurmft", "submit", str(run.config), *options]
    return site.lab.run(argv, timeout=90).stdout.split(" as job ")[1].split()[0]


def script(lab: Lab, name: str, text: str) -> Path:
    path = lab.home / name
    path.write_text(text)
    os.chown(path, lab.uid, lab.gid)
    return path


def seen(run: Run, ranks: int) -> list[list[str]]:
    """The words of each line that each rank has printed: node, local rank, devices."""
    return [line.split()[1:] for rank in range(ranks) for line in run.output(rank).splitlines() if line[:5] == "sees "]


def test_each_rank_sees_the_gpus_that_slurm_has_given_to_its_job(site: Site, new_run: Callable[..., Run]) -> None:
    command = ["python", str(script(site.lab, "print.py", PRINT))]
    run = new_run(command=command, fault_tolerance={"preload": False},
                  slurm={"partition": "low", "time": "5", "gpus_per_node": "2"})  # fmt: skip
    with_smi(site, run)
    run.wait_until_done()
    found = seen(run, 4)
    assert [words[1] for words in found] == ["0", "1", "0", "1"], run.story()
    assert {words[2] for words in found} == {"0,1"}, "the visible GPU of the local rank is the rank's"


FAIL_ONCE = """
import os, pathlib, sys, time
print("sees", *(os.environ.get(name, "-") for name in ("SLURMD_NODENAME", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")),
      flush=True)
go = pathlib.Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not go.exists():
        time.sleep(0.05)
    sys.exit(1)
"""


def test_a_restart_avoids_a_gpu_under_suspicion(site: Site, new_run: Callable[..., Run]) -> None:
    lab, go = site.lab, site.lab.home / "go"
    command = ["python", str(script(lab, "fail_once.py", FAIL_ONCE)), str(go)]
    here = {"partition": "low", "time": "5", "gpus_per_node": "4", "nodelist": "n4"}  # no other node is an answer
    run = new_run(command=command, nodes=1, slurm=here,
                  fault_tolerance={"num_in_job_restarts": 2, "preload": False})  # fmt: skip
    with_smi(site, run)
    (first,) = eventually(lambda: [words for words in seen(run, 2) if words[1] == "1"], 60, run.story)
    node, suspect = first[0], int(first[2].split(",")[1])
    uuid = gpu_stand_in.uuid_of(node, suspect)
    held = ExclusionList(Path(str(run.path.with_suffix(".exclusions"))))
    held.observe(
        [Observation(kind=Kind.RERUN_PERSISTENT, node=node, gpu=uuid, weight=2.0, at=time.time(), id="by test")]
    )
    for path in run.path.parent.glob(f"{held.path.name}*"):
        lab.run_as_admin(["chown", "-R", f"{lab.uid}:{lab.gid}", str(path)])
    go.touch()
    run.wait_until_done()
    after = [words for words in seen(run, 2) if words[2].startswith("GPU-")]
    assert len(after) == 2, run.story()
    others = [gpu_stand_in.uuid_of(node, index) for index in map(int, first[2].split(",")) if index != suspect]
    assert {words[2] for words in after} == {",".join(others)}


PER_TASK = """#!/bin/bash
#SBATCH -N 2 --ntasks-per-node=2 -t 5 -p low
{head}
srun {options} python print.py
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "head", "options"),
    [
        ("head", "#SBATCH --gpus-per-task=1", ""),
        ("step", "#SBATCH --gres=gpu:2", "--gpus-per-task=1"),
        ("both", "#SBATCH --gpus-per-task=1", "--gpus-per-task=1"),
    ],
)
def test_ranks_of_gpus_per_task_see_the_gpus_that_tasks_would(site: Site, name: str, head: str, options: str) -> None:
    """Each worker sees one device, and both of a node see different ones, as under Slurm alone."""
    folder = site.lab.home / f"per-task-{name}"
    folder.mkdir()
    (folder / "print.py").write_text(PRINT)
    (folder / "job.sh").write_text(PER_TASK.format(head=head, options=options))
    for path in (folder, *folder.iterdir()):
        os.chown(path, site.lab.uid, site.lab.gid)
    lines: dict[str, list[str]] = {}
    for how in (["sbatch"], ["slurmft", "sbatch"]):
        out = folder / f"{how[0]}.out"
        path = site.lab.run(["printenv", "PATH"]).stdout.strip()
        argv = ["env", f"PATH={site.library.parent}:{path}", *how, "-W", "-o", str(out), "job.sh"]
        result = site.lab.run(argv, cwd=folder, check=False, timeout=200)
        text = out.read_text()
        assert result.returncode == 0, result.stdout + result.stderr + text
        lines[how[0]] = sorted(line.split()[-1] for line in text.splitlines() if line.startswith("sees "))
    assert len(lines["slurmft"]) == 4, lines
    assert lines["slurmft"] == lines["sbatch"]
    assert len(set(lines["slurmft"])) == 2, lines
    assert len(list(folder.glob("runs/*/done.json"))) == 1, "it was supervised"


def test_each_rank_gets_an_instance_of_its_own_where_gpus_are_split(site: Site, new_run: Callable[..., Run]) -> None:
    lab, instances = site.lab, [f"MIG-{number}" for number in range(4)]
    (lab.folder / "told-mig").write_text(",".join(instances))
    try:
        command = ["python", str(script(lab, "print.py", PRINT))]
        run = new_run(command=command, fault_tolerance={"preload": False},
                      slurm={"partition": "low", "time": "5", "gpus_per_node": "1"})  # fmt: skip
        with_smi(site, run)
        run.wait_until_done()
    finally:
        (lab.folder / "told-mig").unlink()
    assert [words[1:] for words in seen(run, 4)] == [["0", "MIG-0"], ["1", "MIG-1"]] * 2, run.story()


@pytest.mark.long
def test_a_device_that_fails_beneath_a_run_moves_it_within_ten_seconds(site: Site, new_run: Callable[..., Run]) -> None:
    """Hot and noisy devices change nothing; one that falls off the bus does, before anything hangs."""
    site.forget()
    lab = site.lab
    run = new_run(steps=200, slurm={"partition": "low", "time": "5", "gpus_per_node": "8"})
    path = lab.run(["printenv", "PATH"]).stdout.strip()
    lab.run(["env", f"LD_LIBRARY_PATH={site.library.parent}", f"PATH={site.library.parent}:{path}", "slurmft",
             "submit", str(run.config)], timeout=90)  # fmt: skip
    run.wait_for_step(28)
    hosts = run.events("agents ready")[0].details["hosts"]
    sick = site.nodes[hosts[1]]
    sick.log("NVRM: Xid (PCI:0000:1b:00): 31, pid=12, name=python, Ch 00000008")
    sick.gpus.set(2, temp=95, reasons="0x48")
    told = run.wait_for("notice", within_s=BY_AGENT_S)
    assert (told.details["node"], told.details["ends"]) == (sick.name, False), told
    began = time.time()
    sick.gpus.set(3, lost=1)
    ended = eventually(
        lambda: [each for each in run.events("notice") if each.details["ends"]], BY_AGENT_S, run.story
    )[0]  # fmt: skip
    assert ended.seconds() - began < BY_AGENT_S * slowness(), run.story()
    run.wait_for("killing workers", within_s=BY_AGENT_S)
    run.wait_until_done()
    verdict, decision = run.events("verdict")[0].details, run.events("decision")[0].details
    assert verdict["cause"] == "node lost" and verdict["node"] == sick.name, run.story()
    assert "GPU 3: GPU is lost" in verdict["reason"], verdict
    assert decision["avoid"] == [sick.name]
    attempts = [event.details["hosts"] for event in run.events("agents ready")]
    assert len(attempts) == 2 and sick.name not in attempts[1], run.story()
    held = ExclusionList(Path(str(run.path.with_suffix(".exclusions")))).read().observations
    assert {each.kind for each in held if each.node == sick.name} == {Kind.HEALTH, Kind.NODE_LOST}, held
    assert all("GPU 3: GPU is lost" in each.evidence for each in held), held
    site.forget()


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_node_whose_driver_reports_a_fatal_xid(
    site: Site, new_run: Callable[..., Run]
) -> None:
    site.forget()
    lab = site.lab
    run = new_run(steps=200, spare_nodes=1, fault_tolerance={"num_in_job_restarts": 2},
                  slurm={"partition": "low", "time": "5", "gpus_per_node": "8"})  # fmt: skip
    lab.run(["env", f"LD_LIBRARY_PATH={site.library.parent}", "slurmft", "submit", str(run.config)], timeout=90)
    run.wait_for_step(28)
    hosts = run.events("agents ready")[0].details["hosts"]
    site.nodes[hosts[1]].log("NVRM: Xid (PCI:0000:2b:00): 79, pid=4242, name=python, GPU has fallen off the bus.")
    run.wait_until_done()
    assert [event.details["cause"] for event in run.events("verdict")] == ["node lost", "finished"], run.story()
    attempts = [event.details["hosts"] for event in run.events("agents ready")]
    assert len(attempts) == 2 and hosts[1] not in attempts[1] and not run.events("requeueing"), run.story()
    site.forget()


@pytest.mark.usefixtures("with_prolog")
def test_a_prolog_refuses_a_node_whose_driver_hangs_where_the_site_says_so(site: Site) -> None:
    before = site.health.read_text()
    settings = yaml.safe_load(before)
    settings["hooks"]["prolog_answer_s"] = 4.0
    site.health.write_text(yaml.safe_dump(settings))
    try:
        refused_within_10_s(site, [fault for fault in FAULTS if fault.name == "the library hangs"])
    finally:
        site.health.write_text(before)
