"""What is kept just in time is the state of a boundary, whole, or nothing: weights, schedule, generators, position."""

import errno
import logging
import os
import random
import struct
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from stored_state import IDENTITY, load, stage, stored_in, write

from slurmft.checkpoint import CheckpointManager, just_in_time
from slurmft.checkpoint.agreement import LeadExtra
from slurmft.checkpoint.image_file import Damage, Damaged, read_index
from slurmft.checkpoint.just_in_time import JustInTime
from slurmft.checkpoint.loading import prepare
from slurmft.checkpoint.notes import (
    LEAD,
    LeadRecord,
    OwnNotes,
    RankRecord,
    decoded_lead,
    note_file,
    read_lead,
    read_record,
)
from slurmft.checkpoint.reading import Stored
from slurmft.checkpoint.snapshots import Snapshots
from slurmft.checkpoint.state import FACTS, FlatState, Trainee, capture, rank_key
from slurmft.ipc.pages import IN_UPDATE
from slurmft.trainer.savers import SAVERS
from slurmft.worker.data import ElasticSampler


class Kept:
    """What was copied, by step."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.fails = False
        self.meanwhile = lambda: None

    def __call__(self, step, flat, check) -> None:
        if self.fails:
            raise OSError(errno.ENOMEM, "no memory")
        copy = flat.tensors["model.weight"].detach().clone()
        self.meanwhile()
        check()
        self.weights[step] = copy


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def model() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(8, 8)


def gradients(model: torch.nn.Module) -> None:
    model(torch.ones(1, 8)).sum().backward()


class Outside(torch.optim.Optimizer):
    """As accelerate's: an optimizer that is a wrapper, was never initialised as one, and calls another."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()

    def step(self, closure=None):
        self.optimizer.step(closure)


class Lookahead:
    """No optimizer by its type: every second step it goes back half of the way, behind the inner one's back."""

    def __init__(self, optimizer) -> None:
        self.inner, self.param_groups, self.count = optimizer, optimizer.param_groups, 0
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]

    def state_dict(self):
        return self.inner.state_dict()

    @property
    def state(self):
        return self.inner.state

    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            weights = [one for group in self.param_groups for one in group["params"]]
            for slow, fast in zip(self.slow, weights, strict=True):
                slow.add_(fast.data - slow, alpha=0.5)
                fast.data.copy_(slow)


WRAPPERS = {"plain": lambda inner: inner, "accelerate": Outside, "twice": lambda inner: Outside(Outside(inner)),
            "lookahead": Lookahead}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_step_of_any_optimizer_that_shares_a_weight_is_heard_of(tmp_path, listener, kept, model, wrap):
    optimizer = WRAPPERS[wrap](torch.optim.SGD(model.parameters(), lr=0.1))
    rescue = JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, optimizer), step=0)
    for step in (1, 2, 3):
        gradients(model)
        optimizer.step()
        assert listener.rescuable == IN_UPDATE
        if step < 3:
            rescue.at_boundary(step)
            at_boundary = model.weight.detach().clone()
    rescue.rescue()  # in the third step, whose update is done
    assert kept.weights == {} and listener.rescued == []
    rescue.at_boundary(3)
    at_boundary = model.weight.detach().clone()
    gradients(model)
    rescue.rescue()
    assert listener.rescued == [3] and torch.equal(kept.weights[3], at_boundary)


class ByHand:
    """An optimizer that no hook can be hung on."""

    def __init__(self, model) -> None:
        self.weights = list(model.parameters())
        self.param_groups = [{"params": self.weights, "lr": 0.1}]
        self.state = {}

    def state_dict(self):
        return {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}

    def step(self):
        for one in self.weights:
            one.data.sub_(one.grad, alpha=0.1)


def test_an_optimizer_that_cannot_be_heard_is_no_use_and_that_is_said_once(tmp_path, listener, kept, model, caplog):
    optimizer, rescue = ByHand(model), JustInTime(tmp_path, kept)
    for step in (0, 1, 2):
        rescue.arm(Trainee(model, optimizer), step=step)
        gradients(model)
        optimizer.step()
    rescue.rescue()
    assert listener.rescuable < 0 and kept.weights == {}
    [warning] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "ByHand updates the weights unseen" in warning and "save more often" in warning


