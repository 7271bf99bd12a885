"""Messages between supervisor and agents: calls, replies, and reports, each checked once, at the socket."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta

from slurmft.ipc import pages
from slurmft.ipc.channel import (
    BadMessage,
    BeginsAsName,
    Body,
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
    Ranks,
    Requests,
    Runs,
    Seconds,
    SlotValue,
    Text200,
    Text255,
    Words,
    kind_of,
    read,
    written,
)
from slurmft.ipc.channel import Report as Report  # noqa: PLC0414 - it is exported from here, too
from slurmft.ipc.channel import Sent as Sent  # noqa: PLC0414
from slurmft.ipc.flight_dump import MAX_GROUPS, MAX_MEMBERS, MAX_SPANS, MAX_TEXT
from slurmft.ipc.ras_report import MAX_OUTLIERS, Outlier
from slurmft.policy.hangs import WorkerLook
from slurmft.policy.judge import Progress, Where

# --- What an agent reports of folders that are kept (``sync:``) ---


class SyncReport(Sent, frozen=True, kw_only=True, tag="synced"):
    """Something has happened to a kept folder. ``what``: as in ``supervisor.crew``."""

    what: Name
    path: Words
    reason: Words = written("")
    version: Words = written("")
    files: Count = written(0)
    bytes: Count = written(0)
    took_s: Seconds = written(0.0)


# --- One worker's heartbeat page as a part of the messages that agents send, checked with them ---

StateNumber = Annotated[int, Meta(ge=int(min(pages.State)), le=int(max(pages.State)))]

Since = Seconds | None
"""None where it is 0; agents of an earlier version do not send it."""


class WorkerFacts(Fields, frozen=True, kw_only=True):
    """One worker's page."""

    rank: Rank
    state: StateNumber
    attached: bool
    step: SlotValue
    until: SlotValue
    saved: SlotValue
    durable: SlotValue
    resumed: SlotValue
    first_step_at: Seconds
    answered: SlotValue
    metric: float | None
    """NaN and infinities arrive as None."""

    first_step_s: Seconds
    longest_step_s: Seconds
    saves: SlotValue
    save_failures: SlotValue
    save_errno: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
    save_s: Seconds
    save_cost_s: Seconds
    saving_s: Seconds
    since_saved_s: Seconds
    attached_at: Since = None
    loop_at: Since = None
    step_at: Since = None
    """Unix times: the worker attached, began its loop of steps, did its newest step; None before."""

    load_s: Since = None
    stall_s: Since = None
    """How long it read checkpoints, and how long saves have stopped its training, in all."""

    copied: Count | None = None
    copy_interval: Count | None = None
    copy_share_ppm: Count | None = None
    """Copies of steps in memory (``Slot.COPIED`` and those behind it); None where there is none."""


# --- An agent's replies to calls, each checked once, where it leaves the socket ---


class Done(Fields, frozen=True, kw_only=True):
    """Nothing to say."""


class Started(Fields, frozen=True, kw_only=True):
    """The workers have been started, unless GPUs are named."""

    suspect_gpus: tuple[str, ...] | None = None
    """Suspects that the node cannot do without; no worker was started."""


class Synced(Fields, frozen=True, kw_only=True):
    """Whether an order about kept folders has been carried out, and what was wrong then."""

    done: bool
    problem: Words


class ReservedPort(Fields, frozen=True, kw_only=True):
    """Free, and held until the next one is."""

    port: OpenPort


class Looks(Fields, frozen=True, kw_only=True):
    """The agreement's view of every worker of the node."""

    looks: tuple[tuple[bool, SlotValue, bool, SlotValue], ...]
    """Each as a ``policy.stop.Look``."""


class WorkerSections(Fields, frozen=True, kw_only=True):
    """A ``WorkerLook``, as it is sent."""

    rank: Rank
    attached: bool
    age_s: Seconds
    quiet_s: Seconds
    sections: Annotated[Held, Meta(max_length=pages.DEPTH + 1)]
    elsewhere: Annotated[Held, Meta(max_length=pages.ELSEWHERE)]
    step: SlotValue
    own_work: SlotValue
    stopped: bool
    holding: bool
    warming_up: bool
    heartbeat_s: Seconds | None = None

    def as_look(self, node: str) -> WorkerLook:
        """The look, at a worker of ``node``."""
        return WorkerLook(
            rank=self.rank, node=node, attached=self.attached, age_s=self.age_s, quiet_s=self.quiet_s,
            sections=self.sections, elsewhere=self.elsewhere, heartbeat_s=self.heartbeat_s, step=self.step,
            own_work=self.own_work, stopped=self.stopped, holding=self.holding, warming_up=self.warming_up,
        )  # fmt: skip


