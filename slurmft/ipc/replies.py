"""An agent's replies to the calls of ``calls``, each checked once, where it leaves the socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from slurmft.ipc.channel import BadMessage, Body
from slurmft.ipc.flight_dump import MAX_GROUPS, MAX_MEMBERS, MAX_SPANS, MAX_TEXT, as_json, from_json
from slurmft.ipc.pages.heartbeat import State
from slurmft.ipc.pages.section_stack import DEPTH, ELSEWHERE
from slurmft.ipc.shapes import (
    Fields,
    Flag,
    Rank,
    Ranks,
    Seconds,
    Shape,
    SlotValue,
    Words,
    as_lists,
    as_tuples,
    integer,
    is_flag,
    is_list,
    is_name,
    is_time,
    rows,
    text,
    texts,
)
from slurmft.ipc.stacks import MAX_FRAME, MAX_FRAMES
from slurmft.policy.timing.hangs import WorkerLook
from slurmft.policy.timing.stop import Look
from slurmft.policy.verdicts.collectives import Progress
from slurmft.policy.verdicts.whereabouts import Where

_LOOK = (is_flag, integer(-(2**63), 2**63 - 1), is_flag, integer(-(2**63), 2**63 - 1))
_CODE = integer(-128, 255)
_OPEN = (is_name, is_time)
Held = tuple[tuple[str, float], ...]
"""Sections: name, and for how many seconds each has been open."""


def _are_spans(value: Any) -> bool:
    """Not too many, and no more ranks in all than one group may have: a few bytes could be millions of them."""
    fits = integer(0, MAX_MEMBERS)
    if not rows(MAX_SPANS, (fits, fits))(value):
        return False
    return all(first <= last for first, last in value) and sum(last - first for first, last in value) < MAX_MEMBERS


_PROGRESS = {
    "group": text(MAX_TEXT), "description": text(MAX_TEXT), "operation": text(MAX_TEXT),
    "called_from": text(MAX_TEXT), "entered": integer(0, 2**62), "done": integer(0, 2**62),
    "members": _are_spans,
}  # fmt: skip


def _are_collectives(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_GROUPS
        and all(
            isinstance(one, dict)
            and one.keys() == _PROGRESS.keys()
            and all(fits(one[name]) for name, fits in _PROGRESS.items())
            for one in value
        )
    )


def _progress_of(value: Sequence[Mapping[str, Any]]) -> tuple[Progress, ...]:
    return tuple(map(from_json, value))


def _as_collectives(value: Sequence[Progress]) -> list[dict[str, Any]]:
    return list(map(as_json, value))


def _is_where(value: Any) -> bool:
    return value in tuple(Where)


def _is_code(value: Any) -> bool:
    return value is None or _CODE(value)


def _as_gpus(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (str(value)[:40],)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Fields):
    """Nothing to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Fields):
    """The workers have been started, unless GPUs are named."""

    suspect_gpus: Annotated[
        tuple[str, ...] | None, Shape(fits=bool, read=_as_gpus, write=list, optional=True, lenient=True)
    ] = None
    """Suspects that the node cannot do without; no worker was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced(Fields):
    """Whether an order about kept folders has been carried out, and what was wrong then."""

    done: Flag
    problem: Words


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedPort(Fields):
    """Free, and held until the next one is."""

    port: Annotated[int, Shape(fits=integer(1, 65535))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks(Fields):
    """The agreement's view of every worker of the node."""

    looks: Annotated[tuple[Look, ...], Shape(fits=is_list)]

    @classmethod
    def parse(cls, mapping: Any, what: str) -> Self:
        """As of any message."""
        looks = mapping.get("looks")
        if not rows(1 << 62, _LOOK)(looks):
            raise BadMessage(f"{what} holds no looks")
        return cls(looks=tuple(Look(attached=a, tick=tick, alive=b, holding=c) for a, tick, b, c in looks))

    def as_mapping(self) -> Body:
        """As of any message."""
        return {"looks": [[each.attached, each.tick, each.alive, each.holding] for each in self.looks]}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSections(Fields):
    """A ``WorkerLook``, as it is sent."""

    rank: Rank
    attached: Flag
    age_s: Seconds
    quiet_s: Seconds
    sections: Annotated[Held, Shape(fits=rows(DEPTH + 1, _OPEN), read=as_tuples, write=as_lists)]
    elsewhere: Annotated[Held, Shape(fits=rows(ELSEWHERE, _OPEN), read=as_tuples, write=as_lists)]
    step: SlotValue
    own_work: SlotValue
    stopped: Flag
    holding: Flag
    warming_up: Flag
    heartbeat_s: Annotated[float | None, Shape(fits=is_time, optional=True)] = None

    def as_look(self, node: str) -> WorkerLook:
        """The look, at a worker of ``node``."""
        return WorkerLook(
            rank=self.rank, node=node, attached=self.attached, age_s=self.age_s, quiet_s=self.quiet_s,
            sections=self.sections, elsewhere=self.elsewhere, heartbeat_s=self.heartbeat_s, step=self.step,
            own_work=self.own_work, stopped=self.stopped, holding=self.holding, warming_up=self.warming_up,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionsReply(Fields):
    """Some of the node's workers, and whether there are more."""

    workers: Annotated[tuple[WorkerSections, ...], Shape(fits=is_list, of=WorkerSections)]
    more: Flag


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence(Fields):
    """What one worker did just before the kill."""

    rank: Rank
    pid: Rank
    kind: Annotated[Where, Shape(fits=_is_where, read=Where)]
    doing: Annotated[str, Shape(fits=text(200))]
    process: Annotated[str, Shape(fits=text(1))]
    wchan: Annotated[str, Shape(fits=text(64))]
    attached: Flag
    state: Annotated[int, Shape(fits=integer(min(State), max(State)))]
    step: SlotValue
    tick: SlotValue
    sections: Annotated[tuple[str, ...], Shape(fits=texts(64, 200), read=tuple, write=list)]
    python_top: Annotated[tuple[str, ...], Shape(fits=texts(MAX_FRAMES, 2 * MAX_FRAME + 32), read=tuple, write=list)]
    exit_code: Annotated[int | None, Shape(fits=_is_code)]
    killed: Flag
    collectives: Annotated[
        tuple[Progress, ...], Shape(fits=_are_collectives, read=_progress_of, write=_as_collectives)
    ] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceReply(Fields):
    """Of every worker of the node."""

    ranks: Annotated[tuple[RankEvidence, ...], Shape(fits=is_list, of=RankEvidence)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescued(Fields):
    """The newest step that the node's workers have kept; negative where they have none."""

    step: SlotValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Injected(Fields):
    """The ranks that a fault has hit, and why it has not hit others."""

    injected: Ranks
    refused: Annotated[tuple[str, ...], Shape(fits=texts(4096, 300), read=tuple, write=list)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Fields):
    """In place of a reply: the agent could not do what it was asked for."""

    error: Words


def as_reply(number: int, reply: Fields) -> Body:
    """The reply to the call of this number, as the channel takes it."""
    return {"kind": "reply", "id": number, **reply.as_mapping()}
