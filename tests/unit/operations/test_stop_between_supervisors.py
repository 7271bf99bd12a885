"""A stop that comes while no supervisor owns the run: its guardian is about to start another one, and must find it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.operations import control
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Owner, RunFolder
from slurmft.system import processes


@pytest.fixture
def guardian() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def started(run: RunFolder, process: subprocess.Popen[bytes]) -> None:
    birth = processes.birth_of(process.pid)
    run.journal().append(EventName.STARTED_HERE, process=process.pid, birth=birth, host=processes.me().host)


@pytest.mark.parametrize("owned", [True, False], ids=["its supervisor was killed", "it has not begun yet"])
def test_a_stop_waits_for_the_next_supervisor(tmp_path: Path, guardian: subprocess.Popen[bytes], owned: bool) -> None:
    run = RunFolder(tmp_path / "runs" / "a")
    run.create()
    if owned:
        with subprocess.Popen([sys.executable, "-c", ""]) as killed:
            pass
        host = processes.me().host
        run.take_over(
            Owner(job="local-1", restart=0, generation=1, cluster="local", host=host, pid=killed.pid, birth="1")
        )
    started(run, guardian)
    assert control.is_alive(run)
    assert "will save and end" in control.stop(run, "me")
    assert run.see_request("KILL") == "me"
    guardian.kill()
    guardian.wait()
    assert not control.is_alive(run)
    assert "is not running" in control.stop(run, "me")
    assert run.see_request("KILL") is None