class SectionsReply(Fields, frozen=True, kw_only=True):
    """Some of the node's workers, and whether there are more."""

    workers: tuple[WorkerSections, ...]
    more: bool


class RankEvidence(Fields, frozen=True, kw_only=True):
    """What one worker did just before the kill."""

    rank: Rank
    pid: Rank
    kind: Where
    doing: Text200
    process: Annotated[str, Meta(max_length=1)]
    wchan: Annotated[str, Meta(max_length=64)]
    attached: bool
    state: StateNumber
    step: SlotValue
    tick: SlotValue
    sections: Annotated[tuple[Text200, ...], Meta(max_length=64)]
    python_top: Annotated[
        tuple[Annotated[str, Meta(max_length=2 * pages.MAX_FRAME + 32)], ...], Meta(max_length=pages.MAX_FRAMES)
    ]
    exit_code: ExitCode | None
    killed: bool
    collectives: Annotated[tuple[Progress, ...], Meta(max_length=MAX_GROUPS)] = written(())

    def __post_init__(self) -> None:
        """A ``ValueError`` makes the reply a malformed one."""
        if not all(map(_is_sane, self.collectives)):
            raise ValueError("`collectives` holds an odd one")


def _is_sane(progress: Progress) -> bool:
    """Not too long, and no more ranks in all than one group may have: a few bytes could be millions of them."""
    texts = (progress.group, progress.description, progress.operation, progress.called_from)
    spans = progress.members
    return (
        max(map(len, texts)) <= MAX_TEXT
        and all(0 <= number <= 2**62 for number in (progress.entered, progress.done))
        and len(spans) <= MAX_SPANS
        and all(0 <= first <= last <= MAX_MEMBERS for first, last in spans)
        and sum(last - first for first, last in spans) < MAX_MEMBERS
    )


class EvidenceReply(Fields, frozen=True, kw_only=True):
    """Of every worker of the node."""

    ranks: tuple[RankEvidence, ...]
    outliers: Annotated[tuple[Outlier, ...], Meta(max_length=MAX_OUTLIERS)] = ()
    """Of the whole job, as NCCL reports them to the first rank's node."""


class Rescued(Fields, frozen=True, kw_only=True):
    """The newest step that the node's workers have kept; negative where they have none."""

    step: SlotValue


class Injected(Fields, frozen=True, kw_only=True):
    """The ranks that a fault has hit, and why it has not hit others."""

    injected: Ranks
    refused: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=4096)]


class Failed(Fields, frozen=True, kw_only=True):
    """In place of a reply: the agent could not do what it was asked for."""

    error: Words


def as_reply(number: int, reply: Fields) -> Body:
    """The reply to the call of this number, as the channel takes it."""
    return {"kind": "reply", "id": number, **reply.as_mapping()}


# --- calls ---
# What a supervisor asks of an agent, which answers with one of the replies above. Each is checked once, at the socket.
#
#     looks = await link.call(Propose(tick=7, action=1))      # Looks
#     match call: case Propose(tick=tick): ...                # in the agent
#
# ``BadMessage`` only closes the connection by which the malformed message came.

Answer = TypeVar("Answer", bound=Fields)


class Call(Message, Generic[Answer], frozen=True):
    """Something that an agent is to do, or to say."""

    @classmethod
    def reply(cls) -> type[Answer]:
        """The class of the reply."""
        found: type[Answer] = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]
        return found

    @classmethod
    def reply_of(cls, line: bytes) -> Answer:
        """The agent's reply.

        Raises:
            BadMessage: it is malformed.
        """
        return cls.reply().parse(line, f"the reply to {kind_of(cls)!r}")

    def as_call(self, number: int) -> Body:
        """The call, as the channel takes it; the reply bears its number."""
        return {"kind": self.kind, "id": number, **self.as_mapping()}


class StartWorkers(Call[Started], frozen=True, kw_only=True, tag="start"):
    """Start the workers of an attempt."""

    suspect_gpus: Annotated[tuple[Text255, ...], Meta(max_length=1 << 20)] = written(())
    """To be left out."""

    batch_divisor: SlotValue = written(1)
    mtbf_s: Seconds | None = None
    attempt: Name
    cycle: SlotValue
    first_rank: Rank
    nodes: Rank
    generation: SlotValue
    nodelist: Annotated[str, Meta(max_length=1 << 20)] | None = None
    """The attempt's nodes in the order of ranks, as Slurm writes them."""

    master_addr: Name
    master_port: OpenPort
    limits: Mapping[str, Seconds] | None = None
    """Seconds, by section: those learned, in place of the configured ones."""


