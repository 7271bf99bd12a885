"""What the fields of a control message may hold, and how they are read from JSON and written to it.

@dataclass(frozen=True, kw_only=True, slots=True)
class Place(Fields):
    rank: Rank
    sections: Annotated[tuple[str, ...], Shape(texts(64, 200), read=tuple, write=list)]

Place.parse(mapping, "a report")    # BadMessage names the first field that is missing or malformed
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from slurmft.ipc.channel import BadMessage, Body

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one field may hold: the metadata of its annotation. No lambda: it would not find its names."""

    fits: Check
    read: Callable[[Any], Any] | None = None
    """From JSON's value to the field's; None where they are the same."""

    write: Callable[[Any], Any] | None = None
    optional: bool = False
    """It may be missing, and is not written while it is None."""

    lenient: bool = False
    """No reader relies on it: a value that does not fit counts as missing."""

    of: type[Fields] | None = None
    """The field is a tuple of these, in JSON a list of objects."""


class Fields:
    """The values of one JSON object. Subclasses are frozen dataclasses; their fields are written in their order."""

    __slots__ = ()

    @classmethod
    def parse(cls, mapping: Any, what: str) -> Self:
        """The object that ``mapping`` holds; unknown keys are tolerated, if they are plain or end in _s.

        Raises:
            BadMessage: names ``what``, and the first field that is missing or malformed.
        """
        shapes = shapes_of(cls)
        require(mapping, shapes, what)
        return cls(**values_of(mapping, shapes, what))

    def as_mapping(self) -> Body:
        """The inverse of ``parse``."""
        found = {}
        for name, shape in shapes_of(type(self)).items():
            value = getattr(self, name)
            if value is None and shape.optional:
                continue
            if shape.of is not None:
                value = [each.as_mapping() for each in value]
            elif shape.write is not None:
                value = shape.write(value)
            found[name] = value
        return found


class Message(Fields):
    """Fields with a kind, which is written first."""

    __slots__ = ()
    kind: ClassVar[str]

    def as_mapping(self) -> Body:
        """The message, as the channel takes it."""
        return {"kind": self.kind, **Fields.as_mapping(self)}


class Report:
    """One of the messages in ``reports``, from an agent, or one of the connection's own events."""

    __slots__ = ()

    @property
    def generation(self) -> int | None:
        """Of the attempt that it is about; None where it is about none."""
        return None


class Sent(Message, Report):
    """A report that an agent sends, and how errors name it."""

    __slots__ = ()
    told_as: ClassVar[str]


def shapes_of(kind: type[Any]) -> Mapping[str, Shape]:
    """The shape of each field of a subclass of ``Fields``, in their order."""
    return _shapes_of(kind)  # type: ignore[arg-type]  # the stubs take no class of classes for hashable


@functools.cache
def _shapes_of(kind: type[Any]) -> Mapping[str, Shape]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: next(note for note in hints[each.name].__metadata__ if isinstance(note, Shape))
        for each in fields(kind)
    }


_MISSING = object()


def require(mapping: Any, shapes: Mapping[str, Shape], what: str) -> None:
    """Every field is there and has its shape, and every other one that ends in _s is a time.

    Raises:
        BadMessage: names the first field that is missing or malformed.
    """
    if not isinstance(mapping, dict):
        raise BadMessage(f"{what} is not an object")
    for name, shape in shapes.items():  # the supervisor of 16,384 ranks comes by here 20,000 times a second
        value = mapping.get(name, _MISSING)
        if value is _MISSING:
            fits = shape.optional
        else:
            fits = shape.fits(value) or (shape.lenient and (not name.endswith("_s") or is_time(value)))
        if not fits:
            raise BadMessage(f"{what} has {name}={str(mapping.get(name, 'nothing'))[:40]!r}")
    for name in mapping.keys() - shapes.keys():
        if name.endswith("_s") and not is_time(mapping[name]):
            raise BadMessage(f"{what} has {name}={str(mapping[name])[:40]!r}")


