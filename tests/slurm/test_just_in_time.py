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
Digests = Callable[[list[str]], str]
"""Of the weights after a training with these options that was left alone."""


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
    return int(run.events(EventName.FIRST_STEP)[number].details["resumed_from"])


def wait_for_restart(run: LocalRun, number: int) -> None:
    eventually(lambda: len(run.events(EventName.FIRST_STEP)) > number, 60, run.story)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Digests:
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
class Fault:
    """One of a run, most of them of one whose weights are spread over ranks."""

    options: list[str]
    strike: Callable[[LocalRun], None]
    is_kept: bool = True
    copies: int = 0
    hang_after: float | None = None


def stop_rank(run: LocalRun, rank: int) -> None:
    victim = workers(run)[rank]
    until_it_rests(victim)
    victim.suspend()


FAULTS = {
    "replicas, rank 0": Fault(FULL, lambda run: kill_ranks(run, 0, at_rest=0)),
    "replicas, all of rank 0's node": Fault(FULL, lambda run: kill_ranks(run, 0, 1, at_rest=0)),
    "replicas, rank 3": Fault(FULL, lambda run: kill_ranks(run, 3, at_rest=0)),
    "replicas, a node": Fault(FULL, lambda run: kill_node(run, 2, at_rest=2), copies=1),
    "replicas, rank 0's node": Fault(FULL, lambda run: kill_node(run, 0, at_rest=0), copies=1),
    "a rank": Fault(IN_NODE, lambda run: kill_ranks(run, 3, at_rest=2)),
    "rank 0": Fault(IN_NODE, lambda run: kill_ranks(run, 0, at_rest=2)),
    "two of different shards": Fault(IN_NODE, lambda run: kill_ranks(run, 0, 3, at_rest=2)),
    "all of a shard": Fault(IN_NODE, lambda run: kill_ranks(run, 1, 3, at_rest=2), is_kept=False),
    "all of a node": Fault(IN_NODE, lambda run: kill_ranks(run, 2, 3, at_rest=2)),
    "a node": Fault(IN_NODE, lambda run: kill_node(run, 2, at_rest=2), copies=1),
    "rank 0's node": Fault(IN_NODE, lambda run: kill_node(run, 0, at_rest=2), copies=1),
    "a node without copies": Fault(IN_NODE, lambda run: kill_node(run, 2, at_rest=2), is_kept=False),
    "shards across nodes, a rank": Fault(ACROSS, lambda run: kill_ranks(run, 1, at_rest=2)),
    "shards across nodes, a node": Fault(ACROSS, lambda run: kill_node(run, 2, at_rest=2), is_kept=False, copies=1),
    "a rank that is stopped": Fault(IN_NODE, lambda run: stop_rank(run, 3), hang_after=2.0),
    "no replica": Fault(NO_REPLICA, lambda run: kill_ranks(run, 3, at_rest=2), is_kept=False),
}
OFTEN = {"a rank", "a node", "replicas, a node"}


@pytest.mark.long
@pytest.mark.parametrize("name", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.soak) for one in FAULTS])
def test_what_a_living_node_has_all_of_loses_no_step_and_others_are_never_mixed(
    tmp_path: Path, undisturbed: Digests, name: str
) -> None:
    case = FAULTS[name]
    run = new_run(tmp_path / "run", case.options, copies=case.copies, hang_after=case.hang_after)
    run.reach(16)
    case.strike(run)
    run.wait_until_done()
    resumed = resumed_from(run, 1)
    assert resumed >= 16 if case.is_kept else resumed in (10, 20), run.story()
    assert run.digest() == undisturbed(case.options)


RANDOM = {
    "replicas": (FULL, 0), "shards": (IN_NODE, 0), "shards across nodes": (ACROSS, 0), "replicas, each step": (FULL, 1),
    "shards, each step": (IN_NODE, 1), "shards across nodes, each second step": (ACROSS, 2),
    "no replica, each step": (NO_REPLICA, 1),
}  # fmt: skip
"""The trainer's options, and after how many steps each is copied."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RANDOM)
def test_faults_at_random_moments_change_nothing(tmp_path: Path, undisturbed: Digests, seed: int, name: str) -> None:
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
    assert run.digest() == undisturbed(options)


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
    tmp_path: Path, undisturbed: Digests, rank: int
) -> None:
    run = new_run(tmp_path / "run", copies=1, spares=1)
    run.reach(16)
    with silent_node(run, rank):
        run.wait_until_done()
    assert resumed_from(run, 1) >= 16, run.story()
    told = [one.event for one in run.folder.journal().read()]
    assert told.index(EventName.STATE_KEPT) < told.index(EventName.KILLING_WORKERS), run.story()
    assert run.digest() == undisturbed(FULL)


def copied(run: LocalRun) -> int:
    """The newest step that all nodes have in memory, as the run reports it."""
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
def test_what_lies_in_memory_outlives_agents_that_are_all_killed_at_once(tmp_path: Path, undisturbed: Digests) -> None:
    """No node has another one's shards, and nothing but the first step is on disk."""
    run = new_run(tmp_path / "run", NO_REPLICA, every=1, interval=1000)
    run.submit()
    known = eventually(lambda: copied(run) >= 8 and copied(run), 120, run.story)
    kill_all_agents(run)
    run.wait_until_done()
    assert run.events(EventName.AGENTS_GONE) and not run.events(EventName.AGENT_LOST), run.story()
    assert resumed_from(run, 1) >= known, run.story()
    assert run.digest() == undisturbed(NO_REPLICA)


@pytest.mark.long
def test_agents_that_end_with_their_lease_keep_the_newest_step(tmp_path: Path, undisturbed: Digests) -> None:
    run = new_run(tmp_path / "run", delay=0.2, lease=3.0, interval=1000)
    run.reach(12)
    supervisor, agents = run.supervisor, agents_of(run)
    supervisor.suspend()
    try:
        eventually(lambda: all(has_ended(agent) for agent in agents), 60, "the agents' lease is over")
    finally:
        supervisor.resume()
    run.wait_until_done()
    assert resumed_from(run, 1) >= 15, run.story()
    assert run.digest() == undisturbed(FULL)
