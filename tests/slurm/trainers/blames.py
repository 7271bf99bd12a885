"""A trainer that cannot be changed: it knows slurmft by its files and exit codes alone, and imports none of it.

Its rank on a node named ``--bad`` says that it got a wrong result twice, as a re-run state machine would, and ends with
16. Where no such node is, it counts to its last step.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--bad", nargs="*", default=[])
parser.add_argument("--bad-gpu", default="")
parser.add_argument("--seconds", type=float, default=1.0)
args = parser.parse_args()
node, rank = os.environ["SLURMD_NODENAME"], int(os.environ["RANK"])
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-a").split(",")[int(os.environ["LOCAL_RANK"])]
print(f"rank {rank} on {node}, {gpu}", flush=True)
if node in args.bad and args.bad_gpu in ("", gpu):
    verdict = {
        "format": 1,
        "cause": "rerun elsewhere",
        "message": "loss is NaN, twice",
        "suspects": [{"node": node, "rank": rank, "gpu": args.bad_gpu}],
        "rerun": "undecided",
    }
    Path(os.environ["SLURMFT_VERDICT_FILE"]).write_text(json.dumps(verdict))
    sys.exit(16)
time.sleep(args.seconds)
