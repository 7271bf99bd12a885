"""Batch scripts and command lines that exist already: ``slurmft sbatch``, what it launches in the job, ``convert`` and
``ft-launch``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmft.cli.main import say, say_block
from slurmft.errors import UsageError

if TYPE_CHECKING:
    from slurmft.operations.script import Ranks

# --- ``slurmft sbatch``: the batch script that one has, submitted as it is; and what it launches, in the job ---

# no -h: click would find it in sbatch's -Jhello
_AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}


@click.command(context_settings=_AS_GIVEN)
@click.option("--again", is_flag=True, help="Repeat launches that have finished in an earlier start of the job.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set one key of the configuration of each run, such as checkpoint.interval_steps=50.")  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF SBATCH] SCRIPT [ARGUMENTS]...")
def sbatch(*, again: bool, overrides: tuple[str, ...], words: tuple[str, ...]) -> int:
    """Submit the batch script that you have, as sbatch would; what it launches is supervised.

    Takes what sbatch takes: its options, #SBATCH lines and variables, --wrap, a script from standard input. Only where
    you set nothing, --requeue, --open-mode=append and --signal=USR2@120 are added. The options below come first.

    In the job the script runs as it is. A launch that trains is restarted where ranks or nodes fail, and goes on
    through the queue: torchrun, ft_launcher, python -m torch.distributed.run, accelerate launch, deepspeed, and srun
    where its command runs a Python program. SLURMFT=off in front of a launch, or #SLURMFT off above it, leaves it
    alone; SLURMFT=train and #SLURMFT train supervise any other command of these names, or of python.
    """
    from slurmft.operations.script import submit_script

    return submit_script(
        words, os.environ, overrides=overrides, again=again, tell=lambda line: say(f"slurmft: {line}", err=True)
    )


@click.command(hidden=True, context_settings=_AS_GIVEN)
@click.option("--last-word", is_flag=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def launch(*, last_word: bool, words: tuple[str, ...]) -> int:
    """Stand for a launcher of a batch script (called by the functions of slurmft/launchers)."""
    from slurmft.operations import script

    def tell(line: str) -> None:
        say(f"slurmft: {line}", err=True)

    if last_word:
        if word := script.last_word(os.environ):
            tell(word)
        return 0
    return script.launch(words[0], words[1:], os.environ, read_ranks=_ranks, tell=tell)


def _ranks(words: Sequence[str]) -> Ranks:
    from slurmft.compat import neighbours
    from slurmft.operations.script import Ranks

    found = neighbours.parse(words)
    return Ranks(settings=found.settings, remarks=found.remarks)


# --- ``slurmft convert``: what there is in its place ---


@click.command(context_settings=_AS_GIVEN)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT]")
def convert(*, words: tuple[str, ...]) -> int:
    """Say what to use instead: a batch script is not converted any more, it is run as it is."""
    script = words[0] if words else "job.sh"
    raise UsageError("batch scripts are not converted to configurations any more: they run as they are",
                     hint=f"slurmft sbatch {script}; slurmft init writes a configuration")  # fmt: skip


# --- ``slurmft ft-launch``: a command line of ``ft_launcher`` or torchrun becomes a run ---


@click.command(
    name="ft-launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[LAUNCHER OPTIONS] SCRIPT [ARGUMENTS]...")
@click.option("--run-folder", type=click.Path(path_type=Path),
              help="Folder of the run; default: runs/ and the --rdzv-id, or the script's name.")  # fmt: skip
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default=None,
              help="Where to run; auto: Slurm where its commands are, else this machine. "
              "Default: local with --standalone, else auto.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set one key, such as slurm.time=30.")
@click.option("--print-config", is_flag=True, help="Print the configuration for slurmft submit, and change nothing.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
def ft_launch(
    *, words: tuple[str, ...], run_folder: Path | None, cluster: str | None, overrides: tuple[str, ...],
    print_config: bool, dry_run: bool, wait: bool,
) -> int:  # fmt: skip
    """Submit a run by the command line of ft_launcher or torchrun.

    Called once, and not on every node. Takes torchrun's options (--nnodes, --nproc-per-node, --max-restarts, -m, ...)
    and --ft-* or --ft-param-* of nvidia-resiliency-ext behind the options below. Options without a counterpart are
    named.
    """
    from slurmft.cli.submit import submit_run  # not for a launch, whose training waits for it
    from slurmft.compat import neighbours
    from slurmft.config.run import from_values
    from slurmft.scheduler.slurm import known_options

    if "SLURM_PROCID" in os.environ:
        raise UsageError("this is inside of a job, where each task would submit a run of its own",
                         hint="call slurmft ft-launch once, where you would call sbatch")  # fmt: skip
    launch = neighbours.parse(words)
    for remark in launch.remarks:
        if not remark.startswith("FaultToleranceConfig"):  # which has said it
            say(f"ft-launch: {remark}", err=True)
    values = {**launch.settings, **({"run_folder": str(run_folder)} if run_folder is not None else {})}
    settings = from_values(values, overrides, source="ft-launch", known_here=known_options)
    if print_config:
        say_block(settings.as_yaml())
        return 0
    return submit_run(
        settings, (), dry_run=dry_run, strict=False, wait=wait,
        cluster=cluster or ("local" if launch.standalone else "auto"),
    )  # fmt: skip
