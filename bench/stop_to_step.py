"""From the TERM to the first new training step, on the lab cluster: slurmft beside a plain ``scontrol requeue``.

    python bench/stop_to_step.py --rounds 10 > bench/results/stop_to_step.md

Needs root (the lab). 2 nodes x 2 ranks of the byte-level GPT; the plain job is a batch script that requeues itself on
the same signal and notes when its next start begins a step. Both in one lab, one after the other; nodes free.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import yaml

from slurmft.lab import building
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

TRAINER = [
    "python", "-m", "slurmft.examples.byte_gpt", "--channels", "32", "--layers", "1", "--window", "32",
    "--batch-size", "2", "--limit-bytes", "200000",
    "--steps", "100000", "--step-delay", "0.05", "--eval-every", "100000",
]  # fmt: skip

PLAIN = """#!/bin/bash
# What people write: trap the signal, save, requeue.
step() {{ date +%s.%N >> {folder}/steps; }}
stop() {{ date +%s.%N >> {folder}/signals; scontrol requeue "$SLURM_JOB_ID"; }}
trap stop TERM
step
sleep 600 & wait
sleep 600 & wait
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    folder = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    try:
        lab = Lab.up(LabSettings(folder=folder))
        stages = measure_slurmft(lab, rounds)
        plain_s = measure_plain(lab)
    finally:
        building.purge(folder)
    report(stages, plain_s, rounds)


def measure_slurmft(lab: Lab, rounds: int) -> dict[str, list[float]]:
    path = lab.home / "bench"
    config = {"command": TRAINER, "run_folder": str(path), "nodes": 2, "nproc_per_node": 2, "slurm": {"time": "60"}}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(config))
    job = lab.run(["slurmft", "submit", f"{path}.yaml"]).stdout.split(" as job ")[1].split()[0]
    run = RunFolder(path)
    for number in range(rounds):
        wait_for(run, "first step", number + 1)
        time.sleep(2.0)
        lab.run(["scancel", "--signal=TERM", job])
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    wait_for(run, "first step", rounds + 1)
    stages = stages_of(run.journal().read())
    lab.run(["scancel", job])
    lab.wait_until_idle(60)
    return stages


def wait_for(run: RunFolder, name: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while sum(event.event == name for event in run.journal().read()) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"no {name!r} number {count}")
        time.sleep(0.1)


def stages_of(events: list[Event]) -> dict[str, list[float]]:
    """Seconds of each stage, one value per stop, from the journal."""
    names = ("stop requested", "stop agreed", "verdict", "requeued", "attempt started", "agents ready", "first step")
    labels = {
        "stop agreed": "agree on a step",
        "verdict": "finish the step, save, end all processes",
        "requeued": "requeue, set the begin time",
        "attempt started": "Slurm: begin time, placement, launch, python",
        "agents ready": "srun, agents, control channel",
        "first step": "import torch, join, load, first step",
    }
    stages: dict[str, list[float]] = {label: [] for label in labels.values()}
    stages["TERM to first new step"] = []
    at: dict[str, float] = {}
    for event in events:
        if event.event == "stop requested":
            at = {"stop requested": event.details["signal_at"]}
        elif event.event in names and "stop requested" in at:
            at[event.event] = event.seconds()
            if event.event == "first step":
                at["first step"] = at["stop requested"] + event.details["seconds_since_stop_request"]
                for before, after in itertools.pairwise(names):
                    stages[labels[after]].append(at[after] - at[before])
                stages["TERM to first new step"].append(at["first step"] - at["stop requested"])
    return stages


def measure_plain(lab: Lab) -> float:
    """Seconds from the signal to the next start of a script that requeues itself and sets no begin time."""
    folder = lab.home / "plain"
    folder.mkdir()
    os.chown(folder, lab.uid, lab.gid)
    script = folder / "job.sh"
    script.write_text(PLAIN.format(folder=folder))
    job = lab.run(["sbatch", "--parsable", "-o", "/dev/null", "--requeue", str(script)], cwd=folder).stdout.strip()
    wait_for_lines(folder / "steps", 1)
    lab.run(["scancel", "--batch", "--signal=TERM", job])
    wait_for_lines(folder / "steps", 2, within_s=200)
    lab.run(["scancel", job])
    signal_at, step_at = ((folder / name).read_text().split() for name in ("signals", "steps"))
    return float(step_at[1]) - float(signal_at[0])


def wait_for_lines(path: Path, count: int, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists() or len(path.read_text().split()) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} never had {count} lines")
        time.sleep(0.1)


def report(stages: dict[str, list[float]], plain_s: float, rounds: int) -> None:
    print("# TERM to the first new training step\n")
    print(f"`python bench/stop_to_step.py --rounds {rounds}`\n")
    print(
        f"2 nodes x 2 ranks on {os.cpu_count()} cores, {platform.system()}, nodes free; seconds, median (min - max).\n"
    )
    print("| stage | s |\n|---|---|")
    for label, values in stages.items():
        text = f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
        print(f"| {'**' + label + '**' if label.startswith('TERM') else label} | {text} |")
    ratio = plain_s / statistics.median(stages["TERM to first new step"])
    print(f"| a script with a plain `scontrol requeue`, signal to its next start | {plain_s:.1f} |")
    print(f"\nThe plain requeue takes {ratio:.0f} times as long, before its trainer has even been imported.")


if __name__ == "__main__":
    main()
