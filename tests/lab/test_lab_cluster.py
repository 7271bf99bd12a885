"""The real lab: what a newcomer and every other test rely on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurmft.errors import LabError, UsageError
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.members import processes_named
from slurmft.lab.settings import LabSettings, lab_processes

pytestmark = pytest.mark.slurm
CHECKOUT = Path(cluster.slurmft.__file__).parent.parent


def cli(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "slurmft", "lab", "--folder", str(folder), *words]


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(cli(folder, *words), capture_output=True, text=True, timeout=60, cwd=CHECKOUT, check=False)


def submit(lab: Lab, *options: str, script: str) -> str:
    argv = ["sbatch", "--parsable", "--output=%j.out", "--open-mode=append", *options]
    return lab.run(argv, input=f"#!/bin/bash\n{script}\n").stdout.strip()


def state(lab: Lab, job: str) -> str:
    return lab.run(["squeue", "-h", "-j", job, "-t", "all", "-o", "%T"], check=False).stdout.strip()


def test_a_lab_of_four_nodes_is_ready_within_15_seconds(folder):
    started = time.monotonic()
    lab = Lab.up(LabSettings(folder=folder, nodes=4))
    assert time.monotonic() - started < 15
    assert lab.node_states() == dict.fromkeys(("n1", "n2", "n3", "n4"), "IDLE")
    assert {line.split()[0] for line in lab.run(["sinfo", "-h"]).stdout.splitlines()} == {
        "low*",
        "nograce",
        "cancel",
        "high",
    }


def test_jobs_run_as_the_ordinary_user(own_lab):
    ids = own_lab.run(["srun", "-N3", "id", "-u"]).stdout.split()
    assert set(ids) == {str(own_lab.uid)}
    assert own_lab.uid != 0
    assert own_lab.run(["id", "-un"]).stdout.strip() == own_lab.user
    assert own_lab.run_as_admin(["id", "-u"]).stdout.strip() == "0"


def test_the_user_may_not_do_what_only_admins_may(own_lab):
    refused = own_lab.run(["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=x"], check=False)
    assert refused.returncode != 0
    assert own_lab.node_states()["n1"] == "IDLE"


def test_every_node_is_alone_in_its_namespaces(own_lab):
    kinds = ("net", "pid", "mnt", "uts")
    argv = ["srun", "-N3", "readlink", *(f"/proc/self/ns/{kind}" for kind in kinds)]
    inside = own_lab.run(argv).stdout.split()
    assert len(set(inside)) == 3 * len(kinds)
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
    assert sorted(own_lab.run(["srun", "-N3", "hostname"]).stdout.split()) == ["n1", "n2", "n3"]


@pytest.mark.parametrize("where", ["ctl", "n1"])
def test_no_way_leads_out(own_lab, where):
    routes = own_lab.run_on_as_admin(where, ["ip", "route"]).stdout.splitlines()
    assert len(routes) == 1
    assert routes[0].startswith("10.213.0.0/24 dev ")
    links = json.loads(own_lab.run_on_as_admin(where, ["ip", "-j", "link"]).stdout)
    outside = {link["ifname"] for link in links} - {"lo", "eth0", "br0", *own_lab.nodes}
    assert outside == set()


TALK = """
import socket, sys, threading
with socket.create_server(("", 0)) as server:
    threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
    with socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5) as link:
        print(link.recv(5).decode())
