"""Ends as it is told, one word for each start of the run: an exit code, or what it does first. Knows no slurmft."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def leave_verdict() -> None:
    verdict = {
        "format": 1,
        "cause": "rerun elsewhere",
        "message": "loss is NaN",
        "suspects": [{"node": os.environ["SLURMD_NODENAME"], "rank": int(os.environ["RANK"])}],
        "rerun": "undecided",
    }
    Path(os.environ["SLURMFT_VERDICT_FILE"]).write_text(json.dumps(verdict))


def kill_the_agent() -> None:
    zygote = os.getppid()
    agent = int(Path(f"/proc/{zygote}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    time.sleep(60)


start = int(os.environ["SLURM_RESTART_COUNT"]) if "SLURM_RESTART_COUNT" in os.environ else 0
word = sys.argv[1 + min(start, len(sys.argv) - 2)]
if word.isdigit():
    sys.exit(int(word))
if os.environ["RANK"] != "3":
    time.sleep(60)  # waits for rank 3, like in a collective
leave_verdict()
if word == "killed":
    kill_the_agent()
sys.exit(143)
