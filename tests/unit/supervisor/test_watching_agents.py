"""How long the supervisor waits for a silent agent: agents of a large job report rarely."""

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slurmft.config.sections import FaultToleranceConfig
from slurmft.policy import life
from slurmft.policy.stop import longest_silence_s
from slurmft.policy.verdict import Cause
from slurmft.scheduler.parsing import SlurmJob
from slurmft.storage.journal import EventName
from slurmft.supervisor.attempt import AttemptRunner
from slurmft.supervisor.cluster import SlurmCluster
from slurmft.supervisor.crew import AttemptFolder, Crew
from slurmft.supervisor.guardian import log_signal
from slurmft.supervisor.stops import Machine
from slurmft.system.background import heard_awake

AGENTS = 2048


class Pool:
    """Agents that connect after the first look."""

    def __init__(self) -> None:
        self.links: dict[int, Any] = {}
        self.asked: list[float] = []
        self.second = asyncio.Event()

    def silent_for(self, seconds: float, now: float) -> list[Any]:
        self.asked.append(seconds)
        self.links = dict.fromkeys(range(AGENTS), SimpleNamespace(last_heard=now))
        if len(self.asked) == 2:
            self.second.set()
        return []

    def ping(self, ping: Any) -> None:
        pass


async def test_the_silence_that_is_allowed_follows_the_agents_that_have_connected() -> None:
    crew, pool = Crew.__new__(Crew), Pool()
    parts: dict[str, Any] = {
        "_config": SimpleNamespace(fault_tolerance=FaultToleranceConfig(agent_timeout_s=1.0)),
        "pool": pool, "_attempt": None,
    }  # fmt: skip
    for name, part in parts.items():
        setattr(crew, name, part)
    watching = asyncio.create_task(crew._watch())
    await asyncio.wait_for(pool.second.wait(), 10)
    watching.cancel()
    first, second = pool.asked
    assert first < second == longest_silence_s(AGENTS)


@pytest.mark.parametrize(("heard_s", "awake_s"), [(50.0, 70.0), (80.0, 100.0), (95.0, 100.0)])
def test_what_a_process_found_when_it_woke_up_was_heard_now(
    heard_s: float, awake_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert heard_awake(heard_s, 20.0) == awake_s


GONE, HERE = None, object()


@pytest.mark.parametrize(
    ("channels", "began", "told"),
    [
        pytest.param([GONE, GONE, GONE], True, [EventName.AGENTS_GONE], id="the step was ended"),
        pytest.param([GONE, HERE, GONE], True, [EventName.AGENT_LOST], id="others live"),
        pytest.param([GONE], True, [EventName.AGENT_LOST], id="the only one"),
        pytest.param([GONE, GONE], False, [EventName.AGENT_LOST], id="before workers were started"),
    ],
)
async def test_agents_that_go_together_are_the_end_of_their_step(
    channels: Sequence[object], began: bool, told: list[EventName]
) -> None:
    events: list[EventName] = []
    runner = watching(channels, began, events)
    await runner._on_disconnect(runner._pool.links[0])
    assert events == told
    assert runner.stops.over.is_set() == (told == [EventName.AGENTS_GONE])
    assert bool(runner._cluster.lost) == (told == [EventName.AGENT_LOST])


async def test_agents_that_have_ended_while_their_supervisor_was_stopped_are_blamed_for_nothing() -> None:
    events: list[EventName] = []
    runner = watching([GONE, HERE, GONE], True, events)
    runner._crew.has_outslept = True  # type: ignore[misc]
    await runner._on_disconnect(runner._pool.links[0])
    assert events == [EventName.AGENTS_GONE]
    assert [link.dropped for link in runner._pool.links.values()] == [True, False, True]
    assert not runner._cluster.lost


@pytest.mark.parametrize(
    ("channels", "lost"),
    [
        pytest.param([GONE, GONE, GONE], [], id="the step was ended"),
        pytest.param([GONE, HERE, GONE], ["n0", "n2"], id="others live"),
    ],
)
async def test_agents_that_go_together_in_the_start_of_workers_blame_no_node(
    channels: Sequence[object], lost: list[str]
) -> None:
    """A supervisor that was suspended for longer than their lease, just then, accused all of its nodes."""

    runner = watching(channels, True, [])
    runner._pool.members = list(runner._pool.links.values())
    await runner._lose_the_gone("the agent on n0 is not connected")
    assert list(runner.stops.state.lost) == lost
    assert bool(runner.stops.state.problem) == (not lost)


def watching(channels: Sequence[object], began: bool, events: list[EventName]) -> AttemptRunner:
    """The part of an attempt that deals with lost agents; these have such connections."""
    links = [
        SimpleNamespace(node=node, host=f"n{node}", channel=channel, dropped=False, lender="", leaving=False)
        for node, channel in enumerate(channels)
    ]

    async def at_once(_: object) -> None:
        return

    def drop(link: SimpleNamespace) -> None:
        link.dropped = True

    runner = AttemptRunner.__new__(AttemptRunner)
    stops = Machine(life.Rules(), {
        life.NoteAgentsGone: lambda _: events.append(EventName.AGENTS_GONE), life.EndVictims: lambda _: None,
    })  # fmt: skip
    if began:
        stops.feed(life.Began())
    parts: dict[str, Any] = {
        "_pool": SimpleNamespace(links=dict(enumerate(links)), members=[], drop=drop),
        "_crew": SimpleNamespace(
            reconnected=at_once, reviver=SimpleNamespace(lost=lambda *_, **__: None), has_outslept=False
        ),
        "stops": stops, "_cluster": SimpleNamespace(lost=set()),
        "_background": SimpleNamespace(start=lambda work: work.close()),
        "_journal": SimpleNamespace(append=lambda event, **_: events.append(event)),
    }  # fmt: skip
    for name, part in parts.items():
        setattr(runner, name, part)
    return runner


# --- At which names and addresses the agents of other nodes look for their supervisor ---


INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "ib0": [(socket.AF_INET6, "fd00:6::7"), (socket.AF_INET6, "fe80::1%ib0"), (socket.AF_PACKET, "00:00:00:00:00:00")],
    "eth0": [(socket.AF_INET, "10.0.0.7"), (socket.AF_INET6, "2001:db8::7")],
}


