"""Which boundaries are in the middle of an accumulation, by what scripts do in their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slurmft.trainer import gradients
from slurmft.trainer.gradients import OpenGradients

Action = Callable[["Script"], Any]


class Script:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.other = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1)

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()

    def by_hand(self) -> None:
        with torch.no_grad():
            for one in self.model.parameters():
                one.sub_(one.grad, alpha=0.1)


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
    ],
)
def test_what_waits_behind_each_step(steps: list[Action], waiting: str) -> None:
    script, watch = Script(), OpenGradients()
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


def test_a_new_gradient_at_an_old_ones_address_is_new() -> None:
    script, watch = Script(), OpenGradients()
    watch.follow(script.optimizer)
    assert list(_run(watch, script, [update_and_free, add] * 20)) == [False, True] * 20


def test_where_no_update_is_ever_seen_a_run_is_saved_all_the_same(monkeypatch, caplog) -> None:
    monkeypatch.setattr(gradients, "LONGEST_WINDOW", 10)
    script, watch = Script(), OpenGradients()
    watch.follow(script.optimizer)
    assert list(_run(watch, script, [add] * 13)) == [True] * 10 + [False] * 3
    assert "do not contain them" in caplog.text
