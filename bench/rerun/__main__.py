"""What the re-run state machine costs while all is well: host time per step, and what a rerun costs when it is not.

    python bench/rerun --output bench/results/rerun.md       # about 10 s; nothing else should run on the machine

Takes the best of many repetitions: what is asked is the machine's own cost, not that of its neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shlex
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmft
from slurmft.policy.reruns import RerunSettings
from slurmft.worker.rerun import ByGradients, RerunStateMachine
from slurmft.worker.rerun_data import RerunDataIterator

STEPS, REPETITIONS = 2000, 100
TARGET_US = 2.0
BATCH = (torch.ones(8, 16), torch.ones(8, 16))
LOSS = torch.tensor(1.0)


def best_us(function: Callable[[], object], repetitions: int) -> float:
    return min(timeit.repeat(function, number=STEPS, repeat=repetitions)) / STEPS * 1e6


def step_of(machine: RerunStateMachine, batches: Iterator[object]) -> Callable[[], None]:
    """One iteration with nothing in it but the machine; a forward and backward pass would drown it."""

    def step() -> None:
        while machine.should_run_forward_backward(batches if isinstance(batches, RerunDataIterator) else None):
            next(batches)
            machine.validate_loss(LOSS)

    return step


def without_machine() -> Callable[[], None]:
    batches = itertools.repeat(BATCH)

    def step() -> None:
        for _ in (0,):
            next(batches)
            LOSS.item()

    return step


def normed() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(16)))


def cost_of(model: nn.Module | None, **settings: bool) -> Callable[[], None]:
    machine = RerunStateMachine(RerunSettings(**settings), model=model)
    return step_of(machine, RerunDataIterator(itertools.repeat(BATCH)))


def flag_on_gradients() -> Callable[[], bool]:
    """What looking at the reduced gradient costs a rank; DDP over one rank, whose gradients look the same."""
    path = Path(f"/tmp/slurmft-bench-rerun-{os.getpid()}")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(16, 16))
    model(BATCH[0]).sum().backward()
    agreement = ByGradients(model)
    return lambda: agreement.alarm(lambda: False)


def measure(repetitions: int) -> list[tuple[str, float, bool]]:
    torch.set_num_threads(1)
    plain = nn.Linear(16, 16)
    rows: list[tuple[str, Callable[[], object], bool]] = [
        ("the loop's own part: next(batches), loss.item()", without_machine(), False),
        ("with the machine, one process", cost_of(plain), True),
        ("... and spiky losses", cost_of(plain, check_for_spiky_loss=True), True),
        ("... and 16 BatchNorm layers, whose buffers are copied", cost_of(normed()), False),
        ("of it: torch's default_generator.get_state()", torch.default_generator.get_state, False),
        ("with DDP in addition: a look at one reduced gradient", flag_on_gradients(), False),
    ]
    found = [(what, best_us(function, repetitions), asked) for what, function, asked in rows]
    own = found[0][1]
    return [(what, us - own if asked else us, asked) for what, us, asked in found]


def report(rows: list[tuple[str, float, bool]]) -> str:
    lines = [
        "# The re-run state machine's cost",
        f"`{shlex.join(['python', 'bench/rerun', *sys.argv[1:]])}`, slurmft {slurmft.__version__}",
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}; best of {REPETITIONS} "
        f"times {STEPS} steps. On a CPU; nothing was measured on a GPU.",
        "## Host time while all is well",
    ]
    table = ["|  | microseconds per step | asked |  |", "|---|---|---|---|"]
    for what, us, asked in rows:
        verdict = ("hit" if us < TARGET_US else "**miss**") if asked else ""
        table.append(f"| {what} | {us:.2f} | {f'under {TARGET_US:.0f}' if asked else ''} | {verdict} |")
    remarks = (
        "The rows with a target are without the loop's own part. Collectives and waits for a device: none.\n\n"
        "More than a quarter of it is the copy of torch's random state, which a rerun must begin with. Python's and "
        "numpy's are copied only when something was drawn from them."
    )
    return "\n\n".join([*lines, "\n".join(table), remarks]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/rerun", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, help="file for the table (default: standard output)")
    args = parser.parse_args()
    text = report(measure(args.repetitions))
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
