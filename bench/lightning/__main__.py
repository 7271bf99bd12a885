"""The cost of the integration with Lightning in one step: the same training with and without it. A table in Markdown.

python bench/lightning --output bench/results/lightning.md      # a minute; nothing else should run meanwhile

``measure`` returns the numbers, for a table with other frameworks. One process, one rank: what is measured is the
callback's own work between two batches, not Lightning's. It never waits there, so the time is that of the processor,
which other programs change little. Rounds with and without it alternate.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slurmft.ipc.pages.heartbeat import PAGE_VARIABLE, Page

TARGET_US = 20.0
BATCHES, ROUNDS = 1_000, 9

ONE = """
import importlib, json, logging, os, sys, time, warnings
warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
import lightning.pytorch as L, torch
from torch.utils.data import DataLoader

class Times(L.Callback):
    def on_train_epoch_start(self, *_): self.began = time.thread_time()
    def on_train_epoch_end(self, *_): print(time.thread_time() - self.began, flush=True)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch): pass
    def configure_optimizers(self): pass

class Same(torch.utils.data.Dataset):
    def __len__(self): return int(sys.argv[1])
    def __getitem__(self, index): return 0

L.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
          enable_model_summary=False, enable_checkpointing=False, callbacks=[Times()]).fit(
    Net(), DataLoader(Same(), batch_size=1))
"""


def measure(batches: int = BATCHES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Microseconds of a step with and without the callback, and the median difference of pairs of rounds."""
    steps: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        with_it = bool((number + number // 2) % 2)
        steps[with_it].append(_round(batches, with_it=with_it))
    differences = sorted(a - b for a, b in zip(steps[True], steps[False], strict=True))
    return {
        "framework": "Lightning",
        "without_us": statistics.median(steps[False]),
        "with_us": statistics.median(steps[True]),
        "overhead_us": statistics.median(differences),
        "overhead_range_us": (differences[0], differences[-1]),
        "rounds": rounds,
    }


def _round(batches: int, *, with_it: bool) -> float:
    """Microseconds per step of the second epoch, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        if with_it:
            page = Path(folder) / "page"
            Page.create(page, rank=0, generation=1)
            settings = json.dumps({"checkpoint": {"interval": "steps", "interval_steps": 100 * batches}})
            environment |= {PAGE_VARIABLE: str(page), "SLURMFT_WORKER": settings,
                            "SLURMFT_CHECKPOINT_DIR": folder}  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-c", ONE, str(batches)],
            env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if result.returncode:
            raise SystemExit(result.stderr)
        if with_it and "step" not in str(list((Path(folder) / "lightning" / "fit-1").iterdir())):
            raise SystemExit("the callback was not active")
    return 1e6 * float(result.stdout.split()[-1]) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    load = os.getloadavg()[0]
    found = measure(rounds=args.rounds)
    low, high = found["overhead_range_us"]
    text = (
        "# What the integration with Lightning costs in a step\n\n"
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f} at the "
        "start. "
        f"{found['rounds']} pairs of rounds of {BATCHES} steps; a step trains nothing; "
        "processor time of the training thread.\n\n"
        "| | microseconds per step |\n|---|---|\n"
        f"| Lightning alone | {found['without_us']:.1f} |\n"
        f"| in a run of slurmft | {found['with_us']:.1f} |\n"
        f"| difference, median of the pairs (lowest, highest) | {found['overhead_us']:.1f} ({low:.1f}, {high:.1f}) |\n"
        f"| target | at most {TARGET_US:.0f} |\n"
    )
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