class Port(Call[ReservedPort], frozen=True, kw_only=True, tag="port"):
    """Reserve a port for the rendezvous."""


class Ping(Call[Done], frozen=True, kw_only=True, tag="ping"):
    """The supervisor lives."""

    limits: Mapping[str, Seconds] | None = None
    """As in ``StartWorkers``."""


class LookNow(Call[Looks], frozen=True, kw_only=True, tag="look"):
    """How far is every worker?"""


class Propose(Call[Looks], frozen=True, kw_only=True, tag="propose"):
    """Offer the workers a tick at which all of them may act."""

    tick: SlotValue
    action: SlotValue


class Commit(Call[Done], frozen=True, kw_only=True, tag="commit"):
    """Have them act at it."""

    tick: SlotValue


class Withdraw(Call[Done], frozen=True, kw_only=True, tag="withdraw"):
    """Take the offer back."""


class PassOnTerm(Call[Done], frozen=True, kw_only=True, tag="signal"):
    """Send every worker the signal that asks for a stop."""

    at_last: bool | None = None
    """The time is nearly up: SIGTERM, where that was another one."""


class AskSections(Call[SectionsReply], frozen=True, kw_only=True, tag="sections"):
    """Which sections are open? Of the workers from the ``first`` on."""

    first: Rank = written(0)


class TakeEvidence(Call[EvidenceReply], frozen=True, kw_only=True, tag="evidence"):
    """What does every worker do? Within so many seconds, and more for dumps of flight recorders."""

    within_s: Seconds
    dumps_within_s: Seconds = written(0.0)


class RescueState(Call[Rescued], frozen=True, kw_only=True, tag="rescue"):
    """Keep the newest complete step."""


class Inject(Call[Injected], frozen=True, kw_only=True, tag="inject"):
    """Inject a fault."""

    order: Mapping[str, Any]
    """``policy.values.Order`` as JSON, which the agent checks itself, and may refuse."""

    ranks: tuple[Rank, ...] | None
    """None: all of the node."""


class Kill(Call[Done], frozen=True, kw_only=True, tag="kill"):
    """Kill the workers."""


class Shutdown(Call[Done], frozen=True, kw_only=True, tag="shutdown"):
    """End, with all workers."""


class SyncFolders(Call[Synced], frozen=True, kw_only=True, tag="sync"):
    """Have the node's kept folders restored, or uploaded. Sent again with its number, it asks whether that is done."""

    upload: bool
    """false: restore them."""

    number: Count
    run: Name
    """The run's name where folders are stored."""

    place: Rank
    generation: Count
    within_s: Seconds = written(0.0)
    """For an upload."""


class Rehearse(Call[Done], frozen=True, kw_only=True, tag="rehearse"):
    """Run the trainer for two steps, in a world of this node alone (``spares: rehearse``); it reports the end."""


# Inference: what an agent does under one epoch is void when it is lost, and comes back with another


class BeginReplicas(Call[Done], frozen=True, kw_only=True, tag="replicas"):
    """Take part in answering requests."""

    attempt: Name
    epoch: Count
    generation: SlotValue
    node: Count
    """The number of the agent's node in this run; a node that another job lends has one of its own in that job."""

    router_port: OpenPort | None = None
    """Where an earlier router of this node listened: clients know it."""


class Lease(Call[Done], HasRuns, frozen=True, kw_only=True, tag="lease"):
    """Answer these requests; those ``alone`` each on a replica that does nothing else.

    ``partials`` are files with text that earlier replicas have generated for some of the ``runs``.
    """

    epoch: Count
    runs: Runs
    alone: Requests = written(())
    partials: Annotated[tuple[Name, ...], Meta(max_length=1000)] | None = None


class Drain(Call[Done], frozen=True, kw_only=True, tag="drain"):
    """Finish what is in flight within this time, and give the rest back."""

    within_s: Seconds


class ReplicaPlace(Fields, frozen=True, kw_only=True):
    """Where a replica of an endpoint listens."""

    name: Name
    hosts: Hosts
    port: PortNumber


class JoinGang(Call[Done], frozen=True, kw_only=True, tag="gang"):
    """The node's part in an engine over several nodes."""

    epoch: Count
    rank: Rank | None = None
    """0: it is the head, which answers for all; None: it has no part."""

    head: ReplicaPlace | None = None
    """Of a member: where the head waits for it."""


