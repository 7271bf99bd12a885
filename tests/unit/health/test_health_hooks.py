"""Slurm's hooks: they fail open on every fault of their own, stay inside their time, touch nothing of other jobs."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import gpu_stand_in
import pytest
from of_each import of_each
from waiting import slowness

import slurmft
from slurmft.cli.main import cli
from slurmft.errors import SlurmUnavailable, UsageError
from slurmft.health import checker
from slurmft.health.checker import REFUSED, HealthChecker, clean, is_left_over, slurm_conf_lines
from slurmft.health.node import Process, Scene, process, running_jobs
from slurmft.scheduler.parsing import JobRecord

BIN = Path(slurmft.__file__).parents[1] / "bin"
CRITICAL = "user_probes: {bad: {command: [/bin/sh, -c, 'echo broken; exit 2'], is_hardware: true}}\n"
UNKNOWN = "user_probes: {mute: {command: [/bin/sh, -c, 'exit 3']}}\n"
NOTHING_ELSE = f"disabled: [{', '.join(['disk-write', 'clock', 'names', 'filesystems'])}]\n"


def hook(name: str, tmp_path: Path, *, script: Path = BIN, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "SLURMD_NODENAME": "n1"}
    return subprocess.run([script / f"slurmft-{name}"], env=clean | environment, capture_output=True, text=True,
                          timeout=60, check=False, stdin=subprocess.DEVNULL)  # fmt: skip


def python(tmp_path: Path, body: str) -> str:
    """An interpreter that does this instead."""
    path = tmp_path / "a python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "health.yaml"
        path.write_text(f"evidence_folder: {tmp_path}/evidence\n{text}")
        return str(path)

    return write


FAULTS = {
    "no interpreter": ("/no/such/python", "there is no /no/such/python"),
    "it crashes": ("echo Traceback >&2; exit 1", "it failed (1): Traceback"),
    "an unfinished line": ("printf 'no end'; exit 1", "it failed (1): no end"),
    "usage": ("exit 2", "it failed (2): "),
    "killed": ("kill -SEGV $$", "it failed (139): "),
    "no shell": ("exit 126", "it failed (126): "),
}


@pytest.mark.parametrize("name", ["prolog", "epilog", "healthcheck", "epilog-slurmctld"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_ours_is_a_line_and_no_failure(tmp_path, name, fault):
    body, words = FAULTS[fault]
    interpreter = body if body.startswith("/") else python(tmp_path, body)
    done = hook(name, tmp_path, SLURMFT_PYTHON=interpreter)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"slurmft-{name}: {words}")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("slurmft-hook")] == []


def test_without_a_virtual_environment_it_fails_open(tmp_path):
    (tmp_path / "x y" / "bin").mkdir(parents=True)
    for path in BIN.glob("slurmft-*"):
        shutil.copy(path, tmp_path / "x y" / "bin")
    done = hook("prolog", tmp_path, script=tmp_path / "x y" / "bin")
    assert done.returncode == 0
    assert "there is no" in done.stderr
    (tmp_path / "x y" / "bin" / "slurmft-hook").unlink()
    assert hook("prolog", tmp_path, script=tmp_path / "x y" / "bin").returncode == 0


def test_a_hook_that_hangs_is_left_behind_in_time(tmp_path):
    interpreter = python(tmp_path, "trap '' TERM; sleep 60")
    began = time.monotonic()
    done = subprocess.run([BIN / "slurmft-hook", "prolog", "1"], capture_output=True, text=True, timeout=30,
                          check=False, env={"SLURMFT_PYTHON": interpreter, "TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0
    assert "no answer within 1 s" in done.stderr
    assert time.monotonic() - began < 5 * slowness()
    assert list(tmp_path.glob("slurmft-hook*")) == []


@pytest.mark.parametrize(("body", "code"), [("exit 0", 0), (f"exit {REFUSED}", 1)], ids=["well", "refuses"])
def test_with_all_signals_blocked_it_ends_all_the_same(tmp_path, body, code):
    """As slurmctld starts its scripts."""

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())

    done = subprocess.run([BIN / "slurmft-hook", "prolog", "5"], timeout=20, check=False, preexec_fn=block,
                          env={"SLURMFT_PYTHON": python(tmp_path, body), "TMPDIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == code


def test_a_full_disk_for_temporary_files_does_not_stop_it(tmp_path):
    done = hook("prolog", tmp_path, SLURMFT_PYTHON=python(tmp_path, f"exit {REFUSED}"), TMPDIR="/no/such/folder")
    assert done.returncode == 1


def test_a_broken_configuration_refuses_no_node(tmp_path, config):
    done = hook("prolog", tmp_path, SLURMFT_HEALTH_CONFIG=config("gpu: {expectd: 8}"))
    assert done.returncode == 0
    assert "did you mean" in done.stderr or "it failed (2)" in done.stderr


def test_a_sick_node_is_written_down_and_refused_only_where_that_is_wanted(tmp_path, config):
    results = tmp_path / "results"
    text = f"results_folder: {results}\n{NOTHING_ELSE}{CRITICAL}"
    assert hook("prolog", tmp_path, SLURMFT_HEALTH_CONFIG=config(text)).returncode == 0
    kept = json.loads((results / "n1.json").read_text())["checkups"][0]
    assert kept["context"] == "prolog"
    assert [each["status"] for each in kept["results"] if each["name"] == "bad"] == ["CRITICAL"]
    evidence = json.loads((tmp_path / "evidence" / "n1.evidence.json").read_text())
    assert [each["evidence"] for each in evidence["results"] if each["name"] == "bad"] == [["broken"]]
    done = hook("prolog", tmp_path, SLURMFT_HEALTH_CONFIG=config(text + "hooks: {prolog_refuses: true}\n"))
    assert (done.returncode, done.stderr) == (
        1, "slurmft-prolog: refused: slurmft: [hardware_problem] bad: broken\n",
    )  # fmt: skip


def test_the_lines_for_slurm_conf(tmp_path):
    lines = slurm_conf_lines(BIN)
    named = [Path(line.partition("=")[2]) for line in lines.splitlines() if "=/" in line]
    assert len(named) == 4
    assert all(os.access(path, os.X_OK) for path in named)
    with pytest.raises(UsageError, match="slurmft-healthcheck"):
        slurm_conf_lines(tmp_path)


# ---- the epilog's cleaning, on a tree that stands for /proc ----


UID = 4321


def add(root: Path, pid: int, *, job: str = "", cgroup: str = "0::/", parent: int = 1, started: int = 50,
        title: str = "python", uid: int = UID) -> None:  # fmt: skip
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({title[:15]}) S {parent} {' '.join(['0'] * 17)} {started} 0")
    (folder / "comm").write_text("slurmstepd\n" if title.startswith("slurmstepd") else title)
    (folder / "cmdline").write_text(f"{title}\0")
    (folder / "environ").write_text(f"A=1\0SLURM_JOB_ID={job}\0B=2\0" if job else "A=1\0")
    (folder / "cgroup").write_text(f"{cgroup}\n")
    if os.geteuid() == 0:
        os.chown(folder, uid, uid)


@pytest.fixture
def node(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "uptime").write_text("1000.0 1.0\n")
    return Scene(node="n1", now=time.time(), root=tmp_path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="processes of another user are needed")


@needs_root
@pytest.mark.parametrize(
    ("facts", "is_ours"),
    [
        ({"job": "7"}, True),
        ({"cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0"}, True),
        ({"job": "7", "cgroup": "1:freezer:/slurm/uid_4321/job_8/step_0"}, False),
        ({"job": "8"}, False),
        ({"job": "77"}, False),
        ({}, False),
        ({"job": "7", "uid": 999}, False),
        ({"job": "7", "started": 200_000}, False),
        ({"job": "7", "parent": 20}, False),
        ({"job": "7", "parent": 30}, True),
    ],
    ids=["environment", "cgroup", "another's cgroup", "another job", "a longer number", "no job", "another user",
         "younger than the epilog", "below another job's step", "below a shell"],
)  # fmt: skip
def test_whose_a_process_is(node, facts, is_ours):
    add(node.root, 20, title="slurmstepd: [8.batch]", uid=0)
    add(node.root, 30, title="bash", job="7")
    add(node.root, 40, **facts)
    found = process(node.path("proc/40"))
    assert is_left_over(node, found, "7", UID, born_before=100_000) is is_ours


@needs_root
def test_while_a_step_of_the_job_lives_nothing_is_cleaned(node):
    add(node.root, 20, title="slurmstepd: [7.0]", uid=0)
    assert running_jobs(node) == {"7"}
    assert "still has a step here" in clean(node, "7", UID).skipped
    add(node.root, 22, title="slurmstepd", uid=UID)  # any user can give a process this name
    add(node.root, 23, title="slurmstepd: [9.batch]", uid=UID)
    assert running_jobs(node) == {"7"}
    assert not clean(node, "9", UID).skipped
    add(node.root, 21, title="slurmstepd", uid=0)  # one that is starting has no title yet
    assert running_jobs(node) is None
    assert clean(node, "9", UID).skipped


@pytest.mark.parametrize(("job", "uid"), [("7", 0), ("7", -1), ("", 5), ("7_1", 5), ("7; rm", 5)], ids=str)
def test_a_job_that_is_none_is_not_cleaned_up_after(node, job, uid):
    assert clean(node, job, uid).skipped


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin", **environment}, start_new_session=True,
                            user=UID, group=UID)  # fmt: skip


@needs_root
def test_the_epilog_ends_the_jobs_processes_and_no_others(tmp_path):
    mine, other, none = sleeper(SLURM_JOB_ID="987654321"), sleeper(SLURM_JOB_ID="987654322"), sleeper()
    try:
        scene = Scene(node="n1", now=time.time())
        time.sleep(0.02)
        deadline = time.monotonic() + 5
        while (found := process(Path(f"/proc/{mine.pid}"))) is None or found.name != "sleep":
            assert time.monotonic() < deadline
        ticks = checker._ticks_now(scene)
        assert found.started <= ticks + 100
        done = subprocess.run(
            [BIN / "slurmft-epilog"], check=False, capture_output=True, text=True, timeout=60,
            env={"SLURM_JOB_ID": "987654321", "SLURM_JOB_UID": str(UID), "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert mine.wait(5) == -signal.SIGKILL
        assert (other.poll(), none.poll()) == (None, None)
    finally:
        for each in (mine, other, none):
            each.kill()
            each.wait()


def test_a_process_of_the_same_number_is_another_one(node):
    add(node.root, 40, job="7")
    stranger = Process(pid=40, uid=UID, started=1, job="7", name="python")
    assert checker._end(node, stranger) is False


@needs_root
def test_a_cleaner_that_wakes_up_late_touches_nothing(tmp_path):
    mine = sleeper(SLURM_JOB_ID="987654323")
    try:
        times = iter([0.0, *[100.0] * 1000])
        found = clean(Scene(node="n1", now=time.time()), "987654323", UID, clock=lambda: next(times))
        assert found.processes == ()
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


@needs_root
def test_left_over_memory_goes_and_links_are_not_followed(node, tmp_path):
    keep = tmp_path / "precious"
    keep.mkdir()
    (keep / "data").touch()
    shm = node.path("dev/shm")
    shm.mkdir(parents=True)
    (shm / "torch_1_a_2").touch()
    (shm / "slurmft-4321-dead").mkdir()
    (shm / "slurmft-4321-dead" / "lock").touch()
    (shm / "slurmft-0-inside").mkdir()  # of a container in which the user is called root
    (shm / "slurmft-0-inside" / "lock").touch()
    (shm / "slurmft-4321-dead" / "link").symlink_to(keep)
    (shm / "slurmft-4321-link").symlink_to(keep)
    (shm / "dataset").touch()
    for path in [keep, *keep.iterdir(), *shm.rglob("*")]:
        os.chown(path, UID, UID, follow_symlinks=False)
    found = clean(node, "7", UID)
    assert {Path(path).name for path in found.paths} == {"torch_1_a_2", "slurmft-4321-dead", "slurmft-0-inside"}
    assert {path.name for path in shm.iterdir()} == {"slurmft-4321-link", "dataset"}
    assert (keep / "data").exists()


# ---- requeued jobs on the controller ----


def record(state: str, reason: str = "None", start: float | None = None) -> JobRecord:
    return JobRecord(job_id="5", state=state, reason=reason, nodes="", batch_host="", start=start, end=None,
                     limit_s=None, partition="low")  # fmt: skip


class World:
    """Slurm's answers one after the other; a clock that only sleeping moves."""

    def __init__(self, *answers: JobRecord | None) -> None:
        self.answers, self.now, self.begun = list(answers), 1000.0, []

    def follow(self) -> bool:
        return checker.follow(
            "5", look=lambda job: self.answers.pop(0) if len(self.answers) > 1 else self.answers[0],
            begin=lambda job, delay_s: self.begun.append((job, delay_s)), now=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("answers", "begins"),
    [
        ([record("COMPLETING"), record("PENDING", "BeginTime", 1121.0)], True),
        ([record("PENDING", "BeginTime", 1121.0)], True),
        ([record("COMPLETING"), record("PENDING", "None", 1121.0), record("PENDING", "BeginTime", 1121.0)], True),
        ([record("PENDING", "None", 1121.0)], False),
        ([record("PENDING", "BeginTime", 5000.0)], False),
        ([record("PENDING", "BeginTime", 1002.0)], False),
        ([record("PENDING", "BeginTime", None)], False),
        ([record("PENDING", "JobHeldUser", 1121.0)], False),
        ([record("PENDING", "Priority", 1121.0)], False),
        ([record("COMPLETING"), record("COMPLETED")], False),
        ([record("COMPLETING"), None], False),
        ([None], False),
        ([record("COMPLETING")], False),
        ([record("RUNNING")], False),
    ],
    ids=["completing, then waits", "waits", "for no reason at first", "never a reason",
         "put off on purpose", "begins at once anyway", "no time", "held",
         "waits for nodes", "ended", "forgotten", "unknown", "completes for ever", "runs"],
)  # fmt: skip
def test_which_jobs_begin_at_once(answers, begins):
    world = World(*answers)
    assert world.follow() is begins
    assert [(str(job), delay_s) for job, delay_s in world.begun] == ([("5", 2)] if begins else [])
    assert world.now <= 1000 + checker.FOLLOW_S + checker.LONGEST_PAUSE_S


