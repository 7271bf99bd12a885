"""What a supervisor asks of an agent, which answers with one of ``replies``. Each is checked once, at the socket.

    looks = await link.call(Propose(tick=7, action=1))      # Looks
    match call: case Propose(tick=tick): ...                # in the agent

``BadMessage`` only closes the connection by which the malformed message came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from slurmft.ipc.channel import BadMessage, Body
from slurmft.ipc.replies import (
    Done,
    EvidenceReply,
    Injected,
    Looks,
    Rescued,
    ReservedPort,
    SectionsReply,
    Started,
    Synced,
)
from slurmft.ipc.shapes import (
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
    integer,
    is_flag,
    is_limits,
    is_list,
    is_names,
    is_ranks,
    is_time,
    text,
    texts,
)

Answer = TypeVar("Answer", bound=Fields)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_choice(value: Any) -> bool:
    return value is None or is_ranks(value)


def _chosen(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _as_choice(value: Sequence[int] | None) -> list[int] | None:
    return None if value is None else list(value)


class Call(Message, Generic[Answer]):
    """Something that an agent is to do, or to say."""

    __slots__ = ()

    @property
    def reply(self) -> type[Answer]:
        """The class of the reply."""
        raise NotImplementedError

    def reply_of(self, mapping: Body) -> Answer:
        """The agent's reply.

        Raises:
            BadMessage: it is malformed.
        """
        return self.reply.parse(mapping, f"the reply to {self.kind!r}")

    def as_call(self, number: int) -> Body:
        """The call, as the channel takes it; the reply bears its number."""
        return {"kind": self.kind, "id": number, **Fields.as_mapping(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorkers(Call[Started]):
    """Start the workers of an attempt."""

    kind: ClassVar[str] = "start"
    reply: ClassVar[type[Started]] = Started
    suspect_gpus: Annotated[tuple[str, ...], Shape(fits=texts(1 << 20, 255), read=tuple, write=list)] = ()
    """To be left out."""

    batch_divisor: SlotValue = 1
    mtbf_s: Annotated[float | None, Shape(fits=is_time, optional=True)] = None
    attempt: Name
    cycle: SlotValue
    first_rank: Rank
    nodes: Rank
    generation: SlotValue
    nodelist: Annotated[str | None, Shape(fits=text(1 << 20), optional=True)] = None
    """The attempt's nodes in the order of ranks, as Slurm writes them."""

    master_addr: Name
    master_port: Annotated[int, Shape(fits=integer(1, 65535))]
    limits: Annotated[Mapping[str, float] | None, Shape(fits=is_limits, optional=True)] = None
    """Seconds, by section: those learned, in place of the configured ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port(Call[ReservedPort]):
    """Reserve a port for the rendezvous."""

    kind: ClassVar[str] = "port"
    reply: ClassVar[type[ReservedPort]] = ReservedPort


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping(Call[Done]):
    """The supervisor lives."""

    kind: ClassVar[str] = "ping"
    reply: ClassVar[type[Done]] = Done
    limits: Annotated[Mapping[str, float] | None, Shape(fits=is_limits, optional=True)] = None
    """As in ``StartWorkers``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookNow(Call[Looks]):
    """How far is every worker?"""

    kind: ClassVar[str] = "look"
    reply: ClassVar[type[Looks]] = Looks


