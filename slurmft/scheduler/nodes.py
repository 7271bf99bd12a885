"""Nodes."""

from __future__ import annotations

from collections.abc import Collection


def compress(nodes: Collection[str]) -> str:
    """A hostlist."""
    return ",".join(sorted(nodes))
