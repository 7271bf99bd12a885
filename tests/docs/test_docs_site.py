"""The site builds: strictly, and without anything that is loaded from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    site = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loaded = re.compile(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert [tag for page in pages for tag in loaded.findall(page.read_text(encoding="utf-8"))] == []


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def in_browser(address: str, profile: Path) -> str:
    """The page as it is once its scripts have run."""
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--virtual-time-budget=60000", "--dump-dom", address]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_search_works_from_a_disk_and_copies_are_commands_alone(site: Path, tmp_path: Path):
    found = in_browser(f"file://{site}/index.html?q=preemption", tmp_path)
    assert re.search(r'md-search-result__meta">\d+ matching documents', found)
    page = (site / "how-to" / "first-run.html").read_text(encoding="utf-8")
    script = """<script>addEventListener("load", () => {
        const block = [...document.querySelectorAll("pre")].find((each) => each.querySelector(".gp"));
        block.setAttribute("data-md-copying", "");
        document.body.insertAdjacentText("beforeend", "COPIED" + block.innerText.trim() + "END");
    })</script></body>"""
    (site / "how-to" / "copied.html").write_text(page.replace("</body>", script), encoding="utf-8")
    assert "COPIEDmake quickstartEND" in in_browser(f"file://{site}/how-to/copied.html", tmp_path)
