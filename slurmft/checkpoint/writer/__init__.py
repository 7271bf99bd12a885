"""The writer: one process beside each worker that makes its snapshots durable."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``main`` was here: a worker that runs since before an upgrade starts its next writer by that name."""
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurmft.checkpoint.writer.entry import main

    return main
