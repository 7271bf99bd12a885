"""The time between two attempts: while the supervisor decides and waits, its loop takes agents in and keeps them, the
run folder hears of it, and a signal that came too late for one attempt stops the next one.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import WITHIN_S, slowness, until

from slurmft.config.run import RunConfig
from slurmft.ipc.channel import connect
from slurmft.ipc.messages import Hello, Ping
from slurmft.policy.verdict import Cause, Verdict
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import guardian
from slurmft.supervisor import run as run_module
from slurmft.supervisor.cluster import LocalCluster, Start
from slurmft.supervisor.crew import Crew
from slurmft.supervisor.run import Attempts
from slurmft.system.files import read_bytes, read_json

TOO_LATE = signal.SIGUSR2


class WithoutAgents(LocalCluster):
    """Agents connect later, by themselves."""

    async def start_agents(self, config: RunConfig, log_folder: Path) -> list[asyncio.subprocess.Process]:
        return []


class ShortAttempt:
    """Fails at once; a signal comes when it has."""

    def __init__(self, _config: RunConfig, start: Start, _sender: object, crew: Crew) -> None:
        self._start, self._crew = start, crew
        self.stops = SimpleNamespace(planned=None, ends_at_s=None, on_own_signal=lambda _name: None)

    async def run(self) -> Verdict:
        with self._crew.working_for(self, self._start):
            await self._crew.muster(self._start.cluster)
        guardian._note(TOO_LATE, None)
        return Verdict(cause=Cause.WORKER_ERROR, reason="as planned")

    def ping(self) -> Ping:
        return Ping()

    def on_silence(self, *_: object) -> None:
        pass


@pytest.fixture
def start(tmp_path: Path) -> Start:
    run, thread = RunFolder(tmp_path / "run"), FolderThread()
    run.create()
    cluster = WithoutAgents({})
    run.attempt_folder(cluster.attempt)
    secret = read_bytes(run.new_secret(cluster.attempt))
    journal = PatientJournal(run.path, thread, attempt=str(cluster.attempt))
    return Start(cluster=cluster, run=run, journal=journal, thread=thread, generation=1, history=(), secret=secret)


@pytest.fixture
def between(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Has something done in the place of the decision that follows an attempt."""
    config = RunConfig.model_validate({
        "run_folder": str(start.run.path), "command": ["true"], "nodes": 1,
        "fault_tolerance": {"supervisor_lease_s": 2.0},
    })  # fmt: skip
    monkeypatch.setattr(run_module, "_runner_of", lambda _config: ShortAttempt)
    monkeypatch.setattr(run_module, "settle", lambda *_: None)

    def decide(work: Callable[[], None]) -> None:
        class Decision(SimpleNamespace):
            def act_on(self, _verdict: Verdict) -> int:
                work()
                return 0

        monkeypatch.setattr(run_module, "AttemptEnd", lambda *_, **__: Decision())
        with Attempts(config, SimpleNamespace(close=lambda: None)) as attempts:  # type: ignore[arg-type]
            assert attempts.run(start) == 0

    yield decide
    guardian._kept.clear()


def test_an_agent_that_connects_is_taken_in_and_hears_of_its_supervisor(start: Start, between: Any) -> None:
    """Nobody took connections then: an agent that was started again was given up before the next attempt had begun."""
    folder, heard = start.run.attempts / str(start.cluster.attempt), threading.Event()

    async def agent() -> None:
        where = read_json(folder / "control.json")
        assert where is not None
        channel = await connect("127.0.0.1", where["port"], start.secret)
        channel.send(Hello(node=0, host="127.0.0.1", pid=2, birth="b:1"))
        while (message := await channel.receive()) is not None and message["kind"] == "ping":
            heard.set()
        channel.close()

    thread = threading.Thread(target=lambda: asyncio.run(agent()), daemon=True)

    def decide() -> None:
        thread.start()
        assert heard.wait(WITHIN_S * slowness())

    between(decide)
    thread.join()


def test_the_run_folder_hears_of_the_supervisor_and_takes_what_the_journal_had_kept(start: Start, between: Any) -> None:
    """Nobody gave a sign of life then: after 30 s another job could take the run for abandoned."""
    alive = start.run.attempts / str(start.cluster.attempt) / "alive"

    def decide() -> None:
        until(alive.exists)
        os.utime(alive, (0, 0))
        until(lambda: alive.stat().st_mtime > 0)
        kept = start.journal.compose(EventName.STATE_KEPT, {"step": 7})
        start.thread.unwritten.append((kept, start.journal.line_of(kept)))
        until(lambda: not start.thread.unwritten)

    between(decide)
    assert EventName.STATE_KEPT in [event.event for event in start.run.journal().read_past()]


def test_a_signal_that_comes_too_late_for_an_attempt_is_kept_for_the_next(between: Any) -> None:
    between(lambda: None)
    heard: list[int] = []
    with guardian.hearing(heard.append):
        pass
    assert heard == [TOO_LATE]
