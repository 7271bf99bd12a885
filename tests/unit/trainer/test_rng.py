"""What was captured is drawn again, and nothing is drawn by capturing."""

import random

import numpy as np
import pytest
import torch

from slurmft.trainer import savers


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


def stir() -> None:
    """Leave odd states behind: half a pair of Gaussians is cached in python and numpy."""
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(3)


def test_the_same_numbers_come_again():
    stir()
    state = savers.capture()
    first = draw()
    draw()
    savers.restore(state)
    assert draw() == first


def test_capturing_draws_nothing():
    state = savers.capture()
    first = draw()
    savers.restore(state)
    savers.capture()
    assert draw() == first


def test_the_state_survives_a_weights_only_file(tmp_path):
    stir()
    torch.save(savers.capture(), tmp_path / "rng.pt")
    first = draw()
    savers.restore(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == first


def test_another_bit_generator_of_numpy_is_kept(tmp_path):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        torch.save(savers.capture(), tmp_path / "rng.pt")
        first = draw()
        savers.restore(torch.load(tmp_path / "rng.pt", weights_only=True))
        assert draw() == first
    finally:
        np.random.set_bit_generator(before)


def test_a_missing_gpu_is_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    savers.restore(savers.capture() | {"cuda": torch.zeros(16, dtype=torch.uint8), "from the future": 1})
    assert "no GPU" in caplog.text


def test_a_strange_state_is_an_error():
    with pytest.raises(KeyError):
        savers.restore({})
