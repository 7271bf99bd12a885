"""What starts cost in processor time: of a run's supervisor, agents and the process workers are forked from; of verbs.

    python bench/starts --output bench/results/starts.md     # a minute
    python bench/starts --against v0.1                       # beside that revision, in turns

Processor time hardly depends on what else runs. Beside each the floor: the same imports by themselves, in an
interpreter that does nothing else; for the zygote without the collector, too, as no import can be left out of it.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
VERBS = ("--help", "status NO-RUN", "stop NO-RUN", "explain NO-RUN", "submit --dry-run configs/byte_gpt.yaml")
REPOSITORY = Path(slurmft.__file__).parent.parent


def processor_s(what: str, root: Path) -> float:
    """User and system time of what this row is about, with the code below ``root``.

    Code does not take its modules apart at its end; a verb does what it does for everybody.
    """
    code = f"{ROWS.get(what)}\nimport os\nos._exit(0)"
    argv = ["-c", code] if what in ROWS else ["-m", *shlex.split(what.strip("`"))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-P", *argv], check=what in ROWS, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL, stdout=None if what in ROWS else subprocess.DEVNULL,
        stderr=None if what in ROWS else subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextlib.contextmanager
def at_revision(revision: str) -> Iterator[Path]:
    """Its files, for as long as this lasts."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "then"
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), revision], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/starts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", metavar="REVISION", help="of git; measured in turns with what is here")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [*ROWS, *(f"`slurmft {verb}`" for verb in VERBS)]
    with at_revision(args.against) if args.against else contextlib.nullcontext() as then:
        roots = [REPOSITORY, *([then] if then else [])]
        for root in roots:
            compileall.compile_dir(root / "slurmft", quiet=2)  # as an installation does
        found: dict[tuple[str, Path], list[float]] = {(what, root): [] for what in rows for root in roots}
        for _ in range(args.rounds):  # in turns: what else runs meets all of them
            for (what, root), values in found.items():
                values.append(processor_s(what, root))
    command = shlex.join(["python", "bench/starts", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, slurmft {slurmft.__version__}"
    names = ["least", "median", *([f"least at {args.against}", "median", "ratio of medians"] if then else [])]
    lines = [
        "# The processor time of a start", "",
        f"`{command}` on {os.cpu_count()} cores, {platform.system()}, {versions}. Processes that wanted to run when it "
        f"ended: {os.getloadavg()[0]:.1f}. Of {args.rounds} rounds.", "",
        f"| seconds of a core | {' | '.join(names)} |", f"|---|{'---|' * len(names)}",
    ]  # fmt: skip
    for what in rows:
        medians = [statistics.median(found[what, root]) for root in roots]
        cells = [f"{number:.2f}" for root, median in zip(roots, medians, strict=True)
                 for number in (min(found[what, root]), median)]  # fmt: skip
        lines.append(f"| {what} | {' | '.join([*cells, *([f'{medians[0] / medians[1]:.2f}'] if then else [])])} |")
    text = "\n".join([*lines, ""])
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
