"""What an endpoint that serves may have replaced: its engine, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENGINE = "inference.engine."
OF_ROUTERS = frozenset({"inference.engine.token_file", "inference.engine.allow_paths"})
"""Settings of the engine that routers read when they start."""


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys, with their sections, whose values differ, sorted."""
    found: list[str] = []
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changed_keys(old, new, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return sorted(found)


def refused_keys(changed: list[str]) -> list[str]:
    """Those of them that a rolling update cannot change."""
    return [key for key in changed if not key.startswith(ENGINE) or key in OF_ROUTERS]
