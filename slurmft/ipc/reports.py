"""What an agent sends by itself: a hello on each connection, then reports. Each is checked once, at the socket.

    channel.send(SignalReport(name="SIGTERM").as_mapping())
    match parse_report(await channel.receive()): ...

A supervisor that crashed over a malformed message would end the whole job, so ``BadMessage`` only closes the
connection by which it came.
"""

from __future__ import annotations

import sys
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from slurmft.ipc.channel import BadMessage, Body
from slurmft.ipc.pages.digest_ring import ENTRIES
from slurmft.ipc.pages.section_stack import MAX_NAMES
from slurmft.ipc.pages.timing_page import CUDA, MAX_NAME, MAX_SECTIONS
from slurmft.ipc.shapes import (
    BeginsAsName,
    Count,
    ExitCode,
    Fields,
    HasRuns,
    Held,
    Hosts,
    Message,
    Name,
    OpenPort,
    PortNumber,
    Printable,
    Rank,
    Requests,
    Runs,
    Seconds,
    SlotValue,
    Words,
    kind_of,
    read,
    written,
)
from slurmft.ipc.shapes import Report as Report  # noqa: PLC0414 - it is exported from here, too
from slurmft.ipc.shapes import Sent as Sent  # noqa: PLC0414
from slurmft.ipc.sync import SyncReport
from slurmft.ipc.worker_facts import WorkerFacts

Generation = SlotValue | None
"""Of the attempt whose workers it is about; None where it is about none."""

_ShortName = Annotated[Printable, Meta(min_length=1, max_length=MAX_NAME)]


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """An agent's first message on each connection."""

    node: Rank
    host: Name
    pid: Rank
    birth: Name | None = None
    """Of its process: in containers with process ids of their own, every agent may have the same id."""

    lender: Name | None = None
    """The job that lends the node; None for one of the run's own."""


class WorkerExited(WorkerFacts, Sent, frozen=True, kw_only=True, tag="exited"):
    """The end of one worker, whose last facts these are."""

    code: ExitCode
    killed: bool
    starved: bool = False
    """The kernel killed it while it ended processes of the agent's control group for memory."""

    generation: Generation = None


class ProgressReport(Sent, frozen=True, kw_only=True, tag="progress"):
    """All workers of a node, a few times a second."""

    ranks: tuple[WorkerFacts, ...]
    ready: bool = written(False)
    """torch is imported: workers can be forked."""

    generation: Generation = None


class RankTimings(Fields, frozen=True, kw_only=True):
    """The measurements of one worker in one window."""

    rank: Rank
    role: Annotated[Printable, Meta(max_length=MAX_NAME)]
    device: Annotated[int, Meta(ge=0, le=CUDA)]
    sections: Annotated[
        tuple[tuple[_ShortName, Seconds, Annotated[int, Meta(ge=1, le=2**31 - 1)]], ...], Meta(max_length=MAX_SECTIONS)
    ]
    """Name, median in seconds, number of samples."""


class TimingsReport(Sent, frozen=True, kw_only=True, tag="timings"):
    """A window of straggler detection."""

    window: SlotValue
    ranks: tuple[RankTimings, ...]
    generation: Generation = None


class RankDigests(Fields, frozen=True, kw_only=True):
    """The digests of one worker's state since the last report."""

    rank: Rank
    group: SlotValue
    """Equal for ranks that hold the same part of the state."""

    digests: Annotated[tuple[tuple[SlotValue, SlotValue], ...], Meta(max_length=ENTRIES)]
    """Steps that were complete, and 64 bits."""


class DigestsReport(Sent, frozen=True, kw_only=True, tag="digests"):
    """Digests of replicas, to be compared with those of other nodes."""

    ranks: tuple[RankDigests, ...]
    generation: Generation = None


class HangReport(Sent, frozen=True, kw_only=True, tag="hung"):
    """A worker has exceeded a limit."""

    generation: Generation = None
    rank: Rank
    section: Name
    held_s: Seconds
    limit_s: Seconds
    why: BeginsAsName


class DurationsReport(Sent, frozen=True, kw_only=True, tag="durations"):
    """The longest that each section took since the last one: its name, and seconds."""

    sections: Annotated[Held, Meta(max_length=MAX_NAMES)]
    generation: Generation = None


class SignalReport(Sent, frozen=True, kw_only=True, tag="signal"):
    """A signal came to the agent."""

    name: Name
    count: SlotValue | None = None
    at: Seconds | None = None


class NoticeReport(Sent, frozen=True, kw_only=True, tag="notice"):
    """A cloud has announced something about the node."""

    source: Name
    what: Name
    ends: bool
    left_s: Annotated[float, Meta(ge=0, le=sys.float_info.max)]
    at: Seconds | None = None


Lasting = WorkerExited | HangReport | SignalReport | NoticeReport
"""What stays true: sent again on each connection, as the one before may have lost it."""


