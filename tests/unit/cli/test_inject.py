"""Faults on purpose: who may order one, what the agent does, and what happens inside a worker."""

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch
from of_each import of_each
from torch import nn

from slurmft.agent.agent import strike
from slurmft.agent.workers import Worker
from slurmft.cli import control as verb
from slurmft.config import run as configuration
from slurmft.errors import ConfigError, LaunchError, StorageError, UsageError
from slurmft.ipc.messages import Inject, Injected
from slurmft.ipc.pages import PAGE_VARIABLE, Page, Slot
from slurmft.policy.values import BY_SIGNAL, IN_SESSION, NOT_YET, Fault, Order, order_of
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import MAX_AGE_S, ORDER_FILE, RunFolder, give_order, is_pending, take_order
from slurmft.supervisor.watches import Injections
from slurmft.system.background import Background
from slurmft.worker.session import InjectedFault, InjectedFaults

KILL = {"fault": "kill", "who": "me@here", "rank": 3, "node": "", "after_s": 1.5}


def test_every_fault_has_exactly_one_who_does_it():
    by = [set(BY_SIGNAL), set(IN_SESSION), {Fault.CORRUPT_CHECKPOINT}]
    assert sum(map(len, by)) == len(set().union(*by)) == len(Fault)


def test_an_order_survives_its_file(tmp_path):
    order = Order(fault=Fault.KILL, who="me@here", rank=3, after_s=1.5)
    assert order.as_json() == KILL
    give_order(tmp_path, order.as_json())
    assert (tmp_path / ORDER_FILE).stat().st_mode & 0o777 == 0o600
    assert order_of(take_order(tmp_path)) == order
    assert take_order(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [{"fault": "nonsense"}, {"fault": "partition"}, {"fault": ["kill"]}, {"fault": None}, {"rank": -1}, {"rank": 1.0},
     {"rank": True}, {"rank": 2**31}, {"node": 3}, {"node": "n" * 256}, {"after_s": -1}, {"after_s": float("nan")},
     {"after_s": float("inf")}, {"after_s": 1e9}, {"after_s": "1"}, {"who": None}],
    ids=str,
)  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        order_of({**KILL, **change})


def _written(path: Path, text: str = json.dumps({"format": 1, **KILL})) -> Path:
    (path / ORDER_FILE).write_text(text)
    (path / ORDER_FILE).chmod(0o600)
    return path / ORDER_FILE


