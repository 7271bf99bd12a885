"""Options of another package as a configuration of this one: each is mapped, or named as one without a counterpart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from slurmft.config.config import RunConfig, validate
from slurmft.errors import ConfigError
from slurmft.policy import plain_values as plain

log = logging.getLogger(__name__)

_ANY_RUN: Mapping[str, Any] = {"command": ["train"], "run_folder": "run"}
"""Values that are needed to validate others."""


@dataclass(frozen=True, slots=True)
class To:
    """An option that is a key of ours, such as ``preemption.signal_lead_s``."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class AlwaysOn:
    """A switch that cannot be switched off here."""

    what: str


@dataclass(frozen=True, slots=True)
class Without:
    """An option without a counterpart, and what there is instead."""

    instead: str


Rule = To | AlwaysOn | Without


class BecomesSettings(Protocol):
    """What ``configuration`` takes up."""

    def settings(self) -> dict[str, Any]: ...


class Options:
    """Options by the names of another package. ``settings`` is what they are here, ``remarks`` what they are not.

    Options that are not given keep the defaults of this package, but for those in ``THEIRS``.

    Raises:
        ConfigError: an option does not exist there, or its value makes no sense here.
    """

    RULES: ClassVar[Mapping[str, Rule]] = {}
    THEIRS: ClassVar[Mapping[str, Any]] = {}
    """Defaults of theirs that differ from ours, and that a user relies on."""

    def __init__(self, **options: Any) -> None:
        name = type(self).__name__
        for key in options:
            if key not in self.RULES:
                raise ConfigError(f"{name} has no option {key[:60]}{plain.did_you_mean(key, list(self.RULES))}")
        self.given = {**self.THEIRS, **options}
        self._settings: dict[str, Any] = {}
        remarks = []
        for key, value in self.given.items():
            if remark := self._take(key, value, self.RULES[key]):
                remarks.append(f"{name}: {remark}")
        self.remarks = tuple(remarks)
        """One line for each option that has no counterpart, or that is not as it was asked for."""

        validate({**_ANY_RUN, **self._settings}, source=name)
        for remark in remarks:
            log.warning("%s", remark)

    def settings(self) -> dict[str, Any]:
        """A part of a configuration, by section."""
        return {section: dict(keys) for section, keys in self._settings.items()}

    def __getattr__(self, name: str) -> Any:
        given: Mapping[str, Any] = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        raise AttributeError(f"{type(self).__name__!r} was not given {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.given.items())})"

    def _take(self, key: str, value: Any, rule: Rule) -> str:
        """Take an option up; returns what there is to say about it."""
        if isinstance(rule, AlwaysOn):
            if not isinstance(value, bool):
                raise ConfigError(f"{type(self).__name__}: {key} is {value!r:.60}; it is True or False")
            return "" if value else f"{key}=False is not possible: {rule.what}"
        if isinstance(rule, Without):
            return "" if value is None or value is False else f"{key} has no counterpart: {rule.instead}"
        try:
            converted = rule.convert(value)
        except ValueError as error:
            return f"{key}={value!r:.60}: {error}"
        section, _, inner = rule.key.partition(".")
        self._settings.setdefault(section, {})[inner] = converted
        return ""


def configuration(*parts: BecomesSettings, **keys: Any) -> RunConfig:
    """A configuration of ``keys``, as in a file, and of parts such as ``FaultTolerancePlugin(...)``.

    A key in ``keys`` beats those of the parts, and a later part an earlier one. ``as_yaml()`` of the result is a file
    for ``slurmft submit``.

    Raises:
        ConfigError: it cannot be used; names every wrong key at once.
    """
    merged: dict[str, Any] = {}
    for part in (*(part.settings() for part in parts), keys):
        for section, value in part.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(section), Mapping)
            merged[section] = {**merged[section], **value} if both else value
    return validate(merged, source="configuration(...)")
