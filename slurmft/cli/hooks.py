"""``slurmft hooks``: Slurm's hooks on the nodes and on the controller."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

import slurmft
from slurmft.cli.main import Verbs, say, say_block
from slurmft.errors import UsageError
from slurmft.health import hooks as health_hooks
from slurmft.health.hooks import HOOKS, slurm_conf_lines


@click.group(cls=Verbs)
def hooks() -> None:
    """Slurm's hooks: show the lines for slurm.conf."""


@hooks.command()
def show() -> int:
    """Print the lines for slurm.conf, for this installation."""
    say_block(slurm_conf_lines(Path(slurmft.__file__).resolve().parents[1] / "bin").rstrip("\n"))
    return 0


@hooks.command(hidden=True)
@click.argument("name")
@click.argument("job", default="")
def run(*, name: str, job: str) -> int:
    """Run one of the hooks (called by bin/slurmft-hook)."""
    # slurmctld starts its scripts with all signals blocked, and processes that we start would inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if name == "follow-requeue":
        say(_line(health_hooks.follow_quietly(job)))
        return 0
    if name not in HOOKS:
        raise UsageError(f"there is no hook {name[:40]!r}", hint=f"hooks: {', '.join(HOOKS)}")
    outcome = HOOKS[name](os.environ)
    say(_line(outcome.words))
    return outcome.exit_code


def _line(words: str) -> str:
    """For the system log: what a probe said, as one line of ASCII."""
    return " ".join(words.split()).encode("ascii", "backslashreplace").decode()
