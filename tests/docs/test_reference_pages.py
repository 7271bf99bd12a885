"""The pages that docs/generate.py writes say what the code says now."""

import importlib.util
from types import ModuleType

import pytest
from docs_pages import DOCS

import slurmft
from slurmft.cli.main import VERBS
from slurmft.config.run import RunConfig


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = load()
PAGES: dict[str, str] = GENERATE.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_up_to_date(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name], "make docs"


def test_every_key_verb_and_public_name_has_its_place():
    keys = [key for key in RunConfig.model_fields if f"\n## {key}\n" not in PAGES["reference/configuration.md"]
            and f"\n### `{key}`\n" not in PAGES["reference/configuration.md"]]  # fmt: skip
    verbs = [verb for verb in VERBS if f"\n## slurmft {verb}\n" not in PAGES["reference/verbs.md"]]
    names = [name for name in slurmft.__all__ if name != "__version__"
             and f"\n## {name}\n" not in PAGES["reference/public-names.md"]
             and f"\n`{name}`\n:   " not in PAGES["reference/public-names.md"]]  # fmt: skip
    assert (keys, verbs, names) == ([], [], [])


def test_every_key_is_described():
    text = PAGES["reference/configuration.md"]
    parts = [part.strip().split("\n\n") for part in text.split("\n### `")[1:]]
    assert [part[0] for part in parts if len(part) < 3 or part[2].startswith("#")] == []