class LimitReport(Sent, frozen=True, kw_only=True, tag="limit"):
    """Something does not work in the agent's container as it does outside."""

    what: Name


class RehearsalReport(Sent, frozen=True, kw_only=True, tag="rehearsed"):
    """A spare has run the trainer for two steps, or could not."""

    took_s: Seconds
    problem: Words = written("")
    """Empty where it went well."""


# Inference


class InferenceReport(Sent, frozen=True, kw_only=True):
    """About requests and replicas; void under another epoch than the agent's present one."""

    epoch: Count


class RequestsWanted(InferenceReport, frozen=True, kw_only=True, tag="want"):
    """So many more requests can be used."""

    count: Count


class RequestsAnswered(InferenceReport, HasRuns, frozen=True, kw_only=True, tag="answers"):
    """Answers that are on the disk: those of ``segment`` up to byte ``end``."""

    segment: Name
    end: Count
    runs: Runs


class RequestsReturned(InferenceReport, HasRuns, frozen=True, kw_only=True, tag="returned"):
    """Requests that the agent will not answer."""

    runs: Runs


class Drained(InferenceReport, frozen=True, kw_only=True, tag="drained"):
    """No replica of the node works any more, and all that was answered was reported."""


class ReplicaPhase(InferenceReport, frozen=True, kw_only=True, tag="replica"):
    """A replica has another phase."""

    replica: Rank
    phase: Name
    life: Rank
    why: Words = written("")
    hosts: Hosts | None = None
    """Of its node, and ..."""

    port: OpenPort | None = None
    """... where its gate listens; only of an endpoint's replicas that are ready."""


class RouterPhase(InferenceReport, frozen=True, kw_only=True, tag="router"):
    """The node's router listens, or has ended."""

    phase: Name
    hosts: Hosts
    port: PortNumber
    answered: Count
    """Requests in its life."""

    why: Words = written("")
    load: Count | None = None
    """Requests that wait in it, or that it has given to replicas."""


class ReplicaDied(InferenceReport, frozen=True, kw_only=True, tag="replica_died"):
    """A replica has ended without being asked to, with these requests in flight."""

    replica: Rank
    name: Name
    code: ExitCode
    how: Words
    in_flight: Requests
    was_ready: bool
    answered: Count
    failures: Count
    load: Count | None = None
    """Requests that it had, also where they have no numbers."""

    @property
    def had(self) -> int:
        """How many requests, as far as is known."""
        return len(self.in_flight) if self.load is None else self.load


class ReplicaSmaller(InferenceReport, frozen=True, kw_only=True, tag="smaller"):
    """A replica was out of memory, and gets fewer requests at a time."""

    replica: Rank
    slots: Count
    why: Words


class Connected(Message, Report, frozen=True, tag="connected"):
    """Not a message: a lent or lost agent has connected."""


class Disconnected(Message, Report, frozen=True, tag="disconnected"):
    """Not a message: an agent's connection has ended."""


class UnknownReport(Fields, Report, frozen=True, kw_only=True):
    """Of a newer version's kind; it changes nothing."""

    kind: str
    generation: Generation = None


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    """An answer to the call of this number, which reads the rest of it, or the reason why there is none."""

    id: int
    error: Words | None = None


_FromAgent = (
    Reply | WorkerExited | ProgressReport | TimingsReport | DigestsReport | HangReport | DurationsReport | SignalReport
    | NoticeReport | LimitReport | SyncReport | RequestsWanted | RequestsAnswered | RequestsReturned | Drained
    | ReplicaPhase | ReplicaDied | ReplicaSmaller | RouterPhase | RehearsalReport
)  # fmt: skip
_decoder: msgspec.json.Decoder[Report | Reply] = msgspec.json.Decoder(_FromAgent)
_NO_REPORTS = {kind_of(each) for each in (Hello, Connected, Disconnected)}


def parse_hello(body: Body) -> Hello:
    """An agent's first message.

    Raises:
        BadMessage: it is another one, or malformed.
    """
    return Hello.parse(body, "a hello")


def parse_report(line: bytes) -> Report | Reply:
    """An agent's report, or reply; ``UnknownReport`` where its kind is of a newer version.

    Raises:
        BadMessage: it is malformed, or neither.
    """
    try:
        # the supervisor of 16,384 ranks comes by here 20,000 times a second; NaN is no JSON
        return _decoder.decode(line.replace(b'"metric":NaN', b'"metric":null'))
    except (ValueError, RecursionError):
        found = UnknownReport.parse(line, "a report")
    if found.kind in _NO_REPORTS:
        raise BadMessage(f"{found.kind!r} is not a report")
    if found.kind not in map(kind_of, get_args(_FromAgent)):
        return found
    known: Report | Reply = read(line, _FromAgent, f"a report of kind {found.kind!r}")
    return known