def swapped(model) -> None:
    """As averages of the weights are, for an evaluation."""
    for one in model.parameters():
        one.data.copy_(one.data * 0.5)


def replaced(model) -> None:
    model.weight.data = model.weight.data.clone() * 0.5


@torch.no_grad()
def written(model) -> None:
    model.weight.mul_(0.5)


CHANGES = {"data": swapped, "storage": replaced, "in place": written}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["before", "during the copy"])
def test_weights_that_were_changed_behind_its_back_are_not_kept(tmp_path, listener, kept, model, change, moment):
    optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, optimizer), step=0)
    gradients(model)
    optimizer.step()
    rescue.at_boundary(1)
    if moment == "before":
        CHANGES[change](model)
    else:
        kept.meanwhile = lambda: CHANGES[change](model)
    rescue.rescue()
    assert kept.weights == {} and listener.rescued == []


def test_weights_written_without_an_optimizer_turn_it_off_with_one_warning(tmp_path, listener, kept, model, caplog):
    optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, optimizer), step=0)
    for step in (1, 2, 3):
        written(model)
        rescue.at_boundary(step)
        rescue.arm(Trainee(model, optimizer), step=step)  # at a save
    rescue.rescue()
    assert kept.weights == {} and listener.rescuable < 0
    [warning] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "the weights were changed in step 1 outside of an optimizer's step" in warning


@pytest.mark.parametrize("name", ["scheduler", "scaler"])
def test_a_schedule_or_scale_that_has_moved_on_is_not_kept(tmp_path, listener, kept, model, name):
    optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), JustInTime(tmp_path, kept)
    if name == "scheduler":
        part = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
        move = lambda: part.step(3.0)  # noqa: E731 - counts, and changes no rate yet
    else:
        part = torch.amp.GradScaler("cpu")
        part.scale(torch.ones(()))

        def move() -> None:
            model.weight.grad.fill_(float("inf"))
            part.step(optimizer)  # is skipped
            part.update()

    rescue.arm(Trainee(model, optimizer, **{name: part}), step=0)
    gradients(model)
    optimizer.step()
    rescue.at_boundary(1)
    move()
    rescue.rescue()
    assert kept.weights == {} and listener.rescued == []
    rescue.at_boundary(2)
    rescue.rescue()
    assert listener.rescued == [2]


class Warmup:
    """A scheduler whose state lies in collections, and changes before any rate does."""

    def __init__(self, inner=None) -> None:
        self.counts, self.history, self.inner = {"steps": 0}, [[0]], inner

    def state_dict(self):
        return {"counts": dict(self.counts), "history": self.history}

    def load_state_dict(self, state):
        self.counts = state["counts"]


MOVES = {
    "a number in a dict": lambda part, _: part.counts.update(steps=1),
    "a list in a list": lambda part, _: part.history[0].append(1),
    "one that is wrapped": lambda part, _: part.inner.counts.update(steps=1),
    "a rate that is a tensor": lambda _, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_schedule_that_has_moved_on_is_found_wherever_its_state_lies(tmp_path, listener, kept, model, move):
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    part, rescue = Warmup(Warmup()), JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, optimizer, scheduler=part), step=1)
    MOVES[move](part, optimizer)
    rescue.rescue()
    assert kept.weights == {} and listener.rescued == []
    rescue.at_boundary(2)
    rescue.rescue()
    assert listener.rescued == [2]


class Counting(torch.nn.Linear):
    """As layers of 8 bits: what it gives as its extra state changes in each forward pass."""

    passes = 0

    def get_extra_state(self):
        return {"passes": self.passes}

    def set_extra_state(self, state):
        self.passes = state["passes"]

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


def test_a_model_with_extra_state_is_not_kept_in_the_middle_of_a_step(tmp_path, listener, kept):
    model, rescue = Counting(8, 8), JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=1)
    gradients(model)
    rescue.rescue()
    assert kept.weights == {} and listener.rescuable < 0 and "_extra_state" in rescue.reason


