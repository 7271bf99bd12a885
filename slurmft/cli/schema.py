"""``slurmft schema``: the JSON schema of a configuration."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from slurmft.cli.main import say_json
from slurmft.config.run import RunConfig


@click.command()
def schema() -> int:
    """Print the JSON schema of a configuration, for editors."""
    say_json(configuration_schema(), indent=2)
    return 0


def configuration_schema() -> dict[str, Any]:
    """The JSON schema of a configuration, with the documentation of its keys."""
    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    texts: dict[tuple[str, str], str] = {}
    models = _models()
    for source in {Path(inspect.getfile(each)) for model in models for each in _with_bases(model)}:
        texts |= _texts(source.read_text(encoding="utf-8"))
    parts = {**value["$defs"], RunConfig.__name__: value}
    for model in models:
        for key, facts in parts[model.__name__].get("properties", {}).items():
            if text := next(filter(None, (texts.get((each.__name__, key)) for each in _with_bases(model))), None):
                facts["description"] = text
    value["oneOf"] = [{"required": ["command"]}, {"required": ["inference"]}]
    return value


def _models() -> list[type[BaseModel]]:
    """The configuration, its sections, and the parts of these."""
    found: list[type[BaseModel]] = [RunConfig]
    for model in found:  # grows meanwhile
        found += [
            part for field in model.model_fields.values() for part in _parts(field.annotation) if part not in found
        ]
    return found


def _parts(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for each in get_args(annotation) for part in _parts(each)]


def _with_bases(model: type[BaseModel]) -> list[type[BaseModel]]:
    """A section, and those whose keys it has as well."""
    return [each for each in model.__mro__ if issubclass(each, BaseModel) and each.__module__.startswith("slurmft.")]


def _texts(source: str) -> dict[tuple[str, str], str]:
    """(class, attribute) -> the string below it.

    pydantic would read them too, but every time a configuration is loaded, which costs a submission 15 ms.
    """
    found = {}
    for model in [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]:
        for before, node in zip(model.body, model.body[1:], strict=False):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[model.name, name] = inspect.cleandoc(text)
    return found
