"""What digests of replicas cost: time beside a step, and memory beside the state.

    python bench/digests --output bench/results/digests.md       # a minute; nothing else should run on the machine

The best of many repetitions counts: what is asked is the digest's own cost, not that of the machine's neighbours.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import slurmft
from slurmft.worker.digests import digester_of, tensors_of

INTERVAL, ASKED_PERCENT, REPETITIONS = 100, 0.1, 5
SIZES_MB = (64, 512)
FLIPS = 50


def best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the device, or of this process on a CPU: neighbours take wall-clock time from both."""
    clock, times = (time.perf_counter if device.type == "cuda" else time.process_time), []
    for _ in range(REPETITIONS):
        began = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return min(times)


def training(width: int, layers: int, batch: int, device: torch.device) -> tuple[float, float, int, int]:
    """Seconds of a step, and of a digest; bytes of the state, and its number of tensors."""
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, dropout=0.0, device=device)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch, 128, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    step()
    digesters = {where: digester_of(where) for where in (torch.device("cpu"), device)}

    def digest() -> None:
        tensors = tensors_of(model, optimizer)
        for where, digester in digesters.items():
            digester.digest(one.tensor for one in tensors if one.tensor.device.type == where.type)

    tensors = tensors_of(model, optimizer)
    size = sum(one.tensor.nbytes for one in tensors)
    return best_s(step, device), best_s(digest, device), size, len(tensors)


def growth_mb(size_mb: int) -> float:
    """MiB that the process has grown by at most in a digest of so much state, in a process of its own."""
    code = f"""
import resource, torch
from slurmft.worker.digests import digester_of
state = [torch.ones(1 << 18) for _ in range({size_mb})]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
digester_of(torch.device("cpu")).digest(state)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def soak(book: Path) -> list[str]:
    """Flipped bits on the lab (``tests/slurm/test_digests.py``): how many were found, by what was flipped."""
    runs = [line.split("\t") for line in book.read_text().splitlines()]
    found = [run for run in runs if run[4] == "found"]
    lines = [
        "## Flipped bits on the lab", "",
        f"`make soak-digests`: {len(found)} of {len(runs)} runs, of {FLIPS} asked for, ended as they should: found"
        " within the interval of 5 steps, the right node left, the final weights those of an undisturbed run.", "",
        "| flipped | runs | found | steps from the last agreement to the finding, at most |", "|---|---|---|---|",
    ]  # fmt: skip
    for fault in dict.fromkeys(run[1] for run in runs):
        own = [run for run in found if run[1] == fault]
        number = sum(run[1] == fault for run in runs)
        lines.append(f"| {fault} | {number} | {len(own)} | {max((int(run[5]) for run in own), default=0)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="what digests of replicas cost")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--soak", type=Path, help="the book of make soak-digests, to be summed up as well")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shapes = [(1024, 24, 32), (2048, 24, 16)] if device.type == "cuda" else [(256, 4, 4)]
    torch.set_num_threads(1)
    lines = ["# Digests of replicas and their cost", "",
             f"`python bench/digests --output bench/results/digests.md`, slurmft {slurmft.__version__}", "",
             f"{platform.system()}, torch {torch.__version__}, {device.type}, one thread. Best of {REPETITIONS}.", "",
             f"## Time, at one digest in {INTERVAL} steps", "",
             "| state | tensors | a step, ms | a digest, ms | share of the step time | asked | |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for width, layers, batch in shapes:
        step_s, digest_s, size, number = training(width, layers, batch, device)
        share = 100 * digest_s / (INTERVAL * step_s)
        lines.append(
            f"| {size / 2**20:.0f} MiB | {number} | {1e3 * step_s:.1f} | {1e3 * digest_s:.2f} | {share:.3f} % | "
            f"at most {ASKED_PERCENT} % | {'hit' if share <= ASKED_PERCENT else 'missed'} |"
        )
    lines += ["", "## Memory", "", "| state, MiB | the process grows by, MiB |", "|---|---|"]
    lines += [f"| {size} | {growth_mb(size):.1f} |" for size in SIZES_MB]
    if arguments.soak is not None:
        lines += ["", *soak(arguments.soak)]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
