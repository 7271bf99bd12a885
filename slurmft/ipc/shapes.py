"""What the fields of a control message may hold, and how messages are read from JSON.

class Place(Fields, frozen=True, kw_only=True):
    rank: Rank
    sections: tuple[Text200, ...]

Place.parse(line, "a report")    # BadMessage names the field that is missing or malformed
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Self

import msgspec

from slurmft.ipc.channel import BadMessage, Body, body_of

_LENIENT = {"at", "attached_at", "loop_at", "step_at", "copied", "copy_interval", "copy_share_ppm", "ready", "count"}
"""Optional fields on which no reader relies: a value that does not fit counts as missing."""


class Fields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values of one JSON object. Keys that it does not know are those of a newer version."""

    @classmethod
    def parse(cls, found: bytes | Body, what: str) -> Self:
        """The object that a line of JSON holds, or that was read from one.

        Raises:
            BadMessage: names ``what``, and the field that is missing or malformed.
        """
        return read(found, cls, what)  # type: ignore[no-any-return]

    def as_mapping(self) -> Body:
        """The inverse of ``parse``."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class Message(Fields, frozen=True, tag_field="kind"):
    """Fields with a kind, which is written first: the ``tag`` of their class."""

    @property
    def kind(self) -> str:
        """Tells it from others."""
        return kind_of(type(self))


class Report:
    """One of the messages in ``reports``, from an agent, or one of the connection's own events."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """As of any message."""
        raise NotImplementedError

    @property
    def generation(self) -> int | None:
        """Of the attempt that it is about; None where it is about none."""
        return None


class Sent(Message, Report, frozen=True):
    """A report that an agent sends."""


def kind_of(message: type[msgspec.Struct]) -> str:
    """What its ``kind`` is in JSON."""
    return str(message.__struct_config__.tag)


def written(default: Any) -> Any:
    """A default that is sent all the same, as earlier versions need the field; others are left out."""
    return msgspec.field(default_factory=lambda: default)


def read(found: bytes | Body, kind: Any, what: str) -> Any:
    """An object of this class, or of one of this union.

    Raises:
        BadMessage: names ``what``, and the field that is missing or malformed.
    """
    if isinstance(found, bytes):
        try:
            return msgspec.json.decode(found, type=kind)
        except (ValueError, RecursionError):  # what is no JSON for msgspec may be for json: NaN, half a surrogate pair
            found = body_of(found)
    while True:
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            name = str(error).rpartition(".")[2].rstrip("`")
            if name not in _LENIENT or (less := _without(found, name)) == found:
                raise BadMessage(f"{what}: {re.sub(_REGEX, ' of printable characters', str(error))}") from None
            found = less


def _without(found: Any, name: str) -> Any:
    """Without the key of that name, in lists of objects as well."""
    if isinstance(found, list):
        return [_without(each, name) for each in found]
    if isinstance(found, dict):
        return {key: _without(value, name) if key == "ranks" else value for key, value in found.items() if key != name}
    return found


# Types of fields that occur more than once

_REGEX = r" matching regex '.*'"
_PRINTABLE = (
    r"[^\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ud800-\uf8ff\ufeff"
    r"\ufff0-\uffff\U000e0000-\U0010ffff]"
)
"""Neither control characters nor those that are invisible or change how a line is shown."""

MAX_RUNS = 100_000
"""In one message; a line of the channel has room for less."""

Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
SlotValue = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What a slot of a shared page holds."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ExitCode = Annotated[int, msgspec.Meta(ge=-128, le=255)]
OpenPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PortNumber = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Finite."""

Printable = Annotated[str, msgspec.Meta(pattern=rf"\A{_PRINTABLE}*\Z")]
Name = Annotated[Printable, msgspec.Meta(min_length=1, max_length=255)]

BeginsAsName = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{_PRINTABLE}{{255}}|{_PRINTABLE}{{1,254}}\Z)")]
Words = Annotated[str, msgspec.Meta(max_length=4000)]
Text200 = Annotated[str, msgspec.Meta(max_length=200)]
Text255 = Annotated[str, msgspec.Meta(max_length=255)]
Ranks = tuple[Rank, ...]
Request = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""The number of a request, or the one behind the last."""

Requests = Annotated[tuple[Request, ...], msgspec.Meta(max_length=MAX_RUNS)]
Runs = Annotated[tuple[tuple[Request, Request], ...], msgspec.Meta(max_length=MAX_RUNS)]
"""Pairs of the first, and the one behind the last."""

Hosts = Annotated[tuple[Text255, ...], msgspec.Meta(max_length=16)]
"""Names and addresses of one node, best first."""

Held = tuple[tuple[Name, Seconds], ...]
"""Sections: name, and for how many seconds each has been open."""


class HasRuns:
    """A message with ``runs``, none of which is empty."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """A ``ValueError`` makes the message a malformed one."""
        runs: Runs = self.runs  # type: ignore[attr-defined]
        if any(first >= last for first, last in runs):
            raise ValueError("`runs` holds an empty one")
