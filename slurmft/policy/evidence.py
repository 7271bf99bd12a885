"""Evidence against nodes: observations, each with its kind, and suspects of ending an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of an observation; the vocabulary of the exclusion list and of workers' evidence files."""

    RERUN_UNDECIDED = "rerun undecided"
    """A result was rejected and came out the same again in place: the node, or the software."""

    RERUN_TRANSIENT = "rerun transient"
    """A rejected result came out otherwise when it was computed again in place."""

    RERUN_PERSISTENT = "rerun persistent"
    """A rejected result came out the same in place and otherwise on other hardware: the first node is faulty."""

    RERUN_ACQUITTED = "rerun acquitted"
    """A rejected result came out the same on other hardware: the node computes correctly."""

    REPLICA_DIFFERS = "replica differs"
    """Its replica of the weights or the optimizer state was not that of the others."""

    STRAGGLER = "straggler"
    HANG = "hang"
    NODE_LOST = "node lost"
    LAUNCH_FAILED = "launch failed"
    """Slurm could not start a job there, and has drained it: a Prolog that fails."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    REPEATED_DEATH = "repeated death"
    """Attempts died from the same checkpoint, all on this node."""

    COMMUNICATION = "communication"
    RECLAIMED = "reclaimed"
    """Its cloud has announced to take the machine away."""

    AT_RISK = "at risk"
    """Its cloud has announced that it may do so."""

    HEALTH = "health check"
    PASSED = "health check passed"
    FORGIVEN = "forgiven"
    """A user has cleared all earlier observations of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """Hardware that may have ended an attempt or spoiled a result."""

    node: str
    gpu: str = ""
    """UUID of the GPU; empty where there is none or it is not known."""

    rank: int | None = None
    """The rank that ran there; None when it is the whole node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One thing that a worker, an agent or the supervisor has seen of a node."""

    kind: Kind
    suspect: Suspect
    message: str
    """One line for people."""

    at: float
    """Unix time."""

    step: int | None = None
