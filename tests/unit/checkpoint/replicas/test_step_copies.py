"""Copies of steps between two saves: on one rank without peers, and on two that are nodes of their own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import SAVING, run_ranks
from waiting import until
from worker_variable import set_settings, worker_variable

from slurmft.checkpoint import Catalog, CheckpointManager, snapshots, step_copies
from slurmft.checkpoint.image_file import holdings_in
from slurmft.checkpoint.snapshots import StepPlaces
from slurmft.checkpoint.write_requests import VARIABLE
from slurmft.ipc.pages import Page, Slot
from slurmft.policy.checkpoints import NEW_PLACES, SAMPLES, Tier
from slurmft.storage.checkpoint_names import KEY_FILE, Identity, announcement
from slurmft.system.files import write_json
from slurmft.trainer.savers import SAVERS
from slurmft.worker.saves import PageListener


class Rank:
    """One that trains; a step changes every weight."""

    def __init__(self, folder: Path, extra: Any = None) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(300, 100)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.checkpoints = CheckpointManager(folder, extra=extra, async_save=True)
        self.step = 0

    @property
    def places(self) -> Any:
        return self.checkpoints._snapshots.copies

    def train(self, until_step: int) -> Rank:
        while self.step < until_step:
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 300)).sum().backward()
            self.optimizer.step()
            self.step += 1
            SAVERS.at_boundary(self.step)
        return self

    def save(self, **options: Any) -> Rank:
        self.checkpoints.save(self.model, self.optimizer, step=self.step, **options)
        return self

    def settle(self) -> None:
        """Return when the newest copy has ended."""
        until(lambda: self.places.current is None or self.places.ended is not None)


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.private()
    SAVERS.listener = PageListener(page)
    yield page
    SAVERS.listener, SAVERS.is_armed = None, False


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(folder))
    set_settings(monkeypatch, checkpoint={"peer_interval": 1, "just_in_time": False})
    return folder


@pytest.fixture
def begin(tmp_path, page, memory) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def begin(**options: Any) -> Rank:
        ranks.append(Rank(tmp_path / "checkpoints", **options).train(1))
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.checkpoints.close()


def in_memory(memory: Path) -> list[int]:
    return sorted(one.index.identity.step for one in holdings_in(memory, Tier.MEMORY) if one.index.is_hashed)


def loaded(folder: Path) -> tuple[Rank, Any]:
    rank = Rank(folder)
    found = rank.checkpoints.load_latest(rank.model, rank.optimizer)
    return rank, found


def test_every_step_after_the_first_save_is_found_again_and_none_of_it_is_on_disk(tmp_path, begin, page):
    rank = begin().save()
    rank.checkpoints.wait()
    for step in range(2, 7):
        rank.train(step).settle()
    assert page[Slot.COPIED] == 5, "the one before, when this one began"
    rank.checkpoints.close()
    assert [entry.step for entry in Catalog(tmp_path / "checkpoints").committed()] == [1]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1
    again, found = loaded(tmp_path / "checkpoints")
    assert (found.step, found.is_durable, found.source) == (6, False, "memory: step 6, all 1 shards")
    assert torch.equal(again.model.weight, rank.model.weight)
    again.checkpoints.wait()
    assert [entry.step for entry in Catalog(tmp_path / "checkpoints").committed()] == [6, 1]
    again.checkpoints.close()


@pytest.mark.parametrize("interval", [0, 1])
def test_after_a_load_from_memory_saves_have_their_two_places(tmp_path, begin, memory, monkeypatch, interval):
    rank = begin().save()
    rank.checkpoints.wait()
    rank.train(2).settle()
    rank.checkpoints.close()
    set_settings(monkeypatch, checkpoint={"peer_interval": interval, "just_in_time": False})
    again, found = loaded(tmp_path / "checkpoints")
    assert found.step == 2
    again.checkpoints.wait()
    assert (again.places.needed is None) == (interval == 0), "until something newer is whole"
    kept = [] if again.places.needed is None else [again.places.needed]
    arena = again.checkpoints._snapshots.arena
    busy = [arena.free(kept).holds]
    assert arena.free([*kept, *busy]) is not None
    again.checkpoints.close()


def test_every_third_step(begin, memory, monkeypatch):
    set_settings(monkeypatch, checkpoint={"peer_interval": 3, "just_in_time": False})
    rank = begin().save()
    rank.checkpoints.wait()
    for step in range(2, 12):
        rank.train(step).settle()
    assert rank.checkpoints._steps.made == 2
    assert in_memory(memory) == [3, 6, 9]


def test_the_newest_whole_one_and_the_save_under_way_are_not_written_over(begin, memory, monkeypatch):
    """A save is held up at the disk, a copy at the peers: the third place holds what a restart takes."""
    rank = begin().save()
    rank.checkpoints.wait()
    rank.train(2).settle()
    rank.checkpoints.close()
    monkeypatch.setenv(VARIABLE, "step sent=stop")
    rank, found = loaded(rank.checkpoints.directory)
    assert found.step == 2
    rank.step = 2
    rank.checkpoints.wait()
    before = rank.places.needed
    assert before is not None and before.step == 2, "until something newer is whole"
    rank.train(6)
    assert rank.places.current.step == 3
    assert rank.checkpoints._steps.skipped == 3, "they are left out, not waited for"
    rank.save()
    assert {one.index.identity.step for one in holdings_in(memory, Tier.MEMORY)} == {2, 3, 6}
    assert rank.places.needed == before
    stopped = rank.checkpoints._snapshots._writer_process()
    os.kill(stopped.pid, 9)
    rank.checkpoints.close()


def test_a_copy_that_peers_did_not_get_does_not_take_the_place_of_one_that_they_have(begin, memory, monkeypatch):
    rank = begin().save()
    rank.train(2).settle()
    rank.train(3).settle()
    assert rank.places.needed.step == 2
    hear = StepPlaces.hear
    refused = {"text": "node 1: no room"}
    monkeypatch.setattr(StepPlaces, "hear", lambda places, report: hear(places, replace(report, **refused)))
    for step in range(4, 9):
        rank.train(step).settle()
    assert rank.places.needed.step == 3, "the last one that was whole"
    assert {3, 8} <= set(in_memory(memory))


def test_extra_is_that_of_the_step(tmp_path, begin):
    totals = {"seen": 0}
    rank = begin(extra=lambda: totals).save()
    for step in range(2, 5):
        totals["seen"] = step * 10
        rank.train(step).settle()
    rank.checkpoints.close()
    _, found = loaded(tmp_path / "checkpoints")
    assert (found.step, found.extra) == (4, {"seen": 40})


def test_extra_that_cannot_be_known_later_switches_copies_off(begin, memory):
    rank = begin().save(extra={"seen": 1})
    rank.train(4)
    assert "extra= is no function" in rank.checkpoints._steps.reason
    assert in_memory(memory) in ([], [1])


def test_an_extra_that_fails_ends_the_copies_and_not_the_training(begin, caplog):
    asked: list[int] = []

    def fails() -> dict[str, Any]:
        asked.append(1)
        if len(asked) > 2:
            raise ZeroDivisionError("of the trainer's")
        return {}

    rank = begin(extra=fails).save()
    rank.train(2).settle()
    rank.train(8)
    assert len(asked) == 3
    assert "of the trainer's" in rank.checkpoints._steps.reason
    assert rank.step == 8
    assert caplog.text.count("no steps are copied between saves any more") == 1


def test_without_memory_for_a_third_place_saves_go_on_as_ever(tmp_path, begin, memory, monkeypatch):
    asked: list[int] = []

    def little(needed: int, folder: Path) -> str:
        asked.append(needed)
        return "three are too many" if needed > 2.5 * 270_000 + 2 * (256 << 10) else ""

    monkeypatch.setattr(snapshots, "fits", little)
    rank = begin().save()
    rank.checkpoints.wait()
    rank.train(5)
    assert rank.checkpoints._steps.reason == "three are too many"
    assert asked[1] == pytest.approx(asked[0] * 2 / 3)
    assert not (tmp_path / "checkpoints" / ".staging").exists()
    rank.save()
    rank.checkpoints.wait()
    assert [entry.step for entry in Catalog(tmp_path / "checkpoints").committed()] == [5, 1]


def test_memory_that_runs_out_later_ends_the_copies(begin, monkeypatch):
    rank = begin().save()
    rank.train(2).settle()
    monkeypatch.setenv(VARIABLE, f"slot emptied={errno.ENOMEM}")
    rank.train(3).settle()
    rank.train(6)
    assert "Cannot allocate memory" in rank.checkpoints._steps.reason


def test_a_save_does_not_wait_for_a_copy_that_has_the_last_place(begin, memory, monkeypatch):
    """Two saves are under way as well, as far as the places go; without the copy there would be room for a third."""
    rank = begin().save()
    rank.checkpoints.wait()
    rank.train(2).settle()
    rank.train(3)  # takes in step 2, which is needed from now on
    places, client = rank.checkpoints._snapshots, rank.checkpoints._snapshots._writer
    rank.settle()
    taken = Identity(90, 0, 90)
    given_up: list[Identity] = []
    monkeypatch.setattr(client, "unfinished", lambda: [taken] if given_up else [taken, places.copies.current])
    monkeypatch.setattr(client, "abandon", given_up.append)
    next(one for one in places.arena.places if one.holds is not None and one.holds.step == 1).holds = taken
    assert places.free("peers") is None
    rank.save()
    assert given_up[0].step == 3
    assert 3 in {one.index.identity.step for one in holdings_in(memory, Tier.MEMORY)}
    monkeypatch.undo()


class _Writer:
    """One that has not finished anything."""

    def __init__(self, *unfinished: Identity) -> None:
        self.left, self.abandoned = list(unfinished), list[Identity]()

    def unfinished(self) -> list[Identity]:
        return self.left

    def abandon(self, identity: Identity) -> None:
        self.abandoned.append(identity)


@pytest.mark.parametrize("place", range(3))
def test_a_stop_takes_the_place_of_a_copy_and_of_a_save_that_waits_but_not_of_one_that_is_written(begin, place):
    rank = begin()
    written, waits, copy = (Identity(step, 0, step) for step in (1, 2, 3))
    left = [written, waits]
    left.insert(place, copy)
    snapshots_of = rank.checkpoints._snapshots
    snapshots_of.copies.current, snapshots_of._writer = copy, _Writer(*left)
    snapshots_of.make_room()
    assert snapshots_of._writer.abandoned == [copy, waits]
    snapshots_of._writer = None


def test_a_writer_that_is_killed_sends_the_copy_again(begin, page, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "step hashed=kill")
    monkeypatch.setenv("SLURMFT_FAULT_ONCE", str(tmp_path / "once"))
    rank = begin().save()
    rank.train(2).settle()
    rank.train(3).settle()
    assert (tmp_path / "once").exists()
    assert page[Slot.COPIED] == 2


def test_where_copies_cost_too_much_they_become_rarer_on_the_page(begin, page, monkeypatch):
    rank = begin().save()
    ticks = iter(range(0, 10**15, 10**6))
    monkeypatch.setattr(step_copies.time, "perf_counter_ns", lambda: next(ticks))
    for step in range(2, 2 + NEW_PLACES + SAMPLES + 2):
        rank.train(step).settle()
    assert rank.checkpoints._steps._spacing.interval == 2
    assert page[Slot.COPY_INTERVAL] == 2
    assert page[Slot.COPY_SHARE_PPM] > 50_000


def test_a_rehearsal_leaves_no_copies(begin, memory, monkeypatch):
    set_settings(monkeypatch, rehearsal=True)
    rank = begin().save()
    rank.checkpoints.wait()
    rank.train(5)
    assert in_memory(memory) == [1]


def test_a_manager_of_another_directory_copies_nothing(tmp_path, begin, memory, monkeypatch):
    monkeypatch.setenv("SLURMFT_CHECKPOINT_DIR", str(tmp_path / "the run's"))
    rank = begin().save()
    rank.train(4)
    assert "no memory that outlives it" in rank.checkpoints._steps.reason
    assert in_memory(memory) == []


SCRIPT = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
root, rank, world, story = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
memory = root / f"memory of {rank}"
os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1",
               "SLURMFT_MEMORY_DIR": str(memory)}
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import until
from slurmft.checkpoint import CheckpointManager
from slurmft.checkpoint import snapshots
from slurmft.checkpoint.snapshots import StepPlaces
from slurmft.ipc.pages import Page, Slot
from slurmft.trainer.savers import SAVERS
from slurmft.worker.saves import PageListener

dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{story}", rank=rank, world_size=world,
                        timeout=timedelta(seconds=60))
torch.set_num_threads(1)
page = Page.private()
SAVERS.listener = PageListener(page)

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 30))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

def total(model):
    return [value.full_tensor().double().sum().item() for value in model.state_dict().values()]

model, optimizer = made(1)
checkpoints = CheckpointManager(root / "checkpoints")
report, sums = {}, {}
if story == "restart":
    found = checkpoints.load_latest(model, optimizer)
    report |= {"step": found.step, "source": found.source, "sum": total(model)}
    checkpoints.wait()
else:
    for step in range(1, 9):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        if story == "one rank cannot" and rank == 1 and step == 4:
            checkpoints._snapshots.copies.problem = "no memory"
        SAVERS.at_boundary(step)
        sums[step] = total(model)
        if step == 1:
            checkpoints.save(model, optimizer, step=1)
            checkpoints.wait()
        copies = checkpoints._snapshots.copies
        until(lambda: copies.current is None or copies.ended is not None)
    steps = checkpoints._steps
    report |= {"reason": steps.reason, "made": steps.made, "copied": page[Slot.COPIED], "sums": sums,
               "skipped": steps.skipped, "needed": copies.needed and copies.needed.step}
checkpoints.close()
(root / f"report-{story}-{rank}.json").write_text(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
"""