def _of_somebody_else(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(_written(path), 12345, -1)


def _link(path: Path) -> None:
    (path / "mine").write_text("{}")
    (path / ORDER_FILE).symlink_to(path / "mine")


@of_each(prepare__why=[
        (_of_somebody_else, "user id 12345"),
        (lambda path: _written(path).chmod(0o640), "mode 640"),
        (lambda path: _written(path).chmod(0o602), "mode 602"),
        (_link, "not to be trusted"),
        (lambda path: os.mkfifo(path / ORDER_FILE, 0o600), "is a FIFO"),
        (lambda path: os.utime(_written(path), (0, time.time() - MAX_AGE_S - 1)), "earlier attempt"),
        (lambda path: _written(path, "{"), "not JSON"),
        (lambda path: _written(path, "[" * 4000), "not JSON"),
        (lambda path: _written(path, "[]"), "not an order"),
        (lambda path: _written(path, '{"format": 2}'), "not an order"),
        (lambda path: _written(path, '{"format": true}'), "not an order"),
        (lambda path: _written(path, ""), "not JSON"),
    ])  # fmt: skip
def test_only_the_owners_own_file_is_believed_and_every_other_one_is_removed(tmp_path, prepare, why):
    prepare(tmp_path)
    with pytest.raises(StorageError, match=why):
        take_order(tmp_path)
    assert not is_pending(tmp_path)
    assert take_order(tmp_path) is None


# the agent's part


def worker(tmp_path: Path, rank: int = 0, *, attached: bool = True, pid: int = 0) -> Worker:
    page = Page.create(tmp_path / f"rank-{rank}", rank=rank, generation=1)
    page[Slot.PID] = os.getpid() if attached else 0
    return Worker(rank=rank, page=page, stacks=tmp_path / f"rank-{rank}.stacks", pid=pid or os.getpid())


@pytest.mark.parametrize("is_trainer", [True, False])
def test_a_signal_meets_the_trainer_that_torchrun_has_started_and_no_strangers_number(tmp_path, eventually, is_trainer):
    given = {PAGE_VARIABLE: str(tmp_path / ("rank-0" if is_trainer else "rank-1"))}
    with (
        subprocess.Popen(["sleep", "60"]) as holder,
        subprocess.Popen(["sleep", "60"], env=os.environ | given) as other,
    ):
        try:
            mine = worker(tmp_path, pid=holder.pid)
            mine.page[Slot.PID] = other.pid
            # exec closes Popen's pipe a moment before the kernel shows the new environment
            eventually(lambda: Path(f"/proc/{other.pid}/environ").read_bytes())
            assert strike([mine], order("kill"), None).injected == (0,)
            hit, spared = (other, holder) if is_trainer else (holder, other)
            assert hit.wait(10) == -signal.SIGKILL
            assert spared.poll() is None
        finally:
            holder.kill()
            other.kill()


def order(fault: str) -> dict[str, Any]:
    return {**KILL, "fault": fault}


def test_a_session_fault_is_a_file_and_then_a_number(tmp_path):
    both = [worker(tmp_path, 0), worker(tmp_path, 1)]
    assert strike(both, order("hang"), [1, 7]) == Injected(injected=(1,), refused=())
    assert [each.page[Slot.FAULT] for each in both] == [0, 1]
    assert json.loads((tmp_path / "rank-1.fault").read_text())["fault"] == "hang"
    assert strike(both, order("nan"), None).injected == (0, 1)
    assert [each.page[Slot.FAULT] for each in both] == [1, 2]


def test_whom_a_fault_cannot_reach_is_told(tmp_path):
    alien, unborn = worker(tmp_path, 0, attached=False), worker(tmp_path, 1)
    unborn.pid = 0
    found = strike([alien, unborn], order("hang"), None)
    assert found.injected == ()
    assert "uses no session; only kill, stop reach it" in found.refused[0]
    assert "rank 1 has not been forked yet" in found.refused[1]
    gone = worker(tmp_path, 2, pid=2**22 + 1)
    assert "cannot be reached" in strike([gone], order("kill"), None).refused[0]
    assert "'node-loss'" in strike([gone], {"fault": "node-loss"}, None).refused[0]


# inside a worker


@pytest.fixture
def faults(tmp_path, monkeypatch):
    mine = worker(tmp_path)
    monkeypatch.setenv(PAGE_VARIABLE, str(tmp_path / "rank-0"))
    found = InjectedFaults(mine.page)

    def inject(fault: str) -> InjectedFaults:
        assert strike([mine], order(fault), None).injected == (0,)
        assert found.seen != mine.page[Slot.FAULT]
        return found

    return inject


def test_an_exception_comes_once(faults, tmp_path):
    struck = faults("exception")
    with pytest.raises(InjectedFault, match="at step 7"):
        struck.strike(7)
    assert struck.seen == struck._page[Slot.FAULT], "it is not called again"


def test_a_nan_comes_once_and_only_in_training(faults):
    faults("nan").strike(7)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        assert model(torch.ones(2)).isfinite().all()
    assert model(torch.ones(2)).isnan().all()
    assert model(torch.ones(2)).isfinite().all()


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', '{"format": 1, "fault": "x"}', None])
def test_a_fault_that_cannot_be_read_is_none(faults, tmp_path, text):
    struck = faults("exception")
    path = tmp_path / "rank-0.fault"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    struck.strike(7)
    assert struck.seen == struck._page[Slot.FAULT]


# the command and the section


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "a run's folder")
    folder.create()
    settings = configuration.validate({"command": "x", "run_folder": str(folder.path), "nodes": 2}, source="test")
    folder.config.write_text(settings.as_yaml())
    folder.journal().append("agents ready", hosts=["n1", "n2"])
    return folder


