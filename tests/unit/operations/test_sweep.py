"""``slurmft sweep`` itself: programs on PATH stand in for Slurm, and misbehave."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from of_each import of_each
from waiting import slowness

from slurmft.errors import StorageUnavailable, UsageError
from slurmft.health.checker import write_result
from slurmft.operations.rescue import rescue_below
from slurmft.operations.sweep import SweepReport, metrics_text
from slurmft.policy.node_health import Checkup, ProbeResult, Status
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import parse_facts, parse_switches, parse_under_test, probe_argv
from slurmft.storage.exclusions import ExclusionList
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.system.files import url_in
from slurmft.system.processes import bounded

OURS = "slurmft: [node_problem] disk: no space"


class Site:
    """A cluster of stubs; ``nodes`` is what sinfo prints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.list, self.results = folder / "exclusions.json", folder / "results"
        self.health = folder / "health.yaml"
        self.health.write_text(f"results_folder: {self.results}\n")
        self.calls_file = folder / "calls"
        self.nodes("n1|idle|none\nn2|mixed|none\nn3|idle|none\nn4|drained|bad cable\n")
        # sinfo -n NODE tells about that one
        self.stub("sinfo", f'for a; do [[ $p == -n ]] && only=$a; p=$a; done; grep "^${{only:-n}}" {folder}/nodes')
        self.stub("squeue", "exit 0")
        self.stub("scontrol", "exit 0")
        self.stub("sbatch", "echo 77")

    def stub(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> {self.calls_file}\n{body}\n')
        path.chmod(0o755)

    def nodes(self, text: str) -> None:
        (self.folder / "nodes").write_text(text)

    def look(self, node: str, *statuses: Status) -> None:
        """Looks a minute apart, the newest one now."""
        for age, status in reversed(list(enumerate(reversed(statuses)))):
            result = ProbeResult(name="disk", status=status, detail="no space")
            write_result(self.results, node, Checkup(node=node, at=time.time() - 60 * age, results=(result,)))

    def sweep(self, *options: str, limit_s: float = 30) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", "-m", "slurmft", "sweep", "--file", str(self.list),
                "--health", str(self.health), *options]  # fmt: skip
        environment = os.environ | {
            "PATH": f"{self.bin}:/usr/bin:/bin", "SLURMFT_RUNS": str(self.folder / "runs"),
            "XDG_RUNTIME_DIR": str(self.folder),
        }  # fmt: skip
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s, env=environment, check=False, cwd=self.folder
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another verb."""
        environment = os.environ | {
            "PATH": f"{self.bin}:/usr/bin:/bin", "SLURMFT_RUNS": str(self.folder / "runs")
        }  # fmt: skip
        argv = [sys.executable, "-P", "-m", "slurmft", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, env=environment, check=False)

    def calls(self, name: str) -> list[str]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [line for line in lines if line.startswith(f"{name} ")]

    def held(self) -> list[str]:
        return [each.node for each in ExclusionList(self.list).read().observations if each.weight > 0]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path)
    found.look("n1", Status.CRITICAL, Status.CRITICAL)
    for node in ("n2", "n3", "n4"):
        found.look(node, Status.OK, Status.OK)
    return found


def test_a_sick_node_is_excluded_and_the_admins_command_is_printed(site):
    result = site.sweep()
    assert result.returncode == 2, result.stderr
    assert site.held() == ["n1"]
    assert "n1 excluded: no space (disk, 2 of 2 looks)" in result.stdout
    assert f"scontrol update NodeName=n1 State=DRAIN 'Reason={OURS}'" in result.stdout
    assert site.calls("scontrol") == [], "without --drain nothing in Slurm is changed"
    assert len(site.calls("sinfo")) + len(site.calls("squeue")) == 1


@pytest.mark.parametrize(("content", "code"), [(b"{", 2), (b'{"format": 9}', 1), (None, 1)])
def test_a_damaged_list_is_told_and_no_reason_not_to_rescue(site, content, code):
    os.mkfifo(site.list) if content is None else site.list.write_bytes(content)
    run = RunFolder(site.folder / "runs" / "r")
    run.create()
    run.config.touch()
    run.add_job("7")
    run.take_over(
        Owner(job="7", restart=0, generation=1, cluster="slurm", host="h", pid=1, birth="", folder="", inode=0)
    )
    result = site.sweep()
    assert result.returncode == code, result.stderr
    # root's runs below /tmp are looked at, and left alone
    assert any("-j 7" in call for call in site.calls("squeue")) or "a run of root's" in result.stderr
    assert str(site.list) in next(line for line in result.stdout.splitlines() if line.startswith("PROBLEM: "))
    assert ("n1 excluded" in result.stdout) == (content == b"{")
    if content == b"{":
        assert site.held() == ["n1"]


def test_with_drain_the_node_is_looked_at_again_and_drained(site):
    result = site.sweep("--drain")
    assert "n1 drained" in result.stdout, result.stderr
    assert site.calls("scontrol") == [f"scontrol update NodeName=n1 State=DRAIN Reason={OURS}"]
    assert site.calls("sinfo")[-1] == "sinfo -h -a -N -n n1 -o %N|%T|%E|%H"


@pytest.mark.parametrize(
    "now", ["n1|drained|admin was faster", "n1|down*|Not responding", "n1|idle|being looked at", "x|idle|none"]
)
def test_a_node_that_has_changed_meanwhile_is_left_alone(site, now):
    site.stub("sinfo", f'[[ "$*" == *"-n n1"* ]] && echo "{now}" || cat {site.folder}/nodes')
    result = site.sweep("--drain")
    assert "left alone: n1 has changed meanwhile" in result.stdout, result.stderr
    assert site.calls("scontrol") == []


def test_without_permission_the_command_is_printed(site):
    site.stub("scontrol", 'echo "slurm_update error: Access/permission denied" >&2; exit 1')
    result = site.sweep("--drain")
    assert result.returncode == 2
    assert f"scontrol update NodeName=n1 State=DRAIN 'Reason={OURS}'" in result.stdout


def test_only_a_node_with_a_reason_of_ours_is_resumed(site):
    site.nodes(f"n1|idle|none\nn2|drained|{OURS}\nn3|idle|none\nn4|drained|bad cable\n")
    site.look("n1", Status.OK, Status.OK)
    result = site.sweep("--drain")
    assert site.calls("scontrol") == ["scontrol update NodeName=n2 State=RESUME"], result.stderr + result.stdout


@pytest.mark.parametrize("command", ["sinfo", "squeue"])
@pytest.mark.parametrize(
    "body",
    [
        'echo "slurm_load_node error: Unable to contact slurm controller (connect failure)" >&2; exit 1',
        'echo "slurm_load: Socket timed out on send/recv operation" >&2; exit 1',
    ],
    ids=["down", "slow"],
)
def test_when_slurm_does_not_answer_nothing_changes(site, command, body):
    site.stub(command, body)
    result = site.sweep("--drain", "--test", "2", "--metrics", str(site.folder / "metrics"))
    assert result.returncode == 75
    assert "Slurm did not answer" in result.stdout
    assert site.held() == []
    assert site.calls("scontrol") == site.calls("sbatch") == []
    assert "slurmft_sweep_slurm_up 0.0\n" in (site.folder / "metrics").read_text()


def test_an_empty_answer_is_no_answer(site):
    site.nodes("")
    assert site.sweep().returncode == 75
    assert site.held() == []


def test_slurm_that_falls_silent_in_the_middle_is_told(site):
    site.stub("scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    result = site.sweep("--drain")
    assert result.returncode == 75
    assert "nothing more is changed" in result.stdout


def test_a_dry_run_changes_nothing(site):
    before = sorted(path.name for path in site.folder.iterdir())
    result = site.sweep("--drain", "--dry-run", "--metrics", str(site.folder / "metrics"))
    assert "n1 would be excluded" in result.stdout
    assert site.calls("scontrol") == []
    new = {path.name for path in site.folder.iterdir()} - {*before, "calls"}
    assert [name for name in new if not name.startswith(f"slurmft-sweep-{os.getuid()}-")] == []


def test_idle_nodes_are_looked_at_by_short_jobs(site):
    site.stub("squeue", "echo '9|PENDING||n3'")
    site.look("n1", Status.CRITICAL, Status.OK)
    for node in ("n1", "n3"):
        path = site.results / f"{node}.json"
        value = json.loads(path.read_text())
        for look in value["checkups"]:
            look["at"] -= 5000
        path.write_text(json.dumps(value))
    result = site.sweep("--check-idle", "50%", "--partition", "all")
    (call,) = site.calls("sbatch")
    assert "--nodelist=n1 " in call, result.stdout
    site.sweep("--check-idle", "1")
    assert len(site.calls("sbatch")) == 1, "one waits already"
    site.calls_file.unlink()
    site.sweep("--test", "5")
    assert "--partition=all" in call
    assert f"--config {site.health}" in call
    assert len(site.calls("sinfo")) + len(site.calls("squeue")) == 2


def test_the_metrics_are_readable_by_everybody(site):
    path = site.folder / "slurmft.prom"
    site.sweep("--metrics", str(path))
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    assert 'slurmft_sweep_nodes_checked{condition="sick"} 1.0\n' in text
    assert "slurmft_sweep_excluded 1.0\n" in text
    for line in text.splitlines():
        assert line.startswith(("# HELP slurmft_", "# TYPE slurmft_", "slurmft_"))
    assert metrics_text(SweepReport()).splitlines()[2] == "slurmft_sweep_slurm_up 0.0"


def test_results_that_cannot_be_read_are_a_problem_and_not_a_nodes_fault(site):
    (site.results / "n3.json").write_text("{")
    (site.results / "n5.json").write_text('{"format": 99}')
    result = site.sweep()
    assert site.held() == ["n1"]
    assert result.stdout.count("PROBLEM: ") == 2


def test_the_report_for_scripts(site):
    found = json.loads(site.sweep("--json").stdout)
    assert (found["format"], found["exit_code"], found["nodes"]) == (1, 2, 4)
    assert [each["node"] for each in found["sick"]] == ["n1"]


class Switch:
    """A dead-man switch."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        switch = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                switch.asked.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def switch() -> Iterator[Switch]:
    found = Switch()
    thread = Thread(target=found.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def test_the_heartbeat_is_sent_only_when_the_cluster_was_seen(site, switch):
    url = site.folder / "url"
    url.write_text(f"http://127.0.0.1:{switch.server.server_address[1]}/alive\n")
    site.sweep("--heartbeat-url-file", str(url))
    assert switch.asked == ["/alive"]
    site.stub("sinfo", 'echo "Unable to contact slurm controller" >&2; exit 1')
    site.sweep("--heartbeat-url-file", str(url))
    assert switch.asked == ["/alive"]


@pytest.mark.parametrize("text", ["", "ftp://x", "http://a b", "file:///etc/passwd"])
def test_what_is_no_url_is_refused(tmp_path, text):
    path = tmp_path / "url"
    path.write_text(text)
    with pytest.raises(UsageError):
        url_in(path)


def test_a_sweep_that_hangs_is_ended(site):
    site.stub("sinfo", f"touch {site.folder}/begun; sleep 15")
    began = time.monotonic()
    result = site.sweep("--limit", "2")
    assert result.returncode == 75
    assert "took longer than 2 s" in result.stderr
    assert time.monotonic() - began < 10 * slowness()


def test_two_at_once_exclude_each_other(tmp_path):
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}

    def second() -> int:
        try:
            bounded(lambda: 5, limit_s=1, name="x", environment=environment)
        except StorageUnavailable:
            return 7
        return 8

    assert bounded(second, limit_s=10, name="x", environment=environment) == 7
    assert bounded(lambda: 5, limit_s=10, name="x", environment=environment) == 5