def values_of(mapping: Mapping[str, Any], shapes: Mapping[str, Shape], what: str) -> dict[str, Any]:
    """The fields of a mapping that ``require`` has checked, but for those that are missing.

    Raises:
        BadMessage: an object in one of its lists is malformed.
    """
    found = {}
    for name, shape in shapes.items():
        if name not in mapping or (shape.lenient and not shape.fits(mapping[name])):
            continue
        value = mapping[name]
        if shape.of is not None:
            value = tuple([shape.of.parse(each, what) for each in value])
        elif shape.read is not None:
            value = shape.read(value)
        found[name] = value
    return found


# Checks


def integer(low: int, high: int) -> Check:
    """An integer from ``low`` to ``high``, no boolean."""
    return lambda value: type(value) is int and low <= value <= high


def is_number(value: Any) -> bool:
    """An integer or a float, NaN and infinity as well."""
    return type(value) in (int, float)


def is_time(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def is_name(value: Any) -> bool:
    """A text of 1 to 255 printable characters."""
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def is_list(value: Any) -> bool:
    """A list of anything."""
    return isinstance(value, list)


def text(longest: int) -> Check:
    """A text of at most so many characters, of any kind."""
    return lambda value: isinstance(value, str) and len(value) <= longest


def texts(most: int, longest: int) -> Check:
    """At most so many of them."""
    fits = text(longest)
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


def rows(most: int, columns: Sequence[Check]) -> Check:
    """At most so many lists, each with one value for each of these checks."""
    return lambda value: (
        isinstance(value, list)
        and len(value) <= most
        and all(
            isinstance(row, list)
            and len(row) == len(columns)
            and all(fits(each) for fits, each in zip(columns, row, strict=True))
            for row in value
        )
    )


def is_limits(value: Any) -> bool:
    """Seconds, by the name of a section."""
    return isinstance(value, dict) and all(map(is_time, value.values()))


def is_ranks(value: Any) -> bool:
    """A list of ranks."""
    return isinstance(value, list) and all(map(RANK, value))


def is_runs(value: Any) -> bool:
    """Numbers of requests: pairs of the first, and the one behind the last."""
    return rows(MAX_RUNS, (REQUEST, REQUEST))(value) and all(first < last for first, last in value)


def is_requests(value: Any) -> bool:
    """A list of numbers of requests."""
    return isinstance(value, list) and len(value) <= MAX_RUNS and all(map(REQUEST, value))


def is_names(value: Any) -> bool:
    """A list of names."""
    return isinstance(value, list) and len(value) <= MAX_NAMES and all(map(is_name, value))


def as_tuples(value: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """From rows of JSON."""
    return tuple(map(tuple, value))


def as_lists(value: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The inverse of ``as_tuples``."""
    return list(map(list, value))


SLOT = integer(-(2**63), 2**63 - 1)
"""What a slot of a shared page holds."""

RANK = integer(0, 2**31 - 1)

MAX_RUNS = 100_000
"""In one message; a line of the channel has room for less."""

MAX_NAMES = 1000
"""In one message."""

REQUEST = integer(0, 2**40)
"""The number of a request, or the one behind the last."""

# Types of fields that occur more than once

Rank = Annotated[int, Shape(fits=RANK)]
SlotValue = Annotated[int, Shape(fits=SLOT)]
Seconds = Annotated[float, Shape(fits=is_time)]
Flag = Annotated[bool, Shape(fits=is_flag)]
Name = Annotated[str, Shape(fits=is_name)]
Ranks = Annotated[tuple[int, ...], Shape(fits=is_ranks, read=tuple, write=list)]
Count = Annotated[int, Shape(fits=integer(0, 2**62))]
Words = Annotated[str, Shape(fits=text(4000))]
Runs = Annotated[tuple[tuple[int, int], ...], Shape(fits=is_runs, read=as_tuples, write=as_lists)]
Requests = Annotated[tuple[int, ...], Shape(fits=is_requests, read=tuple, write=list)]
Hosts = Annotated[tuple[str, ...], Shape(fits=texts(16, 255), read=tuple, write=list)]
"""Names and addresses of one node, best first."""

PortNumber = Annotated[int, Shape(fits=integer(0, 65535))]