def test_buffers_that_two_names_share_are_those_of_the_boundary_under_both(tmp_path, listener):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.append(model[1])
    found = {}

    def stage(_step, flat, check) -> None:
        check()
        found.update({name: value.clone() for name, value in flat.tensors.items()})

    rescue = JustInTime(tmp_path, stage)
    rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=1)
    at_boundary = model[1].running_mean.clone()
    model(torch.ones(2, 4))
    rescue.rescue()
    for name in ("model.1.running_mean", "model.2.running_mean"):
        assert torch.equal(found[name], at_boundary)


@pytest.mark.parametrize("failure", ["no memory", "what a rank had is not known"])
def test_a_rescue_that_fails_is_left_to_the_next_rank_of_the_node(tmp_path, listener, model, monkeypatch, failure):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made, copies = [], [Kept(), Kept()]
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        made.append(JustInTime(tmp_path, copies[rank]))
        made[-1].arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4)
    if failure == "no memory":
        copies[0].fails = True
    else:
        hidden = note_file(tmp_path, "rank-1").rename(tmp_path / "hidden")
    made[0].rescue()
    assert listener.rescued == []
    if failure != "no memory":
        hidden.rename(note_file(tmp_path, "rank-1"))
    made[1].rescue()
    assert listener.rescued == [4] and copies[1].weights.keys() == {4}
    made[0].rescue()
    assert copies[0].weights == {}


def test_of_ranks_that_keep_at_once_one_does_and_one_that_fails_lets_the_other_try(
    tmp_path, listener, model, monkeypatch
):
    """The second one comes while the first is at work: it waits for what becomes of that."""
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    copies = [Kept(), Kept()]

    def fail_late() -> None:
        begun.set()
        go_on.wait(20)
        raise OSError(errno.ENOMEM, "no memory")

    copies[0].meanwhile = fail_late
    made = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        made.append(JustInTime(tmp_path, copies[rank]))
        made[-1].arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4)
    first = threading.Thread(target=made[0].rescue)
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=made[1].rescue)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert listener.rescued == [4] and copies[1].weights.keys() == {4}


def test_a_rank_that_hangs_in_a_rescue_is_not_waited_for_for_ever(tmp_path, listener, kept, model, monkeypatch):
    monkeypatch.setattr(just_in_time, "OTHERS_S", 0.05)
    rescue = JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4)
    with just_in_time.alone_on_this_node(tmp_path, 4):
        rescue.rescue()
    assert kept.weights == {} and listener.rescuable < 0


def test_marks_of_earlier_attempts_go(tmp_path, listener, kept, model, monkeypatch):
    monkeypatch.setenv("SLURMFT_GENERATION", "7")
    for name in ("rescue-6-40", "rescue-7-3", "rescue-71-3"):
        (tmp_path / name).touch()
    JustInTime(tmp_path, kept).arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4)
    assert {path.name for path in tmp_path.glob("rescue-*")} == {"rescue-7-3"}


# ---- what each rank had for itself -----------------------------------------------------------------------------------


def test_a_step_counts_as_noted_when_it_is_over_and_not_before(tmp_path, listener, kept, model):
    """A rank draws at the end of a rare step, after its last collective; one that dies before has not drawn yet."""
    optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, optimizer), step=0)
    for step in range(1, 8):
        gradients(model)
        optimizer.step()
        assert read_record(tmp_path, 0, step, 0) is None
        if step % 7 == 0:
            random.random()
        rescue.at_boundary(step)
        assert read_record(tmp_path, 0, step, 0)["rng"]["python"][1] == list(random.getstate()[1])


def test_notes_of_steps_that_were_not_over_are_refused(tmp_path):
    """An earlier slurmft has left some that were never verified."""
    record = RankRecord(tmp_path, 0, 1)
    record.note(7, {"place": 1})
    assert read_record(tmp_path, 0, 7, 1) is not None
    for early in (0, 1):
        with note_file(tmp_path, "rank-0").open("r+b") as file:
            for at in (0, 256 * 1024):
                file.seek(at + 16)
                file.write(struct.pack("=q", early))
        assert read_record(tmp_path, 0, 7, 1) is None


