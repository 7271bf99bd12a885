"""What the start of a run costs in processor time: its supervisor, its agents, and the process workers are forked from.

    python bench/starts --output bench/results/starts.md     # a minute

Processor time hardly depends on what else runs. Beside each the floor: the same imports by themselves, in an
interpreter that does nothing else; for the zygote without the collector, too, as no import can be left out of it.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import slurmft
from slurmft.config.sections import PRELOAD

ZYGOTE = """
import runpy, socket, sys
ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.close()  # it is ready, and told at once that its agent is gone
sys.argv = ["zygote", str(its.detach()), *{modules!r}]
runpy.run_module("slurmft.agent.zygote", run_name="__main__")
"""
IMPORTS = "import gc; gc.{state}able(); import importlib\nfor name in {modules!r}: importlib.import_module(name)"
VERB = (
    "import click, slurmft.cli.main as main; main.cli.get_command(click.Context(main.cli), 'run')\n"
    "from slurmft.system.processes import without_collections\nwith without_collections(): import {module}"
)
ROWS = {
    "the zygote, until it is ready": ZYGOTE.format(modules=PRELOAD),
    "- its imports, without the collector": IMPORTS.format(state="dis", modules=PRELOAD),
    "- its imports, as Python does them": IMPORTS.format(state="en", modules=PRELOAD),
    "- `import torch` alone, as Python does it": IMPORTS.format(state="en", modules=["torch"]),
    "an agent's imports": VERB.format(module="slurmft.agent.agent"),
    "the supervisor's imports": VERB.format(module="slurmft.supervisor.run"),
    "- those of submitit, pydantic, yaml, click and filelock": IMPORTS.format(
        state="en", modules=["submitit.slurm.slurm", "pydantic.main", "yaml", "click", "filelock"]
    ),
}


def processor_s(code: str) -> float:
    """User and system time of an interpreter that runs ``code``, and does not take its modules apart afterwards."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\nimport os\nos._exit(0)"], check=True, stdin=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/starts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    compileall.compile_dir(Path(slurmft.__file__).parent, quiet=2)  # as an installation does
    found: dict[str, list[float]] = {what: [] for what in ROWS}
    for _ in range(args.rounds):  # in turns: what else runs meets all of them
        for what, code in ROWS.items():
            found[what].append(processor_s(code))
    command = shlex.join(["python", "bench/starts", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, slurmft {slurmft.__version__}"
    lines = [
        "# The processor time of a start", "",
        f"`{command}` on {os.cpu_count()} cores, {platform.system()}, {versions}. Processes that wanted to run when it "
        f"ended: {os.getloadavg()[0]:.1f}. Of {args.rounds} rounds.", "",
        "| seconds of a core | least | median |", "|---|---|---|",
        *(f"| {what} | {min(values):.2f} | {statistics.median(values):.2f} |" for what, values in found.items()), "",
    ]  # fmt: skip
    text = "\n".join(lines)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
