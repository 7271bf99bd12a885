"""Faults between two checkpoints: what each costs, and that the rest of the run is as if there had been none.

Without Slurm: two agents on this machine stand for two nodes. Killing one takes its workers, its keeper and the memory
that they had with it, as a power cut does.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slurm.conftest import eventually
from slurm.test_local import LocalRun
from slurmft.storage.journal import EventName

pytestmark = pytest.mark.timeout(200)
STEPS = 40
TRAINER = [sys.executable, str(Path(__file__).parent / "trainers" / "running_totals.py")]
FULL = ["--buffers", "--extra", "function"]
IN_NODE = [*FULL, "--shards", "2"]
ACROSS = [*IN_NODE, "--across"]
"""Each node has a replica of the weights; each node has one shard of all replicas."""

NO_REPLICA = [*FULL, "--shards", "4"]


def new_run(
    path: Path, options: Sequence[str] = FULL, *, delay: float = 0.1, copies: int = 0, every: int = 0,
    hang_after: float | None = None, spares: int = 0, interval: int = 10, lease: float = 60.0,
) -> LocalRun:  # fmt: skip
    hangs = {} if hang_after is None else {"rank_section_timeouts": {"step": hang_after}, "num_warmup_iterations": 1}
    return LocalRun(
        path,
        command=[*TRAINER, "--steps", str(STEPS), "--step-delay", str(delay), *options],
        spare_nodes=spares,
        checkpoint={"interval_steps": interval, "peer_copies": copies, "peer_interval": every},
        fault_tolerance={"num_in_job_restarts": 30, "supervisor_lease_s": lease, **hangs},
    )


def workers(run: LocalRun) -> dict[int, psutil.Process]:
    """The newest attempt's living workers by rank: each one's output goes to its own log."""
    found = {}
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:
            continue
        if log.is_relative_to(run.folder.attempts) and log.stem.startswith("rank-"):
            parent = process.parent()
            if parent is not None and "slurmft.agent.zygote" in " ".join(parent.cmdline()):
                found[int(log.stem.removeprefix("rank-"))] = process
    return found


def kill_ranks(run: LocalRun, *ranks: int, at_rest: int | None = None) -> None:
    found = workers(run)
    until_it_rests(found.get(-1 if at_rest is None else at_rest))
    for rank in ranks:
        found[rank].kill()


def processes_of_node(run: LocalRun, rank: int) -> tuple[psutil.Process, ...]:
    """All that is below the agent of that rank's node, and the agent."""
    agent = workers(run)[rank].parents()[1]
    assert "agent" in agent.cmdline(), agent.cmdline()
    return (*agent.children(recursive=True), agent)


def kill_node(run: LocalRun, rank: int, *, at_rest: int | None = None) -> None:
    victims = processes_of_node(run, rank)  # on a busy machine that takes longer than a step
    until_it_rests(None if at_rest is None else workers(run)[at_rest])
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # some end with the one before
            process.kill()


def until_it_rests(process: psutil.Process | None) -> None:
    """Return while the rank sleeps at the beginning of a step: what it had is noted, and on its way to its peer."""
    if process is None:
        return
    sleeping = {"x86_64": "230", "aarch64": "115"}[os.uname().machine]
    while True:
        try:
            if Path(f"/proc/{process.pid}/syscall").read_text().split()[0] == sleeping:
                break
        except (OSError, IndexError):
            pytest.fail("it is gone")
    time.sleep(0.03)  # a kill a moment after the note may come before it has reached the peer: that is measured apart


def resumed_from(run: LocalRun, number: int) -> int:
    events = [one for one in run.folder.journal().read() if one.event == EventName.FIRST_STEP]
    return int(events[number].details["resumed_from"])


def wait_for_restart(run: LocalRun, number: int) -> None:
    def has_begun() -> bool:
        events = [one for one in run.folder.journal().read() if one.event == EventName.FIRST_STEP]
        return len(events) > number

    eventually(has_begun, 60, run.story)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("just-in-time") / "undisturbed", delay=0.0)
    run.submit("--wait")
    return run.digest()


