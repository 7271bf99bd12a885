"""Steps of exactly one millisecond: ``python one_ms_steps.py RESULT STEPS [session]``.

Writes steps per second, piece by piece: with ``session`` those of a slurmft session, else of a plain loop.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch  # noqa: F401 - so that both are the same process but for the session

from slurmft import start_session

STEP_S = 0.001
PIECE = 500
"""Steps; half a second, in which the agent and the supervisor do each of their duties at least once."""


def measure(steps: Iterable[int]) -> list[float]:
    """Steps per second of every PIECE steps, without the first ones."""
    marks = []
    for step in steps:
        now = time.perf_counter()
        if step % PIECE == 0:
            marks.append(now)
        until = now + STEP_S
        while time.perf_counter() < until:
            pass
    return [PIECE / (after - before) for before, after in itertools.pairwise(marks[1:])]


def main(result: Path, steps: int, with_session: bool) -> None:
    if with_session:
        with start_session(seed=1) as session:
            rates = measure(session.steps(start=0, until=steps, save=lambda _: None))
    else:
        rates = measure(range(steps))
    result.write_text(f"{json.dumps(rates)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["session"])
