import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
from waiting import until
from worker_variable import set_settings

from slurmft.checkpoint.write_requests import WriterClient
from slurmft.ipc.pages import PAGE_VARIABLE, Page
from slurmft.system import files, processes


@pytest.fixture(scope="session", autouse=True)
def synchronous_saves() -> Iterator[None]:
    """A save is durable when it returns, unless a test says otherwise; also for what fixtures of a module start."""
    with pytest.MonkeyPatch.context() as environment:
        set_settings(environment, checkpoint={"async_save": False})
        yield


@pytest.fixture(autouse=True)
def own_log_records() -> Iterator[None]:
    """What a session or a supervisor does to its process's log for good: here until the end of the test.

    A session marks records with its rank. A supervisor has a thread take over the root's handlers, which would
    go on to hand every record to the tests' own handler, a second time.
    """
    before, root = logging.getLogRecordFactory(), logging.getLogger()
    raises = logging.raiseExceptions
    yield
    logging.setLogRecordFactory(before)
    logging.raiseExceptions = raises
    root.handlers = [one for one in root.handlers if not isinstance(one, QueueHandler)]


@pytest.fixture(autouse=True)
def own_orphans() -> Iterator[None]:
    """An agent adopts orphans for good: those of a later test would stay as zombies, which nobody collects."""
    yield
    processes._prctl(processes._PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition: the writer prunes, and frees what a failed save took, after its save has returned."""

    return until


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For sessions: no group to join, and signal handlers that end with the test."""
    from slurmft.worker.signals import StopSignal

    for name in list(os.environ):
        if name.startswith(("SLURM", "SLURMFT_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    # without the shield for this process's children, which would stay for good
    monkeypatch.setattr(StopSignal, "_installed", StopSignal())
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page as the agent sees it; a session that starts finds it, and its module's ``INTERVAL_STEPS``."""
    page = Page.create(tmp_path / "rank-0", rank=0, generation=1)
    monkeypatch.setenv(PAGE_VARIABLE, str(tmp_path / "rank-0"))
    set_settings(monkeypatch, checkpoint={"interval_steps": request.module.INTERVAL_STEPS})
    yield page
    page.close()


@pytest.fixture
def pages_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages live in /dev/shm, where an agent tidies up after dead ones: keep out of other people's way."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(files, "SHARED_MEMORY", memory)


@pytest.fixture
def clients() -> Iterator[list[WriterClient]]:
    """Every client of a checkpoint writer that is put in is closed, and its process ended."""
    begun: list[WriterClient] = []
    yield begun
    for client in begun:
        pid = client.pid
        client.close(0)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
