"""How long `slurmft plan` takes for the largest question that it is meant for: 2,000 nodes, 11 months, 10 lives.

python bench/plan --output bench/results/plan.md     # two minutes; no Slurm, no root
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import slurmft
from slurmft.planning.plan import alternatives, simulated

RUN = "command: [python, train.py]\nrun_folder: {folder}/run\nnodes: 2000\nnproc_per_node: 8\n"
SITE = """
cluster: {nodes: 2040}
failures: {per_1000_node_days: {node lost: 1.5, signal crash: 2.5, hang: 1.3, communication error: 1.2}}
alternatives: {}
"""
DAYS, LIVES, ASKED_S = 335, 10, 600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=int, default=DAYS, help="of training in each life")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        config, site = Path(name, "run.yaml"), Path(name, "site.yaml")
        config.write_text(RUN.format(folder=name))
        site.write_text(SITE)
        [found] = alternatives(config, site, overrides=[f"work_days={args.days}"], varied=[], seeds=LIVES)
        began_s = time.monotonic()
        [outcome] = simulated([found], tell=print)
        took_s = time.monotonic() - began_s
    failures = f"{outcome.failures.mean:,.0f}"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = (
        "# Plans\n\n"
        f"`python bench/plan`, slurmft {slurmft.__version__}, Python {platform.python_version()},\n"
        f"{len(os.sched_getaffinity(0))} cores, load average when it began {load:.1f}. 2,000 nodes, 6.5 failures per\n"
        f"1,000 node-days, {args.days} days of training, {LIVES} lives with {failures} failures each,\n"
        "every one decided by the policy of a real run.\n\n"
        "| | measured | asked | |\n|---|---|---|---|\n"
        f"| time | {took_s:.0f} s | at most {ASKED_S:.0f} s | {'hit' if took_s <= ASKED_S else '**miss**'} |\n"
        f"| processor | {used.ru_utime + used.ru_stime:.0f} s | | |\n"
        f"| memory of a process, at most | {used.ru_maxrss / 1024:.0f} MiB | | |\n"
    )
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
