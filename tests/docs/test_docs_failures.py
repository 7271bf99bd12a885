"""The book of failures is what its writer makes of what was seen."""

import json
import subprocess
import sys

from docs_pages import DOCS, REPOSITORY

BENCH = REPOSITORY / "bench" / "failures"
WRITE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import book
print(json.dumps({path.as_posix(): text for path, text in book.pages().items()}))
"""


def test_the_page_and_its_figures_are_those_that_the_writer_makes():
    # in a process of its own: the programs of bench/ have modules of the same names
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(BENCH)], capture_output=True, text=True, timeout=60, check=True
    )
    pages = json.loads(done.stdout)
    assert "failures.md" in pages and len(pages) > 1
    for path, text in pages.items():
        assert (DOCS / path).read_text(encoding="utf-8") == text, f"docs/{path}: python bench/failures --only-page"
    drawn = {path.relative_to(DOCS).as_posix() for path in (DOCS / "images" / "failures").iterdir()}
    assert drawn == pages.keys() - {"failures.md"}