def test_a_slurm_that_does_not_answer_is_told(monkeypatch):
    def silent(job, **_):
        raise SlurmUnavailable("no answer")

    monkeypatch.setattr(checker, "follow", silent)
    assert checker.follow_quietly("5") == "job 5 begins after Slurm's own wait: no answer"


# ---- for programs, and for scripts ----


def test_a_program_asks_for_the_nodes_health(tmp_path, config):
    found = HealthChecker(Path(config(CRITICAL)), only=("bad", "uptime")).check_health()
    assert found["healthy"] is False
    assert {each["name"]: each["status"] for each in found["checks"]} == {"uptime": "OK", "bad": "CRITICAL"}
    assert found["timestamp"].endswith("+00:00")


def test_a_checker_that_cannot_look_calls_the_node_neither_healthy_nor_critical(tmp_path, monkeypatch, config):
    typo = HealthChecker(only=("no such probe",)).check_health()
    alone = HealthChecker(Path(config(UNKNOWN)), only=("mute",)).check_health()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    for found in (typo, alone, HealthChecker().check_health()):
        assert (found["healthy"], found["status"], found["checks"][0]["status"]) == (False, "UNKNOWN", "UNKNOWN")


def test_a_check_that_cannot_look_says_nothing_beside_one_that_can(config):
    found = HealthChecker(Path(config(UNKNOWN)), only=("mute", "uptime")).check_health()
    assert (found["healthy"], found["status"]) == (True, "UNKNOWN")


