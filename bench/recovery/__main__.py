"""How long a training stands still after ``kill -9`` of one rank: ours and others', in one run. A table in Markdown.

    python bench/recovery --output bench/results/recovery.md     # 8 minutes; nothing else should run meanwhile
    python bench/recovery --ranks 2,4,8,16 --rounds 6 --only-ours --no-others   # 2 minutes: the cost of each rank more
    python bench/recovery --against CHECKOUT    # beside another version alone, in turns

ft_launcher takes part where ``--packages`` names a folder that holds it:
``pip install --no-deps --target FOLDER nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py pynvml``.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import itertools
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import contenders
import psutil
import spare
import torch
from plot import picture

import slurmft
from slurmft.storage.checkpoint_names import MANIFEST, Identity
from slurmft.storage.run_folder import RunFolder

ASKED_S = {2: 0.12, 4: 0.25}
ASKED_RATIO = 8.0
ASKED_SPARE_S = 5.0
HANG_LIMIT_S = 2.0
IDLE_S = 10.0
STEPS_BEFORE_KILL = 150
"""3 s: long enough that a save is durable, else the restart counts as a repeated one and waits, and that the processes
of the next attempt have been forked."""
STEPS_TO_NOTE_IT = 3
"""After a commit, until the ranks have noted it in their pages."""

PATIENCE_S = 60.0
PHASES = ("detect", "stop", "decide", "start", "fork", "rendezvous", "build, load", "first step")


FLOOR = (
    "The floor is a process that has imported the same, sees a rank die, kills and forks: gloo, DDP with a pass in "
    "front, a file of the same size, a step of 20 ms. It takes no evidence, writes no journal, checks no checkpoint "
    "(`bench/recovery/floor.py`)."
)


@dataclass(frozen=True)
class Mark:
    """One line of a rank's diary."""

    at: float
    pid: int
    what: str


def marks(folder: Path, rank: int) -> list[Mark]:
    try:
        lines = (folder / f"marks-{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    words = [line.split(" ", 2) for line in lines if line.count(" ") >= 2]
    return [Mark(float(at), int(pid), what) for at, pid, what in words]


def first_step_after(folder: Path, at: float) -> Mark | None:
    """Of rank 0's new process."""
    diary = marks(folder, 0)
    old = {mark.pid for mark in diary if mark.at < at}
    return next((mark for mark in diary if mark.pid not in old and mark.what.startswith("step ")), None)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.02)


def steps_of_newest(folder: Path) -> int:
    diary = marks(folder, 0)
    return sum(mark.pid == diary[-1].pid and mark.what.startswith("step ") for mark in diary) if diary else 0


def has_saved(folder: Path) -> bool:
    """Whether ours has a checkpoint of its present attempt.

    A second kill in a row without one is no progress, after which a restart waits: 1 s, then 2 s, 4 s.
    """
    diary = marks(folder, 0)
    steps = [int(mark.what[5:]) for mark in diary if mark.pid == diary[-1].pid and mark.what.startswith("step ")]
    found = (folder / "run" / "checkpoints").glob(f"*/{MANIFEST}")
    saved = [one.step for path in found if (one := Identity.parse(path.parent.name)) is not None]
    return bool(steps and saved) and max(saved) >= steps[0]


def recover_once(folder: Path, ranks: int, *, ours: bool) -> tuple[float, float]:
    """Kill the last rank; Unix times of the kill and of the next step of rank 0."""
    wait(lambda: steps_of_newest(folder) >= STEPS_BEFORE_KILL and (not ours or has_saved(folder)), "training")
    enough = steps_of_newest(folder) + STEPS_TO_NOTE_IT
    wait(lambda: steps_of_newest(folder) >= enough, "training")
    victim = marks(folder, ranks - 1)[-1].pid
    at = time.time()
    os.kill(victim, signal.SIGKILL)
    wait(lambda: first_step_after(folder, at), "step after the kill")
    step = first_step_after(folder, at)
    assert step is not None
    return at, step.at


