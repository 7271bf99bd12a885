"""The random state at the start of each iteration, where the generators' words cannot be looked at."""

import logging
import random
from collections.abc import Iterator

import numpy as np
import pytest

from slurmft.trainer import savers
from slurmft.worker.rerun_data import IterationStart


def remembers(start: IterationStart) -> bool:
    """Whether the start of the next iterations is remembered, also where only one generator was drawn from."""
    for draw in (random.random, np.random.rand, lambda: None, random.random):
        draw()
        start.mark()
        now, known = savers.capture(), start.state()
        if (now["python"], now["numpy"]) != (known["python"], known["numpy"]):
            return False
    random.random()
    return start.has_drawn()


@pytest.fixture
def numpys_newer_generator() -> Iterator[None]:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    yield
    np.random.set_bit_generator(before)


def test_usually_they_can_be_looked_at(caplog):
    caplog.set_level(logging.INFO)
    assert remembers(IterationStart())
    assert caplog.messages == []


def test_without_pythons_own_object_its_state_is_copied_every_time(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.delattr(random, "_inst")
    assert remembers(IterationStart())
    assert caplog.messages == [
        "the random state of Python is copied at each iteration: its place in memory is not known here"
    ]


@pytest.mark.usefixtures("numpys_newer_generator")
def test_another_generator_of_numpys_is_copied_every_time(caplog):
    caplog.set_level(logging.INFO)
    assert remembers(IterationStart())
    assert caplog.messages == [
        "the random state of numpy is copied at each iteration: its place in memory is not known here"
    ]
