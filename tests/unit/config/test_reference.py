"""configs/: the reference names every key with its true default, the examples load, the schema is up to date."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from slurmft.cli.schema import configuration_schema
from slurmft.config import config as configuration
from slurmft.config.config import RunConfig

CONFIGS = Path(__file__).parents[3] / "configs"
REFERENCE = CONFIGS / "reference.yaml"


def leaves(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key with its default as YAML would say it; PydanticUndefined where it is required."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*above, name))
        elif field.is_required():
            yield (*above, name), PydanticUndefined
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            yield (*above, name), list(default) if isinstance(default, tuple) else default


KEYS = dict(leaves(RunConfig))
SECTIONS = [name for name, field in RunConfig.model_fields.items() if isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)]  # fmt: skip


def in_reference() -> dict[tuple[str, ...], Any]:
    raw = yaml.safe_load(REFERENCE.read_text(encoding="utf-8"))
    top = {(key,): value for key, value in raw.items() if key not in SECTIONS}
    return top | {(section, key): value for section in SECTIONS for key, value in raw[section].items()}


RUNS = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name != "health.yaml"]
"""health.yaml is the nodes': test_health_settings.py."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_configuration_in_the_repository_loads(path: Path):
    config = configuration.load(path)
    assert config.name
    assert config.world_size >= 1


def test_the_reference_names_every_key_and_no_other():
    assert set(in_reference()) == set(KEYS)


@pytest.mark.parametrize(
    "key", [key for key, default in KEYS.items() if default is not PydanticUndefined], ids=".".join
)
def test_the_reference_states_the_true_default(key: tuple[str, ...]):
    stated = in_reference()[key]
    assert (stated, type(stated)) == (KEYS[key], type(KEYS[key]))


def test_the_reference_marks_what_is_required():
    required = {".".join(key) for key, default in KEYS.items() if default is PydanticUndefined}
    assert required == {key for key in required if comment_above(key).startswith("Required.")} != set()


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_the_reference_explains_every_key(key: tuple[str, ...]):
    assert comment_above(key[-1], indent="  " * (len(key) - 1)).endswith((".", ").", "}."))


def test_without_its_optional_keys_the_reference_means_the_same():
    raw = yaml.safe_load(REFERENCE.read_text(encoding="utf-8"))
    required = {key: raw[key] for key in ("command", "run_folder")}
    assert configuration.validate(raw, source="all") == configuration.validate(required, source="required only")


def test_the_schema_is_up_to_date():
    stored = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    assert stored == configuration_schema(), "slurmft schema > configs/schema.json"


def test_the_schema_describes_every_key():
    def undescribed(model: dict[str, Any]) -> list[str]:
        return [name for name, value in model["properties"].items() if not ("description" in value or "$ref" in value)]

    text = configuration_schema()
    assert undescribed(text) == [name for part in text["$defs"].values() if "properties" in part
                                   for name in undescribed(part)] == []  # fmt: skip


def comment_above(key: str, indent: str = "") -> str:
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{indent}{key}:"))
    words: list[str] = []
    while lines[at - 1].startswith(f"{indent}#"):
        at -= 1
        words.insert(0, lines[at].strip("# "))
    return " ".join(words)
