"""Which boundaries are in the middle of an accumulation, by what scripts do in their steps."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurmft.errors import UsageError
from slurmft.trainer import savers
from slurmft.trainer.savers import OpenGradients

Action = Callable[["Script"], Any]


class Script:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.second = torch.nn.Linear(3, 1)
        self.other = torch.optim.SGD(self.second.parameters(), lr=0.1)

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()

    def by_hand(self) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one.sub_(one.grad, alpha=0.1)


@pytest.fixture
def watch(monkeypatch) -> Iterator[OpenGradients]:
    of_other_sessions = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(of_other_sessions, "_global_optimizer_post_hooks", OrderedDict())
    yield (one := OpenGradients())
    if one._hook is not None:
        one._hook.remove()


def nothing(_script: Script) -> None: ...


def add(script: Script) -> None:
    script.backward()


def update(script: Script) -> None:
    script.backward()
    script.optimizer.step()


def update_and_free(script: Script) -> None:
    update(script)
    script.optimizer.zero_grad()


def update_and_zero(script: Script) -> None:
    update(script)
    script.optimizer.zero_grad(set_to_none=False)


def begin(script: Script) -> None:
    script.optimizer.zero_grad()
    script.backward()


def give_up(script: Script) -> None:
    script.backward()
    script.optimizer.zero_grad()


def by_hand(script: Script) -> None:
    script.backward()
    script.by_hand()


def update_and_zero_twice(script: Script) -> None:
    update_and_zero(script)
    script.model.zero_grad(set_to_none=False)


def update_and_begin_in_place(script: Script) -> None:
    update_and_zero(script)
    script.backward()


def update_and_begin(script: Script) -> None:
    torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
    script.optimizer.step()
    script.optimizer.zero_grad()
    script.backward()


def leave_some_in_another(script: Script) -> None:
    """As the generator of two networks that are trained against each other."""
    script.optimizer.step()
    (script.model(torch.ones(2, 3)) * script.second(torch.ones(2, 3))).sum().backward()
    script.other.step()
    script.optimizer.zero_grad()
    script.other.zero_grad()
    (script.model(torch.ones(2, 3)) * script.second(torch.ones(2, 3))).sum().backward()
    script.other.step()


@pytest.mark.parametrize(
    ("steps", "waiting"),
    [
        pytest.param([add, add, update_and_free, add], "1101", id="a window"),
        pytest.param([add, update_and_zero, add, update_and_zero], "1010", id="zeroed, not freed"),
        pytest.param([update, update, update], "000", id="left behind after each update"),
        pytest.param([update, nothing, nothing, begin, update], "00010", id="left behind, and steps without any"),
        pytest.param([add, give_up, nothing], "100", id="a window that is given up"),
        pytest.param([by_hand, by_hand], "00", id="weights that are changed by hand"),
        pytest.param([begin, add, by_hand, nothing], "1100", id="a window by hand"),
        pytest.param([begin, update_and_begin, add, update], "1110", id="a window that begins behind an update"),
        pytest.param([update_and_begin_in_place, add, update], "110", id="a window that begins in zeroed gradients"),
        pytest.param([update_and_zero_twice] * 5, "00000", id="zeroed twice"),
        pytest.param([leave_some_in_another] * 5, "00000", id="two networks"),
    ],
)
def test_what_waits_behind_each_step(steps: list[Action], waiting: str, watch: OpenGradients) -> None:
    script = Script()
    watch.follow(script.optimizer)
    watch.at_boundary(script.model)
    assert not watch.are_waiting
    seen = list(_run(watch, script, steps))
    assert seen == [mark == "1" for mark in waiting]


def _run(watch: OpenGradients, script: Script, steps: list[Action]) -> Iterator[bool]:
    for step in steps:
        step(script)
        watch.at_boundary(script.model)
        yield watch.are_waiting


def test_a_new_gradient_at_an_old_ones_address_is_new(watch: OpenGradients) -> None:
    script = Script()
    watch.follow(script.optimizer)
    assert list(_run(watch, script, [update_and_free, add] * 20)) == [False, True] * 20


def test_where_no_update_is_ever_seen_a_run_is_saved_all_the_same(monkeypatch, caplog, watch) -> None:
    monkeypatch.setattr(savers, "LONGEST_WINDOW", 10)
    script = Script()
    watch.follow(script.optimizer)
    assert list(_run(watch, script, [add] * 13)) == [True] * 10 + [False] * 3
    assert "do not contain them" in caplog.text


@pytest.mark.parametrize("window", [[update_and_begin], [update_and_begin, add], [update_and_begin_in_place]])
def test_a_script_whose_every_update_is_followed_by_a_backward_pass_is_refused(window, watch) -> None:
    script = Script()
    watch.follow(script.optimizer)
    with pytest.raises(UsageError, match="earlier step") as caught:
        list(_run(watch, script, window * 5))
    assert "last backward pass" in caught.value.hint


def test_updates_within_the_backward_pass_leave_nothing(watch: OpenGradients) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(8)))
    each = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}

    def use(weight: torch.Tensor) -> None:
        each[weight].step()

    for weight, optimizer in each.items():
        watch.follow(optimizer)
        weight.register_post_accumulate_grad_hook(use)
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
        watch.at_boundary(model)
        assert not watch.are_waiting


def test_gradients_that_fsdp_holds_back_wait(watch: OpenGradients) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for one in (*model, model):
            fully_shard(one, mesh=init_device_mesh("cpu", (1,)))
        watch.follow(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        waiting = []
        for is_last in (False, False, True, False):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(2, 4)).sum().backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            watch.at_boundary(model)
            waiting.append(watch.are_waiting)
    finally:
        dist.destroy_process_group()
    assert waiting == [True, True, False, True]