def test_links_with_the_names_of_locks_are_passed_over(tmp_path):
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / f"x-{os.getuid()}-a").symlink_to(tmp_path / "target")
    assert bounded(lambda: 3, limit_s=1, name="x", environment={"XDG_RUNTIME_DIR": str(tmp_path)}) == 3
    assert sum(path.is_dir() and not path.is_symlink() for path in tmp_path.glob("x-*")) == 1


FACTS: dict[str, Any] = {
    "n1|idle|none": ("IDLE", True, True, ""),
    "n1|IDLE~|none": ("IDLE", True, True, ""),
    "n1|idle*|Not responding": ("IDLE", False, False, "Not responding"),
    "n1|mixed-|a|b": ("MIXED", True, False, "a|b"),
    "n1|drained*|slurmft: x": ("DRAINED", False, False, "slurmft: x"),
    "n1|down$|maint": ("DOWN", False, False, "maint"),
}


@of_each(line=FACTS)
def test_a_line_of_sinfo(line):
    (found,) = parse_facts(f"banner\n\n{line}\nn1|down|again\n").values()
    assert (found.state, found.usable, found.is_idle, found.reason) == FACTS[line]


@of_each(why__reason__since=[("slurmft: a|b|1795423427", "slurmft: a|b", 1795423427.0), ("none|Unknown", "", None),
     ("x|N/A", "x", None), ("a|b", "a|b", None), ("|", "|", None),
     ("x|" + 400 * "9", "x|" + 400 * "9", None)])  # fmt: skip