@of_each(timeout_s=[0, -1, math.nan, math.inf, True, "5", 10**400])
def test_a_timeout_that_is_none_is_refused(timeout_s):
    with pytest.raises(UsageError, match="timeout_s"):
        HealthChecker().check_health(timeout_s)


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["--only", "uptime"], "", 0),
        (["--only", "bad"], CRITICAL, 2),
        (["--only", "nonsense"], "", 3),
        (["--nonsense"], "", 3),
        ([], "gpu: {expectd: 1}", 3),
    ],
    ids=["well", "critical", "no such probe", "usage", "configuration"],
)
def test_exit_codes_are_nagioss(config, capsys, arguments, text, code):
    argv = ["health", "--json", "--config", config(text), *arguments]
    try:
        found = cli.main(argv, standalone_mode=False)
    except click.ClickException as error:
        found = error.exit_code
    assert found == code
    if code in (0, 2):
        assert json.loads(capsys.readouterr().out)["format"] == 1


class TestDriverThatHangs:
    pytestmark = gpu_stand_in.needs_stand_in

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_prolog_refuses_the_node_where_it_may_wait_so_long(self, tmp_path, config, waits):
        library = gpu_stand_in.build(tmp_path / "nvml")
        node = gpu_stand_in.Node(tmp_path / "n1.gpus")
        node.set_driver(hang="nvmlInitWithFlags")
        hooks = "hooks: {prolog_refuses: true" + (", prolog_answer_s: 3}\n" if waits else "}\n")
        done = hook("prolog", tmp_path, SLURMFT_HEALTH_CONFIG=config(hooks + NOTHING_ELSE),
                    NVML_STAND_IN=str(node.path), LD_LIBRARY_PATH=str(library.parent))  # fmt: skip
        assert done.returncode == waits, done.stderr
        if waits:
            assert "refused: slurmft: [hardware_problem] gpu-count: what it asks hangs" in done.stderr


def test_a_hook_may_ask_for_more_time_and_gets_no_less_for_it(tmp_path):
    def run(words: str) -> subprocess.CompletedProcess[str]:
        interpreter = python(tmp_path, f"echo {words}; sleep 2; echo it hangs; exit {REFUSED}")
        environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "SLURMFT_PYTHON": interpreter}
        return subprocess.run([BIN / "slurmft-hook", "prolog", "1"], env=environment, capture_output=True, text=True,
                              timeout=60, check=False, stdin=subprocess.DEVNULL)  # fmt: skip

    longer = run("slurmft-hook-within 30")
    assert (longer.returncode, longer.stderr) == (1, "slurmft-prolog: refused: it hangs\n")
    for odd in ("slurmft-hook-within 0", "slurmft-hook-within 1", "slurmft-hook-within x9", "slurmft-hook-within 9x"):
        done = run(odd)
        assert (done.returncode, done.stderr) == (0, "slurmft-prolog: no answer within 1 s: nothing is done\n"), odd
