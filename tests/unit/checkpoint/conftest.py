from collections.abc import Iterator
from pathlib import Path

import pytest
from listener import Listener


@pytest.fixture
def listener() -> Iterator[Listener]:
    from slurmft.trainer.savers import SAVERS

    SAVERS.listener = one = Listener()
    yield one
    SAVERS.listener, SAVERS.is_armed = None, False


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's folder, which outlives a worker."""
    folder = tmp_path / "memory of the node"
    folder.mkdir()
    monkeypatch.setenv("SLURMFT_MEMORY_DIR", str(folder))
    return folder
