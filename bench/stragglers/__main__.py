"""What straggler detection costs: each timed section, each report. A table in Markdown.

python bench/stragglers --output bench/results/stragglers.md      # 20 s; nothing else should run meanwhile
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

import slurmft
from slurmft.agent.agent import TIMINGS_PER_MESSAGE, TimingReports
from slurmft.config.run import validate
from slurmft.ipc.messages import RankTimings, TimingsReport
from slurmft.ipc.pages import TimingPage
from slurmft.policy.stragglers import Limits, ReportShape, Window, report, score
from slurmft.storage.journal import Journal
from slurmft.supervisor.stragglers import StragglerWatch
from slurmft.worker.stragglers import StragglerDetector

SECTIONS = 8
RANKS_PER_NODE = 8
SIZES = (512, 16_384)
ASKED_MS = {512: 2.0, 16_384: 25.0}
NEIGHBOUR_MS = {512: 14.4, 16_384: 443.0}
ROUNDS = 30
CALLS = 200_000


@dataclass(frozen=True)
class Worker:
    rank: int
    timings: TimingPage


def milliseconds(work: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    work()
    return [1000 * timeit.timeit(work, number=1) for _ in range(rounds)]


def nanoseconds(work: Callable[[], object]) -> list[float]:
    """Per call, less the call of a function that does nothing."""
    empty = min(timeit.repeat(lambda: None, number=CALLS, repeat=5))
    return [1e9 * (seconds - empty) / CALLS for seconds in timeit.repeat(work, number=CALLS, repeat=9)]


def medians_of(ranks: int) -> np.ndarray:
    medians = np.random.default_rng(1).normal(0.1, 0.003, (ranks, SECTIONS))
    medians[7] *= 1.6
    return medians


def scores_and_report(ranks: int) -> list[float]:
    window = Window(
        medians_s=medians_of(ranks), counts=np.full((ranks, SECTIONS), 100),
        cohorts=np.zeros(ranks, np.int64), best_s=np.full(ranks, 0.75),
    )  # fmt: skip
    nodes = [f"node-{rank // RANKS_PER_NODE:05}" for rank in range(ranks)]
    names = [f"section {number}" for number in range(SECTIONS)]
    return milliseconds(lambda: report(score(window, Limits()), nodes, names, ReportShape()))


def whole_window(ranks: int) -> list[float]:
    """All of the supervisor's work for one window: take in every agent's message, score, report, remember."""
    with tempfile.TemporaryDirectory() as folder:
        config = validate(
            {"command": "x", "run_folder": folder, "nodes": ranks // RANKS_PER_NODE, "nproc_per_node": RANKS_PER_NODE},
            source="bench",
        )
        watch = StragglerWatch(config, Path(folder), Journal(Path(folder), attempt="1.0.0"))
        messages = messages_of(ranks)
        number = 0

        def window() -> None:
            nonlocal number
            number += 1
            for host, message in messages:
                watch.note(host, replace(message, window=number))

        return milliseconds(window, rounds=10)


def messages_of(ranks: int) -> list[tuple[str, TimingsReport]]:
    found: list[tuple[str, TimingsReport]] = []
    medians = medians_of(ranks).tolist()
    for first in range(0, ranks, RANKS_PER_NODE):
        facts = tuple(
            RankTimings(
                rank=rank, role="", device=1,
                sections=tuple((f"section {number}", medians[rank][number], 100) for number in range(SECTIONS)),
            )
            for rank in range(first, first + RANKS_PER_NODE)
        )  # fmt: skip
        found.append((f"node-{first // RANKS_PER_NODE:05}", TimingsReport(window=0, ranks=facts)))
    return found


def sections() -> dict[str, list[float]]:
    detector = StragglerDetector()
    kept = detector.section("data")

    def by_name() -> None:
        with detector.section("data"):
            pass

    def by_object() -> None:
        with kept:
            pass

    def step() -> None:
        detector.begin_step()
        detector.first_collective()
        detector.end_step()

    return {
        '`with detector.section("data"):`': nanoseconds(by_name),
        "the same, the section kept in a variable": nanoseconds(by_object),
        "a step of the session: its begin, first collective, end": nanoseconds(step),
    }


def agents_window() -> list[float]:
    """All of an agent's work for one window of 8 workers whose rings are full."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(RANKS_PER_NODE):
            page = TimingPage.create(Path(folder) / str(rank), rank=rank, generation=1)
            detector = StragglerDetector(page=page)
            for number in range(SECTIONS):
                for _ in range(300):
                    with detector.section(f"section {number}"):
                        pass
            workers.append(Worker(rank, page))
        assert len(workers) <= TIMINGS_PER_MESSAGE
        return milliseconds(lambda: list(TimingReports(1.0, 0.0).due(workers, time.monotonic())))


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def verdict(value: float, asked: float) -> str:
    return "hit" if value < asked else "**miss**"


def tables() -> str:
    lines = [
        "# Straggler detection and its cost", "",
        f"`python bench/stragglers --output bench/results/stragglers.md`, slurmft {slurmft.__version__}", "",
        f"{platform.system()}, Python {platform.python_version()}, numpy {np.__version__}. Values are medians "
        "(min - max). The neighbour is nvidia-resiliency-ext, measured on the same kind of machine.", "",
        "## A report", "", "| | milliseconds | asked | | neighbour |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for ranks in SIZES:
        values = scores_and_report(ranks)
        asked = ASKED_MS[ranks]
        lines.append(
            f"| scores and report, {ranks:,} ranks with {SECTIONS} sections | {spread(values, 2)} | under {asked:g} | "
            f"{verdict(statistics.median(values), asked)} | {NEIGHBOUR_MS[ranks]:g} |"
        )
    for ranks in SIZES:
        lines.append(
            f"| the supervisor's whole window, {ranks:,} ranks: messages in, scores, report, the nodes' past | "
            f"{spread(whole_window(ranks), 1)} | | | |"
        )
    lines.append(
        f"| an agent's whole window, 8 workers with {SECTIONS} sections | {spread(agents_window(), 1)} | | | |"
    )
    lines += ["", "## Inside the training", "", "| | nanoseconds | asked | | neighbour |", "|---|---|---|---|---|"]
    for name, values in sections().items():
        asked = "under 1000" if "section" in name else ""
        hit = verdict(statistics.median(values), 1000) if asked else ""
        lines.append(f"| {name} | {spread(values, 0)} | {asked} | {hit} | {'3900' if asked else ''} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/stragglers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="file for the tables (default: standard output)")
    args = parser.parse_args()
    logging.disable()
    text = tables()
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
