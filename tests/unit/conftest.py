from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def synchronous_saves() -> Iterator[None]:
    """A save is durable when it returns, unless a test says otherwise; also for what fixtures of a module start."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLURMFT_CHECKPOINT_ASYNC_SAVE", "0")
        yield


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition: the writer prunes, and frees what a failed save took, after its save has returned."""

    def wait(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.01)

    return wait
