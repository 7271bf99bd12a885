"""The shapes of agents' messages. A supervisor that crashed over a malformed one would end the whole job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slurmft.ipc.channel import BadMessage, Message
from slurmft.ipc.flight_dump import MAX_GROUPS, MAX_MEMBERS, MAX_SPANS, MAX_TEXT
from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.pages.section_stack import DEPTH, ELSEWHERE, MAX_NAMES
from slurmft.ipc.pages.timing_page import CUDA, MAX_NAME, MAX_SECTIONS
from slurmft.ipc.stacks import MAX_FRAME, MAX_FRAMES
from slurmft.policy.verdicts.whereabouts import Where

Check = Callable[[Any], bool]


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _time(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


_SECTION: tuple[Check, ...] = (lambda value: _name(value) and len(value) <= MAX_NAME, _time, _integer(1, 2**31 - 1))


def _are_sections(sections: Any) -> bool:
    return (
        isinstance(sections, list)
        and len(sections) <= MAX_SECTIONS
        and all(
            isinstance(section, list)
            and len(section) == len(_SECTION)
            and all(fits(each) for fits, each in zip(_SECTION, section, strict=True))
            for section in sections
        )
    )


def _are_held(sections: Any, most: int) -> bool:
    """Names of sections, each with seconds."""
    return (
        isinstance(sections, list)
        and len(sections) <= most
        and all(isinstance(each, list) and len(each) == 2 and _name(each[0]) and _time(each[1]) for each in sections)
    )


_SLOT = _integer(-(2**63), 2**63 - 1)
_FACTS: Mapping[str, Check] = {
    "rank": _integer(0, 2**31 - 1), "state": _integer(min(State), max(State)), "attached": _flag, "step": _SLOT,
    "until": _SLOT, "saved": _SLOT, "durable": _SLOT,
    "resumed": _SLOT, "first_step_at": _time, "answered": _SLOT, "metric": _number,
    "first_step_s": _time, "longest_step_s": _time, "saves": _SLOT, "save_s": _time, "saving_s": _time,
    "save_cost_s": _time, "since_saved_s": _time, "save_failures": _SLOT, "save_errno": _integer(-(2**31), 2**31 - 1),
}  # fmt: skip
_EXIT: Mapping[str, Check] = {**_FACTS, "code": _integer(-128, 255), "killed": _flag}
_SIGNAL: Mapping[str, Check] = {"name": _name}
_HELLO: Mapping[str, Check] = {"node": _integer(0, 2**31 - 1), "host": _name, "pid": _integer(0, 2**31 - 1)}
_LENT: Mapping[str, Check] = {**_HELLO, "lender": _name}
_TIMINGS: Mapping[str, Check] = {
    "rank": _integer(0, 2**31 - 1), "device": _integer(0, CUDA), "sections": _are_sections,
    "role": lambda value: value == "" or (_name(value) and len(value) <= MAX_NAME),
}  # fmt: skip
_HUNG: Mapping[str, Check] = {
    "rank": _integer(0, 2**31 - 1), "section": _name, "held_s": _time, "limit_s": _time,
    "why": lambda value: _name(value[:255]) if isinstance(value, str) else False,
}  # fmt: skip
_DOING: Mapping[str, Check] = {
    "rank": _integer(0, 2**31 - 1), "attached": _flag, "age_s": _time, "quiet_s": _time, "step": _SLOT,
    "own_work": _SLOT, "stopped": _flag, "holding": _flag, "warming_up": _flag,
    "sections": lambda value: _are_held(value, DEPTH + 1), "elsewhere": lambda value: _are_held(value, ELSEWHERE),
}  # fmt: skip
_NOTICE: Mapping[str, Check] = {
    "source": _name, "ends": _flag, "what": _name, "left_s": lambda value: _time(value) and value >= 0,
}  # fmt: skip
_LIMIT: Mapping[str, Check] = {"what": _name}
_LOOK = (_flag, _SLOT, _flag, _SLOT)
_CODE = _integer(-128, 255)


def _text(longest: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= longest


def _texts(most: int, longest: int) -> Check:
    fits = _text(longest)
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


_INJECTED: Mapping[str, Check] = {
    "injected": lambda ranks: isinstance(ranks, list) and all(map(_integer(0, 2**31 - 1), ranks)),
    "refused": _texts(4096, 300),
}
_EVIDENCE: Mapping[str, Check] = {
    "rank": _integer(0, 2**31 - 1), "pid": _integer(0, 2**31 - 1), "kind": lambda value: value in tuple(Where),
    "doing": _text(200), "process": _text(1), "wchan": _text(64), "attached": _flag,
    "state": _integer(min(State), max(State)), "step": _SLOT, "tick": _SLOT, "sections": _texts(64, 200),
    "python_top": _texts(MAX_FRAMES, 2 * MAX_FRAME + 32), "killed": _flag,
    "exit_code": lambda value: value is None or _CODE(value),
    "collectives": lambda value: isinstance(value, list) and len(value) <= MAX_GROUPS and all(map(_is_progress, value)),
}  # fmt: skip


def _are_spans(value: Any) -> bool:
    """Not too many, and no more ranks in all than one group may have: a few bytes could be millions of them."""
    if not isinstance(value, list) or len(value) > MAX_SPANS:
        return False
    fits = _integer(0, MAX_MEMBERS)
    if not all(isinstance(each, list) and len(each) == 2 and all(map(fits, each)) for each in value):
        return False
    return all(first <= last for first, last in value) and sum(last - first for first, last in value) < MAX_MEMBERS


_PROGRESS: Mapping[str, Check] = {
    "group": _text(MAX_TEXT), "description": _text(MAX_TEXT), "operation": _text(MAX_TEXT),
    "called_from": _text(MAX_TEXT), "entered": _integer(0, 2**62), "done": _integer(0, 2**62),
    "members": _are_spans,
}  # fmt: skip


def _is_progress(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _PROGRESS.keys()
        and all(fits(value[name]) for name, fits in _PROGRESS.items())
    )


def _require(message: Any, fields: Mapping[str, Check], what: str) -> None:
    """Every field is there and has its shape; unknown keys are tolerated, if they are plain or end in _s.

    Raises:
        BadMessage: names the first field that is missing or malformed.
    """
    if not isinstance(message, dict):
        raise BadMessage(f"{what} is not an object")
    for name, fits in fields.items():
        if name not in message or not fits(message[name]):
            raise BadMessage(f"{what} has {name}={str(message.get(name, 'nothing'))[:40]!r}")
    for name, value in message.items():
        if name.endswith("_s") and not _time(value):
            raise BadMessage(f"{what} has {name}={str(value)[:40]!r}")


def _require_list(message: Message, name: str, fields: Mapping[str, Check], what: str) -> None:
    """The field is a list, and ``_require`` holds for each of its objects."""
    _require(message, {name: lambda value: isinstance(value, list)}, what)
    for facts in message[name]:
        _require(facts, fields, what)


def check_hello(message: Message) -> None:
    """Check an agent's first message.

    Raises:
        BadMessage: it is malformed.
    """
    _require(message, _LENT if "lender" in message else _HELLO, "a hello")


def check_report(message: Message) -> None:
    """Check an agent's report.

    Raises:
        BadMessage: it is malformed.
    """
    if "generation" in message:
        _require(message, {"generation": _SLOT}, "a report")
    match message["kind"]:
        case "exited":
            _require(message, _EXIT, "a worker's end")
        case "progress":
            _require_list(message, "ranks", _FACTS, "a progress report")
        case "timings":
            _require(message, {"window": _SLOT}, "a report of timings")
            _require_list(message, "ranks", _TIMINGS, "a report of timings")
        case "hung":
            _require(message, _HUNG, "a report of a hang")
        case "durations":
            _require(message, {"sections": lambda value: _are_held(value, MAX_NAMES)}, "a report of durations")
        case "signal":
            _require(message, _SIGNAL, "a signal's report")
        case "notice":
            _require(message, _NOTICE, "a notice")
        case "limit":
            _require(message, _LIMIT, "a container's limit")
        case "hello" | "connected" | "disconnected" as kind:
            raise BadMessage(f"{kind!r} is not a report")


def check_reply(kind: str, message: Message) -> None:
    """Check an agent's reply to a call of this kind.

    Raises:
        BadMessage: it is malformed.
    """
    if kind == "port":
        _require(message, {"port": _integer(1, 65535)}, "the reply to 'port'")
    elif kind == "sections":
        _require(message, {"more": _flag}, "the reply to 'sections'")
        _require_list(message, "workers", _DOING, "the reply to 'sections'")
    elif kind == "evidence":
        _require_list(message, "ranks", _EVIDENCE, "the reply to 'evidence'")
    elif kind == "rescue":
        _require(message, {"step": _SLOT}, "the reply to 'rescue'")
    elif kind == "inject":
        _require(message, _INJECTED, "the reply to 'inject'")
    elif kind in ("look", "propose") and not _are_looks(message.get("looks")):
        raise BadMessage(f"the reply to {kind!r} holds no looks")


def _are_looks(looks: Any) -> bool:
    return isinstance(looks, list) and all(
        isinstance(look, list)
        and len(look) == len(_LOOK)
        and all(fits(each) for fits, each in zip(_LOOK, look, strict=True))
        for look in looks
    )
