"""How well the ends of logs are recognised: the confusion matrix of the labelled corpus of the tests.

python bench/symptoms --output bench/results/symptoms.md     # seconds; no Slurm, no root
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import slurmft

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "support"))
from log_endings import LABELS, confusion, log_endings

WORDS = {"corrupt": "data corruption", "device": "out of device memory", "host": "out of host memory",
         "comm": "communication", "none": "none of these"}  # fmt: skip


def report() -> str:
    endings = log_endings()
    counts = confusion(endings)
    right = sum(count for (label, found), count in counts.items() if label == found)
    ours = [ending for ending in endings if ending.name.startswith("our")]
    lines = [
        "# Ends of logs: what they are taken for",
        "",
        f"`python bench/symptoms`, slurmft {slurmft.__version__}, Python {platform.python_version()}. "
        f"{len(endings)} labelled ends of workers' logs and tracebacks (`tests/unit/data/log_endings.txt`), judged as "
        "those of a rank that left nothing else. The patterns were written with this corpus at hand, so this is what "
        "they are meant to do, not a measure on unseen logs.",
        "",
        f"Right: {right} of {len(endings)}. Lines of slurmft's own among them: {len(ours)}, taken for a symptom: "
        f"{sum(ending.found() != 'none' for ending in ours)}.",
        "",
        "| is \\ taken for | " + " | ".join(WORDS[label] for label in LABELS) + " |",
        "|---" * (len(LABELS) + 1) + "|",
    ]
    for label in LABELS:
        cells = (str(counts[label, found]) for found in LABELS)
        lines.append(f"| {WORDS[label]} | " + " | ".join(cells) + " |")
    wrong = [f"- {ending.label} taken for {ending.found()}: {ending.name}" for ending in endings
             if ending.found() != ending.label]  # fmt: skip
    return "\n".join([*lines, *(["", "Mistaken:", "", *wrong] if wrong else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = report()
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
