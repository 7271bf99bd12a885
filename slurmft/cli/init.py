"""``slurmft init`` and ``slurmft examples``: a first configuration, and files to copy from."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

import slurmft.examples
from slurmft.cli.arguments import runs_root
from slurmft.cli.main import say, say_block
from slurmft.errors import UsageError
from slurmft.system.files import mode_of_shown_files, read_text, replace_atomically

EXAMPLES = Path(slurmft.examples.__path__[0])
_PLACES = ("*.py", "*.yaml", "sbatch/*.*", "configs/*.*", "configs/*/*.*")

# --- ``slurmft init`` ---

_PYTHON = "python is the one that your shell finds; another one is named by its path"


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGUMENTS]...]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; default: NAME.yaml here.")
@click.option("--run-folder", help="Folder of the run, whose last part is its name; default: one below SLURMFT_RUNS.")
@click.option("--nodes", type=click.IntRange(1, 100_000), help="Nodes; default: 1.")
@click.option("--gpus", type=click.IntRange(0, 1024), help="GPUs of each node, with a worker each; default: 0, one "
              "worker on the CPU.")  # fmt: skip
@click.option("--partition", help="Slurm's partition; default: the cluster's own.")
@click.option("--time", "limit", help="Time limit of one job, as sbatch takes it; the run may need many: 4:00:00.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing: what no option says is the default.")
def init(
    *, command: tuple[str, ...], output: Path | None, run_folder: str | None, nodes: int | None, gpus: int | None,
    partition: str | None, limit: str | None, yes: bool,
) -> int:  # fmt: skip
    """Write a short configuration for a script, to be changed by hand and submitted.

    On a terminal it asks for what no option says. A file that is there is not replaced.
    """
    from slurmft.config.base import parsed
    from slurmft.config.run import from_values

    asks = sys.stdin.isatty() and not yes
    if not command:
        if not asks:
            raise UsageError("which script?", hint="slurmft init --gpus 8 train.py --steps 1000")
        command = _words(click.prompt("script, with its arguments"))
    stem = Path(next((word for word in command if word.endswith(".py")), command[0])).stem
    name = re.sub(r"[^\w.-]+", "-", stem).lstrip("-.") or "run"
    if command[0].endswith(".py"):
        command = ("python", *command)
    given: dict[str, tuple[Any, str, Any]] = {
        "nodes": (nodes, "nodes", 1),
        "gpus": (gpus, "GPUs of each node", 0),
        "partition": (partition, "partition (empty: the cluster's own)", ""),
        "limit": (limit, "time limit of one job", "4:00:00"),
        "run_folder": (run_folder, "folder of the run, which all nodes see", str(runs_root().absolute() / name)),
    }
    answers: dict[str, Any] = {}
    for key, (value, question, default) in given.items():
        asked = click.prompt(question, default=default) if asks and value is None else default
        answers[key] = asked if value is None else value
    text = _configuration(command, **answers)
    from_values(parsed(text, of="the configuration"), source="slurmft init")  # refuses what would not be submitted
    path = output or Path(f"{name}.yaml")
    if os.path.lexists(path):
        raise UsageError(f"there is {path} already", hint="name another file with --output, or move it away")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="name another file with --output, or make it")
    replace_atomically(path, text, mode=mode_of_shown_files(), durable=False)
    word = shlex.quote(str(path))
    say(f"wrote {path}; next: slurmft doctor {word}, then slurmft submit {word}")
    return 0


def _words(line: str) -> tuple[str, ...]:
    """As a shell splits them."""
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise UsageError(f"{line!r} is no command: {error}", hint="close the quotes") from error


def _configuration(
    command: tuple[str, ...], *, nodes: int, gpus: int, partition: str, limit: str, run_folder: str
) -> str:
    words = ", ".join(json.dumps(word) for word in command)
    slurm = {"partition": partition, "time": limit, "gpus_per_node": gpus}
    options = "\n".join(f"  {key}: {json.dumps(value)}" for key, value in slurm.items() if value)
    return f"""\
# All keys, each with its default: slurmft examples reference.yaml

command: [{words}]  # {_PYTHON}
run_folder: {json.dumps(run_folder)}  # on a filesystem that all nodes share; its last part is the run's name
nodes: {nodes}
nproc_per_node: {gpus or 1}  # workers of each node{", one for each GPU" if gpus else ""}

checkpoint:
  interval_steps: 500  # for scripts that save with slurmft; the others save as they do without it

slurm:  # sbatch's long options, with _ for -
{options}
"""


# --- ``slurmft examples`` ---


@click.command()
@click.argument("name", required=False)
@click.option("--path", "only_path", is_flag=True, help="Print where it lies, instead of what is in it.")
def examples(*, name: str | None, only_path: bool) -> int:
    """Print the file NAME that comes with slurmft, or list all: configurations, alerts, dashboards, a batch script."""
    files = {path.name: path for place in _PLACES for path in sorted(EXAMPLES.glob(place)) if path.stem != "__init__"}
    if name is None:
        for each, path in sorted(files.items()):
            say(f"{each:<22} {path}" if only_path else f"{each:<22} {_purpose(path)}")
        return 0
    if name not in files:
        from slurmft.policy.plain_values import did_you_mean, shown

        raise UsageError(f"no file {shown(name)} comes with slurmft{did_you_mean(name, sorted(files))}",
                         hint="slurmft examples lists them")  # fmt: skip
    if only_path:
        say(str(files[name]))
    else:
        say_block(read_text(files[name]).removesuffix("\n"))
    return 0


def _purpose(path: Path) -> str:
    """The first sentence of its first comment, or of its docstring."""
    if path.suffix == ".json":
        return "the schema of a configuration, for editors" if path.stem == "schema" else "a dashboard for Grafana"
    lines = [line for line in read_text(path).splitlines() if not line.startswith(("#!", "# yaml-language"))]
    words = (line.strip('#" ').removeprefix("Purpose: ") for line in lines)
    found = next(filter(None, words), "")
    return re.split(r"[.:](?: |$)|, so that", found)[0]
