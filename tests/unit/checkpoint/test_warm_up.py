"""What a waiting process does before it becomes a worker changes nothing that the worker could see."""

import random
from typing import Any

import numpy
import torch

from slurmft.checkpoint import manager
from slurmft.trainer import savers
from slurmft.trainer.savers import SAVERS


def drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]


def test_a_state_is_loaded_and_no_trace_is_left(tmp_path, monkeypatch):
    applied = []

    def prepare(*args: Any, real: Any = manager.prepare, **named: Any) -> Any:
        applied.append(real(*args, **named))
        return applied[-1]

    monkeypatch.setattr(manager, "prepare", prepare)
    before, known = savers.capture(), (SAVERS.savers, SAVERS.trained, SAVERS.loads)
    after = drawn()
    savers.restore(before)
    manager.warm_up(tmp_path)
    assert drawn() == after
    assert len(applied) == 1 and applied[0].is_own
    assert (SAVERS.savers, SAVERS.trained, SAVERS.loads) == known
    assert not list(tmp_path.iterdir())


def test_an_error_is_no_error_of_the_worker(tmp_path):
    before = savers.capture()
    after = drawn()
    savers.restore(before)
    manager.warm_up(tmp_path / "gone")
    assert drawn() == after
