"""How long a killed engine is away whose weights stay in its node's memory, and one that loads them anew. A table.

    python bench/shared_weights --output bench/results/shared_weights.md     # 3 minutes; 6 GB of memory

A model of 2 GB on CPUs answers a batch in one replica on this machine. A cold start is that of its first process, while
the file is in no page cache: from the fork to the first token. Then ``kill -9`` of that process, and the time to the
next token of its successor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from engine import Decoder

import slurmft

ASKED = 0.1
REQUESTS = 2000
TOKENS_BEFORE_KILL = 5
PATIENCE_S = 240.0
HERE = Path(__file__).parent
WAYS = {
    "Ordinary": "`torch.load` at each start",
    "Shared": "`slurmft.shared_weights`",
    "Staged": "`slurmft.stage_in_memory`, `torch.load(mmap=True)`",
}


def diary(path: Path) -> list[tuple[int, float, float, float]]:
    """Of each token: the process, when that began, when the token was there, and seconds of a core until then."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(pid), float(began), float(at), float(core)) for pid, began, at, core in lines]


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S:.0f} s")
        time.sleep(0.01)


def forget(path: Path) -> None:
    """Take the file out of the page cache."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: str, model: Path, rounds: int) -> list[tuple[float, float]]:
    """Seconds of the cold start, and from each kill to the next token; each with seconds of a core until that token."""
    with tempfile.TemporaryDirectory(prefix="shared-weights-") as name:
        folder = Path(name)
        notes, run = folder / "diary", folder / "run"
        lines = (json.dumps({"custom_id": str(number), "prompt": "."}) for number in range(REQUESTS))
        (folder / "in.jsonl").write_text("\n".join(lines))
        environment = {"BENCH_MODEL": str(model), "BENCH_DIARY": str(notes), "PYTHONPATH": str(HERE),
                       "BENCH_LAYERS": os.environ.get("BENCH_LAYERS", "10")}  # fmt: skip
        section = {"input": str(folder / "in.jsonl"), "engine": {"callable": f"engine:{way}"}, "concurrency": 1}
        config = {"run_folder": str(run), "inference": section, "environment": environment,
                  "fault_tolerance": {"preload": ["engine"]}}  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        forget(model)
        slurm = [sys.executable, "-m", "slurmft"]
        subprocess.run([*slurm, "infer", str(folder / "run.yaml"), "--cluster", "local"], check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(HERE)})  # fmt: skip
        try:
            wait(lambda: diary(notes), "first token")
            _, began, at, core = diary(notes)[0]
            found = [(at - began, core)]
            for _ in range(rounds):
                victim = diary(notes)[-1][0]
                seen = len(diary(notes)) + TOKENS_BEFORE_KILL
                wait(lambda seen=seen: len(diary(notes)) >= seen, "tokens")
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
                wait(lambda victim=victim: diary(notes)[-1][0] != victim, "token after the kill")
                at, core = next((at, core) for pid, _, at, core in diary(notes) if pid != victim and at > killed)
                found.append((at - killed, core))
        finally:
            subprocess.run([*slurm, "stop", str(run), "--timeout", "60"], check=False, stdout=subprocess.DEVNULL)
    print(f"{way}: {' '.join(f'{each:.2f} ({core:.2f})' for each, core in found)} s", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/shared_weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(WAYS), help="ways to measure, with commas between them")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shared-weights-model-") as name:
        model = Path(name) / "model.pt"
        weights = Decoder().state_dict()
        size = sum(tensor.nbytes for tensor in weights.values())
        torch.save(weights, model)
        del weights
        found = {way: measure(way, model, args.rounds) for way in args.only.split(",")}
    lines = [
        "# Weights that stay in memory", "",
        f"`python bench/shared_weights --rounds {args.rounds} --only {args.only}` on {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"slurmft {slurmft.__version__}. Processes that wanted to run when it began: {load:.1f}. A model of "
        f"{size / 1e9:.2f} GB in float32 on CPUs, one replica, a token for each request.", "",
        "Cold: the first process, from its fork to its first token, the file in no page cache. Killed: from `kill -9` "
        f"to the first token of the next process, median (least - most) of {args.rounds}; the file may be in the page "
        f"cache by then. Asked: killed at most {ASKED:.0%} of cold.", "",
        "| | cold (s) | killed (s) | killed / cold | | cold (s of a core) | killed (s of a core) | killed / cold |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for way, ((cold, cold_core), *killed) in found.items():
        away, core = (statistics.median(values) for values in zip(*killed, strict=True))
        least, most = min(killed)[0], max(killed)[0]
        verdict = "" if way == "Ordinary" else "hit" if away <= ASKED * cold else "missed"
        lines.append(f"| {WAYS[way]} | {cold:.2f} | {away:.2f} ({least:.2f} - {most:.2f}) | {away / cold:.1%} | "
                     f"{verdict} | {cold_core:.2f} | {core:.2f} | {core / cold_core:.1%} |")  # fmt: skip
    text = "\n".join(lines) + "\n"
    args.output.write_text(text) if args.output else print(text)


if __name__ == "__main__":
    main()
