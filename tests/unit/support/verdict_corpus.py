"""Excerpts of public threads (``data/verdict_corpus.txt``), what ended each, and what slurmft makes of it.

The labels were written before the reader was asked; those of the half that judges twice, the second time by somebody
who saw nothing but the texts, in a random order. Projects, not excerpts, are split by a hash of their names into a half
that patterns may be written for and one that judges them.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.policy.symptoms import signature_of
from slurmft.policy.verdict import Cause
from slurmft.supervisor.observations import report_of_text
from slurmft.worker.failures import categorize_failure

LABELS = {
    "corrupt": ("corrupt", "hardware"),
    "node": ("none", "hardware"),
    "hardware": ("none", "hardware"),
    "device": ("device", "device out of memory"),
    "host": ("host", "host out of memory"),
    "comm": ("comm", "communication"),
    "download": ("none", "communication"),
    "numbers": ("none", "numerical"),
    "storage": ("none", "storage"),
    "file": ("none", "storage"),
    "slurm": ("none", "preemption"),
    "late": ("none", "timeout"),
    "code": ("none", "code"),
    "crash": ("none", "unknown"),
    "quiet": ("none", "unknown"),
}
"""Label -> the cause of a verdict on a rank whose log is all there is, and the category of the text.

``node`` is a sick node or device, ``hardware`` a device's error for which a program may be the reason; ``download`` has
nothing to do with the other ranks; ``file`` is one that is missing or damaged; ``quiet`` ended nothing.
"""

CAUSES = {
    Cause.DATA_CORRUPTION: "corrupt",
    Cause.DEVICE_OUT_OF_MEMORY: "device",
    Cause.HOST_OUT_OF_MEMORY: "host",
    Cause.COMMUNICATION_ERROR: "comm",
    Cause.WORKER_ERROR: "none",
}

ACTIONS = ("again", "elsewhere", "less", "wait", "queue", "stop", "none")
"""In place; on other nodes; with less memory; when somebody has made room; through the queue; not again; nothing has
ended."""

_TRACE = 'Traceback (most recent call last):\n{0}  File "/w/train.py", line 12, in <module>\n{0}    main()'
_OPENINGS = {
    "~~": "During handling of the above exception, another exception occurred:\n",
    "~>": "The above exception was the direct cause of the following exception:\n",
}


@dataclass(frozen=True)
class Excerpt:
    """One entry of the corpus."""

    label: str
    action: str
    project: str
    name: str
    text: str
    second: tuple[str, str] | None = None
    """Label and action as a second reader gave them."""

    @property
    def judges(self) -> bool:
        """Whether it is of the half that no pattern is written for."""
        return hashlib.sha256(self.project.lower().encode()).digest()[0] % 2 == 1

    @property
    def expected(self) -> tuple[str, str]:
        return LABELS[self.label]

    def found(self) -> tuple[str, str]:
        """What slurmft says: as ``expected``."""
        cause = report_of_text(self.text, source="log", rank=0, node="n1", log=True).cause
        return CAUSES[cause], categorize_failure(self.text).value

    def answer(self) -> str:
        """What slurmft holds right to do. A rank that has failed is tried again where nothing is recognized."""
        row = signature_of(self.text, loosely=True)
        return row.remedy.value if row is not None else "none" if self.label == "quiet" else "again"


def verdict_corpus() -> list[Excerpt]:
    """All of it."""
    text = (Path(__file__).parents[1] / "data" / "verdict_corpus.txt").read_text(encoding="utf-8")
    found = []
    for entry in text.split("\n=== ")[1:]:
        head, _, body = entry.partition("\n")
        match = re.fullmatch(r"(\w+)(?:/(\w+))? (\w+)(?:/(\w+))? ([^\s#:]+(?:#\d+)?): (.+)", head)
        assert match is not None, head
        label, its_second, action, second_action, thread, note = match.groups()
        assert {label, its_second or label} <= LABELS.keys() and {action, second_action or action} <= {*ACTIONS}, head
        second = (its_second, second_action) if its_second and second_action else None
        project, text = thread.partition("#")[0], _written_out(body.split("\n"))
        found.append(Excerpt(label, action, project, f"{thread}: {note}", text, second))
    return found


def agreement(pairs: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """The share of pairs of labels that are equal, and Cohen's kappa: by how much it is above chance, 1 at most.

    (p_o - p_e) / (1 - p_e), where p_e is the share expected of two readers who give each label as often as these do, by
    chance; J. Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 20, 1960.
    """
    equal = sum(first == second for first, second in pairs) / len(pairs)
    ours, theirs = Counter(first for first, _ in pairs), Counter(second for _, second in pairs)
    by_chance = sum(count * theirs[label] for label, count in ours.items()) / len(pairs) ** 2
    return equal, 1.0 if by_chance == 1 else (equal - by_chance) / (1 - by_chance)


def _written_out(lines: Sequence[str]) -> str:
    written = []
    for line in lines:
        mark, sep, _ = line.partition("~")
        if line.endswith(tuple(_OPENINGS)) and line[:-2] == mark:
            written.append(mark + _OPENINGS[line[-2:]])
        elif sep and line == f"{mark}~":
            written.append(mark + _TRACE.format(mark))
        else:
            written.append(line)
    return "\n".join(written)
