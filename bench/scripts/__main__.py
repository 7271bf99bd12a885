"""How much later the first training step is under `slurmft sbatch` than under plain sbatch, in turns, on a lab.

    python bench/scripts --output bench/results/scripts.md     # four minutes; root

The trainer imports torch, makes a process group of two ranks and does one step of Adam; each start is a job of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

import slurmft
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab
from slurmft.lab.settings import LabSettings

TRAINER = """
import os, time
import torch
import torch.distributed as dist
os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["PORT"]
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
dist.barrier()
print("first step at", time.time(), flush=True)
dist.destroy_process_group()
"""
JOB = "#!/bin/bash\n#SBATCH -n2 -c1 -t5\nexport PORT={port} OMP_NUM_THREADS=1\nsrun {python} train.py\n"


def seconds(lab: Lab, folder: Path, verb: list[str], number: int) -> float:
    """From the call of the verb to the first step."""
    (folder / "job.sh").write_text(JOB.format(port=29600 + number, python=sys.executable))
    out = folder / f"out-{number}"
    began = time.time()
    lab.run([*verb, "-W", "-o", str(out), "job.sh"], cwd=folder, timeout=300)
    said = out.read_text()
    return max(float(line.split()[-1]) for line in said.splitlines() if line.startswith("first step at")) - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/scripts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    place = Path(f"/var/lib/slurmft-lab-bench-{os.getpid()}")
    found: dict[str, list[float]] = {"sbatch": [], "slurmft sbatch": []}
    lab = Lab.up(LabSettings(folder=place, nodes=2))
    try:
        folder = lab.home / "scripts"
        folder.mkdir()
        (folder / "train.py").write_text(TRAINER)
        os.chown(folder, lab.uid, lab.gid)
        slurm = lab.run(["sinfo", "--version"]).stdout.split()[-1]
        for number in range(2 * (args.rounds + 1)):  # in turns; the first of each fills caches
            verb = list(found)[number % 2]
            took_s = seconds(lab, folder, verb.split(), number)
            sys.stderr.write(f"{verb}: {took_s:.2f} s\n")
            if number > 1:
                found[verb].append(took_s)
    finally:
        cluster.purge(place)
    later = [ours - plain for plain, ours in zip(*found.values(), strict=True)]
    command = shlex.join(["python", "bench/scripts", *sys.argv[1:]])
    versions = f"{platform.system()}, Slurm {slurm}, torch {torch.__version__}, slurmft {slurmft.__version__}"
    text = "\n".join([
        "# A batch script as it is", "",
        f"`{command}` on {os.cpu_count()} cores, {versions}. Processes that wanted to run when it ended: "
        f"{os.getloadavg()[0]:.1f}. Medians (least - most) of {args.rounds} rounds.", "",
        "| from the call to the first step of two ranks | seconds |", "|---|---|",
        *(f"| {what} | {told(values)} |" for what, values in {**found, "later, round by round": later}.items()), "",
        f"Asked: at most 1.5 s later in the median. {'Met' if statistics.median(later) <= 1.5 else 'Missed'}.", "",
    ])  # fmt: skip
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


def told(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


if __name__ == "__main__":
    main()
