"""What sections and hang detection cost, and how soon a hang is told. Tables in Markdown.

python bench/sections --output bench/results/sections.md      # 2 minutes; nothing else should run meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

import yaml

import slurmft
from slurmft.agent.hangs import HangWatch
from slurmft.config.run import RunConfig
from slurmft.ipc.pages import Page, Phase, SectionStack, open_sections
from slurmft.policy.hangs import Exceeded, Limits, WorkerLook, find_culprit

CALLS = 200_000
WORKERS = 8
TRIALS = 30
WATCHED_S = 30.0
NEIGHBOUR_NS = 46_000

IDLE_TRAINER = """
import time
from slurmft import start_session
with start_session() as session:
    for step in session.steps(start=0, until=1_000_000, save=lambda step: None):
        with session.section("wait"):
            time.sleep(0.5)
"""


@dataclass
class Worker:
    """As much of an agent's worker as hang detection needs."""

    rank: int
    page: Page
    pid: int = 0
    forked_at: float | None = None
    alive: bool = True


def nanoseconds(work: Callable[[], object]) -> list[float]:
    """CPU time of a call, less that of a function that does nothing; what else runs on the machine matters little."""
    empty = min(timeit.repeat(lambda: None, number=CALLS, repeat=5, timer=time.process_time))
    found = timeit.repeat(work, number=CALLS, repeat=15, timer=time.process_time)
    return [1e9 * (seconds - empty) / CALLS for seconds in found]


def costs() -> dict[str, list[float]]:
    stack = SectionStack(Page.private())
    kept = stack.section("load")
    stack.section("outer").__enter__()

    def two_clocks() -> None:
        monotonic_ns()
        monotonic_ns()

    def by_object() -> None:
        with kept:
            pass

    def by_name() -> None:
        with stack.section("load"):
            pass

    def by_calls() -> None:
        stack.start("load")
        stack.end("load")

    return {
        "floor: two reads of the clock": nanoseconds(two_clocks),
        "`with section:`, kept in a variable": nanoseconds(by_object),
        '`with session.section("load"):`': nanoseconds(by_name),
        '`session.start_section("load")`, `session.end_section("load")`': nanoseconds(by_calls),
        "the session's own `step` (its begin)": nanoseconds(lambda: stack.phase(Phase.STEP)),
    }


def workers_in(folder: Path, number: int) -> tuple[list[Worker], list[SectionStack]]:
    workers, stacks = [], []
    for rank in range(number):
        workers.append(Worker(rank, Page.create(folder / str(rank), rank=rank, generation=1)))
        stacks.append(SectionStack(Page.attach(folder / str(rank))))
        stacks[-1].phase(Phase.STEP)
        for name in ("forward", "layer 7", "all-gather"):
            stacks[-1].start(name)
    return workers, stacks


def configured(folder: Path, **settings: Any) -> RunConfig:
    facts = {"command": "x", "run_folder": str(folder / "run"), "fault_tolerance": settings}
    return RunConfig.model_validate(facts)