def measure(make: Callable[[Path], contenders.Contender], ranks: int, rounds: int) -> tuple[str, list[float], list]:
    """Name, seconds of each round, and for ours the phases of each round."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        contender = make(folder)
        process = contender.start(folder)
        seconds, phases = [], []
        try:
            for _ in range(rounds):
                killed, stepped = recover_once(folder, ranks, ours=contender.name == "slurmft")
                seconds.append(stepped - killed)
                if contender.name == "slurmft":
                    phases.append(phases_of(folder, killed, stepped))
                say(f"{contender.name}, {ranks} ranks: {seconds[-1]:.2f} s")
        except TimeoutError as error:
            say(f"{contender.name}, {ranks} ranks: {error}")
        finally:
            end(contender, process, folder, ranks)
        return contender.name, seconds, phases


def end(contender: contenders.Contender, process: subprocess.Popen[bytes], folder: Path, ranks: int) -> None:
    if contender.name == "slurmft":
        RunFolder(folder / "run").request("KILL", "bench/recovery")
    else:
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with contextlib.suppress(ProcessLookupError):  # what did not end by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for rank in range(ranks):  # torchrun's workers are sessions of their own
        for mark in marks(folder, rank)[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(mark.pid, signal.SIGKILL)


def phases_of(folder: Path, killed: float, stepped: float) -> list[float]:
    """Where the time went, in the order of PHASES."""
    events = [event for event in RunFolder(folder / "run").journal().read() if event.seconds() >= killed - 0.01]
    at = {event.event: event.seconds() for event in reversed(events)}
    diary = [mark for mark in marks(folder, 0) if mark.at > killed]
    own = [next(mark.at for mark in diary if mark.what == what) for what in ("began", "joined", "loaded")]
    times = [killed, *(at[each] for each in ("worker failed", "verdict", "attempt started", "workers started")), *own,
             stepped]  # fmt: skip
    return [after - before for before, after in itertools.pairwise(times)]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})" if values else "-"


def hang(ranks: int, rounds: int) -> list[float]:
    """Seconds from SIGSTOP of a rank to the next step, beyond its limit."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        contender = contenders.slurmft(folder, ranks, step_limit_s=HANG_LIMIT_S)
        process = contender.start(folder)
        found = []
        try:
            for _ in range(rounds):
                wait(lambda: steps_of_newest(folder) >= STEPS_BEFORE_KILL, "training")
                at = time.time()
                os.kill(marks(folder, ranks - 1)[-1].pid, signal.SIGSTOP)
                wait(lambda since=at: first_step_after(folder, since), "step after the hang")
                step = first_step_after(folder, at)
                found.append(step.at - at - HANG_LIMIT_S if step else 0.0)
                say(f"hang, {ranks} ranks: limit + {found[-1]:.2f} s")
        finally:
            end(contender, process, folder, ranks)
        return found


