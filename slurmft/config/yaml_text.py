"""YAML as text: the only home of yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from slurmft.errors import ConfigError
from slurmft.policy import plain_values as plain


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1:30:00 is a time and not 5400, ``no`` and 010 are what they look like (YAML 1.2).

    A key that is given twice is refused: the first value would be lost without a warning.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._seen: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # once: afterwards it also holds what << has merged into it, and that may be overridden
        if id(node) not in self._seen:
            self._seen.add(id(node))
            self._refuse_duplicates(node)
        super().flatten_mapping(node)
        if len(node.value) > plain.MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "<< merges too many keys", node.start_mark)

    @staticmethod
    def _refuse_duplicates(node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                what = f"the key {key.value!r} is there twice (first in line {lines[key.value]})"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            lines[key.value] = key.start_mark.line + 1


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), [*"-+0123456789"])
# fractions stay text until the field that takes them is known: 1.50 may be the name of a partition


def parsed(text: str, *, of: str) -> Any:
    """The value of a YAML text, which errors call ``of``.

    Raises:
        ConfigError: it is not YAML, or one of its values is not what its tag says.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        if "{{" in text:
            why = f"{of} is a template: nothing fills in its {{{{ ... }}}} here"
            raise ConfigError(why, hint="write the values themselves, or --set key=value") from error
        raise ConfigError(f"{of} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{of} is nested too deeply") from error
    # errors of yaml's constructors: numbers of 5000 digits, !!int of nothing, !!bool of something else
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{of} is not YAML: one of its values is not what its tag says ({error})") from error


_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, ten times as fast, where PyYAML has it


def written(values: Mapping[str, Any]) -> str:
    """Plain keys and values as the text of a file, in their order."""
    try:
        return str(yaml.dump(dict(values), Dumper=_DUMPER, sort_keys=False))
    except UnicodeError:  # a file name that is no UTF-8, which only the one in Python can write
        return str(yaml.dump(dict(values), Dumper=yaml.SafeDumper, sort_keys=False))
