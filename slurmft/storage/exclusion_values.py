"""Valid content of an exclusion list: values of the right kind, in bounds, with possible names of nodes.

A list is shared, and any user who can write it can write anything into it with a valid checksum.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any

from slurmft.errors import StorageError
from slurmft.policy.nodes.evidence import Kind
from slurmft.policy.nodes.suspicion import MAX_WEIGHT, ManualEntry, Observation

MAX_TEXT = 1000
MAX_TIME_S = 1e12
"""Unix time beyond any clock: the year 33,658."""

_KINDS: dict[str, Kind] = {kind.value: kind for kind in Kind}
_COLUMN_TYPES = tuple(
    {int, float} if name in ("weight", "at") else {str} for name in Observation._fields
)  # fmt: skip
_NODE, _WEIGHT, _AT, _ID = (Observation._fields.index(name) for name in ("node", "weight", "at", "id"))
_NODE_NAME = re.compile(r"[^\s,\[\]]{1,255}")


def rows(values: Any) -> list[Observation]:
    """Rows as values; columns are looked at as a whole, since there may be very many.

    Raises:
        ValueError: one of them is not an observation.
    """
    if type(values) is not list:
        raise ValueError("the observations are not a list")
    if not values:
        return []
    try:
        columns = list(zip(*values, strict=True))
        sound = len(columns) == len(_COLUMN_TYPES) and all(
            set(map(type, column)) <= types for column, types in zip(columns, _COLUMN_TYPES, strict=True)
        )
        sound = sound and all(map(is_node, set(columns[_NODE]))) and all(columns[_ID])
        sound = sound and all(-MAX_WEIGHT <= weight <= MAX_WEIGHT for weight in columns[_WEIGHT])
        sound = sound and all(-MAX_TIME_S <= at <= MAX_TIME_S for at in columns[_AT])  # NaN is in no bounds
    except TypeError:
        sound = False
    if not sound:
        raise ValueError("a row is not an observation")
    kinds = (_KINDS.get(kind, kind) for kind in columns[0])  # those of a newer slurmft are kept as they are
    return list(map(Observation._make, zip(kinds, *columns[1:], strict=True)))


def sound_rows(values: Any) -> list[Observation]:
    """The rows that are valid observations."""
    found = []
    for value in values if type(values) is list else []:
        try:
            found += rows([value])
        except ValueError:
            continue
    return found


def is_node(name: str) -> bool:
    """Whether a node can have this name, in the syntax of hostlists."""
    return bool(_NODE_NAME.fullmatch(name)) and name.isprintable()


def entries(values: Any) -> tuple[list[ManualEntry], bool]:
    """The exclusions by hand as they are stored, and whether all of them are valid."""
    found = []
    for value in values if type(values) is list else []:
        with contextlib.suppress(KeyError, TypeError, StorageError):
            fields = {name: value[name] for name in ("node", "reason", "who", "at", "until")}
            found.append(checked_entry(ManualEntry(**fields)))
    return found, type(values) is list and len(found) == len(values)


def checked(observation: Observation, now: float) -> Observation:
    """As it is stored: finite, not from the future, no longer than it may be.

    Raises:
        StorageError: its weight or time is not a number, or it has no id.
    """
    if not _is_time(observation.at) or not -float("inf") < observation.weight < float("inf"):
        raise StorageError(f"an observation of {observation.node[:80]!r} has a weight or time that is not a number")
    if not observation.node or not observation.id:
        raise StorageError("an observation names no node, or has no id")
    weight = max(-MAX_WEIGHT, min(MAX_WEIGHT, float(observation.weight)))
    return observation._replace(
        weight=weight, at=min(float(observation.at), now), evidence=observation.evidence[:MAX_TEXT]
    )


def checked_entry(entry: ManualEntry) -> ManualEntry:
    """As it is stored.

    Raises:
        StorageError: it names no node, or a time that is none.
    """
    if type(entry.node) is not str or not is_node(entry.node):
        raise StorageError("an exclusion by hand names no node")
    if not _is_time(entry.at) or not (entry.until is None or _is_time(entry.until)):
        raise StorageError(f"the exclusion of {entry.node[:80]!r} has a time that is not a number")
    if type(entry.reason) is not str or type(entry.who) is not str:
        raise StorageError(f"the exclusion of {entry.node[:80]!r} has a reason or author that is not a text")
    return replace(entry, reason=entry.reason[:MAX_TEXT])


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_TIME_S
