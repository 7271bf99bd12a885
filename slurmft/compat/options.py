"""Options of another package as a configuration of this one: each is mapped, or named as one without a counterpart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
    back: Callable[[Any], Any] = lambda value: value
    """A default of ours as a value of theirs."""


@dataclass(frozen=True, slots=True)
class AlwaysOn:
    """A switch that cannot be switched off here."""

    what: str


@dataclass(frozen=True, slots=True)
class Without:
    """An option without a counterpart, and what there is instead."""

    instead: str
    default: Any = None


Rule = To | AlwaysOn | Without


class BecomesSettings(Protocol):
    """What ``configuration`` takes up."""

    def settings(self) -> dict[str, Any]: ...


class Options:
    """Options by the names of another package. ``settings`` is what they are here, ``remarks`` what they are not.

    Each can be given, read and assigned by its name. Those that are not given keep the defaults of this package, but
    for those in ``THEIRS``.

    Raises:
        ConfigError: an option does not exist there, or its value makes no sense here.
    """

    RULES: ClassVar[Mapping[str, Rule]] = {}
    THEIRS: ClassVar[Mapping[str, Any]] = {}
    """Defaults of theirs that differ from ours, and that a user relies on."""

    given: Mapping[str, Any]
    remarks: tuple[str, ...]

    def __init__(self, **options: Any) -> None:
        self.__dict__["remarks"] = ()
        self._give({**self.THEIRS, **options})

    def _give(self, given: Mapping[str, Any]) -> None:
        """These options from now on, all of them checked; the earlier ones stay where one is refused."""
        name = type(self).__name__
        for key in given:
            if key not in self.RULES:
                raise ConfigError(f"{name} has no option {key[:60]}{plain.did_you_mean(key, list(self.RULES))}")
        settings: dict[str, Any] = {}
        taken = [self._take(settings, key, value, self.RULES[key]) for key, value in given.items()]
        remarks = tuple(f"{name}: {remark}" for remark in taken if remark)
        validate({**_ANY_RUN, **settings}, source=name)
        for remark in remarks:
            if remark not in self.remarks:
                log.warning("%s", remark)
        self.__dict__.update(given=given, _settings=settings, remarks=remarks)

    def settings(self) -> dict[str, Any]:
        """A part of a configuration, by section."""
        return {section: dict(keys) for section, keys in self._settings.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        key = self._key(name)  # two names of one key: the later one counts
        self._give({**{each: was for each, was in self.given.items() if self._key(each) != key}, name: value})

    def __getattr__(self, name: str) -> Any:
        given: Mapping[str, Any] = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        match self.RULES.get(name):
            case To(key=key, back=back):
                section, _, inner = key.partition(".")
                settings = {**_ANY_RUN, **self.__dict__.get("_settings", {})}
                value = back(getattr(getattr(validate(settings, source=name), section), inner))
                return MappingProxyType(value) if isinstance(value, dict) else value  # to be assigned as a whole
            case Without(default=value):
                return value
            case AlwaysOn():
                return True
        near = plain.did_you_mean(name, list(self.RULES))
        raise AttributeError(f"{type(self).__name__} has no option {name[:60]}{near}")

    def _key(self, name: str) -> str:
        rule = self.RULES.get(name)
        return rule.key if isinstance(rule, To) else name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.given.items())})"

    def _take(self, settings: dict[str, Any], key: str, value: Any, rule: Rule) -> str:
        """Take an option up in ``settings``; returns what there is to say about it."""
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
        settings.setdefault(section, {})[inner] = converted
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
