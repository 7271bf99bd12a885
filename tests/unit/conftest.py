from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def synchronous_saves(monkeypatch):
    """A save is durable when it returns, unless a test says otherwise."""
    monkeypatch.setenv("SLURMFT_CHECKPOINT_ASYNC_SAVE", "0")
