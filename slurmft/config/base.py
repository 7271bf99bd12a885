"""What every section of the configuration stands on: its base, types of values, and YAML as text."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from slurmft.errors import ConfigError
from slurmft.policy import values as plain

# --- The base of every section of the configuration, and the types of its values ---

_PLUGINS_VARIABLE = "PYDANTIC_DISABLE_PLUGINS"

MAX_SECONDS = 10 * 365 * 86_400.0
MAX_COUNT = 10**15 - 1
"""Steps and counts are kept as integers of 64 bits."""

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]
"""A string that YAML may have read as a number."""


_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_FOR_A_SHELL = re.compile(r"(?<!\S)(?:&&|\|\|?|&|[012&]?>\S*)(?!\S)|;(?!\S)|^\s*\w+=\S*|\$[A-Za-z_{(]\w*|`|(?<!\S)~/")


def _as_argv(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    words = shlex.split(value)
    if (found := _FOR_A_SHELL.search(_QUOTED.sub("_", value))) is not None:
        raise ValueError(f"no shell reads it, and {found[0].strip()!r} is for one; write [bash, -c, 'the line']")
    return words


Words = Annotated[tuple[Text, ...], BeforeValidator(_as_argv)]
"""A list of arguments, or one string that is split as a shell would split it."""

Count = Annotated[int, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_COUNT))]
Positive = Annotated[int, Field(ge=1), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_COUNT))]
Seconds = Annotated[float, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_SECONDS))]
Minutes = Annotated[float, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_SECONDS / 60))]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(plain.no_bool)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(plain.no_bool)]


Folder = Annotated[Path, BeforeValidator(plain.usable_path)]
"""A path that can be one; whether it is there is another question."""

ObjectName = Annotated[Text, AfterValidator(plain.object_name)]
"""``package.module:name`` of a function or class."""

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
"""As in an import statement."""


class Section(BaseModel):
    """One section: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic does it, without plug-ins of pydantic's."""
        with _no_plugins():
            return super().model_validate(obj, **options)


@contextlib.contextmanager
def _no_plugins() -> Iterator[None]:
    """To find them, pydantic reads the metadata of every installed distribution: on a shared filesystem hundreds of
    files, at each start of each process. They would also see, and could change, what is validated here."""
    before = os.environ.get(_PLUGINS_VARIABLE)
    os.environ[_PLUGINS_VARIABLE] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS_VARIABLE]
        else:
            os.environ[_PLUGINS_VARIABLE] = before


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds (``Section`` or ``Section | None``); None where it holds a value."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    is_section = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)
    return kinds[0] if is_section else None


# --- YAML as text: the only home of yaml ---


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