class Nodes:
    """Two of them, each with a keeper for the other one's copies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keepers: list[subprocess.Popen[bytes]] = []
        (root / "attempts/1.0.0").mkdir(parents=True)
        for rank in range(2):
            (root / f"memory of {rank}").mkdir()
            (root / f"memory of {rank}" / KEY_FILE).write_bytes(b"k" * 64)

    def keep(self, rank: int) -> None:
        memory = self.root / f"memory of {rank}"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            argv = [sys.executable, "-P", "-m", "slurmft.checkpoint.replicas", str(memory)]
            number = listener.fileno()
            self.keepers.append(subprocess.Popen([*argv, str(number)], pass_fds=[number]))
            self.announce(rank, listener)

    def announce(self, rank: int, listener: socket.socket) -> None:
        where = {"hosts": ["127.0.0.1"], "port": listener.getsockname()[1]}
        write_json(announcement(self.root / "attempts/1.0.0", rank), where, durable=False)

    def run(self, story: str, world: int = 2, **settings: Any) -> list[dict[str, Any]]:
        given = {"peer_interval": 1, "peer_copies": 1, "just_in_time": False, **settings}
        run_ranks(
            SCRIPT, self.root, world, str(world), story, own=lambda rank: {"GROUP_RANK": str(rank)}, ahead=SAVING,
            **worker_variable(checkpoint=given), GROUP_WORLD_SIZE=str(world), SLURMFT_ATTEMPT="1.0.0",
            SLURMFT_RUN_FOLDER=str(self.root), PYTHONPATH=os.pathsep.join(sys.path),
        )  # fmt: skip
        return [json.loads((self.root / f"report-{story}-{rank}.json").read_text()) for rank in range(world)]

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()


@pytest.fixture
def nodes(tmp_path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.mark.long
def test_one_node_goes_on_with_what_both_had_when_the_other_one_is_lost(nodes):
    """With fewer ranks than have copied, and not from the shared filesystem, which has step 1."""
    for rank in range(2):
        nodes.keep(rank)
    reports = nodes.run("copies")
    for report in reports:
        assert (report["reason"], report["needed"]) == ("", 7)
    assert reports[0]["copied"] == 7 and reports[0]["made"] == 6
    (again,) = nodes.run("restart", world=1)
    assert again["step"] == 8
    assert again["source"] == "step 8: 1 of 2 shards from memory, 1 of 2 shards from memory of a peer"
    assert again["sum"] == pytest.approx(reports[0]["sums"]["8"])


@pytest.mark.long
def test_one_rank_that_cannot_go_on_ends_the_copies_of_all(nodes):
    for rank in range(2):
        nodes.keep(rank)
    reports = nodes.run("one rank cannot")
    for report in reports:
        assert report["reason"] != ""
        assert (report["made"], report["needed"]) == (2, None), "of steps 2 and 3"
    assert reports[0]["copied"] == 3


@pytest.mark.long
def test_without_a_keeper_that_answers_nothing_counts_as_whole(nodes):
    """Whatever has the port of node 1's closes every connection: no copy arrives there, and training goes on."""
    nodes.keep(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nodes.announce(1, listener)
        threading.Thread(target=close_each, args=(listener,), daemon=True).start()
        reports = nodes.run("no keeper")
        listener.shutdown(socket.SHUT_RDWR)
    for report in reports:
        assert (report["reason"], report["needed"], report["made"]) == ("", None, 0)
    assert reports[0]["copied"] == -1


def close_each(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