class Members(Call[Done], frozen=True, kw_only=True, tag="members"):
    """All replicas of the endpoint that are ready; for the node's router, where it is to have one."""

    epoch: Count
    router: bool
    expected: Count
    replicas: tuple[ReplicaPlace, ...]
    closing: bool | None = None
    """The endpoint goes away, and no replica will be ready again: what comes now is refused."""

    on: Ranks | None = None
    """The node's replicas that are to be on; None: all."""

    wanted: Count | None = None
    """Of all nodes."""


ROUTER_VARIABLE = "SLURMFT_ROUTER"


class RouterSettings(Fields, frozen=True, kw_only=True):
    """What an agent tells a router at its start, in ROUTER_VARIABLE; later ``Members`` of the supervisor."""

    socket: str
    config: str
    """The run's configuration."""

    node: str
    hosts: tuple[str, ...]
    """Names and addresses of the node, for a certificate of the run's own."""

    port: PortNumber
    """0: a free one."""


class RouterLives(Fields, frozen=True, kw_only=True):
    """What a router tells its agent, first when it listens."""

    port: OpenPort
    answered: Count = written(0)
    """Requests in its life."""

    load: Count = written(0)
    """Requests that wait in it, or that it has given to replicas."""


class RenewReplica(Call[Done], frozen=True, kw_only=True, tag="renew replica"):
    """Start a replica anew with another configuration, once it has finished what it has."""

    replica: Count
    config: Name
    """Path in the run folder. A replica that has it already only says how it is."""

    within_s: Seconds
    """Time for what it has in flight."""


class _Head(Fields, frozen=True, kw_only=True):
    kind: str
    id: int


_KINDS: Any = {kind_of(each): each for each in Call.__subclasses__()}


def parse_call(line: bytes) -> tuple[int, Call[Any] | None]:
    """A call and its number; None where its kind is of a newer version.

    Raises:
        BadMessage: it is malformed.
    """
    head = _Head.parse(line, "a call")
    found = _KINDS.get(head.kind)
    return head.id, None if found is None else found.parse(line, f"the call {head.kind!r}")


# --- reports ---
# What an agent sends by itself: a hello on each connection, then reports. Each is checked once, at the socket.
#
#     channel.send(SignalReport(name="SIGTERM").as_mapping())
#     match parse_report(await channel.receive()): ...
#
# A supervisor that crashed over a malformed message would end the whole job, so ``BadMessage`` only closes the
# connection by which it came.

Generation = SlotValue | None
"""Of the attempt whose workers it is about; None where it is about none."""

_ShortName = Annotated[Printable, Meta(min_length=1, max_length=pages.MAX_NAME)]


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
    role: Annotated[Printable, Meta(max_length=pages.MAX_NAME)]
    device: Annotated[int, Meta(ge=0, le=pages.CUDA)]
    sections: Annotated[
        tuple[tuple[_ShortName, Seconds, Annotated[int, Meta(ge=1, le=2**31 - 1)]], ...],
        Meta(max_length=pages.MAX_SECTIONS),
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

    digests: Annotated[tuple[tuple[SlotValue, SlotValue], ...], Meta(max_length=pages.ENTRIES)]
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

    sections: Annotated[Held, Meta(max_length=pages.MAX_NAMES)]
    generation: Generation = None


class SignalReport(Sent, frozen=True, kw_only=True, tag="signal"):
    """A signal came to the agent."""

    name: Name
    count: SlotValue | None = None
    at: Seconds | None = None


class NoticeReport(Sent, frozen=True, kw_only=True, tag="notice"):
    """A cloud has announced something about the node, or hardware of it has failed."""

    source: Name
    what: Name
    ends: bool
    left_s: Annotated[float, Meta(ge=0, le=sys.float_info.max)]
    at: Seconds | None = None
    fault: bool = False


class LimitReport(Sent, frozen=True, kw_only=True, tag="limit"):
    """Something does not work in the agent's container as it does outside."""

    what: Name


class RehearsalReport(Sent, frozen=True, kw_only=True, tag="rehearsed"):
    """A spare has run the trainer for two steps, or could not."""

    took_s: Seconds
    problem: Words = written("")
    """Empty where it went well."""


Lasting = WorkerExited | HangReport | SignalReport | NoticeReport | LimitReport | RehearsalReport
"""What stays true: sent again on each connection, as the one before may have lost it."""


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
    """... where its gate listens, if it is ready and of an endpoint; while it starts, where it waits for members."""


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

    member: Rank = 0
    """Of an engine over several nodes: that whose process has ended first."""

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
