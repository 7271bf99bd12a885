"""The verb ``advise``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import click

from slurmft import config as configuration
from slurmft.cli.reading import printable

WIDTH = 110
NAME_WIDTH = 13


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one key of the configuration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def advise(*, config: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Recommend the signal lead and the checkpoint interval of CONFIG, from what was measured.

    The run's own folder tells how long steps and saves took and how often it failed; where it has none yet, runs of
    the same workload beside it do. Slurm is asked for its grace where there is one; nothing is changed.
    """
    from slurmft.launch.advising import counsel

    found = counsel(configuration.load(config, overrides))
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return 0
    for name, text in found.lines():
        first, *rest = textwrap.wrap(printable(text), WIDTH - NAME_WIDTH) or [""]
        click.echo(f"{name:<{NAME_WIDTH}}{first}")
        for line in rest:
            click.echo(f"{'':<{NAME_WIDTH}}{line}")
    return 0
