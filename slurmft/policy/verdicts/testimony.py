"""Reports about an attempt's end beside exit codes: files of workers, srun's lines."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurmft.policy.nodes.evidence import Evidence, Suspect
from slurmft.policy.verdicts.verdict import Cause

CLAIMABLE = frozenset(
    {
        Cause.WORKER_ERROR, Cause.SIGNAL_CRASH, Cause.HOST_OUT_OF_MEMORY, Cause.DEVICE_OUT_OF_MEMORY, Cause.HANG,
        Cause.COMMUNICATION_ERROR, Cause.DATA_CORRUPTION, Cause.RERUN_ELSEWHERE, Cause.VALIDATION_FAILED,
        Cause.STRAGGLER,
    }
)  # fmt: skip
"""Causes that a worker or an agent may report of itself. Preempted, cancelled or complete are for others to report."""


def claimed(word: str) -> Cause:
    """The cause that a verdict file names; UNKNOWN for anything that its writer cannot know."""
    return next((cause for cause in CLAIMABLE if cause.value == word), Cause.UNKNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report that one rank, or the agent of one node, has left in a file."""

    source: str
    """Which file that is, in words."""

    rank: int | None = None
    """None when it is an agent's, about its node."""

    node: str = ""
    cause: Cause = Cause.UNKNOWN
    message: str = ""
    traceback: str = ""
    suspects: tuple[Suspect, ...] = ()
    rerun: str = ""
    binding: bool = False
    """It is a verdict file, which overrides the exit code. Other files only explain one."""

    guessed: bool = False
    """From a log, with any content: believed only where the exit code does not contradict it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnd:
    """One of srun's lines about tasks that did not end well."""

    nodes: tuple[str, ...]
    tasks: str
    """As srun writes it: ``4-7``."""

    word: str
    """``Killed``, ``Terminated``, ``Exited``, ``Out Of Memory``, ``Segmentation fault``, ..."""

    code: int | None = None
    """Exit code, for ``Exited``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWords:
    """The messages of srun and slurmstepd about the step. Tasks that were killed or terminated are victims."""

    ends: tuple[TaskEnd, ...] = ()
    failed_nodes: tuple[str, ...] = ()
    oom_nodes: tuple[str, ...] = ()
    oom_somewhere: bool = False
    """The kernel has ended processes of the step for memory; on which node is not said."""

    refused: tuple[tuple[str, str], ...] = ()
    """Nodes on which srun could not start the step, and why, in its words; tasks elsewhere are killed for it."""

    def oom_on(self, node: str) -> bool:
        """Whether processes of ``node`` may have been ended for memory; srun and slurmstepd do not always name it."""
        return node in self.oom_nodes if self.oom_nodes else self.oom_somewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class Testimony:
    """All of it."""

    reports: tuple[Report, ...] = ()
    step: StepWords = field(default_factory=StepWords)
    evidence: tuple[Evidence, ...] = ()
    problems: tuple[str, ...] = ()
    """Files that could not be read or believed, in words."""