def test_every_address_that_other_nodes_may_reach_of_both_families(monkeypatch):
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    cluster = SlurmCluster(SlurmJob(job_id="7", restart=0, nodes="n1", node_count=1, partition="p"))
    assert cluster.control_hosts() == ["n1", "10.0.0.7", "fd00:6::7", "2001:db8::7"]


# --- Why agents could not start, by what srun, a container's runtime and agents have left in the attempt's folder ---


ENDED = "srun: error: n1: task 0: Exited with exit code 1\n"
OUTSIDE = "slurmft: container bwrap /image: ended with exit code 1 on n1\n"


def folder(path: Path) -> AttemptFolder:
    start: Any = SimpleNamespace(run=SimpleNamespace(attempts=path), journal=None, thread=None, generation=1,
                                 lease=None, cluster=SimpleNamespace(attempt="7.0.0"))  # fmt: skip
    (path / "7.0.0").mkdir()
    return AttemptFolder(start)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param(ENDED, f"; srun: {ENDED.strip()}", id="srun alone"),
        pytest.param("slurmstepd: error: execve(): python: No such file\n" + ENDED, f"; srun: {ENDED.strip()}",
                     id="slurmstepd"),
        pytest.param("bwrap: Can't find source path /x\n" + OUTSIDE + ENDED,
                     f"; bwrap: Can't find source path /x; {OUTSIDE.strip()}", id="a runtime"),
        pytest.param("slurmft 12:00:00 WARNING late\n" + OUTSIDE + OUTSIDE + ENDED, f"; {OUTSIDE.strip()}",
                     id="the same of each node, and a log"),
        pytest.param("slurmft: container x: no torch\n  hint: install it\n" + ENDED,
                     "; slurmft: container x: no torch; hint: install it", id="with a hint"),
        pytest.param("make `/b/rootfs` private: No such file\n" + ENDED, "; make `/b/rootfs` private: No such file",
                     id="words of no one we know"),
    ],
)  # fmt: skip
def test_the_reason_is_found(tmp_path: Path, errors: str, expected: str):
    attempt = folder(tmp_path)
    (attempt.path / "srun.err").write_text(errors)
    assert attempt.last_words() == expected


def test_without_slurm_the_agents_log_is_read(tmp_path: Path):
    attempt = folder(tmp_path)
    (attempt.path / "agents.log").write_text(OUTSIDE)
    assert attempt.last_words() == f"; {OUTSIDE.strip()}"


# --- What a supervisor says of a stop ---


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 15), ("SIGUSR1", 10), ("no signal", 0)])
def test_a_signal_is_logged_in_megatrons_words_whatever_its_name(name: str, number: int, caplog) -> None:
    with caplog.at_level("INFO"):
        log_signal("Received signal %d, initiating graceful stop", name)
    assert f"Received signal {number}, initiating graceful stop" in caplog.text


@pytest.mark.parametrize(
    ("events", "waits"),
    [
        pytest.param([life.Signalled("SIGTERM", "n0")], True, id="a signal"),
        pytest.param([life.Signalled("SIGTERM", "n0"), life.CauseFound(Cause.SIGNALLED, 9.0, 0.0)], False, id="a user"),
        pytest.param([life.Signalled("SIGTERM", "n0"), life.Asked(Cause.STOPPED_BY_USER, "x")], False, id="a stop"),
        pytest.param([life.TakenOver("x")], False, id="taken over by another job"),
        pytest.param([life.Ended()], False, id="no stop"),
    ],
)
async def test_the_end_waits_for_the_cause_of_a_signal_alone(events: Sequence[life.Event], waits: bool) -> None:
    machine = Machine(life.Rules(), dict.fromkeys((life.AskCause, life.BeginStop, life.WillNotContinue), bool))
    for event in events:
        machine.feed(event)
    task = asyncio.create_task(machine.cause_is_known())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert task.done() is not waits
    machine.feed(life.CauseFound(Cause.PREEMPTED, 9.0, 0.0))
    await task
