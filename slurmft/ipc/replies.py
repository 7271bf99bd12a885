"""An agent's replies to the calls of ``calls``, each checked once, where it leaves the socket."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slurmft.ipc.channel import Body
from slurmft.ipc.flight_dump import MAX_GROUPS, MAX_MEMBERS, MAX_SPANS, MAX_TEXT
from slurmft.ipc.pages.section_stack import DEPTH, ELSEWHERE
from slurmft.ipc.shapes import (
    ExitCode,
    Fields,
    Held,
    OpenPort,
    Rank,
    Ranks,
    Seconds,
    SlotValue,
    Text200,
    Words,
    written,
)
from slurmft.ipc.stacks import MAX_FRAME, MAX_FRAMES
from slurmft.ipc.worker_facts import StateNumber
from slurmft.policy.timing.hangs import WorkerLook
from slurmft.policy.verdicts.collectives import Progress
from slurmft.policy.verdicts.whereabouts import Where


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
    """Each as a ``policy.timing.stop.Look``."""


class WorkerSections(Fields, frozen=True, kw_only=True):
    """A ``WorkerLook``, as it is sent."""

    rank: Rank
    attached: bool
    age_s: Seconds
    quiet_s: Seconds
    sections: Annotated[Held, Meta(max_length=DEPTH + 1)]
    elsewhere: Annotated[Held, Meta(max_length=ELSEWHERE)]
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
    python_top: Annotated[tuple[Annotated[str, Meta(max_length=2 * MAX_FRAME + 32)], ...], Meta(max_length=MAX_FRAMES)]
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