class OwnLoader:
    """One whose position is each rank's own."""

    def __init__(self) -> None:
        self.state = {"taken": 0}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def trainee(loader) -> Trainee:
    model = torch.nn.Linear(4, 4)
    return Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader=loader)


def sampler() -> ElasticSampler:
    return ElasticSampler(100, 12, rank=0, world_size=1)


def kept_by_the_second_node(folder: Path, one: Trainee) -> Stored:
    """Of four ranks on two nodes the first two have died, and no rank of their node is left to keep their state."""
    flat = capture(one, None, rank=0)
    own = flat.objects.pop(rank_key(0))
    for rank in (2, 3):
        flat.put(rank_key(rank), own)
    flat.put(FACTS, {"metrics": {}, "world_size": 4, "just_in_time": True})
    write(folder, *stage(flat))
    return stored_in(folder, read_index(folder / "__0_0.json"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_without_a_ranks_own_part_is_not_whole(tmp_path, rank):
    one = trainee(sampler())
    stored = kept_by_the_second_node(tmp_path / "kept", one)
    with pytest.raises(Damaged, match=f"own state of rank {rank}") as caught:
        prepare(one, stored, rank=rank, world_size=4)
    assert caught.value.damage is Damage.MISSING
    noted = one.rank_payload()
    found = prepare(one, stored, rank=rank, world_size=4, notes=OwnNotes(noted | {"era": 0}))
    assert found.is_own and found.own == noted
    assert prepare(one, stored, rank=2, world_size=4).is_own


def test_buffers_of_another_rank_are_not_taken_for_those_of_rank_0(tmp_path, listener, monkeypatch):
    """A node without rank 0 keeps the buffers of a rank of its own: what counts are those that rank 0 sends to all."""
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    model = torch.nn.BatchNorm1d(4)
    one = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def store(_step, flat, _check) -> None:
        write(tmp_path / "kept", *stage(flat))

    rescue = JustInTime(tmp_path, store)
    rescue.arm(one, step=4)
    rescue.rescue()
    assert listener.rescued == [4]
    stored = stored_in(tmp_path / "kept", read_index(tmp_path / "kept/__0_0.json"))
    notes = OwnNotes(one.rank_payload() | {"era": SAVERS.loads})  # other tests of this process may have loaded before
    for rank in (1, 2):
        assert prepare(one, stored, rank=rank, world_size=3, notes=notes).is_own
    with pytest.raises(Damaged, match="the buffers of rank 0"):
        prepare(one, stored, rank=0, world_size=3, notes=notes)


class Shared:
    """The states that a node keeps."""

    def __init__(self) -> None:
        self.flat = None

    def __call__(self, _step, flat, check) -> None:
        check()
        self.flat = FlatState(
            {name: value.detach().clone() for name, value in flat.tensors.items()}, dict(flat.objects), dict(flat.paths)
        )


def ranks_of_one_node(folder: Path, monkeypatch, count: int = 2):
    """Each with the buffers that its own batches have left; after step 4."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    monkeypatch.setenv("WORLD_SIZE", str(count))
    made = []
    for rank in range(count):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        model, kept = torch.nn.BatchNorm1d(4), Shared()
        model.running_mean.fill_(rank + 1)
        optimizer, rescue = torch.optim.SGD(model.parameters(), lr=0.1), JustInTime(folder, kept)
        rescue.arm(Trainee(model, optimizer), step=4, extra=lambda rank=rank: {"of rank": rank, "nan": float("nan")})
        made.append((model, kept, rescue))
    return made


def test_a_rank_keeps_the_buffers_and_the_extra_of_rank_0_which_is_dead(tmp_path, listener, monkeypatch):
    (lead, *_), (other, kept, rescue) = ranks_of_one_node(tmp_path, monkeypatch)
    other.running_mean.fill_(9)
    rescue.rescue()
    assert listener.rescued == [4]
    assert kept.flat.tensors["model.running_mean"].tolist() == lead.running_mean.tolist() == [1.0] * 4
    assert kept.flat.objects["extra"]["of rank"] == 0
    assert kept.flat.objects[FACTS]["buffers_of"] == 0


@pytest.mark.parametrize("lost", ["note of rank 0", "note on this step", "note before the load"])
def test_without_the_note_of_rank_0_on_that_step_another_rank_of_its_node_keeps_nothing(
    tmp_path, listener, monkeypatch, lost
):
    _, (*_, kept, rescue) = ranks_of_one_node(tmp_path, monkeypatch)
    if lost == "note of rank 0":
        note_file(tmp_path, LEAD).unlink()
    elif lost == "note on this step":
        rescue.at_boundary(5)
    else:
        monkeypatch.setattr(SAVERS, "loads", SAVERS.loads + 1)
    rescue.rescue()
    assert listener.rescued == [] and kept.flat is None


def test_notes_from_before_a_load_are_not_those_of_the_same_step_after_it(tmp_path, listener, kept, model, monkeypatch):
    """A script goes back behind a spike of its loss, and a rank dies before it has noted the step anew."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    RankRecord(tmp_path, 1, 0).note(4, {"place": "before the load"})
    monkeypatch.setattr(SAVERS, "loads", SAVERS.loads + 1)
    rescue = JustInTime(tmp_path, kept)
    rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4)
    rescue.rescue()
    assert listener.rescued == [] and kept.weights == {}


def test_a_function_that_is_given_at_a_later_save_counts_from_that_step_on(tmp_path, listener, model):
    keep, optimizer = Shared(), torch.optim.SGD(model.parameters(), lr=0.1)
    rescue = JustInTime(tmp_path, keep)
    rescue.arm(Trainee(model, optimizer), step=4)
    for step in (4, 5):
        if step == 5:
            rescue.at_boundary(5)
        rescue.arm(Trainee(model, optimizer), step=step, extra=lambda step=step: {"made at": step})
        rescue.rescue()
        assert keep.flat.objects["extra"] == {"made at": step}
    gradients(model)
    optimizer.step()  # of step 6: a save in the middle of it, with another function
    rescue.arm(Trainee(model, optimizer), step=6, extra=lambda: {"made at": "the middle of a step"})
    assert read_lead(tmp_path, 5, 0).extra == {"made at": 5} and read_lead(tmp_path, 6, 0) is None


def test_extra_that_cannot_be_noted_turns_it_off_and_training_goes_on(tmp_path, listener, kept, model, caplog):
    def fail() -> dict[str, object]:
        raise KeyError("no such total")

    for extra, words in ((fail, "extra() raised KeyError"), (lambda: {"x": object()}, "extra is not made of plain")):
        rescue = JustInTime(tmp_path, kept)
        with caplog.at_level(logging.INFO):
            rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4, extra=extra)
        rescue.rescue()
        assert words in caplog.text and kept.weights == {}