CASES = {
    "rank 0": lambda run: kill_ranks(run, 0, at_rest=0),
    "all of rank 0's node": lambda run: kill_ranks(run, 0, 1, at_rest=0),
    "rank 3": lambda run: kill_ranks(run, 3, at_rest=0),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_with_buffers_and_extra_no_step_is_lost(tmp_path: Path, undisturbed: str, case: str) -> None:
    run = new_run(tmp_path / "run")
    run.submit()
    run.wait_for_step(16)
    CASES[case](run)
    run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    assert run.digest() == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_with_peer_copies_no_step_is_lost_with_a_node(tmp_path: Path, undisturbed: str, rank: int) -> None:
    run = new_run(tmp_path / "run", copies=1)
    run.submit()
    run.wait_for_step(16)
    kill_node(run, rank, at_rest=rank)
    run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    assert run.digest() == undisturbed


@pytest.fixture(scope="module")
def undisturbed_shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], str]:
    digests: dict[str, str] = {}

    def digest(options: list[str]) -> str:
        name = "-".join(options).replace("-", "")
        if name not in digests:
            run = new_run(tmp_path_factory.mktemp("just-in-time") / name, options, delay=0.0)
            run.submit("--wait")
            digests[name] = run.digest()
        return digests[name]

    return digest


@dataclass(frozen=True)
class Shards:
    """A fault of a run whose weights are spread over ranks."""

    options: list[str]
    strike: Callable[[LocalRun], None]
    is_kept: bool = True
    copies: int = 0


SHARDS = {
    "a rank": Shards(IN_NODE, lambda run: kill_ranks(run, 3, at_rest=2)),
    "rank 0": Shards(IN_NODE, lambda run: kill_ranks(run, 0, at_rest=2)),
    "two of different shards": Shards(IN_NODE, lambda run: kill_ranks(run, 0, 3, at_rest=2)),
    "all of a shard": Shards(IN_NODE, lambda run: kill_ranks(run, 1, 3, at_rest=2), is_kept=False),
    "all of a node": Shards(IN_NODE, lambda run: kill_ranks(run, 2, 3, at_rest=2)),
    "a node": Shards(IN_NODE, lambda run: kill_node(run, 2, at_rest=2), copies=1),
    "rank 0's node": Shards(IN_NODE, lambda run: kill_node(run, 0, at_rest=2), copies=1),
    "a node without copies": Shards(IN_NODE, lambda run: kill_node(run, 2, at_rest=2), is_kept=False),
    "shards across nodes, a rank": Shards(ACROSS, lambda run: kill_ranks(run, 1, at_rest=2)),
    "shards across nodes, a node": Shards(ACROSS, lambda run: kill_node(run, 2, at_rest=2), is_kept=False, copies=1),
    "no replica": Shards(NO_REPLICA, lambda run: kill_ranks(run, 3, at_rest=2), is_kept=False),
}
OFTEN = {"a rank", "a node"}


@pytest.mark.long
@pytest.mark.parametrize("name", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.soak) for one in SHARDS])
def test_shards_with_replicas_lose_no_step_and_others_are_never_mixed(
    tmp_path: Path, undisturbed_shards: Callable[[list[str]], str], name: str
) -> None:
    case = SHARDS[name]
    run = new_run(tmp_path / "run", case.options, copies=case.copies)
    run.submit()
    run.wait_for_step(16)
    case.strike(run)
    run.wait_until_done()
    resumed = resumed_from(run, 1)
    assert resumed >= 16 if case.is_kept else resumed in (10, 20), run.story()
    assert run.digest() == undisturbed_shards(case.options)


@pytest.mark.soak
def test_a_rank_that_is_stopped_keeps_no_other_from_keeping_its_shard(
    tmp_path: Path, undisturbed_shards: Callable[[list[str]], str]
) -> None:
    run = new_run(tmp_path / "run", IN_NODE, hang_after=2.0)
    run.submit()
    run.wait_for_step(16)
    victim = workers(run)[3]
    until_it_rests(victim)
    victim.suspend()
    run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    assert run.digest() == undisturbed_shards(IN_NODE)


