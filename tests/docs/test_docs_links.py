"""Every link in the documentation leads somewhere: to a file of the repository, and to a heading of it."""

import re
import unicodedata
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, REPOSITORY, prose

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page: Path) -> set[str]:
    """What its headings are called, by GitHub and by the site."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        found |= {
            re.sub(r"[^\w\- ]", "", text).replace(" ", "-"),
            re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain)),
        }
    return found


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for link in _LINK.findall(text):
        if link.startswith(_ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            dead.append(link)
    return dead


def test_every_link_leads_somewhere():
    assert {page.name: dead for page in PAGES if (dead := dead_links(page, prose(page)))} == {}


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](docs/index.md)", []),
        ("[a](docs/index.md#non-goals)", []),
        ("[a](docs/index.md#nonsense)", ["docs/index.md#nonsense"]),
        ("[a](docs/nowhere.md)", ["docs/nowhere.md"]),
        ("![a](docs/images/none.svg)", ["docs/images/none.svg"]),
        ("[a](https://example.org/x)", []),
    ],
)
def test_a_dead_link_is_found(text: str, dead: list[str]):
    assert dead_links(REPOSITORY / "README.md", text) == dead


def test_every_page_is_in_the_navigation():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)
            and f": {page.relative_to(DOCS).as_posix()}\n" not in navigation] == []  # fmt: skip


def test_the_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