def test_since_when_a_node_has_its_reason(why, reason, since):
    (found,) = parse_facts(f"n1|drained|{why}\n").values()
    assert (found.reason, found.since) == (reason, since)


def test_nodes_that_are_looked_at_already():
    text = "1|RUNNING|n1|(null)\n2|PENDING||n[2-3]\n3|PENDING||(null)\nerror: x\n4|PENDING||n[9-1]\n"
    assert parse_under_test(text) == {"n1", "n2", "n3"}


def test_a_probe_that_waits_in_a_hidden_partition_is_seen(monkeypatch):
    def squeue(argv, **_):
        return "7|PENDING||n4\n" if "-a" in argv else ""

    monkeypatch.setattr(slurm, "run", squeue)
    assert slurm.nodes_under_test() == {"n4"}


def test_the_look_is_quoted_once():
    argv = probe_argv(["n1"], ["python", "-m", "x", "/a b/it's"], 5)
    assert argv[-1] == "--wrap=python -m x '/a b/it'\"'\"'s'"
    argv = probe_argv(["n1", "n2"], ["python", "/a b"], 5, partition="all", qos="low")
    assert argv[-1] == "--wrap=srun --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 python '/a b'"
    assert {"--nodelist=n1,n2", "--nodes=2", "--partition=all", "--qos=low", "--nice=10000"} <= set(argv)


