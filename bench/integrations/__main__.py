"""What the adapters of frameworks cost in each training step.

python bench/integrations --output bench/results/integrations.md      # seconds; nothing else should run meanwhile

The calls of one step are made as the framework makes them, on a heartbeat page as the agent gives it, without the
training itself. CPU time, so that what else runs on the machine matters little.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

import slurmft
from slurmft.integrations.huggingface import SlurmftCallback
from slurmft.ipc.pages import PAGE_VARIABLE, Page

STEPS, REPEATS, LIMIT_US = 20_000, 9, 20.0


def huggingface(folder: Path, *callbacks: SlurmftCallback) -> Callable[[], None]:
    """A function that makes the Trainer's calls of STEPS steps."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=10**9, save_strategy="no", report_to="none", use_cpu=True
    )
    model = torch.nn.Linear(1, 1)
    handler = CallbackHandler(list(callbacks), model, None, None, None)
    state, control = TrainerState(max_steps=10**9), TrainerControl()
    handler.on_init_end(arguments, state, control)
    handler.on_train_begin(arguments, state, control)

    def steps() -> None:
        for _ in range(STEPS):
            handler.on_step_begin(arguments, state, control)
            handler.on_pre_optimizer_step(arguments, state, control)
            handler.on_optimizer_step(arguments, state, control)
            state.global_step += 1
            state.epoch = state.global_step / 1e7
            handler.on_step_end(arguments, state, control)

    return steps


def microseconds(steps: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        steps()
        found.append(1e6 * (time.process_time() - began) / STEPS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = Page.create(folder / "page", rank=0, generation=1)
        os.environ[PAGE_VARIABLE] = str(folder / "page")
        without = statistics.median(microseconds(huggingface(folder / "without")))
        found = [each - without for each in microseconds(huggingface(folder / "with", SlurmftCallback()))]
        page.close()
    spread = f"{statistics.median(found):.1f} ({min(found):.1f} - {max(found):.1f})"
    text = f"""# What the adapters of frameworks cost

`python bench/integrations`: slurmft {slurmft.__version__}, Python {platform.python_version()}, torch
{torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} cores; load average
{os.getloadavg()[0]:.0f} while it ran. CPU time of the calls of one training step, less that of the same calls without
the callback; median of {REPEATS} times {STEPS} steps, in brackets minimum and maximum.

| | microseconds in each step | limit |
|---|---|---|
| Hugging Face's Trainer, `SlurmftCallback` | {spread} | {LIMIT_US:.0f} |
"""
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    if statistics.median(found) > LIMIT_US:
        raise SystemExit(f"more than {LIMIT_US:.0f} us")


if __name__ == "__main__":
    main()
