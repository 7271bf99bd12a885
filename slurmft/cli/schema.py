"""The JSON schema of a configuration, with the texts that stand beside its keys."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slurmft.config import RunConfig


def schema() -> dict[str, Any]:
    """The JSON schema of a configuration, for editors."""
    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
    models = _models()
    texts: dict[tuple[str, str], str] = {}
    for source in {Path(inspect.getfile(model)) for model in models}:
        texts |= _texts(source.read_text(encoding="utf-8"))
    # a section may be in two parts: what its base says holds for it, too
    texts |= {(model.__name__, key): text for model in models for each in model.__mro__[1:]
              for (name, key), text in list(texts.items()) if name == each.__name__}  # fmt: skip
    for name, part in {**value["$defs"], RunConfig.__name__: value}.items():
        for key, facts in part.get("properties", {}).items():
            if text := texts.get((name, key)):
                facts["description"] = text
    return value


def _models() -> list[type[BaseModel]]:
    """The configuration, its sections, and what these are made of."""
    sections = (field.annotation for field in RunConfig.model_fields.values())
    models: list[type[BaseModel]] = [
        RunConfig,
        *(each for each in sections if isinstance(each, type) and issubclass(each, BaseModel)),
    ]
    return [base for model in models for base in model.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]


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
