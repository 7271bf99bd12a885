"""configs/: the reference names every key with its true default, the examples load, the schema is up to date."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from slurmft.cli.submit import configuration_schema
from slurmft.config import run as configuration
from slurmft.config.base import section_of
from slurmft.config.run import RunConfig
from slurmft.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
REFERENCE = CONFIGS / "reference.yaml"


OPTIONAL_SECTION = "# inference:"
"""The first line of a section that is commented out, since its key excludes another one."""

WITHIN = "  # serving:"
"""The same in that section."""

NEEDED_BY_RULE = {("command",), ("inference", "input")}
"""Required although it has a default: by a rule about two keys."""


def leaves(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key with its default as YAML would say it; PydanticUndefined where it is required."""
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            yield from leaves(section, (*above, name))
        elif field.is_required() or (*above, name) in NEEDED_BY_RULE:
            yield (*above, name), PydanticUndefined
        else:
            default = field.get_default(call_default_factory=True, validated_data={})
            yield (*above, name), list(default) if isinstance(default, tuple) else default


KEYS = dict(leaves(RunConfig))


@functools.cache
def whole_reference() -> str:
    """The reference as it reads once "# " is removed from its optional sections."""
    before, line, after = REFERENCE.read_text(encoding="utf-8").partition(f"{OPTIONAL_SECTION}\n")
    before, first, sweep = before.partition("# trials:\n")
    sweep, header, rest = (first + sweep).partition("\n# ---- ")
    before += "".join(each[2:] or "\n" for each in sweep.splitlines(keepends=True)) + header + rest
    text = before + "".join(each[2:] or "\n" for each in (line + after).splitlines(keepends=True))
    before, line, after = text.partition(f"{WITHIN}\n")
    return before + "".join("  " + (each[4:] or "\n") for each in (line + after).splitlines(keepends=True))


def in_reference() -> dict[tuple[str, ...], Any]:
    def flat(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(value, dict) and key not in KEYS:
            for name, inner in value.items():
                yield from flat(inner, (*key, name))
        else:
            yield key, value

    return dict(flat(yaml.safe_load(whole_reference()), ()))


RUNS = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name not in ("health.yaml", "plan.yaml")]
"""health.yaml is the nodes': test_health_settings.py; plan.yaml describes a cluster: test_report_and_plan.py."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_configuration_in_the_repository_loads(path: Path):
    config = configuration.load(path)
    assert config.name
    assert config.world_size >= 1
    assert bool(config.command) != bool(config.inference)


def test_the_reference_names_every_key_and_no_other():
    assert set(in_reference()) == set(KEYS)


def test_the_reference_states_the_true_defaults():
    stated = in_reference()
    wrong = {
        key: stated[key] for key, default in KEYS.items() if default is not PydanticUndefined
        and (stated[key], type(stated[key])) != (default, type(default))
    }  # fmt: skip
    assert wrong == {}


def test_the_reference_marks_what_is_required():
    required = {key for key, default in KEYS.items() if default is PydanticUndefined}
    assert required == {key for key in KEYS if comment_above(key).startswith("Required")} != set()


def test_the_reference_explains_every_key():
    assert [key for key in KEYS if not comment_above(key).endswith((".", ").", "}."))] == []


def test_without_its_optional_keys_the_reference_means_the_same():
    raw = yaml.safe_load(REFERENCE.read_text(encoding="utf-8"))
    required = {key: raw[key] for key in ("command", "run_folder")}
    assert configuration.validate(raw, source="all") == configuration.validate(required, source="required only")


def test_the_optional_section_of_the_reference_loads_once_it_is_uncommented_and_has_an_engine():
    raw = yaml.safe_load(whole_reference())
    del raw["command"], raw["trials"]
    with pytest.raises(ConfigError, match="give one of command, callable, process and url; given: none"):
        configuration.validate(raw, source="all")
    raw["inference"]["engine"]["url"] = "http://host:8000"
    with pytest.raises(ConfigError, match=r"give one of input \(a batch\) and serving \(an endpoint\)"):
        configuration.validate(raw, source="all")
    serving = raw["inference"].pop("serving")
    least = {"run_folder": raw["run_folder"]}
    section = {"input": raw["inference"]["input"], "engine": {"url": "http://host:8000"}}
    assert configuration.validate(raw, source="all") == configuration.validate(
        least | {"inference": section}, source="required only"
    )
    endpoint = {"serving": serving, "engine": {"command": ["engine", "{port}"]}}
    assert configuration.validate(least | {"inference": endpoint}, source="all") == configuration.validate(
        least | {"inference": endpoint | {"serving": {}}}, source="required only"
    )


def test_the_schema_is_up_to_date():
    stored = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    assert stored == configuration_schema(), "slurmft schema > configs/schema.json"


def test_the_schema_describes_every_key():
    def undescribed(model: dict[str, Any]) -> list[str]:
        return [
            name for name, value in model["properties"].items() if not (value.get("description") or "$ref" in value)
        ]

    text = configuration_schema()
    assert undescribed(text) == [name for part in text["$defs"].values() if "properties" in part
                                   for name in undescribed(part)] == []  # fmt: skip


def comment_above(key: tuple[str, ...]) -> str:
    lines, at = whole_reference().splitlines(), -1
    for depth, name in enumerate(key):
        at = next(number for number in range(at + 1, len(lines)) if lines[number].startswith(f"{'  ' * depth}{name}:"))
    indent, words = "  " * (len(key) - 1), []
    while lines[at - 1].startswith(f"{indent}#"):
        at -= 1
        words.insert(0, lines[at].strip("# "))
    return " ".join(words)
