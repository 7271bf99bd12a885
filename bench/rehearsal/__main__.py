"""What a spare's rehearsal saves: from the start of a compiled trainer to its first step, with and without one.

    python bench/rehearsal --output bench/results/rehearsal.md     # three minutes; a C++ compiler

Each round has caches of its own. The rehearsal is the agent's own; torch is imported anew in each process, which
a zygote spares a real takeover.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import slurmft
from slurmft.agent.workers import SpareRehearsal
from slurmft.config.run import RunConfig
from slurmft.ipc.messages import RehearsalReport

TRAINER = Path(__file__).with_name("trainer.py")
LIMIT_S = 600.0


def first_step_s(environment: dict[str, str], folder: Path) -> float:
    done = subprocess.run([sys.executable, TRAINER], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True,
                          timeout=LIMIT_S, check=True)  # fmt: skip
    [line] = [line for line in done.stdout.splitlines() if line.startswith("first step after ")]
    return float(line.rpartition(" ")[2])


async def rehearse(environment: dict[str, str], folder: Path) -> RehearsalReport:
    reported: asyncio.Queue[RehearsalReport] = asyncio.Queue()
    config = RunConfig(command=(sys.executable, str(TRAINER)), run_folder=folder / "run", spares="rehearse",
                       working_directory=folder)  # fmt: skip
    SpareRehearsal(config, environment, folder, reported.put_nowait).begin()
    return await asyncio.wait_for(reported.get(), LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/rehearsal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, default=3600, help="seconds after which no other round begins")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cold, warm, rehearsals = [], [], []
    began_s = time.monotonic()
    for _ in range(args.rounds):
        if time.monotonic() - began_s > args.within:
            break
        for rehearsed in (False, True):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
                if rehearsed:
                    report = asyncio.run(rehearse(environment, folder))
                    if report.problem:
                        raise SystemExit(f"the rehearsal failed: {report.problem}")
                    rehearsals.append(report.took_s)
                (warm if rehearsed else cold).append(first_step_s(environment, folder))
                sys.stderr.write(f"{'rehearsed' if rehearsed else 'cold'}: {(warm if rehearsed else cold)[-1]:.1f} s\n")

    def told(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f}) s"

    command = shlex.join(["python", "bench/rehearsal", *sys.argv[1:]])
    versions = f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, slurmft"
    text = "\n".join([
        "# A spare that has rehearsed", "",
        f"`{command}` on {os.cpu_count()} cores, {versions} {slurmft.__version__}. Processes that wanted"
        f" to run when it ended: {os.getloadavg()[0]:.1f}. Medians (min - max) of {len(warm)}.", "",
        "| from the start of the process to the first step of a compiled model | |", "|---|---|",
        f"| spares: import | {told(cold)} |", f"| spares: rehearse | {told(warm)} |",
        f"| the rehearsal itself, while the spare waits | {told(rehearsals)} |", "",
    ])  # fmt: skip
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