def kept_elsewhere(folder: Path, monkeypatch) -> tuple[Trainee, Stored]:
    """By a node without rank 0, which has no note of it either."""
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    model = torch.nn.BatchNorm1d(4)
    model.running_mean.fill_(3)
    one = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder.mkdir()
    rescue = JustInTime(folder, lambda _step, flat, _check: write(folder / "kept", *stage(flat)))
    rescue.arm(one, step=4, extra=lambda: {"of rank": 2})
    rescue.rescue()
    return one, stored_in(folder / "kept", read_index(folder / "kept/__0_0.json"))


def test_what_another_node_kept_gets_the_part_of_rank_0_from_its_notes(tmp_path, listener, monkeypatch):
    one, stored = kept_elsewhere(tmp_path / "node", monkeypatch)
    own = one.rank_payload() | {"era": SAVERS.loads}
    buffers = {
        "running_mean": torch.full((4,), 1.0),
        "running_var": torch.ones(4),
        "num_batches_tracked": torch.tensor(7),
    }
    record = LeadRecord(tmp_path, 0, lambda: {"of rank": 0, "pair": (1, 2)}, buffers)
    lead = decoded_lead(record.note(4))
    for rank in (0, 1, 2):
        found = prepare(one, stored, rank=rank, world_size=3, notes=OwnNotes(own, lead))
        assert found.extra == {"of rank": 0, "pair": (1, 2)}
        found.apply()
        assert one.model.running_mean.tolist() == [1.0] * 4 and one.model.num_batches_tracked.item() == 7
    for rank in (0, 1, 2):
        with pytest.raises(Damaged, match="extra, which rank 0 had"):
            prepare(one, stored, rank=rank, world_size=3, notes=OwnNotes(own))
        late = OwnNotes(own | {"era": SAVERS.loads + 1}, lead)
        with pytest.raises(Damaged, match="own state") if rank != 2 else nullcontext():
            prepare(one, stored, rank=rank, world_size=3, notes=late)


