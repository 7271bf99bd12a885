"""The base of every section of the configuration, and the types of its values."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from slurmft.policy import plain_values as plain

_PLUGINS_VARIABLE = "PYDANTIC_DISABLE_PLUGINS"

MAX_SECONDS = 10 * 365 * 86_400.0
MAX_COUNT = 10**15 - 1
"""Steps and counts are kept as integers of 64 bits."""

Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]
"""A string that YAML may have read as a number."""


def _as_argv(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


Words = Annotated[tuple[Text, ...], BeforeValidator(_as_argv)]
"""A list of arguments, or one string that is split as a shell would split it."""

Count = Annotated[int, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_COUNT))]
Positive = Annotated[int, Field(ge=1), BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_COUNT))]
Seconds = Annotated[float, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_SECONDS))]
Minutes = Annotated[float, BeforeValidator(plain.no_bool), AfterValidator(plain.at_most(MAX_SECONDS / 60))]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(plain.no_bool)]


Score = Annotated[float, Field(ge=0, le=1), BeforeValidator(plain.no_bool)]


Folder = Annotated[Path, BeforeValidator(plain.usable_path)]
"""A path that can be one; whether it is there is another question."""

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
