"""``slurmft submit``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from slurmft.cli.main import say, say_block
from slurmft.config.run import RunConfig
from slurmft.errors import UsageError
from slurmft.operations import submit as submitting
from slurmft.operations.run_configuration import load_given
from slurmft.system.processes import who


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be submitted, and change nothing.")
@click.option("--strict", is_flag=True, help="Refuse to submit when a stop would not have the time for its save.")
@click.option("--unchecked", is_flag=True, help="Do not look here for the command's program, script and packages: only "
              "the nodes have them.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Show progress until the run ends; exit with the run's exit code.")
@click.option("--cluster", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True,
              help="Where to run; auto: Slurm where its commands are, else this machine.")  # fmt: skip
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key, such as slurm.time=30.")
@click.option("--data", help="Text file or folder to train on: added to the command as --data.")
def submit(
    *, config: Path, sbatch_options: tuple[str, ...], dry_run: bool, strict: bool, wait: bool, cluster: str,
    overrides: tuple[str, ...], data: str | None, unchecked: bool = False,
) -> int:  # fmt: skip
    """Submit a run, or continue one that has stopped. Options behind -- go to sbatch."""
    settings = load_given(config, overrides)
    if data is not None:
        if not Path(data).exists():
            raise UsageError(f"--data: there is no {data}")
        settings = settings.model_copy(update={"command": (*settings.command, "--data", str(Path(data).absolute()))})
    return submit_run(settings, sbatch_options, dry_run=dry_run, strict=strict, wait=wait, cluster=cluster,
                      unchecked=unchecked)  # fmt: skip


def submit_run(
    settings: RunConfig, sbatch_options: tuple[str, ...], *, dry_run: bool, strict: bool, wait: bool, cluster: str,
    unchecked: bool = False,
) -> int:  # fmt: skip
    """Submit the run that ``settings`` describe, as the options of ``slurmft submit`` say; returns the exit code."""

    def tell(line: str) -> None:
        say(line, err=True)

    if dry_run:
        say_block(submitting.plan(settings, sbatch_options, strict=strict, cluster=cluster, tell=tell,
                                  unchecked=unchecked))  # fmt: skip
        return 0
    made = submitting.submit_run(settings, sbatch_options, strict=strict, cluster=cluster, who=who(),
                                 command=" ".join(sys.argv), tell=tell, unchecked=unchecked)  # fmt: skip
    is_slurm = made.where == "slurm"
    say(f"submitted {settings.name} as job {made.job}" if is_slurm else f"started {settings.name} ({made.job})")
    say(f"run folder: {made.run.path}")
    if wait:
        from slurmft.cli.watch import follow

        return follow(made.run, told=made.before, stop_on_interrupt=not is_slurm)
    say(f"watch it with: slurmft status {made.run.path} --watch", err=True)
    return 0