@pytest.mark.parametrize("rank", [4, 5])
def test_a_rank_that_did_not_exist_takes_the_shared_position_from_any_rank(tmp_path, rank):
    saved, loaded = trainee(sampler()), trainee(sampler())
    for _ in range(3):
        saved.loader.advance()
    stored = kept_by_the_second_node(tmp_path / "kept", saved)
    found = prepare(loaded, stored, rank=rank, world_size=6)
    assert not found.is_own
    before = random.getstate()
    found.apply()
    assert loaded.loader.position == 36 and random.getstate() == before


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_a_loader_without_a_shared_position_is_refused_with_another_number_of_ranks(tmp_path, rank):
    one = trainee(OwnLoader())
    one.loader.state["taken"] = 9
    stored = kept_by_the_second_node(tmp_path / "kept", one)
    with pytest.raises(Damaged, match="position of its own") as caught:
        prepare(one, stored, rank=rank, world_size=5, notes=OwnNotes(one.rank_payload() | {"era": 0}))
    assert caught.value.damage is Damage.MISFIT and "ElasticSampler" in caught.value.hint


def test_a_state_that_no_rank_has_a_part_of_its_own_in_is_not_whole(tmp_path):
    one = trainee(sampler())
    flat = capture(one, None, rank=0)
    del flat.objects[rank_key(0)]
    flat.put(FACTS, {"metrics": {}, "world_size": 1, "just_in_time": True})
    write(tmp_path / "kept", *stage(flat))
    with pytest.raises(Damaged, match="own state of any rank"):
        load(tmp_path / "kept", one, rank=1)
    assert IDENTITY.step == 7 and os.listdir(tmp_path / "kept")


def test_a_save_in_the_middle_of_a_step_leaves_what_is_noted_of_the_last_one(tmp_path, listener):
    """Gradients are accumulated over steps: this one changes the buffers and the extra, and no weight."""
    model, keep, seen = torch.nn.BatchNorm1d(4), Shared(), [4]
    one = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rescue = JustInTime(tmp_path, keep)
    rescue.arm(one, step=4, extra=lambda: {"seen": seen[0]})
    model.running_mean.fill_(5)
    seen[0] = 5
    rescue.arm(one, step=5, extra=lambda: {"seen": seen[0]})
    rescue.rescue()
    assert listener.rescued == [4]
    assert keep.flat.objects["extra"] == {"seen": 4} and keep.flat.tensors["model.running_mean"].tolist() == [0.0] * 4


@pytest.mark.parametrize("values", [1 << 18, 1 << 20])
def test_buffers_of_any_size_that_is_noted_can_be_read_again(tmp_path, listener, values):
    model, keep = torch.nn.Linear(4, 4), Shared()
    model.register_buffer("table", torch.arange(values, dtype=torch.float32)[:-16])
    rescue = JustInTime(tmp_path, keep)
    rescue.arm(Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1)), step=4, extra=lambda: {"seen": 4})
    assert torch.equal(read_lead(tmp_path, 4, 0).buffers["table"], model.table)
    rescue.rescue()
    assert listener.rescued == [4] and keep.flat.objects[FACTS]["buffers_of"] == 0


