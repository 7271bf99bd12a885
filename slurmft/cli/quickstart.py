"""``slurmft quickstart``."""

from __future__ import annotations

import importlib.util
from datetime import datetime
from pathlib import Path

import click

import slurmft.examples
from slurmft.cli import submit
from slurmft.cli.output import say
from slurmft.errors import UsageError

CONFIG = Path(slurmft.examples.__path__[0]) / "quickstart.yaml"


@click.command()
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="local", show_default=True,
              help="Where to train; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--data", help="Text file or folder to train on; default: Python's own standard library.")
@click.pass_context
def quickstart(context: click.Context, *, cluster: str, data: str | None) -> int:
    """Train a small GPT, with live progress: about a minute, no Slurm and no GPU needed.

    The run's folder is made below runs/ in the current folder. The configuration is one to copy from.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the quickstart trains with torch, which is not installed here",
                         hint="pip install 'slurmft[train]'")  # fmt: skip
    folder = Path("runs") / f"quickstart-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    say(f"slurmft submit {CONFIG} --cluster {cluster} --wait --set run_folder={folder}", err=True)
    code: int = context.invoke(
        submit.submit, config=CONFIG, sbatch_options=(), dry_run=False, strict=False, wait=True, cluster=cluster,
        overrides=(f"run_folder={folder}",), data=data,
    )  # fmt: skip
    return code
