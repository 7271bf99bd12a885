"""The output of srun and slurmstepd on srun's standard error, as values. Pure; every version from 22.05 on.

srun reports how tasks ended, but not why: a task that was ``Killed`` or ``Terminated`` did not fail by itself.
"""

from __future__ import annotations

import re

from slurmft.policy.judge import StepWords, TaskEnd
from slurmft.policy.verdict import Cause
from slurmft.scheduler.parsing import expand_hostlist

MAX_ENDS, MAX_LINE = 200, 4000
MAX_NODES = 20_000
"""No cluster has more; a damaged line such as ``n[1-999999999]`` must not fill the memory."""

_LABEL = r"^(?:\s*\d+: )?"  # srun --label
_TASKS = re.compile(_LABEL + r"srun: error: (?P<nodes>[^\s:]+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<word>.+?)\s*$")
_EXITED = re.compile(r"^Exited with exit code (\d+)$")
_FAILED = re.compile(_LABEL + r"srun: error: Node failure on (?P<nodes>\S+)")
_LAUNCH = re.compile(_LABEL + r"srun: error: Task launch for \S+ failed on node (?P<nodes>[^\s:]+): (?P<words>.+?)\s*$")
_NOT_THE_NODES = re.compile(r"credential|execve|job id", re.IGNORECASE)
"""A start that came too soon after the last one, or a program that is on no node."""

_OOM = re.compile(r"slurmstepd(?:-(?P<node>\S+?))?: error: .*\b(?:oom[-_]kill event|[Ee]xceeded .*memory limit)")
_ENDED = re.compile(r"slurmstepd\S{0,255}: error: \*\*\* \S+ \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+)")
_WORDS = {"TIME LIMIT": Cause.TIME_LIMIT, "PREEMPTION": Cause.PREEMPTED, "JOB REQUEUE": Cause.REQUEUED,
          "NODE FAILURE": Cause.NODE_LOST}  # fmt: skip
_RANGE = re.compile(r"(\d+)-(\d+)")


def parse_srun_lines(text: str) -> StepWords:
    """What ``text`` says; lines that say nothing of a task's or a node's end are skipped."""
    ends: dict[TaskEnd, None] = {}
    failed: dict[str, None] = {}
    oom: dict[str, None] = {}
    refused: dict[str, str] = {}
    oom_somewhere, ended = False, None
    for line in (each[:MAX_LINE] for each in text.splitlines()):
        if (match := _TASKS.search(line)) is not None:
            end = _task_end(match)
            if len(ends) < MAX_ENDS:
                ends[end] = None
            if end.word == "Out Of Memory":
                oom |= dict.fromkeys(end.nodes)
                oom_somewhere = True
        elif (match := _FAILED.search(line)) is not None:
            failed |= dict.fromkeys(_nodes(match["nodes"]))
        elif (match := _LAUNCH.search(line)) is not None:
            if not _NOT_THE_NODES.search(match["words"]):
                refused |= dict.fromkeys(_nodes(match["nodes"]), match["words"][:200])
        elif (match := _OOM.search(line)) is not None:
            oom_somewhere = True
            if match["node"]:
                oom[match["node"]] = None
        elif (match := _ENDED.search(line)) is not None:
            ended = ended or _WORDS.get(match[1].strip())
    return StepWords(
        ends=tuple(ends), failed_nodes=tuple(failed), oom_nodes=tuple(oom), oom_somewhere=oom_somewhere,
        refused=tuple(refused.items()), ended=ended,
    )  # fmt: skip


def _task_end(match: re.Match[str]) -> TaskEnd:
    word, code = match["word"], None
    if (exited := _EXITED.match(word)) is not None:
        word, code = "Exited", int(exited[1])
    word = word.removesuffix(" (core dumped)")
    return TaskEnd(nodes=tuple(_nodes(match["nodes"])), tasks=match["tasks"][:200], word=word[:100], code=code)


def _nodes(text: str) -> list[str]:
    text = text.rstrip(",.")
    total = sum(max(0, int(last[:9]) - int(first[:9])) for first, last in _RANGE.findall(text))
    try:
        return expand_hostlist(text) if total <= MAX_NODES else [text[:255]]
    except ValueError:
        return [text[:255]]