def test_switches_of_nodes():
    tree = "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s2 Level=1 Nodes=n[1-4] Switches=s[0-1]\n"
    assert parse_switches(tree + "BlockName=b1 BlockIndex=0 Nodes=g[08-09] BlockSize=2\nNodes=x SwitchName=\n") == {
        "n1": "s0", "n2": "s0", "g08": "b1", "g09": "b1"
    }  # fmt: skip
    assert parse_switches("No topology information available\nSwitchName=s Nodes=n[9-1]\n") == {}


@pytest.mark.parametrize("given", ["51%", "0%", "1001", "-1", "x", "5%%", "%", "1e3"])
def test_more_than_half_of_the_nodes_are_not_checked_at_a_time(site, given):
    result = site.sweep("--check-idle", given)
    assert result.returncode == 2
    assert "neither a number of nodes up to 1000 nor a share from 1% to 50%" in result.stderr


def forge_lost_run(folder: Path, owner: int) -> None:
    """A run whose job 5 is gone without a verdict, as its owner writes it by hand."""
    folder.mkdir(parents=True)
    written = {
        "config.yaml": f"command: x\nrun_folder: {folder}\n", "job.sh": "#!/bin/sh\ntouch /canary\n",
        "owner.json": json.dumps({"format": 1, "job": "5", "restart": 0, "generation": 1, "cluster": "slurm",
                                  "host": "n1", "pid": 1}),
        "jobs.json": json.dumps({"format": 1, "jobs": ["5"]}),
        "journal.jsonl": json.dumps({"format": 1, "at": "2026-01-01T00:00:00+00:00", "attempt": "5.0.0",
                                     "event": "attempt started", "folder": "/tmp"}) + "\n",
    }  # fmt: skip
    for name, text in written.items():
        (folder / name).write_text(text)
    (folder / "attempts").mkdir()
    os.utime(folder / "journal.jsonl", (1, 1))  # long ago by the file server's clock, too
    for path in (folder, *folder.iterdir()):
        os.chown(path, owner, owner)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("verb", [["sweep"], ["requeue", "--rescue"]])