def looks() -> dict[str, list[float]]:
    """Microseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers, _ = workers_in(folder, WORKERS)
        watch = HangWatch(configured(folder), lambda report: None)
        watch.begin(workers, learned={})
        limits = Limits(sections={"step": 1.0})
        many = [WorkerLook(rank=rank, node=f"n{rank // 8}", sections=(("step", 2.0),)) for rank in range(16_384)]
        first = Exceeded(rank=5, section="step", held_s=2.0, limit_s=1.0, why="")
        return {
            "one page with four open sections, read": micro(lambda: open_sections(workers[0].page)),
            f"an agent's look at {WORKERS} workers": micro(watch.look),
            "who is to blame, among 16,384 ranks that stand still": micro(lambda: find_culprit(many, first, limits), 1),
        }


def micro(work: Callable[[], object], number: int = 500) -> list[float]:
    return [1e6 * seconds / number for seconds in timeit.repeat(work, number=number, repeat=9, timer=time.process_time)]


async def _late_s(folder: Path) -> float:
    workers, stacks = workers_in(folder, 1)
    for stack in stacks:
        stack.end_all()
        stack.phase(Phase.NONE)
    told: asyncio.Queue[float] = asyncio.Queue()
    config = configured(folder, rank_section_timeouts={"load": 0.5}, num_warmup_iterations=0)
    watch = HangWatch(config, lambda report: told.put_nowait(time.monotonic()))
    watch.begin(workers, learned={})
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0.05)
    began_s = time.monotonic()
    stacks[0].start("load")
    at_s = await told.get()
    running.cancel()
    return at_s - began_s - 0.5


def latency() -> list[float]:
    """Milliseconds from the limit to the report."""
    found = []
    for _ in range(TRIALS):
        with tempfile.TemporaryDirectory() as name:
            found.append(1000 * asyncio.run(_late_s(Path(name))))
    return found


def agents_cpu(**settings: Any) -> float:
    """Percent of a core that the agent of a real run of 8 sleeping ranks uses, all that it does included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "idle.py").write_text(IDLE_TRAINER)
        config = {
            "command": [sys.executable, str(folder / "idle.py")], "run_folder": str(folder / "run"),
            "nproc_per_node": WORKERS, "fault_tolerance": settings, "nccl": {"backend": "gloo"},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        argv = [sys.executable, "-m", "slurmft", "run", str(folder / "config.yaml")]
        free = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        with subprocess.Popen(argv, env=free, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                agent = eventually(lambda: _agent_below(folder))
                eventually(lambda: '"step": 4' in _text(folder / "run" / "progress.json"))
                before, began_s = cpu_s(agent), time.monotonic()
                time.sleep(WATCHED_S)
                return 100 * (cpu_s(agent) - before) / (time.monotonic() - began_s)
            finally:
                (folder / "run" / "KILL").touch()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)


def eventually(look: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 120
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise SystemExit("the run that was to be measured did not begin")
        time.sleep(0.1)
    return found


def _agent_below(folder: Path) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _text(path).split("\0")
        if "agent" in words and any(word.startswith(str(folder)) for word in words):
            return int(path.parent.name)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def cpu_s(pid: int) -> float:
    """CPU seconds of this process, its children not counted."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def verdict(value: float, asked: float) -> str:
    return "hit" if value < asked else "**miss**"


def tables() -> str:
    lines = [
        "# Sections and hang detection: what they cost, and how soon they tell", "",
        f"`python bench/sections --output bench/results/sections.md`, slurmft {slurmft.__version__}", "",
        f"{platform.system()}, Python {platform.python_version()}. Values are medians (min - max); costs are CPU time. "
        "The neighbour is nvidia-resiliency-ext 0.4.1, measured on the same kind of machine: 46 us for a section, 8.0 "
        "s for a hang with a limit of 5 s and a check interval of 1 s.", "",
        "## A section, opened and closed", "", "| | nanoseconds | asked | | neighbour |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, values in costs().items():
        is_section = "section" in name
        row = f"under 1000 | {verdict(statistics.median(values), 1000)} | {NEIGHBOUR_NS}" if is_section else "| | "
        lines.append(f"| {name} | {spread(values, 0)} | {row} |")
    lines += ["", "## Looking", "", "| | microseconds |", "|---|---|"]
    lines += [f"| {name} | {spread(values, 1)} |" for name, values in looks().items()]
    late_ms = latency()
    lines += [
        "", "## From the limit to the agent's report", "", "| | milliseconds | asked | |", "|---|---|---|---|",
        f"| a hang in a section | {spread(late_ms, 1)} | at most 200 | {verdict(max(late_ms), 200)} |",
        "", f"## An agent's CPU use, {WORKERS} ranks that sleep", "", "| | percent of a core | asked | |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name, settings in (
        ("default limits", {}),
        ("limits of 2 s", {"rank_section_timeouts": {"step": 2, "wait": 2}, "num_warmup_iterations": 1}),
        ("`calc_ft_timeouts`", {"calc_ft_timeouts": True}),
    ):
        percent = agents_cpu(**settings)
        lines.append(f"| {name} | {percent:.2f} | under 0.5 | {verdict(percent, 0.5)} |")
    lines += [
        "",
        "All of the agent's work is in it, such as its reports of progress, twice a second.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/sections", description=(__doc__ or "").splitlines()[0])
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
