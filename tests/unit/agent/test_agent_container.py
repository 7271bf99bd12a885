"""The process outside of a container, and what the agent inside makes of it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmft.agent import container
from slurmft.agent.container import Outside, refuse_unusable, usable_environment
from slurmft.agent.container_outside import GREETING
from slurmft.errors import LaunchError
from slurmft.policy.container import Container

CONTAINER = Container(runtime="command", image="", mounts=(), workdir="/", python="python3", command=("bwrap",))
READS = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


def outside(*command: str, folders: str = "", **options: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "slurmft.agent.container_outside", "box /image", folders, "--", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, text=True, **pipes, **options)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_comes_in_by_the_pipe_and_the_command_outlives_it(name: str):
    with outside(sys.executable, "-c", READS) as process:
        assert process.stdout is not None and process.stdout.readline() == f"{GREETING}\n"
        process.send_signal(signal.Signals[name])
        assert process.stdout.readline() == f"{name}\n"
        assert process.poll() is None
        process.kill()
        assert process.stdout.read() == "", "the command sees the end of the pipe, and ends"


def test_the_command_itself_does_not_die_of_a_stops_signal():
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)}); print('lives')"
    process = outside(sys.executable, "-c", code)
    assert process.communicate(timeout=30) == ("lives\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        pytest.param(["true"], 0, "", id="done"),
        pytest.param(["sh", "-c", "exit 75"], 75, "", id="an agent's own code"),
        pytest.param(["sh", "-c", "exit 3"], 3, "box /image: ended with exit code 3 on n7", id="failed"),
        pytest.param(["sh", "-c", "kill -9 $$"], 137, "box /image: was ended by SIGKILL on n7", id="killed"),
        pytest.param(["/no/such/thing"], 127, "cannot be started on n7: '/no/such/thing': No such file", id="missing"),
        pytest.param(
            ["/etc/passwd"], 126, "cannot be started on n7: '/etc/passwd': Permission denied", id="no program"
        ),
    ],
)
def test_its_end_is_told(command: list[str], code: int, words: str):
    process = outside(*command, env={**os.environ, "SLURMD_NODENAME": "n7"})
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert words in errors if words else errors == ""
    assert "Traceback" not in errors


def test_it_makes_the_folders_and_leaves_out_what_is_for_another_python(tmp_path: Path):
    wanted = tmp_path / "a b" / "deep"
    process = outside("sh", "-c", 'echo "${PYTHONHOME-none}"', folders=str(wanted), env=dict(os.environ))
    assert process.communicate(timeout=30)[0] == "none\n"
    assert wanted.is_dir()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)


async def heard(reads: int, writes: int, *parts: bytes) -> tuple[list[str], bool, bool]:
    names: list[str] = []
    listener = Outside(names.append)
    for part in parts[:1]:
        os.write(writes, part)
    listener.listen(reads)
    for part in parts[1:]:
        os.write(writes, part)
        await asyncio.sleep(0.01)
    os.close(writes)
    for _ in range(100):
        await asyncio.sleep(0.01)
        if listener.gone.is_set() or not listener.is_heard:
            break
    return names, listener.is_heard, listener.gone.is_set()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param([b"slurmft 1\n"], ([], True, True), id="greeting and end"),
        pytest.param([b"slurmft 1\nSIGTERM\n"], (["SIGTERM"], True, True), id="a signal before anything is read"),
        pytest.param([b"slurmft 1\n", b"SIGT", b"ERM\nSIGUSR1\n"], (["SIGTERM", "SIGUSR1"], True, True), id="in parts"),
        pytest.param([b"slurmft 1\n", b"rubbish\xff\n"], ([], True, True), id="other words"),
        pytest.param([b"hello\nSIGTERM\n"], ([], False, False), id="someone else's input"),
        pytest.param([], ([], False, False), id="nothing"),
    ],
)
def test_only_a_process_that_has_greeted_is_heard_and_missed(pipe: tuple[int, int], parts: list[bytes], expected: Any):
    assert asyncio.run(heard(*pipe, *parts)) == expected


async def test_an_input_that_is_no_pipe_is_left_alone():
    listener = Outside(lambda name: None)
    with Path(os.devnull).open("rb") as nothing:
        listener.listen(nothing.fileno())
    assert listener.is_heard is False


NODE = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize("environment", [{}, {"SLURM_NODEID": "0"}, {"SLURMD_NODENAME": "n1"}])
def test_a_container_without_the_jobs_variables_is_refused(environment: dict[str, str]):
    with pytest.raises(LaunchError, match="container bwrap: it does not pass the environment on"):
        refuse_unusable(CONTAINER, "12.0.0", environment)


def test_an_agent_that_knows_its_node_is_taken():
    refuse_unusable(CONTAINER, "12.0.0", NODE)
    refuse_unusable(CONTAINER, "local-3.0.0", {})


def test_a_proc_of_other_process_ids_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getpid", lambda: 2)
    with pytest.raises(LaunchError, match="/proc shows those of the node"):
        refuse_unusable(CONTAINER, "12.0.0", NODE)


@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [
        pytest.param("n3", {"SLURM_STEP_NODELIST": "n[1-3]"}, ("2", "n3"), id="without variables of the task"),
        pytest.param("n3.cluster", {"SLURM_STEP_NODELIST": "n[1-3]"}, ("2", "n3"), id="a long name"),
        pytest.param("n3", {"SLURM_STEP_NODELIST": "n[1-3]", **NODE}, ("0", "n1"), id="with them"),
        pytest.param("other", {"SLURM_STEP_NODELIST": "n[1-3]"}, (None, None), id="an unknown name"),
        pytest.param("n3", {"SLURM_STEP_NODELIST": "n[1-"}, (None, None), id="a damaged list"),
        pytest.param("n3", {}, (None, None), id="nothing"),
    ],
)
def test_the_nodes_name_and_number(host: str, given: dict[str, str], expected: tuple[str | None, str | None]):
    found = usable_environment(given, host)
    assert (found.get("SLURM_NODEID"), found.get("SLURMD_NODENAME")) == expected


def test_a_folder_for_temporary_files_that_is_not_there_is_left_out(tmp_path: Path):
    given = {"TMPDIR": str(tmp_path / "gone"), "TEMP": str(tmp_path), "HOME": "/gone"}
    assert usable_environment(given, "n1") == {"TEMP": str(tmp_path), "HOME": "/gone"}


FIRST = """
import os, signal, sys, time
from slurmft.agent import container as inside
inside.become_first_process()
{then}
"""


def as_first(then: str) -> subprocess.Popen[str]:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", FIRST.format(then=then)]
    return subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def namespaces() -> None:
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces of process ids can be made here")


@pytest.mark.usefixtures("namespaces")
def test_process_ids_of_its_own_are_known():
    assert as_first("print(inside.has_own_process_ids())").communicate(timeout=30)[0] == "True\n"


@pytest.mark.usefixtures("namespaces")
def test_the_first_process_reaps_orphans_and_ends_as_the_agent_does():
    then = """
print(os.getpid() > 1)
if os.fork() == 0:
    if os.fork() == 0: time.sleep(0.05); os._exit(0)   # its parent is gone by then
    os._exit(0)
os.wait(); time.sleep(0.15)
print([n for n in os.listdir("/proc") if n.isdigit() and " Z " in open(f"/proc/{n}/stat").read()])
sys.exit(7)"""
    process = as_first(then)
    assert process.communicate(timeout=30) == ("True\n[]\n", "")
    assert process.returncode == 7


@pytest.mark.usefixtures("namespaces")
def test_the_first_process_hands_signals_on():
    then = """
signal.signal(signal.SIGTERM, lambda *_: (print("heard"), sys.exit(3)))
os.kill(1, signal.SIGTERM); time.sleep(5)"""
    process = as_first(then)
    assert process.communicate(timeout=30)[0] == "heard\n"
    assert process.returncode == 3


def test_any_other_process_stays_what_it_is():
    before = os.getpid()
    container.become_first_process()
    assert os.getpid() == before
