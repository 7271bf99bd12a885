"""One supervisor and thousands of simulated agents on loopback: how fast a real attempt is, and at what cost.

python bench/fleet --output bench/results/fleet.md     # two minutes; nothing else should run meanwhile
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import slurmft

AGENTS, RANKS = 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/fleet", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    script = Path(__file__).with_name("attempt.py")
    done = subprocess.run([sys.executable, script, str(args.agents), str(RANKS)], stdout=subprocess.PIPE, check=True)
    versions = f"{platform.system()}, Python {platform.python_version()}, slurmft {slurmft.__version__}"
    lines = [
        "# The supervisor of a large job", "",
        f"`python bench/fleet` on {os.cpu_count()} cores, {versions}: a real attempt with {args.agents} simulated"
        f" agents of {RANKS} ranks each, on loopback, which share the machine with the supervisor. Processes that"
        f" wanted to run when it ended: {os.getloadavg()[0]:.1f}.", "",
        "| | | asked | |", "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in json.loads(done.stdout)), "",
    ]  # fmt: skip
    text = "\n".join(lines)
    if args.output:
        args.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
