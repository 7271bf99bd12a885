"""Where a worker's main thread is, from its innermost calls and its process state: does it wait for other ranks?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

COLLECTIVE_DOING = "waits for the other ranks"

_STDLIB = re.compile(r"^<|/lib/python3\.\d+t?/(?!site-packages/|dist-packages/)")
_DISTRIBUTED = re.compile(r"/torch/distributed/(?!checkpoint/|elastic/|launcher/|launch\.py|run\.py)")
_DOING = (
    (re.compile(r"/torch/utils/data/"), "waits for its data loader"),
    (re.compile(r"/torch/distributed/checkpoint/|/slurmft/checkpoint/"), "is in a checkpoint"),
    (re.compile(r"/torch/_(?:inductor|dynamo|functorch)/"), "compiles"),
)


class Where(StrEnum):
    """Where a worker was found."""

    COLLECTIVE = "waiting in a collective"
    ELSEWHERE = "elsewhere"
    STOPPED = "stopped"
    """By SIGSTOP, a debugger or job control."""

    NO_ANSWER = "no answer"
    """It lives, but has not reported its stack: it cannot, or is not a Python process of ours."""

    DEAD = "dead"


def whereabouts(calls: Sequence[tuple[str, str, str]], state: str) -> tuple[Where, str]:
    """Where a main thread is, and what it does in a few words.

    Args:
        calls: file, line and function of its calls, innermost first; empty when it has not reported them.
        state: its letter in /proc/PID/stat.

    A GPU's wait does not show in a Python stack: a rank that waits for NCCL by way of ``.item()`` is ELSEWHERE.
    """
    if state in ("T", "t"):
        return Where.STOPPED, "is stopped (SIGSTOP, or a debugger)" if state == "T" else "is held by a debugger"
    if not calls:
        return Where.NO_ANSWER, "sleeps in the kernel, not interruptible" if state == "D" else "reports no stack"
    file, line, function = next((call for call in calls if not _STDLIB.search(call[0])), calls[0])
    if _DISTRIBUTED.search(file):
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} in {function if function != 'wrapper' else 'a collective'}"
    if file.endswith("/torch/autograd/graph.py") and state in ("S", "D"):
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} in the backward pass"
    if "/torch/cuda/" in file and function == "synchronize":
        return Where.COLLECTIVE, "waits for its GPU"
    if file.endswith("/slurmft/worker/agreement.py"):
        return Where.COLLECTIVE, f"{COLLECTIVE_DOING} to agree on a stop"
    for pattern, doing in _DOING:
        if pattern.search(file):
            return Where.ELSEWHERE, doing
    return Where.ELSEWHERE, f"is in {function} ({file.rpartition('/')[2]}:{line})"
