"""The cost of the integration with Lightning in one step: the same training with and without it. A table in Markdown.

python bench/lightning --output bench/results/lightning.md      # a minute; nothing else should run meanwhile

``measure`` returns the numbers, for a table with other frameworks. One process, one rank: what is measured is the
callback's own work between two batches, not Lightning's. It never waits there, so the time is that of the processor,
which other programs change less than the clock's. Rounds with and without it alternate in one process.
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

from slurmft.ipc.pages import PAGE_VARIABLE, Page

TARGET_US = 20.0
BATCHES, ROUNDS = 1_000, 15

ROUNDS_IN_TURN = """
import json, logging, os, sys, time, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
import lightning.pytorch as L, torch
from torch.utils.data import DataLoader

batches, rounds, page = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Times(L.Callback):
    def on_train_epoch_start(self, *_): self.began = time.thread_time()
    def on_train_epoch_end(self, *_): self.took = time.thread_time() - self.began

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch): pass
    def configure_optimizers(self): pass

class Same(torch.utils.data.Dataset):
    def __len__(self): return batches
    def __getitem__(self, index): return 0

def one(with_it):
    os.environ.pop("SLURMFT_PAGE", None)
    if with_it:
        os.environ["SLURMFT_PAGE"] = page
    times = Times()
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                        enable_model_summary=False, enable_checkpointing=False, callbacks=[times])
    assert len(trainer.callbacks) == 1 + with_it, trainer.callbacks
    trainer.fit(Net(), DataLoader(Same(), batch_size=1))
    return 1e6 * times.took / batches

one(True), one(False)
print(json.dumps([[one(True), one(False)] if number % 2 else [one(False), one(True)][::-1]
                  for number in range(rounds)]))
"""


def measure(batches: int = BATCHES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Microseconds of a step with and without the callback, and the median difference of pairs of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page"
        Page.create(page, rank=0, generation=1)
        settings = json.dumps({"checkpoint": {"interval": "steps", "interval_steps": 1_000_000_000}})
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", PAGE_VARIABLE))}
        environment |= {"SLURMFT_WORKER": settings, "SLURMFT_CHECKPOINT_DIR": folder}
        result = subprocess.run(
            [sys.executable, "-c", ROUNDS_IN_TURN, str(batches), str(rounds), str(page)],
            env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        if result.returncode:
            raise SystemExit(result.stderr)
        if len(list((Path(folder) / "lightning").glob("fit-*/step-*"))) != rounds + 1:
            raise SystemExit("the callback was not active")
    pairs = json.loads(result.stdout.splitlines()[-1])
    differences = sorted(with_it - without for with_it, without in pairs)
    return {
        "framework": "Lightning",
        "without_us": statistics.median(without for _, without in pairs),
        "with_us": statistics.median(with_it for with_it, _ in pairs),
        "overhead_us": statistics.median(differences),
        "overhead_range_us": (differences[0], differences[-1]),
        "rounds": rounds,
    }


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
