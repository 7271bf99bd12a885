"""``slurmft ft-launch``: a command line of ``ft_launcher`` or torchrun becomes a run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slurmft.cli.main import say, say_block
from slurmft.cli.submit import submit_run
from slurmft.compat import converters
from slurmft.config.run import from_values
from slurmft.errors import UsageError
from slurmft.scheduler.slurm import known_options


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
    if "SLURM_PROCID" in os.environ:
        raise UsageError("this is inside of a job, where each task would submit a run of its own",
                         hint="call slurmft ft-launch once, where you would call sbatch")  # fmt: skip
    launch = converters.parse(words)
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