"""


def test_loopback_works_in_every_node(own_lab):
    assert own_lab.run(["srun", "-N3", sys.executable, "-c", TALK]).stdout.split() == ["hello"] * 3


def test_nodes_reach_each_other_by_name(own_lab, eventually):
    serve = "import socket; s = socket.create_server(('', 7777)); s.accept()[0].sendall(b'from n2'); s.close()"
    ask = "import socket; print(socket.create_connection(('n2', 7777), timeout=5).recv(99).decode())"
    argv, environment = own_lab.command([sys.executable, "-c", serve], node="n2")
    with subprocess.Popen(argv, env=environment) as server:
        eventually(lambda: "7777" in own_lab.run_on("n2", ["ss", "-Hltn"]).stdout)
        assert own_lab.run(["srun", "-w", "n1", sys.executable, "-c", ask]).stdout.strip() == "from n2"
        assert server.wait(10) == 0


def test_jobs_can_use_this_very_python_and_source(own_lab):
    argv = ["srun", "-N3", sys.executable, "-c", "import slurmft; print(slurmft.__version__)"]
    assert len(own_lab.run(argv, env={"PYTHONPATH": str(CHECKOUT)}).stdout.split()) == 3


def test_the_callers_secrets_stay_outside(own_lab, monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "x")
    assert "SOME_SECRET" not in own_lab.run(["env"]).stdout
    assert "SOME_SECRET=y" in own_lab.run(["env"], env={"SOME_SECRET": "y"}).stdout


def test_a_command_that_hangs_is_killed(own_lab, eventually):
    with pytest.raises(LabError, match="no end within 1 s"):
        own_lab.run(["sleep", "4711"], timeout=1)
    eventually(lambda: not processes_named(own_lab.folder, "login", "sleep"), 5)


def test_a_failed_command_says_what_it_printed(own_lab):
    with pytest.raises(LabError, match=r"ended with 2\nls: cannot access '/missing'"):
        own_lab.run(["ls", "/missing"])
    assert own_lab.run(["false"], check=False).returncode == 1


def test_a_killed_node_goes_down_and_a_started_one_serves_again(own_lab, eventually):
    job = submit(own_lab, "-w", "n2", "--no-requeue", script="srun sleep 600")
    eventually(lambda: processes_named(own_lab.folder, "n2", "sleep"))
    own_lab.kill_node("n2")
    assert "n2" not in lab_processes(own_lab.folder).values()
    eventually(lambda: own_lab.node_states()["n2"].startswith("DOWN"))
    eventually(lambda: state(own_lab, job) == "NODE_FAIL")
    own_lab.start_node("n2")
    eventually(lambda: own_lab.node_states()["n2"] == "IDLE")
    assert own_lab.run(["srun", "-w", "n2", "hostname"]).stdout.strip() == "n2"


@pytest.mark.long
def test_a_partitioned_node_keeps_its_processes_and_heals(own_lab, eventually):
    ping = ["bash", "-c", "exec 3<>/dev/tcp/10.213.0.13/6818"]
    assert own_lab.run_on("n1", ping, check=False).returncode == 0
    own_lab.partition("n3")
    assert processes_named(own_lab.folder, "n3", "slurmd")
    assert own_lab.run_on("n1", ["timeout", "1", *ping], check=False).returncode != 0
    assert not cluster.is_healthy(own_lab._built)
    eventually(lambda: own_lab.node_states()["n3"].startswith("DOWN"))
    own_lab.heal("n3")
    eventually(lambda: own_lab.node_states()["n3"] == "IDLE")
    assert own_lab.run_on("n1", ping, check=False).returncode == 0


@pytest.mark.parametrize("stop", ["crash_controller", pytest.param("stop_controller", marks=pytest.mark.soak)])
def test_jobs_outlive_the_controller(own_lab, eventually, stop):
    job = submit(own_lab, "-w", "n1", script="sleep 600")
    eventually(lambda: state(own_lab, job) == "RUNNING")
    eventually(lambda: (own_lab.folder / "state/job_state").exists() and processes_named(own_lab.folder, "n1", "sleep"))
    if stop == "crash_controller":
        saved = own_lab.folder / "state/job_state"
        before = saved.stat().st_mtime_ns
        own_lab.run(["scontrol", "update", f"JobId={job}", "Comment=x"])
        eventually(lambda: saved.stat().st_mtime_ns > before)
    getattr(own_lab, stop)()
    assert own_lab.run(["squeue"], check=False, timeout=30).returncode != 0
    own_lab.start_controller()
    assert state(own_lab, job) == "RUNNING"
    eventually(lambda: set(own_lab.node_states()) == set(own_lab.nodes))


TRAPPING = """srun bash -c 'trap "date +%s.%N >> $SLURM_JOB_ID.term" TERM; echo on; while :; do sleep 0.1; done'"""


def test_high_preempts_each_partition_in_its_own_way(own_lab, eventually):
    nodes = {"low": "n1", "cancel": "n2", "nograce": "n3"}
    jobs = {
        name: submit(own_lab, "-p", name, "-w", node, "--exclusive", script=TRAPPING) for name, node in nodes.items()
    }
    outputs = [own_lab.home / f"{job}.out" for job in jobs.values()]
    eventually(lambda: all(output.exists() and "on" in output.read_text() for output in outputs))
    winner = submit(own_lab, "-p", "high", "-N", "3", "--exclusive", script="sleep 1")
    eventually(lambda: state(own_lab, winner) in ("RUNNING", "COMPLETED"), 60)

    ends = {name: state(own_lab, job) for name, job in jobs.items()}
    assert ends == {"low": "PENDING", "nograce": "PENDING", "cancel": "PREEMPTED"}
    asking = ["squeue", "-h", "-t", "all", "-O", "partition,restartcnt", "-j", ",".join(jobs.values())]
    restarts = dict(line.split() for line in own_lab.run(asking).stdout.splitlines())
    assert restarts == {"low": "1", "nograce": "1", "cancel": "0"}
    for name in ("low", "cancel"):
        first, *later = [float(word) for word in (own_lab.home / f"{jobs[name]}.term").read_text().split()]
        assert later[-1] - first > own_lab.settings.grace_s - 1


def test_accounting_remembers_a_job(own_lab, eventually):
    job = submit(own_lab, script="exit 3")
    rows = ["sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,User"]
    eventually(lambda: own_lab.run(rows, check=False).stdout.strip() == f"FAILED|3:0|{own_lab.user}")


def test_up_again_with_the_same_settings_changes_nothing(own_lab):
    before = lab_processes(own_lab.folder)
    started = time.monotonic()
    Lab.up(own_lab.settings)
    assert time.monotonic() - started < 2
    assert set(before) == set(lab_processes(own_lab.folder))


def test_unknown_nodes_are_refused_by_name(own_lab):
    for attempt in (own_lab.kill_node, own_lab.partition, own_lab.start_node):
        with pytest.raises(UsageError, match="no node 'ctl'"):
            attempt("ctl")


def test_the_command_line_passes_exit_code_folder_and_arguments_on(own_lab):
    done = call(own_lab.folder, "exec", "--", "bash", "-c", "pwd; echo $0 $SLURM_CONF; exit 41", "--x y")
    assert done.stdout.splitlines() == [str(CHECKOUT), f"--x y {own_lab.slurm_conf}"]
    assert done.returncode == 41
    assert call(own_lab.folder, "exec", "--node", "n2", "--", "bash", "-c", "hostname; exit 3").returncode == 3
    report = call(own_lab.folder, "status", "--json")
    assert (report.returncode, json.loads(report.stdout)["healthy"]) == (0, True)


def test_a_signal_reaches_the_command(own_lab, eventually):
    for words in ([], ["--node", "n2"]):
        with subprocess.Popen(cli(own_lab.folder, "exec", *words, "--", "sleep", "4712"), cwd=CHECKOUT) as process:
            member = "n2" if words else "login"
            eventually(lambda: processes_named(own_lab.folder, member, "sleep"))  # noqa: B023
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == -signal.SIGTERM
        eventually(lambda: not processes_named(own_lab.folder, member, "sleep"), 5)  # noqa: B023


def test_without_a_lab_commands_say_so(folder):
    for words in (["exec", "--", "true"], ["kill-node", "n1"]):
        done = call(folder, *words)
        assert done.returncode == 1
        assert done.stderr.splitlines()[0] == f"slurmft: no lab stands in {folder}"
    assert call(folder, "down").returncode == 0
    assert call(folder, "status").returncode == 1
