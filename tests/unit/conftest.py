from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def synchronous_saves(monkeypatch):
    """A save is durable when it returns, unless a test says otherwise."""
    monkeypatch.setenv("SLURMFT_CHECKPOINT_ASYNC_SAVE", "0")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition: the writer prunes, and frees what a failed save took, after its save has returned."""

    def wait(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.01)

    return wait
