"""The page on Lightning: its script and configuration, run as it says."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import Block, blocks, commands

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="pip install lightning"),
]

PAGE = "docs/how-to/lightning.md"


def of_page(language: str) -> Block:
    block, *_ = (one for one in blocks(language) if one.page == PAGE)
    return block


@pytest.mark.long
def test_the_page_does_what_it_shows(tmp_path: Path) -> None:
    for language in ("python", "yaml"):
        text = of_page(language).text
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    ((line, shown),) = commands(of_page("console"))
    argv = [sys.executable, "-m", *line.split()]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert shown[0] in result.stdout
    (save,) = (tmp_path / "runs/lightning/checkpoints/lightning/fit-1").glob("step-000000000000096.*")
    assert (save / "complete.json").is_file()
    outside = subprocess.run(
        [sys.executable, "-c", "import lightning as L; print([type(c).__name__ for c in L.Trainer().callbacks])"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert "Slurmft" not in outside.stdout