def inject(run: RunFolder, *arguments: str) -> Any:
    with click.testing.CliRunner().isolation():
        return verb.inject.main([str(run.path), *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["kill"], "is not running"),
        (["kill", "--rank", "1", "--node", "n1"], "exclude each other"),
        (["corrupt-newest-checkpoint", "--after", "3"], "no --after"),
        (["corrupt-newest-checkpoint"], "no committed checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said(run, arguments, why):
    with pytest.raises(UsageError, match=why):
        inject(run, *arguments)
    assert not is_pending(run.path)
    assert [event.event for event in run.journal().read()] == ["agents ready"]


def test_an_order_is_left_for_a_living_run_and_only_for_ranks_that_it_has(run, monkeypatch):
    monkeypatch.setattr(verb.control, "is_alive", lambda _run: True)
    with pytest.raises(UsageError, match="has no rank 2"):
        inject(run, "stop", "--rank", "2")
    orders: list[Order] = []
    monkeypatch.setattr(verb.time, "sleep", lambda _s: orders.append(order_of(take_order(run.path))))
    assert inject(run, "stop", "--rank", "1", "--after", "0.5") == 0
    (taken,) = orders
    assert (taken.fault, taken.rank, taken.after_s) == (Fault.STOP, 1, 0.5)


def test_an_order_that_nobody_takes_is_withdrawn(run, monkeypatch):
    monkeypatch.setattr(verb.control, "is_alive", lambda _run: True)
    monkeypatch.setattr(verb, "TAKEN_WITHIN_S", 0.0)
    with pytest.raises(LaunchError, match="withdrawn"):
        inject(run, "stop", "--rank", "1")
    assert not is_pending(run.path)
    give_order(run.path, KILL)
    with pytest.raises(UsageError, match="waits to be taken"):
        inject(run, "kill")


def test_only_the_owner_may(run, monkeypatch):
    monkeypatch.setattr(verb.os, "getuid", lambda: 4711)
    with pytest.raises(UsageError, match="belongs to user id 0, not to you"):
        inject(run, "kill")


@pytest.mark.parametrize(
    "value", [{"simulated_fault_type": "rank_gone"}, {"simulated_fault_rank": -1}, {"simulated_fault_base_delay": -1}]
)
def test_the_section_refuses_what_makes_no_sense(value):
    with pytest.raises(ConfigError, match=next(iter(value))):
        configuration.validate({"command": "x", "run_folder": "/r", "fault_tolerance": value}, source="test")


# the supervisor's part


class Link:
    def __init__(self, node: int, ranks: list[int]) -> None:
        self.node, self.host, self.ranks, self.channel = node, f"n{node}", ranks, object()
        self.asked: list[dict[str, Any]] = []

    not_yet = 0

    async def call(self, call: Inject) -> Injected:
        assert order_of(call.order)
        if self.not_yet:
            self.not_yet -= 1
            return Injected(injected=(), refused=(f"rank 0 {NOT_YET}",))
        mine = [rank for rank in self.ranks if call.ranks is None or rank in call.ranks]
        self.asked.append({"fault": call.order["fault"], "ranks": mine})
        return Injected(injected=tuple(mine), refused=())


def orders(run: RunFolder, work: Any, members: int = 2, **section: Any) -> tuple[list[Any], list[Link]]:
    """What is journaled while ``work(injections)`` is done, and the agents with what they were asked for."""
    links = [Link(0, [0, 1]), Link(1, [2, 3])]
    pool = SimpleNamespace(links={link.node: link for link in links}, members=links[:members])
    start = SimpleNamespace(run=run, journal=run.journal(), thread=FolderThread())
    settings = configuration.load(run.config).model_copy(update={"nproc_per_node": 2})
    section = {**settings.fault_tolerance.model_dump(), **section}
    fault_tolerance = type(settings.fault_tolerance)(**section)
    errors: list[BaseException] = []

    async def go() -> None:
        background = Background(errors.append)
        injections = Injections(
            settings.model_copy(update={"fault_tolerance": fault_tolerance}), start, pool, background
        )  # type: ignore[arg-type]
        await work(injections)
        while background._tasks:
            await asyncio.sleep(0.001)

    before = len(run.journal().read())
    asyncio.run(asyncio.wait_for(go(), 20))
    assert errors == []
    return run.journal().read()[before:], links


@pytest.mark.parametrize(
    ("given", "asked"),
    [({"rank": 3}, [3]), ({"node": "n0"}, [0, 1]), ({"node": "1"}, [2, 3])],
    ids=["rank", "host name", "number"],
)
def test_an_order_reaches_those_that_are_meant(run, given, asked):
    give_order(run.path, Order(fault=Fault.KILL, who="me", **given).as_json())
    (event,), links = orders(run, lambda injections: injections.look())
    assert (event.event, event.details["fault"], event.details["who"]) == ("fault injected", "kill", "me")
    assert [rank for link in links for each in link.asked for rank in each["ranks"]] == asked


def test_by_chance_a_rank_is_hit_that_there_is(run):
    async def look(injections: Injections) -> None:
        injections._config = injections._config.model_copy(update={"nodes": 1000})  # before most of them were lost
        await injections.look()

    give_order(run.path, Order(fault=Fault.KILL, who="me").as_json())
    (event,), links = orders(run, look, members=1)
    assert event.event == "fault injected"
    assert len(links[0].asked[0]["ranks"]) == 1


@pytest.mark.parametrize(("given", "why"), [({"rank": 9}, "no rank 9"), ({"node": "n9"}, "no node 'n9'")])
def test_whom_nobody_knows_cannot_be_hit(run, given, why):
    give_order(run.path, Order(fault=Fault.KILL, who="me", **given).as_json())
    events, _ = orders(run, lambda injections: injections.look())
    assert events[-1].event == "fault not injected"
    assert why in events[-1].details["reason"]


def test_a_rank_that_still_imports_is_hit_when_it_is_there(run, monkeypatch):
    monkeypatch.setattr(Link, "not_yet", 3)
    give_order(run.path, Order(fault=Fault.KILL, who="me", node="n0").as_json())
    (event,), links = orders(run, lambda injections: injections.look())
    assert event.event == "fault injected"
    assert links[0].asked == [{"fault": "kill", "ranks": [0, 1]}]


@pytest.mark.parametrize("text", ["{", json.dumps({"format": 1, "fault": "partition"})])
def test_a_bad_order_is_journaled_and_harms_nobody(run, text):
    _written(run.path, text)
    (event,), links = orders(run, lambda injections: injections.look())
    assert event.event == "fault not injected"
    assert not any(link.asked for link in links)


def test_an_order_whose_time_does_not_come_is_told(run):
    give_order(run.path, Order(fault=Fault.KILL, who="me", rank=0, after_s=1000.0).as_json())

    async def work(injections: Any) -> None:
        await injections.look()
        await asyncio.sleep(0.01)
        await injections._background.cancel_all()

    (event,), _ = orders(run, work)
    assert event.details["reason"] == "the attempt has ended before its time"


@pytest.mark.parametrize(
    ("kind", "faults"), [("rank_killed", {"kill"}), ("rank_hung", {"stop"}), ("random", {"kill", "stop"})]
)
def test_a_simulated_fault_comes_once_in_a_runs_life(run, caplog, kind, faults):
    async def work(injections: Any) -> None:
        injections.simulate()

    section = {"simulate_fault": True, "simulated_fault_type": kind, "simulated_fault_rank": 2}
    with caplog.at_level("WARNING"):
        (event,), links = orders(run, work, **section)
    assert event.details["ranks"] == [2]
    assert {event.details["fault"]} <= faults
    assert links[1].asked == [{"fault": event.details["fault"], "ranks": [2]}]
    assert any(
        text.startswith("FT: Simulating fault: rank_") and text.endswith("; rank to fail: 2")
        for text in caplog.messages
    )
    assert orders(run, work, **section)[0] == []


def test_nothing_is_simulated_unless_it_is_asked_for(run):
    async def work(injections: Any) -> None:
        injections.simulate()

    assert orders(run, work)[0] == []
