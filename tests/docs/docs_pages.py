"""The Markdown files that users read, and their fenced blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [*(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
NAMES = [page.relative_to(REPOSITORY).as_posix() for page in PAGES]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Every block of these languages, in all pages."""
    return [
        Block(name, text[: match.start()].count("\n") + 1, match[1], match[2])
        for name, text in zip(NAMES, (page.read_text(encoding="utf-8") for page in PAGES), strict=True)
        for match in _FENCE.finditer(text)
        if match[1] in languages
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The command lines after a prompt, each with the lines that are shown below it."""
    line, shown = "", list[str]()
    for each in block.text.splitlines():
        if prompt := re.match(r"\$ (?=\S)", each):
            if line:
                yield line, shown
            line, shown = each[prompt.end() :], []
        elif line:
            shown.append(each)
    if line:
        yield line, shown
