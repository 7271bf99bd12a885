"""Many short calls: a sweep of trials and arrays of slurmft, sbatch and submitit, one after the other on one lab.

    python bench/trials --output bench/results/trials.md     # root; five minutes, nothing else should run meanwhile

Each has four jobs at a time. The time is that from the submission to the last result.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
import yaml

import slurmft
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

JOBS, CPUS = 4, 8
PROGRAM = """
import sys, time, cloudpickle, {package}
def call(seconds):
    time.sleep(seconds)
    return seconds
executor = {package}.{executor}(folder=sys.argv[1])
executor.update_parameters(timeout_min=20, slurm_partition="low", cpus_per_task={cpus}, slurm_array_parallelism={jobs})
jobs = executor.map_array(call, [{seconds}] * {count})
assert [job.result() for job in jobs] == [{seconds}] * {count}
"""
HEAD = "## Throughput"


def in_folder(lab: Lab, name: str) -> Path:
    folder = lab.home / name
    folder.mkdir()
    os.chown(folder, lab.uid, lab.gid)
    return folder


def sweep(lab: Lab, count: int, seconds: float) -> None:
    """``slurmft trials``, of a program."""
    folder = in_folder(lab, f"sweep-{seconds:g}")
    config = {
        "run_folder": str(folder / "run"), "command": ["sleep", f"{seconds:g}"],
        "trials": {"list": [{"custom_id": str(number)} for number in range(count)], "max_jobs": JOBS},
        "slurm": {"partition": "low", "time": "20", "cpus_per_task": CPUS},
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(yaml.safe_dump(config))
    lab.run(["slurmft", "trials", str(folder / "sweep.yaml"), "--wait"], timeout=1200)


def array(lab: Lab, count: int, seconds: float) -> None:
    """``sbatch --array``, of the same program."""
    folder = in_folder(lab, f"array-{seconds:g}")
    options = ["-p", "low", "-t", "20", f"--cpus-per-task={CPUS}", "-o", "/dev/null", f"--array=0-{count - 1}%{JOBS}"]
    lab.run(["sbatch", "--wait", *options, "--wrap", f"srun sleep {seconds:g}"], cwd=folder, timeout=1200)


def of_python(package: str, executor: str) -> Callable[[Lab, int, float], None]:
    def run(lab: Lab, count: int, seconds: float) -> None:
        folder = in_folder(lab, f"{package}-{seconds:g}")
        program = PROGRAM.format(package=package, executor=executor, cpus=CPUS, jobs=JOBS, seconds=seconds, count=count)
        lab.run([sys.executable, "-c", program, str(folder / "log")], cwd=folder, timeout=1200)

    return run


CONTENDERS: dict[str, Callable[[Lab, int, float], Any]] = {
    "`slurmft trials`, a program": sweep,
    "`sbatch --array`, the same program in a step": array,
    "`slurmft.Executor.map_array`, a function": of_python("slurmft", "Executor"),
    f"submitit {submitit.__version__} `map_array`, the same function": of_python("submitit", "AutoExecutor"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/trials", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.1, help="that each call sleeps")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    rows = []
    try:
        lab = Lab.up(LabSettings(folder=folder, nodes=JOBS, cpus=CPUS, accounting=True))
        for name, work in CONTENDERS.items():
            lab.run_as_admin(["sdiag", "-r"])
            began_s = time.monotonic()
            work(lab, args.calls, args.seconds)
            took_s = time.monotonic() - began_s
            told = lab.run_as_admin(["sdiag"]).stdout.partition("by user")[2]
            asked = sum(int(count) for count in re.findall(r"count:(\d+)", told))
            cost_s = JOBS * took_s / args.calls - args.seconds
            rows.append(f"| {name} | {took_s:.1f} s | {args.calls / took_s:.2f} | {cost_s:.2f} s | {asked} |")
            print(rows[-1], flush=True)
            lab.wait_until_idle(120)
    finally:
        cluster.purge(folder)
    command = shlex.join(["python", "bench/trials", *sys.argv[1:]])
    section = "\n".join([
        HEAD, "", f"`{command}` on {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"slurmft {slurmft.__version__}: {args.calls} calls of {args.seconds:g} s, {JOBS} at a time. Processes that "
        f"wanted to run when it ended: {os.getloadavg()[0]:.1f}.", "",
        "| | until the last result | calls in a second | beside each call, of its place | RPCs (sdiag) |",
        "|---|---|---|---|---|", *rows, "", "",
    ])  # fmt: skip
    if args.output:
        parts = re.split(r"(?m)^(?=## )", args.output.read_text() if args.output.exists() else "# Trials\n\n")
        head, *others = [part for part in parts if not part.startswith(HEAD)]
        args.output.write_text(head + section + "".join(others))


if __name__ == "__main__":
    main()
