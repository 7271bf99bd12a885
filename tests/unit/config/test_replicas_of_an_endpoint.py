"""``inference.serving.replicas``: bounds that cannot be kept are refused, with the key to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmft.config.run import RunConfig


def endpoint(path: Path, **replicas: Any) -> RunConfig:
    section = {"engine": {"command": ["engine", "{port}"]}, "replicas_per_node": 2, "serving": {"replicas": replicas}}
    return RunConfig.model_validate({"run_folder": str(path / "run"), "nodes": 2, "inference": section})


def test_none_to_all_is_allowed(tmp_path: Path) -> None:
    inference = endpoint(tmp_path, min=0, max=4).inference
    assert inference is not None and inference.serving is not None
    assert (inference.serving.replicas.min, inference.serving.replicas.max) == (0, 4)


@pytest.mark.parametrize(
    ("replicas", "word"),
    [
        ({"max": 2}, "replicas.min"),
        ({"min": 3, "max": 2}, "above replicas.max"),
        ({"min": 0, "max": 5}, "nodes times replicas_per_node"),
        ({"min": 5}, "nodes times replicas_per_node"),
        ({"min": -1}, "greater than or equal to 0"),
        ({"min": 0, "idle_s": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, replicas: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        endpoint(tmp_path, **replicas)
