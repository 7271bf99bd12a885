"""What an agent sends by itself: a hello on each connection, then reports. Each is checked once, at the socket.

    channel.send(SignalReport(name="SIGTERM").as_mapping())
    match parse_report(await channel.receive()): ...

A supervisor that crashed over a malformed message would end the whole job, so ``BadMessage`` only closes the
connection by which it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from slurmft.ipc.channel import BadMessage, Body
from slurmft.ipc.pages.digest_ring import ENTRIES
from slurmft.ipc.pages.section_stack import MAX_NAMES
from slurmft.ipc.pages.timing_page import CUDA, MAX_NAME, MAX_SECTIONS
from slurmft.ipc.shapes import (
    SLOT,
    Count,
    Fields,
    Flag,
    Hosts,
    Message,
    Name,
    PortNumber,
    Rank,
    Requests,
    Runs,
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
    require,
    rows,
    shapes_of,
    texts,
    values_of,
)
from slurmft.ipc.shapes import Report as Report  # noqa: PLC0414 - it is exported from here, too
from slurmft.ipc.shapes import Sent as Sent  # noqa: PLC0414
from slurmft.ipc.sync import SyncReport
from slurmft.ipc.worker_facts import WorkerFacts

_CODE = integer(-128, 255)
_OPEN = (is_name, is_time)
"""A section's name, and for how many seconds it has been open."""

Generation = Annotated[int | None, Shape(fits=SLOT, optional=True)]
"""Of the attempt whose workers it is about; None where it is about none."""

SentAt = Annotated[float | None, Shape(fits=is_time, optional=True, lenient=True)]


def _is_short_name(value: Any) -> bool:
    return is_name(value) and len(value) <= MAX_NAME


def _is_role(value: Any) -> bool:
    return value == "" or _is_short_name(value)


def _begins_as_a_name(value: Any) -> bool:
    return isinstance(value, str) and is_name(value[:255])


def _is_left(value: Any) -> bool:
    return is_time(value) and value >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Message):
    """An agent's first message on each connection."""

    kind: ClassVar[str] = "hello"
    node: Rank
    host: Name
    pid: Rank
    birth: Annotated[str | None, Shape(fits=is_name, optional=True)] = None
    """Of its process: in containers with process ids of their own, every agent may have the same id."""

    lender: Annotated[str | None, Shape(fits=is_name, optional=True)] = None
    """The job that lends the node; None for one of the run's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExited(Sent):
    """The end of one worker. In JSON, its facts are beside the other fields."""

    kind: ClassVar[str] = "exited"
    told_as: ClassVar[str] = "a worker's end"
    code: Annotated[int, Shape(fits=_CODE)]
    killed: Flag
    starved: Flag = False
    """The kernel killed it while it ended processes of the agent's control group for memory."""
    generation: Generation = None
    facts: WorkerFacts

    @classmethod
    def parse(cls, mapping: Any, what: str) -> Self:
        """As of any message."""
        require(mapping, {**shapes_of(WorkerFacts), **_OF_AN_END}, what)
        facts = WorkerFacts(**values_of(mapping, shapes_of(WorkerFacts), what))
        return cls(facts=facts, **values_of(mapping, _OF_AN_END, what))

    def as_mapping(self) -> Body:
        """The message, as the channel takes it."""
        own = {"kind": self.kind, "code": self.code, "killed": self.killed}
        own |= {"starved": True} if self.starved else {}
        about = {} if self.generation is None else {"generation": self.generation}
        return {**own, **about, **self.facts.as_mapping()}