@dataclass(frozen=True, kw_only=True, slots=True)
class Propose(Call[Looks]):
    """Offer the workers a tick at which all of them may act."""

    kind: ClassVar[str] = "propose"
    reply: ClassVar[type[Looks]] = Looks
    tick: SlotValue
    action: SlotValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Call[Done]):
    """Have them act at it."""

    kind: ClassVar[str] = "commit"
    reply: ClassVar[type[Done]] = Done
    tick: SlotValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw(Call[Done]):
    """Take the offer back."""

    kind: ClassVar[str] = "withdraw"
    reply: ClassVar[type[Done]] = Done


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOnTerm(Call[Done]):
    """Send every worker the signal that asks for a stop."""

    kind: ClassVar[str] = "signal"
    reply: ClassVar[type[Done]] = Done
    at_last: Annotated[bool | None, Shape(fits=is_flag, optional=True)] = None
    """The time is nearly up: SIGTERM, where that was another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskSections(Call[SectionsReply]):
    """Which sections are open? Of the workers from the ``first`` on."""

    kind: ClassVar[str] = "sections"
    reply: ClassVar[type[SectionsReply]] = SectionsReply
    first: Rank = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeEvidence(Call[EvidenceReply]):
    """What does every worker do? Within so many seconds, and more for dumps of flight recorders."""

    kind: ClassVar[str] = "evidence"
    reply: ClassVar[type[EvidenceReply]] = EvidenceReply
    within_s: Seconds
    dumps_within_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RescueState(Call[Rescued]):
    """Keep the newest complete step."""

    kind: ClassVar[str] = "rescue"
    reply: ClassVar[type[Rescued]] = Rescued


@dataclass(frozen=True, kw_only=True, slots=True)
class Inject(Call[Injected]):
    """Inject a fault."""

    kind: ClassVar[str] = "inject"
    reply: ClassVar[type[Injected]] = Injected
    order: Annotated[Mapping[str, Any], Shape(fits=_is_object)]
    """``policy.faults.Order`` as JSON, which the agent checks itself, and may refuse."""

    ranks: Annotated[tuple[int, ...] | None, Shape(fits=_is_choice, read=_chosen, write=_as_choice)]
    """None: all of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill(Call[Done]):
    """Kill the workers."""

    kind: ClassVar[str] = "kill"
    reply: ClassVar[type[Done]] = Done


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown(Call[Done]):
    """End, with all workers."""

    kind: ClassVar[str] = "shutdown"
    reply: ClassVar[type[Done]] = Done


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncFolders(Call[Synced]):
    """Have the node's kept folders restored, or uploaded. Sent again with its number, it asks whether that is done."""

    kind: ClassVar[str] = "sync"
    reply: ClassVar[type[Synced]] = Synced
    upload: Flag
    """false: restore them."""

    number: Count
    run: Name
    """The run's name where folders are stored."""

    place: Rank
    generation: Count
    within_s: Seconds = 0.0
    """For an upload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearse(Call[Done]):
    """Run the trainer for two steps, in a world of this node alone (``spares: rehearse``); it reports the end."""

    kind: ClassVar[str] = "rehearse"
    reply: ClassVar[type[Done]] = Done


# Inference: what an agent does under one epoch is void when it is lost, and comes back with another


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginReplicas(Call[Done]):
    """Take part in answering requests."""

    kind: ClassVar[str] = "replicas"
    reply: ClassVar[type[Done]] = Done
    attempt: Name
    epoch: Count
    generation: SlotValue
    node: Count
    """The number of the agent's node in this run; a node that another job lends has one of its own in that job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease(Call[Done]):
    """Answer these requests; those ``alone`` each on a replica that does nothing else.

    ``partials`` are files with text that earlier replicas have generated for some of the ``runs``.
    """

    kind: ClassVar[str] = "lease"
    reply: ClassVar[type[Done]] = Done
    epoch: Count
    runs: Runs
    alone: Requests = ()
    partials: Annotated[tuple[str, ...] | None, Shape(fits=is_names, read=tuple, write=list, optional=True)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain(Call[Done]):
    """Finish what is in flight within this time, and give the rest back."""

    kind: ClassVar[str] = "drain"
    reply: ClassVar[type[Done]] = Done
    within_s: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace(Fields):
    """Where a replica of an endpoint listens."""

    name: Name
    hosts: Hosts
    port: PortNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class Members(Call[Done]):
    """All replicas of the endpoint that are ready; for the node's router, where it is to have one."""

    kind: ClassVar[str] = "members"
    reply: ClassVar[type[Done]] = Done
    epoch: Count
    router: Flag
    expected: Count
    replicas: Annotated[tuple[ReplicaPlace, ...], Shape(fits=is_list, of=ReplicaPlace)]
    closing: Annotated[bool | None, Shape(fits=is_flag, optional=True)] = None
    """The endpoint goes away, and no replica will be ready again: what comes now is refused."""

    on: Annotated[tuple[int, ...] | None, Shape(fits=is_ranks, read=tuple, write=list, optional=True)] = None
    """The node's replicas that are to be on; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewReplica(Call[Done]):
    """Start a replica anew with another configuration, once it has finished what it has."""

    kind: ClassVar[str] = "renew replica"
    reply: ClassVar[type[Done]] = Done
    replica: Count
    config: Name
    """Path in the run folder. A replica that has it already only says how it is."""

    within_s: Seconds
    """Time for what it has in flight."""


_CALLS: Mapping[str, type[Call[Any]]] = {
    each.kind: each
    for each in (
        StartWorkers, Port, Ping, LookNow, Propose, Commit, Withdraw, PassOnTerm, AskSections, TakeEvidence,
        RescueState, Inject, Kill, Shutdown, BeginReplicas, Lease, Drain, Members,
        RenewReplica, SyncFolders, Rehearse,
    )
}  # fmt: skip


def parse_call(mapping: Body) -> tuple[int, Call[Any] | None]:
    """A call and its number; None where its kind is of a newer version.

    Raises:
        BadMessage: it is malformed.
    """
    kind, number = mapping["kind"], mapping.get("id")
    if type(number) is not int:
        raise BadMessage(f"a call has the id {str(number)[:40]!r}")
    found = _CALLS.get(kind)
    return number, None if found is None else found.parse(mapping, f"the call {kind!r}")
