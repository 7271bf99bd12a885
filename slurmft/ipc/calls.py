"""What a supervisor asks of an agent, which answers with one of ``replies``. Each is checked once, at the socket.

    looks = await link.call(Propose(tick=7, action=1))      # Looks
    match call: case Propose(tick=tick): ...                # in the agent

``BadMessage`` only closes the connection by which the malformed message came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar, get_args

from msgspec import Meta

from slurmft.ipc.channel import Body
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
    HasRuns,
    Hosts,
    Message,
    Name,
    OpenPort,
    PortNumber,
    Rank,
    Ranks,
    Requests,
    Runs,
    Seconds,
    SlotValue,
    Text255,
    kind_of,
    written,
)

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
    """``policy.faults.Order`` as JSON, which the agent checks itself, and may refuse."""

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