_OF_AN_END: Mapping[str, Shape] = {
    "code": Shape(fits=_CODE), "killed": Shape(fits=is_flag), "starved": Shape(fits=is_flag, optional=True),
    "generation": Shape(fits=SLOT, optional=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport(Sent):
    """All workers of a node, a few times a second."""

    kind: ClassVar[str] = "progress"
    told_as: ClassVar[str] = "a progress report"
    ranks: Annotated[tuple[WorkerFacts, ...], Shape(fits=is_list, of=WorkerFacts)]
    ready: Annotated[bool, Shape(fits=is_flag, optional=True, lenient=True)] = False
    """torch is imported: workers can be forked."""

    generation: Generation = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimings(Fields):
    """The measurements of one worker in one window."""

    rank: Rank
    role: Annotated[str, Shape(fits=_is_role)]
    device: Annotated[int, Shape(fits=integer(0, CUDA))]
    sections: Annotated[
        tuple[tuple[str, float, int], ...],
        Shape(
            fits=rows(MAX_SECTIONS, (_is_short_name, is_time, integer(1, 2**31 - 1))),
            read=as_tuples,
            write=as_lists,
        ),
    ]
    """Name, median in seconds, number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingsReport(Sent):
    """A window of straggler detection."""

    kind: ClassVar[str] = "timings"
    told_as: ClassVar[str] = "a report of timings"
    window: SlotValue
    ranks: Annotated[tuple[RankTimings, ...], Shape(fits=is_list, of=RankTimings)]
    generation: Generation = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDigests(Fields):
    """The digests of one worker's state since the last report."""

    rank: Rank
    group: SlotValue
    """Equal for ranks that hold the same part of the state."""

    digests: Annotated[
        tuple[tuple[int, int], ...],
        Shape(fits=rows(ENTRIES, (SLOT, SLOT)), read=as_tuples, write=as_lists),
    ]
    """Steps that were complete, and 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestsReport(Sent):
    """Digests of replicas, to be compared with those of other nodes."""

    kind: ClassVar[str] = "digests"
    told_as: ClassVar[str] = "a report of digests"
    ranks: Annotated[tuple[RankDigests, ...], Shape(fits=is_list, of=RankDigests)]
    generation: Generation = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HangReport(Sent):
    """A worker has exceeded a limit."""

    kind: ClassVar[str] = "hung"
    told_as: ClassVar[str] = "a report of a hang"
    generation: Generation = None
    rank: Rank
    section: Name
    held_s: Seconds
    limit_s: Seconds
    why: Annotated[str, Shape(fits=_begins_as_a_name)]

    def as_mapping(self) -> Body:
        """The message, as the channel takes it; its generation comes before its kind."""
        about = {} if self.generation is None else {"generation": self.generation}
        return about | {"kind": self.kind, **Fields.as_mapping(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationsReport(Sent):
    """The longest that each section took since the last one: its name, and seconds."""

    kind: ClassVar[str] = "durations"
    told_as: ClassVar[str] = "a report of durations"
    sections: Annotated[
        tuple[tuple[str, float], ...], Shape(fits=rows(MAX_NAMES, _OPEN), read=as_tuples, write=as_lists)
    ]
    generation: Generation = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalReport(Sent):
    """A signal came to the agent."""

    kind: ClassVar[str] = "signal"
    told_as: ClassVar[str] = "a signal's report"
    name: Name
    count: Annotated[int | None, Shape(fits=SLOT, optional=True, lenient=True)] = None
    at: SentAt = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeReport(Sent):
    """A cloud has announced something about the node."""

    kind: ClassVar[str] = "notice"
    told_as: ClassVar[str] = "a notice"
    source: Name
    what: Name
    ends: Flag
    left_s: Annotated[float, Shape(fits=_is_left)]
    at: SentAt = None


Lasting = WorkerExited | HangReport | SignalReport | NoticeReport
"""What stays true: sent again on each connection, as the one before may have lost it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitReport(Sent):
    """Something does not work in the agent's container as it does outside."""

    kind: ClassVar[str] = "limit"
    told_as: ClassVar[str] = "a container's limit"
    what: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalReport(Sent):
    """A spare has run the trainer for two steps, or could not."""

    kind: ClassVar[str] = "rehearsed"
    told_as: ClassVar[str] = "a spare's rehearsal"
    took_s: Seconds
    problem: Words = ""
    """Empty where it went well."""


# Inference


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceReport(Sent):
    """About requests and replicas; void under another epoch than the agent's present one."""

    epoch: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestsWanted(InferenceReport):
    """So many more requests can be used."""

    kind: ClassVar[str] = "want"
    told_as: ClassVar[str] = "a wish for requests"
    count: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestsAnswered(InferenceReport):
    """Answers that are on the disk: those of ``segment`` up to byte ``end``."""

    kind: ClassVar[str] = "answers"
    told_as: ClassVar[str] = "a report of answers"
    segment: Name
    end: Count
    runs: Runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestsReturned(InferenceReport):
    """Requests that the agent will not answer."""

    kind: ClassVar[str] = "returned"
    told_as: ClassVar[str] = "a report of returned requests"
    runs: Runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained(InferenceReport):
    """No replica of the node works any more, and all that was answered was reported."""

    kind: ClassVar[str] = "drained"
    told_as: ClassVar[str] = "the end of a drain"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPhase(InferenceReport):
    """A replica has another phase."""

    kind: ClassVar[str] = "replica"
    told_as: ClassVar[str] = "a replica's phase"
    replica: Rank
    phase: Name
    life: Rank
    why: Words = ""
    hosts: Annotated[tuple[str, ...] | None, Shape(fits=texts(16, 255), read=tuple, write=list, optional=True)] = None
    """Of its node, and ..."""

    port: Annotated[int | None, Shape(fits=integer(1, 65535), optional=True)] = None
    """... where its gate listens; only of an endpoint's replicas that are ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterPhase(InferenceReport):
    """The node's router listens, or has ended."""

    kind: ClassVar[str] = "router"
    told_as: ClassVar[str] = "a router's phase"
    phase: Name
    hosts: Hosts
    port: PortNumber
    answered: Count
    """Requests in its life."""

    why: Words = ""
    load: Annotated[int | None, Shape(fits=integer(0, 2**62), optional=True)] = None
    """Requests that wait in it, or that it has given to replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDied(InferenceReport):
    """A replica has ended without being asked to, with these requests in flight."""

    kind: ClassVar[str] = "replica_died"
    told_as: ClassVar[str] = "a replica's end"
    replica: Rank
    name: Name
    code: Annotated[int, Shape(fits=_CODE)]
    how: Words
    in_flight: Requests
    was_ready: Flag
    answered: Count
    failures: Count
    load: Annotated[int | None, Shape(fits=integer(0, 2**62), optional=True)] = None
    """Requests that it had, also where they have no numbers."""

    @property
    def had(self) -> int:
        """How many requests, as far as is known."""
        return len(self.in_flight) if self.load is None else self.load


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSmaller(InferenceReport):
    """A replica was out of memory, and gets fewer requests at a time."""

    kind: ClassVar[str] = "smaller"
    told_as: ClassVar[str] = "a smaller replica"
    replica: Rank
    slots: Count
    why: Words


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected(Report):
    """Not a message: a lent or lost agent has connected."""

    kind: ClassVar[str] = "connected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnected(Report):
    """Not a message: an agent's connection has ended."""

    kind: ClassVar[str] = "disconnected"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownReport(Report):
    """Of a newer version's kind; it changes nothing."""

    kind: str
    generation: int | None = None


_REPORTS: Mapping[str, type[Sent]] = {
    each.kind: each
    for each in (
        WorkerExited, ProgressReport, TimingsReport, DigestsReport, HangReport, DurationsReport, SignalReport,
        NoticeReport, LimitReport, SyncReport, RequestsWanted, RequestsAnswered, RequestsReturned, Drained,
        ReplicaPhase, ReplicaDied, ReplicaSmaller, RouterPhase, RehearsalReport,
    )
}  # fmt: skip


def parse_hello(mapping: Body) -> Hello:
    """An agent's first message.

    Raises:
        BadMessage: it is another one, or malformed.
    """
    if mapping["kind"] != Hello.kind:
        raise BadMessage(f"the first message is {mapping['kind'][:40]!r}")
    return Hello.parse(mapping, "a hello")


def parse_report(mapping: Body) -> Report:
    """An agent's report; ``UnknownReport`` where its kind is of a newer version.

    Raises:
        BadMessage: it is malformed, or no report.
    """
    if "generation" in mapping:
        require(mapping, {"generation": Shape(fits=SLOT)}, "a report")
    kind: str = mapping["kind"]
    if kind in (Hello.kind, Connected.kind, Disconnected.kind):
        raise BadMessage(f"{kind!r} is not a report")
    if (found := _REPORTS.get(kind)) is None:
        return UnknownReport(kind=kind, generation=mapping.get("generation"))
    return found.parse(mapping, found.told_as)