def footprint(folder: Path, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """MiB of the zygote's memory that is its own share, and percent of a core that the agent uses."""
    family = psutil.Process(process.pid).children(recursive=True)
    zygote = next(each for each in family if "slurmft.agent.zygote" in each.cmdline())
    agent = zygote.parent()
    assert agent is not None
    before, began = sum(agent.cpu_times()[:2]), time.monotonic()
    time.sleep(IDLE_S)
    return zygote.memory_full_info().pss / 2**20, 100 * (sum(agent.cpu_times()[:2]) - before) / (
        time.monotonic() - began
    )


def others(args: argparse.Namespace) -> list[str]:
    """What only ours is asked for."""
    hung = hang(2, args.rounds)
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        contender = contenders.slurmft(folder, 4)
        process = contender.start(folder)
        try:
            wait(lambda: steps_of_newest(folder) >= STEPS_BEFORE_KILL, "training")
            memory_mib, cpu = footprint(folder, process)
        finally:
            end(contender, process, folder, 4)
    lines = ["## Beside that", "", "| | | asked | |", "|---|---|---|---|"]
    over = statistics.median(hung)
    lines.append(
        f"| a rank that is stopped (SIGSTOP), 2 ranks: from its limit to the next step | {spread(hung)} s | | |"
    )
    lines.append(f"| CPU of an agent with 4 ranks | {cpu:.2f} % of a core | 0.5 % | {verdict(cpu < 0.5)} |")
    lines.append(f"| memory of a zygote beside 4 workers, shared pages counted once | {memory_mib:.0f} MiB | | |")
    if args.lab:
        on_spare = spare.measure(args.lab_rounds, say)
        asked = verdict(statistics.median(on_spare) < ASKED_SPARE_S)
        lines.append(
            f"| a node loses power: until the next step, on the spare | {spread(on_spare)} s | 5 s | {asked} |"
        )
    say(f"from the limit to the next step: {over:.2f} s")
    return [*lines, ""]


def table(ranks: int, results: list[tuple[str, list[float], list]]) -> list[str]:
    ours = statistics.median(results[0][1])
    lines = [f"## {ranks} ranks", "", "| | seconds to the next step | times ours | rounds |", "|---|---|---|---|"]
    for name, seconds, _ in results:
        ratio = f"{statistics.median(seconds) / ours:.1f}" if seconds else "-"
        lines.append(f"| {name} | {spread(seconds)} | {ratio} | {len(seconds)} |")
    others = [statistics.median(seconds) for _, seconds, _ in results[1:] if seconds]
    lines.append("")
    if ranks in ASKED_S:
        lines.append(f"Asked: {ASKED_S[ranks]} s: {verdict(ours <= ASKED_S[ranks])}.")
    if others:
        ratio = min(others) / ours
        hit = verdict(ratio >= ASKED_RATIO)
        lines.append(f"At least {ASKED_RATIO:.0f} times faster than the others: {ratio:.1f}, {hit}.")
    lines += ["", "Where ours goes (ms, medians): " + ", ".join(
        f"{phase} {1000 * statistics.median(values):.0f}"
        for phase, values in zip(PHASES, zip(*results[0][2], strict=True), strict=True)) + "."]  # fmt: skip
    return [*lines, ""]


TURNS = 4
"""So often the two versions of ``--against`` change places."""


def beside(root: Path, ranks: int, rounds: int) -> str:
    """A row: seconds to the next step with this code and with that below ``root``."""
    found: dict[Path | None, list[float]] = {None: [], root: []}
    for each in [*found] * TURNS:
        found[each] += measure(lambda folder, each=each: contenders.slurmft(folder, ranks, root=each), ranks, rounds)[1]
    now, then = found[None], found[root]
    ratios = [f"{what(now) / what(then):.2f}" for what in (min, statistics.median)]
    return f"| {ranks} | {spread(now)} | {spread(then)} | {' | '.join(ratios)} | {len(now)}, {len(then)} |"


def floor_of(ranks: int, rounds: int) -> list[float]:
    """Seconds that forks, sockets and torch need by themselves (``floor.py``)."""
    argv = [sys.executable, Path(__file__).with_name("floor.py"), str(ranks), str(rounds)]
    done = subprocess.run(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
                          timeout=PATIENCE_S, check=True)  # fmt: skip
    say(f"floor, {ranks} ranks: {' '.join(done.stdout.split())} s")
    return [float(word) for word in done.stdout.split()]


def by_ranks(ours: dict[int, tuple[list[float], list]], floors: dict[int, float]) -> list[str]:
    """Milliseconds of each phase as a function of the ranks, and what a rank more costs between the two ends."""
    columns = {}
    for ranks, (seconds, phases) in sorted(ours.items()):
        medians = [statistics.median(values) for values in zip(*phases, strict=True)]
        columns[ranks] = [statistics.median(seconds), floors[ranks], *medians]
    first, last = min(columns), max(columns)
    each = [(b - a) / (last - first) for a, b in zip(columns[first], columns[last], strict=True)]
    lines = [f"## As a function of the ranks, all on {os.cpu_count()} cores", "",
             "| ms | " + " | ".join(f"{ranks} ranks" for ranks in columns) + " | each rank more |",
             "|---|" + "---|" * (len(columns) + 1)]  # fmt: skip
    for row, phase in enumerate(("**to the next step**", "the floor, see below", *PHASES)):
        cells = [f"{1000 * values[row]:.0f}" for values in columns.values()]
        lines.append(f"| {phase} | {' | '.join(cells)} | {1000 * each[row]:.1f} |")
    return [*lines, "", FLOOR, ""]


def verdict(hit: bool) -> str:
    return "hit" if hit else "**miss**"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def written(text: str, output: Path | None) -> None:
    if output:
        output.write_text(text)
    else:
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--no-others", action="store_true", help="only the tables of kill -9")
    parser.add_argument("--lab", action="store_true", help="a lost node as well, on a real Slurm cluster (root)")
    parser.add_argument("--lab-rounds", type=int, default=5)
    parser.add_argument("--packages", type=Path, help="where nvidia-resiliency-ext is installed")
    parser.add_argument("--against", type=Path, help="a checkout of another version: it and this one, in turns")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.against:
        compileall.compile_dir(args.against / "slurmft", quiet=2)
    compileall.compile_dir(Path(slurmft.__file__).parent, quiet=2)  # as an installation does
    command = shlex.join(["python", "bench/recovery", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, slurmft {slurmft.__version__}"
    lines = [
        "# Recovery in the allocation", "", "`kill -9` of one rank until rank 0 has done its next step: a small model"
        " with DDP, Adam and gloo, a step of 20 ms, a checkpoint every 20 steps. One after the other on one machine.",
        "", f"`{command}` on {os.cpu_count()} cores, {platform.system()}, {versions}. Medians (min - max).",
        "",
    ]  # fmt: skip
    if args.against:
        head = (
            "| ranks | now | the version before | least, ratio | medians, ratio | rounds |\n|---|---|---|---|---|---|"
        )
        rows = [beside(args.against.resolve(), int(ranks), args.rounds) for ranks in args.ranks.split(",")]
        return written("\n".join([*lines, head, *rows, ""]), args.output)
    drawn: dict[str, list[tuple[str, list[float]]]] = {}
    ours: dict[int, tuple[list[float], list]] = {}
    for ranks in map(int, args.ranks.split(",")):
        makers = [lambda folder, n=ranks: contenders.slurmft(folder, n)]
        if not args.only_ours:
            makers += [lambda folder, n=ranks: contenders.torchrun(folder, n, own_store=False),
                       lambda folder, n=ranks: contenders.torchrun(folder, n, own_store=True)]  # fmt: skip
            if args.packages:
                makers.append(lambda folder, n=ranks: contenders.ft_launcher(folder, n, args.packages.resolve()))
        results = [measure(make, ranks, args.rounds) for make in makers]
        drawn[f"{ranks} ranks"] = [(name, seconds) for name, seconds, _ in results]
        ours[ranks] = results[0][1:]
        lines += table(ranks, results)
    if len(ours) > 2:
        lines += by_ranks(ours, {ranks: statistics.median(floor_of(ranks, args.rounds)) for ranks in ours})
    if not args.no_others:
        lines += others(args)
    text = "\n".join(lines)
    if args.output and not args.only_ours:
        args.output.with_suffix(".svg").write_text(picture(drawn))
        text += f"\n![seconds to the next step]({args.output.stem}.svg)\n"
    return written(text, args.output)


if __name__ == "__main__":
    main()
