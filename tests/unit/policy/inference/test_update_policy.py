"""What a rolling update may change."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.policy.serving import changed_keys, refused_keys


@pytest.mark.parametrize(
    ("before", "after", "changed", "refused"),
    [
        ({"nodes": 2}, {"nodes": 2}, [], []),
        ({"nodes": 2}, {"nodes": 3}, ["nodes"], ["nodes"]),
        (
            {"inference": {"engine": {"command": ["a"]}, "concurrency": 1}},
            {"inference": {"engine": {"command": ["b"]}, "concurrency": 2}},
            ["inference.concurrency", "inference.engine.command"],
            ["inference.concurrency"],
        ),
        (
            {"inference": {"engine": {"token_file": None}}},
            {"inference": {"engine": {"token_file": "/t", "more": 1}}},
            ["inference.engine.more", "inference.engine.token_file"],
            ["inference.engine.token_file"],
        ),
        ({"inference": {"engine": {}}}, {"inference": None}, ["inference"], ["inference"]),
    ],
)
def test_only_the_engine_may_change(
    before: dict[str, Any], after: dict[str, Any], changed: list[str], refused: list[str]
) -> None:
    assert changed_keys(before, after) == changed
    assert refused_keys(changed) == refused
