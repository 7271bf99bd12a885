"""What fits into a node's memory, as /proc, the filesystem and control groups of both versions tell."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.system.processes import (
    MARK_VARIABLE,
    fits,
    kill_left,
    owners_of_loopback_port,
    session_members,
    without_collections,
)

GIB = 1 << 30
LITTLE = 1 << 20


def machine(root: Path, *, available_kib: int = 1 << 30, groups: str = "", files: dict[str, str] | None = None) -> Path:
    """A root folder with /proc and /sys as a kernel would show them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  {1 << 30} kB\nMemAvailable:   {available_kib} kB\nOdd line\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        "memory/slurm/job_1/memory.limit_in_bytes": f"{limit}\n",
        "memory/slurm/job_1/memory.usage_in_bytes": f"{usage}\n",
        "memory/slurm/job_1/memory.stat": f"cache 5\ntotal_inactive_file {inactive}\n",
    }


def v2(limit: str, usage: int, inactive: int = 0, where: str = "slurm/job_1") -> dict[str, str]:
    return {
        f"{where}/memory.max": f"{limit}\n",
        f"{where}/memory.current": f"{usage}\n",
        f"{where}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


V1, V2 = "4:memory:/slurm/job_1\n1:cpu:/\n", "0::/slurm/job_1\n"


@pytest.mark.parametrize(
    ("described", "needed", "reason"),
    [
        pytest.param({}, LITTLE, "", id="no groups"),
        pytest.param({"available_kib": 60 << 20}, 8 * GIB, "", id="what is free less a share"),
        pytest.param({"available_kib": 60 << 20}, 9 * GIB, "this node has 60.00 GiB free of 1024.00", id="too much"),
        pytest.param({"groups": V1, "files": v1(4 * GIB, GIB)}, 2 * GIB, "", id="version 1, room"),
        pytest.param({"groups": V1, "files": v1(4 * GIB, GIB)}, 3 * GIB,
                     "the control group /slurm/job_1 has 3.00 GiB free of 4.00", id="version 1, none"),
        pytest.param({"groups": V1, "files": v1(4 * GIB, 4 * GIB, 3 * GIB)}, 2 * GIB, "", id="version 1, page cache"),
        pytest.param({"groups": V1, "files": v1((1 << 63) - 4096, GIB)}, GIB, "", id="version 1, no limit"),
        pytest.param({"groups": V2, "files": v2(str(4 * GIB), GIB)}, 2 * GIB, "", id="version 2, room"),
        pytest.param({"groups": V2, "files": v2(str(4 * GIB), 3 * GIB)}, GIB, "/slurm/job_1 has 1.00 GiB free",
                     id="version 2, none"),
        pytest.param({"groups": V2, "files": v2(str(4 * GIB), 4 * GIB, 2 * GIB)}, GIB, "", id="version 2, page cache"),
        pytest.param({"groups": V2, "files": v2("max", GIB)}, GIB, "", id="version 2, no limit"),
        pytest.param({"groups": V2, "files": v2("max", GIB) | v2(str(GIB), GIB, where="slurm")}, GIB,
                     "0.00 GiB free of 1.00", id="version 2, the parent's limit"),
        pytest.param({"groups": V2, "files": v2(str(GIB), GIB, where=".")}, GIB, "0.00 GiB free",
                     id="version 2, inside of a container"),
        pytest.param({"groups": "nonsense\n::\n", "files": v2("soon", GIB)}, GIB, "", id="nonsense"),
    ],
)  # fmt: skip
def test_what_fits(tmp_path, described, needed, reason, monkeypatch):
    root = machine(tmp_path / "root", **described)
    plenty = type("Status", (), {"f_bavail": 1 << 30, "f_frsize": 4096, "f_blocks": 1 << 30})
    monkeypatch.setattr("os.statvfs", lambda _: plenty)
    said = fits(needed, tmp_path, root=root)
    assert (reason in said) if reason else said == ""


def test_the_folder_itself_is_asked(tmp_path):
    assert fits(1 << 60, tmp_path).startswith("1073741824.00 GiB are needed and")
    assert "none (No such file or directory) has 0.00 GiB free" in fits(1, tmp_path / "none")


def test_a_machine_that_says_nothing_limits_nothing(tmp_path):
    assert fits(0, tmp_path, root=tmp_path / "none") == ""


def test_this_machine_has_room_for_a_little():
    assert fits(LITTLE, Path("/dev/shm")) == ""


# --- Who listens at a port, as the kernel shows it ---


PLACES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"),
          (socket.AF_INET6, "::ffff:127.0.0.1")]  # fmt: skip


@pytest.mark.parametrize(("family", "address"), PLACES, ids=[address for _, address in PLACES])
def test_a_listener_that_answers_at_loopback(family, address):
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        assert owners_of_loopback_port(port) == set(), "it does not listen yet"
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            assert owners_of_loopback_port(port) == {os.geteuid()}


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")])
def test_a_listener_elsewhere_is_none(family, address):
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        assert owners_of_loopback_port(listener.getsockname()[1]) == set()


# --- Importing without the garbage collector ---


def test_the_collector_is_on_again_also_after_an_error_and_leaves_the_imported_alone():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.fixture
def started():
    """Start a program that leads a session and has one that does so as well; both sleep."""
    running = []

    def start(**environment: str) -> tuple[subprocess.Popen[bytes], int]:
        nested = "import subprocess, sys; print(subprocess.Popen(['sleep', '99']).pid, flush=True); sys.stdin.read()"
        first = subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 start_new_session=True, env={**os.environ, **environment})  # fmt: skip
        running.append(first)
        return first, int(first.stdout.readline())

    yield start
    for first in running:
        for pid in session_members(first.pid):
            os.kill(pid, 9)
        first.communicate()


def test_what_a_session_leaves_is_killed_without_its_leader(started):
    (first, child), (_, other) = started(), started()
    first.kill()
    first.wait()
    assert session_members(first.pid) == {child}
    kill_left({first.pid: "none has it"}, within_s=10.0)
    assert session_members(first.pid) == set()
    os.kill(other, 0)


@pytest.mark.parametrize(
    ("environment", "is_killed"),
    [
        pytest.param({MARK_VARIABLE: "7-1"}, True, id="of the worker"),
        pytest.param({MARK_VARIABLE: "7-2"}, False, id="of another"),
        pytest.param({MARK_VARIABLE: ""}, False, id="outlives it"),
        pytest.param({MARK_VARIABLE: "7-1", "SLURM_JOB_ID": "8"}, False, id="in a job of its own"),
    ],
)
def test_what_a_worker_started_in_other_sessions_is_killed_by_its_mark(started, monkeypatch, environment, is_killed):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first, _ = started(**environment)
    kill_left({1 << 22: "7-1"}, within_s=10.0)
    assert (session_members(first.pid) == set()) == is_killed
