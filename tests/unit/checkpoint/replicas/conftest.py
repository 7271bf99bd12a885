"""What tests of keepers share; each module says in ``new_node`` what its nodes are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_snapshots import KEY


@pytest.fixture
def node(new_node: Callable[..., Any]) -> Any:
    return new_node()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path