def test_buffers_of_every_kind_come_back_from_a_note(tmp_path):
    buffers = {
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "complex": torch.tensor([1 + 2j]),
    }
    found = decoded_lead(LeadRecord(tmp_path, 0, lambda: None, buffers).note(4))
    assert found.extra == {} and found.buffers.keys() == buffers.keys()
    for name, value in buffers.items():
        assert found.buffers[name].dtype == value.dtype
        assert torch.equal(found.buffers[name].nan_to_num(9), value.nan_to_num(9)), name


def test_a_note_whose_bytes_are_not_those_that_were_written_is_none(tmp_path):
    record = RankRecord(tmp_path, 0, 1)
    record.note(7, {"place": 1})
    path = note_file(tmp_path, "rank-0")
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"place": 1', b'"place": 2'))
    assert read_record(tmp_path, 0, 7, 1) is None
    path.write_bytes(content)
    assert read_record(tmp_path, 0, 7, 1)["loader"] == {"place": 1}
    path.write_bytes(content[: len(content) // 2])
    assert read_record(tmp_path, 0, 7, 1) is None


@pytest.fixture
def run(tmp_path, listener, monkeypatch) -> Path:
    """The folder of checkpoints of a run whose node has memory that outlives its ranks."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(tmp_path / "memory"))
    listener.on_saved = lambda _step, _seconds: None
    return tmp_path / "checkpoints"


def test_the_managers_function_counts_again_once_a_state_that_was_kept_is_loaded(run, listener, model):
    """It is asked at the first boundary, when the trainer has put back what was loaded, and not before."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), {"seen": 4}

    def extra() -> dict[str, int]:
        return dict(seen)

    for start, ended in ((4, 5), (5, 6), (6, 7)):
        manager = CheckpointManager(run, extra=extra)
        if start == 4:
            manager.save(model, optimizer, step=4)
        else:
            seen["seen"] = -1
            loaded = manager.load_latest(model, optimizer)
            assert (loaded.step, loaded.extra) == (start, {"seen": start}) and not loaded.is_durable
            seen.update(loaded.extra)
        SAVERS.at_boundary(start)
        gradients(model)
        optimizer.step()
        seen["seen"] = ended
        SAVERS.at_boundary(ended)
        SAVERS.rescue()
        assert listener.rescued[-1] == ended
        manager.close()


def test_what_other_ranks_keep_is_known_to_lack_an_extra_that_rank_0_alone_was_given(run, listener, model, monkeypatch):
    """The others of a trainer may well pass none, as it is rank 0's."""
    found = list[FlatState]()
    monkeypatch.setattr(Snapshots, "keep", lambda _self, flat, _identity, _check: found.append(flat))
    kept_by_rank_1(run, model, LeadExtra.FUNCTION, monkeypatch)
    assert found[0].objects[FACTS]["has_extra"] and "extra" not in found[0].objects


@pytest.mark.parametrize(("of_lead", "rescued"), [(LeadExtra.FIXED, []), (LeadExtra.NONE, [5])])
def test_a_fixed_extra_of_rank_0_turns_it_off_on_all_ranks(run, listener, model, monkeypatch, of_lead, rescued):
    kept_by_rank_1(run, model, of_lead, monkeypatch)
    assert listener.rescued == rescued


def kept_by_rank_1(run: Path, model: torch.nn.Module, of_lead: LeadExtra, monkeypatch) -> None:
    """Which is given no extra itself, and is alone on its node."""
    monkeypatch.setattr(LeadExtra, "of", lambda _extra: of_lead)  # as rank 0 says
    monkeypatch.setenv("RANK", "1")
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.1), CheckpointManager(run)
    manager.save(model, optimizer, step=4)
    gradients(model)
    optimizer.step()
    SAVERS.at_boundary(5)
    SAVERS.rescue()
    manager.close()


def test_a_step_that_was_kept_before_a_load_is_kept_again_after_it(tmp_path, listener, kept, model, monkeypatch):
    """The trainer has caught the error, and gone back to an older state by itself."""
    rescue = JustInTime(tmp_path, kept)
    one = Trainee(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        rescue.arm(one, step=4)
        rescue.rescue()
        monkeypatch.setattr(SAVERS, "loads", SAVERS.loads + 1)
        rescue.loaded()
    assert listener.rescued == [4, 4]