RANDOM = {
    "replicas": (FULL, 0), "shards": (IN_NODE, 0), "shards across nodes": (ACROSS, 0), "replicas, each step": (FULL, 1),
    "shards, each step": (IN_NODE, 1), "shards across nodes, each second step": (ACROSS, 2),
    "no replica, each step": (NO_REPLICA, 1),
}  # fmt: skip
"""The trainer's options, and after how many steps each is copied."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RANDOM)
def test_faults_at_random_moments_change_nothing(
    tmp_path: Path, undisturbed_shards: Callable[[list[str]], str], seed: int, name: str
) -> None:
    """Also two ranks at once, and a node after a rank; a fault may cost steps, but never mixes two."""
    chance = random.Random(seed)
    options, every = RANDOM[name]
    run = new_run(tmp_path / "run", options, delay=0.05, copies=1, every=every)
    run.submit()
    for number in range(1, 5):
        wait_for_restart(run, number - 1)
        run.wait_for_step(8 * number)
        time.sleep(chance.random() * 0.1)
        ranks = chance.sample(range(4), chance.choice([1, 1, 2]))
        try:
            kill_ranks(run, *ranks)
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.1)
                kill_node(run, chance.choice([0, 2]))
        except (KeyError, IndexError, psutil.NoSuchProcess, AssertionError):
            pass  # gone already
    run.wait_until_done()
    assert run.digest() == undisturbed_shards(options)


@contextlib.contextmanager
def silent_node(run: LocalRun, rank: int) -> Iterator[None]:
    """Stop all processes of that rank's node: as with a node that has no power, or no network, nothing is closed."""
    frozen = processes_of_node(run, rank)[::-1]
    until_it_rests(workers(run)[rank])
    for process in frozen:
        process.suspend()
    try:
        yield
    finally:
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_with_peer_copies_no_step_is_lost_with_a_node_that_falls_silent(
    tmp_path: Path, undisturbed: str, rank: int
) -> None:
    run = new_run(tmp_path / "run", copies=1, spares=1)
    run.submit()
    run.wait_for_step(16)
    with silent_node(run, rank):
        run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    told = [one.event for one in run.folder.journal().read()]
    assert told.index(EventName.STATE_KEPT) < told.index(EventName.KILLING_WORKERS), run.story()
    assert run.digest() == undisturbed


def newest_copied(run: LocalRun) -> int:
    return int((run.folder.progress() or {}).get("copied") or 0)


def agents_of(run: LocalRun) -> list[psutil.Process]:
    found = {process.parents()[1].pid: process.parents()[1] for process in workers(run).values()}
    return list(found.values())


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def kill_all_agents(run: LocalRun) -> None:
    """At once, as at the end of their step: each agent, then what is below it."""
    below = [each for agent in agents_of(run) for each in (agent, *agent.children(recursive=True))]
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):  # some end with the one before
            process.kill()


@pytest.mark.long
def test_what_lies_in_memory_outlives_agents_that_are_all_killed_at_once(
    tmp_path: Path, undisturbed_shards: Callable[[list[str]], str]
) -> None:
    """No node has another one's shards, and nothing but the first step is on disk."""
    run = new_run(tmp_path / "run", NO_REPLICA, every=1, interval=1000)
    run.submit()
    copied = eventually(lambda: newest_copied(run) >= 8 and newest_copied(run), 120, run.story)
    kill_all_agents(run)
    run.wait_until_done()
    events = [one.event for one in run.folder.journal().read()]
    assert EventName.AGENTS_GONE in events, run.story()
    assert EventName.AGENT_LOST not in events, run.story()
    assert resumed_from(run, 1) >= copied, run.story()
    assert run.digest() == undisturbed_shards(NO_REPLICA)


@pytest.mark.long
def test_agents_that_end_with_their_lease_keep_the_newest_step(tmp_path: Path, undisturbed: str) -> None:
    run = new_run(tmp_path / "run", delay=0.2, lease=3.0, interval=1000)
    run.submit()
    run.wait_for_step(12)
    owner = run.folder.owner()
    assert owner is not None
    supervisor, agents = psutil.Process(owner.pid), agents_of(run)
    supervisor.suspend()
    try:
        eventually(lambda: all(has_ended(agent) for agent in agents), 60, "the agents' lease is over")
    finally:
        supervisor.resume()
    run.wait_until_done()
    assert resumed_from(run, 1) >= 15, run.story()
    assert run.digest() == undisturbed
