"""The site builds: strictly, and without anything that is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import REPOSITORY


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loaded = re.compile(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert [tag for page in pages for tag in loaded.findall(page.read_text(encoding="utf-8"))] == []