def test_root_submits_nothing_of_a_run_that_it_does_not_own(site, verb):
    """It once became a job with user id 0."""
    forge_lost_run(site.folder / "runs" / "forged\x1b[2J", 4712)
    forge_lost_run(site.folder / "runs" / "in a place of all", 0)  # root's, but others could replace it: below /tmp
    result = site.sweep() if verb == ["sweep"] else site.run(*verb)
    assert site.calls("sbatch") == site.calls("scontrol") == site.calls("squeue") == [], result.stdout + result.stderr
    told = result.stdout + result.stderr
    assert "left alone: 1 folders of other users (no account that can log in): user id 4712: forged\\x1b[2J" in told
    assert "others than root may write to /tmp" in told


def test_a_lost_run_of_the_callers_own_is_submitted_again(site, monkeypatch):
    """So that the test above would see it."""
    forge_lost_run(site.folder / "runs" / "own", os.getuid())
    monkeypatch.setattr(RunFolder, "refuse_replaceable", lambda _run: None)
    monkeypatch.setenv("PATH", f"{site.bin}:/usr/bin:/bin")
    found = rescue_below(site.folder / "runs", "me")
    assert [line.rpartition(" ")[2] for line in found.done] == ["77"]
    assert site.calls("sbatch")[-1].endswith("own/job.sh")


@pytest.mark.parametrize("below", ["me", "me/project"])
def test_a_lost_run_in_a_folder_of_its_user_is_submitted_again(site, monkeypatch, below):
    forge_lost_run(site.folder / "runs" / below / "own", os.getuid())
    (site.folder / "runs" / "me" / "myself").symlink_to(".")
    monkeypatch.setattr(RunFolder, "refuse_replaceable", lambda _run: None)
    monkeypatch.setenv("PATH", f"{site.bin}:/usr/bin:/bin")
    found = rescue_below(site.folder / "runs", "me")
    assert [line.rpartition(" ")[2] for line in found.done] == ["77"]
    assert [call.rpartition(" ")[2] for call in site.calls("sbatch")] == [
        str(site.folder / "runs" / below / "own/job.sh")
    ]
    assert f'"run": "{below}/own"' in site.run("status", "--json").stdout


@pytest.mark.parametrize(("user_id", "is_submitted"), [(os.getuid(), False), (os.getuid() + 1, True)])
def test_another_users_job_with_the_same_id_is_not_the_runs(site, monkeypatch, user_id, is_submitted):
    """Slurm gives ids again after its state was lost."""
    forge_lost_run(site.folder / "runs" / "own", os.getuid())
    monkeypatch.setattr(RunFolder, "refuse_replaceable", lambda _run: None)
    monkeypatch.setenv("PATH", f"{site.bin}:/usr/bin:/bin")
    site.stub("squeue", f'[[ "$*" == *" -j 5 "* ]] && echo "5|RUNNING|None|n1|n1|1|2|3:00|low|{user_id}"; exit 0')
    assert bool(rescue_below(site.folder / "runs", "me").done) is is_submitted
    assert bool(site.calls("sbatch")) is is_submitted
